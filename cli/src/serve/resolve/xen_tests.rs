//! Settings of Xen disks and of the Xen host.

use std::time::Duration;

use mqblk_blkif::{GrantMode, PoolScope};
use mqblk_engine::{Coalesce, PollPolicy};

use super::tests::{FakeBackends, cpus, from_words};
use super::*;
use crate::serve::config::{XenAttachment, XenEndpoint};
use crate::serve::{file, print};
use crate::xen::XenSelector;

fn endpoint(words: &str) -> XenEndpoint {
    match from_words(&[], &[words]).unwrap().disks.remove(0).endpoint {
        DiskEndpoint::Xen(endpoint) => endpoint,
        DiskEndpoint::VhostUser(_) => panic!("a vhost-user disk"),
    }
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
        queue_map: vec![0, 1, 2, 3],
        poll: PollPolicy::default(),
        coalesce: Coalesce::default(),
    }
}

#[test]
fn defaults_are_those_of_linux() {
    assert_eq!(endpoint("path=/a,interface=xen"), default_endpoint());
    let xen = from_words(&[], &["path=/a,interface=xen"]).unwrap().xen.unwrap();
    assert_eq!((xen.host, xen.type_name.as_str(), xen.watch), (XenSelector::Auto, "mqblk", false));
    assert_eq!(xen.state.unwrap().to_str(), Some("/run/mqblk/xen"));
    assert_eq!(xen.mapped_pages, None);
    assert_eq!(xen.default_endpoint, XenEndpoint { queue_map: Vec::new(), ..default_endpoint() });
}

#[test]
fn every_key_is_taken() {
    let words = "path=/a,interface=xen,domid=3,vdev=xvdb,queues=2,ring-order=0,indirect-segments=0,grants=map,\
                 grants-pool=shared,persistent-grants=7,persistent-idle=0,journal=off,queue-map=0:1,1:0,poll=busy,\
                 coalesce-us=5,coalesce-max=6";
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
        queue_map: vec![1, 0],
        poll: PollPolicy::Busy,
        coalesce: Coalesce { delay: Duration::from_micros(5), answers: 6 },
    };
    assert_eq!(endpoint(words), want);
}

#[test]
fn only_xen_disks_need_a_xen_host() {
    let vhost = "path=/b,socket=/tmp/b";
    assert_eq!(from_words(&[], &[vhost]).unwrap().xen, None);
    assert_eq!(from_words(&[("xen", "auto")], &[vhost]).unwrap().xen, None);
    assert_eq!(from_words(&[("xen", "real")], &[vhost]).unwrap().xen.unwrap().host, XenSelector::Real);
    let both = from_words(&[("xen", "/tmp/x")], &[vhost, "path=/a,interface=xen,queues=2"]).unwrap();
    assert_eq!(both.xen.unwrap().host, XenSelector::Simulated("/tmp/x".into()));
    assert_eq!(both.disks.iter().map(|disk| disk.endpoint.queue_map().len()).collect::<Vec<_>>(), [4, 2]);
    // No configured disk: only devices of toolstacks.
    let watching = from_words(&[("xen-watch", "qdisk"), ("xen-state", "off"), ("xen-mapped-pages", "9")], &[]).unwrap();
    assert_eq!(watching.workers, 4, "toolstack devices have as many rings as there are CPUs");
    let xen = watching.xen.unwrap();
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
        ("socket=/tmp/s", "disk \"a\": socket: found an unknown key (with value \"/tmp/s\"), expected one of cache, "),
        ("queue-size=64", "disk \"a\": queue-size: found an unknown key"),
    ] {
        let error = from_words(&[], &[&format!("path=/a,interface=xen,{words}")]).unwrap_err().to_string();
        assert!(error.starts_with(want), "{words}: {error}");
    }
    let error = from_words(&[("xen-watch", "a/b")], &[]).unwrap_err().to_string();
    assert!(error.starts_with("serve: xen-watch: found \"a/b\", expected 1 to 32 letters"), "{error}");
    let error = from_words(&[], &["path=/a,interface=virtio"]).unwrap_err().to_string();
    assert!(error.ends_with("interface: found \"virtio\", expected one of virtio-blk, virtio-scsi, xen"), "{error}");
}

#[test]
fn a_vdev_is_attached_once() {
    let disks = ["path=/a,interface=xen,domid=1,vdev=xvda", "path=/b,interface=xen,domid=1,vdev=51712"];
    let error = from_words(&[], &disks).unwrap_err().to_string();
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
        let config = from_words(process, &disks).unwrap();
        let text = print::to_toml(&config);
        let again = resolve(file::parse("f", &text).unwrap(), &cpus(), &mut FakeBackends).unwrap();
        assert_eq!(again, config, "{text}");
        assert_eq!(print::to_toml(&again), text);
    }
}
