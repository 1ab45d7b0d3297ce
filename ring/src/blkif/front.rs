//! The frontend's end of a ring: puts requests on, takes responses off.

use std::sync::atomic::Ordering;

use mqblk_core::Sector512;

use super::layout::{Abi, BlkifRing};
use super::request::{MAX_SEGMENTS, RawRequest, Segment};

/// What is wrong with a ring, seen from the frontend: it is of no more use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the back-end breaks the protocol: {0}")]
pub struct BackBroken(pub &'static str);

const JUMPED: BackBroken = BackBroken("it claims more responses than there are requests");

/// A response, judged by nobody yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// What the request was given.
    pub id: u64,
    /// What it asked for; of an indirect one what that asked for.
    pub operation: u8,
    /// One of [`status`](super::status), or not.
    pub status: i16,
}

/// The frontend's end.
#[derive(Debug)]
pub struct FrontRing {
    ring: BlkifRing,
    /// Where the next request goes.
    req_prod: u32,
    /// Request index as the back-end sees it.
    published: u32,
    /// The next response to take.
    rsp_cons: u32,
    /// Responses that the last look saw end here.
    seen: u32,
}

impl FrontRing {
    /// A fresh ring: indices 0, both ends want to hear of the first entry.
    pub fn init(ring: BlkifRing) -> FrontRing {
        ring.reset();
        FrontRing { ring, req_prod: 0, published: 0, rsp_cons: 0, seen: 0 }
    }

    /// Entries.
    #[inline]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The layout of its entries.
    #[inline]
    pub fn abi(&self) -> Abi {
        self.ring.abi()
    }

    /// Requests that have not been answered, as far as was looked.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.req_prod.wrapping_sub(self.rsp_cons)
    }

    /// Requests that were put on and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u32 {
        self.req_prod.wrapping_sub(self.published)
    }

    /// Puts a request on. Whether there was room.
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

    /// Puts a request on that has its segments in it: the first 11 of `segments`. The same as [`put`](Self::put) of one that was
    /// encoded, and quicker. Whether there was room.
    #[inline]
    #[must_use]
    pub fn put_transfer(
        &mut self,
        id: u64,
        operation: u8,
        handle: u16,
        sector: Sector512,
        segments: &[Segment],
    ) -> bool {
        if self.in_flight() >= self.ring.size() {
            return false;
        }
        let segments = &segments[..segments.len().min(MAX_SEGMENTS)];
        let first = u32::from(operation) | (segments.len() as u32) << 8 | u32::from(handle) << 16;
        self.ring.put_transfer(self.req_prod, first, id, sector.0, segments);
        self.req_prod = self.req_prod.wrapping_add(1);
        true
    }

    /// Makes all requests since the last publish visible at once. Whether the back-end wants an event.
    #[inline]
    #[must_use = "a back-end that wants an event sleeps until it comes"]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.req_prod);
        self.published = new;
        new != old && self.ring.requests().publish(old, new)
    }

    /// Looks for responses; returns how many [`take`](Self::take) can take.
    ///
    /// # Errors
    /// When the back-end breaks the protocol.
    #[inline]
    pub fn look(&mut self) -> Result<u32, BackBroken> {
        self.saw(self.ring.responses().look())
    }

    fn saw(&mut self, produced: u32) -> Result<u32, BackBroken> {
        let ready = produced.wrapping_sub(self.rsp_cons);
        if ready > self.published.wrapping_sub(self.rsp_cons) {
            return Err(JUMPED);
        }
        self.seen = produced;
        Ok(ready)
    }

    /// Takes a response of those that the last look saw.
    #[inline]
    pub fn take(&mut self) -> Option<Response> {
        if self.rsp_cons == self.seen {
            return None;
        }
        let (id, operation, status) = self.ring.response(self.rsp_cons);
        self.rsp_cons = self.rsp_cons.wrapping_add(1);
        Some(Response { id, operation, status })
    }

    /// Asks for an event when `count` responses (at least 1) are there, then looks again: as [`look`](Self::look).
    ///
    /// # Errors
    /// When the back-end breaks the protocol.
    #[inline]
    pub fn arm(&mut self, count: u32) -> Result<u32, BackBroken> {
        let last = self.rsp_cons.wrapping_add(count.max(1) - 1);
        let produced = self.ring.responses().arm(last);
        self.saw(produced)
    }

    /// Asks not to be sent events while responses are looked for.
    #[inline]
    pub fn disarm(&self) {
        self.ring.responses().disarm(Some(self.rsp_cons.wrapping_sub(1)));
    }

    /// The request index that the back-end sees, moved to where a frontend in order would never put it. For tests of back-ends.
    pub fn publish_index(&mut self, index: u32) {
        self.ring.req_prod.store(index.to_le(), Ordering::Release);
    }
}

#[cfg(test)]
#[path = "front_tests.rs"]
mod tests;
