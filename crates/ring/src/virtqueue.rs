//! A virtqueue of any format, for a device and its transport.
//!
//! A format is a folder beside this file, and a variant in each of the two types here. Each call is a `match`: a
//! predictable branch, since a queue keeps its format.

use mqblk_core::{ArmResult, PublishResult};
use mqblk_memory::{BufferPool, GuestMemory, LeaseId, SharedWords};

pub use crate::format::{
    ChainError, ChainHead, ChainHeader, ChainSegment, MAX_QUEUE_SIZE, RingAddresses, RingFormat, RingSetupError,
    RingState, UsualChains, VirtqueueError,
};
use crate::packed::position::Base;
use crate::packed::{PackedDevice, PackedInflight, PackedRing};
pub use crate::split::{InflightError, RingLog};
use crate::split::{InflightTable, SplitDevice, SplitRing};

impl RingFormat {
    /// Returns the base of a new ring.
    pub const fn first_base(self) -> u32 {
        match self {
            RingFormat::Split => 0,
            RingFormat::Packed => Base::FIRST.to_bits(),
        }
    }

    /// Returns true if `base` is that of a new ring.
    pub fn is_first(self, base: u32) -> bool {
        match self {
            RingFormat::Split => base == 0,
            RingFormat::Packed => Base::from_bits(base) == Base::FIRST,
        }
    }

    /// Checks the position at which a ring of `size` entries is resumed, see [`RingState::base`].
    ///
    /// # Errors
    /// [`RingSetupError::Base`].
    pub fn check_base(self, base: u32, size: u16) -> Result<(), RingSetupError> {
        let bad = |expected| Err(RingSetupError::Base { found: base, expected });
        match self {
            RingFormat::Split if base > u16::MAX.into() => bad("at most 0xffff, an index of a split ring"),
            RingFormat::Packed => {
                let Base { avail, used } = Base::from_bits(base);
                let is_inside = avail.slot < size && used.slot < size;
                if is_inside { Ok(()) } else { bad("positions in the packed ring") }
            }
            RingFormat::Split => Ok(()),
        }
    }
}

/// Most chains taken in one pull. A batch is fetched in passes, so that its cache misses overlap. In a larger batch the
/// guest would wait longer for its first completion.
pub const MAX_BATCH: usize = 32;

/// Storage for the chains that one pull takes off a ring; reused by each pull.
#[derive(Debug, Default)]
pub struct ChainBatch {
    /// The chains. Those beyond the count that [`fetch`](Self::fetch) returned are stale.
    pub heads: [ChainHead; MAX_BATCH],
}

impl ChainBatch {
    /// Takes the available chains, at most [`MAX_BATCH`] and at most `max`. Chains to replay come before all others.
    /// Returns their number, and true if more are available.
    ///
    /// # Errors
    /// When the ring violates the protocol.
    #[inline]
    pub fn fetch(
        &mut self,
        ring: &mut DeviceRing,
        pool: &mut BufferPool,
        lease: LeaseId,
        max: usize,
    ) -> Result<(usize, bool), VirtqueueError> {
        ring.fetch(pool, lease, &mut self.heads, max)
    }
}

/// A ring's areas, resolved to shared memory.
#[derive(Debug)]
pub enum MappedRing {
    /// A split virtqueue.
    Split(SplitRing),
    /// A packed virtqueue.
    Packed(PackedRing),
}

impl MappedRing {
    /// Resolves the areas of a ring of `size` entries.
    ///
    /// # Errors
    /// [`RingSetupError`] with the invalid area.
    pub fn resolve(
        memory: &GuestMemory,
        at: &RingAddresses,
        size: u16,
        format: RingFormat,
    ) -> Result<MappedRing, RingSetupError> {
        match format {
            RingFormat::Split => SplitRing::resolve(memory, at, size).map(MappedRing::Split),
            RingFormat::Packed => PackedRing::resolve(memory, at, size).map(MappedRing::Packed),
        }
    }

    /// Returns the bytes of an in-flight table for a ring of `size` entries.
    pub const fn inflight_bytes(size: u16, format: RingFormat) -> u64 {
        match format {
            RingFormat::Split => InflightTable::bytes(size),
            RingFormat::Packed => PackedInflight::bytes(size),
        }
    }
}

impl From<SplitRing> for MappedRing {
    fn from(ring: SplitRing) -> MappedRing {
        MappedRing::Split(ring)
    }
}

impl From<PackedRing> for MappedRing {
    fn from(ring: PackedRing) -> MappedRing {
        MappedRing::Packed(ring)
    }
}

/// The device's end of a ring.
#[derive(Debug)]
#[repr(u8)] // a separate tag is read faster than one in a field's niche
pub enum DeviceRing {
    /// A split virtqueue.
    Split(SplitDevice),
    /// A packed virtqueue.
    Packed(PackedDevice),
}

impl DeviceRing {
    /// Creates a ring that resumes at `base`, see [`RingState::base`] and [`RingFormat::check_base`].
    pub fn new(ring: impl Into<MappedRing>, base: u32, event_idx: bool) -> DeviceRing {
        match ring.into() {
            // A split ring's base has 16 bits.
            MappedRing::Split(ring) => DeviceRing::Split(SplitDevice::new(ring, base as u16, event_idx)),
            MappedRing::Packed(ring) => DeviceRing::Packed(PackedDevice::new(ring, Base::from_bits(base), event_idx)),
        }
    }

    /// Creates a ring whose chains in flight are tracked in `words`. It resumes from the table there, with its chains
    /// in flight; if the table is unused, at `base`. Also returns the number of discarded chains, from before a
    /// reset of the ring.
    ///
    /// # Errors
    /// When `words` are not a valid table for this ring.
    pub fn tracked(
        ring: impl Into<MappedRing>,
        base: u32,
        event_idx: bool,
        words: SharedWords,
    ) -> Result<(DeviceRing, usize), InflightError> {
        match ring.into() {
            MappedRing::Split(ring) => {
                let (ring, discarded) = SplitDevice::tracked(ring, base as u16, event_idx, words)?;
                Ok((DeviceRing::Split(ring), discarded))
            }
            MappedRing::Packed(ring) => {
                let (ring, discarded) = PackedDevice::tracked(ring, Base::from_bits(base), event_idx, words)?;
                Ok((DeviceRing::Packed(ring), discarded))
            }
        }
    }

    /// Returns the number of entries.
    #[inline]
    pub fn size(&self) -> u16 {
        match self {
            DeviceRing::Split(ring) => ring.size(),
            DeviceRing::Packed(ring) => ring.size(),
        }
    }

    /// Returns true if the ring was served before: the driver may have missed a call for earlier completions, and its
    /// own kick may have been lost with the earlier process.
    pub fn is_resumed(&self) -> bool {
        match self {
            DeviceRing::Split(ring) => ring.is_resumed(),
            DeviceRing::Packed(ring) => ring.is_resumed(),
        }
    }

    /// Returns true if chains in flight are tracked in memory that outlives the process.
    pub fn is_tracked(&self) -> bool {
        match self {
            DeviceRing::Split(ring) => ring.is_tracked(),
            DeviceRing::Packed(ring) => ring.is_tracked(),
        }
    }

    /// Returns the number of chains to replay that an earlier process left. They come before those that are available.
    #[inline]
    pub fn replays(&self) -> usize {
        match self {
            DeviceRing::Split(ring) => ring.replays(),
            DeviceRing::Packed(ring) => ring.replays(),
        }
    }

    /// Returns the progress that an earlier process recorded for the request of this chain; 0 if unknown. Returned
    /// once.
    pub fn take_recorded_step(&mut self, chain: u16) -> u8 {
        match self {
            DeviceRing::Split(ring) => ring.take_recorded_step(chain),
            DeviceRing::Packed(ring) => ring.take_recorded_step(chain),
        }
    }

    /// Returns the number of chains to replay that have a recorded step.
    pub fn recorded_steps(&self) -> usize {
        match self {
            DeviceRing::Split(ring) => ring.recorded_steps(),
            DeviceRing::Packed(ring) => ring.recorded_steps(),
        }
    }

    /// Records the progress of a request in flight, for a process that replays it.
    pub fn record_step(&mut self, chain: u16, step: u8) {
        match self {
            DeviceRing::Split(ring) => ring.record_step(chain, step),
            DeviceRing::Packed(ring) => ring.record_step(chain, step),
        }
    }

    /// Takes chains, as many as are available, `heads` has room for and `max` allows. Chains to replay come before all
    /// others. Returns their number, and true if more are available.
    ///
    /// # Errors
    /// When the ring violates the protocol.
    #[inline]
    pub fn fetch<const N: usize>(
        &mut self,
        pool: &mut BufferPool,
        lease: LeaseId,
        heads: &mut [ChainHead; N],
        max: usize,
    ) -> Result<(usize, bool), VirtqueueError> {
        match self {
            DeviceRing::Split(ring) => ring.fetch(pool, lease, heads, max),
            DeviceRing::Packed(ring) => ring.fetch(pool, lease, heads, max),
        }
    }

    /// Calls `each` with every segment of a chain, readable segments first. Segments of length 0 are skipped.
    ///
    /// # Errors
    /// [`ChainError::BrokenRing`] for a chain that violates the protocol; [`ChainError::BadRequest`] for an indirect
    /// table that is not mapped, or when `each` returns it.
    #[inline]
    pub fn walk(
        &self,
        pool: &mut BufferPool,
        lease: LeaseId,
        head: &ChainHead,
        each: impl FnMut(&mut BufferPool, ChainSegment) -> Result<(), ChainError>,
    ) -> Result<(), ChainError> {
        match self {
            DeviceRing::Split(ring) => ring.walk(pool, lease, head, each),
            DeviceRing::Packed(ring) => ring.walk(pool, lease, head, each),
        }
    }

    /// Returns a chain to the driver, with the number of bytes written to it. Visible after [`publish`](Self::publish).
    #[inline(always)] // a device type calls it in a few places
    pub fn put_used(&mut self, chain: u16, written: u32) {
        match self {
            DeviceRing::Split(ring) => ring.put_used(chain, written),
            DeviceRing::Packed(ring) => ring.put_used(chain, written),
        }
    }

    /// Makes all chains that were returned since the last publish visible at once. Returns [`PublishResult::Wanted`] if
    /// the driver requested a call.
    #[inline(always)] // only a split ring's part is: a packed one's is a function of its own
    pub fn publish(&mut self) -> PublishResult {
        match self {
            DeviceRing::Split(ring) => ring.publish(),
            DeviceRing::Packed(ring) => ring.publish(),
        }
    }

    /// Requests a kick, then re-checks for available chains.
    #[inline]
    pub fn arm(&mut self) -> ArmResult {
        match self {
            DeviceRing::Split(ring) => ring.arm(),
            DeviceRing::Packed(ring) => ring.arm(),
        }
    }

    /// Suppresses kicks.
    #[inline]
    pub fn disarm(&mut self) {
        match self {
            DeviceRing::Split(ring) => ring.disarm(),
            DeviceRing::Packed(ring) => ring.disarm(),
        }
    }

    /// Returns the state from which the ring can be resumed.
    pub fn state(&self) -> RingState {
        match self {
            DeviceRing::Split(ring) => ring.state(),
            DeviceRing::Packed(ring) => ring.state(),
        }
    }

    /// Replaces the mapping of the ring, after a change of the memory table. The format stays.
    pub fn relocate(&mut self, ring: MappedRing) {
        match (self, ring) {
            (DeviceRing::Split(own), MappedRing::Split(ring)) => own.relocate(ring),
            (DeviceRing::Packed(own), MappedRing::Packed(ring)) => own.relocate(ring),
            _ => debug_assert!(false, "a ring keeps its format"),
        }
    }

    /// Starts, changes or ends dirty logging of writes to the ring.
    pub fn set_log(&mut self, log: Option<RingLog>) {
        match self {
            DeviceRing::Split(ring) => ring.set_log(log),
            DeviceRing::Packed(ring) => ring.set_log(log),
        }
    }
}
