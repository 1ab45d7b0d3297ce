//! The interface between guests and storage.
//!
//! Every guest interface meets every storage backend here and nowhere else:
//!
//! ```text
//! guest ring -> GuestQueue -> (engine: tags, batches) -> DiskChannel -> storage
//! ```
//!
//! This crate does no I/O and holds no unsafe code. It defines requests ([`Request`], [`Op`], [`Outcome`]), the guest
//! side ([`GuestQueue`]), the disk side ([`Disk`], [`DiskChannel`]), the units of both ([`units`]) and the parsing of a
//! user's settings ([`settings`]).
//!
//! An [`IoContext`] is lent by a worker thread to both sides at each call: its io_uring and its buffer pool. This crate
//! knows only that a context has a move-only buffer type, so that a buffer cannot be used by two owners at once.
#![forbid(unsafe_code)]

pub mod counters;
pub mod disk;
pub mod guest_observer;
pub mod image_opener;
pub mod lock;
pub mod mappings;
pub mod queue;
pub mod rate_limit;
pub mod request;
pub mod resize;
pub mod settings;
pub mod tenant_budget;
pub mod thread;
pub mod thread_role;
pub mod units;

pub use disk::{
    ACTIVATION_TIMEOUT, ConnectionStats, DiscardLimits, Disk, DiskChannel, DiskError, DiskObserver, Geometry, Limits,
};
pub use guest_observer::GuestObserver;
pub use image_opener::{ImageAccess, ImageOpenError, ImageOpener, OpenImage};
pub use mappings::{HeldMappings, MappingBudget};
pub use queue::{
    ArmResult, Call, DiskSlot, EventChannel, FinishedRequest, GuestQueue, Intake, PublishResult, PullEnd, Wake,
};
pub use rate_limit::{RateLimit, TokenBucket};
pub use request::{Completion, Errno, Op, Outcome, Request, Tag};
pub use resize::{Resize, Resized, SizeUsers};
pub use tenant_budget::{
    BudgetLimits, BudgetRefusal, BudgetUse, GuestMemoryCharge, MappingCharge, ResourceUse, TenantBudget,
};
pub use units::{BlockSize, ByteLen, ByteOffset, Sector512};

/// A worker thread's resources, lent to queues and channels at each call.
pub trait IoContext {
    /// A buffer in guest (or host) memory. Not `Clone`: its holder owns the memory.
    type Buffer;
}
