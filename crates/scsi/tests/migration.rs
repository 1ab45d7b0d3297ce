//! State that moves with a migrating initiator: reservations of all types, flags, unit attentions; and states that are
//! rejected.

mod nexuses;
mod rig;

use std::sync::Arc;

use mqblk_core::{ByteLen, Geometry, Wake};
use mqblk_scsi::reservation::{ReservationSnapshot, ReservationStore, Reservations, Ticket};
use mqblk_scsi::{LogicalUnitOptions, Nexus, Sense, SenseKey, UnitAttention, UnitState};
use nexuses::{
    APTPL, CLASSES, MemoryStore, NAMES, NoWake, REGISTER, RESERVE, ReserveOut, Rig as Seats, expect_conflict, join,
    keys, reservation,
};
use rig::{Rig, RunResult, geometry, limits, options, sense, ten};

fn silent() -> Arc<dyn Wake> {
    Arc::new(NoWake)
}

/// Returns a logical unit of another process, with the same nexuses.
fn elsewhere(from: &Seats) -> Seats {
    let there = Seats::new();
    let text = serde_json::to_string(&from.unit.snapshot()).expect("text");
    let carried: ReservationSnapshot = serde_json::from_str(&text).expect("the same");
    assert_eq!(carried, from.unit.snapshot());
    let validated = there.unit.validate(carried).expect("a state that there can be");
    there.unit.replace(validated, silent());
    there
}

fn rights(rig: &Seats) -> Vec<Vec<bool>> {
    (0..NAMES.len()).map(|who| rig.rights(who)).collect()
}

#[test]
fn registrations_and_reservations_of_all_kinds() {
    for persist in [0, APTPL] {
        for kind in [1, 3, 5, 6, 7, 8] {
            let here = Seats::new();
            [(0, 10), (2, 12)].iter().for_each(|(who, key)| {
                here.ok(*who, &ReserveOut::new(REGISTER, 0, 0, *key).with(persist));
            });
            here.ok(0, &ReserveOut::new(RESERVE, kind, 10, 0));
            here.take_attentions();
            let there = elsewhere(&here);
            assert_eq!((keys(&there), reservation(&there)), (keys(&here), reservation(&here)));
            assert_eq!((rights(&there), there.generation()), (rights(&here), here.generation()));
            assert_eq!(
                there.take_attentions(),
                vec![Vec::<u8>::new(); NAMES.len()],
                "no unit attention without a change"
            );
            // Only the state that persists through power loss is saved in the store there.
            let kept = there.memory.0.lock().expect("whole").clone();
            assert_eq!(kept.is_some(), persist != 0);
            if let Some(kept) = kept {
                let again = Reservations::restore(&kept, Some(Arc::<MemoryStore>::default())).expect("what was kept");
                let again = Seats { nexuses: join(&again), unit: again, memory: Arc::default() };
                assert_eq!((keys(&again), reservation(&again)), (keys(&here), reservation(&here)));
            }
            // Applying it again changes nothing.
            let validated = there.unit.validate(here.unit.snapshot()).expect("still");
            there.unit.replace(validated, silent());
            assert_eq!((keys(&there), rights(&there)), (keys(&here), rights(&here)));
        }
    }
}

#[test]
fn a_reserve_and_its_absence() {
    let here = Seats::new();
    here.unit_command(2, 0x16).expect("free");
    let there = elsewhere(&here);
    assert_eq!(rights(&there), rights(&here));
    assert!(there.nexuses[2].reservation.allows(CLASSES[3]) && !there.nexuses[0].reservation.allows(CLASSES[3]));
    expect_conflict(there.unit_command(0, 0x16));
    there.unit_command(2, 0x17).expect("its own");
    there.unit_command(0, 0x16).expect("free");
    // An empty snapshot clears the reservations.
    let validated = there.unit.validate(Seats::new().unit.snapshot()).expect("nothing");
    assert!(validated.is_empty());
    there.unit.replace(validated, silent());
    there.unit_command(1, 0x16).expect("free");
    assert_eq!(serde_json::to_string(&ReservationSnapshot::default()).expect("text"), "{}");
}

#[test]
fn invalid_reservations() {
    let one = r#"{"nexus":{"initiator":"a","port":1},"key":"0x5"}"#;
    let there = Seats::new();
    there.ok(0, &ReserveOut::new(REGISTER, 0, 0, 77));
    for (text, want) in [
        (format!(r#"{{"registrations":[{one},{one}]}}"#), "each nexus once"),
        (r#"{"registrations":[{"nexus":{"initiator":"","port":1},"key":"0x5"}]}"#.into(), "registrations.nexus"),
        (r#"{"registrations":[{"nexus":{"initiator":"a","port":1},"key":"0"}]}"#.into(), "registrations.key"),
        (
            r#"{"reservation":{"type":"write-exclusive","holder":{"initiator":"a","port":1}}}"#.into(),
            "a registered nexus",
        ),
        (format!(r#"{{"registrations":[{one}],"reservation":{{"type":"shared"}}}}"#), "reservation.type"),
        (
            r#"{"reserved":{"initiator":"nobody","port":1}}"#.into(),
            "reserved: nobody port 1, expected a nexus that the unit has",
        ),
        (
            format!(r#"{{"registrations":[{one}],"reserved":{{"initiator":"a","port":1}}}}"#),
            "no RESERVE beside registrations",
        ),
    ] {
        let carried: ReservationSnapshot = serde_json::from_str(&text).expect("of the shape");
        let error = there.unit.validate(carried).expect_err(&text).to_string();
        assert!(error.contains(want), "{text}: {error}");
        assert_eq!(keys(&there), [77], "nothing has changed");
    }
    // Names that make a file of reservations too large to be read again.
    let long = |number: usize| {
        let name = format!("{number}{}", "\\u0001".repeat(200));
        format!(r#"{{"nexus":{{"initiator":"{name}","port":1}},"key":"0x5"}}"#)
    };
    let many: Vec<String> = (0..1000).map(long).collect();
    let text = format!(r#"{{"aptpl":true,"registrations":[{}]}}"#, many.join(","));
    let error =
        there.unit.validate(serde_json::from_str(&text).expect("of the shape")).expect_err("too long").to_string();
    assert!(error.contains("bytes to be kept"), "{error}");
    for text in [r#"{"generation":-1}"#, r#"{"more":1}"#, r#"{"aptpl":1}"#, r#"{"registrations":{}}"#] {
        assert!(serde_json::from_str::<ReservationSnapshot>(text).is_err(), "{text}");
    }
    // No store.
    let without = Reservations::new(None);
    let carried: ReservationSnapshot = serde_json::from_str(r#"{"aptpl":true}"#).expect("of the shape");
    assert!(without.validate(carried).expect_err("no keeper").to_string().contains("reservations="));
}

fn unit(change: impl FnOnce(&mut LogicalUnitOptions)) -> Rig {
    let mut options = options(geometry(), limits());
    change(&mut options);
    Rig::from(options)
}

/// Returns the sense data of a command, if it fails.
fn ending(rig: &Rig, cdb: &[u8]) -> Option<Sense> {
    match rig.run(cdb, &[0; 512], 512) {
        RunResult::Ended { ending, .. } => ending.sense,
        other => panic!("{other:?}"),
    }
}

fn carry(from: &Nexus, to: &Rig) -> Result<bool, String> {
    let validated = to.nexus.validate_state(from.state())?;
    let grown = validated.has_grown();
    validated.apply().map(|()| grown)
}

#[test]
fn flags_and_unit_attentions_move_without_power_on() {
    let here = unit(|_| {});
    // Caching page with WCE = 0; control page with SWP and D_SENSE; stopped.
    let caching = [&[0, 0, 0, 0, 0x08, 0x12][..], &[0; 18]].concat();
    let control = [0, 0, 0, 0, 0x0a, 0x0a, 0x04, 0x10, 0x08, 0, 0, 0, 0, 0, 0, 0].to_vec();
    for list in [caching, control] {
        assert!(
            matches!(here.run(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list, 0),
            RunResult::Ended { ending, .. } if ending.sense.is_none()),
            "MODE SELECT"
        );
    }
    assert!(here.unit.write_through() && here.unit.descriptor_sense());
    assert_eq!(ending(&here, &[0x1b, 0, 0, 0, 0, 0]), None);
    here.nexus.raise_attention(UnitAttention::CapacityChanged);
    here.nexus.raise_attention(UnitAttention::ModeParametersChanged);
    let before = here.nexus.state();

    let there = unit(|_| {});
    there.nexus.raise_attention(UnitAttention::PowerOn);
    assert_eq!(carry(&here.nexus, &there), Ok(false));
    assert_eq!(there.nexus.state(), before);
    assert_eq!(here.nexus.state(), before, "saving changes nothing");
    let text = serde_json::to_string(&before).expect("text");
    assert_eq!(serde_json::from_str::<UnitState>(&text).expect("the same"), before);
    for attention in [UnitAttention::CapacityChanged, UnitAttention::ModeParametersChanged] {
        assert_eq!(ending(&there, &[0; 6]), Some(attention.sense()));
    }
    // Stopped; when it is started, write-protected.
    assert_eq!(ending(&there, &[0; 6]).map(|sense| sense.key), Some(SenseKey::NotReady));
    assert_eq!(ending(&there, &[0x1b, 0, 0, 0, 1, 0]), None);
    assert_eq!(ending(&there, &ten(0x2a, 0, 0, 1)).map(|sense| sense.key), Some(SenseKey::DataProtect));
    // Defaults move too.
    assert_eq!(carry(&unit(|_| {}).nexus, &there), Ok(false));
    assert!(!there.unit.write_through() && !there.unit.descriptor_sense());
    assert_eq!(ending(&there, &ten(0x2a, 0, 0, 1)), None);
}

type Change = fn(&mut LogicalUnitOptions);

#[test]
fn another_logical_unit_is_rejected() {
    let here = unit(|_| {});
    let changes: &[(Change, &str)] = &[
        (|options| options.identity.name = "other".into(), "name: found \"vm0-disk7\", expected \"other\""),
        (|options| options.identity.serial = "other".into(), "serial: found \"serial-7\", expected \"other\""),
        (|options| options.identity.vendor = "other".into(), "vendor:"),
        (|options| options.identity.product = "other".into(), "product:"),
        (|options| options.geometry.size = ByteLen(1 << 19), "size-bytes: found 1048576, expected at most 524288"),
        (
            |options| options.geometry.logical_block = mqblk_core::BlockSize::B4096,
            "block-bytes: found 512, expected 4096",
        ),
    ];
    for (change, want) in changes {
        let there = unit(change);
        let before = there.nexus.state();
        let error = carry(&here.nexus, &there).expect_err(want);
        assert!(error.contains(want), "{error}");
        assert_eq!(there.nexus.state(), before);
    }
    let read_only = unit(|options| options.geometry = Geometry { read_only: true, ..geometry() });
    assert!(carry(&here.nexus, &read_only).expect_err("it cannot be written").contains("read-only: found false"));
    // A different revision is accepted.
    assert_eq!(carry(&here.nexus, &unit(|options| options.identity.revision = "9.9".into())), Ok(false));
}

#[test]
fn a_larger_logical_unit_raises_a_unit_attention() {
    let there = unit(|options| options.geometry.size = ByteLen(2 << 20));
    assert_eq!(carry(&unit(|_| {}).nexus, &there), Ok(true));
    there.expect(&[0; 6], sense(SenseKey::UnitAttention, 0x2a, 0x09));
    assert_eq!(ending(&there, &[0; 6]), None);
}

#[test]
fn registrations_are_stored_by_controller_name() {
    let here = unit(|_| {});
    let there = unit(|_| {});
    let other = there.unit.login("vm9", 1).expect("free");
    let validate = |state: UnitState| other.validate_state(state).map(drop);
    assert_eq!(validate(here.nexus.state()), Ok(()), "without any the name does not matter");
    assert_eq!(ending(&here, &[0x16, 0, 0, 0, 0, 0]), None);
    let error = validate(here.nexus.state()).expect_err("it is reserved");
    assert!(error.contains("initiator: found \"vm0\", expected \"vm9\"") && error.contains("id="), "{error}");
}

/// A store whose disk fails.
struct Failing;

impl ReservationStore for Failing {
    fn save(&self, _: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket> {
        let ticket = Ticket::new(done);
        ticket.resolve(Err("no space".into()));
        ticket
    }
}

#[test]
fn failures_to_save_are_reported() {
    let with_store =
        |store: Arc<dyn ReservationStore>| unit(|options| options.reservations = Reservations::new(Some(store)));
    let here = with_store(Arc::<MemoryStore>::default());
    let command = ReserveOut::new(REGISTER, 0, 0, 5).with(APTPL);
    assert!(
        matches!(here.run(&command.cdb(), &command.list(), 0), RunResult::Ended { ending, .. } if ending.sense.is_none())
    );
    let memory = Arc::<MemoryStore>::default();
    assert_eq!(carry(&here.nexus, &with_store(Arc::clone(&memory) as Arc<dyn ReservationStore>)), Ok(false));
    assert!(memory.0.lock().expect("whole").is_some());
    assert!(carry(&here.nexus, &with_store(Arc::new(Failing))).expect_err("not kept").contains("no space"));
    assert!(carry(&here.nexus, &unit(|_| {})).expect_err("nowhere to keep it").contains("reservations="));
}
