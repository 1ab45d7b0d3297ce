//! The backend's end of a ring: takes requests off, puts responses on.

use std::sync::atomic::Ordering;

use mqblk_core::{ArmResult, PublishResult};

use super::abi::Abi;
use super::layout::BlkifRing;
use super::request::RawRequest;

/// Protocol violation by the frontend. It stops its queue and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkifRingError(pub &'static str);

/// Requests without a response cannot exceed the ring size: Linux's `RING_REQUEST_PROD_OVERFLOW`.
const BAD_REQ_PROD: BlkifRingError =
    BlkifRingError("the request producer index is further ahead than the ring is long");

/// Position at which a ring is resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingPosition {
    /// The next request to take.
    pub req_cons: u32,
    /// Index of the next response.
    pub rsp_prod: u32,
}

/// The backend's end.
#[derive(Debug)]
pub struct BackRing {
    ring: BlkifRing,
    req_cons: u32,
    /// Index of the next response.
    rsp_prod: u32,
    /// Response index as the frontend sees it.
    published: u32,
}

impl BackRing {
    /// Creates a ring that resumes at `position`, at which all responses are published.
    pub fn new(ring: BlkifRing, position: RingPosition) -> BackRing {
        let RingPosition { req_cons, rsp_prod } = position;
        BackRing { ring, req_cons, rsp_prod, published: rsp_prod }
    }

    /// Creates a ring that resumes from its shared indices alone: all requests without a response are taken (again).
    pub fn attach(ring: BlkifRing) -> BackRing {
        let rsp_prod = u32::from_le(ring.rsp_prod.load(Ordering::Acquire));
        BackRing::new(ring, RingPosition { req_cons: rsp_prod, rsp_prod })
    }

    /// Returns the number of entries.
    #[inline]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// Returns the ABI of its entries.
    #[inline]
    pub fn abi(&self) -> Abi {
        self.ring.abi()
    }

    /// Returns the position from which the ring can be resumed.
    pub fn position(&self) -> RingPosition {
        RingPosition { req_cons: self.req_cons, rsp_prod: self.rsp_prod }
    }

    /// Returns the response index that the frontend saw last; the frontend may have overwritten it.
    pub fn published(&self) -> u32 {
        u32::from_le(self.ring.rsp_prod.load(Ordering::Acquire))
    }

    /// Returns the number of available requests. With the taken requests that have no response, at most the ring's
    /// size.
    ///
    /// # Errors
    /// When the frontend claims more than the ring can hold.
    #[inline]
    pub fn waiting(&self) -> Result<u32, BlkifRingError> {
        let produced = self.ring.requests().load_index();
        if produced.wrapping_sub(self.rsp_prod) > self.ring.size() {
            return Err(BAD_REQ_PROD);
        }
        // A producer index that moved back behind the consumer is as far ahead of it.
        let waiting = produced.wrapping_sub(self.req_cons);
        if waiting > self.ring.size() { Err(BAD_REQ_PROD) } else { Ok(waiting) }
    }

    /// Prefetches the request `ahead` of the next one into this core's cache.
    #[inline]
    pub fn prefetch(&self, ahead: u32) {
        self.ring.prefetch(self.req_cons.wrapping_add(ahead));
    }

    /// Takes the next of the requests that [`waiting`](Self::waiting) counted, as a copy.
    pub fn take(&mut self) -> RawRequest {
        let mut raw = RawRequest::default();
        self.take_into(&mut raw);
        raw
    }

    /// Like [`take`](Self::take), but overwrites an earlier request. Bytes of segments that the new one does not have
    /// are unchanged, and are not decoded.
    #[inline]
    pub fn take_into(&mut self, raw: &mut RawRequest) {
        self.ring.read_request(self.req_cons, raw);
        self.req_cons = self.req_cons.wrapping_add(1);
    }

    /// Puts the response to one of the requests that were taken, in any order. Visible after
    /// [`publish`](Self::publish).
    #[inline]
    pub fn put_response(&mut self, id: u64, operation: u8, status: i16) {
        self.ring.put_response(self.rsp_prod, id, operation, status);
        self.rsp_prod = self.rsp_prod.wrapping_add(1);
    }

    /// Makes all responses since the last publish visible at once. Returns [`PublishResult::Wanted`] if the frontend
    /// requested an event.
    #[inline]
    pub fn publish(&mut self) -> PublishResult {
        let (old, new) = (self.published, self.rsp_prod);
        if new == old {
            return PublishResult::Nothing;
        }
        self.published = new;
        if self.ring.responses().publish(old, new) { PublishResult::Wanted } else { PublishResult::Suppressed }
    }

    /// Requests an event, then re-checks the request index.
    #[inline]
    pub fn arm(&mut self) -> ArmResult {
        if self.ring.requests().arm(self.req_cons) == self.req_cons {
            ArmResult::Sleepable
        } else {
            ArmResult::WorkWaiting
        }
    }
}

#[cfg(test)]
#[path = "back_tests.rs"]
mod tests;
