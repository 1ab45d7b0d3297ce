use std::os::unix::fs::MetadataExt as _;

use mqblk_core::GuestObserver as _;

use super::*;
use crate::state_file::{SavedState, StateFile};

fn disk(settings: &[(&str, &str)]) -> Arc<AnyDisk> {
    let mut given = Settings::new("disk");
    settings.iter().for_each(|(key, value)| given.insert(key, value).unwrap());
    mqblk_storage::open("ram", &mut given).unwrap()
}

fn contract(disk: &AnyDisk) -> DiskContract {
    DiskContract::new("ram", &disk.resolved(), disk, &[("serial", "S")])
}

fn device(disk: &AnyDisk) -> DeviceContract {
    let disks = BTreeMap::from([(String::new(), contract(disk))]);
    DeviceContract { interface: "virtio-blk".to_owned(), queues: 2, queue_size: 64, disks }
}

#[test]
fn a_disk_is_kept_as_it_was_given() {
    let given = disk(&[("size", "1M"), ("block-size", "512")]);
    let contract = contract(&*given);
    let mut settings = Settings::new("disk");
    settings.insert("block-size", "4096").unwrap();
    contract.apply_settings(&mut settings, "file");
    assert_eq!(settings.peek("block-size"), Some("4096"), "another backend's");
    contract.apply_settings(&mut settings, "ram");
    assert_eq!(settings.peek("block-size"), Some("512"));
    assert_eq!(contract.keep_text("disk", "serial", "T".to_owned()), "S");
    assert!(Arc::ptr_eq(&contract.keep("disk", Arc::clone(&given)), &given), "nothing differs");
    // Storage that has become read-only, and cannot discard any more.
    let found = disk(&[("size", "2M"), ("block-size", "512"), ("readonly", "on")]);
    assert!(found.limits().discard.is_none() && given.limits().discard.is_some());
    let kept = contract.keep("disk", found);
    let size = kept.geometry().size;
    assert_eq!(kept.geometry(), Geometry { size, ..given.geometry() });
    assert_eq!((kept.limits(), size), (given.limits(), ByteLen(2 << 20)));
    let text = serde_json::to_string(&contract).unwrap();
    assert_eq!(serde_json::from_str::<DiskContract>(&text).unwrap(), contract);
}

#[test]
fn queues_are_never_fewer_than_a_guest_has() {
    let contract = device(&*disk(&[("size", "1M")]));
    for (given, want) in [
        ("", ["2", "64"]),
        ("queues=1", ["2", "64"]),
        ("queues=4,queue-size=128", ["4", "64"]),
        ("queues=1,queue-map=0:0", ["1", "64"]),
    ] {
        let mut settings = crate::key_values::parse("disk", format!("id=a,{given}").trim_end_matches(',')).unwrap();
        contract.apply_queues(&mut settings);
        assert_eq!([settings.peek("queues").unwrap(), settings.peek("queue-size").unwrap()], want, "{given}");
    }
}

#[test]
fn a_record_lasts_from_a_guest_s_arrival_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let file = Arc::new(StateFile::open(SavedState::read(&path).unwrap()).unwrap());
    let recorded = || SavedContracts::read(&SavedState::read(&path).unwrap()).devices().clone();
    let contract = device(&*disk(&[("size", "1M")]));
    let start = SavedContracts::read(&SavedState::read(&path).unwrap());
    let kept = Arc::new(KeptContracts::new(start, RawImages::default(), Some(file)));
    let recorder = kept.serve("/run/a".to_owned(), contract.clone());
    assert!(recorded().is_empty());
    recorder.arrived();
    let written = || std::fs::metadata(&path).unwrap().ino();
    let before = written();
    recorder.arrived();
    assert_eq!(written(), before, "nothing has changed");
    assert_eq!(recorded(), Contracts::from([("/run/a".to_owned(), contract.clone())]));
    // A LUN comes and goes.
    recorder.set_disk("0:1", contract.disks.get("").cloned());
    assert_eq!(recorded()["/run/a"].disks.len(), 2);
    recorder.set_disk("0:1", None);
    assert_eq!(recorded()["/run/a"], contract);
    // The next daemon cannot open a disk that the guest has.
    let next = KeptContracts::new(SavedContracts::read(&SavedState::read(&path).unwrap()), RawImages::default(), None);
    let next = Arc::new(next);
    let without = DeviceContract { disks: BTreeMap::new(), ..contract.clone() };
    next.serve("/run/a".to_owned(), without);
    assert_eq!(next.saved().devices()["/run/a"], contract);
    recorder.left();
    assert!(recorded().is_empty());
    recorder.set_disk("0:1", contract.disks.get("").cloned());
    assert!(recorded().is_empty(), "nobody has it");
}

#[test]
fn a_record_of_another_boot_is_dropped_and_raw_images_stay() {
    let contract = device(&*disk(&[("size", "1M")]));
    let of = |boot: &str| -> SavedContracts {
        let devices = serde_json::json!({ "/run/a": contract });
        let section = serde_json::json!({ "boot": boot, "devices": devices, "raw_images": { "/a.img": "1:512" } });
        serde_json::from_value(section).unwrap()
    };
    let saved = of("another").or_handed(None);
    assert!(saved.devices().is_empty());
    let mut settings = Settings::new("disk");
    settings.insert("path", "/a.img").unwrap();
    saved.raw_images().apply("file", &mut settings);
    assert_eq!(settings.peek("served-raw"), Some("1:512"));
    // A daemon of an earlier version hands no records over.
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let own = of(boot.trim());
    assert_eq!(own.clone().or_handed(Some(&SavedContracts::default())), own);
}
