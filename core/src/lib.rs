//! The waist of mqblk.
//!
//! Every guest interface meets every storage backend here and nowhere else:
//!
//! ```text
//! guest ring -> GuestQueue -> (engine: tags, batches) -> DiskChannel -> storage
//! ```
//!
//! This crate does no I/O and holds no unsafe code. It names what a request is ([`Request`], [`Op`], [`Outcome`]), what the
//! guest side must offer ([`GuestQueue`]), what the disk side must offer ([`Disk`], [`DiskChannel`]), the units both count in
//! ([`units`]) and how settings are read from a user ([`settings`]).
//!
//! [`context`] stands for what a worker thread lends to both sides at each call (its io_uring and its buffer pool). The waist
//! knows only that a context has a move-only buffer type, so that a buffer cannot be used by two owners at once.
#![forbid(unsafe_code)]

pub mod disk;
pub mod queue;
pub mod request;
pub mod resize;
pub mod settings;
pub mod units;

pub use disk::{DiscardLimits, Disk, DiskChannel, DiskError, DiskObserver, Geometry, Limits};
pub use queue::{
    ArmResult, Call, DiskSlot, EventChannel, FinishedRequest, GuestQueue, Intake, PublishResult, PullEnd, Wake,
};
pub use request::{Completion, Errno, Op, Outcome, Request, Tag};
pub use resize::{Resize, Resized, SizeUsers};
pub use units::{BlockSize, ByteLen, ByteOffset, Sector512};

/// What a worker thread lends to queues and channels at each call.
pub trait IoContext {
    /// A lease on guest (or host) memory. Not `Clone`: whoever holds it owns the memory it names.
    type Buffer;
}
