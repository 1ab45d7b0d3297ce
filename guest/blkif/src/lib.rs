//! The Xen blkif device type: parses the requests of a ring and completes them. Independent of xenstore and of the source of grants and
//! events. Source: Xen's `public/io/blkif.h`.
//!
//! `vbd` is a device and what its rings share; `queue` is one ring's queue, with its two directions in `pull` and `complete`;
//! `parse` parses and validates requests; `page_pool` provides the pages of a request's data (`persistent`: the grants that stay mapped,
//! `slot_ranges`: buffer pages, `budget`: the host's limit of mapped pages); `journal` records requests across a kill of the process;
//! `barrier` orders the rings of a device.
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
