//! The driver against the model backend, on a simulated machine.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_memory::{DomainId, GuestAddress};
use mqblk_ring::blkif::{Abi, BlkifRequest, RequestBody, RwRequest, operation, status};
use mqblk_test_bounds::{Bound, wait_for};
use mqblk_xen::Xen;
use mqblk_xen::vbd::XenbusState;
use mqblk_xen_simulation::{Machine, connect};

use super::model::{BlkbackBehaviour, BlkbackFault, BlkbackModel};
use super::raw::{RawFrontend, RawRing};
use super::toolstack::Vbd;
use super::*;
use crate::{DataSegment, DriverError, SubmitError};

const FRONT: DomainId = DomainId(1);
const XVDA: u32 = 51712;
/// A timeout that is never reached.
fn long() -> Duration {
    Bound::seconds(60).time()
}

/// A machine with a device, whose backend is the model. The fields are dropped in this order.
struct Rig {
    options: BlkfrontOptions,
    model: BlkbackModel,
    vbd: Vbd,
    dom0: Arc<dyn Xen>,
    machine: Machine,
    _folder: tempfile::TempDir,
}

fn rig(behaviour: BlkbackBehaviour) -> Rig {
    rig_of(FRONT, behaviour)
}

/// Returns a rig with the frontend in domain `front`.
fn rig_of(front: DomainId, behaviour: BlkbackBehaviour) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::start(folder.path()).unwrap();
    let dom0 = connect(folder.path(), DomainId(0)).unwrap();
    let domu = connect(folder.path(), front).unwrap();
    let vbd = Vbd::new("mqblk", front, XVDA, "model");
    vbd.create(&mut dom0.store().unwrap()).unwrap();
    let model = BlkbackModel::start(&dom0, &vbd, behaviour);
    let options =
        BlkfrontOptions { connect_timeout: long(), reply_timeout: long(), ..BlkfrontOptions::new(domu, XVDA) };
    Rig { options, model, vbd, dom0, machine, _folder: folder }
}

impl Rig {
    /// Returns the error of a connection that must fail.
    fn connect_error(&self) -> DriverError {
        BlkfrontDevice::connect(&self.options).expect_err("a connection that fails")
    }
}

/// Waits for one completion on any queue.
fn finish(set: &mut BlkfrontQueueSet) -> BlkfrontCompletion {
    set.queues_mut().iter_mut().for_each(BlkfrontQueue::publish);
    loop {
        for queue in set.queues_mut() {
            if queue.poll().unwrap() > 0 {
                return queue.reap().unwrap().unwrap();
            }
        }
        set.wait(1).unwrap();
    }
}

fn data_segment(queue: &BlkfrontQueue, at: u64, len: u32) -> DataSegment {
    DataSegment { address: GuestAddress(queue.data().0.0 + at), len }
}

#[test]
fn every_request_works_with_every_abi_and_ring_size() {
    for (abi, order, entries) in
        [(Abi::X86_64, Some(0), 32), (Abi::X86_32, Some(4), 512), (Abi::Arm, Some(1), 64), (Abi::X86_32, None, 256)]
    {
        let rig =
            rig(BlkbackBehaviour { ring_order: if order.is_none() { 3 } else { 4 }, ..BlkbackBehaviour::default() });
        let options = BlkfrontOptions { abi, ring_order: order, ..rig.options.clone() };
        let mut device = BlkfrontDevice::connect(&options).unwrap();
        let info = *device.info();
        assert_eq!(
            (info.capacity, info.max_segments, info.persistent, info.read_only),
            (Sector512(2048), 256, true, false)
        );
        let mut set = device.take_queues().pop().unwrap();
        assert_eq!(set.queues_mut()[0].size(), entries);
        let memory = Arc::clone(set.queues_mut()[0].memory());
        let content: Vec<u8> = (0..256 << 10).map(|at: u32| (at * 7 % 251) as u8).collect();
        let whole = data_segment(&set.queues_mut()[0], 0, 256 << 10);
        memory.write(whole.address, &content).unwrap();
        let mut run = |user_data: u32,
                       submit: &dyn Fn(&mut BlkfrontQueue, u32) -> Result<(), SubmitError>,
                       expected: BlkfrontStatus| {
            submit(&mut set.queues_mut()[0], user_data).unwrap();
            assert_eq!(finish(&mut set), BlkfrontCompletion { user_data, status: expected }, "{abi:?} {order:?}");
        };
        // 64 segments, then as many as fit in a request, then sectors of three pages.
        run(1, &|queue, user_data| queue.write(user_data, Sector512(3), whole), BlkfrontStatus::Ok);
        assert_eq!(rig.model.indirect(), 1);
        assert_eq!(rig.model.disk()[3 * 512..][..256 << 10], content);
        let direct = DataSegment { len: 11 * 4096, ..whole };
        run(2, &|queue, user_data| queue.write(user_data, Sector512(1024), direct), BlkfrontStatus::Ok);
        assert_eq!(rig.model.indirect(), 1);
        let odd = DataSegment { address: GuestAddress(whole.address.0 + 4096 - 512), len: 5120 };
        run(3, &|queue, user_data| queue.write(user_data, Sector512(1), odd), BlkfrontStatus::Ok);
        assert_eq!(rig.model.disk()[512..][..5120], content[4096 - 512..][..5120]);
        memory.write(whole.address, &vec![0; 256 << 10]).unwrap();
        run(4, &|queue, user_data| queue.read(user_data, Sector512(1024), direct), BlkfrontStatus::Ok);
        let mut found = vec![0; 11 * 4096];
        memory.read(whole.address, &mut found).unwrap();
        assert_eq!(found, content[..11 * 4096]);
        run(5, &|queue, user_data| queue.read(user_data, Sector512(3 + 10), whole), BlkfrontStatus::Ok);
        let mut found = vec![0; 200 << 10];
        memory.read(whole.address, &mut found).unwrap();
        assert_eq!(found, content[5120..][..200 << 10]);

        run(6, &|queue, user_data| queue.flush(user_data), BlkfrontStatus::Ok);
        assert_eq!(rig.model.flushes(), 1);
        run(7, &|queue, user_data| queue.barrier(user_data, Sector512(0), [odd]), BlkfrontStatus::Ok);
        run(8, &|queue, user_data| queue.discard(user_data, Sector512(3), 8, false), BlkfrontStatus::Ok);
        assert!(rig.model.disk()[3 * 512..11 * 512].iter().all(|byte| *byte == 0));
        run(9, &|queue, user_data| queue.read(user_data, Sector512(2048), odd), BlkfrontStatus::IoError);
        assert!(set.kicks() <= 9 && set.calls() <= 9, "{} and {}", set.kicks(), set.calls());
        device.stop(vec![set]).unwrap();
        // All grants, mappings and ports are released.
        let left = rig.machine.domain_stats(FRONT).unwrap();
        assert_eq!((left.live_grants, left.live_mappings, left.open_ports), (0, 0, 0));
    }
}

#[test]
fn queues_are_distributed_over_threads_and_all_are_served() {
    let mut rig = rig(BlkbackBehaviour::default());
    (rig.options.queues, rig.options.threads, rig.options.data_per_queue) = (3, 2, ByteLen(5000));
    let mut device = BlkfrontDevice::connect(&rig.options).unwrap();
    let sets = device.take_queues();
    assert!(device.take_queues().is_empty());
    let sets: Vec<BlkfrontQueueSet> = std::thread::scope(|scope| {
        let work = |mut set: BlkfrontQueueSet| {
            let count = set.queues_mut().len();
            // Each has two pages of its own.
            let starts: Vec<u64> = set.queues_mut().iter().map(|queue| queue.data().0.0).collect();
            assert_eq!(starts, (0..count as u64).map(|at| at * 8192).collect::<Vec<_>>());
            for index in 0..count * 20 {
                let queue = &mut set.queues_mut()[index % count];
                let data = data_segment(queue, 4096, 512);
                queue.write(index as u32, Sector512(index as u64), data).unwrap();
                assert_eq!(
                    finish(&mut set),
                    BlkfrontCompletion { user_data: index as u32, status: BlkfrontStatus::Ok }
                );
            }
            set
        };
        let threads: Vec<_> = sets.into_iter().map(|set| scope.spawn(move || work(set))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sets.iter().map(|set| set.queues().len()).collect::<Vec<_>>(), [2, 1]);
    assert_eq!((0..4).map(|queue| rig.model.requests(queue)).collect::<Vec<_>>(), [20, 20, 20, 0]);
    device.stop(sets).unwrap();
}

#[test]
fn a_device_is_closed_and_connected_again_with_other_rings() {
    let mut rig = rig(BlkbackBehaviour::default());
    for (round, (queues, order, persistent)) in
        [(4, 2, true), (1, 0, false), (2, 4, true), (1, 1, true), (4, 0, false)].into_iter().enumerate()
    {
        let options = BlkfrontOptions { queues, ring_order: Some(order), persistent, ..rig.options.clone() };
        let mut device = BlkfrontDevice::connect(&options).unwrap();
        assert_eq!(device.info().persistent, persistent);
        let mut sets = device.take_queues();
        sets[0].queues_mut()[0].flush(7).unwrap();
        assert_eq!(finish(&mut sets[0]).status, BlkfrontStatus::Ok);
        assert_eq!(rig.model.connections(), round as u64 + 1);
        if round % 2 == 0 {
            device.stop(sets).unwrap();
        } else {
            // Without a handshake: the backend notices by the state.
            drop((sets, device));
        }
    }
    // A frontend that was killed leaves its keys and state behind.
    let mut raw = RawFrontend::open(&*rig.options.xen, &rig.options.path, long()).unwrap();
    raw.initialise().unwrap();
    let ring = RawRing::new(&*rig.options.xen, raw.backend(), 1, Abi::X86_64).unwrap();
    raw.connect(&RawFrontend::ring_keys(Abi::X86_64, true, &[&ring])).unwrap();
    drop((raw, ring));
    rig.options.queues = 2;
    let device = BlkfrontDevice::connect(&rig.options).unwrap();
    assert_eq!(rig.model.connections(), 7);
    device.stop(vec![]).unwrap();
}

#[test]
fn a_resize_and_the_end_of_the_backend_are_detected() {
    let rig = rig(BlkbackBehaviour::default());
    let mut device = BlkfrontDevice::connect(&rig.options).unwrap();
    assert_eq!(device.wait_change(Duration::ZERO).unwrap(), None);
    rig.model.resize(3 << 20);
    assert_eq!(device.wait_change(long()).unwrap(), Some(DeviceChange::Resized(Sector512(6144))));
    assert_eq!(device.info().capacity, Sector512(6144));
    // States that a connected frontend ignores.
    for state in [XenbusState::InitWait, XenbusState::Initialising, XenbusState::Reconfiguring, XenbusState::Connected]
    {
        rig.model.write("state", &state.to_string());
        assert_eq!(device.wait_change(Duration::from_millis(20)).unwrap(), None, "{state:?}");
    }
    let mut monitor = device.backend_monitor().unwrap();
    assert!(!monitor.wait_gone(Duration::from_millis(20)));
    rig.vbd.detach(&mut rig.dom0.store().unwrap()).unwrap();
    assert_eq!(device.wait_change(long()).unwrap(), Some(DeviceChange::Closing));
    device.stop(vec![]).unwrap();
    assert!(monitor.wait_gone(long()) && monitor.wait_gone(Duration::ZERO));
}

#[test]
fn a_device_that_is_removed_is_gone() {
    let rig = rig(BlkbackBehaviour::default());
    let mut device = BlkfrontDevice::connect(&rig.options).unwrap();
    let mut monitor = device.backend_monitor().unwrap();
    rig.dom0.store().unwrap().remove(&rig.vbd.backend_path()).unwrap();
    assert_eq!(device.wait_change(long()).unwrap(), Some(DeviceChange::Closing));
    assert!(monitor.wait_gone(long()));
    device.stop(vec![]).unwrap();
    rig.vbd.remove(&mut rig.dom0.store().unwrap()).unwrap();
    let timeout = Duration::from_millis(50);
    let options = BlkfrontOptions { connect_timeout: timeout, ..rig.options.clone() };
    let error = BlkfrontDevice::connect(&options).unwrap_err();
    let expected = "/local/domain/1/device/vbd/51712/backend: found none, expected the directory of a backend: the toolstack has \
                    made no such device";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn connect_waits_for_a_late_toolstack() {
    let rig = rig(BlkbackBehaviour::default());
    let later = Vbd::new("mqblk", FRONT, XVDA + 16, "model");
    let options = BlkfrontOptions { path: later.frontend_path(), ..rig.options.clone() };
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| BlkfrontDevice::connect(&options).map(|device| device.info().capacity));
        std::thread::sleep(Duration::from_millis(20));
        later.create(&mut rig.dom0.store().unwrap()).unwrap();
        let _model =
            BlkbackModel::start(&rig.dom0, &later, BlkbackBehaviour { size: 1 << 16, ..BlkbackBehaviour::default() });
        assert_eq!(waiting.join().unwrap().unwrap(), Sector512(128));
    });
}

#[test]
fn unsupported_options_are_reported() {
    let mut rig = rig(BlkbackBehaviour { queues: 2, ring_order: 1, ..BlkbackBehaviour::default() });
    rig.options.queues = 3;
    assert_eq!(rig.connect_error().to_string(), "queues: found 3, expected 1 to 2");
    (rig.options.queues, rig.options.ring_order) = (2, Some(2));
    assert_eq!(rig.connect_error().to_string(), "ring order: found 2, expected 0 to 1");
    rig.options.ring_order = Some(5);
    assert_eq!(rig.connect_error().to_string(), "ring order: found 5, expected 0 to 4");
    (rig.options.ring_order, rig.options.threads) = (None, 3);
    assert_eq!(rig.connect_error().to_string(), "threads: found 3, expected 1 to 2");
    (rig.options.threads, rig.options.data_per_queue) = (1, ByteLen(1 << 60));
    assert!(rig.connect_error().to_string().starts_with("data memory: found 1152921504606846976, expected fewer"));
    rig.options.data_per_queue = ByteLen(1 << 42);
    assert!(matches!(rig.connect_error(), DriverError::Xen(_)), "more grants than a table has");
    rig.options.data_per_queue = ByteLen(1 << 20);
    BlkfrontDevice::connect(&rig.options).unwrap();
}

#[test]
fn a_backend_with_few_features_is_enough() {
    let keys = [
        "multi-queue-max-queues",
        "max-ring-page-order",
        "feature-max-indirect-segments",
        "feature-flush-cache",
        "feature-barrier",
        "feature-discard",
        "feature-persistent",
    ];
    let keys = keys.map(|key| (key, None)).to_vec();
    let rig = rig(BlkbackBehaviour { keys, read_only: true, ..BlkbackBehaviour::default() });
    let mut device = BlkfrontDevice::connect(&rig.options).unwrap();
    let info = *device.info();
    assert_eq!((info.max_segments, info.max_queues, info.ring_order), (11, 1, 0));
    assert!(info.read_only && !info.persistent && !info.flush && !info.barrier && info.discard.is_none());
    let mut set = device.take_queues().pop().unwrap();
    let data = data_segment(&set.queues_mut()[0], 0, 512);
    set.queues_mut()[0].write(0, Sector512(0), data).unwrap();
    assert_eq!(finish(&mut set).status, BlkfrontStatus::IoError);
    device.stop(vec![set]).unwrap();
}

#[test]
fn invalid_backends_are_reported_and_released() {
    for (key, value, expected) in [
        ("multi-queue-max-queues", Some("0"), "multi-queue-max-queues: found \"0\", expected 1 or more"),
        (
            "max-ring-page-order",
            Some("-1"),
            "max-ring-page-order: found \"-1\", expected a decimal number of at most 4294967295",
        ),
        ("sectors", None, "xenstore key sectors: found none, expected it of every device that is connected"),
        ("sector-size", Some("500"), "sector-size: found \"500\", expected a power of two from 512 to 65536"),
        ("info", Some(""), "info: found \"\", expected a decimal number of at most 4294967295"),
    ] {
        let rig = rig(BlkbackBehaviour { keys: vec![(key, value)], ..BlkbackBehaviour::default() });
        assert_eq!(rig.connect_error().to_string(), expected);
        let own = rig.dom0.store().unwrap().read(&format!("{}/state", rig.vbd.frontend_path())).unwrap();
        // 1: no rings were published yet.
        assert!(matches!(own.as_deref(), Some("1" | "6")), "{key}: {own:?}");
        assert_eq!(rig.machine.domain_stats(FRONT).unwrap().live_grants, 0, "{key}");
    }
    for (state, step) in
        [(XenbusState::InitWait, "wait for its frontend"), (XenbusState::Connected, "connect to the rings")]
    {
        // Guests cannot read the error node; domain 0 can.
        for (front, why) in [(FRONT, "it does not say why"), (DomainId(0), "5 injected by the model")] {
            let mut rig =
                rig_of(front, BlkbackBehaviour { fault: BlkbackFault::CloseAt(state), ..BlkbackBehaviour::default() });
            rig.options.reply_timeout = Duration::from_millis(300);
            let error = rig.connect_error().to_string();
            // A backend that has not reached InitWait may still get there, so the frontend waits.
            let why = if state == XenbusState::InitWait { "no change in time" } else { why };
            assert_eq!(error, format!("the backend did not {step}: found it in state 5: {why}"));
        }
        let mut rig =
            self::rig(BlkbackBehaviour { fault: BlkbackFault::StopBefore(state), ..BlkbackBehaviour::default() });
        rig.options.reply_timeout = Duration::from_millis(50);
        let error = rig.connect_error().to_string();
        assert!(error.starts_with(&format!("the backend did not {step}: found it in state")), "{error}");
        assert!(error.ends_with(": no change in time"), "{error}");
    }
}

#[test]
fn invalid_responses_disable_only_their_queue() {
    for (fault, expected) in [
        (BlkbackFault::WrongIdAt(1), "response: found id 1, expected that of a request in flight"),
        (
            BlkbackFault::DuplicateAt(1),
            "the backend violates the protocol: it claims more responses than there are requests",
        ),
        (BlkbackFault::WrongOperationAt(1), "response to request 0: found operation 5, expected 1"),
        (BlkbackFault::WrongStatusAt(1), "response to request 0: found status 7, expected 0, -1 or -2"),
    ] {
        let mut rig = rig(BlkbackBehaviour { fault, ..BlkbackBehaviour::default() });
        rig.options.queues = 2;
        let mut device = BlkfrontDevice::connect(&rig.options).unwrap();
        let mut set = device.take_queues().pop().unwrap();
        let submit = |set: &mut BlkfrontQueueSet, queue: usize| {
            let data = data_segment(&set.queues_mut()[queue], 0, 4096);
            set.queues_mut()[queue].write(0, Sector512(0), data).unwrap();
            set.queues_mut()[queue].publish();
        };
        submit(&mut set, 0);
        finish(&mut set);
        submit(&mut set, 1);
        let error = loop {
            match set
                .wait(1)
                .and_then(|()| Ok(set.queues_mut()[1].poll()?))
                .and_then(|_| Ok(set.queues_mut()[1].reap()?))
            {
                Ok(None) => {}
                Ok(Some(done)) => panic!("{done:?}"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.to_string(), format!("the device broke the ring's protocol: {expected}"));
        assert_eq!(set.queues_mut()[1].flush(0), Err(SubmitError::Disabled));
        // The other queue goes on, also after the backend has looked at the broken ring again (at its next tick).
        std::thread::sleep(Duration::from_millis(60));
        submit(&mut set, 0);
        wait_for(Bound::seconds(20), || (set.queues_mut()[0].poll().unwrap() > 0).then_some(()))
            .unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert_eq!(set.queues_mut()[0].reap().unwrap().unwrap().status, BlkfrontStatus::Ok);
        device.stop(vec![set]).unwrap();
    }
}

#[test]
fn a_sleeper_is_woken_by_its_waker() {
    let rig = rig(BlkbackBehaviour { fault: BlkbackFault::StallAfter(0), ..BlkbackBehaviour::default() });
    let mut device = BlkfrontDevice::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let waker = set.waker().unwrap();
    set.queues_mut()[0].flush(0).unwrap();
    set.queues_mut()[0].publish();
    let sleeper = std::thread::spawn(move || set.wait(1).map(|()| set));
    while rig.model.requests(0) == 0 {
        std::thread::yield_now();
    }
    waker.wake();
    let mut set = sleeper.join().unwrap().unwrap();
    assert_eq!(set.queues_mut()[0].poll().unwrap(), 0);
    device.stop(vec![set]).unwrap();
}

#[test]
fn a_raw_frontend_sends_anything() {
    let rig = rig(BlkbackBehaviour::default());
    let xen = &*rig.options.xen;
    let mut front = RawFrontend::open(xen, &rig.options.path, long()).unwrap();
    front.initialise().unwrap();
    let mut ring = RawRing::new(xen, front.backend(), 1, Abi::X86_32).unwrap();
    front.connect(&RawFrontend::ring_keys(Abi::X86_32, false, &[&ring])).unwrap();
    assert_eq!(front.info().unwrap().capacity, Sector512(2048));
    let data = xen.share(front.backend(), 1, false).unwrap();
    let mut transfer = RwRequest { nr_segments: 1, sector: Sector512(0), segments: Default::default() };
    transfer.segments[0].gref = data.refs[0];
    let request = |op: u8, id: u64| BlkifRequest { id, operation: op, handle: 9, body: RequestBody::Rw(transfer) };
    // Pages that the backend may not write.
    for (op, expected) in [(operation::WRITE, status::OKAY), (operation::READ, status::ERROR)] {
        assert!(ring.send(&request(op, u64::MAX)));
        let response = ring.receive(long()).unwrap().unwrap();
        assert_eq!((response.id, response.operation, response.status), (u64::MAX, op, expected));
    }
    assert!(ring.send(&BlkifRequest { id: 1, operation: 77, handle: 0, body: RequestBody::Unknown }));
    assert_eq!(ring.receive(long()).unwrap().unwrap().status, status::NOT_SUPPORTED);
    // A producer index out of range: the model closes the ring and does not respond any more.
    ring.front.publish_index(1000);
    ring.notify();
    assert_eq!(ring.receive(Duration::from_millis(50)).unwrap(), None);
    ring.overwrite(0, &[0xff; 4]);
    front.write("anything", "at all").unwrap();
    front.remove("anything").unwrap();
    front.set_state(XenbusState::Closed).unwrap();
    assert_eq!(front.wait(&[XenbusState::Closed]).unwrap(), XenbusState::Closed);
}
