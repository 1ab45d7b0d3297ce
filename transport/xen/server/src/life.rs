//! A device's life: what is done next, by what both ends' states are. Pure: nothing here is done, only decided.
//!
//! Decisions are made by what is in xenstore now, not by what an event said: any number of changes that came meanwhile are one.
//! Source: Xen's `public/io/blkif.h` and `xenbus.h`; where they leave it open, Linux's xen-blkback.

use mqblk_xen::vbd::XenbusState;

/// How far a device is, in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Its directory is there. Nothing was done about it.
    Found,
    /// Its storage is open, and the frontend may publish its rings.
    Waiting,
    /// Its rings are served.
    Connected,
    /// Its rings are served until the frontend has closed: one of the ends wants to end.
    Leaving,
    /// It has no rings, and waits for the frontend to close.
    Closing,
    /// It has no rings, and a frontend may start anew.
    Closed,
}

impl Phase {
    /// All of them.
    #[cfg(test)]
    const ALL: [Phase; 6] =
        [Phase::Found, Phase::Waiting, Phase::Connected, Phase::Leaving, Phase::Closing, Phase::Closed];

    /// Whether its rings are served.
    pub const fn has_rings(self) -> bool {
        matches!(self, Phase::Connected | Phase::Leaving)
    }

    /// Whether its storage is open.
    pub const fn has_storage(self) -> bool {
        matches!(self, Phase::Waiting | Phase::Connected | Phase::Leaving)
    }
}

/// What is in xenstore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seen {
    /// The backend's state; `None`: there is no such device (any more).
    pub backend: Option<XenbusState>,
    /// The frontend's state; [`State::Unknown`] also when it cannot be read.
    pub frontend: XenbusState,
    /// Whether the toolstack wants the device to stay.
    pub online: bool,
    /// The frontend's domain is gone, and nobody else has made the device's directory and would remove it.
    pub abandoned: bool,
}

/// One thing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Take the rings away from their workers, wait until nothing of them is in flight, let pages and ports go.
    TearDown,
    /// Close the storage.
    CloseStorage,
    /// Open the storage.
    OpenStorage,
    /// Write what a frontend must know before it publishes rings, and the state 2 with it.
    Offer,
    /// Read the frontend's keys, and give its rings to workers. `resume`: a process before this one served them, and its
    /// journals say what it had not answered.
    Connect {
        /// A process before this one served them.
        resume: bool,
    },
    /// Write what the disk is, and the state 4 with it.
    Describe,
    /// Write a state.
    Announce(XenbusState),
    /// Remove the device's directory.
    Remove,
}

/// What to do, in order, and where that leads. An effect that fails leads elsewhere: [`FAILED`], or [`GONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// To be done one after the other.
    pub effects: &'static [Effect],
    /// The phase then; `None`: the device is forgotten.
    pub then: Option<Phase>,
}

use Effect::{Announce, CloseStorage, Connect, Describe, Offer, OpenStorage, Remove, TearDown};

const PREPARE: Step = Step { effects: &[OpenStorage, Offer], then: Some(Phase::Waiting) };
const CONNECT: Step = Step { effects: &[Connect { resume: false }, Describe], then: Some(Phase::Connected) };
const RESUME: Step = Step { effects: &[OpenStorage, Connect { resume: true }, Describe], then: Some(Phase::Connected) };
/// As [`RESUME`], when the toolstack has asked for the end meanwhile: its state 5 stands.
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
/// When an effect has found the device's directory gone. Nothing is written, which would make it anew.
pub const GONE: Step = Step { effects: &[TearDown, CloseStorage], then: None };
/// When an effect has failed; why is written before this.
pub const FAILED: Step = CLOSE;

/// What to do about a device. `None`: nothing, until something changes.
pub fn next(phase: Phase, seen: Seen) -> Option<Step> {
    let Some(backend) = seen.backend else { return Some(GONE) };
    if backend == XenbusState::Initialising && phase != Phase::Found {
        // Nobody but a toolstack writes that: it has made the device anew.
        return Some(AGAIN);
    }
    if seen.abandoned && !phase.has_storage() {
        return Some(REMOVE);
    }
    match phase {
        Phase::Found => found(backend, seen),
        Phase::Waiting => waiting(backend, seen),
        Phase::Connected | Phase::Leaving => served(phase, backend, seen),
        Phase::Closing => match seen.frontend {
            XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
            _ if !seen.online => Some(CLOSED),
            _ => None,
        },
        Phase::Closed => match seen.frontend {
            // A toolstack that wants a device to go writes 5 over whatever was there, and waits for 6.
            _ if backend == XenbusState::Closing => Some(CLOSED),
            // A frontend may go on to 3 before we have looked.
            XenbusState::Initialising | XenbusState::Initialised if seen.online => Some(PREPARE),
            _ => None,
        },
    }
}

/// What a process finds that has just started, or that a toolstack has just made.
fn found(backend: XenbusState, seen: Seen) -> Option<Step> {
    use XenbusState::{Closed, Closing, Connected, Initialised, Initialising, Unknown};
    match (backend, seen.frontend) {
        // Its other half is yet to be made.
        (Initialising | Unknown, Unknown) => None,
        (Connected, Initialised | Connected | Closing) => Some(RESUME),
        (Closing, Initialised | Connected | Closing) => Some(RESUME_LEAVING),
        (Closed, Initialising | Initialised) if seen.online => Some(PREPARE),
        (Closed, _) => Some(NOTE_CLOSED),
        (_, Closed | Unknown) => Some(CLOSED),
        _ if !seen.online => Some(CLOSED),
        (Closing, _) | (_, Closing) => Some(CLOSE),
        _ => Some(PREPARE),
    }
}

fn waiting(backend: XenbusState, seen: Seen) -> Option<Step> {
    match seen.frontend {
        XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
        _ if backend == XenbusState::Closing && !seen.online => Some(CLOSED),
        _ if backend == XenbusState::Closing => Some(CLOSE),
        XenbusState::Initialised | XenbusState::Connected => Some(CONNECT),
        XenbusState::Closing => Some(CLOSE),
        _ => None,
    }
}

fn served(phase: Phase, backend: XenbusState, seen: Seen) -> Option<Step> {
    let asked_to_go = backend == XenbusState::Closing && phase == Phase::Connected || !seen.online;
    match seen.frontend {
        XenbusState::Closed | XenbusState::Unknown => Some(CLOSED),
        // Its driver has started anew without closing: whatever rings it had, it has given up.
        XenbusState::Initialising if asked_to_go => Some(CLOSED),
        XenbusState::Initialising => Some(RESET),
        // Its disk may still be in use: it is served until the frontend says that it is not.
        _ if phase == Phase::Leaving => None,
        XenbusState::Closing => Some(LEAVE),
        _ if backend == XenbusState::Closing => Some(NOTE_LEAVING),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
