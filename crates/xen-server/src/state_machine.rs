//! The state machine of a device: decides the next transition from the states of both ends. Pure: it executes nothing.
//!
//! Decisions depend on the current content of xenstore, not on the content of events, so any number of changes may
//! coalesce. Source: Xen's `public/io/blkif.h` and `xenbus.h`; where they are silent, Linux's xen-blkback.

use mqblk_xen::vbd::XenbusState;

/// Phase of a device in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DevicePhase {
    /// The device's directory exists; nothing else is done.
    Discovered,
    /// The storage is open, and the frontend may publish its rings.
    InitWait,
    /// The rings are served.
    Connected,
    /// One of the ends wants to disconnect; the rings are served until the frontend is closed.
    Disconnecting,
    /// There are no rings; waits for the frontend to close.
    Closing,
    /// There are no rings; a frontend may connect again.
    Closed,
}

impl DevicePhase {
    /// All phases.
    #[cfg(test)]
    const ALL: [DevicePhase; 6] = [
        DevicePhase::Discovered,
        DevicePhase::InitWait,
        DevicePhase::Connected,
        DevicePhase::Disconnecting,
        DevicePhase::Closing,
        DevicePhase::Closed,
    ];

    /// Returns true if the rings are served.
    pub(crate) const fn has_rings(self) -> bool {
        matches!(self, DevicePhase::Connected | DevicePhase::Disconnecting)
    }

    /// Returns true if the storage is open.
    pub(crate) const fn has_storage(self) -> bool {
        matches!(self, DevicePhase::InitWait | DevicePhase::Connected | DevicePhase::Disconnecting)
    }
}

/// The state of a device in xenstore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ObservedState {
    /// The backend's state; `None`: the device does not exist.
    pub backend: Option<XenbusState>,
    /// The frontend's state; [`XenbusState::Unknown`] also if it cannot be read.
    pub frontend: XenbusState,
    /// The `online` key: false if the toolstack wants to remove the device.
    pub online: bool,
    /// True if the frontend's domain is gone, and this program has created the device's directory, so must remove it.
    pub abandoned: bool,
}

/// One action of a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Effect {
    /// Detach the rings from their workers, wait until nothing is in flight, release pages and ports.
    DetachRings,
    /// Close the storage.
    CloseStorage,
    /// Open the storage.
    OpenStorage,
    /// Write the keys that a frontend needs before it publishes rings, together with state 2.
    WriteOffer,
    /// Read the frontend's keys, and attach its rings to workers. `resume`: an earlier process served them, and its
    /// journals hold the requests without a response.
    Connect {
        /// True if an earlier process served the rings.
        resume: bool,
    },
    /// Write the keys that describe the disk, together with state 4.
    WriteDescription,
    /// Write a state.
    WriteState(XenbusState),
    /// Remove the device's directories.
    RemoveDirectories,
}

/// The effects of a transition and the phase after it. If an effect fails, [`FAILED`] or [`GONE`] follows instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transition {
    /// Effects, executed in order.
    pub effects: &'static [Effect],
    /// The phase afterwards; `None`: the device is dropped.
    pub next_phase: Option<DevicePhase>,
}

use Effect::{
    CloseStorage, Connect, DetachRings, OpenStorage, RemoveDirectories, WriteDescription, WriteOffer, WriteState,
};

const PREPARE: Transition = Transition { effects: &[OpenStorage, WriteOffer], next_phase: Some(DevicePhase::InitWait) };
const CONNECT: Transition =
    Transition { effects: &[Connect { resume: false }, WriteDescription], next_phase: Some(DevicePhase::Connected) };
const RESUME: Transition = Transition {
    effects: &[OpenStorage, Connect { resume: true }, WriteDescription],
    next_phase: Some(DevicePhase::Connected),
};
/// Like [`RESUME`], if the toolstack has requested the disconnect meanwhile: its state 5 stays.
const RESUME_DISCONNECTING: Transition =
    Transition { effects: &[OpenStorage, Connect { resume: true }], next_phase: Some(DevicePhase::Disconnecting) };
const DISCONNECT: Transition =
    Transition { effects: &[WriteState(XenbusState::Closing)], next_phase: Some(DevicePhase::Disconnecting) };
const ENTER_DISCONNECTING: Transition = Transition { effects: &[], next_phase: Some(DevicePhase::Disconnecting) };
const CLOSE: Transition = Transition {
    effects: &[DetachRings, CloseStorage, WriteState(XenbusState::Closing)],
    next_phase: Some(DevicePhase::Closing),
};
const CLOSED: Transition = Transition {
    effects: &[DetachRings, CloseStorage, WriteState(XenbusState::Closed)],
    next_phase: Some(DevicePhase::Closed),
};
const ENTER_CLOSED: Transition = Transition { effects: &[], next_phase: Some(DevicePhase::Closed) };
const RESET: Transition = Transition { effects: &[DetachRings, WriteOffer], next_phase: Some(DevicePhase::InitWait) };
const REDISCOVER: Transition =
    Transition { effects: &[DetachRings, CloseStorage], next_phase: Some(DevicePhase::Discovered) };
const REMOVE: Transition = Transition { effects: &[DetachRings, CloseStorage, RemoveDirectories], next_phase: None };
/// After an effect has found the device's directory gone. Writes nothing, which would create the directory again.
pub(crate) const GONE: Transition = Transition { effects: &[DetachRings, CloseStorage], next_phase: None };
/// After an effect has failed and the reason is written to the error node.
pub(crate) const FAILED: Transition = CLOSE;

/// Returns the next transition of a device. `None`: nothing to do until something changes.
pub(crate) fn next_transition(phase: DevicePhase, observed: ObservedState) -> Option<Transition> {
    let Some(backend) = observed.backend else { return Some(GONE) };
    if backend == XenbusState::Initialising && phase != DevicePhase::Discovered {
        // Only a toolstack writes this state: it has created the device again.
        return Some(REDISCOVER);
    }
    if observed.abandoned && !phase.has_storage() {
        return Some(REMOVE);
    }
    match phase {
        DevicePhase::Discovered => next_discovered(backend, observed),
        DevicePhase::InitWait => next_init_wait(backend, observed),
        DevicePhase::Connected | DevicePhase::Disconnecting => next_served(phase, backend, observed),
        DevicePhase::Closing => match observed.frontend {
            XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
            _ if !observed.online => Some(CLOSED),
            _ => None,
        },
        DevicePhase::Closed => match observed.frontend {
            // A toolstack that removes a device writes 5 over any state, and waits for 6.
            _ if backend == XenbusState::Closing => Some(CLOSED),
            // A frontend may reach 3 before this state is observed.
            XenbusState::Initialising | XenbusState::Initialised if observed.online => Some(PREPARE),
            _ => None,
        },
    }
}

/// Returns the transition of a device that is new to this process: just created, or left by an earlier process.
fn next_discovered(backend: XenbusState, observed: ObservedState) -> Option<Transition> {
    use XenbusState::{Closed, Closing, Connected, Initialised, Initialising, Unknown};
    match (backend, observed.frontend) {
        // The frontend's directory does not exist yet.
        (Initialising | Unknown, Unknown) => None,
        (Connected, Initialised | Connected | Closing) => Some(RESUME),
        (Closing, Initialised | Connected | Closing) => Some(RESUME_DISCONNECTING),
        (Closed, Initialising | Initialised) if observed.online => Some(PREPARE),
        (Closed, _) => Some(ENTER_CLOSED),
        (_, Closed | Unknown) => Some(CLOSED),
        _ if !observed.online => Some(CLOSED),
        (Closing, _) | (_, Closing) => Some(CLOSE),
        _ => Some(PREPARE),
    }
}

fn next_init_wait(backend: XenbusState, observed: ObservedState) -> Option<Transition> {
    match observed.frontend {
        XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
        _ if backend == XenbusState::Closing && !observed.online => Some(CLOSED),
        _ if backend == XenbusState::Closing => Some(CLOSE),
        XenbusState::Initialised | XenbusState::Connected => Some(CONNECT),
        XenbusState::Closing => Some(CLOSE),
        _ => None,
    }
}

fn next_served(phase: DevicePhase, backend: XenbusState, observed: ObservedState) -> Option<Transition> {
    let removal_requested = backend == XenbusState::Closing && phase == DevicePhase::Connected || !observed.online;
    match observed.frontend {
        XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
        // The driver has restarted without closing: it has abandoned its rings.
        XenbusState::Initialising if removal_requested => Some(CLOSED),
        XenbusState::Initialising => Some(RESET),
        // The disk may still be in use: it is served until the frontend closes.
        _ if phase == DevicePhase::Disconnecting => None,
        XenbusState::Closing => Some(DISCONNECT),
        _ if backend == XenbusState::Closing => Some(ENTER_DISCONNECTING),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
