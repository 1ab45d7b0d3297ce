//! State of a logical unit between commands: unit attentions, a stop, reservations. SAM-5 section 5.14, SPC-4 section
//! 5.12, SBC-3 clause 5.

mod rig;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use mqblk_core::{ByteLen, Op, Wake};
use mqblk_scsi::reservation::{ReservationStore, Reservations, Ticket};
use mqblk_scsi::{
    Command, CommandAction, CommandBuffers, CommandCompletion, MultiStepCommand, NextStep, Nexus, Sense, SenseKey,
    TaskSet, UnitAttention,
};
use rig::*;

fn status(rig: &Rig, nexus: &Nexus, cdb: &[u8]) -> CommandCompletion {
    match rig.run_on(nexus, cdb, &[0; 4096], 4096) {
        RunResult::Ended { ending, .. } => ending,
        other => panic!("{cdb:02x?}: {other:?}"),
    }
}

#[test]
fn unit_attentions_come_first() {
    let rig = Rig::new();
    for cdb in
        [&[0; 6][..], &ten(0x28, 0, 0, 1), &sixteen(0x8a, 0, 0, 1), &[0xff; 16], &ten(0x28, 0xff, 0, 1), &[0x5f; 10]]
    {
        rig.nexus.raise_attention(UnitAttention::CapacityChanged);
        rig.expect(cdb, UnitAttention::CapacityChanged.sense());
    }
    // These do not report it.
    rig.nexus.raise_attention(UnitAttention::CapacityChanged);
    rig.reads(&[0x12, 0, 0, 0, 96, 0], 96);
    rig.reads(&twelve(0xa0, 0, 0, 64), 64);
    rig.expect(&[0; 6], UnitAttention::CapacityChanged.sense());
    // REQUEST SENSE reports it as data, unless the data does not fit.
    rig.nexus.raise_attention(UnitAttention::CapacityChanged);
    assert_eq!(rig.run(&[0x03, 0, 0, 0, 18, 0], &[], 17), RunResult::Overrun);
    let fixed = rig.reads(&[0x03, 0, 0, 0, 252, 0], 252);
    assert_eq!((fixed.len(), fixed[2], fixed[12], fixed[13]), (18, 6, 0x2a, 0x09));
    assert_eq!(rig.reads(&[0x03, 1, 0, 0, 252, 0], 252), [0x72, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.reads(&[0; 6], 0).len(), 0);
}

#[test]
fn each_nexus_has_its_own_unit_attentions() {
    let rig = Rig::new();
    let other = rig.other("vm1");
    rig.unit.set_size(ByteLen(1 << 20));
    assert_eq!(status(&rig, &other, &[0; 6]), CommandCompletion::good(0), "the size is the same");
    rig.unit.set_size(ByteLen(1 << 19));
    for nexus in [&rig.nexus, &other] {
        assert_eq!(
            status(&rig, nexus, &[0; 6]),
            CommandCompletion::check_condition(UnitAttention::CapacityChanged.sense())
        );
        assert_eq!(status(&rig, nexus, &[0; 6]), CommandCompletion::good(0));
    }
    assert_eq!(
        status(&rig, &other, &ten(0x28, 0, 1024, 1)),
        CommandCompletion::check_condition(Sense::LBA_OUT_OF_RANGE)
    );
    // The same name is the same nexus, which gets POWER ON.
    let again = rig.unit.login("vm1", 1).unwrap();
    assert!(Arc::ptr_eq(&again, &other));
    assert_eq!(status(&rig, &other, &[0; 6]), CommandCompletion::check_condition(UnitAttention::PowerOn.sense()));
    assert!(!Arc::ptr_eq(&rig.unit.login("vm1", 2).unwrap(), &other));
    assert!(rig.unit.login("", 1).is_err());
}

#[test]
fn a_stopped_unit() {
    let rig = Rig::new();
    let other = rig.other("vm1");
    rig.take_requests();
    rig.writes(&[0x1b, 1, 0, 0, 0, 0], &[], 0);
    assert_eq!(rig.take_requests(), [(Op::Flush, 0, 0)]);
    let medium: &[&[u8]] = &[
        &[0; 6],
        &[0x08, 0, 0, 0, 1, 0],
        &ten(0x28, 0, 0, 1),
        &ten(0x2a, 0, 0, 1),
        &sixteen(0x88, 0, 0, 1),
        &sixteen(0x8a, 0, 0, 1),
        &ten(0x2f, 0, 0, 1),
        &ten(0x35, 0, 0, 0),
        &sixteen(0x9e, 0x12, 0, 24),
    ];
    for cdb in medium {
        rig.expect(cdb, Sense::INITIALIZING_COMMAND_REQUIRED);
        assert_eq!(status(&rig, &other, cdb), CommandCompletion::check_condition(Sense::INITIALIZING_COMMAND_REQUIRED));
    }
    rig.reads(&ten(0x25, 0, 0, 0), 8);
    rig.reads(&[0x1a, 0, 0x3f, 0, 255, 0], 255);
    let sense = rig.reads(&[0x03, 0, 0, 0, 252, 0], 252);
    assert_eq!((sense[2], sense[12], sense[13]), (2, 4, 2));
    rig.writes(&[0x1b, 0, 0, 0, 1, 0], &[], 0);
    rig.reads(&ten(0x28, 0, 0, 1), 512);
    // NO_FLUSH.
    rig.take_requests();
    rig.writes(&[0x1b, 0, 0, 0, 4, 0], &[], 0);
    assert!(rig.take_requests().is_empty());
    rig.expect(&[0; 6], Sense::INITIALIZING_COMMAND_REQUIRED);
    // A reset starts it.
    rig.unit.reset();
    rig.expect(&[0; 6], UnitAttention::BusDeviceReset.sense());
    rig.reads(&[0; 6], 0);
    for (cdb, sense) in [
        ([0x1b, 0, 0, 0, 0x11, 0], in_command(4, 7)),
        ([0x1b, 0, 0, 0, 3, 0], in_command(4, 1)),
        ([0x1e, 0, 0, 0, 2, 0], in_command(4, 1)),
    ] {
        rig.expect(&cdb, sense);
    }
    for prevent in [1, 0] {
        rig.writes(&[0x1e, 0, 0, 0, prevent, 0], &[], 0);
    }
}

fn out(action: u8, kind: u8) -> [u8; 10] {
    [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0]
}

fn keys(reservation: u64, action: u64, flags: u8) -> Vec<u8> {
    let mut list = [reservation.to_be_bytes(), action.to_be_bytes(), [0; 8]].concat();
    list[20] = flags;
    list
}

/// Commands of other nexuses that are allowed: (command, RESERVE, Write Exclusive, Exclusive Access).
#[rustfmt::skip]
fn beside() -> Vec<(Vec<u8>, [bool; 3])> {
    let table: &[(&[u8], [bool; 3])] = &[
        (&[0; 6], [false, true, true]),
        (&[0x03, 0, 0, 0, 18, 0], [true, true, true]),
        (&[0x12, 0, 0, 0, 96, 0], [true, true, true]),
        (&twelve(0xa0, 0, 0, 64), [true, true, true]),
        (&[0x4d, 0, 0x40, 0, 0, 0, 0, 0, 64, 0], [true, true, true]),
        (&ten(0x25, 0, 0, 0), [true, true, true]),
        (&sixteen(0x9e, 0x10, 0, 32), [true, true, true]),
        (&[0x1e, 0, 0, 0, 0, 0], [true, true, true]),
        (&[0x1e, 0, 0, 0, 1, 0], [false, false, false]),
        (&[0x1b, 0, 0, 0, 1, 0], [true, true, true]),
        (&[0x1b, 0, 0, 0, 0, 0], [false, false, false]),
        (&[0x08, 0, 0, 0, 1, 0], [false, true, false]),
        (&ten(0x28, 0, 0, 1), [false, true, false]),
        (&twelve(0xa8, 0, 0, 1), [false, true, false]),
        (&sixteen(0x88, 0, 0, 1), [false, true, false]),
        (&ten(0x2f, 0, 0, 1), [false, true, false]),
        (&sixteen(0x9e, 0x12, 0, 24), [false, true, false]),
        (&[0x37, 0, 0, 0, 0, 0, 0, 0, 16, 0], [false, true, false]),
        (&[0x1a, 0, 0x3f, 0, 255, 0], [false, true, false]),
        (&[0x5a, 0, 0x3f, 0, 0, 0, 0, 0, 255, 0], [false, true, false]),
        (&[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0], [false, true, false]),
        (&[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0], [false, true, false]),
        (&[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0], [false, true, true]),
        (&[0x0a, 0, 0, 0, 1, 0], [false, false, false]),
        (&ten(0x2a, 0, 0, 1), [false, false, false]),
        (&twelve(0xaa, 0, 0, 1), [false, false, false]),
        (&sixteen(0x8a, 0, 0, 1), [false, false, false]),
        (&ten(0x2e, 0, 0, 1), [false, false, false]),
        (&ten(0x41, 0, 0, 1), [false, false, false]),
        (&sixteen(0x93, 1, 0, 1), [false, false, false]),
        (&ten(0x42, 0, 0, 0), [false, false, false]),
        (&sixteen(0x89, 0, 0, 0), [false, false, false]),
        (&sixteen(0x8b, 0, 0, 1), [false, false, false]),
        (&ten(0x35, 0, 0, 0), [false, false, false]),
        (&[0x15, 0x10, 0, 0, 0, 0], [false, false, false]),
        (&[0x55, 0x10, 0, 0, 0, 0, 0, 0, 0, 0], [false, false, false]),
        (&[0x16, 0, 0, 0, 0, 0], [false, false, false]),
    ];
    table.iter().map(|(cdb, allowed)| (cdb.to_vec(), *allowed)).collect()
}

#[test]
fn reservations_of_another_nexus() {
    for (case, kind) in [(0, 0), (1, 1), (2, 3)] {
        let rig = Rig::new();
        let other = rig.other("vm1");
        if kind == 0 {
            rig.writes(&[0x16, 0, 0, 0, 0, 0], &[], 0);
        } else {
            rig.writes(&out(0, 0), &keys(0, 7, 0), 24);
            rig.writes(&out(1, kind), &keys(7, 0, 0), 24);
        }
        for (cdb, allowed) in beside() {
            let ending = status(&rig, &other, &cdb);
            assert_eq!(ending != CommandCompletion::RESERVATION_CONFLICT, allowed[case], "{cdb:02x?} beside {kind}");
            // PERSISTENT RESERVE IN conflicts with a RESERVE of its own nexus too.
            if !allowed[case] && cdb[0] != 0x5e {
                let holders = status(&rig, &rig.nexus, &cdb);
                assert_eq!(holders.status, mqblk_scsi::Status::Good, "{cdb:02x?} of the holder of {kind}");
                // The next row needs the logical unit started.
                status(&rig, &rig.nexus, &[0x1b, 0, 0, 0, 1, 0]);
            }
        }
    }
}

#[test]
fn reserve_and_release() {
    let rig = Rig::new();
    let other = rig.other("vm1");
    let forms: [(&[u8], &[u8]); 2] =
        [(&[0x16, 0, 0, 0, 0, 0], &[0x17, 0, 0, 0, 0, 0]), (&ten(0x56, 0, 0, 0), &ten(0x57, 0, 0, 0))];
    for (reserve, release) in forms {
        rig.writes(reserve, &[], 0);
        assert_eq!(status(&rig, &other, reserve), CommandCompletion::RESERVATION_CONFLICT);
        assert_eq!(status(&rig, &other, release), CommandCompletion::good(0));
        assert_eq!(status(&rig, &other, &[0; 6]), CommandCompletion::RESERVATION_CONFLICT);
        rig.writes(release, &[], 0);
        assert_eq!(status(&rig, &other, reserve), CommandCompletion::good(0));
        other.nexus_lost();
        assert_eq!(status(&rig, &other, &[0; 6]), CommandCompletion::check_condition(UnitAttention::NexusLoss.sense()));
        rig.writes(reserve, &[], 0);
        rig.unit.reset();
        for nexus in [&rig.nexus, &other] {
            assert_eq!(
                status(&rig, nexus, &[0; 6]),
                CommandCompletion::check_condition(UnitAttention::BusDeviceReset.sense())
            );
        }
        assert_eq!(status(&rig, &other, &ten(0x28, 0, 0, 1)), CommandCompletion::good(512));
    }
    rig.expect(&[0x16, 0x10, 0, 0, 0, 0], in_command(1, 4));
    rig.expect(&[0x56, 0x02, 0, 0, 0, 0, 0, 0, 0, 0], in_command(1, 1));
}

#[test]
fn persistent_reserve_in_and_out() {
    let rig = Rig::new();
    rig.writes(&out(0, 0), &keys(0, 7, 0), 24);
    let mut keys_in = [0x5e, 0, 0, 0, 0, 0, 0, 0, 64, 0];
    assert_eq!(rig.reads(&keys_in, 64), [0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 7]);
    keys_in[8] = 4;
    assert_eq!(rig.reads(&keys_in, 4), [0, 0, 0, 1]);
    assert_eq!(rig.run(&keys_in, &[], 3), RunResult::Overrun);
    assert_eq!(rig.run(&out(1, 1), &keys(7, 0, 0)[..23], 0), RunResult::Overrun);
    rig.expect(&[0x5e, 4, 0, 0, 0, 0, 0, 0, 64, 0], in_command(1, 4));
    rig.expect(&out(8, 1), in_command(1, 4));
    assert_eq!(status(&rig, &rig.nexus, &out(1, 1)), CommandCompletion::RESERVATION_CONFLICT, "the wrong key");
    // Without a store APTPL is rejected.
    rig.expect_with(&out(0, 0), &keys(7, 8, 1), in_parameters(20, 0));
    // A nexus that leaves and returns has its registration.
    let gone = rig.other("vm1");
    rig.run_on(&gone, &out(0, 0), &keys(0, 9, 0), 0);
    drop(gone);
    let back = rig.other("vm1");
    assert_eq!(
        rig.run_on(&back, &out(1, 3), &keys(9, 0, 0), 0),
        RunResult::Ended { ending: CommandCompletion::good(24), data: vec![] }
    );
}

#[derive(Default)]
struct HeldTickets(Mutex<Vec<Arc<Ticket>>>);

impl HeldTickets {
    fn hold(&self, done: Arc<dyn Wake>) -> Arc<Ticket> {
        let ticket = Ticket::new(done);
        self.0.lock().unwrap().push(Arc::clone(&ticket));
        ticket
    }

    fn resolve(&self, result: Result<(), String>) {
        self.0.lock().unwrap().pop().unwrap().resolve(result);
    }
}

impl std::fmt::Debug for HeldTickets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Held")
    }
}

impl ReservationStore for HeldTickets {
    fn save(&self, _: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket> {
        self.hold(done)
    }
}

impl TaskSet for HeldTickets {
    fn abort(&self, done: Arc<dyn Wake>) -> Arc<Ticket> {
        self.hold(done)
    }
}

/// Begins a PERSISTENT RESERVE OUT that cannot complete yet.
fn waits(rig: &Rig, cdb: &[u8], list: &[u8]) -> Box<MultiStepCommand> {
    match rig.nexus.begin(&Command { cdb, data_in_len: 0 }, list, &mut CommandBuffers::default()) {
        CommandAction::MultiStep(command) => command,
        other => panic!("{other:?}"),
    }
}

fn next(rig: &Rig, command: &mut MultiStepCommand) -> NextStep {
    let waker: Arc<dyn Wake> = rig.wakes.clone();
    command.next(None, &mut vec![0; MultiStepCommand::SCRATCH], [].as_slice(), &waker, &mut CommandBuffers::default())
}

#[test]
fn completion_waits_until_the_state_is_durable() {
    let store = Arc::<HeldTickets>::default();
    let mut options = options(geometry(), limits());
    options.reservations = Reservations::new(Some(store.clone()));
    let rig = Rig::from(options);
    for (result, key, sense) in
        [(Ok(()), 0, None), (Err("full".to_string()), 7, Some(Sense::new(SenseKey::HardwareError, 0x44, 0)))]
    {
        let mut command = waits(&rig, &out(0, 0), &keys(key, 7, 1));
        let woken = rig.wakes.0.load(Ordering::SeqCst);
        assert!(matches!(next(&rig, &mut command), NextStep::Wait));
        assert_eq!(rig.wakes.0.load(Ordering::SeqCst), woken);
        store.resolve(result);
        assert_eq!(rig.wakes.0.load(Ordering::SeqCst), woken + 1);
        let NextStep::Complete(ending) = next(&rig, &mut command) else { panic!("it still waits") };
        assert_eq!(ending, sense.map_or(CommandCompletion::good(24), CommandCompletion::check_condition));
    }
    // Saved before the first step.
    let mut command = waits(&rig, &out(0, 0), &keys(7, 7, 1));
    store.resolve(Ok(()));
    assert!(matches!(next(&rig, &mut command), NextStep::Complete(ending) if ending == CommandCompletion::good(24)));
}

#[test]
fn preempt_and_abort_waits_for_the_aborted() {
    let rig = Rig::new();
    let (other, third) = (rig.other("vm1"), rig.other("vm2"));
    let (tasks, spared) = (Arc::<HeldTickets>::default(), Arc::<HeldTickets>::default());
    other.set_task_set(Some(tasks.clone()));
    third.set_task_set(Some(spared.clone()));
    rig.writes(&out(0, 0), &keys(0, 7, 0), 24);
    rig.run_on(&other, &out(0, 0), &keys(0, 8, 0), 0);
    rig.run_on(&third, &out(0, 0), &keys(0, 9, 0), 0);
    let mut command = waits(&rig, &out(5, 1), &keys(7, 8, 0));
    assert!(matches!(next(&rig, &mut command), NextStep::Wait));
    assert!(spared.0.lock().unwrap().is_empty());
    tasks.resolve(Ok(()));
    assert_eq!(rig.wakes.0.load(Ordering::SeqCst), 1);
    assert!(matches!(next(&rig, &mut command), NextStep::Complete(ending) if ending == CommandCompletion::good(24)));
    assert_eq!(
        status(&rig, &other, &[0; 6]),
        CommandCompletion::check_condition(UnitAttention::RegistrationsPreempted.sense())
    );
}
