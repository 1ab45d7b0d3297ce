//! Completion of requests, up to the response.

use mqblk_core::{ByteLen, ByteOffset, DiskSlot, Intake, Op, Outcome};
use mqblk_memory::{Buffer, CopyDirection, GrantStatus, PooledContext};
use mqblk_ring::blkif::status;

use crate::journal::JournalSlot;
use crate::place::Place;
use crate::queue::{BlkifQueue, BlkifToken};
use crate::requests::{Entry, Step};

/// Returns the response status of a failed request.
fn refusal(outcome: Outcome, step: Step) -> i16 {
    match (outcome, step) {
        // The frontend stops sending an operation that is not supported.
        (Outcome::Unsupported, Step::Flush | Step::Discard { .. }) => status::NOT_SUPPORTED,
        _ => status::ERROR,
    }
}

impl<L: PooledContext> BlkifQueue<L> {
    /// Puts a response on the ring.
    #[inline]
    pub(crate) fn respond(&mut self, id: u64, operation: u8, status: i16, journal: Option<JournalSlot>) {
        self.ring.put_response(id, operation, status);
        if let (Some(journal), Some(slot)) = (&mut self.journal, journal) {
            journal.answered(slot);
        }
        self.unpublished += 1;
    }

    /// Handles the completion of a disk request, whose buffer is released: starts the request's next step, or completes it.
    #[inline]
    pub(crate) fn ended<I>(&mut self, token: BlkifToken, outcome: Outcome, into: &mut I)
    where
        I: Intake<BlkifToken, Buffer>,
    {
        let entry = self.requests.entry(token.0);
        entry.status = match (outcome, entry.step) {
            (Outcome::Done(_), Step::Read | Step::Write | Step::Flush) => status::OKAY,
            (Outcome::Done(_), Step::WriteFlush) => {
                entry.step = Step::Flush;
                into.admit(token, DiskSlot::FIRST, Op::Flush, ByteOffset(0), ByteLen::ZERO, None);
                return;
            }
            (Outcome::Done(_), Step::Discard { .. }) if entry.len > ByteLen::ZERO => {
                return self.discard(token.0, into);
            }
            (Outcome::Done(_), Step::Discard { .. }) => status::OKAY,
            (failure, step) => refusal(failure, step),
        };
        self.barrier_answered |= entry.barrier;
        match entry.place {
            Place::None | Place::Persistent => self.close_request(token.0),
            Place::Bounce(_) => {
                if entry.step == Step::Read && entry.status == status::OKAY {
                    let (_, pages) = self.requests.with_pages(token.0);
                    self.pages.deliver(pages);
                }
                self.close_request(token.0);
            }
            Place::Copy(_) if entry.step != Step::Read || entry.status != status::OKAY => self.close_request(token.0),
            Place::Copy(_) => {
                let (_, pages) = self.requests.with_pages(token.0);
                self.reads.extend(pages.iter().map(|page| page.copy(CopyDirection::ToGrant)));
                self.ending.push(token.0);
            }
            Place::Map(_) => self.ending.push(token.0),
        }
    }

    /// Submits the next part of a discard.
    pub(crate) fn discard<I: Intake<BlkifToken, Buffer>>(&mut self, at: u16, into: &mut I) {
        let most = self.max_discard;
        let entry = self.requests.entry(at);
        let Step::Discard { secure } = entry.step else { return };
        let (start, len) = (entry.start, entry.len.min(most));
        entry.len = ByteLen(entry.len.0 - len.0);
        entry.start = ByteOffset(start.0 + len.0);
        into.admit(BlkifToken(at), DiskSlot::FIRST, Op::Discard { secure }, start, len, None);
    }

    /// Releases a request's pages and puts its response on the ring.
    #[inline]
    pub(crate) fn close_request(&mut self, at: u16) {
        let (entry, pages) = self.requests.with_pages(at);
        let Entry { id, operation, status, journal, place, .. } = *entry;
        if place != Place::None {
            self.pages.let_go(place, pages, self.now, &mut self.counters);
        }
        self.requests.close(at);
        self.respond(id, operation, status, journal);
    }

    /// Drops a request without a response: releases its buffer and its pages. The next backend process replays it from the journal.
    pub fn forget(&mut self, context: &mut L, token: BlkifToken, buffer: Option<Buffer>) {
        if let Some(buffer) = buffer {
            context.pool().release(buffer);
        }
        let (entry, pages) = self.requests.with_pages(token.0);
        if entry.place != Place::None {
            self.pages.let_go(entry.place, pages, self.now, &mut self.counters);
        }
        self.requests.close(token.0);
    }

    /// Completes the deferred requests: copies the data of reads to the frontend in one call, unmaps pages, then puts the responses.
    #[inline(never)]
    pub(crate) fn settle_pages(&mut self) {
        self.pages.copy(&self.arena, &mut self.reads, &mut self.counters);
        let mut copied = 0;
        for number in 0..self.ending.len() {
            let at = self.ending[number];
            let entry = self.requests.entry(at);
            if matches!(entry.place, Place::Copy(_)) {
                let copies = &self.reads[copied..copied + usize::from(entry.segments)];
                copied += copies.len();
                if copies.iter().any(|copy| copy.status != GrantStatus::OKAY) {
                    entry.status = status::ERROR;
                }
            }
            self.close_request(at);
        }
        self.ending.clear();
        self.reads.clear();
    }
}
