//! The state machine of a device: decides the next transition from the states of both ends. Pure: it executes nothing.
//!
//! Decisions depend on the current content of xenstore, not on the content of events, so any number of changes may coalesce.
//! Source: Xen's `public/io/blkif.h` and `xenbus.h`; where they are silent, Linux's xen-blkback.

use mqblk_xen::vbd::XenbusState;

/// Phase of a device in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The device's directory exists; nothing else is done.
    Found,
    /// The storage is open, and the frontend may publish its rings.
    Waiting,
    /// The rings are served.
    Connected,
    /// One of the ends wants to disconnect; the rings are served until the frontend is closed.
    Leaving,
    /// There are no rings; waits for the frontend to close.
    Closing,
    /// There are no rings; a frontend may connect again.
    Closed,
}

impl Phase {
    /// All phases.
    #[cfg(test)]
    const ALL: [Phase; 6] =
        [Phase::Found, Phase::Waiting, Phase::Connected, Phase::Leaving, Phase::Closing, Phase::Closed];

    /// Returns true if the rings are served.
    pub const fn has_rings(self) -> bool {
        matches!(self, Phase::Connected | Phase::Leaving)
    }

    /// Returns true if the storage is open.
    pub const fn has_storage(self) -> bool {
        matches!(self, Phase::Waiting | Phase::Connected | Phase::Leaving)
    }
}

/// The state of a device in xenstore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seen {
    /// The backend's state; `None`: the device does not exist.
    pub backend: Option<XenbusState>,
    /// The frontend's state; [`XenbusState::Unknown`] also if it cannot be read.
    pub frontend: XenbusState,
    /// The `online` key: false if the toolstack wants to remove the device.
    pub online: bool,
    /// The frontend's domain is gone, and this program has created the device's directory, so must remove it.
    pub abandoned: bool,
}

/// One action of a transition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Detach the rings from their workers, wait until nothing is in flight, release pages and ports.
    TearDown,
    /// Close the storage.
    CloseStorage,
    /// Open the storage.
    OpenStorage,
    /// Write the keys that a frontend needs before it publishes rings, together with state 2.
    Offer,
    /// Read the frontend's keys, and attach its rings to workers. `resume`: an earlier process served them, and its journals
    /// hold the requests without a response.
    Connect {
        /// An earlier process served the rings.
        resume: bool,
    },
    /// Write the keys that describe the disk, together with state 4.
    Describe,
    /// Write a state.
    Announce(XenbusState),
    /// Remove the device's directories.
    Remove,
}

/// The effects of a transition and the phase after it. If an effect fails, [`FAILED`] or [`GONE`] follows instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Effects, executed in order.
    pub effects: &'static [Effect],
    /// The phase afterwards; `None`: the device is dropped.
    pub then: Option<Phase>,
}

use Effect::{Announce, CloseStorage, Connect, Describe, Offer, OpenStorage, Remove, TearDown};

const PREPARE: Step = Step { effects: &[OpenStorage, Offer], then: Some(Phase::Waiting) };
const CONNECT: Step = Step { effects: &[Connect { resume: false }, Describe], then: Some(Phase::Connected) };
const RESUME: Step = Step { effects: &[OpenStorage, Connect { resume: true }, Describe], then: Some(Phase::Connected) };
/// Like [`RESUME`], if the toolstack has requested the disconnect meanwhile: its state 5 stays.
const RESUME_LEAVING: Step = Step { effects: &[OpenStorage, Connect { resume: true }], then: Some(Phase::Leaving) };
const LEAVE: Step = Step { effects: &[Announce(XenbusState::Closing)], then: Some(Phase::Leaving) };
const NOTE_LEAVING: Step = Step { effects: &[], then: Some(Phase::Leaving) };
const CLOSE: Step =
    Step { effects: &[TearDown, CloseStorage, Announce(XenbusState::Closing)], then: Some(Phase::Closing) };
const CLOSED: Step =
    Step { effects: &[TearDown, CloseStorage, Announce(XenbusState::Closed)], then: Some(Phase::Closed) };
const NOTE_CLOSED: Step = Step { effects: &[], then: Some(Phase::Closed) };
const RESET: Step = Step { effects: &[TearDown, Offer], then: Some(Phase::Waiting) };
const AGAIN: Step = Step { effects: &[TearDown, CloseStorage], then: Some(Phase::Found) };
const REMOVE: Step = Step { effects: &[TearDown, CloseStorage, Remove], then: None };
/// After an effect has found the device's directory gone. Writes nothing, which would create the directory again.
pub const GONE: Step = Step { effects: &[TearDown, CloseStorage], then: None };
/// After an effect has failed and the reason is written to the error node.
pub const FAILED: Step = CLOSE;

/// Returns the next transition of a device. `None`: nothing to do until something changes.
pub fn next(phase: Phase, observed: Seen) -> Option<Step> {
    let Some(backend) = observed.backend else { return Some(GONE) };
    if backend == XenbusState::Initialising && phase != Phase::Found {
        // Only a toolstack writes this state: it has created the device again.
        return Some(AGAIN);
    }
    if observed.abandoned && !phase.has_storage() {
        return Some(REMOVE);
    }
    match phase {
        Phase::Found => found(backend, observed),
        Phase::Waiting => waiting(backend, observed),
        Phase::Connected | Phase::Leaving => served(phase, backend, observed),
        Phase::Closing => match observed.frontend {
            XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
            _ if !observed.online => Some(CLOSED),
            _ => None,
        },
        Phase::Closed => match observed.frontend {
            // A toolstack that removes a device writes 5 over any state, and waits for 6.
            _ if backend == XenbusState::Closing => Some(CLOSED),
            // A frontend may reach 3 before this state is observed.
            XenbusState::Initialising | XenbusState::Initialised if observed.online => Some(PREPARE),
            _ => None,
        },
    }
}

/// Returns the transition of a device that is new to this process: just created, or left by an earlier process.
fn found(backend: XenbusState, observed: Seen) -> Option<Step> {
    use XenbusState::{Closed, Closing, Connected, Initialised, Initialising, Unknown};
    match (backend, observed.frontend) {
        // The frontend's directory does not exist yet.
        (Initialising | Unknown, Unknown) => None,
        (Connected, Initialised | Connected | Closing) => Some(RESUME),
        (Closing, Initialised | Connected | Closing) => Some(RESUME_LEAVING),
        (Closed, Initialising | Initialised) if observed.online => Some(PREPARE),
        (Closed, _) => Some(NOTE_CLOSED),
        (_, Closed | Unknown) => Some(CLOSED),
        _ if !observed.online => Some(CLOSED),
        (Closing, _) | (_, Closing) => Some(CLOSE),
        _ => Some(PREPARE),
    }
}

fn waiting(backend: XenbusState, observed: Seen) -> Option<Step> {
    match observed.frontend {
        XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
        _ if backend == XenbusState::Closing && !observed.online => Some(CLOSED),
        _ if backend == XenbusState::Closing => Some(CLOSE),
        XenbusState::Initialised | XenbusState::Connected => Some(CONNECT),
        XenbusState::Closing => Some(CLOSE),
        _ => None,
    }
}

fn served(phase: Phase, backend: XenbusState, observed: Seen) -> Option<Step> {
    let removal_requested = backend == XenbusState::Closing && phase == Phase::Connected || !observed.online;
    match observed.frontend {
        XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
        // The driver has restarted without closing: it has abandoned its rings.
        XenbusState::Initialising if removal_requested => Some(CLOSED),
        XenbusState::Initialising => Some(RESET),
        // The disk may still be in use: it is served until the frontend closes.
        _ if phase == Phase::Leaving => None,
        XenbusState::Closing => Some(LEAVE),
        _ if backend == XenbusState::Closing => Some(NOTE_LEAVING),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
