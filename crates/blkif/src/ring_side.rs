//! One ring as the queue sees it: the ring with its event channel, the journal of its requests, and the requests that
//! the previous backend process left.

use std::collections::VecDeque;

use mqblk_core::{ArmResult, EventChannel, PublishResult};
use mqblk_ring::blkif::{BackRing, BlkifRingError, RawRequest, RingPosition, operation};

use crate::journal::{Journal, JournalSlot};

/// Maximum of requests of one pull. A larger batch would delay the guest's first response.
pub(crate) const BATCH: usize = 32;

/// The journal, which has as many slots as the ring has entries, is full.
const JOURNAL_FULL: BlkifRingError = BlkifRingError("there are more requests without a response than the ring holds");

/// Private copies of a batch of ring entries.
pub(crate) struct RingEntries {
    pub(crate) raws: [RawRequest; BATCH],
    pub(crate) journal_slots: [Option<JournalSlot>; BATCH],
}

impl RingEntries {
    pub(crate) fn new() -> RingEntries {
        RingEntries { raws: [RawRequest::default(); BATCH], journal_slots: [None; BATCH] }
    }
}

/// A ring with its event channel, journal and replayed requests.
pub(crate) struct RingSide {
    ring: BackRing,
    channel: Box<dyn EventChannel>,
    /// True if the event channel is masked.
    masked: bool,
    /// True if the last arm returned [`ArmResult::Sleepable`]: the worker does not poll the ring until an event.
    armed: bool,
    journal: Option<Journal>,
    /// Requests that the previous backend process left without a response.
    replay: VecDeque<(JournalSlot, RawRequest)>,
    /// Number of responses that are not published.
    unpublished_responses: usize,
}

impl RingSide {
    pub(crate) fn new(
        ring: BackRing,
        channel: Box<dyn EventChannel>,
        journal: Option<Journal>,
        replay: Vec<(JournalSlot, RawRequest)>,
    ) -> RingSide {
        RingSide { ring, channel, masked: true, armed: false, journal, replay: replay.into(), unpublished_responses: 0 }
    }

    #[inline]
    pub(crate) fn ring(&self) -> &BackRing {
        &self.ring
    }

    #[inline]
    pub(crate) fn position(&self) -> RingPosition {
        self.ring.position()
    }

    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed
    }

    #[inline]
    pub(crate) fn unpublished_responses(&self) -> usize {
        self.unpublished_responses
    }

    /// Returns the number of requests that can be fetched now.
    pub(crate) fn waiting(&self) -> Result<usize, BlkifRingError> {
        Ok(self.replay.len() + self.ring.waiting()? as usize)
    }

    /// Copies at most `most` entries off the ring, up to a barrier, and records them in the journal. Returns their
    /// number, and true if more wait.
    #[inline]
    pub(crate) fn fetch(&mut self, entries: &mut RingEntries, most: usize) -> Result<(usize, bool), BlkifRingError> {
        if !self.replay.is_empty() {
            return Ok((self.fetch_replay(entries, most), true));
        }
        let waiting = self.ring.waiting()? as usize;
        let mut count = waiting.min(most);
        for ahead in 0..count as u32 {
            self.ring.prefetch(ahead);
        }
        let raws = entries.raws[..count].iter_mut().zip(&mut entries.journal_slots);
        for (number, (raw, slot)) in (1..).zip(raws) {
            self.ring.take_into(raw);
            if let Some(journal) = &mut self.journal {
                *slot = Some(journal.record_request(raw).ok_or(JOURNAL_FULL)?);
            }
            if raw.operation() == operation::WRITE_BARRIER {
                count = number;
                break;
            }
        }
        if let Some(journal) = &mut self.journal {
            journal.record_consumed(self.ring.position().req_cons);
        }
        Ok((count, count < waiting))
    }

    /// Like [`fetch`](Self::fetch), for requests that the previous backend process left.
    fn fetch_replay(&mut self, entries: &mut RingEntries, most: usize) -> usize {
        let mut count = 0;
        while count < most
            && let Some((slot, raw)) = self.replay.pop_front()
        {
            entries.raws[count] = raw;
            entries.journal_slots[count] = Some(slot);
            count += 1;
            if raw.operation() == operation::WRITE_BARRIER {
                break;
            }
        }
        count
    }

    /// Puts a response on the ring.
    #[inline]
    pub(crate) fn put_response(&mut self, id: u64, operation: u8, status: i16, slot: Option<JournalSlot>) {
        self.ring.put_response(id, operation, status);
        if let (Some(journal), Some(slot)) = (&mut self.journal, slot) {
            journal.record_response(slot);
        }
        self.unpublished_responses += 1;
    }

    /// Publishes the responses on the ring, at least one.
    #[inline]
    pub(crate) fn publish(&mut self) -> PublishResult {
        self.unpublished_responses = 0;
        match &mut self.journal {
            None => self.ring.publish(),
            Some(journal) => journal.publish(self.ring.position().rsp_prod, || self.ring.publish()),
        }
    }

    /// Sends an event to the frontend.
    pub(crate) fn notify(&mut self) {
        self.channel.notify();
    }

    /// Unmasks the event channel, requests an event for the next request, and re-checks the ring.
    pub(crate) fn arm(&mut self) -> ArmResult {
        if !self.replay.is_empty() {
            return ArmResult::WorkWaiting;
        }
        // As late as possible: requests that arrive while the ring is polled need no event.
        if std::mem::take(&mut self.masked) {
            self.channel.unmask();
        }
        self.ring.arm()
    }

    /// Records if the worker waits for an event and does not poll the ring.
    #[inline]
    pub(crate) fn set_armed(&mut self, armed: bool) {
        self.armed = armed;
    }

    /// Takes the pending event. The channel stays masked until the next [`arm`](Self::arm).
    pub(crate) fn disarm(&mut self) {
        self.armed = false;
        self.masked = true;
        self.channel.take();
    }
}

impl std::fmt::Debug for RingSide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingSide").field("ring", &self.ring).field("masked", &self.masked).finish_non_exhaustive()
    }
}
