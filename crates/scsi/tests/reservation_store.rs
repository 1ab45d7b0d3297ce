//! Persistent reservations that persist through power loss: the stored content, the time of storing, and damaged files.

mod nexuses;

use std::sync::Arc;

use mqblk_core::Wake;
use mqblk_scsi::reservation::{FileReservationStore, ReservationStore, Reservations, RestoreError, Ticket};
use nexuses::*;

/// Nexuses 0, 2 and 3 are registered with keys 10, 12 and 13; 0 holds a reservation.
fn reserved(kind: u8) -> Rig {
    let rig = Rig::new();
    [(0, 10), (2, 12), (3, 13)]
        .iter()
        .for_each(|(who, key)| drop(rig.ok(*who, &ReserveOut::new(REGISTER, 0, 0, *key))));
    rig.ok(0, &ReserveOut::new(RESERVE, kind, 10, 0));
    rig
}

/// A store that never resolves its tickets.
struct NeverSaved;

impl ReservationStore for NeverSaved {
    fn save(&self, _: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket> {
        Ticket::new(done)
    }
}

#[test]
fn states_are_saved_while_aptpl_is_set() {
    let rig = reserved(5);
    let kept = || rig.memory.0.lock().expect("not poisoned").take();
    assert_eq!(kept(), None, "nobody asked for it");
    let accepted = rig.ok(0, &ReserveOut::new(REGISTER, 0, 10, 10).with(APTPL));
    assert_eq!(accepted.saved.expect("a ticket").result(), Some(Ok(())));
    let text = kept().expect("kept");
    let restored = Reservations::restore(&text, None).expect("what was kept");
    let again = Rig { nexuses: join(&restored), unit: restored, memory: Arc::default() };
    assert_eq!(again.reserve_in(0, 3, 1000).expect("status")[4..], rig.reserve_in(0, 3, 1000).expect("status")[4..]);
    assert_eq!((again.generation(), again.rights(1)), (0, vec![true, true, true, false]));
    assert_eq!(again.reserve_in(0, 2, 8).expect("capabilities")[3] & 1, 1);
    // Each later change is saved too, and the one that clears APTPL.
    rig.ok(0, &ReserveOut::new(RELEASE, 5, 10, 0)).saved.expect("a ticket");
    assert!(!String::from_utf8(kept().expect("kept")).expect("text").contains("\"type\""));
    rig.ok(2, &ReserveOut::new(REGISTER, 0, 12, 12)).saved.expect("a ticket");
    let text = kept().expect("kept");
    let none = Reservations::restore(&text, None).expect("nothing kept");
    let again = Rig { nexuses: join(&none), unit: none, memory: Arc::default() };
    assert!(keys(&again).is_empty());
    assert!(rig.ok(3, &ReserveOut::new(REGISTER, 0, 13, 13)).saved.is_none());
    // A slow store delays the completion, not the caller.
    let unit = Reservations::new(Some(Arc::new(NeverSaved)));
    let rig = Rig { nexuses: join(&unit), unit, memory: Arc::default() };
    let accepted = rig.ok(0, &ReserveOut::new(REGISTER, 0, 0, 5).with(APTPL));
    assert_eq!(accepted.saved.expect("a ticket").result(), None);
}

/// Returns the stored state.
fn kept(rig: &Rig) -> Vec<u8> {
    rig.memory.0.lock().expect("not poisoned").clone().expect("kept")
}

/// Returns the reservations of the next process.
fn restored(text: &[u8]) -> Rig {
    let memory = Arc::<MemoryStore>::default();
    let keeper: Arc<dyn ReservationStore> = memory.clone();
    let unit = Reservations::restore(text, Some(keeper)).expect("what was kept");
    Rig { nexuses: join(&unit), unit, memory }
}

/// A process dies after it has saved the effect of a PERSISTENT RESERVE OUT, and before its completion: the next one
/// executes it again. It succeeds, and the stored state does not change.
#[test]
fn replayed_by_another_process() {
    let before = || {
        let rig = reserved(5);
        rig.ok(0, &ReserveOut::new(REGISTER, 0, 10, 10).with(APTPL));
        rig
    };
    let full_status = |rig: &Rig| rig.reserve_in(0, 3, 1000).expect("status")[8..].to_vec();
    for command in [
        ReserveOut::new(REGISTER, 0, 10, 10).with(APTPL),
        ReserveOut::new(REGISTER_AND_IGNORE, 0, 0, 11).with(APTPL),
        ReserveOut::new(REGISTER_AND_IGNORE, 0, 0, 0).with(APTPL),
        ReserveOut::new(RESERVE, 5, 10, 0),
        ReserveOut::new(RELEASE, 5, 10, 0),
        ReserveOut::new(REGISTER, 0, 10, 11).with(APTPL),
        ReserveOut::new(REGISTER, 0, 10, 0).with(APTPL),
        ReserveOut::new(CLEAR, 0, 10, 0),
        ReserveOut::new(PREEMPT, 5, 10, 12),
        ReserveOut::new(PREEMPT_AND_ABORT, 5, 10, 12),
    ] {
        let rig = before();
        rig.ok(0, &command);
        let (text, status) = (kept(&rig), full_status(&rig));
        let next = restored(&text);
        assert_eq!(full_status(&next), status);
        next.reserve_out(0, &command)
            .unwrap_or_else(|error| panic!("{:02x?}: {error:?}", (command.cdb(), command.list())));
        assert_eq!(full_status(&next), status);
    }
}

/// Only a command in flight may conflict with its own change.
#[test]
fn other_conflicts_remain() {
    let rig = reserved(5);
    rig.ok(0, &ReserveOut::new(REGISTER, 0, 10, 10).with(APTPL));
    let command = ReserveOut::new(REGISTER, 0, 10, 11).with(APTPL);
    rig.ok(0, &command);
    expect_conflict(rig.reserve_out(0, &command).map(drop));
    let text = kept(&rig);

    // From another nexus, another command, and the same for the second time.
    let next = restored(&text);
    expect_conflict(next.reserve_out(2, &command).map(drop));
    expect_conflict(next.reserve_out(0, &ReserveOut::new(REGISTER, 0, 10, 12).with(APTPL)).map(drop));
    next.reserve_out(0, &command).expect("its own change");
    expect_conflict(next.reserve_out(0, &command).map(drop));

    // A third process, after the second was killed as well, also after that one has saved something else.
    restored(&text).reserve_out(0, &command).expect("its own change");
    next.ok(2, &ReserveOut::new(REGISTER_AND_IGNORE, 0, 0, 22).with(APTPL));
    restored(&kept(&next)).reserve_out(0, &command).expect("its own change");

    // A guest that reboots, or a replay that has ended.
    let late = restored(&text);
    late.unit.end_replay();
    expect_conflict(late.reserve_out(0, &command).map(drop));

    // Only the last commands executed are known.
    let rig = restored(&text);
    for key in 100..200 {
        rig.ok(3, &ReserveOut::new(REGISTER_AND_IGNORE, 0, 0, key).with(APTPL));
    }
    expect_conflict(restored(&kept(&rig)).reserve_out(0, &command).map(drop));
}

#[test]
fn damaged_files_and_other_formats() {
    let rig = reserved(6);
    rig.ok(0, &ReserveOut::new(REGISTER, 0, 10, 0x1234).with(APTPL));
    let text = rig.memory.0.lock().expect("not poisoned").take().expect("kept");
    let restore = |text: &[u8]| Reservations::restore(text, None).map(|_| ());
    assert_eq!(restore(&text), Ok(()));
    for cut in 0..text.trim_ascii_end().len() {
        assert!(matches!(restore(&text[..cut]), Err(RestoreError::Unreadable(_))), "cut at {cut}");
    }
    // Any single bit flip: never read as another state.
    let mut refused = 0;
    for at in 0..text.len() {
        for bit in 0..8 {
            let mut damaged = text.clone();
            damaged[at] ^= 1 << bit;
            match Reservations::restore(&damaged, None) {
                Err(_) => refused += 1,
                Ok(unit) => {
                    let again = Rig { nexuses: join(&unit), unit, memory: Arc::default() };
                    assert_eq!(
                        again.reserve_in(0, 3, 999).expect("status")[4..],
                        rig.reserve_in(0, 3, 999).expect("status")[4..]
                    );
                }
            }
        }
    }
    assert!(refused > text.len() * 5, "{refused} of {}", text.len() * 8);
    let text = String::from_utf8(text).expect("text");
    let change = |from: &str, to: &str| {
        assert!(text.contains(from), "{from} in {text}");
        restore(text.replacen(from, to, 1).as_bytes()).expect_err("changed")
    };
    assert_eq!(change("mqblk-reservations", "other"), RestoreError::WrongFormat("other".into()));
    assert_eq!(change("\"version\": 1", "\"version\": 2"), RestoreError::Version(2));
    assert!(matches!(change("0x0000000000001234", "0x0000000000001235"), RestoreError::Checksum { .. }));
    assert!(matches!(change("\"aptpl\"", "\"more\": 1, \"aptpl\""), RestoreError::Unreadable(_)));
    assert!(matches!(restore(b"{}"), Err(RestoreError::Unreadable(_))));
}

#[test]
fn invalid_states() {
    // With a correct checksum, taken from the error message.
    let restore = |state: &str| {
        let file =
            |sum: &str| format!(r#"{{"format":"mqblk-reservations","version":1,"checksum":"{sum}","state":{state}}}"#);
        match Reservations::restore(file("").as_bytes(), None) {
            Err(RestoreError::Checksum { expected, .. }) => {
                Reservations::restore(file(&expected).as_bytes(), None).map(|_| ())
            }
            other => panic!("expected a checksum error, found {other:?}"),
        }
    };
    let one = |key: &str| format!(r#"{{"nexus":{{"initiator":"a","port":1}},"key":"{key}"}}"#);
    let with = |registrations: &str, rest: &str| {
        restore(&format!(r#"{{"aptpl":true,"registrations":[{registrations}]{rest}}}"#))
    };
    let held = |kind: &str, holder: &str| format!(r#","reservation":{{"type":"{kind}"{holder}}}"#);
    let by = |initiator: &str| format!(r#","holder":{{"initiator":"{initiator}","port":1}}"#);
    assert_eq!(with(&one("0x5"), &held("write-exclusive", &by("a"))), Ok(()));
    assert_eq!(with(&one("0x5"), &held("write-exclusive-all-registrants", "")), Ok(()));
    for (registrations, rest, field) in [
        (one("0x0"), String::new(), "registrations.key"),
        (one("5"), String::new(), "registrations.key"),
        (one("0x5") + "," + &one("0x6"), String::new(), "registrations"),
        (r#"{"nexus":{"initiator":"","port":1},"key":"0x5"}"#.into(), String::new(), "registrations.nexus"),
        (one("0x5"), held("exclusive", &by("a")), "reservation.type"),
        (one("0x5"), held("write-exclusive", &by("b")), "reservation.holder"),
        (one("0x5"), held("write-exclusive", ""), "reservation.holder"),
        (one("0x5"), held("write-exclusive-all-registrants", &by("a")), "reservation.holder"),
        (String::new(), held("write-exclusive-all-registrants", ""), "registrations"),
    ] {
        match with(&registrations, &rest) {
            Err(RestoreError::InvalidField { field: found, .. }) => assert_eq!(found, field, "{registrations}{rest}"),
            other => panic!("{registrations}{rest}: {other:?}"),
        }
    }
    let off = restore(&format!(r#"{{"aptpl":false,"registrations":[{}]}}"#, one("0x5")));
    assert!(matches!(off, Err(RestoreError::InvalidField { field: "aptpl", .. })));
}

#[test]
fn through_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("unit");
    let (store, content) = FileReservationStore::open(&path).expect("opens");
    assert_eq!(content, None);
    let unit = Reservations::new(Some(Arc::new(store)));
    let rig = Rig { nexuses: join(&unit), unit, memory: Arc::default() };
    rig.ok(0, &ReserveOut::new(REGISTER, 0, 0, 5).with(APTPL | ALL_TG_PT));
    let ticket = rig.ok(1, &ReserveOut::new(RESERVE, 3, 5, 0)).saved.expect("a ticket");
    drop(rig);
    assert_eq!(ticket.result(), Some(Ok(())));
    let (store, content) = FileReservationStore::open(&path).expect("opens");
    let unit = Reservations::restore(&content.expect("kept"), Some(Arc::new(store))).expect("whole");
    let rig = Rig { nexuses: join(&unit), unit, memory: Arc::default() };
    assert_eq!((keys(&rig), reservation(&rig)), (vec![5, 5], Some((5, 3))));
    assert!(rig.rights(1)[3] && !rig.rights(0)[3] && !rig.rights(2)[2]);
}
