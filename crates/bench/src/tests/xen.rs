//! The benchmark against the driver's model backend, on a simulated machine.

use std::sync::Arc;
use std::time::Duration;

use mqblk_driver::blkfront::model::{BlkbackBehaviour, BlkbackFault, BlkbackModel};
use mqblk_driver::blkfront::toolstack::Vbd;
use mqblk_memory::DomainId;
use mqblk_xen::Xen;
use mqblk_xen::vbd::XenbusState;
use mqblk_xen_simulation::{Machine, connect};

use super::{benchmark, failed, json, plan, refused, written};
use crate::{BenchError, sweep};

/// The fields are dropped in this order.
pub(super) struct Rig {
    model: BlkbackModel,
    machine: Machine,
    _dom0: Arc<dyn Xen>,
    folder: tempfile::TempDir,
    /// True if the model gets stuck: the timeout is short.
    stalls: bool,
}

impl Rig {
    pub(super) fn new(behaviour: BlkbackBehaviour) -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let machine = Machine::start(folder.path()).unwrap();
        machine.create_domain(DomainId(1)).unwrap();
        let dom0 = connect(folder.path(), DomainId(0)).unwrap();
        let vbd = Vbd::new("model", DomainId(1), 51712, "");
        vbd.create(&mut dom0.store().unwrap()).unwrap();
        let stalls = matches!(behaviour.fault, BlkbackFault::StallAfter(_));
        Rig { model: BlkbackModel::start(&dom0, &vbd, behaviour), machine, _dom0: dom0, folder, stalls }
    }

    pub(super) fn run(&self, line: &str) -> Result<u64, BenchError> {
        let line = format!("--interface xen --xen {} --vdev xvda {line}", self.folder.path().display());
        let mut benchmark = benchmark(&line).unwrap();
        if self.stalls {
            benchmark.plan.stuck_timeout = Duration::from_millis(300);
        }
        sweep::run(&benchmark)
    }
}

#[test]
fn every_block_is_written_once_on_all_rings_and_verified() {
    for (options, block) in [
        ("--rw write --bs 4k --queues 3 --iodepth 4", 4096),
        ("--rw randwrite --bs 64k --queues 2 --iodepth 4 --client poll --abi x86_32", 65536),
        // A ring of one page holds 32 requests, half of the depth.
        ("--rw write --bs 512 --queues 1 --iodepth 64 --batch 64 --ring-order 0 --abi arm", 512),
        ("--rw write --bs 1k --queues 4 --jobs 8 --threads 2 --iodepth 40 --ring-order 0", 1024),
        // Each block is several requests of 11 pages.
        ("--rw write --bs 128k --queues 2 --iodepth 2 --indirect-segments 0", 131_072),
    ] {
        let rig = Rig::new(BlkbackBehaviour::default());
        let line = format!("{options} --verify crc32c --allow-write --size 768k --offset 128k");
        assert_eq!(rig.run(&line).unwrap(), 0, "{options}");
        let expected: Vec<usize> = (128 << 10..896 << 10).step_by(block).collect();
        assert_eq!(written(&rig.model.disk(), block), expected, "{options}");
        let requests: u64 = (0..4).map(|queue| rig.model.requests(queue)).sum();
        let (parts, indirect) = match block {
            131_072 => (3, 0),
            65536 => (1, 24),
            _ => (1, 0),
        };
        assert_eq!(requests, 2 * parts * expected.len() as u64, "{options}: each block written once and read once");
        assert_eq!(rig.model.indirect(), indirect, "{options}");
        // Written, read back, and released.
        assert_eq!(rig.machine.domain_stats(DomainId(1)).unwrap().live_grants, 0, "{options}");
    }
}

#[test]
fn results_say_how_the_frontend_was_set_up() {
    let rig = Rig::new(BlkbackBehaviour::default());
    let path = rig.folder.path().join("out.json").display().to_string();
    let line = format!(
        "--label one --queues 1,4 --runtime 0.05 --warmup 0 --runs 2 --ring-order 2 --abi x86_32 --json {path}"
    );
    assert_eq!(rig.run(&line).unwrap(), 0);
    let rows = json(&path);
    for (row, queues) in rows.as_array().unwrap().iter().zip([1, 4]) {
        for (key, value) in [
            ("interface", "xen".into()),
            ("target", "one".into()),
            ("queues", queues.into()),
            ("jobs", queues.into()),
            ("grants", "unknown".into()),
            ("grants_pool", serde_json::Value::Null),
            ("ring_order", 2.into()),
            ("abi", "x86_32".into()),
            ("targets", serde_json::Value::Null),
        ] {
            assert_eq!(row[key], value, "{key}");
        }
        assert!(row["iops_mean"].as_f64().unwrap() > 0.0 && row["kicks_per_io"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn a_backend_that_closes_is_stuck_or_breaks_the_protocol_is_noticed() {
    let of = |fault: BlkbackFault| Rig::new(BlkbackBehaviour { fault, ..BlkbackBehaviour::default() });
    let text = failed(of(BlkbackFault::StateAfter(100, XenbusState::Closing)).run("--runtime 60"));
    assert!(text.contains("the server went away"), "{text}");
    let text = failed(of(BlkbackFault::StallAfter(100)).run("--runtime 60"));
    assert!(text.contains("the server is stuck"), "{text}");
    let text = failed(of(BlkbackFault::WrongOperationAt(100)).run("--runtime 60 --queues 2"));
    assert!(text.contains("broke the ring's protocol: response to request 0: found operation 4, expected 0"), "{text}");
    let verified = "--rw write --verify crc32c --allow-write --size 400k";
    assert_eq!(of(BlkbackFault::CorruptFrom(40)).run(verified).unwrap(), 60);
    assert_eq!(of(BlkbackFault::FailFrom(90)).run("--runtime 0 --size 400k").unwrap(), 10);
    assert!(
        failed(of(BlkbackFault::CloseAt(XenbusState::Connected)).run("--runtime 1")).contains("found it in state 5")
    );
}

#[test]
fn usage_errors_name_the_option() {
    for (line, expected) in [
        ("--interface xen", "found no target, expected --vdev NAME or --disk KEY=VALUE,..."),
        ("--interface xen --socket s", "--socket: found s, expected --vdev with xen: its backends have no sockets"),
        (
            "--interface xen --vdev xvda --queue-size 64",
            "--queue-size: found 64, expected --ring-order with xen: a ring has 32 entries a page",
        ),
        (
            "--interface xen --vdev xvda --packed",
            "--packed: found it, expected none with xen: its rings are no virtqueues",
        ),
        (
            "--interface xen --vdev xvda --descriptors direct",
            "--descriptors: found direct, expected --indirect-segments with xen: its rings have no descriptors",
        ),
        ("--interface xen --vdev xvda --targets 2", "--targets: found xen, expected --interface virtio-scsi with it"),
        (
            "--interface xen --vdev xvda --grants copy",
            "--grants, --grants-pool: found without --disk, expected with it: a server that runs is not changed",
        ),
        (
            "--interface xen --vdev xvda --disk storage=null,size=1M",
            "--vdev: found with --disk and without --xen, expected --xen: which machine both are on",
        ),
        (
            "--interface xen --disk vdev=xvdb,storage=null,size=1M",
            "--disk: found a disk with the key vdev, expected one without: the benchmark sets it",
        ),
        (
            "--interface xen --disk grants=map,storage=null,size=1M --grants copy",
            "--grants: found a word in --disk as well, expected one of the two",
        ),
        (
            "--interface xen --vdev xvda --iodepth 40000",
            "--iodepth: found 40000 I/Os in flight on a queue, expected at most 32768",
        ),
        ("--socket s --grants copy", "--grants: found virtio-blk, expected --interface xen with it"),
        (
            "--interface virtio-scsi --socket s --ring-order 2",
            "--ring-order: found virtio-scsi, expected --interface xen with it",
        ),
    ] {
        assert_eq!(plan(line).unwrap_err().to_string(), expected, "{line}");
    }
    for (line, word) in [
        ("--interface xen --vdev sdz", "xvda to xvd"),
        ("--interface xen --vdev xvda --ring-order 5", "--ring-order"),
        ("--interface xen --vdev xvda --indirect-segments 4097", "--indirect-segments"),
        ("--interface xen --vdev xvda --abi ppc", "x86_32"),
        ("--interface xen --vdev xvda --grants steal", "persistent"),
    ] {
        assert!(plan(line).unwrap_err().to_string().contains(word), "{line}");
    }
    let rig = Rig::new(BlkbackBehaviour { queues: 2, ring_order: 1, ..BlkbackBehaviour::default() });
    assert_eq!(refused(rig.run("--queues 3")), "--queues: found 3, expected 1 to 2");
    assert_eq!(refused(rig.run("--ring-order 2")), "--ring-order: found 2, expected 0 to 1");
    let fill = plan("--interface xen --vdev xvda --fill").unwrap_err().to_string();
    assert!(fill.contains("--allow-write"), "a running backend's disk was not made for the run: {fill}");
}

#[test]
fn devices_and_grants_are_targets() {
    let own =
        plan("--interface xen --disk storage=null,size=1G --grants copy,map --poll off,busy --grants-pool shared");
    let targets = own.unwrap().targets;
    let found: Vec<_> = targets.iter().map(|target| (target.poll(), target.grants.as_deref().unwrap())).collect();
    assert_eq!(found, [("off", "copy"), ("off", "map"), ("busy", "copy"), ("busy", "map")]);
    let named = plan("--interface xen --vdev xvda --vdev 51728 --label kernel").unwrap();
    let names: Vec<_> = named.targets.iter().map(|target| target.label.as_str()).collect();
    assert_eq!(names, ["kernel", "51728"]);
}
