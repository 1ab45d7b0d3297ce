use proptest::prelude::*;

use super::*;

const STATES: [XenbusState; 9] = [
    XenbusState::Unknown,
    XenbusState::Initialising,
    XenbusState::InitWait,
    XenbusState::Initialised,
    XenbusState::Connected,
    XenbusState::Closing,
    XenbusState::Closed,
    XenbusState::Reconfiguring,
    XenbusState::Reconfigured,
];

/// All states that can be observed.
fn all() -> impl Iterator<Item = Seen> {
    let backends = STATES.into_iter().map(Some).chain([None]);
    backends.flat_map(|backend| {
        STATES.into_iter().flat_map(move |frontend| {
            // A frontend whose domain is gone has no state.
            let abandoned = [false, frontend == XenbusState::Unknown];
            let both = [false, true].into_iter().flat_map(move |online| abandoned.map(|abandoned| (online, abandoned)));
            both.map(move |(online, abandoned)| Seen { backend, frontend, online, abandoned })
        })
    })
}

fn seen(backend: XenbusState, frontend: XenbusState, online: bool) -> Seen {
    Seen { backend: Some(backend), frontend, online, abandoned: false }
}

/// Model of a device. Panics on effects that violate an invariant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    phase: Option<Phase>,
    rings: bool,
    storage: bool,
    backend: Option<XenbusState>,
    connects: u32,
}

impl World {
    fn fresh(backend: Option<XenbusState>) -> World {
        World { phase: Some(Phase::Found), rings: false, storage: false, backend, connects: 0 }
    }

    fn write(&mut self, state: XenbusState) {
        assert!(self.backend.is_some(), "a directory that is gone is written to");
        self.backend = Some(state);
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            TearDown => self.rings = false,
            CloseStorage => {
                assert!(!self.rings, "storage is closed under rings");
                self.storage = false;
            }
            OpenStorage => {
                assert!(!self.storage, "storage is opened twice");
                self.storage = true;
            }
            Offer => {
                assert!(self.storage && !self.rings, "rings are offered without storage or while there are some");
                self.write(XenbusState::InitWait);
            }
            Connect { .. } => {
                assert!(self.storage, "rings without storage");
                assert!(!self.rings, "two connections at once");
                self.rings = true;
                self.connects += 1;
            }
            Describe => {
                assert!(self.rings, "connected without rings");
                self.write(XenbusState::Connected);
            }
            Announce(state) => {
                assert!(state != XenbusState::Closed || !self.rings, "closed with rings");
                self.write(state);
            }
            Remove => {
                assert!(!self.rings && !self.storage, "removed while it is in use");
                assert!(self.backend.is_some(), "removed twice");
                self.backend = None;
            }
        }
    }

    /// Runs a step; the effect numbered `fails` fails.
    fn run(&mut self, step: Step, fails: Option<usize>) {
        for (number, effect) in step.effects.iter().enumerate() {
            if fails == Some(number) && !matches!(effect, TearDown | CloseStorage) {
                let cleanup = if self.backend.is_some() { FAILED } else { GONE };
                cleanup.effects.iter().for_each(|effect| self.apply(*effect));
                self.phase = cleanup.then;
                return;
            }
            self.apply(*effect);
        }
        self.phase = step.then;
    }

    fn check(&self) {
        let Some(phase) = self.phase else {
            assert!(!self.rings && !self.storage, "{self:?} is dropped with rings or storage");
            return;
        };
        assert_eq!(self.rings, phase.has_rings(), "{self:?}");
        assert_eq!(self.storage, phase.has_storage(), "{self:?}");
    }
}

/// From every phase, with every observable state, with each effect failing: no invariant is violated, and the phase matches the model.
#[test]
fn every_transition_keeps_the_invariants() {
    let mut steps = 0;
    for phase in Phase::ALL {
        for now in all() {
            let Some(step) = next(phase, now) else { continue };
            for fails in (0..step.effects.len()).map(Some).chain([None]) {
                let world = World {
                    phase: Some(phase),
                    rings: phase.has_rings(),
                    storage: phase.has_storage(),
                    backend: now.backend,
                    connects: 0,
                };
                let mut after = world.clone();
                after.run(step, fails);
                after.check();
                assert!(after.connects <= 1);
                steps += 1;
            }
        }
    }
    assert!(steps > 1000, "{steps}");
}

/// Transitions do not repeat: with an unchanged frontend (and the backend state as written), a device reaches a stable phase.
#[test]
fn every_device_reaches_a_stable_phase() {
    for phase in Phase::ALL {
        for now in all() {
            let mut world = World {
                phase: Some(phase),
                rings: phase.has_rings(),
                storage: phase.has_storage(),
                backend: now.backend,
                connects: 0,
            };
            let mut steps = 0;
            while let Some(phase) = world.phase
                && let Some(step) = next(phase, Seen { backend: world.backend, ..now })
            {
                world.run(step, None);
                steps += 1;
                assert!(steps <= 4, "{phase:?} {now:?} loops: {world:?}");
            }
            world.check();
        }
    }
}

/// A failure is not retried without a change of the frontend.
#[test]
fn a_failure_is_not_retried_by_itself() {
    for phase in Phase::ALL {
        for now in all() {
            let mut world = World {
                phase: Some(phase),
                rings: phase.has_rings(),
                storage: phase.has_storage(),
                backend: now.backend,
                connects: 0,
            };
            let mut steps = 0;
            while let Some(phase) = world.phase
                && let Some(step) = next(phase, Seen { backend: world.backend, ..now })
            {
                let fails = step.effects.iter().position(|effect| matches!(effect, OpenStorage | Connect { .. }));
                world.run(step, fails);
                steps += 1;
                assert!(steps <= 4, "{phase:?} {now:?} fails in a loop: {world:?}");
            }
        }
    }
}

#[test]
fn a_device_starts_serves_and_ends() {
    use XenbusState::*;
    assert_eq!(next(Phase::Found, seen(Initialising, Initialising, true)), Some(PREPARE));
    assert_eq!(next(Phase::Waiting, seen(InitWait, Initialising, true)), None);
    for published in [Initialised, Connected] {
        assert_eq!(next(Phase::Waiting, seen(InitWait, published, true)), Some(CONNECT));
        assert_eq!(next(Phase::Connected, seen(Connected, published, true)), None, "a repeat is ignored");
    }
    assert_eq!(next(Phase::Connected, seen(Connected, Closing, true)), Some(LEAVE));
    assert_eq!(next(Phase::Leaving, seen(Closing, Closing, true)), None);
    assert_eq!(next(Phase::Leaving, seen(Closing, Closed, true)), Some(CLOSED));
    assert_eq!(next(Phase::Closed, seen(Closed, Closed, true)), None);
    assert_eq!(next(Phase::Closed, seen(Closed, Initialising, true)), Some(PREPARE));
    assert_eq!(PREPARE.effects.last(), Some(&Offer), "which writes state 2");
}

#[test]
fn a_toolstack_detaches() {
    use XenbusState::*;
    // In use: served until the guest closes it.
    assert_eq!(next(Phase::Connected, seen(Closing, Connected, false)), Some(NOTE_LEAVING));
    assert_eq!(next(Phase::Leaving, seen(Closing, Connected, false)), None);
    assert_eq!(next(Phase::Leaving, seen(Closing, Closed, false)), Some(CLOSED));
    assert_eq!(next(Phase::Closed, seen(Closed, Closed, false)), None);
    assert_eq!(next(Phase::Closed, seen(Closed, Initialising, false)), None, "it is being removed");
    // Not in use: at once, also if it was closed before.
    for phase in [Phase::Waiting, Phase::Closing, Phase::Closed] {
        assert_eq!(next(phase, seen(Closing, Initialising, false)), Some(CLOSED), "{phase:?}");
    }
    assert_eq!(next(Phase::Closed, seen(Closing, Closed, false)), Some(CLOSED));
    // Removed without notice.
    for phase in Phase::ALL {
        assert_eq!(next(phase, Seen { backend: None, ..seen(Connected, Connected, true) }), Some(GONE));
    }
}

#[test]
fn devices_of_a_domain_that_is_gone_are_removed() {
    use XenbusState::*;
    let gone = |backend| Seen { abandoned: true, ..seen(backend, Unknown, true) };
    for phase in [Phase::Waiting, Phase::Connected, Phase::Leaving] {
        assert_eq!(next(phase, gone(Connected)), Some(CLOSED), "{phase:?}: what it uses is released first");
    }
    for phase in [Phase::Found, Phase::Closing, Phase::Closed] {
        assert_eq!(next(phase, gone(Closed)), Some(REMOVE), "{phase:?}");
    }
    assert_eq!(next(Phase::Found, gone(Connected)), Some(REMOVE), "discovered by a process that has just started");
    assert_eq!(
        next(Phase::Closed, seen(Closed, Unknown, true)),
        None,
        "a device of another program is left to that program"
    );
}

#[test]
fn a_process_resumes_devices_of_an_earlier_one() {
    use XenbusState::*;
    for frontend in [Initialised, Connected, Closing] {
        assert_eq!(next(Phase::Found, seen(Connected, frontend, true)), Some(RESUME));
        assert_eq!(next(Phase::Found, seen(Closing, frontend, false)), Some(RESUME_LEAVING));
    }
    assert_eq!(next(Phase::Found, seen(Connected, Initialising, true)), Some(PREPARE));
    assert_eq!(next(Phase::Found, seen(Connected, Closed, true)), Some(CLOSED));
    assert_eq!(next(Phase::Found, seen(Connected, Unknown, true)), Some(CLOSED));
    assert_eq!(next(Phase::Found, seen(InitWait, Initialised, true)), Some(PREPARE));
    assert_eq!(next(Phase::Found, seen(Closed, Closed, true)), Some(NOTE_CLOSED));
    assert_eq!(next(Phase::Found, seen(Closed, Initialising, true)), Some(PREPARE));
    assert_eq!(
        next(Phase::Found, seen(Initialising, Unknown, true)),
        None,
        "the frontend's directory does not exist yet"
    );
}

#[test]
fn a_frontend_that_restarts_gets_new_rings() {
    use XenbusState::*;
    assert_eq!(next(Phase::Connected, seen(Connected, Initialising, true)), Some(RESET));
    assert_eq!(next(Phase::Leaving, seen(Closing, Initialising, true)), Some(RESET));
    assert_eq!(next(Phase::Connected, seen(Connected, Initialising, false)), Some(CLOSED));
    assert_eq!(RESET.effects.first(), Some(&TearDown));
}

proptest! {
    /// Frontends and toolstacks that write any state at any time, and failures of any effect: the invariants hold, and a well-behaved
    /// frontend is served at the end.
    #[test]
    fn random_flips(
        flips in proptest::collection::vec((0..9usize, any::<bool>(), 0..24u8, proptest::option::weighted(0.2, 0..4usize)), 0..200),
    ) {
        let mut world = World::fresh(Some(XenbusState::Initialising));
        let step_on = |world: &mut World, frontend: XenbusState, online: bool, fails: Option<usize>| {
            let phase = world.phase.unwrap_or(Phase::Found);
            if world.phase.is_none() {
                if world.backend.is_none() {
                    return false;
                }
                *world = World { phase: Some(Phase::Found), connects: world.connects, ..World::fresh(world.backend) };
            }
            let Some(step) = next(phase, Seen { backend: world.backend, ..seen(XenbusState::Unknown, frontend, online) }) else { return false };
            world.run(step, fails);
            world.check();
            true
        };
        for (frontend, online, toolstack, fails) in flips {
            match toolstack {
                0 => world.backend = None,
                1 => world.backend = Some(XenbusState::Initialising),
                2 => world.backend = Some(XenbusState::Closing),
                3 => world.backend = Some(STATES[usize::from(toolstack) + frontend / 2]),
                _ => {}
            }
            step_on(&mut world, STATES[frontend], online, fails);
        }
        // The toolstack creates the device again, and the frontend follows the protocol.
        world.backend = Some(XenbusState::Initialising);
        for frontend in [XenbusState::Initialising, XenbusState::Initialised, XenbusState::Connected] {
            let mut steps = 0;
            while step_on(&mut world, frontend, true, None) {
                steps += 1;
                prop_assert!(steps < 8);
            }
        }
        prop_assert_eq!(world.phase, Some(Phase::Connected));
        prop_assert_eq!(world.backend, Some(XenbusState::Connected));
    }
}
