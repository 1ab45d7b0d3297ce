//! Random reservation commands from several nexuses, against a model that is written from the standard's sentences and
//! shares no code: one array of keys, one reservation, one holder.

mod nexuses;

use mqblk_scsi::reservation::{ReservationError, Reservations};
use nexuses::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    ReserveOut { from: usize, command: ReserveOut },
    Unit { from: usize, release: bool },
    Reset,
    Lost { from: usize },
}

#[derive(Clone, Debug, Default)]
struct Model {
    keys: [u64; 4],
    /// Type and holder; with all registrants every registered nexus holds it.
    held: Option<(u8, usize)>,
    reserved: Option<usize>,
    generation: u32,
    aptpl: bool,
    attentions: [Option<u8>; 4],
}

#[derive(Debug, PartialEq)]
enum Status {
    Good,
    Conflict,
    /// ASC and ASCQ of ILLEGAL REQUEST.
    Illegal(u8, u8),
}
use Status::*;

fn all() -> std::ops::Range<usize> {
    0..4
}

impl Model {
    fn holds(&self, who: usize) -> bool {
        match self.held {
            Some((7 | 8, _)) => self.keys[who] != 0,
            Some((_, holder)) => holder == who,
            None => false,
        }
    }

    /// Always, Status, Read, Write.
    fn rights(&self, who: usize) -> [bool; 4] {
        if let Some(holder) = self.reserved {
            return [true, holder == who, holder == who, holder == who];
        }
        let Some((kind, _)) = self.held else { return [true; 4] };
        let exempt = self.holds(who) || (kind >= 5 && self.keys[who] != 0);
        [true, true, exempt || kind % 2 == 1 && kind != 3, exempt]
    }

    fn raise(&mut self, but: usize, ascq: u8) {
        for who in all().filter(|who| *who != but && self.keys[*who] != 0) {
            self.attentions[who] = Some(ascq);
        }
    }

    /// Ends a reservation that has lost its holder.
    fn drop_orphaned_reservation(&mut self, from: usize) {
        let Some((kind, holder)) = self.held else { return };
        match kind {
            7 | 8 if self.keys == [0; 4] => self.held = None,
            7 | 8 => {}
            _ if self.keys[holder] == 0 => {
                self.held = None;
                if kind >= 5 {
                    self.raise(from, 4);
                }
            }
            _ => {}
        }
    }

    fn register(&mut self, from: usize, command: &ReserveOut) -> Status {
        let ignore = command.service_action == REGISTER_AND_IGNORE;
        let own = self.keys[from];
        if !ignore && command.presented != own {
            return Conflict;
        }
        if own == 0 && command.key == 0 {
            return Good;
        }
        let spec = command.flags & SPEC_I_PT != 0;
        if spec && own != 0 {
            return Illegal(0x26, 0);
        }
        let wide = command.flags & ALL_TG_PT != 0;
        let named = |initiator: &str, who: usize| NAMES[who].0 == initiator && (wide || NAMES[who].1 == NAMES[from].1);
        if command.initiators.iter().any(|initiator| !all().any(|who| named(initiator, who))) {
            return Illegal(0x26, 0);
        }
        let concerned = |who: &usize| {
            *who == from
                || (wide && named(NAMES[from].0, *who))
                || command.initiators.iter().any(|initiator| named(initiator, *who))
        };
        let affected: Vec<usize> = all().filter(concerned).collect();
        if !ignore && affected.iter().any(|who| self.keys[*who] != 0 && self.keys[*who] != command.presented) {
            return Conflict;
        }
        affected.iter().for_each(|who| self.keys[*who] = command.key);
        if command.key == 0 {
            self.drop_orphaned_reservation(from);
        }
        self.aptpl = command.flags & APTPL != 0;
        self.generation += 1;
        Good
    }

    fn preempt(&mut self, from: usize, command: &ReserveOut) -> Status {
        let victim = command.key;
        let whole = match self.held {
            Some((7 | 8, _)) => victim == 0,
            Some((_, holder)) => self.keys[holder] == victim,
            None => false,
        };
        if victim == 0 && !whole {
            return Illegal(0x26, 0);
        }
        let hit = |keys: &[u64; 4], who: usize| keys[who] != 0 && (victim == 0 || keys[who] == victim);
        if whole {
            if ![1, 3, 5, 6, 7, 8].contains(&command.kind) {
                return Illegal(0x24, 0);
            }
            for who in all().filter(|who| *who != from) {
                if hit(&self.keys, who) {
                    self.keys[who] = 0;
                    self.attentions[who] = Some(5);
                } else if self.keys[who] != 0 && self.held.is_some_and(|(kind, _)| kind != command.kind) {
                    self.attentions[who] = Some(4);
                }
            }
            self.held = Some((command.kind, from));
        } else {
            if !all().any(|who| hit(&self.keys, who)) {
                return Conflict;
            }
            for who in all() {
                if hit(&self.keys, who) {
                    self.keys[who] = 0;
                    if who != from {
                        self.attentions[who] = Some(5);
                    }
                }
            }
            self.drop_orphaned_reservation(from);
        }
        self.generation += 1;
        Good
    }

    fn move_to(&mut self, from: usize, command: &ReserveOut) -> Status {
        match self.held {
            None => return Illegal(0x24, 0),
            Some((7 | 8, _)) => return Conflict,
            Some((_, holder)) if holder != from => return Conflict,
            Some(_) => {}
        }
        let target = all().find(|who| *who != from && NAMES[*who] == (command.initiators[0], command.moves.1));
        let (Some(target), true) = (target, command.key != 0) else { return Illegal(0x26, 0) };
        self.keys[target] = command.key;
        self.held = self.held.map(|(kind, _)| (kind, target));
        if command.moves.0 {
            self.keys[from] = 0;
        }
        self.aptpl = command.flags & APTPL != 0;
        self.generation += 1;
        Good
    }

    fn out(&mut self, from: usize, command: &ReserveOut) -> Status {
        if self.reserved.is_some() {
            return Conflict;
        }
        let known = [1, 3, 5, 6, 7, 8].contains(&command.kind);
        match command.service_action {
            REGISTER | REGISTER_AND_IGNORE => return self.register(from, command),
            RESERVE if !known => return Illegal(0x24, 0),
            _ => {}
        }
        if self.keys[from] == 0 || self.keys[from] != command.presented {
            return Conflict;
        }
        match command.service_action {
            RESERVE => match self.held {
                None => self.held = Some((command.kind, from)),
                Some((kind, _)) if kind == command.kind && self.holds(from) => {}
                Some(_) => return Conflict,
            },
            RELEASE if self.holds(from) => {
                if self.held.is_some_and(|(kind, _)| kind != command.kind) {
                    return Illegal(0x26, 4);
                }
                self.held = None;
                if command.kind >= 5 {
                    self.raise(from, 4);
                }
            }
            RELEASE => {}
            CLEAR => {
                self.raise(from, 3);
                self.keys = [0; 4];
                self.held = None;
                self.generation += 1;
            }
            REGISTER_AND_MOVE => return self.move_to(from, command),
            _ => return self.preempt(from, command),
        }
        Good
    }

    fn unit(&mut self, from: usize, release: bool) -> Status {
        let shares = self.keys[from] != 0 && self.held.is_some_and(|(kind, _)| kind >= 5);
        if self.holds(from) || shares {
            return Good;
        }
        if self.keys != [0; 4] {
            return Conflict;
        }
        match (release, self.reserved) {
            (true, Some(holder)) if holder == from => self.reserved = None,
            (true, _) => {}
            (false, Some(holder)) if holder != from => return Conflict,
            (false, _) => self.reserved = Some(from),
        }
        Good
    }
}

fn steps() -> impl Strategy<Value = Step> {
    let key = || prop_oneof![2 => Just(0u64), 5 => 1u64..4];
    let kind = || prop_oneof![12 => prop::sample::select(vec![1u8, 3, 5, 6, 7, 8]), 1 => Just(0u8), 1 => Just(2u8)];
    let initiator = || prop::sample::select(vec!["a", "b", "c", "nobody"]);
    let action = prop_oneof![4 => Just(REGISTER), 4 => Just(RESERVE), 6 => 2u8..8];
    let flags = (any::<bool>(), prop::bool::weighted(0.25), prop::bool::weighted(0.25));
    let out = (0usize..4, action, kind(), key(), key(), flags, prop::collection::vec(initiator(), 0..3));
    let out =
        (out, any::<bool>(), 1u16..5).prop_map(|((from, action, kind, presented, key, flags, ids), drop, port)| {
            let (aptpl, wide, spec) = flags;
            let mut bits = u8::from(aptpl) | u8::from(wide) << 2;
            let mut initiators = Vec::new();
            if action == REGISTER && spec {
                bits |= SPEC_I_PT;
                initiators = ids;
            } else if action == REGISTER_AND_MOVE {
                initiators = vec![ids.first().copied().unwrap_or("a")];
            }
            let command = ReserveOut {
                service_action: action,
                kind,
                presented,
                key,
                flags: bits,
                initiators,
                moves: (drop, port),
            };
            Step::ReserveOut { from, command }
        });
    prop_oneof![
        40 => out,
        2 => (0usize..4, any::<bool>()).prop_map(|(from, release)| Step::Unit { from, release }),
        1 => Just(Step::Reset),
        1 => (0usize..4).prop_map(|from| Step::Lost { from }),
    ]
}

fn answer<T>(result: Result<T, ReservationError>) -> Status {
    match result {
        Ok(_) => Good,
        Err(ReservationError::Conflict) => Conflict,
        Err(ReservationError::CheckCondition(sense)) => {
            assert_eq!(sense.key as u8, 5);
            Illegal(sense.asc, sense.ascq)
        }
        Err(ReservationError::Overrun) => panic!("the list is whole"),
    }
}

/// Returns key, holder flag and type for each nexus, by READ FULL STATUS.
fn status(rig: &Rig) -> [(u64, u8, u8); 4] {
    let reply = rig.reserve_in(0, 3, u16::MAX).expect("READ FULL STATUS");
    let mut status = [(0, 0, 0); 4];
    for one in reply[8..].chunks(48) {
        let port = u16::from_be_bytes([one[18], one[19]]);
        let who = all().find(|who| NAMES[*who].1 == port && one[24..] == transport_id(NAMES[*who].0)).expect("a nexus");
        assert_eq!(status[who].0, 0, "each once");
        status[who] = (u64::from_be_bytes(one[..8].try_into().expect("eight")), one[12], one[13]);
    }
    status
}

fn expected_status(model: &Model) -> [(u64, u8, u8); 4] {
    std::array::from_fn(|who| match model.held {
        Some((kind, _)) if model.holds(who) => (model.keys[who], 1, kind),
        _ => (model.keys[who], 0, 0),
    })
}

fn check(rig: &Rig, model: &mut Model) {
    for who in all() {
        assert_eq!(rig.rights(who), model.rights(who), "rights of {who} in {model:?}");
    }
    let told = std::mem::take(&mut model.attentions).map(|ascq| ascq.into_iter().collect::<Vec<_>>());
    assert_eq!(rig.take_attentions(), told, "{model:?}");
    if model.reserved.is_some() {
        return;
    }
    assert_eq!(status(rig), expected_status(model), "{model:?}");
    assert_eq!(rig.generation(), model.generation);
    let held = model.held.map(|(kind, holder)| (if kind >= 7 { 0 } else { model.keys[holder] }, kind));
    assert_eq!(reservation(rig), held, "{model:?}");
    assert_eq!(rig.reserve_in(0, 2, 8).expect("REPORT CAPABILITIES")[3] & 1, u8::from(model.aptpl));
}

/// Compares the state after a power loss.
fn check_kept(rig: &Rig, model: &Model) {
    let kept = rig.memory.0.lock().expect("not poisoned").clone();
    let Some(kept) = kept else { return assert!(!model.aptpl) };
    let unit = Reservations::restore(&kept, None).expect("what was kept");
    let again = Rig { nexuses: join(&unit), unit, memory: std::sync::Arc::default() };
    let mut left = Model { generation: 0, reserved: None, attentions: [None; 4], ..model.clone() };
    if !model.aptpl {
        left = Model::default();
    }
    check(&again, &mut left);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_sequence(steps in proptest::collection::vec(steps(), 1..40)) {
        let (rig, mut model) = (Rig::new(), Model::default());
        for step in &steps {
            match step {
                Step::ReserveOut { from, command } => {
                    // Mostly the right key, which a random choice would rarely hit.
                    let mut command = command.clone();
                    if command.presented != 0 && model.keys[*from] != 0 {
                        command.presented = if command.presented == 3 { 3 } else { model.keys[*from] };
                    }
                    let before = model.clone();
                    let result = rig.reserve_out(*from, &command);
                    let accepted = result.as_ref().ok().map(|accepted| {
                        (accepted.transferred, accepted.abort.clone(), accepted.saved.is_some())
                    });
                    let expected = model.out(*from, &command);
                    assert_eq!(answer(result), expected, "{command:?} from {from} in {before:?}");
                    if let Some((transferred, abort, kept)) = accepted {
                        assert_eq!(transferred, command.list().len() as u64);
                        let gone = all().filter(|who| command.service_action == PREEMPT_AND_ABORT && model.attentions[*who] == Some(5));
                        let mut gone: Vec<_> = gone.map(|who| name(NAMES[who])).collect();
                        let mut abort = abort;
                        gone.sort();
                        abort.sort();
                        assert_eq!(abort, gone);
                        assert_eq!(kept, before.aptpl || model.aptpl);
                    }
                }
                Step::Unit { from, release } => {
                    let result = rig.unit_command(*from, if *release { 0x17 } else { 0x16 });
                    assert_eq!(answer(result), model.unit(*from, *release), "{step:?} in {model:?}");
                }
                Step::Reset => {
                    rig.unit.reset();
                    model.reserved = None;
                }
                Step::Lost { from } => {
                    rig.nexuses[*from].reservation.nexus_lost();
                    model.reserved = model.reserved.filter(|holder| holder != from);
                }
            }
            check(&rig, &mut model);
            check_kept(&rig, &model);
        }
    }
}
