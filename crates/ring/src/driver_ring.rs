//! The driver's end of a virtqueue of any format; `virtqueue` is the device's.

use mqblk_memory::{GuestAddress, GuestMemory};

use crate::format::{RingAddresses, RingFormat, RingSetupError};
use crate::packed::PackedDriver;
use crate::packed::driver::PackedChain;
use crate::split::SplitDriver;
use crate::split::driver::ChainBuilder;
pub use crate::split::driver::{ChainLayout, ChainRefused, DeviceError, IndirectArea, UsedRequest};

/// A request that is being built. Dropping it before [`commit`](Self::commit) cancels it.
pub trait RequestChain: Sized {
    /// Adds `len` bytes at `address` for the device to read.
    ///
    /// # Errors
    /// [`ChainRefused::Full`] is back-pressure; the others are the caller's mistakes.
    fn readable(self, address: GuestAddress, len: u32) -> Result<Self, ChainRefused>;

    /// Adds `len` bytes at `address` for the device to write.
    ///
    /// # Errors
    /// [`ChainRefused::Full`] is back-pressure; the others are the caller's mistakes.
    fn writable(self, address: GuestAddress, len: u32) -> Result<Self, ChainRefused>;

    /// Commits the request. It becomes visible to the device at the next publish; its [`UsedRequest`] returns `token`.
    ///
    /// # Errors
    /// [`ChainRefused::Empty`] without a segment.
    fn commit(self, token: u32) -> Result<(), ChainRefused>;
}

macro_rules! request_chain {
    ($chain:ty) => {
        impl RequestChain for $chain {
            #[inline(always)]
            fn readable(self, address: GuestAddress, len: u32) -> Result<Self, ChainRefused> {
                self.readable(address, len)
            }

            #[inline(always)]
            fn writable(self, address: GuestAddress, len: u32) -> Result<Self, ChainRefused> {
                self.writable(address, len)
            }

            #[inline(always)]
            fn commit(self, token: u32) -> Result<(), ChainRefused> {
                self.commit(token)
            }
        }
    };
}
request_chain!(ChainBuilder<'_>);
request_chain!(PackedChain<'_>);

/// The driver's end of a virtqueue, owned by one thread.
#[derive(Debug)]
pub enum DriverRing {
    /// A split virtqueue.
    Split(SplitDriver),
    /// A packed virtqueue.
    Packed(PackedDriver),
}

/// Calls a function of the ring's format with the same arguments.
macro_rules! each_format {
    ($self:ident, $ring:ident => $call:expr) => {
        match $self {
            DriverRing::Split($ring) => $call,
            DriverRing::Packed($ring) => $call,
        }
    };
}

impl DriverRing {
    /// Creates a ring of `size` entries (and zeroes it) at `at` in `memory`, with indirect tables if the device accepts
    /// them. Calls are suppressed at first, as after [`disarm`](Self::disarm).
    ///
    /// # Errors
    /// When a part does not lie in one region or is not aligned.
    pub fn new(
        memory: &GuestMemory,
        at: &RingAddresses,
        size: u16,
        format: RingFormat,
        event_idx: bool,
        indirect: Option<IndirectArea>,
    ) -> Result<DriverRing, RingSetupError> {
        match format {
            RingFormat::Split => SplitDriver::new(memory, at, size, event_idx, indirect).map(DriverRing::Split),
            RingFormat::Packed => PackedDriver::new(memory, at, size, event_idx, indirect).map(DriverRing::Packed),
        }
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        each_format!(self, ring => ring.size())
    }

    /// Returns the number of requests committed and not yet taken as completed.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        each_format!(self, ring => ring.in_flight())
    }

    /// Returns the number of free ring descriptors.
    #[inline]
    pub fn free_descriptors(&self) -> u16 {
        each_format!(self, ring => ring.free_descriptors())
    }

    /// Adds a request of a few known segments: the device-readable ones, then the device-writable ones. A fast path
    /// matches on the format once, and builds its requests with [`RequestChain`].
    ///
    /// # Errors
    /// [`ChainRefused::Full`] is back-pressure; the others are the caller's mistakes.
    pub fn add(
        &mut self,
        layout: ChainLayout,
        readable: &[(GuestAddress, u32)],
        writable: &[(GuestAddress, u32)],
        token: u32,
    ) -> Result<(), ChainRefused> {
        fn build<C: RequestChain>(
            chain: C,
            readable: &[(GuestAddress, u32)],
            writable: &[(GuestAddress, u32)],
            token: u32,
        ) -> Result<(), ChainRefused> {
            let chain = readable.iter().try_fold(chain, |chain, (at, len)| chain.readable(*at, *len))?;
            let chain = writable.iter().try_fold(chain, |chain, (at, len)| chain.writable(*at, *len))?;
            chain.commit(token)
        }
        each_format!(self, ring => build(ring.begin(layout), readable, writable, token))
    }

    /// Makes all committed requests visible at once. Returns true if the device requested a kick for any of them.
    #[inline]
    #[must_use = "a device that requested a kick sleeps until it gets one"]
    pub fn publish(&mut self) -> bool {
        each_format!(self, ring => ring.publish())
    }

    /// Returns the number of requests committed and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        each_format!(self, ring => ring.unpublished())
    }

    /// Finds completions. Returns how many [`take`](Self::take) can take.
    ///
    /// # Errors
    /// When the device violates the protocol.
    #[inline]
    pub fn poll_used(&mut self) -> Result<u16, DeviceError> {
        each_format!(self, ring => ring.poll_used())
    }

    /// Returns the token of the completion `ahead` past the next one, if [`poll_used`](Self::poll_used) has found that
    /// many: a hint for prefetches of the device's data.
    #[inline]
    pub fn upcoming(&self, ahead: u16) -> Option<u32> {
        each_format!(self, ring => ring.upcoming(ahead))
    }

    /// Takes one of the completions that the last [`poll_used`](Self::poll_used) found, in the device's order, and
    /// frees the request's descriptors.
    ///
    /// # Errors
    /// When the device violates the protocol.
    #[inline]
    pub fn take(&mut self) -> Result<Option<UsedRequest>, DeviceError> {
        match self {
            DriverRing::Split(ring) => ring.take(),
            DriverRing::Packed(ring) => Ok(ring.take()),
        }
    }

    /// Requests a call once `count` more completions (at least 1) are available, then re-checks. Returns how many are
    /// available already; the caller may sleep until the call only if they are fewer than `count`. The call may
    /// come earlier.
    ///
    /// # Errors
    /// As [`poll_used`](Self::poll_used).
    pub fn arm(&mut self, count: u16) -> Result<u16, DeviceError> {
        each_format!(self, ring => ring.arm(count))
    }

    /// Suppresses calls while the ring is polled.
    #[inline]
    pub fn disarm(&self) {
        each_format!(self, ring => ring.disarm());
    }
}
