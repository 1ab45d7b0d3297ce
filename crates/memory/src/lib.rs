//! Guest memory.
//!
//! The home of one invariant: *memory is mapped while anything may touch it*. Everything that can touch it holds a
//! lease:
//!
//! * [`SharedArray`] and [`SharedU16`] (ring fields) hold their [`Region`];
//! * a [`Buffer`] (a request's data segments and its status byte) holds its worker's lease on a [`GuestMemory`]
//!   snapshot, so that a memory table can be replaced while requests are in flight and the old mapping is removed with
//!   the last of them.
//!
//! While a guest is being migrated, all writes to its memory are marked in its [`DirtyLog`]: a buffer's segments and
//! its status byte when the buffer is released, which is after the request's end and before its completion is visible;
//! bytes written by address at once; ring fields by their ring.
//!
//! All guest memory may change at any moment. It is only read by volatile or atomic loads, or copied as plain bytes
//! into private memory, and no Rust reference to it is ever made.
//!
//! `unsafe` is needed: memory that another process writes cannot be mapped otherwise.

mod arena;
mod bounce;
mod dirty;
mod fixed_buffers;
mod grant;
mod guest;
mod mapping;
mod pool;
mod region;
mod rules;
mod share;
mod shared;
mod sigbus;

pub use arena::{PAGE_BYTES, PageArena, PageSlot};
pub use bounce::BouncePool;
pub use dirty::{DirtyLog, DirtyLogError};
pub use fixed_buffers::FixedBufferUse;
pub use grant::{CopyDirection, DomainId, GrantAccess, GrantCopy, GrantRef, GrantStatus};
pub use guest::GuestMemory;
pub use mapping::{Mapping, create_memfd, zero_file};
pub use pool::{Buffer, BufferFault, BufferPool, FixedBuffers, LeaseAccess, LeaseId, PooledContext, Segment};
pub use region::{GuestAddress, MemoryError, Region, UserAddress};
pub use rules::SharedFileRules;
pub use share::MemoryShare;
pub use shared::{Pod, SharedArray, SharedU16, SharedU32, SharedWords, full_fence};
pub use sigbus::{MemoryLoss, is_address_lost};
