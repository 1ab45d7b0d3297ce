use proptest::prelude::*;

use super::*;

#[test]
fn devices_have_numbers_and_names() {
    for (name, number) in [
        ("xvda", 51712),
        ("xvdb", 51728),
        ("xvdb1", 51729),
        ("xvdp15", 202 << 8 | 255),
        ("xvda16", 1 << 28 | 16),
        ("xvdq", 1 << 28 | 16 << 8),
        ("xvdq255", 1 << 28 | 16 << 8 | 255),
        ("xvdz", 1 << 28 | 25 << 8),
        ("xvdaa", 1 << 28 | 26 << 8),
        ("xvdaz", 1 << 28 | 51 << 8),
        ("xvdba", 1 << 28 | 52 << 8),
        ("xvdzz", 1 << 28 | 701 << 8),
        ("xvdaaa", 1 << 28 | 702 << 8),
        ("sda", 8 << 8),
        ("sdb3", 8 << 8 | 1 << 4 | 3),
        ("sdp15", 8 << 8 | 255),
        ("hda", 3 << 8),
        ("hdb63", 3 << 8 | 1 << 6 | 63),
        ("hdc", 22 << 8),
        ("hdd1", 22 << 8 | 1 << 6 | 1),
    ] {
        assert_eq!(parse_vdev(name), Ok(number), "{name}");
        assert_eq!(vdev_name(number).as_deref(), Some(name), "{number:#x}");
    }
    for (other, number) in [
        ("51712", 51712),
        ("0xca00", 51712),
        ("0", 0),
        ("4294967295", u32::MAX),
        ("d0p0", 51712),
        ("d26p3", 1 << 28 | 26 << 8 | 3),
    ] {
        assert_eq!(parse_vdev(other), Ok(number), "{other}");
    }
    for bad in [
        "",
        "xvd",
        "xvda0",
        "xvda01",
        "xvda256",
        "xvda-1",
        "xvdA",
        "xvd1",
        "xvda1b",
        "sdq",
        "sda16",
        "hde",
        "hda64",
        "vda",
        "0x",
        "0x+1",
        "-1",
        "+1",
        "4294967296",
        "0x100000000",
        "51712 ",
        "d0",
        "dp",
        "d1p",
        "d+1p1",
        "xvdaaaaaaaaaaaaaaaaaaaa",
        "d1048576p0",
    ] {
        assert!(parse_vdev(bad).is_err(), "{bad}");
    }
    assert_eq!(parse_vdev("d1048575p255"), Ok(1 << 28 | 0xf_ffff << 8 | 255));
    for none in [0, 8 << 8 | 0x10_0000, 3 << 8 | 128, 22 << 8 | 200, 1 << 29, 1 << 28 | 1 << 29, u32::MAX] {
        assert_eq!(vdev_name(none), None, "{none:#x}");
    }
    let text = parse_vdev("vda").unwrap_err().to_string();
    assert!(text.starts_with("vdev: found \"vda\", expected xvda"), "{text}");
}

#[test]
fn invalid_states_are_unknown() {
    for (number, state) in XenbusState::ALL.into_iter().enumerate() {
        assert_eq!(XenbusState::parse(Some(&number.to_string())), state);
        assert_eq!(state.to_string(), number.to_string());
        assert_eq!(state as usize, number);
    }
    for odd in ["", "9", "-1", "4x", "0x4", "four", "99999999999999999999999"] {
        assert_eq!(XenbusState::parse(Some(odd)), XenbusState::Unknown, "{odd}");
    }
    assert_eq!(XenbusState::parse(None), XenbusState::Unknown);
    assert_eq!(XenbusState::parse(Some("4\0")), XenbusState::Connected);
}

#[test]
fn numbers_are_decimal_and_bounded() {
    for (text, value) in [("0", 0), ("7", 7), ("007", 7), (" 7\n", 7), ("7\0", 7), ("16", 16)] {
        assert_eq!(parse_number("k", text, 16), Ok(value), "{text:?}");
    }
    assert_eq!(parse_number("k", "18446744073709551615", u64::MAX), Ok(u64::MAX));
    for bad in ["", " ", "17", "-1", "+1", "0x1", "1e1", "1.0", "1 1", "18446744073709551616", "٣"] {
        assert!(parse_number("k", bad, 16).is_err(), "{bad:?}");
    }
    let text = parse_number("ring-ref", &"9".repeat(4000), 16).unwrap_err().to_string();
    assert!(text.starts_with("ring-ref: found \"999") && text.len() < 200, "{text}");
    assert_eq!(parse_number_or("k", None, 16, 3), Ok(3));
    assert_eq!(parse_number_or("k", Some("4"), 16, 3), Ok(4));
    assert!(parse_number_or("k", Some("x"), 16, 3).is_err());
    assert_eq!(
        [None, Some("0"), Some("1"), Some("2")].map(|value| parse_flag("f", value)),
        [Ok(false), Ok(false), Ok(true), Ok(true)]
    );
    assert!(parse_flag("f", Some("yes")).is_err());
}

#[test]
fn paths_are_built_and_parsed() {
    let (own, front) = (DomainId(0), DomainId(7));
    assert_eq!(frontend_path(front, 51712), "/local/domain/7/device/vbd/51712");
    assert_eq!(domain_path(front), "/local/domain/7");
    assert_eq!(backend_error_path(own, "vbd", front, 51712), "/local/domain/0/error/backend/vbd/7/51712/error");
    assert_eq!(frontend_error_path(front, 51712), "/local/domain/7/error/device/vbd/51712/error");
    let root = backends_path(own, "qdisk");
    let device = backend_path(own, "qdisk", front, 51712);
    assert_eq!(device, format!("{root}/7/51712"));
    let parse =
        |path: &str| BackendPath::parse(path, &root).map(|path| (path.front.0, path.devid, path.key.to_owned()));
    assert_eq!(parse(&device), Some((7, Some(51712), String::new())));
    assert_eq!(parse(&format!("{device}/state")), Some((7, Some(51712), "state".to_owned())));
    assert_eq!(parse(&format!("{device}/a/b")), Some((7, Some(51712), "a/b".to_owned())));
    assert_eq!(parse(&format!("{root}/7")), Some((7, None, String::new())));
    for none in ["", "/", "/x", "/7/x", "/-7/1", "/65536/1", "x/7/1", "/7/4294967296", "/07/1", "//1"] {
        assert_eq!(parse(&format!("{root}{none}")), None, "{none}");
    }
    assert_eq!(parse("/local/domain/0/backend/other/7/51712"), None);
    assert_eq!((keys::queue(3), keys::ring_ref(15)), ("queue-3".to_owned(), "ring-ref15".to_owned()));
}

proptest! {
    #[test]
    fn a_name_parses_to_its_number(disk in 0..=DISK_MAX, part in 0..256u32) {
        let number = xvd(disk, part).unwrap();
        prop_assert_eq!(parse_vdev(&vdev_name(number).unwrap()), Ok(number));
    }

    #[test]
    fn any_text_is_parsed_without_panic(text in ".{0,64}", number_of in any::<u32>()) {
        let _ = parse_vdev(&text);
        let _ = XenbusState::parse(Some(&text));
        let _ = BackendPath::parse(&text, "/");
        if let Some(name) = vdev_name(number_of) {
            prop_assert!(parse_vdev(&name).is_ok());
        }
        if let Ok(found) = parse_number("k", &text, 1000) {
            prop_assert!(found <= 1000);
        }
    }
}
