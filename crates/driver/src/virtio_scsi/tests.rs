//! The driver against the model device, over a real socket and real shared memory.

use std::collections::BTreeMap;
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen};
use mqblk_memory::GuestAddress;

use super::model::{ModelDisk, ScsiBehaviour, ScsiFault, ScsiModel};
use super::*;
use crate::{DataSegment, DescriptorLayout, DriverError};

struct Rig {
    model: ScsiModel,
    options: ScsiConnectOptions,
    _folder: tempfile::TempDir,
}

fn rig(behaviour: ScsiBehaviour) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.sock");
    let model = ScsiModel::start(&path, behaviour);
    let mut options = ScsiConnectOptions::new(path);
    options.poison_status = true;
    Rig { model, options, _folder: folder }
}

const HERE: LunAddress = LunAddress { target: 0, lun: 0 };

fn disks(targets: impl IntoIterator<Item = (u8, u16)>, size: usize) -> BTreeMap<LunAddress, ModelDisk> {
    targets.into_iter().map(|(target, lun)| (LunAddress { target, lun }, ModelDisk::new(size))).collect()
}

fn data_segment(set: &mut ScsiQueueSet, at: u64, len: u32) -> DataSegment {
    DataSegment { address: GuestAddress(set.queues_mut()[0].data().0.0 + at), len }
}

/// Runs one command on the set's first queue.
fn run(set: &mut ScsiQueueSet, command: &Command) -> CommandOutcome {
    set.submit(0, 7, command).unwrap();
    set.publish().unwrap();
    loop {
        set.poll(0).unwrap();
        if let Some(done) = set.reap(0).unwrap() {
            assert_eq!(done.user_data, 7);
            return done.outcome;
        }
        set.wait(1).unwrap();
    }
}

#[test]
fn every_command_works_direct_and_indirect_with_and_without_event_idx() {
    const EVENT_IDX: u64 = 1 << 29;
    const INDIRECT: u64 = 1 << 28;
    for (descriptors, without) in [
        (DescriptorLayout::Direct, 0),
        (DescriptorLayout::Indirect, 0),
        (DescriptorLayout::Indirect, INDIRECT),
        (DescriptorLayout::Auto, EVENT_IDX),
    ] {
        let mut rig = rig(ScsiBehaviour { without_features: without, ..ScsiBehaviour::default() });
        rig.options.descriptors = descriptors;
        let mut device = ScsiController::connect(&rig.options).unwrap();
        let mut set = device.take_queues().pop().unwrap();
        let memory = set.queues_mut()[0].memory().clone();
        let (from, to) = (data_segment(&mut set, 0, 1024), data_segment(&mut set, 4096, 1024));
        let content: Vec<u8> = (0..1024_u32).map(|i| (i * 7 % 251) as u8).collect();
        memory.write(from.address, &content).unwrap();
        let write = Command::write(HERE, Lba(3), 2, from, true);
        let attention = Sense { key: 6, asc: 0x29, ascq: 0, deferred: false, information: None };
        assert_eq!(run(&mut set, &write), CommandOutcome::CheckCondition(attention));
        assert_eq!(run(&mut set, &write), CommandOutcome::Good);
        assert_eq!(rig.model.disks()[&HERE].bytes[3 * 512..5 * 512], content);
        assert_eq!(run(&mut set, &Command::read(HERE, Lba(3), 2, to)), CommandOutcome::Good);
        let mut found = vec![0; 1024];
        memory.read(to.address, &mut found).unwrap();
        assert_eq!(found, content);
        assert_eq!(run(&mut set, &Command::flush(HERE)), CommandOutcome::Good);

        let extents = [Extent { start: Lba(3), blocks: 1 }, Extent { start: Lba(9), blocks: 2 }];
        let unmap = Command::unmap(HERE, &extents, &memory, to).unwrap();
        assert_eq!(run(&mut set, &unmap), CommandOutcome::Good);
        let same = Command::write_same(HERE, Lba(20), 3, DataSegment { len: 512, ..from }, false);
        assert_eq!(run(&mut set, &same), CommandOutcome::Good);
        let bytes = rig.model.disks()[&HERE].bytes.clone();
        assert!(bytes[3 * 512..4 * 512].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[4 * 512..5 * 512], content[512..]);
        assert_eq!((20..24).filter(|at| bytes[at * 512..][..512] == content[..512]).count(), 3);
        assert!(Command::unmap(HERE, &extents, &memory, DataSegment { len: 39, ..to }).is_none());

        // An underrun, a read past the end, an unknown command, and an absent logical unit.
        let inquiry =
            Command { address: HERE, cdb: Cdb::inquiry(255), data: CommandData::In(DataSegment { len: 255, ..to }) };
        assert_eq!(run(&mut set, &inquiry), CommandOutcome::Underrun { residual: 255 - 36 });
        let beyond = Command::read(HERE, Lba(2048), 2, to);
        assert!(matches!(
            run(&mut set, &beyond),
            CommandOutcome::CheckCondition(Sense { key: 5, asc: 0x21, ascq: 0, .. })
        ));
        let raw = Command { address: HERE, cdb: Cdb::raw(&[0xf0, 1, 2]), data: CommandData::None };
        assert!(matches!(run(&mut set, &raw), CommandOutcome::CheckCondition(Sense { key: 5, asc: 0x20, .. })));
        let nowhere = Command::flush(LunAddress { target: 9, lun: 0 });
        assert_eq!(run(&mut set, &nowhere), CommandOutcome::Response(CommandResponse::BadTarget));
        device.stop(vec![set]).unwrap();
    }
}

#[test]
fn failures_and_invalid_responses_have_their_outcomes() {
    let medium = Sense { key: 3, asc: 0x11, ascq: 0, deferred: false, information: None };
    for (fault, expected) in [
        (ScsiFault::FailFrom(0), CommandOutcome::CheckCondition(medium)),
        (ScsiFault::StatusFrom(0, 0x28), CommandOutcome::Status(0x28)),
        (ScsiFault::StatusFrom(0, 2), CommandOutcome::Malformed("CHECK CONDITION without sense data")),
        (ScsiFault::ResponseFrom(0, 7), CommandOutcome::Response(CommandResponse::TargetFailure)),
        (ScsiFault::ResponseFrom(0, 99), CommandOutcome::Response(CommandResponse::Unknown(99))),
        (ScsiFault::SenseFrom(0, 2), CommandOutcome::Malformed("sense data of no known format")),
        (ScsiFault::SenseFrom(0, 97), CommandOutcome::Malformed("more sense data than there is room for")),
        (ScsiFault::ResidualFrom(0, 12), CommandOutcome::Underrun { residual: 12 }),
        (ScsiFault::ResidualFrom(0, 513), CommandOutcome::Malformed("a residual that is larger than the data")),
        (ScsiFault::NoResponseFrom(0), CommandOutcome::NotWritten),
    ] {
        let mut disks = disks([(0, 0)], 1 << 20);
        disks.get_mut(&HERE).unwrap().unit_attentions = 0;
        let rig = rig(ScsiBehaviour { fault, disks, ..ScsiBehaviour::default() });
        let mut device = ScsiController::connect(&rig.options).unwrap();
        let mut set = device.take_queues().pop().unwrap();
        let data = data_segment(&mut set, 0, 512);
        assert_eq!(run(&mut set, &Command::read(HERE, Lba(0), 1, data)), expected, "{fault:?}");
    }
    let rig = rig(ScsiBehaviour { fault: ScsiFault::WrongIdAt(0), ..ScsiBehaviour::default() });
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let data = data_segment(&mut set, 0, 512);
    set.submit(0, 0, &Command::read(HERE, Lba(0), 1, data)).unwrap();
    set.publish().unwrap();
    while set.poll(0).unwrap() == 0 {
        set.wait(1).unwrap();
    }
    assert!(set.reap(0).is_err());
}

#[test]
fn a_scan_finds_all_logical_units_and_nothing_else() {
    let places = [(0, 0), (0, 1), (0, 0x1234), (7, 0), (31, 5), (255, 0), (255, 255), (255, 256)];
    let mut disks = disks(places, 1 << 20);
    let odd = disks.get_mut(&LunAddress { target: 7, lun: 0 }).unwrap();
    (odd.block_size, odd.unit_attentions, odd.read_only) = (4096, 5, true);
    let rig = rig(ScsiBehaviour { disks, ..ScsiBehaviour::default() });
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    for _ in 0..2 {
        let units = device.scan(&mut set).unwrap();
        let found: Vec<(u8, u16)> = units.iter().map(|unit| (unit.address.target, unit.address.lun)).collect();
        assert_eq!(found, places);
        for unit in &units {
            assert_eq!(unit.capacity(), Some(ByteLen(1 << 20)));
            assert_eq!(unit.serial.as_deref(), Some(unit.address.to_string().as_str()));
            assert_eq!((unit.vendor.as_str(), unit.product.as_str()), ("MQBLK", "model"));
            assert_eq!(unit.limits.max_transfer, Some(2048));
            assert_eq!(unit.designators[0].name, "model");
            let odd = unit.address.target == 7;
            assert_eq!((unit.block_size == BlockSize::B4096, unit.read_only), (odd, odd));
            assert_eq!((unit.thin, unit.zeroed, unit.write_cache), (true, true, Some(true)));
        }
    }
    // A command for each target, seven for each logical unit, and one more for each unit attention.
    assert_eq!(rig.model.commands(), 2 * (256 + 8 * 7) + 7 + 5);
    device.stop(vec![set]).unwrap();
}

#[test]
fn a_target_with_more_luns_than_a_short_list_holds() {
    let disks = disks((0..2).flat_map(|target| (0..1000).map(move |lun| (target, lun))), 4096);
    let rig = rig(ScsiBehaviour { disks, ..ScsiBehaviour::default() });
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    assert_eq!(device.scan(&mut set).unwrap().len(), 2000);
}

#[test]
fn a_scan_without_completions_times_out() {
    let rig = rig(ScsiBehaviour::default());
    let mut options = rig.options.clone();
    options.reply_timeout = Duration::from_millis(200);
    let mut device = ScsiController::connect(&options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    drop(rig);
    assert!(matches!(device.scan(&mut set), Err(DriverError::Timeout(_))));
}

#[test]
fn the_configuration_space_is_read_and_written_and_optional() {
    let rig1 = rig(ScsiBehaviour { sense_size: 18, ..ScsiBehaviour::default() });
    let device = ScsiController::connect(&rig1.options).unwrap();
    let info = *device.info();
    assert_eq!((info.config.sense_size, info.config.cdb_size, info.queues), (96, 32, 4));
    assert!(info.hotplug && info.change && info.config.max_target == 255);
    let mut rig2 =
        rig(ScsiBehaviour { no_config: true, without_features: 1 << 1, queues: 3, ..ScsiBehaviour::default() });
    let device = ScsiController::connect(&rig2.options).unwrap();
    assert_eq!((device.info().queues, device.info().hotplug), (3, false));
    drop(device);
    rig2.options.queues = 4;
    let error = ScsiController::connect(&rig2.options).unwrap_err().to_string();
    assert_eq!(error, "queues: found 4, expected 1 to 3");
}

#[test]
fn task_management_functions_get_responses() {
    let limit = Duration::from_secs(60);
    let rig = rig(ScsiBehaviour { fault: ScsiFault::HoldFrom(0), ..ScsiBehaviour::default() });
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let mut control = device.take_control().unwrap();
    assert!(device.take_control().is_none());
    let all = [
        (TaskManagementFunction::AbortTask, TaskManagementResponse::Complete),
        (TaskManagementFunction::AbortTaskSet, TaskManagementResponse::Complete),
        (TaskManagementFunction::ClearAca, TaskManagementResponse::Rejected),
        (TaskManagementFunction::ClearTaskSet, TaskManagementResponse::Complete),
        (TaskManagementFunction::NexusReset, TaskManagementResponse::Complete),
        (TaskManagementFunction::LogicalUnitReset, TaskManagementResponse::Complete),
        (TaskManagementFunction::QueryTask, TaskManagementResponse::Complete),
        (TaskManagementFunction::QueryTaskSet, TaskManagementResponse::Complete),
    ];
    for (function, response) in all {
        assert_eq!(control.run(function, HERE, 77, limit).unwrap(), response, "{function:?}");
    }
    let expected: Vec<_> = (0..8).map(|subtype| (subtype, [1, 0, 0x40, 0, 0, 0, 0, 0], 77)).collect();
    assert_eq!(rig.model.task_management(), expected);
    let nowhere = LunAddress { target: 3, lun: 1 };
    assert_eq!(
        control.run(TaskManagementFunction::NexusReset, nowhere, 0, limit).unwrap(),
        TaskManagementResponse::IncorrectLun
    );

    // A held command is found, is aborted, and is completed before the function that aborts it.
    let data = data_segment(&mut set, 0, 512);
    set.submit(0, 5, &Command::read(HERE, Lba(0), 1, data)).unwrap();
    set.publish().unwrap();
    let tag = set.tag(5);
    while control.run(TaskManagementFunction::QueryTask, HERE, tag, limit).unwrap() != TaskManagementResponse::Succeeded
    {
        std::thread::yield_now();
    }
    assert_eq!(
        control.run(TaskManagementFunction::AbortTask, HERE, tag, limit).unwrap(),
        TaskManagementResponse::Complete
    );
    assert_eq!(set.poll(0).unwrap(), 1);
    let done = set.reap(0).unwrap().unwrap();
    assert_eq!((done.user_data, done.outcome), (5, CommandOutcome::Response(CommandResponse::Aborted)));
}

#[test]
fn events_are_received_and_their_buffers_are_reused() {
    let rig = rig(ScsiBehaviour::default());
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut control = device.take_control().unwrap();
    assert_eq!(control.take_event().unwrap(), None);
    for round in 0..40 {
        let at = LunAddress { target: round, lun: 300 };
        rig.model.send_event(if round == 39 { 3 | 1 << 31 } else { 1 }, at, if round == 39 { 0x092a } else { 1 });
        let event = loop {
            if let Some(event) = control.take_event().unwrap() {
                break event;
            }
            control.wait(Some(Duration::from_secs(60))).unwrap();
        };
        let expected = match round {
            39 => ScsiEvent {
                kind: ScsiEventKind::ParameterChange { asc: 0x2a, ascq: 9 },
                address: Some(at),
                missed: true,
            },
            _ => ScsiEvent { kind: ScsiEventKind::Rescan, address: Some(at), missed: false },
        };
        assert_eq!(event, expected);
    }
}

/// Runs threads that write to the same few targets, each its own blocks. Returns the number of commands handed over.
fn run_threads(steer: SteeringPolicy, threads: u16, queues: u16, targets: u8, queue_size: u16) -> (Rig, u64) {
    const COMMANDS: u32 = 400;
    const DEPTH: u32 = 4;
    let mut rig = rig(ScsiBehaviour {
        disks: disks((0..targets).map(|target| (target, 0)), 1 << 20),
        ..ScsiBehaviour::default()
    });
    (rig.options.steering, rig.options.threads, rig.options.queues) = (steer, threads, queues);
    rig.options.queue_size = queue_size;
    rig.options.descriptors = DescriptorLayout::Direct;
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut sets = device.take_queues();
    assert_eq!(device.scan(&mut sets[0]).unwrap().len(), usize::from(targets));
    let sets: Vec<ScsiQueueSet> = std::thread::scope(|scope| {
        let work = |(thread, mut set): (usize, ScsiQueueSet)| {
            move || {
                let memory = set.queues_mut()[0].memory().clone();
                let data: Vec<DataSegment> =
                    (0..DEPTH).map(|user_data| data_segment(&mut set, u64::from(user_data) * 512, 512)).collect();
                let (mut next, mut refused) = (0, vec![]);
                let mut ends = [0; DEPTH as usize];
                let mut over = false;
                let mut todo: Vec<u32> = (0..DEPTH).collect();
                while !over {
                    todo.append(&mut refused);
                    for user_data in todo.drain(..) {
                        if next == COMMANDS {
                            break;
                        }
                        let to = LunAddress { target: (next / 3) as u8 % targets, lun: 0 };
                        let lba = Lba((thread * 100) as u64 + u64::from(user_data));
                        let word = u64::from(next) << 32 | thread as u64;
                        memory.write(data[user_data as usize].address, &word.to_le_bytes()).unwrap();
                        let command = Command::write(to, lba, 1, data[user_data as usize], false);
                        let own = next as usize % set.queues_mut().len();
                        match set.submit(own, user_data, &command) {
                            Ok(()) => next += 1,
                            Err(crate::SubmitError::Full) => refused.push(user_data),
                            Err(error) => panic!("{error}"),
                        }
                    }
                    set.publish().unwrap();
                    set.receive().unwrap();
                    for queue in 0..set.queues_mut().len() {
                        set.poll(queue).unwrap();
                        while let Some(done) = set.reap(queue).unwrap() {
                            assert_eq!(done.outcome, CommandOutcome::Good);
                            ends[done.user_data as usize] += 1;
                            todo.push(done.user_data);
                        }
                    }
                    while let Some(done) = set.reap_received() {
                        assert_eq!(done.outcome, CommandOutcome::Good);
                        ends[done.user_data as usize] += 1;
                        todo.push(done.user_data);
                    }
                    set.publish().unwrap();
                    if next == COMMANDS && set.outstanding() == 0 {
                        over = set.finish();
                    }
                    if todo.is_empty() && !over {
                        set.wait(1).unwrap();
                    }
                }
                assert_eq!((ends.iter().sum::<u32>(), set.outstanding(), set.remote_outstanding()), (COMMANDS, 0, 0));
                assert!(set.queues_mut().iter().all(|queue| queue.in_flight() == 0));
                set
            }
        };
        let threads: Vec<_> = sets.into_iter().enumerate().map(work).map(|work| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let handed_over = sets.iter().map(ScsiQueueSet::handed_over).sum();
    let served: u64 = (0..4).map(|queue| rig.model.transfers(queue)).sum();
    assert_eq!(served, u64::from(threads) * u64::from(COMMANDS));
    device.stop(sets).unwrap();
    (rig, handed_over)
}

#[test]
fn a_target_is_on_one_queue_for_all_submitters() {
    for (threads, queues, targets, queue_size) in
        [(4, 4, 1, 64), (3, 3, 2, 64), (2, 4, 3, 64), (4, 4, 2, 4), (1, 4, 2, 16)]
    {
        let (rig, handed_over) = run_threads(SteeringPolicy::Target, threads, queues, targets, queue_size);
        assert_eq!(rig.model.steering_violations(), 0, "{threads} threads, {queues} queues, {targets} targets");
        if targets == 1 {
            assert!(handed_over > 0, "four threads on one target never met");
        }
    }
}

#[test]
fn the_other_policies_lose_no_commands() {
    let (rig, handed_over) = run_threads(SteeringPolicy::Fixed, 4, 4, 3, 16);
    assert_eq!((rig.model.steering_violations(), rig.model.transfers(3)), (0, 0));
    assert!(handed_over > 0);
    let (rig, handed_over) = run_threads(SteeringPolicy::Submitter, 4, 4, 1, 16);
    // Proves that the check of the other policies can fail.
    assert!(rig.model.steering_violations() > 0);
    assert_eq!(handed_over, 0);
    // Each thread uses its own queue, with the same target.
    assert!((0..4).all(|queue| rig.model.transfers(queue) == 400));
}

#[test]
fn a_full_queue_rejects_commands() {
    let mut rig = rig(ScsiBehaviour { fault: ScsiFault::HoldFrom(0), ..ScsiBehaviour::default() });
    rig.options.queue_size = 16;
    rig.options.descriptors = DescriptorLayout::Direct;
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let data = data_segment(&mut set, 0, 512);
    let submitted = (0..100)
        .take_while(|user_data| set.submit(0, *user_data, &Command::read(HERE, Lba(0), 1, data)).is_ok())
        .count();
    assert_eq!((submitted, set.outstanding()), (5, 5), "16 descriptors are 5 commands of 3");
    rig.options.queue_size = 64;
    rig.options.max_outstanding = 3;
    drop((set, device));
    let mut device = ScsiController::connect(&rig.options).unwrap();
    let mut set = device.take_queues().pop().unwrap();
    let submitted = (0..100)
        .take_while(|user_data| set.submit(0, *user_data, &Command::read(HERE, Lba(0), 1, data)).is_ok())
        .count();
    assert_eq!(submitted, 3);
}
