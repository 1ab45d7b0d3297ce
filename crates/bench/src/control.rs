//! Control of the client threads by the main thread, and their progress.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Instant;

/// Phase of all threads. Phases only advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Load, not counted.
    Warmup,
    /// Load, counted.
    Measure,
    /// No new requests.
    Stop,
    /// The server is gone or stuck: requests in flight are abandoned.
    Abandon,
}

/// The phase, set by the main thread. On its own cache line: all threads poll it.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct PhaseControl {
    phase: AtomicU8,
    /// Entry time of each phase, common to all threads: they notice it later, at their next completion.
    entered: [OnceLock<Instant>; 4],
}

impl PhaseControl {
    /// Creates a control that starts at `phase`.
    pub(crate) fn new(phase: Phase) -> PhaseControl {
        let control = PhaseControl { phase: AtomicU8::new(phase as u8), entered: Default::default() };
        control.set(phase);
        control
    }

    /// Enters `phase`, unless a later one has been entered.
    pub(crate) fn set(&self, phase: Phase) {
        self.entered[phase as usize].get_or_init(Instant::now);
        self.phase.fetch_max(phase as u8, Ordering::Release);
    }

    /// Returns when `phase` was entered, if it was.
    pub(crate) fn entered(&self, phase: Phase) -> Option<Instant> {
        self.entered[phase as usize].get().copied()
    }

    /// Returns the current phase.
    #[inline]
    pub(crate) fn get(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Warmup,
            1 => Phase::Measure,
            2 => Phase::Stop,
            _ => Phase::Abandon,
        }
    }
}

/// Requests completed on a thread: for progress, and to detect a stuck server.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CompletionCounter(pub AtomicU64);
