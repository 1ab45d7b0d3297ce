//! The Xen blkif personality: what a request of a ring means. Knows neither xenstore nor where grants and events come from.
//! Source: Xen's `public/io/blkif.h`.
//!
//! `vbd` is a device, what its rings have in common; `queue` a ring's queue, `pull` and `answer` its two directions; `judge` says what
//! is allowed; `pages` is where data lies (`persistent` which grants stay mapped, `ranges` pages of our own, `budget` how much a host
//! may map); `journal` stands a kill of the process, `barrier` orders the rings of a device.
#![forbid(unsafe_code)]

mod answer;
pub mod barrier;
mod budget;
mod counters;
mod holder;
pub mod journal;
mod judge;
mod options;
mod pages;
mod persistent;
mod place;
mod pull;
mod queue;
mod ranges;
mod requests;
mod vbd;

pub use budget::GrantBudget;
pub use counters::GrantCounters;
pub use options::{
    DEFAULT_INDIRECT_SEGMENTS, DEFAULT_PERSISTENT_IDLE, DEFAULT_PERSISTENT_MAX, GrantMode, MAX_INDIRECT_SEGMENTS, Mode,
    PoolOwner, VbdOptions,
};
pub use queue::{BlkifQueue, BlkifToken};
pub use vbd::{RingParts, Vbd};
