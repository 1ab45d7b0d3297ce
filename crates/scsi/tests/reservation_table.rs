//! Persistent reservations by the tables of SPC-4: section 5.12 for the behaviour, 6.15 and 6.16 for the encoding.

mod nexuses;

use std::sync::Arc;

use mqblk_core::Wake;
use mqblk_scsi::reservation::{LoginError, ReservationError, Reservations};
use mqblk_scsi::unit_attention::UnitAttentionQueue;
use nexuses::*;

const RESERVATIONS_PREEMPTED: u8 = 3;
const RESERVATIONS_RELEASED: u8 = 4;
const REGISTRATIONS_PREEMPTED: u8 = 5;
const KINDS: [u8; 6] = [1, 3, 5, 6, 7, 8];

fn register(rig: &Rig, from: usize, key: u64) {
    rig.ok(from, &ReserveOut::new(REGISTER, 0, 0, key));
}

/// Nexuses 0, 2 and 3 are registered with keys 10, 12 and 13; 0 holds a reservation.
fn reserved(kind: u8) -> Rig {
    let rig = Rig::new();
    [(0, 10), (2, 12), (3, 13)].iter().for_each(|(who, key)| register(&rig, *who, *key));
    rig.ok(0, &ReserveOut::new(RESERVE, kind, 10, 0));
    rig
}

#[test]
fn register_table() {
    for (action, presented, key, registered, good, after) in [
        // From a nexus that is not registered.
        (REGISTER, 0, 0, false, true, 0),
        (REGISTER, 0, 7, false, true, 7),
        (REGISTER, 5, 7, false, false, 0),
        (REGISTER, 5, 0, false, false, 0),
        (REGISTER_AND_IGNORE, 5, 7, false, true, 7),
        (REGISTER_AND_IGNORE, 5, 0, false, true, 0),
        // From a registered one, with key 5.
        (REGISTER, 5, 7, true, true, 7),
        (REGISTER, 5, 5, true, true, 5),
        (REGISTER, 5, 0, true, true, 0),
        (REGISTER, 0, 7, true, false, 5),
        (REGISTER, 6, 0, true, false, 5),
        (REGISTER_AND_IGNORE, 0, 7, true, true, 7),
        (REGISTER_AND_IGNORE, 99, 0, true, true, 0),
    ] {
        let rig = Rig::new();
        if registered {
            register(&rig, 0, 5);
        }
        let before = rig.generation();
        let result = rig.reserve_out(0, &ReserveOut::new(action, 0, presented, key));
        let what = format!("service action {action}, {presented} {key}, registered {registered}");
        if good {
            assert_eq!(result.expect(&what).transferred, 24);
        } else {
            expect_conflict(result);
        }
        assert_eq!(keys(&rig), if after == 0 { vec![] } else { vec![after] }, "{what}");
        let nothing_done = !good || (!registered && key == 0);
        assert_eq!(rig.generation(), before + u32::from(!nothing_done), "{what}");
        assert!(rig.take_attentions().iter().all(Vec::is_empty));
    }
}

#[test]
fn register_for_other_ports() {
    let rig = Rig::new();
    rig.ok(0, &ReserveOut::new(REGISTER, 0, 0, 5).with(ALL_TG_PT));
    assert_eq!(keys(&rig), [5, 5], "a on both its ports");
    rig.ok(1, &ReserveOut::new(REGISTER, 0, 5, 0).with(ALL_TG_PT));
    assert!(keys(&rig).is_empty());
    rig.ok(0, &ReserveOut::new(REGISTER, 0, 0, 6).with(SPEC_I_PT).naming(&["b"]));
    let status = rig.reserve_in(3, 3, 1000).expect("READ FULL STATUS");
    assert_eq!(status[4..8], 96u32.to_be_bytes());
    for (descriptor, (initiator, port)) in status[8..].chunks(48).zip([("a", 1u16), ("b", 1)]) {
        assert_eq!(descriptor[..8], 6u64.to_be_bytes());
        assert_eq!(descriptor[12..14], [0, 0], "no holder, not one descriptor for all ports");
        assert_eq!(descriptor[18..20], port.to_be_bytes());
        assert_eq!(descriptor[20..24], 24u32.to_be_bytes());
        assert_eq!(descriptor[24..], transport_id(initiator));
    }
    // A nexus with another key, and one that sees the logical unit through another port only.
    register(&rig, 3, 13);
    rig.ok(0, &ReserveOut::new(REGISTER, 0, 6, 0));
    let generation = rig.generation();
    expect_conflict(rig.reserve_out(0, &ReserveOut::new(REGISTER, 0, 0, 5).with(SPEC_I_PT).naming(&["b"])));
    let absent = ReserveOut::new(REGISTER, 0, 0, 5).with(SPEC_I_PT).naming(&["a", "c"]);
    assert_eq!(pointed(rig.reserve_out(0, &absent)), (5, 0x26, 0, Some((false, 52, None))));
    expect_conflict(rig.reserve_out(0, &absent.with(SPEC_I_PT | ALL_TG_PT)));
    assert_eq!((keys(&rig), rig.generation()), (vec![6, 13], generation), "nothing was half done");
}

#[test]
fn reserve_table() {
    for held in KINDS {
        for asked in KINDS {
            let rig = reserved(held);
            let generation = rig.generation();
            // From the holder: reserving again is fine. From another registered nexus: only if all hold the
            // reservation.
            for (from, key, holds) in [(0, 10, true), (2, 12, held >= 7)] {
                let result = rig.reserve_out(from, &ReserveOut::new(RESERVE, asked, key, 0));
                if holds && asked == held {
                    result.expect("held already");
                } else {
                    expect_conflict(result);
                }
            }
            expect_conflict(rig.reserve_out(0, &ReserveOut::new(RESERVE, held, 11, 0)));
            expect_conflict(rig.reserve_out(1, &ReserveOut::new(RESERVE, held, 0, 0)));
            assert_eq!(reservation(&rig), Some((if held >= 7 { 0 } else { 10 }, held)));
            assert_eq!(rig.generation(), generation, "RESERVE does not count");
        }
    }
}

#[test]
fn access_table() {
    const ALL: [bool; 4] = [true; 4];
    for kind in KINDS {
        let rig = reserved(kind);
        let outside = if matches!(kind, 1 | 5 | 7) { [true, true, true, false] } else { [true, true, false, false] };
        assert_eq!(rig.rights(0), ALL, "holder, type {kind}");
        assert_eq!(rig.rights(1), outside, "not registered, type {kind}");
        assert_eq!(rig.rights(2), if kind >= 5 { ALL } else { outside }, "registered, type {kind}");
    }
    let rig = Rig::new();
    rig.unit_command(0, 0x16).expect("RESERVE(6)");
    assert_eq!((rig.rights(0), rig.rights(1)), (ALL.to_vec(), vec![true, false, false, false]));
}

#[test]
fn release_table() {
    for kind in KINDS {
        let rig = reserved(kind);
        let others = if kind >= 5 { vec![RESERVATIONS_RELEASED] } else { vec![] };
        expect_conflict(rig.reserve_out(0, &ReserveOut::new(RELEASE, kind, 9, 0)));
        expect_conflict(rig.reserve_out(1, &ReserveOut::new(RELEASE, kind, 0, 0)));
        for wrong in [0, 2, 4, 9, 15, kind | 0x10, if kind == 1 { 3 } else { 1 }] {
            assert_eq!(pointed(rig.reserve_out(0, &ReserveOut::new(RELEASE, wrong, 10, 0))), (5, 0x26, 4, None));
        }
        if kind < 7 {
            rig.ok(2, &ReserveOut::new(RELEASE, kind, 12, 0));
            assert_eq!(reservation(&rig), Some((10, kind)), "only the holder can release it");
        }
        assert!(rig.take_attentions().iter().all(Vec::is_empty));
        let generation = rig.generation();
        rig.ok(0, &ReserveOut::new(RELEASE, kind, 10, 0));
        assert_eq!((reservation(&rig), rig.generation()), (None, generation));
        assert_eq!(rig.take_attentions(), [vec![], vec![], others.clone(), others], "type {kind}");
        rig.ok(0, &ReserveOut::new(RELEASE, kind, 10, 0));
        assert_eq!(keys(&rig), [10, 12, 13]);
    }
}

#[test]
fn unregistering_the_holder() {
    for kind in KINDS {
        let rig = reserved(kind);
        rig.ok(0, &ReserveOut::new(REGISTER, 0, 10, 0));
        let told = if matches!(kind, 5 | 6) { vec![RESERVATIONS_RELEASED] } else { vec![] };
        assert_eq!(rig.take_attentions(), [vec![], vec![], told.clone(), told], "type {kind}");
        assert_eq!(reservation(&rig), (kind >= 7).then_some((0, kind)));
        rig.ok(2, &ReserveOut::new(REGISTER, 0, 12, 0));
        rig.ok(3, &ReserveOut::new(REGISTER, 0, 13, 0));
        assert_eq!(reservation(&rig), None, "the last one ends it, type {kind}");
    }
}

#[test]
fn clear() {
    for kind in KINDS {
        let rig = reserved(kind);
        expect_conflict(rig.reserve_out(2, &ReserveOut::new(CLEAR, 0, 10, 0)));
        expect_conflict(rig.reserve_out(1, &ReserveOut::new(CLEAR, 0, 0, 0)));
        let generation = rig.generation();
        rig.ok(2, &ReserveOut::new(CLEAR, 0, 12, 0));
        assert_eq!((keys(&rig), reservation(&rig), rig.generation()), (vec![], None, generation + 1));
        let told = vec![RESERVATIONS_PREEMPTED];
        assert_eq!(rig.take_attentions(), [told.clone(), vec![], vec![], told]);
    }
}

/// The first four nexuses are registered: 0 and 1 with key 10, 2 with 12, 3 with 13; 0 holds the reservation.
fn shared_keys(kind: u8) -> Rig {
    let rig = Rig::new();
    [(0, 10), (1, 10), (2, 12), (3, 13)].iter().for_each(|(who, key)| register(&rig, *who, *key));
    rig.ok(0, &ReserveOut::new(RESERVE, kind, 10, 0));
    rig
}

#[test]
fn preempt_table() {
    const GONE: &[u8] = &[REGISTRATIONS_PREEMPTED];
    const OTHER: &[u8] = &[RESERVATIONS_RELEASED];
    type Case = (u8, usize, u64, u64, u8, &'static [u64], Option<(u64, u8)>, [&'static [u8]; 4]);
    let cases: &[Case] = &[
        // held, from, presented, victim, type, keys after, reservation after, told
        (1, 2, 12, 10, 1, &[12, 13], Some((12, 1)), [GONE, GONE, &[], &[]]),
        (1, 2, 12, 10, 3, &[12, 13], Some((12, 3)), [GONE, GONE, &[], OTHER]),
        (5, 2, 12, 10, 7, &[12, 13], Some((0, 7)), [GONE, GONE, &[], OTHER]),
        // Another key than the holder's: registrations only, for any type.
        (1, 2, 12, 13, 0x3f, &[10, 10, 12], Some((10, 1)), [&[], &[], &[], GONE]),
        (6, 0, 10, 12, 0, &[10, 10, 13], Some((10, 6)), [&[], &[], GONE, &[]]),
        (1, 2, 12, 12, 1, &[10, 10, 13], Some((10, 1)), [&[], &[], &[], &[]]),
        // The holder preempts itself: another type, and those who share its key are removed.
        (1, 0, 10, 10, 6, &[10, 12, 13], Some((10, 6)), [&[], GONE, OTHER, OTHER]),
        (1, 1, 10, 10, 1, &[10, 12, 13], Some((10, 1)), [GONE, &[], &[], &[]]),
        // All registrants: zero preempts all others, a key only those registrations.
        (7, 2, 12, 0, 7, &[12], Some((0, 7)), [GONE, GONE, &[], GONE]),
        (8, 3, 13, 0, 1, &[13], Some((13, 1)), [GONE, GONE, GONE, &[]]),
        (7, 2, 12, 10, 1, &[12, 13], Some((0, 7)), [GONE, GONE, &[], &[]]),
    ];
    for (held, from, presented, victim, kind, keys_after, after, told) in cases {
        for action in [PREEMPT, PREEMPT_AND_ABORT] {
            let rig = shared_keys(*held);
            let generation = rig.generation();
            let accepted = rig.ok(*from, &ReserveOut::new(action, *kind, *presented, *victim));
            let what = format!("type {held}: {action} of {victim} by {from} for type {kind}");
            assert_eq!(keys(&rig), *keys_after, "{what}");
            assert_eq!((reservation(&rig), rig.generation()), (*after, generation + 1), "{what}");
            assert_eq!(rig.take_attentions(), told, "{what}");
            let gone = (0..4).filter(|who| told[*who] == GONE && action == PREEMPT_AND_ABORT);
            assert_eq!(accepted.abort, gone.map(|who| name(NAMES[who])).collect::<Vec<_>>(), "{what}");
        }
    }
}

#[test]
fn preempt_refusals() {
    for kind in KINDS {
        let rig = shared_keys(kind);
        let before = rig.generation();
        expect_conflict(rig.reserve_out(2, &ReserveOut::new(PREEMPT, kind, 13, 10)));
        expect_conflict(rig.reserve_out(2, &ReserveOut::new(PREEMPT, kind, 12, 99)));
        if kind < 7 {
            assert_eq!(
                pointed(rig.reserve_out(2, &ReserveOut::new(PREEMPT, kind, 12, 0))),
                (5, 0x26, 0, Some((false, 8, None)))
            );
            assert_eq!(
                pointed(rig.reserve_out(2, &ReserveOut::new(PREEMPT, 0, 12, 10))),
                (5, 0x24, 0, Some((true, 2, Some(3))))
            );
            let scope = ReserveOut::new(PREEMPT, 0x21, 12, 10);
            assert_eq!(pointed(rig.reserve_out(2, &scope)), (5, 0x24, 0, Some((true, 2, Some(7)))));
        }
        assert_eq!((keys(&rig).len(), rig.generation()), (4, before));
    }
    let rig = Rig::new();
    register(&rig, 0, 10);
    assert_eq!(pointed(rig.reserve_out(0, &ReserveOut::new(PREEMPT, 1, 10, 0))), (5, 0x26, 0, Some((false, 8, None))));
    // Without a reservation only the registrations are removed, the sender's too if it has the key.
    rig.ok(0, &ReserveOut::new(PREEMPT, 1, 10, 10));
    assert_eq!((keys(&rig), reservation(&rig)), (vec![], None));
}

#[test]
fn register_and_move() {
    let to = |initiator, port, unregister| ReserveOut {
        moves: (unregister, port),
        ..ReserveOut::new(REGISTER_AND_MOVE, 0, 10, 77).naming(&[initiator])
    };
    for kind in KINDS {
        let rig = reserved(kind);
        let ask = to("a", 2, true);
        expect_conflict(rig.reserve_out(2, &ReserveOut { presented: 12, ..ask.clone() }));
        expect_conflict(rig.reserve_out(1, &ReserveOut { presented: 0, ..ask.clone() }));
        if kind >= 7 {
            expect_conflict(rig.reserve_out(0, &ask));
            continue;
        }
        for (bad, byte) in [
            (ReserveOut { key: 0, ..ask.clone() }, 8),
            (to("a", 9, false), 18),
            (to("b", 2, false), 24),
            (to("a", 1, false), 24),
        ] {
            assert_eq!(pointed(rig.reserve_out(0, &bad)), (5, 0x26, 0, Some((false, byte, None))));
        }
        let generation = rig.generation();
        rig.ok(0, &ask);
        assert_eq!((keys(&rig), reservation(&rig)), (vec![12, 13, 77], Some((77, kind))));
        assert_eq!(rig.generation(), generation + 1);
        assert!(rig.take_attentions().iter().all(Vec::is_empty));
        rig.ok(1, &ReserveOut { presented: 77, key: 78, ..to("c", 3, false) });
        assert_eq!((keys(&rig), reservation(&rig)), (vec![12, 78, 77], Some((78, kind))));
    }
    let rig = Rig::new();
    register(&rig, 0, 10);
    assert_eq!(pointed(rig.reserve_out(0, &to("a", 2, true))), (5, 0x24, 0, Some((true, 1, Some(4)))));
}

#[test]
fn bad_commands_and_lists() {
    let rig = reserved(1);
    let good = ReserveOut::new(REGISTER, 0, 10, 10);
    let length = |bytes: u32| {
        let mut cdb = good.cdb();
        cdb[5..9].copy_from_slice(&bytes.to_be_bytes());
        cdb
    };
    let list = |at: usize, byte: u8| {
        let mut list = good.list();
        list[at] = byte;
        list
    };
    const TOO_SHORT: Pointed = (5, 0x1a, 0, None);
    for bytes in [0, 8, 23, 25, 28, 1 << 20, u32::MAX] {
        assert_eq!(pointed(rig.reserve_out_bytes(0, &length(bytes), &[0; 64])), TOO_SHORT, "{bytes}");
    }
    assert_eq!(
        rig.reserve_out_bytes(0, &length(24), &good.list()[..23]).expect_err("cut off"),
        ReservationError::Overrun
    );
    for service_action in 8..32 {
        let unknown = ReserveOut { service_action, ..good.clone() };
        assert_eq!(pointed(rig.reserve_out(0, &unknown)), (5, 0x24, 0, Some((true, 1, Some(4)))));
    }
    for (kind, bit) in [(0, 3), (2, 3), (4, 3), (9, 3), (15, 3), (0x11, 7), (0xf0, 7)] {
        assert_eq!(
            pointed(rig.reserve_out(0, &ReserveOut::new(RESERVE, kind, 10, 0))),
            (5, 0x24, 0, Some((true, 2, Some(bit))))
        );
    }
    const SPEC: Pointed = (5, 0x26, 0, Some((false, 20, Some(3))));
    assert_eq!(pointed(rig.reserve_out(0, &good.clone().with(SPEC_I_PT).naming(&["b"]))), SPEC, "registered already");
    for action in [RESERVE, RELEASE, CLEAR, PREEMPT, PREEMPT_AND_ABORT, REGISTER_AND_IGNORE] {
        assert_eq!(pointed(rig.reserve_out(0, &ReserveOut::new(action, 1, 10, 10).with(SPEC_I_PT))), SPEC);
    }
    // TransportIDs: length too short, truncated, of another protocol, wrong length.
    let spec = ReserveOut::new(REGISTER, 0, 0, 11).with(SPEC_I_PT).naming(&["b"]);
    assert_eq!(pointed(rig.reserve_out_bytes(1, &length(24), &list(20, SPEC_I_PT))), TOO_SHORT);
    let mut cut = spec.cdb();
    cut[8] -= 4;
    assert_eq!(pointed(rig.reserve_out_bytes(1, &cut, &spec.list())), (5, 0x26, 0, Some((false, 24, None))));
    let mut other = spec.list();
    other[28] = 0x45;
    assert_eq!(pointed(rig.reserve_out_bytes(1, &spec.cdb(), &other)), (5, 0x26, 0, Some((false, 28, None))));
    let mut wrong = spec.list();
    wrong[27] = 48;
    assert_eq!(pointed(rig.reserve_out_bytes(1, &spec.cdb(), &wrong)), (5, 0x26, 0, Some((false, 24, None))));
    // APTPL without a store.
    let unit = Reservations::new(None);
    let rig = Rig { nexuses: join(&unit), unit, memory: Arc::default() };
    let aptpl = ReserveOut::new(REGISTER, 0, 0, 5).with(APTPL);
    assert_eq!(pointed(rig.reserve_out(0, &aptpl)), (5, 0x26, 0, Some((false, 20, Some(0)))));
    assert_eq!(rig.reserve_in(0, 2, 8).expect("capabilities")[2..4], [0x1c, 0x90]);
}

#[test]
fn reports() {
    let rig = reserved(5);
    assert_eq!(rig.reserve_in(1, 2, 100).expect("capabilities"), [0, 8, 0x1d, 0x90, 0xea, 0x01, 0, 0]);
    rig.ok(0, &ReserveOut::new(REGISTER, 0, 10, 10).with(APTPL));
    assert_eq!(rig.reserve_in(1, 2, 100).expect("capabilities")[3], 0x91);
    assert!(rig.reserve_in(1, 0, 0).expect("nothing asked for").is_empty());
    assert_eq!(rig.reserve_in(1, 0, 10).expect("cut off"), [0, 0, 0, 4, 0, 0, 0, 24, 0, 0]);
    let status = rig.reserve_in(1, 3, 65535).expect("READ FULL STATUS");
    assert_eq!(status.len(), 8 + 3 * 48);
    let holders: Vec<_> = status[8..].chunks(48).map(|one| (one[7], one[12], one[13])).collect();
    assert_eq!(holders, [(10, 1, 5), (12, 0, 0), (13, 0, 0)]);
    for unknown in 4..32 {
        assert_eq!(pointed(rig.reserve_in(1, unknown, 100)), (5, 0x24, 0, Some((true, 1, Some(4)))));
    }
    let all = reserved(8);
    let status = all.reserve_in(1, 3, 65535).expect("READ FULL STATUS");
    assert!(status[8..].chunks(48).all(|one| one[12..14] == [1, 8]));
}

#[test]
fn reserve_and_release_of_units() {
    const RESERVE_6: u8 = 0x16;
    const RELEASE_6: u8 = 0x17;
    let rig = Rig::new();
    rig.unit_command(0, RESERVE_6).expect("free");
    rig.unit_command(0, RESERVE_6).expect("its own");
    expect_conflict(rig.unit_command(2, RESERVE_6));
    rig.unit_command(2, RELEASE_6).expect("no error, and no effect");
    expect_conflict(rig.reserve_in(0, 0, 100));
    expect_conflict(rig.reserve_out(0, &ReserveOut::new(REGISTER, 0, 0, 5)));
    expect_conflict(rig.reserve_out(2, &ReserveOut::new(31, 0, 0, 5)));
    rig.nexuses[2].reservation.nexus_lost();
    assert!(!rig.rights(2)[3]);
    rig.nexuses[0].reservation.nexus_lost();
    rig.unit_command(2, 0x56).expect("RESERVE(10)");
    rig.unit.reset();
    rig.unit_command(0, RESERVE_6).expect("free again");
    rig.unit_command(0, 0x57).expect("RELEASE(10)");
    for (operation, flags, bit) in [(0x16, 0x10, 4), (0x17, 1, 0), (0x56, 0x02, 1), (0x57, 0x10, 4)] {
        let result = rig.nexuses[0].reservation.reserve_or_release(&[operation, flags, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(pointed(result), (5, 0x24, 0, Some((true, 1, Some(bit)))));
    }
    // SPC-4 section 5.12.3: with registrations, GOOD without effect for nexuses that hold or share the reservation.
    register(&rig, 0, 10);
    expect_conflict(rig.unit_command(0, RESERVE_6));
    expect_conflict(rig.unit_command(3, RELEASE_6));
    for kind in KINDS {
        let rig = reserved(kind);
        for operation in [RESERVE_6, RELEASE_6] {
            rig.unit_command(0, operation).expect("the holder");
            expect_conflict(rig.unit_command(1, operation));
            assert_eq!(rig.unit_command(2, operation).is_ok(), kind >= 5, "type {kind}");
        }
        assert!(rig.reserve_in(0, 0, 8).is_ok() && reservation(&rig).is_some());
    }
}

#[test]
fn a_nexus_that_leaves_stays_registered() {
    let mut rig = reserved(3);
    rig.nexuses.remove(0);
    assert_eq!(rig.nexuses[0].reservation.name(), &name(NAMES[1]));
    assert_eq!((keys(&rig).len(), rig.rights(0)), (3, vec![true, true, false, false]));
    let attentions = Arc::new(UnitAttentionQueue::new());
    let handle = rig.unit.add_nexus(name(NAMES[0]), Arc::clone(&attentions)).expect("back");
    assert!(CLASSES.iter().all(|class| handle.allows(*class)), "it is the holder as before");
    assert!(matches!(rig.unit.add_nexus(name(NAMES[0]), attentions), Err(LoginError::DuplicateName(_))));
    let empty = rig.unit.add_nexus(name(("", 1)), Arc::default());
    assert!(matches!(empty, Err(LoginError::InvalidName(_))));
    handle.reserve_or_release(&[0x16]).expect("the holder may");
    let free = Rig::new();
    let leaver = free.unit.add_nexus(name(("d", 1)), Arc::default()).expect("new");
    leaver.reserve_or_release(&[0x16]).expect("free");
    assert!(!free.rights(0)[3]);
    drop(leaver);
    assert!(free.rights(0)[3], "a RESERVE goes with its nexus");
}

#[test]
fn too_many_registrations() {
    let unit = Reservations::new(None);
    let list = |key: u64| ReserveOut::new(REGISTER, 0, 0, key).list();
    let cdb = ReserveOut::default().cdb();
    let silent: Arc<dyn Wake> = Arc::new(NoWake);
    let handles: Vec<_> =
        (0..1025u16).map(|port| unit.add_nexus(name(("many", port)), Arc::default()).expect("a new name")).collect();
    for handle in &handles[..1024] {
        handle.persistent_out(&cdb, &list(9)[..], &silent).expect("room");
    }
    assert_eq!(pointed(handles[1024].persistent_out(&cdb, &list(9)[..], &silent)), (5, 0x55, 4, None));
    let mut reply = Vec::new();
    handles[0].persistent_in(&[0x5e, 3, 0, 0, 0, 0, 0, 0xff, 0xff, 0], &mut reply).expect("READ FULL STATUS");
    assert_eq!(reply.len(), 8 + 1024 * 48);
}
