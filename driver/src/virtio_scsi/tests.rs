//! The driver against the model device, over a real socket and real shared memory.

use std::collections::BTreeMap;
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen};
use mqblk_memory::GuestAddress;

use super::model::{Behaviour, Disk, Fault, Model};
use super::*;
use crate::{DriverError, Piece, ShapeChoice};

struct Rig {
    model: Model,
    options: Options,
    _folder: tempfile::TempDir,
}

fn rig(behaviour: Behaviour) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.sock");
    let model = Model::start(&path, behaviour);
    let mut options = Options::new(path);
    options.poison_status = true;
    Rig { model, options, _folder: folder }
}

const HERE: Address = Address { target: 0, lun: 0 };

fn disks(targets: impl IntoIterator<Item = (u8, u16)>, size: usize) -> BTreeMap<Address, Disk> {
    targets.into_iter().map(|(target, lun)| (Address { target, lun }, Disk::new(size))).collect()
}

fn piece(set: &mut QueueSet, at: u64, len: u32) -> Piece {
    Piece { address: GuestAddress(set.queues()[0].data().0.0 + at), len }
}

/// Runs one command on the set's first queue.
fn run(set: &mut QueueSet, command: &Command) -> Ending {
    set.submit(0, 7, command).unwrap();
    set.publish().unwrap();
    loop {
        set.look(0).unwrap();
        if let Some(done) = set.reap(0).unwrap() {
            assert_eq!(done.user, 7);
            return done.ending;
        }
        set.wait(1).unwrap();
    }
}

#[test]
fn every_command_works_direct_and_indirect_with_and_without_event_idx() {
    const EVENT_IDX: u64 = 1 << 29;
    const INDIRECT: u64 = 1 << 28;
    for (shape, without) in [
        (ShapeChoice::Direct, 0),
        (ShapeChoice::Indirect, 0),
        (ShapeChoice::Indirect, INDIRECT),
        (ShapeChoice::Auto, EVENT_IDX),
    ] {
        let mut rig = rig(Behaviour { without, ..Behaviour::default() });
        rig.options.shape = shape;
        let mut device = Device::connect(&rig.options).unwrap();
        let mut set = device.take_queues().pop().unwrap();
        let memory = set.queues()[0].memory().clone();
        let (from, to) = (piece(&mut set, 0, 1024), piece(&mut set, 4096, 1024));
        let content: Vec<u8> = (0..1024_u32).map(|i| (i * 7 % 251) as u8).collect();
        memory.write(from.address, &content).unwrap();
        let write = Command::write(HERE, Lba(3), 2, from, true);
        let attention = Sense { key: 6, asc: 0x29, ascq: 0, deferred: false, information: None };
        assert_eq!(run(&mut set, &write), Ending::Check(attention));
        assert_eq!(run(&mut set, &write), Ending::Good);
        assert_eq!(rig.model.disks()[&HERE].bytes[3 * 512..5 * 512], content);
        assert_eq!(run(&mut set, &Command::read(HERE, Lba(3), 2, to)), Ending::Good);
        let mut found = vec![0; 1024];
        memory.read(to.address, &mut found).unwrap();
        assert_eq!(found, content);
        assert_eq!(run(&mut set, &Command::flush(HERE)), Ending::Good);

        let extents = [Extent { start: Lba(3), blocks: 1 }, Extent { start: Lba(9), blocks: 2 }];
        let unmap = Command::unmap(HERE, &extents, &memory, to).unwrap();
        assert_eq!(run(&mut set, &unmap), Ending::Good);
        let same = Command::write_same(HERE, Lba(20), 3, Piece { len: 512, ..from }, false);
        assert_eq!(run(&mut set, &same), Ending::Good);
        let bytes = rig.model.disks()[&HERE].bytes.clone();
        assert!(bytes[3 * 512..4 * 512].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[4 * 512..5 * 512], content[512..]);
        assert_eq!((20..24).filter(|at| bytes[at * 512..][..512] == content[..512]).count(), 3);
        assert!(Command::unmap(HERE, &extents, &memory, Piece { len: 39, ..to }).is_none());

        // Less than was asked for, past the end, a command that is none, and a unit that is none.
        let inquiry = Command { to: HERE, cdb: Cdb::inquiry(255), data: Data::In(Piece { len: 255, ..to }) };
        assert_eq!(run(&mut set, &inquiry), Ending::Short { residual: 255 - 36 });
        let beyond = Command::read(HERE, Lba(2048), 2, to);
        assert!(matches!(run(&mut set, &beyond), Ending::Check(Sense { key: 5, asc: 0x21, ascq: 0, .. })));
        let raw = Command { to: HERE, cdb: Cdb::raw(&[0xf0, 1, 2]), data: Data::None };
        assert!(matches!(run(&mut set, &raw), Ending::Check(Sense { key: 5, asc: 0x20, .. })));
        let nowhere = Command::flush(Address { target: 9, lun: 0 });
        assert_eq!(run(&mut set, &nowhere), Ending::Response(Response::BadTarget));
        device.stop(vec![set]).unwrap();
    }
}

#[test]
fn answers_that_are_wrong_are_told_apart() {
    let medium = Sense { key: 3, asc: 0x11, ascq: 0, deferred: false, information: None };
    for (fault, expected) in [
        (Fault::FailFrom(0), Ending::Check(medium)),
        (Fault::StatusFrom(0, 0x28), Ending::Status(0x28)),
        (Fault::StatusFrom(0, 2), Ending::Malformed("CHECK CONDITION without sense data")),
        (Fault::ResponseFrom(0, 7), Ending::Response(Response::TargetFailure)),
        (Fault::ResponseFrom(0, 99), Ending::Response(Response::Unknown(99))),
        (Fault::SenseFrom(0, 2), Ending::Malformed("sense data of no known format")),
        (Fault::SenseFrom(0, 97), Ending::Malformed("more sense data than there is room for")),
        (Fault::ResidualFrom(0, 12), Ending::Short { residual: 12 }),
        (Fault::ResidualFrom(0, 513), Ending::Malformed("a residual that is larger than the data")),
        (Fault::SilentFrom(0), Ending::NotWritten),
    ] {
        let mut disks = disks([(0, 0)], 1 << 20);
        disks.get_mut(&HERE).unwrap().attentions = 0;
        let rig = rig(Behaviour { fault, disks, ..Behaviour::default() });
        let mut device = Device::connect(&rig.options).unwrap();
        let mut set = device.take_queues().pop().unwrap();
        let data = piece(&mut set, 0, 512);
        assert_eq!(run(&mut set, &Command::read(HERE, Lba(0), 1, data)), expected, "{fault:?}");
    }
    let rig = rig(Behaviour { fault: Fault::WrongIdAt(0), ..Behaviour::default() });
    let mut device = Device::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let data = piece(&mut set, 0, 512);
    set.submit(0, 0, &Command::read(HERE, Lba(0), 1, data)).unwrap();
    set.publish().unwrap();
    while set.look(0).unwrap() == 0 {
        set.wait(1).unwrap();
    }
    assert!(set.reap(0).is_err());
}

#[test]
fn a_scan_finds_all_units_and_nothing_else() {
    let places = [(0, 0), (0, 1), (0, 0x1234), (7, 0), (31, 5), (255, 0), (255, 255), (255, 256)];
    let mut disks = disks(places, 1 << 20);
    let odd = disks.get_mut(&Address { target: 7, lun: 0 }).unwrap();
    (odd.block, odd.attentions, odd.read_only) = (4096, 5, true);
    let rig = rig(Behaviour { disks, ..Behaviour::default() });
    let mut device = Device::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    for _ in 0..2 {
        let units = device.scan(&mut set).unwrap();
        let found: Vec<(u8, u16)> = units.iter().map(|unit| (unit.at.target, unit.at.lun)).collect();
        assert_eq!(found, places);
        for unit in &units {
            assert_eq!(unit.capacity(), Some(ByteLen(1 << 20)));
            assert_eq!(unit.serial.as_deref(), Some(unit.at.to_string().as_str()));
            assert_eq!((unit.vendor.as_str(), unit.product.as_str()), ("MQBLK", "model"));
            assert_eq!(unit.limits.max_transfer, Some(2048));
            assert_eq!(unit.designators[0].name, "model");
            let odd = unit.at.target == 7;
            assert_eq!((unit.block == BlockSize::B4096, unit.read_only), (odd, odd));
            assert_eq!((unit.thin, unit.zeroed, unit.write_cache), (true, true, Some(true)));
        }
    }
    // A command for each target, seven for each unit, and one more for each unit attention.
    assert_eq!(rig.model.commands(), 2 * (256 + 8 * 7) + 7 + 5);
    device.stop(vec![set]).unwrap();
}

#[test]
fn a_target_with_more_units_than_a_short_list_holds() {
    let disks = disks((0..2).flat_map(|target| (0..1000).map(move |lun| (target, lun))), 4096);
    let rig = rig(Behaviour { disks, ..Behaviour::default() });
    let mut device = Device::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    assert_eq!(device.scan(&mut set).unwrap().len(), 2000);
}

#[test]
fn a_scan_that_is_not_answered_ends() {
    let rig = rig(Behaviour::default());
    let mut options = rig.options.clone();
    options.answer_limit = Duration::from_millis(200);
    let mut device = Device::connect(&options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    drop(rig);
    assert!(matches!(device.scan(&mut set), Err(DriverError::NoAnswer(_))));
}

#[test]
fn the_configuration_is_read_set_and_done_without() {
    let rig1 = rig(Behaviour { sense_size: 18, ..Behaviour::default() });
    let device = Device::connect(&rig1.options).unwrap();
    let info = *device.info();
    assert_eq!((info.config.sense_size, info.config.cdb_size, info.queues), (96, 32, 4));
    assert!(info.hotplug && info.change && info.config.max_target == 255);
    let mut rig2 = rig(Behaviour { no_config: true, without: 1 << 1, queues: 3, ..Behaviour::default() });
    let device = Device::connect(&rig2.options).unwrap();
    assert_eq!((device.info().queues, device.info().hotplug), (3, false));
    drop(device);
    rig2.options.queues = 4;
    let error = Device::connect(&rig2.options).unwrap_err().to_string();
    assert_eq!(error, "queues: found 4, expected 1 to 3");
}

#[test]
fn task_management_is_asked_and_answered() {
    let limit = Duration::from_secs(60);
    let rig = rig(Behaviour { fault: Fault::KeepFrom(0), ..Behaviour::default() });
    let mut device = Device::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let mut control = device.take_control().unwrap();
    assert!(device.take_control().is_none());
    let all = [
        (TaskManagement::AbortTask, TaskAnswer::Complete),
        (TaskManagement::AbortTaskSet, TaskAnswer::Complete),
        (TaskManagement::ClearAca, TaskAnswer::Rejected),
        (TaskManagement::ClearTaskSet, TaskAnswer::Complete),
        (TaskManagement::NexusReset, TaskAnswer::Complete),
        (TaskManagement::LogicalUnitReset, TaskAnswer::Complete),
        (TaskManagement::QueryTask, TaskAnswer::Complete),
        (TaskManagement::QueryTaskSet, TaskAnswer::Complete),
    ];
    for (task, answer) in all {
        assert_eq!(control.run(task, HERE, 77, limit).unwrap(), answer, "{task:?}");
    }
    let asked: Vec<_> = (0..8).map(|subtype| (subtype, [1, 0, 0x40, 0, 0, 0, 0, 0], 77)).collect();
    assert_eq!(rig.model.tasks(), asked);
    let nowhere = Address { target: 3, lun: 1 };
    assert_eq!(control.run(TaskManagement::NexusReset, nowhere, 0, limit).unwrap(), TaskAnswer::IncorrectLun);

    // A command that is kept is there, is ended, and has ended when the answer is there.
    let data = piece(&mut set, 0, 512);
    set.submit(0, 5, &Command::read(HERE, Lba(0), 1, data)).unwrap();
    set.publish().unwrap();
    let tag = set.tag(5);
    while control.run(TaskManagement::QueryTask, HERE, tag, limit).unwrap() != TaskAnswer::Succeeded {
        std::thread::yield_now();
    }
    assert_eq!(control.run(TaskManagement::AbortTask, HERE, tag, limit).unwrap(), TaskAnswer::Complete);
    assert_eq!(set.look(0).unwrap(), 1);
    let done = set.reap(0).unwrap().unwrap();
    assert_eq!((done.user, done.ending), (5, Ending::Response(Response::Aborted)));
}

#[test]
fn events_come_and_their_buffers_go_back() {
    let rig = rig(Behaviour::default());
    let mut device = Device::connect(&rig.options).unwrap();
    let mut control = device.take_control().unwrap();
    assert_eq!(control.event().unwrap(), None);
    for round in 0..40 {
        let at = Address { target: round, lun: 300 };
        rig.model.send_event(if round == 39 { 3 | 1 << 31 } else { 1 }, at, if round == 39 { 0x092a } else { 1 });
        let event = loop {
            if let Some(event) = control.event().unwrap() {
                break event;
            }
            control.wait(Some(Duration::from_secs(60))).unwrap();
        };
        let expected = match round {
            39 => Event { kind: EventKind::Changed { asc: 0x2a, ascq: 9 }, at: Some(at), missed: true },
            _ => Event { kind: EventKind::Rescan, at: Some(at), missed: false },
        };
        assert_eq!(event, expected);
    }
}

/// Threads that all write to and read from the same few targets, each its own blocks. Returns what was handed over.
fn storm(steer: Steer, threads: u16, queues: u16, targets: u8, queue_size: u16) -> (Rig, u64) {
    const COMMANDS: u32 = 400;
    const DEPTH: u32 = 4;
    let mut rig =
        rig(Behaviour { disks: disks((0..targets).map(|target| (target, 0)), 1 << 20), ..Behaviour::default() });
    (rig.options.steer, rig.options.threads, rig.options.queues) = (steer, threads, queues);
    rig.options.queue_size = queue_size;
    rig.options.shape = ShapeChoice::Direct;
    let mut device = Device::connect(&rig.options).unwrap();
    let mut sets = device.take_queues();
    assert_eq!(device.scan(&mut sets[0]).unwrap().len(), usize::from(targets));
    let sets: Vec<QueueSet> = std::thread::scope(|scope| {
        let work = |(thread, mut set): (usize, QueueSet)| {
            move || {
                let memory = set.queues()[0].memory().clone();
                let data: Vec<Piece> = (0..DEPTH).map(|user| piece(&mut set, u64::from(user) * 512, 512)).collect();
                let (mut next, mut refused) = (0, vec![]);
                let mut ends = [0; DEPTH as usize];
                let mut over = false;
                let mut todo: Vec<u32> = (0..DEPTH).collect();
                while !over {
                    todo.append(&mut refused);
                    for user in todo.drain(..) {
                        if next == COMMANDS {
                            break;
                        }
                        let to = Address { target: (next / 3) as u8 % targets, lun: 0 };
                        let lba = Lba((thread * 100) as u64 + u64::from(user));
                        let word = u64::from(next) << 32 | thread as u64;
                        memory.write(data[user as usize].address, &word.to_le_bytes()).unwrap();
                        let command = Command::write(to, lba, 1, data[user as usize], false);
                        let own = next as usize % set.queues().len();
                        match set.submit(own, user, &command) {
                            Ok(()) => next += 1,
                            Err(crate::Refused::Full) => refused.push(user),
                            Err(error) => panic!("{error}"),
                        }
                    }
                    set.publish().unwrap();
                    set.collect().unwrap();
                    for queue in 0..set.queues().len() {
                        set.look(queue).unwrap();
                        while let Some(done) = set.reap(queue).unwrap() {
                            assert_eq!(done.ending, Ending::Good);
                            ends[done.user as usize] += 1;
                            todo.push(done.user);
                        }
                    }
                    while let Some(done) = set.arrived() {
                        assert_eq!(done.ending, Ending::Good);
                        ends[done.user as usize] += 1;
                        todo.push(done.user);
                    }
                    set.publish().unwrap();
                    if next == COMMANDS && set.outstanding() == 0 {
                        over = set.depart();
                    }
                    if todo.is_empty() && !over {
                        set.wait(1).unwrap();
                    }
                }
                assert_eq!((ends.iter().sum::<u32>(), set.outstanding(), set.away()), (COMMANDS, 0, 0));
                assert!(set.queues().iter().all(|queue| queue.in_flight() == 0));
                set
            }
        };
        let threads: Vec<_> = sets.into_iter().enumerate().map(work).map(|work| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let handed_over = sets.iter().map(QueueSet::handed_over).sum();
    let served: u64 = (0..4).map(|queue| rig.model.transfers(queue)).sum();
    assert_eq!(served, u64::from(threads) * u64::from(COMMANDS));
    device.stop(sets).unwrap();
    (rig, handed_over)
}

#[test]
fn a_target_is_on_one_queue_whoever_submits() {
    for (threads, queues, targets, queue_size) in
        [(4, 4, 1, 64), (3, 3, 2, 64), (2, 4, 3, 64), (4, 4, 2, 4), (1, 4, 2, 16)]
    {
        let (rig, handed_over) = storm(Steer::Target, threads, queues, targets, queue_size);
        assert_eq!(rig.model.crossings(), 0, "{threads} threads, {queues} queues, {targets} targets");
        if targets == 1 {
            assert!(handed_over > 0, "four threads on one target never met");
        }
    }
}

#[test]
fn the_other_policies_lose_nothing_either() {
    let (rig, handed_over) = storm(Steer::Fixed, 4, 4, 3, 16);
    assert_eq!((rig.model.crossings(), rig.model.transfers(3)), (0, 0));
    assert!(handed_over > 0);
    let (rig, handed_over) = storm(Steer::Submitter, 4, 4, 1, 16);
    // So that the check of the others is seen to see something.
    assert!(rig.model.crossings() > 0);
    assert_eq!(handed_over, 0);
    // Each thread writes on its own queue, to the one target that there is.
    assert!((0..4).all(|queue| rig.model.transfers(queue) == 400));
}

#[test]
fn a_full_queue_pushes_back() {
    let mut rig = rig(Behaviour { fault: Fault::KeepFrom(0), ..Behaviour::default() });
    rig.options.queue_size = 16;
    rig.options.shape = ShapeChoice::Direct;
    let mut device = Device::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let data = piece(&mut set, 0, 512);
    let taken = (0..100).take_while(|user| set.submit(0, *user, &Command::read(HERE, Lba(0), 1, data)).is_ok()).count();
    assert_eq!((taken, set.outstanding()), (5, 5), "16 descriptors are 5 commands of 3");
    rig.options.queue_size = 64;
    rig.options.outstanding = 3;
    drop((set, device));
    let mut device = Device::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let taken = (0..100).take_while(|user| set.submit(0, *user, &Command::read(HERE, Lba(0), 1, data)).is_ok()).count();
    assert_eq!(taken, 3);
}
