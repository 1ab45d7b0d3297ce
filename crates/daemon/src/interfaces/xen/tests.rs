//! Settings of Xen disks and of the Xen host.

use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolScope};
use mqblk_engine::{Coalesce, PollPolicy, QueuePlacement, QueuePolicy};

use super::config::{XenAttachment, XenEndpoint};
use super::*;
use crate::interfaces::xen::selector::XenSelector;
use crate::key_values;
use crate::names::UniqueNames;
use crate::queues::QueueMap;
use crate::resolve::tests::{assert_round_trip, cpus, error_of, from_words, printed, tables, text};

/// Resolves top-level keys and disks, with four CPUs and as many workers.
fn resolve(process: &[(&str, &str)], disks: &[&str]) -> XenKeys {
    let mut names = UniqueNames::default();
    let cpus = cpus();
    let mut context = ResolveContext {
        cpus: &cpus,
        kinds: &["file"],
        names: &mut names,
        saved: None,
        given: &crate::contract::NO_CONTRACTS,
    };
    let mut keys = XenKeys::default();
    for (index, words) in disks.iter().enumerate() {
        let mut settings = key_values::parse("disk", words).unwrap();
        settings.text(&crate::interface::INTERFACE);
        let (owner, position) = (format!("disk #{index}"), ListPosition::Disk(index));
        keys.take_disk(DiskTable { settings, owner, position }, &mut context).unwrap();
    }
    let mut settings = Settings::new("serve");
    process.iter().for_each(|(key, value)| settings.insert(key, value).unwrap());
    keys.take_process(&mut settings, &mut context).unwrap();
    for mut queues in keys.queues() {
        queues.assign(&mut QueuePlacement::new(4)).unwrap();
    }
    keys
}

fn host(process: &[(&str, &str)], disks: &[&str]) -> Option<XenConfig> {
    resolve(process, disks).host
}

fn endpoint(words: &str) -> XenEndpoint {
    resolve(&[], &[words]).disks.remove(0).into_endpoint()
}

fn default_endpoint() -> XenEndpoint {
    XenEndpoint {
        attachment: None,
        queues: 4,
        ring_order: 4,
        indirect_segments: 256,
        grants: GrantMode::Auto,
        grants_pool: PoolScope::PerRing,
        persistent_grants: 1056,
        persistent_idle: Duration::from_secs(60),
        journal: true,
        queue_map: QueueMap::from(vec![0, 1, 2, 3]),
        policy: PollPolicy::default().into(),
        given: None,
    }
}

#[test]
fn defaults_are_those_of_linux() {
    assert_eq!(endpoint("path=/a,interface=xen"), default_endpoint());
    let xen = host(&[], &["path=/a,interface=xen"]).unwrap();
    assert_eq!((xen.host, xen.type_name.as_str(), xen.watch), (XenSelector::Auto, "mqblk", false));
    assert_eq!(xen.state.unwrap().to_str(), Some("/run/mqblk/xen"));
    assert_eq!(xen.mapped_pages, None);
    assert_eq!(xen.default_endpoint, XenEndpoint { queue_map: QueueMap::default(), ..default_endpoint() });
}

#[test]
fn every_key_is_taken() {
    let words = "path=/a,interface=xen,domid=3,vdev=xvdb,queues=2,ring-order=0,indirect-segments=0,grants=map,\
                 grants-pool=shared,persistent-grants=7,persistent-idle=0,journal=off,queue-map=0:1,1:0,poll=busy,\
                 coalesce-us=5,coalesce-max=6";
    let taken = endpoint(words);
    assert_eq!(taken.queue_map.workers(), [1, 0]);
    let want_map = taken.queue_map.clone();
    let want = XenEndpoint {
        attachment: Some(XenAttachment { domid: 3, devid: 51728 }),
        queues: 2,
        ring_order: 0,
        indirect_segments: 0,
        grants: GrantMode::Map,
        grants_pool: PoolScope::Shared,
        persistent_grants: 7,
        persistent_idle: Duration::ZERO,
        journal: false,
        queue_map: want_map,
        policy: QueuePolicy {
            poll: PollPolicy::Busy,
            coalesce: Coalesce { delay: Duration::from_micros(5), answers: 6 },
        },
        given: None,
    };
    assert_eq!(taken, want);
}

#[test]
fn only_xen_disks_need_a_xen_host() {
    assert_eq!(host(&[], &[]), None);
    assert_eq!(host(&[("xen", "auto")], &[]), None);
    assert_eq!(host(&[("xen", "real")], &[]).unwrap().host, XenSelector::Real);
    let both = host(&[("xen", "/tmp/x")], &["path=/a,interface=xen,queues=2"]);
    assert_eq!(both.unwrap().host, XenSelector::Simulated("/tmp/x".into()));
    let disks = ["path=/b,socket=/tmp/b", "path=/a,interface=xen,queues=2"];
    let mixed = printed(&from_words(&[("xen", "/tmp/x")], &disks).unwrap());
    assert_eq!(tables(&mixed, "disk").iter().map(|disk| text(disk, "queues")).collect::<Vec<_>>(), ["32", "2"]);
    assert_eq!(tables(&mixed, "disk").iter().map(|disk| text(disk, "id")).collect::<Vec<_>>(), ["b", "a"]);
    // No configured disk: only devices of toolstacks.
    let process = [("xen-watch", "qdisk"), ("xen-state", "off"), ("xen-mapped-pages", "9")];
    let watching = from_words(&process, &[]).unwrap();
    assert_eq!(watching.workers, 4, "toolstack devices have as many rings as there are CPUs");
    assert!(watching.interfaces.iter().any(|interface| interface.expects_more));
    let xen = host(&process, &[]).unwrap();
    assert_eq!((xen.watch, xen.type_name.as_str(), xen.state, xen.mapped_pages), (true, "qdisk", None, Some(9)));
}

#[test]
fn errors_name_invalid_values() {
    for (words, want) in [
        (
            "domid=3",
            "disk \"a\": vdev: found nothing, but a domid, expected the device's name in the guest, such as xvda",
        ),
        ("vdev=xvda", "disk \"a\": domid: found nothing, but a vdev, expected the guest's domain number"),
        ("domid=32752,vdev=xvda", "disk \"a\": domid: found \"32752\", expected a whole number from 0 to 32751"),
        ("domid=x,vdev=xvda", "disk \"a\": domid: found \"x\", expected a whole number"),
        ("domid=1,vdev=vda", "disk \"a\": vdev: found \"vda\", expected xvda to xvd..."),
        ("queues=0", "disk \"a\": queues: found \"0\", expected a whole number from 1 to 256"),
        ("ring-order=5", "disk \"a\": ring-order: found \"5\", expected a whole number from 0 to 4"),
        (
            "indirect-segments=1025",
            "disk \"a\": indirect-segments: found \"1025\", expected a whole number from 0 to 1024",
        ),
        ("grants=none", "disk \"a\": grants: found \"none\", expected one of auto, copy, map, persistent"),
        ("grants-pool=own", "disk \"a\": grants-pool: found \"own\", expected one of per-ring, shared"),
        ("journal=maybe", "disk \"a\": journal: found \"maybe\", expected on or off"),
        ("persistent-idle=-1", "disk \"a\": persistent-idle: found \"-1\", expected a whole number"),
        (
            "socket=/tmp/s",
            "disk \"a\": socket: found an unknown key (with value \"/tmp/s\"), expected one of bandwidth, ",
        ),
        ("queue-size=64", "disk \"a\": queue-size: found an unknown key"),
    ] {
        let error = error_of(from_words(&[], &[&format!("path=/a,interface=xen,{words}")]));
        assert!(error.starts_with(want), "{words}: {error}");
    }
    let error = error_of(from_words(&[("xen-watch", "a/b")], &[]));
    assert!(error.starts_with("serve: xen-watch: found \"a/b\", expected 1 to 32 letters"), "{error}");
    let error = error_of(from_words(&[], &["path=/a,interface=virtio"]));
    assert!(error.ends_with("interface: found \"virtio\", expected one of virtio-blk, virtio-scsi, xen"), "{error}");
}

#[test]
fn a_vdev_is_attached_once() {
    let disks = ["path=/a,interface=xen,domid=1,vdev=xvda", "path=/b,interface=xen,domid=1,vdev=51712"];
    let error = error_of(from_words(&[], &disks));
    assert!(error.contains("vdev: found \"51712 of domain 1\", the vdev of disk \"a\""), "{error}");
    let disks = ["path=/a,interface=xen,domid=1,vdev=xvda", "path=/b,interface=xen,domid=2,vdev=xvda"];
    assert!(from_words(&[], &disks).is_ok());
}

#[test]
fn a_printed_configuration_round_trips() {
    let process = [("xen", "/tmp/x"), ("xen-watch", "qdisk"), ("xen-state", "/tmp/state"), ("xen-mapped-pages", "100")];
    for process in [&process[..], &process[..1], &[("xen-state", "off")]] {
        let disks = [
            "path=/a,interface=xen,domid=3,vdev=xvdb1,queues=2,grants=copy,grants-pool=shared,persistent-idle=5",
            "path=/b,interface=xen,domid=3,vdev=0xfff,journal=off",
            "path=/c,interface=xen",
            "path=/d,socket=/tmp/d",
        ];
        assert_round_trip(&from_words(process, &disks).unwrap());
    }
}
