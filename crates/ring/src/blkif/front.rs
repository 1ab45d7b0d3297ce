//! The frontend's end of a ring: puts requests on, takes responses off.

use std::sync::atomic::Ordering;

use mqblk_core::Sector512;

use super::abi::Abi;
use super::layout::BlkifRing;
use super::request::{MAX_SEGMENTS, RawRequest, Segment};

/// Protocol violation by the backend: the ring is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the backend violates the protocol: {0}")]
pub struct BackendError(pub &'static str);

const BAD_RSP_PROD: BackendError = BackendError("it claims more responses than there are requests");

/// A response, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkifResponse {
    /// The request's id.
    pub id: u64,
    /// The request's operation; of an indirect request the inner operation.
    pub operation: u8,
    /// One of [`status`](super::status), or an unknown value.
    pub status: i16,
}

/// The frontend's end.
#[derive(Debug)]
pub struct FrontRing {
    ring: BlkifRing,
    /// Index of the next request.
    req_prod: u32,
    /// Request index as the backend sees it.
    published: u32,
    /// The next response to take.
    rsp_cons: u32,
    /// The backend's response index when last read.
    seen: u32,
}

impl FrontRing {
    /// Initialises a ring: indices 0, both ends request an event with the first entry.
    pub fn init(ring: BlkifRing) -> FrontRing {
        ring.reset();
        FrontRing { ring, req_prod: 0, published: 0, rsp_cons: 0, seen: 0 }
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

    /// Returns the number of requests without a taken response.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.req_prod.wrapping_sub(self.rsp_cons)
    }

    /// Returns the number of requests that are not yet published.
    #[inline]
    pub fn unpublished(&self) -> u32 {
        self.req_prod.wrapping_sub(self.published)
    }

    /// Puts a request on. Returns false if the ring is full.
    #[inline]
    #[must_use]
    pub fn put(&mut self, request: &RawRequest) -> bool {
        if self.in_flight() >= self.ring.size() {
            return false;
        }
        self.ring.put_request(self.req_prod, request);
        self.req_prod = self.req_prod.wrapping_add(1);
        true
    }

    /// Puts a request with inline segments on: the first 11 of `segments`. Equivalent to [`put`](Self::put) of an
    /// encoded request, and faster. Returns false if the ring is full.
    #[inline]
    #[must_use]
    pub fn put_rw(&mut self, id: u64, operation: u8, handle: u16, sector: Sector512, segments: &[Segment]) -> bool {
        if self.in_flight() >= self.ring.size() {
            return false;
        }
        let segments = &segments[..segments.len().min(MAX_SEGMENTS)];
        let first = u32::from(operation) | (segments.len() as u32) << 8 | u32::from(handle) << 16;
        self.ring.put_rw(self.req_prod, first, id, sector.0, segments);
        self.req_prod = self.req_prod.wrapping_add(1);
        true
    }

    /// Makes all requests since the last publish visible at once. Returns true if the backend requested an event.
    #[inline]
    #[must_use = "a backend that requested an event sleeps until it comes"]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.req_prod);
        self.published = new;
        new != old && self.ring.requests().publish(old, new)
    }

    /// Reads the backend's response index. Returns how many responses [`take`](Self::take) can take.
    ///
    /// # Errors
    /// When the backend violates the protocol.
    #[inline]
    pub fn poll_responses(&mut self) -> Result<u32, BackendError> {
        self.check_rsp_prod(self.ring.responses().load_index())
    }

    fn check_rsp_prod(&mut self, produced: u32) -> Result<u32, BackendError> {
        let ready = produced.wrapping_sub(self.rsp_cons);
        if ready > self.published.wrapping_sub(self.rsp_cons) {
            return Err(BAD_RSP_PROD);
        }
        self.seen = produced;
        Ok(ready)
    }

    /// Takes one of the responses that the last [`poll_responses`](Self::poll_responses) found.
    #[inline]
    pub fn take(&mut self) -> Option<BlkifResponse> {
        if self.rsp_cons == self.seen {
            return None;
        }
        let (id, operation, status) = self.ring.response(self.rsp_cons);
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        Some(BlkifResponse { id, operation, status })
    }

    /// Requests an event when `count` responses (at least 1) are available, then re-checks: as
    /// [`poll_responses`](Self::poll_responses).
    ///
    /// # Errors
    /// When the backend violates the protocol.
    #[inline]
    pub fn arm(&mut self, count: u32) -> Result<u32, BackendError> {
        let last = self.rsp_cons.wrapping_add(count.max(1) - 1);
        let produced = self.ring.responses().arm(last);
        self.check_rsp_prod(produced)
    }

    /// Suppresses events while responses are polled.
    #[inline]
    pub fn disarm(&self) {
        self.ring.responses().disarm(Some(self.rsp_cons.wrapping_sub(1)));
    }

    /// Sets the published request index to an arbitrary value. For tests of backends.
    pub fn publish_index(&mut self, index: u32) {
        self.ring.req_prod.store(index.to_le(), Ordering::Release);
    }
}

#[cfg(test)]
#[path = "front_tests.rs"]
mod tests;
