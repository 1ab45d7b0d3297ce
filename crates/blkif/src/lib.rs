//! The Xen blkif device type: parses the requests of a ring and completes them. Independent of xenstore and of the
//! source of grants and events. Source: Xen's `public/io/blkif.h`.
//!
//! `vbd` is a device with the shared state of its rings; `queue` is one ring's queue, with its two directions in `pull`
//! (of a `batch`) and `complete` (the usual request's in `single`), made of four parts: `ring_side` (ring, event
//! channel, journal), `request_table`, `request_pages` (pages and their copies), `ring_barrier`; `parse` parses and
//! validates requests; `page_pool` provides the pages of a request's data (`persistent`: the grants that stay mapped,
//! `slot_ranges`: buffer pages, `budget`: the host's limit of mapped pages); `journal` records requests across a kill
//! of the process; `barrier` orders the rings of a device.
#![forbid(unsafe_code)]

pub mod barrier;
mod batch;
mod budget;
mod complete;
mod counters;
pub mod journal;
mod options;
mod page_backing;
mod page_pool;
mod parse;
mod persistent;
mod pool_handle;
mod pull;
mod queue;
mod request_pages;
mod request_table;
mod ring_barrier;
mod ring_side;
mod single;
mod slot_ranges;
mod vbd;

pub use budget::GrantBudget;
pub use counters::GrantCounters;
pub use options::{
    DEFAULT_INDIRECT_SEGMENTS, DEFAULT_PERSISTENT_IDLE, DEFAULT_PERSISTENT_MAX, GrantMode, MAX_INDIRECT_SEGMENTS,
    PoolScope, ResolvedGrantMode, VbdOptions,
};
pub use queue::{BlkifQueue, BlkifToken};
pub use vbd::{RingParts, Vbd};
