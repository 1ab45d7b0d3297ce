//! How the main thread steers the client threads, and sees that they get on.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What all threads are doing. Moves forward only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Load without counting.
    Warmup,
    /// Load, counted.
    Measure,
    /// No new requests.
    Stop,
    /// The server is gone or stuck: leave requests where they are.
    Abandon,
}

/// How the main thread steers the others. On a cache line of its own: everybody reads it all the time.
#[derive(Debug)]
#[repr(align(128))]
pub struct PhaseControl(AtomicU8);

impl PhaseControl {
    /// Starts at `phase`.
    pub fn new(phase: Phase) -> PhaseControl {
        PhaseControl(AtomicU8::new(phase as u8))
    }

    /// Moves on.
    pub fn set(&self, phase: Phase) {
        self.0.fetch_max(phase as u8, Ordering::Release);
    }

    /// What to do now.
    #[inline]
    pub fn get(&self) -> Phase {
        match self.0.load(Ordering::Acquire) {
            0 => Phase::Warmup,
            1 => Phase::Measure,
            2 => Phase::Stop,
            _ => Phase::Abandon,
        }
    }
}

/// Requests that a thread has seen the end of, for progress and to notice a stuck server.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct CompletionCounter(pub AtomicU64);
