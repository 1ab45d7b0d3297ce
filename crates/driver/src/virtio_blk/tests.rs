//! The driver against the model device, over a real socket and real shared memory.

use std::path::PathBuf;

use super::model::{BlkBehaviour, BlkFault, BlkModel};
use super::*;
use mqblk_core::{ByteLen, Sector512};
use mqblk_memory::GuestAddress;

struct Rig {
    model: BlkModel,
    options: BlkConnectOptions,
    _folder: tempfile::TempDir,
}

fn rig(behaviour: BlkBehaviour) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("model.sock");
    let model = BlkModel::start(&path, behaviour);
    Rig { model, options: BlkConnectOptions::new(path), _folder: folder }
}

/// Waits for one completion.
fn finish(set: &mut BlkQueueSet) -> BlkCompletion {
    let queue = &mut set.queues_mut()[0];
    queue.publish().unwrap();
    loop {
        for queue in set.queues_mut() {
            queue.poll().unwrap();
            if let Some(done) = queue.reap().unwrap() {
                return done;
            }
        }
        set.wait(1).unwrap();
    }
}

fn data_segment(queue: &BlkQueue, at: u64, len: u32) -> DataSegment {
    DataSegment { address: GuestAddress(queue.data().0.0 + at), len }
}

const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;

#[test]
fn every_request_works_direct_and_indirect_with_and_without_event_idx() {
    for (descriptors, without) in [
        (DescriptorLayout::Direct, 0),
        (DescriptorLayout::Indirect, 0),
        (DescriptorLayout::Indirect, INDIRECT),
        (DescriptorLayout::Auto, EVENT_IDX),
    ] {
        let mut rig = rig(BlkBehaviour { without_features: without, ..BlkBehaviour::default() });
        rig.options.descriptors = descriptors;
        rig.options.poison_status = true;
        let mut device = BlkDevice::connect(&rig.options).unwrap();
        assert_eq!(device.info().capacity, Sector512(2048));
        let mut set = device.take_queues().pop().unwrap();
        let ok = |done: BlkCompletion, user_data, written| {
            assert_eq!(done, BlkCompletion { user_data, status: BlkStatus::Ok, written });
        };
        let queue = &mut set.queues_mut()[0];
        let memory = queue.memory().clone();
        let (from, to) = (data_segment(queue, 0, 1024), data_segment(queue, 4096, 1024));
        let content: Vec<u8> = (0..1024_u32).map(|i| (i * 7 % 251) as u8).collect();
        memory.write(from.address, &content).unwrap();
        queue.write(1, Sector512(3), from).unwrap();
        ok(finish(&mut set), 1, 1);
        assert_eq!(rig.model.disk()[3 * 512..5 * 512], content);
        set.queues_mut()[0].read(2, Sector512(3), to).unwrap();
        ok(finish(&mut set), 2, 1025);
        let mut found = vec![0; 1024];
        memory.read(to.address, &mut found).unwrap();
        assert_eq!(found, content);

        // In two segments, in reverse order.
        let halves = [data_segment(&set.queues_mut()[0], 512, 512), data_segment(&set.queues_mut()[0], 0, 512)];
        set.queues_mut()[0].write_segments(3, Sector512(10), halves).unwrap();
        ok(finish(&mut set), 3, 1);
        assert_eq!(rig.model.disk()[10 * 512..11 * 512], content[512..]);
        let unaligned = [data_segment(&set.queues_mut()[0], 8192, 1), data_segment(&set.queues_mut()[0], 9000, 511)];
        set.queues_mut()[0].read_segments(4, Sector512(10), unaligned).unwrap();
        ok(finish(&mut set), 4, 513);

        set.queues_mut()[0].flush(5).unwrap();
        ok(finish(&mut set), 5, 1);
        assert_eq!(rig.model.flushes(), 1);
        let range = |start, sectors| SectorRange { start: Sector512(start), sectors, unmap: false };
        set.queues_mut()[0].discard(6, &[range(3, 1)]).unwrap();
        ok(finish(&mut set), 6, 1);
        set.queues_mut()[0].write_zeroes(7, &[range(10, 1), range(11, 1)]).unwrap();
        ok(finish(&mut set), 7, 1);
        let disk = rig.model.disk().clone();
        assert!(disk[3 * 512..4 * 512].iter().chain(&disk[10 * 512..12 * 512]).all(|byte| *byte == 0));
        assert_eq!(disk[4 * 512..5 * 512], content[512..]);
        assert_eq!(set.queues_mut()[0].discard(8, &[]), Err(SubmitError::Empty));
        set.queues_mut()[0].get_id(9, to.address).unwrap();
        finish(&mut set);
        let mut id = [0; 6];
        memory.read(to.address, &mut id).unwrap();
        assert_eq!(&id, b"model\0");
        // Past the end.
        set.queues_mut()[0].read(10, Sector512(2048), to).unwrap();
        assert_eq!(finish(&mut set).status, BlkStatus::IoError);
        // The numbers depend on the timing of sleeps, but are never more than one for each request.
        assert!(set.calls().unwrap() <= 10 && set.kicks() <= 10, "{:?} calls, {} kicks", set.calls(), set.kicks());
        device.stop(vec![set]).unwrap();
    }
}

#[test]
fn a_full_queue_rejects_requests_and_recovers() {
    let mut rig = rig(BlkBehaviour::default());
    rig.options.queue_size = 16;
    rig.options.descriptors = DescriptorLayout::Direct;
    let mut device = BlkDevice::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    for round in 0..50_u32 {
        let queue = &mut set.queues_mut()[0];
        let data = data_segment(queue, 0, 512);
        let mut submitted = 0;
        while queue.read(round * 100 + submitted, Sector512(u64::from(submitted)), data).is_ok() {
            submitted += 1;
        }
        assert_eq!(submitted, 5, "16 descriptors are 5 requests of 3");
        queue.publish().unwrap();
        let mut seen = vec![];
        while set.queues_mut()[0].in_flight() > 0 {
            set.wait(5).unwrap();
            set.queues_mut()[0].poll().unwrap();
            while let Some(done) = set.queues_mut()[0].reap().unwrap() {
                seen.push(done.user_data);
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..5).map(|i| round * 100 + i).collect::<Vec<_>>());
    }
}

#[test]
fn queues_are_distributed_over_threads_and_all_are_served() {
    let mut rig = rig(BlkBehaviour::default());
    rig.options.queues = 3;
    rig.options.threads = 2;
    let mut device = BlkDevice::connect(&rig.options).unwrap();
    let sets = device.take_queues();
    assert!(device.take_queues().is_empty());
    let mut sets: Vec<BlkQueueSet> = std::thread::scope(|scope| {
        let threads: Vec<_> = sets
            .into_iter()
            .map(|mut set| {
                scope.spawn(move || {
                    let count = set.queues_mut().len();
                    for index in 0..count * 20 {
                        let data = data_segment(&set.queues_mut()[index % count], 0, 512);
                        set.queues_mut()[index % count].write(0, Sector512(0), data).unwrap();
                        set.queues_mut()[index % count].publish().unwrap();
                        assert_eq!(finish(&mut set).status, BlkStatus::Ok);
                    }
                    set
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sets.iter_mut().map(|set| set.queues_mut().len()).collect::<Vec<_>>(), [2, 1]);
    assert_eq!((0..4).map(|queue| rig.model.requests(queue)).collect::<Vec<_>>(), [20, 20, 20, 0]);
    device.stop(sets).unwrap();
    // The server accepts the next connection.
    BlkDevice::connect(&rig.options).unwrap();
}

#[test]
fn the_cache_mode_is_switched() {
    let rig = rig(BlkBehaviour::default());
    let mut device = BlkDevice::connect(&rig.options).unwrap();
    assert_eq!(device.info().writeback, Some(true));
    device.set_writeback(false).unwrap();
    assert_eq!(device.refresh().unwrap().writeback, Some(false));
}

#[test]
fn unsupported_options_are_reported() {
    let mut rig = rig(BlkBehaviour { queues: 2, ..BlkBehaviour::default() });
    rig.options.queues = 3;
    let error = BlkDevice::connect(&rig.options).unwrap_err().to_string();
    assert_eq!(error, "queues: found 3, expected 1 to 2");
    rig.options.queues = 2;
    rig.options.queue_size = 100;
    let error = BlkDevice::connect(&rig.options).unwrap_err().to_string();
    assert!(error.starts_with("queue size: found 100, expected a power of two"), "{error}");
    rig.options.queue_size = 128;
    rig.options.data_per_queue = ByteLen(1 << 60);
    assert!(BlkDevice::connect(&rig.options).is_err());
}

#[test]
fn a_device_that_misbehaves_is_an_error_and_no_panic() {
    let mut rig = rig(BlkBehaviour { fault: BlkFault::WrongIdAt(0), ..BlkBehaviour::default() });
    rig.options.poison_status = true;
    let mut device = BlkDevice::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let data = data_segment(&set.queues_mut()[0], 0, 512);
    set.queues_mut()[0].read(0, Sector512(0), data).unwrap();
    set.queues_mut()[0].publish().unwrap();
    while set.queues_mut()[0].poll().unwrap() == 0 {
        set.wait(1).unwrap();
    }
    assert!(set.queues_mut()[0].reap().is_err());

    let other = self::rig(BlkBehaviour { fault: BlkFault::NoStatusFrom(0), ..BlkBehaviour::default() });
    rig.options.socket = other.options.socket.clone();
    let mut device = BlkDevice::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let data = data_segment(&set.queues_mut()[0], 0, 512);
    set.queues_mut()[0].read(0, Sector512(0), data).unwrap();
    assert_eq!(finish(&mut set).status, BlkStatus::NotWritten);
}

#[test]
fn a_sleeper_is_woken_by_its_waker_and_the_end_of_the_server_is_detected() {
    let rig = rig(BlkBehaviour { fault: BlkFault::DisconnectAfter(0), ..BlkBehaviour::default() });
    let mut device = BlkDevice::connect(&rig.options).unwrap();
    let monitor = device.hangup_monitor().unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let waker = set.waker().unwrap();
    let data = data_segment(&set.queues_mut()[0], 0, 512);
    set.queues_mut()[0].read(0, Sector512(0), data).unwrap();
    set.queues_mut()[0].publish().unwrap();
    let sleeper = std::thread::spawn(move || set.wait(1).map(|()| set));
    assert!(monitor.wait_hangup(std::time::Duration::from_secs(60)));
    waker.wake();
    let mut set = sleeper.join().unwrap().unwrap();
    assert_eq!(set.queues_mut()[0].poll().unwrap(), 0);
    assert!(device.stop(vec![set]).is_err());
}

#[test]
fn a_wait_with_an_end_ends_with_and_without_requests() {
    let rig = rig(BlkBehaviour::default());
    let mut device = BlkDevice::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let limit = std::time::Duration::from_micros(300);
    let start = std::time::Instant::now();
    while start.elapsed() < limit {
        // Nothing is in flight: without an end this would return at once.
        set.wait_at_most(1, limit).unwrap();
    }
    let data = data_segment(&set.queues()[0], 0, 512);
    set.queues_mut()[0].read(7, Sector512(0), data).unwrap();
    set.queues_mut()[0].publish().unwrap();
    while set.queues_mut()[0].poll().unwrap() == 0 {
        set.wait_at_most(1, std::time::Duration::from_secs(60)).unwrap();
    }
    assert_eq!(set.queues_mut()[0].reap().unwrap().unwrap().user_data, 7);
}
