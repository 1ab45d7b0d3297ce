//! Completion of requests, up to the response.

use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Intake, Op, Outcome};
use mqblk_memory::{Buffer, PooledContext};
use mqblk_ring::blkif::status;

use crate::page_backing::PageBacking;
use crate::queue::{BlkifQueue, BlkifToken};
use crate::request_table::{InflightRequest, RequestStep};

/// Returns the response status of a failed request.
fn error_status(outcome: Outcome, step: RequestStep) -> i16 {
    match (outcome, step) {
        // The frontend stops sending an operation that is not supported.
        (Outcome::Unsupported, RequestStep::Flush | RequestStep::Discard { .. }) => status::NOT_SUPPORTED,
        _ => status::ERROR,
    }
}

impl<L: PooledContext> BlkifQueue<L> {
    /// Handles the completion of a disk request, whose buffer is released: starts the request's next step, or completes
    /// it.
    #[inline(never)] // the usual ones need fewer registers
    pub(crate) fn step_completed<I>(&mut self, token: BlkifToken, outcome: Outcome, into: &mut I)
    where
        I: Intake<BlkifToken, Buffer>,
    {
        let entry = self.requests.get_mut(token.0);
        entry.status = match (outcome, entry.step) {
            (Outcome::Done(_), RequestStep::Read | RequestStep::Write | RequestStep::Flush) => status::OKAY,
            (Outcome::Done(_), RequestStep::WriteFlush) => {
                entry.step = RequestStep::Flush;
                into.admit(token, DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
                return;
            }
            (Outcome::Done(_), RequestStep::Discard { .. }) if entry.len > ByteLen::ZERO => {
                return self.submit_discard(token.0, into);
            }
            (Outcome::Done(_), RequestStep::Discard { .. }) => status::OKAY,
            (failure, step) => error_status(failure, step),
        };
        self.barrier.request_completed(entry.barrier);
        match entry.backing {
            PageBacking::None | PageBacking::Persistent => self.complete_request(token.0),
            PageBacking::Bounce(_) => {
                if entry.step == RequestStep::Read && entry.status == status::OKAY {
                    let (_, pages) = self.requests.with_pages(token.0);
                    self.pages.copy_bounced(pages);
                }
                self.complete_request(token.0);
            }
            PageBacking::Copy(_) if entry.step != RequestStep::Read || entry.status != status::OKAY => {
                self.complete_request(token.0)
            }
            PageBacking::Copy(_) => {
                let (_, pages) = self.requests.with_pages(token.0);
                self.pages.defer_read(token.0, pages);
            }
            PageBacking::Map(_) => self.pages.defer(token.0),
        }
    }

    /// Submits the next part of a discard.
    pub(crate) fn submit_discard<I: Intake<BlkifToken, Buffer>>(&mut self, at: u16, into: &mut I) {
        let most = self.parser.max_discard();
        let entry = self.requests.get_mut(at);
        let RequestStep::Discard { secure } = entry.step else { return };
        let (start, len) = (entry.start, entry.len.min(most));
        entry.len = ByteLen(entry.len.0 - len.0);
        entry.start = ByteOffset(start.0 + len.0);
        into.admit(BlkifToken(at), DiskSlot::FIRST, Op::Discard { secure }, start, len, None);
    }

    /// Releases a request's pages and puts its response on the ring.
    #[inline]
    pub(crate) fn complete_request(&mut self, at: u16) {
        let (entry, pages) = self.requests.with_pages(at);
        let InflightRequest { id, operation, status, journal_slot, backing, .. } = *entry;
        self.pages.release(backing, pages);
        self.requests.remove(at);
        self.ring.put_response(id, operation, status, journal_slot);
    }

    /// Completes the deferred requests: copies the data of reads to the frontend in one call, unmaps pages, then puts
    /// the responses.
    #[inline(never)]
    pub(crate) fn complete_deferred(&mut self) {
        self.pages.copy_deferred_reads();
        let mut copied = 0;
        for number in 0..self.pages.deferred_count() {
            let at = self.pages.deferred(number);
            let entry = self.requests.get_mut(at);
            if matches!(entry.backing, PageBacking::Copy(_)) {
                let count = usize::from(entry.segment_count);
                if !self.pages.are_copied(copied, count) {
                    entry.status = status::ERROR;
                }
                copied += count;
            }
            self.complete_request(at);
        }
        self.pages.clear_deferred();
    }
}
