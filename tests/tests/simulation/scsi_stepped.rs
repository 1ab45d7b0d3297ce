//! A SCSI controller over the real engine, stepped: commands reach their disks and end with the exact status, task
//! management functions abort commands before they complete, and events report changes.

use std::sync::Arc;

use mqblk_core::DiskSlot;
use mqblk_engine::{AnyDisk, PlugOptions, UringContext};
use mqblk_tests::stepped_scsi::{CommandData, CompletedCommand, SteppedController};
use mqblk_virtio::VirtioDevice;
use mqblk_virtio_scsi::LunAddress;

use crate::harness::storage::open_disk;

const BLOCK: usize = 512;
const OK: u8 = 0;
const ABORTED: u8 = 2;
const BAD_TARGET: u8 = 3;
const RESET: u8 = 4;
const GOOD: u8 = 0;
const CHECK: u8 = 2;

fn ram() -> Arc<AnyDisk> {
    open_disk("ram", &[("size", "1M")])
}

/// A disk with a latency of a minute.
fn stuck() -> Arc<AnyDisk> {
    open_disk("fault", &[("inner", "ram"), ("size", "1M"), ("fault-latency-us", "60000000")])
}

const fn place(target: u8, lun: u16) -> LunAddress {
    LunAddress { target, lun }
}

fn controller(queues: u16, workers: usize, disks: &[(LunAddress, Arc<AnyDisk>)]) -> SteppedController {
    let disks: Vec<_> = disks.iter().map(|(at, disk)| (*at, Arc::clone(disk), PlugOptions::default())).collect();
    let mut controller = SteppedController::new(queues, workers, &disks);
    controller.clear_unit_attentions(&disks.iter().map(|(at, ..)| *at).collect::<Vec<_>>());
    controller
}

fn read(lba: u32, blocks: u16) -> [u8; 10] {
    let ([a, b, c, d], [e, f]) = (lba.to_be_bytes(), blocks.to_be_bytes());
    [0x28, 0, a, b, c, d, 0, e, f, 0]
}

fn write(lba: u32, blocks: u16) -> [u8; 10] {
    let mut cdb = read(lba, blocks);
    cdb[0] = 0x2a;
    cdb
}

#[test]
fn data_goes_to_the_addressed_unit_and_the_residual_is_the_rest() {
    let places = [place(0, 0), place(0, 300), place(255, 16383)];
    let mut controller = controller(2, 1, &places.map(|at| (at, ram())));
    for (mark, at) in (1..).zip(places) {
        let written = controller.run_command(at, &write(5, 2), CommandData::Out(&[mark; 2 * BLOCK]));
        assert_eq!((written.response, written.status, written.residual), (OK, GOOD, 0));
    }
    for (mark, at) in (1..).zip(places) {
        // A larger buffer than the command fills.
        let answer = controller.run_command(at, &read(5, 2), CommandData::In(3 * BLOCK));
        assert_eq!((answer.status, answer.residual), (GOOD, BLOCK as u32));
        assert_eq!(answer.data[..2 * BLOCK], [mark; 2 * BLOCK]);
        assert_eq!(answer.data[2 * BLOCK..], [0; BLOCK]);
    }
    let overrun = controller.run_command(places[0], &read(5, 2), CommandData::In(BLOCK));
    assert_eq!((overrun.response, overrun.data), (1, vec![0; BLOCK]));
    let beyond = controller.run_command(places[0], &read(2048, 1), CommandData::In(BLOCK));
    assert_eq!((beyond.status, beyond.sense_code(), beyond.residual), (CHECK, (5, 0x21, 0), BLOCK as u32));
}

#[test]
fn addresses_without_a_unit() {
    let mut controller = controller(1, 1, &[(place(3, 1), ram())]);
    assert_eq!(controller.run_command(place(4, 1), &[0; 6], CommandData::None).response, BAD_TARGET);
    let absent = controller.run_command(place(3, 0), &[0; 6], CommandData::None);
    assert_eq!((absent.response, absent.status, absent.sense_code()), (OK, CHECK, (5, 0x25, 0)));
    let inquiry = controller.run_command(place(3, 0), &[0x12, 0, 0, 0, 36, 0], CommandData::In(36));
    assert_eq!((inquiry.status, inquiry.data[0]), (GOOD, 0x7f));
    let luns = controller.run_command(place(3, 0), &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], CommandData::In(64));
    assert_eq!((luns.status, luns.residual), (GOOD, 48));
    assert_eq!(luns.data[..16], [0, 0, 0, 8, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    for field in [[0; 8], [0xc1, 1, 0, 0, 0, 0, 0, 0]] {
        controller.submit_with_lun_field(0, field, 1, &[0; 6], CommandData::None);
        let answer = controller.run_until(|controller| controller.reap(0).pop());
        assert_eq!(answer.response, BAD_TARGET, "{field:x?}");
    }
}

#[test]
fn commands_of_several_steps() {
    let at = place(0, 0);
    let mut controller = controller(1, 1, &[(at, ram())]);
    let good = |answer: &CompletedCommand| (answer.response, answer.status, answer.residual) == (OK, GOOD, 0);
    // COMPARE AND WRITE: one block to compare, one to write.
    let caw = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0];
    let both = |old: u8, new: u8| [[old; BLOCK], [new; BLOCK]].concat();
    assert!(good(&controller.run_command(at, &caw, CommandData::Out(&both(0, 7)))));
    let miss = controller.run_command(at, &caw, CommandData::Out(&both(0, 8)));
    assert_eq!((miss.status, miss.sense_code()), (CHECK, (0xe, 0x1d, 0)));
    assert_eq!(controller.run_command(at, &read(9, 1), CommandData::In(BLOCK)).data, [7; BLOCK]);
    // WRITE SAME of a pattern larger than the private memory; VERIFY of it, byte by byte.
    let same = [0x41, 0, 0, 0, 0, 16, 0, 1, 0, 0];
    assert!(good(&controller.run_command(at, &same, CommandData::Out(&[0x5a; BLOCK]))));
    let verify = [0x2f, 0x02, 0, 0, 0, 16, 0, 0, 100, 0];
    assert!(good(&controller.run_command(at, &verify, CommandData::Out(&[0x5a; 100 * BLOCK]))));
    let mut wrong = [0x5a; 100 * BLOCK];
    wrong[99 * BLOCK + 3] = 0;
    let miss = controller.run_command(at, &verify, CommandData::Out(&wrong));
    assert_eq!((miss.status, miss.sense_code()), (CHECK, (0xe, 0x1d, 0)));
    // All at once: more steps than the private memory has room for.
    for id in 0..12 {
        controller.submit(0, at, id, &verify, CommandData::Out(&[0x5a; 100 * BLOCK]));
    }
    let mut answers = vec![];
    controller.run_until(|controller| {
        answers.extend(controller.reap(0));
        (answers.len() == 12).then_some(())
    });
    assert!(answers.iter().all(good), "{answers:?}");
}

#[test]
fn a_command_of_several_steps_that_ends_in_its_pull_is_answered() {
    let at = place(0, 0);
    let mut controller = controller(1, 1, &[(at, ram())]);
    // PERSISTENT RESERVE OUT, REGISTER with APTPL: its state is saved before its first step runs.
    let register = [0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    let mut keys = [0; 24];
    (keys[15], keys[20]) = (7, 1);
    for _ in 0..2 {
        let answer = controller.run_command(at, &register, CommandData::Out(&keys));
        assert_eq!((answer.response, answer.status, answer.residual), (OK, GOOD, 0));
        // The next one uses the registered key.
        keys[7] = 7;
    }
}

/// Task management functions by their subtype, the commands below that they match, and the responses of those.
const FUNCTIONS: [(u32, [bool; 4], u8); 5] = [
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, I_T NEXUS RESET, LOGICAL UNIT RESET.
    (0, [true, false, false, false], ABORTED),
    (1, [true, true, false, false], ABORTED),
    (3, [true, true, false, false], ABORTED),
    (4, [true, true, true, false], RESET),
    (5, [true, true, false, false], RESET),
];

#[test]
fn task_management_functions_abort_commands_and_complete_after_them() {
    for (subtype, means, response) in FUNCTIONS {
        let units = [place(1, 0), place(1, 0), place(1, 1), place(2, 0)];
        let disks = [place(1, 0), place(1, 1), place(2, 0)].map(|at| (at, stuck()));
        let mut controller = controller(2, 2, &disks);
        for (id, at) in (0..).zip(units) {
            // On different queues, on different workers.
            controller.submit(id as usize % 2, at, id, &read(1, 1), CommandData::In(BLOCK));
        }
        (0..10).for_each(|round| _ = controller.step(round % 2));
        assert!(controller.reap(0).is_empty() && controller.reap(1).is_empty(), "the disks are stuck");
        controller.submit_task_management(subtype, place(1, 0), 0);
        let answer = controller.run_until(|controller| controller.reap_control().pop());
        assert_eq!(answer.1, [OK], "function {subtype}");
        // Without another turn.
        let mut ended: Vec<_> = [controller.reap(0), controller.reap(1)].concat();
        ended.sort_by_key(|answer| answer.id);
        let want: Vec<u64> = (0..4).filter(|id| means[*id as usize]).collect();
        assert_eq!(ended.iter().map(|answer| answer.id).collect::<Vec<_>>(), want, "function {subtype}");
        assert!(ended.iter().all(|answer| answer.response == response), "function {subtype}: {ended:?}");
        // Other commands are still in flight, and a unit that was reset has a unit attention.
        for (target, reset) in [(1, subtype >= 4), (2, false)] {
            let ready = controller.run_command(place(target, 0), &[0; 6], CommandData::None);
            let attention = if subtype == 4 { (6, 0x29, 7) } else { (6, 0x29, 3) };
            assert_eq!(
                (ready.status == CHECK, ready.status == CHECK && ready.sense_code() == attention),
                (reset, reset)
            );
        }
    }
}

#[test]
fn a_command_that_is_not_pulled_yet_is_aborted_too_and_never_reaches_the_disk() {
    let at = place(0, 0);
    let disk = ram();
    let mut controller = controller(2, 2, &[(at, Arc::clone(&disk))]);
    controller.submit_task_management(0, at, 77);
    // The control queue and queue 0 are worker 0's; queue 1 is worker 1's.
    (0..10).for_each(|_| _ = controller.step(0));
    assert!(controller.reap_control().is_empty(), "queue 1 has not reported");
    // The wake arrives with the end of a turn, the command before the next turn.
    controller.step(1);
    controller.submit(1, at, 77, &write(3, 1), CommandData::Out(&[9; BLOCK]));
    controller.step(1);
    let ended = controller.reap(1);
    assert_eq!((ended.len(), ended[0].id, ended[0].response), (1, 77, ABORTED));
    assert_eq!(controller.run_until(|controller| controller.reap_control().pop()).1, [OK]);
    assert_eq!(controller.run_command(at, &read(3, 1), CommandData::In(BLOCK)).data, [0; BLOCK]);
}

#[test]
fn queries_find_commands_and_abort_nothing() {
    let at = place(0, 0);
    let mut controller = controller(1, 1, &[(at, stuck())]);
    let ask = |controller: &mut SteppedController, subtype, at, id| {
        controller.submit_task_management(subtype, at, id);
        controller.run_until(|controller| controller.reap_control().pop()).1[0]
    };
    const COMPLETE: u8 = 0;
    const SUCCEEDED: u8 = 10;
    const REJECTED: u8 = 11;
    const INCORRECT_LUN: u8 = 12;
    assert_eq!(ask(&mut controller, 7, at, 0), COMPLETE);
    controller.submit(0, at, 5, &read(0, 1), CommandData::In(BLOCK));
    assert_eq!(ask(&mut controller, 6, at, 5), SUCCEEDED);
    assert_eq!(ask(&mut controller, 6, at, 6), COMPLETE);
    assert_eq!(ask(&mut controller, 7, at, 0), SUCCEEDED);
    assert_eq!(ask(&mut controller, 2, at, 0), REJECTED);
    assert_eq!(ask(&mut controller, 8, at, 0), REJECTED);
    assert_eq!(ask(&mut controller, 0, place(0, 1), 5), INCORRECT_LUN);
    assert_eq!(ask(&mut controller, 0, place(1, 0), 5), BAD_TARGET);
    assert!(controller.reap(0).is_empty());
    // A request for asynchronous notifications, and a truncated one.
    controller.submit_control(1, &[&[1, 0, 0, 0][..], &at.encode(), &[2, 0, 0, 0]].concat(), 5);
    assert_eq!(controller.run_until(|controller| controller.reap_control().pop()).1, [0, 0, 0, 0, 0]);
    controller.submit_control(1, &[0; 23], 1);
    assert_eq!(controller.run_until(|controller| controller.reap_control().pop()).1, [REJECTED]);
}

#[test]
fn units_are_added_and_removed_with_events() {
    let at = place(0, 0);
    let mut controller = controller(1, 1, &[(at, ram())]);
    let more = mqblk_tests::stepped_scsi::logical_unit(&*ram(), "more");
    let nexus = more.login("guest", 1).unwrap();
    // The same disk at another address.
    controller.device.map(place(0, 2), DiskSlot(0), nexus).unwrap();
    // LUNs below 256 are addressed as in REPORT LUNS: Linux uses those bytes unchanged.
    let event = |kind: u32, lun: u8, reason: u32| {
        [&kind.to_le_bytes()[..], &[1, 0, 0, lun, 0, 0, 0, 0], &reason.to_le_bytes()].concat()
    };
    (0..4).for_each(|_| _ = controller.step(0));
    assert_eq!(controller.take_events(), [event(1, 2, 1)]);
    let changed = controller.run_command(at, &[0; 6], CommandData::None);
    assert_eq!((changed.status, changed.sense_code()), (CHECK, (6, 0x3f, 0x0e)));
    let fresh = controller.run_command(place(0, 2), &[0; 6], CommandData::None);
    assert_eq!((fresh.status, fresh.sense_code().0), (CHECK, 6));
    controller.device.notify_resized(at);
    (0..4).for_each(|_| _ = controller.step(0));
    assert_eq!(controller.take_events(), [event(3, 0, 0x092a)]);
    // The removal waits for the worker, which is stepped here, so it runs on a thread.
    let device = Arc::clone(&controller.device);
    let removal = std::thread::spawn(move || device.unmap(place(0, 2)));
    let told = controller.run_until(|controller| Some(controller.take_events()).filter(|events| !events.is_empty()));
    assert_eq!((told, removal.join().unwrap()), (vec![event(1, 2, 2)], Some(DiskSlot(0))));
    assert_eq!(controller.run_command(place(0, 2), &[0; 6], CommandData::None).sense_code(), (5, 0x25, 0));
}

#[test]
fn after_a_reboot_a_stopped_unit_runs() {
    let at = place(0, 0);
    for shared in [false, true] {
        let mut controller = controller(1, 1, &[(at, ram())]);
        let other = shared.then(|| controller.logical_units[0].login("another guest", 1).unwrap());
        let stop = [0x1b, 0, 0, 0, 0, 0];
        assert_eq!(controller.run_command(at, &stop, CommandData::None).status, GOOD);
        let stopped = controller.run_command(at, &read(0, 1), CommandData::In(BLOCK));
        assert_eq!((stopped.status, stopped.sense_code().0), (CHECK, 2));
        VirtioDevice::<UringContext>::reset(&*controller.device);
        VirtioDevice::<UringContext>::driver_started(&*controller.device, false);
        let first = controller.run_command(at, &read(0, 1), CommandData::In(BLOCK));
        assert_eq!(first.sense_code(), if shared { (6, 0x29, 7) } else { (6, 0x29, 3) });
        let second = controller.run_command(at, &read(0, 1), CommandData::In(BLOCK));
        assert_eq!(second.status == GOOD, other.is_none(), "what another guest uses is left as it is");
    }
}
