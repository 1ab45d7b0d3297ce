//! The keys of limits: accepted, printed and refused values, in the configuration and as a change.

use mqblk_core::settings::Settings;
use mqblk_engine::{Burst, IoLimit, IoLimits, LimitKind};

use super::{LimitGroups, limit_pairs, take_limits};
use crate::interfaces::INTERFACES;
use crate::resolve::tests::resolve_fake;
use crate::{file, key_values, print};

fn take(text: &str, current: IoLimits) -> Result<IoLimits, String> {
    let mut settings = key_values::parse("disk \"a\"", text).unwrap();
    let limits = take_limits(&mut settings, current).map_err(|error| error.to_string())?;
    settings.finish().map_err(|error| error.to_string())?;
    Ok(limits)
}

fn printed(limits: &IoLimits) -> String {
    let pairs: Vec<String> = limit_pairs(limits).iter().map(|(key, value)| format!("{key}={value}")).collect();
    pairs.join(",").replace('"', "")
}

#[test]
fn limits_are_printed_as_they_are_given() {
    for text in [
        "iops=1000",
        "iops=1,iops-max=2,iops-burst-s=86400",
        "iops-read=5,iops-write=100000000",
        "bandwidth=64M,bandwidth-max=1G,bandwidth-burst-s=60",
        "bandwidth-read=1,bandwidth-write=128G",
        "iops=1,iops-read=2,iops-write=3,bandwidth=4,bandwidth-read=5,bandwidth-write=6",
    ] {
        assert_eq!(printed(&take(text, IoLimits::default()).unwrap()), text);
    }
    assert_eq!(
        printed(&take("iops=10,iops-max=20", IoLimits::default()).unwrap()),
        "iops=10,iops-max=20,iops-burst-s=1"
    );
    for text in ["iops=off", "iops=0", "bandwidth=off,bandwidth-max=off", "bandwidth=0"] {
        assert!(take(text, IoLimits::default()).unwrap().is_empty(), "{text}");
    }
}

#[test]
fn each_key_sets_its_own_limit() {
    for (key, kind) in [
        ("iops", LimitKind::Iops),
        ("iops-read", LimitKind::IopsRead),
        ("iops-write", LimitKind::IopsWrite),
        ("bandwidth", LimitKind::Bandwidth),
        ("bandwidth-read", LimitKind::BandwidthRead),
        ("bandwidth-write", LimitKind::BandwidthWrite),
    ] {
        let limits = take(&format!("{key}=5,{key}-max=7,{key}-burst-s=9"), IoLimits::default()).unwrap();
        let limit = IoLimit { rate: 5, burst: Some(Burst { rate: 7, seconds: 9 }) };
        assert_eq!(limits.iter().collect::<Vec<_>>(), [(kind, limit)]);
    }
}

#[test]
fn wrong_limits_are_refused() {
    const IOPS: &str = "requests a second, a whole number from 1 to 100000000, or off";
    const BYTES: &str = "bytes a second such as 500K, 64M or 1G, up to 128G, or off";
    for (text, want) in [
        ("iops=ten", format!("iops: found \"ten\", expected {IOPS}")),
        ("iops=-1", format!("iops: found \"-1\", expected {IOPS}")),
        ("iops=1.5", format!("iops: found \"1.5\", expected {IOPS}")),
        ("iops=100000001", format!("iops: found \"100000001\", expected {IOPS}")),
        ("iops=99999999999999999999", format!("iops: found \"99999999999999999999\", expected {IOPS}")),
        ("bandwidth=fast", format!("bandwidth: found \"fast\", expected {BYTES}")),
        ("bandwidth-read=129G", format!("bandwidth-read: found \"129G\", expected {BYTES}")),
        ("iops=10,iops-max=10", "iops-max: found 10, expected more than iops (10), or off".to_owned()),
        ("iops=10,iops-max=9,iops-burst-s=2", "iops-max: found 9, expected more than iops (10), or off".to_owned()),
        ("iops-max=10", "iops-max: found 10, expected iops with it".to_owned()),
        ("iops=off,iops-max=10", "iops-max: found 10, expected iops with it".to_owned()),
        ("iops-burst-s=10", "iops-burst-s: found 10, expected iops with it".to_owned()),
        ("iops=1,iops-burst-s=10", "iops-burst-s: found 10, expected iops-max with it".to_owned()),
        (
            "iops=1,iops-max=2,iops-burst-s=0",
            "iops-burst-s: found \"0\", expected a whole number from 1 to 86400".to_owned(),
        ),
    ] {
        assert_eq!(take(text, IoLimits::default()), Err(format!("disk \"a\": {want}")), "{text}");
    }
}

#[test]
fn a_change_keeps_what_it_does_not_name() {
    let before = take("iops=100,iops-max=200,iops-burst-s=7,bandwidth=1M", IoLimits::default()).unwrap();
    for (change, want) in [
        ("iops=150", "iops=150,iops-max=200,iops-burst-s=7,bandwidth=1M"),
        ("iops-max=300", "iops=100,iops-max=300,iops-burst-s=7,bandwidth=1M"),
        ("iops-burst-s=9", "iops=100,iops-max=200,iops-burst-s=9,bandwidth=1M"),
        ("iops-max=off", "iops=100,bandwidth=1M"),
        ("iops=off", "bandwidth=1M"),
        ("iops=off,bandwidth=off,iops-read=3", "iops-read=3"),
        ("iops=500,iops-max=off", "iops=500,bandwidth=1M"),
    ] {
        assert_eq!(printed(&take(change, before).unwrap()), want, "{change}");
    }
    assert_eq!(
        take("iops=200", before).unwrap_err(),
        "disk \"a\": iops-max: found 200, as set before, expected more than iops (200), or off"
    );
}

const FILE: &str = "[[disk]]\nid = 'a'\npath = '/a'\nsocket = '/a.s'\nlimit-group = 'gold'\niops = 10\n\
    [[disk]]\nid = 'x'\npath = '/x'\nsocket = '/x.s'\nbandwidth = '1M'\n\
    [[controller]]\nid = 'c'\nsocket = '/c.s'\n[[controller.lun]]\npath = '/l'\nlimit-group = 'gold'\niops-write = 7\n\
    [[limit-group]]\nname = 'gold'\niops = 1000\nbandwidth = '64M'\n[[limit-group]]\nname = 'empty'\n";

#[test]
fn a_configuration_with_limits_is_printed_so_that_it_parses_back() {
    let config = resolve_fake(file::parse("f", FILE, INTERFACES).unwrap()).unwrap_or_else(|error| panic!("{error}"));
    let text = print::to_toml(&config);
    for line in
        ["[[limit-group]]\nname = \"gold\"\niops = 1000\nbandwidth = \"64M\"\n", "[[limit-group]]\nname = \"empty\"\n"]
    {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(text.matches("limit-group = \"gold\"").count(), 2, "{text}");
    assert!(text.contains("iops = 10\n") && text.contains("iops-write = 7\n") && text.contains("bandwidth = \"1M\"\n"));
    let again = resolve_fake(file::parse("f", &text, INTERFACES).unwrap()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(print::to_toml(&again), text);
}

#[test]
fn wrong_groups_are_refused() {
    let disk = "[[disk]]\npath = '/a'\nsocket = '/a.s'\n";
    for (text, want) in [
        (
            format!("{disk}limit-group = 'gold'"),
            "f: disk \"a\": limit-group: found \"gold\", expected a --limit-group or [[limit-group]], of which there is none",
        ),
        (
            format!("{disk}limit-group = 'gold'\n[[limit-group]]\nname = 'silver'\n[[limit-group]]\nname = 'iron'"),
            "f: disk \"a\": limit-group: found \"gold\", expected one of silver, iron",
        ),
        (
            format!("{disk}[[limit-group]]\niops = 1"),
            "f: limit-group #1: name: found nothing, expected the name that disks have as their limit-group",
        ),
        (
            format!("{disk}[[limit-group]]\nname = 'a b'"),
            "f: limit-group #1: name: found \"a b\", expected 1 to 64 letters, digits, dots, dashes and underscores, with a letter or digit first",
        ),
        (
            format!("{disk}[[limit-group]]\nname = 'off'"),
            "f: limit-group #1: name: found \"off\", expected another name: limit-group=off is no group",
        ),
        (
            format!("{disk}[[limit-group]]\nname = 'g'\n[[limit-group]]\nname = 'g'"),
            "f: limit-group #2: name: found \"g\", which another group has, expected a name of its own",
        ),
        (
            format!("{disk}limit-group = 5"),
            "f: disk \"a\": limit-group: found \"5\", expected a --limit-group or [[limit-group]], of which there is none",
        ),
        (
            format!("limit-group = 5\n{disk}"),
            "f: limit-group: found a number, expected tables, each headed [[limit-group]]",
        ),
    ] {
        let refused = file::parse("f", &text, INTERFACES).map_err(|error| error.to_string());
        let refused = refused.and_then(|raw| resolve_fake(raw).map(|_| ()).map_err(|error| error.to_string()));
        assert_eq!(refused, Err(want.to_owned()), "{text}");
    }
    let group =
        |text: &str| LimitGroups::take([key_values::parse("--limit-group #1", text).unwrap()]).unwrap_err().to_string();
    assert!(group("name=g,iops=1,poll=off").starts_with("limit-group \"g\": poll: found an unknown key"));
    assert!(group("name=g,limit-group=h").starts_with("limit-group \"g\": limit-group: found an unknown key"));
}

#[test]
fn a_disk_leaves_its_group() {
    let groups = LimitGroups::take([key_values::parse("g", "name=gold,iops=5").unwrap()]).unwrap();
    let given = |text: &str| {
        let mut settings = Settings::new("disk");
        settings.insert("limit-group", text).unwrap();
        groups.take_group(&mut settings).map_err(|error| error.to_string())
    };
    assert_eq!(given("gold").unwrap().unwrap().unwrap().name(), "gold");
    assert!(given("off").unwrap().unwrap().is_none());
    assert!(given("lead").is_err() && groups.take_group(&mut Settings::new("disk")).unwrap().is_none());
}
