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
fn all_observations() -> impl Iterator<Item = ObservedState> {
    let backends = STATES.into_iter().map(Some).chain([None]);
    backends.flat_map(|backend| {
        STATES.into_iter().flat_map(move |frontend| {
            // A frontend whose domain is gone has no state.
            let abandoned = [false, frontend == XenbusState::Unknown];
            let both = [false, true].into_iter().flat_map(move |online| abandoned.map(|abandoned| (online, abandoned)));
            both.map(move |(online, abandoned)| ObservedState { backend, frontend, online, abandoned })
        })
    })
}

fn observed(backend: XenbusState, frontend: XenbusState, online: bool) -> ObservedState {
    ObservedState { backend: Some(backend), frontend, online, abandoned: false }
}

/// Model of a device. Panics on effects that violate an invariant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct DeviceModel {
    phase: Option<DevicePhase>,
    rings: bool,
    storage: bool,
    backend: Option<XenbusState>,
    connects: u32,
}

impl DeviceModel {
    fn fresh(backend: Option<XenbusState>) -> DeviceModel {
        DeviceModel { phase: Some(DevicePhase::Discovered), rings: false, storage: false, backend, connects: 0 }
    }

    fn write(&mut self, state: XenbusState) {
        assert!(self.backend.is_some(), "a directory that is gone is written to");
        self.backend = Some(state);
    }

    fn apply(&mut self, effect: Effect) {
        match effect {
            DetachRings => self.rings = false,
            CloseStorage => {
                assert!(!self.rings, "storage is closed under rings");
                self.storage = false;
            }
            OpenStorage => {
                assert!(!self.storage, "storage is opened twice");
                self.storage = true;
            }
            WriteOffer => {
                assert!(self.storage && !self.rings, "rings are offered without storage or while there are some");
                self.write(XenbusState::InitWait);
            }
            Connect { .. } => {
                assert!(self.storage, "rings without storage");
                assert!(!self.rings, "two connections at once");
                self.rings = true;
                self.connects += 1;
            }
            WriteDescription => {
                assert!(self.rings, "connected without rings");
                self.write(XenbusState::Connected);
            }
            WriteState(state) => {
                assert!(state != XenbusState::Closed || !self.rings, "closed with rings");
                self.write(state);
            }
            RemoveDirectories => {
                assert!(!self.rings && !self.storage, "removed while it is in use");
                assert!(self.backend.is_some(), "removed twice");
                self.backend = None;
            }
        }
    }

    /// Runs a step; the effect numbered `fails` fails.
    fn run(&mut self, step: Transition, fails: Option<usize>) {
        for (number, effect) in step.effects.iter().enumerate() {
            if fails == Some(number) && !matches!(effect, DetachRings | CloseStorage) {
                let cleanup = if self.backend.is_some() { FAILED } else { GONE };
                cleanup.effects.iter().for_each(|effect| self.apply(*effect));
                self.phase = cleanup.next_phase;
                return;
            }
            self.apply(*effect);
        }
        self.phase = step.next_phase;
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

/// From every phase, with every observable state, with each effect failing: no invariant is violated, and the phase
/// matches the model.
#[test]
fn every_transition_keeps_the_invariants() {
    let mut steps = 0;
    for phase in DevicePhase::ALL {
        for now in all_observations() {
            let Some(step) = next_transition(phase, now) else { continue };
            for fails in (0..step.effects.len()).map(Some).chain([None]) {
                let world = DeviceModel {
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

/// Transitions do not repeat: with an unchanged frontend (and the backend state as written), a device reaches a stable
/// phase.
#[test]
fn every_device_reaches_a_stable_phase() {
    for phase in DevicePhase::ALL {
        for now in all_observations() {
            let mut world = DeviceModel {
                phase: Some(phase),
                rings: phase.has_rings(),
                storage: phase.has_storage(),
                backend: now.backend,
                connects: 0,
            };
            let mut steps = 0;
            while let Some(phase) = world.phase
                && let Some(step) = next_transition(phase, ObservedState { backend: world.backend, ..now })
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
    for phase in DevicePhase::ALL {
        for now in all_observations() {
            let mut world = DeviceModel {
                phase: Some(phase),
                rings: phase.has_rings(),
                storage: phase.has_storage(),
                backend: now.backend,
                connects: 0,
            };
            let mut steps = 0;
            while let Some(phase) = world.phase
                && let Some(step) = next_transition(phase, ObservedState { backend: world.backend, ..now })
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
    assert_eq!(next_transition(DevicePhase::Discovered, observed(Initialising, Initialising, true)), Some(PREPARE));
    assert_eq!(next_transition(DevicePhase::InitWait, observed(InitWait, Initialising, true)), None);
    for published in [Initialised, Connected] {
        assert_eq!(next_transition(DevicePhase::InitWait, observed(InitWait, published, true)), Some(CONNECT));
        assert_eq!(
            next_transition(DevicePhase::Connected, observed(Connected, published, true)),
            None,
            "a repeat is ignored"
        );
    }
    assert_eq!(next_transition(DevicePhase::Connected, observed(Connected, Closing, true)), Some(DISCONNECT));
    assert_eq!(next_transition(DevicePhase::Disconnecting, observed(Closing, Closing, true)), None);
    assert_eq!(next_transition(DevicePhase::Disconnecting, observed(Closing, Closed, true)), Some(CLOSED));
    assert_eq!(next_transition(DevicePhase::Closed, observed(Closed, Closed, true)), None);
    assert_eq!(next_transition(DevicePhase::Closed, observed(Closed, Initialising, true)), Some(PREPARE));
    assert_eq!(PREPARE.effects.last(), Some(&WriteOffer), "which writes state 2");
}

#[test]
fn a_toolstack_detaches() {
    use XenbusState::*;
    // In use: served until the guest closes it.
    assert_eq!(next_transition(DevicePhase::Connected, observed(Closing, Connected, false)), Some(ENTER_DISCONNECTING));
    assert_eq!(next_transition(DevicePhase::Disconnecting, observed(Closing, Connected, false)), None);
    assert_eq!(next_transition(DevicePhase::Disconnecting, observed(Closing, Closed, false)), Some(CLOSED));
    assert_eq!(next_transition(DevicePhase::Closed, observed(Closed, Closed, false)), None);
    assert_eq!(
        next_transition(DevicePhase::Closed, observed(Closed, Initialising, false)),
        None,
        "it is being removed"
    );
    // Not in use: at once, also if it was closed before.
    for phase in [DevicePhase::InitWait, DevicePhase::Closing, DevicePhase::Closed] {
        assert_eq!(next_transition(phase, observed(Closing, Initialising, false)), Some(CLOSED), "{phase:?}");
    }
    assert_eq!(next_transition(DevicePhase::Closed, observed(Closing, Closed, false)), Some(CLOSED));
    // Removed without notice.
    for phase in DevicePhase::ALL {
        assert_eq!(
            next_transition(phase, ObservedState { backend: None, ..observed(Connected, Connected, true) }),
            Some(GONE)
        );
    }
}

#[test]
fn devices_of_a_domain_that_is_gone_are_removed() {
    use XenbusState::*;
    let gone = |backend| ObservedState { abandoned: true, ..observed(backend, Unknown, true) };
    for phase in [DevicePhase::InitWait, DevicePhase::Connected, DevicePhase::Disconnecting] {
        assert_eq!(next_transition(phase, gone(Connected)), Some(CLOSED), "{phase:?}: what it uses is released first");
    }
    for phase in [DevicePhase::Discovered, DevicePhase::Closing, DevicePhase::Closed] {
        assert_eq!(next_transition(phase, gone(Closed)), Some(REMOVE), "{phase:?}");
    }
    assert_eq!(
        next_transition(DevicePhase::Discovered, gone(Connected)),
        Some(REMOVE),
        "discovered by a process that has just started"
    );
    assert_eq!(
        next_transition(DevicePhase::Closed, observed(Closed, Unknown, true)),
        None,
        "a device of another program is left to that program"
    );
}

#[test]
fn a_process_resumes_devices_of_an_earlier_one() {
    use XenbusState::*;
    for frontend in [Initialised, Connected, Closing] {
        assert_eq!(next_transition(DevicePhase::Discovered, observed(Connected, frontend, true)), Some(RESUME));
        assert_eq!(
            next_transition(DevicePhase::Discovered, observed(Closing, frontend, false)),
            Some(RESUME_DISCONNECTING)
        );
    }
    assert_eq!(next_transition(DevicePhase::Discovered, observed(Connected, Initialising, true)), Some(PREPARE));
    assert_eq!(next_transition(DevicePhase::Discovered, observed(Connected, Closed, true)), Some(CLOSED));
    assert_eq!(next_transition(DevicePhase::Discovered, observed(Connected, Unknown, true)), Some(CLOSED));
    assert_eq!(next_transition(DevicePhase::Discovered, observed(InitWait, Initialised, true)), Some(PREPARE));
    assert_eq!(next_transition(DevicePhase::Discovered, observed(Closed, Closed, true)), Some(ENTER_CLOSED));
    assert_eq!(next_transition(DevicePhase::Discovered, observed(Closed, Initialising, true)), Some(PREPARE));
    assert_eq!(
        next_transition(DevicePhase::Discovered, observed(Initialising, Unknown, true)),
        None,
        "the frontend's directory does not exist yet"
    );
}

#[test]
fn a_frontend_that_restarts_gets_new_rings() {
    use XenbusState::*;
    assert_eq!(next_transition(DevicePhase::Connected, observed(Connected, Initialising, true)), Some(RESET));
    assert_eq!(next_transition(DevicePhase::Disconnecting, observed(Closing, Initialising, true)), Some(RESET));
    assert_eq!(next_transition(DevicePhase::Connected, observed(Connected, Initialising, false)), Some(CLOSED));
    assert_eq!(RESET.effects.first(), Some(&DetachRings));
}

proptest! {
    /// Frontends and toolstacks that write any state at any time, and failures of any effect: the invariants hold,
    /// and a well-behaved frontend is served at the end.
    #[test]
    fn random_flips(
        flips in proptest::collection::vec((0..9usize, any::<bool>(), 0..24u8, proptest::option::weighted(0.2, 0..4usize)), 0..200),
    ) {
        let mut world = DeviceModel::fresh(Some(XenbusState::Initialising));
        let step_on = |world: &mut DeviceModel, frontend: XenbusState, online: bool, fails: Option<usize>| {
            let phase = world.phase.unwrap_or(DevicePhase::Discovered);
            if world.phase.is_none() {
                if world.backend.is_none() {
                    return false;
                }
                *world = DeviceModel { phase: Some(DevicePhase::Discovered), connects: world.connects, ..DeviceModel::fresh(world.backend) };
            }
            let Some(step) = next_transition(phase, ObservedState { backend: world.backend, ..observed(XenbusState::Unknown, frontend, online) }) else { return false };
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
        prop_assert_eq!(world.phase, Some(DevicePhase::Connected));
        prop_assert_eq!(world.backend, Some(XenbusState::Connected));
    }
}
