//! Tests without a cluster; the rest is in `tests/tests/ceph`.

use std::sync::{Arc, Mutex};

use mqblk_core::{BlockSize, ByteLen, DiskObserver};

use super::open::{RbdSettings, place};
use super::state::RbdState;
use crate::conformance::TestTarget;
use crate::lock_mode::LockMode;
use crate::observers::tests::Log;

fn taken(pairs: &[(&str, &str)]) -> Result<RbdSettings, String> {
    let mut settings = mqblk_core::settings::Settings::new("disk \"trial\"");
    pairs.iter().for_each(|(key, value)| settings.insert(key, value).unwrap());
    let taken = RbdSettings::take(&mut settings).map_err(|error| error.to_string())?;
    settings.finish().map_err(|error| error.to_string())?;
    Ok(taken)
}

#[test]
fn settings_and_their_defaults() {
    let given = taken(&[("pool", "vms"), ("image", "disk")]).unwrap();
    assert_eq!(place(&given.options), "rbd:vms/disk");
    assert!(!given.options.read_only && given.unmap);
    assert_eq!((given.lock, given.block), (LockMode::Exclusive, BlockSize::B512));
    let given =
        taken(&[("pool", "vms"), ("image", "disk"), ("encryption", "luks2"), ("key-file", "/etc/secret")]).unwrap();
    assert!(!given.unmap, "the library would write zeroes");
    let given = taken(&[("pool", "vms"), ("image", "disk"), ("namespace", "blue"), ("snap", "monday")]).unwrap();
    assert_eq!(place(&given.options), "rbd:vms/blue/disk@monday");
    assert!(given.options.read_only, "a snapshot is read-only without being asked");
}

#[test]
fn settings_that_do_not_fit() {
    for (settings, want) in [
        (&[("image", "disk")][..], "pool: found nothing, expected the pool"),
        (&[("pool", "vms")], "image: found nothing, expected the name of an image"),
        (&[("pool", ""), ("image", "disk")], "pool: found an empty text, expected a name"),
        (&[("pool", "vms"), ("image", "disk"), ("snap", "")], "snap: found an empty text"),
        (&[("pool", "vms"), ("image", "disk"), ("snap", "a"), ("readonly", "off")], "readonly: found off, with snap"),
        (&[("pool", "vms"), ("image", "disk"), ("lock", "on")], "lock: found \"on\", expected one of exclusive,"),
        (&[("pool", "vms"), ("image", "disk"), ("block-size", "1024")], "block-size: found \"1024\""),
        (
            &[("pool", "vms"), ("image", "disk"), ("encryption", "luks")],
            "encryption: found \"luks\", expected one of luks1,",
        ),
        (&[("pool", "vms"), ("image", "disk"), ("encryption", "luks1")], "key-file: found nothing, with encryption"),
        (&[("pool", "vms"), ("image", "disk"), ("key-file", "/k")], "encryption: found nothing, with a key-file"),
        (
            &[("pool", "vms"), ("image", "disk"), ("encryption", "luks2"), ("key-file", "/k"), ("discard", "unmap")],
            "discard: found unmap, with encryption",
        ),
    ] {
        let error = taken(settings).map(drop).unwrap_err();
        assert!(error.starts_with("disk \"trial\": ") && error.contains(want), "{settings:?}: {error}");
        // Invalid settings load and connect nothing.
        let trial = TestTarget { kind: "rbd", settings, keeps_data: true, seed: 0 };
        assert_eq!(trial.open(&[]).map(drop).unwrap_err().to_string(), error);
    }
}

/// The notifications of the disk's observer; true for those of the size.
#[test]
fn a_new_size_and_the_blocklist_are_reported_once() {
    let state = RbdState::new("rbd:vms/disk".to_owned(), "client.a".to_owned(), ByteLen(1 << 20));
    let log = Arc::new(Log::default());
    state.observers.set(Arc::clone(&log) as Arc<dyn DiskObserver>);
    state.set_found_size(ByteLen(1 << 20));
    state.set_found_size(ByteLen(2 << 20));
    state.set_found_size(ByteLen(2 << 20));
    assert_eq!(log.take(), ["size"]);
    state.check_errno(5);
    assert_eq!(log.take(), [""; 0]);
    state.check_errno(108);
    state.check_errno(108);
    assert_eq!(log.take(), ["lost: blocklisted by the cluster"]);
    // A later observer is notified too.
    let late = Arc::new(Log::default());
    state.observers.set(Arc::clone(&late) as Arc<dyn DiskObserver>);
    assert_eq!(late.take(), ["lost: blocklisted by the cluster"]);
    assert!(Mutex::lock(&state.fenced).unwrap().is_some());
    let stats = state.observers.stats();
    assert_eq!((stats.counters.connected, stats.counters.made, stats.counters.lost), (0, 1, 1));
    assert_eq!(stats.last_failure.as_deref(), Some("blocklisted by the cluster"));
    assert!(stats.unreachable.is_some());
}
