//! Long requests reach the storage in slices, so that they do not delay a worker's other disks: a read of 1 GiB that
//! the storage copies inside `submit` would take 0.1 s and more.
//!
//! A [`SlicedChannel`] stands between a backend's channel and the guard, plug and queues: these see the whole request,
//! the backend sees slices. Slices of several long requests alternate. All channels of a worker share the bytes of
//! slices that one turn may submit.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use mqblk_core::{ByteLen, ByteOffset, DiskChannel, Limits, Op, Outcome, Tag};
use mqblk_uring::UringContext;

use crate::options::PlugOptions;
use crate::request::{AnyCompletion, AnyRequest, Buffer, SLICED_SLOT};

/// Longest read or write at the storage, unless longer merged requests are configured.
const DATA_SLICE: u64 = 1 << 20;
/// Longest write-zeroes and discard at storage that executes them inside `submit`, at some 10 and 100 GB/s.
const INLINE_ZEROES_SLICE: u64 = 1 << 20;
const INLINE_DISCARD_SLICE: u64 = 16 << 20;

/// Most slices that a channel has outstanding: 32 MiB keep any storage busy.
const MAX_OUTSTANDING: usize = 32;
/// Bytes of slices that all channels of a worker submit in a turn.
const TURN_SLICES: u64 = DATA_SLICE;

/// Bytes of slices that a worker's channels may still submit in this turn.
#[derive(Clone, Debug, Default)]
pub(crate) struct SliceBudget(Rc<Cell<u64>>);

impl SliceBudget {
    /// Starts a turn.
    #[inline]
    pub(crate) fn renew(&self) {
        self.0.set(TURN_SLICES);
    }

    /// Returns true if none of it was used in this turn.
    pub(crate) fn is_full(&self) -> bool {
        self.0.get() == TURN_SLICES
    }

    fn is_spent(&self) -> bool {
        self.0.get() == 0
    }

    fn spend(&self, bytes: u64) {
        self.0.set(self.0.get().saturating_sub(bytes));
    }
}

/// The longest request of each kind that a channel gets, in bytes.
#[derive(Clone, Copy, Debug)]
struct SliceLengths {
    data: u64,
    zeroes: u64,
    discard: u64,
}

impl SliceLengths {
    fn new(options: &PlugOptions, limits: &Limits) -> SliceLengths {
        // The user configures the length of merged requests.
        let data = DATA_SLICE.max(options.merge_bytes.0);
        if limits.cost_per_request {
            // Storage of requests with a cost executes these outside of the worker.
            return SliceLengths { data, zeroes: u64::MAX, discard: u64::MAX };
        }
        let zeroes = INLINE_ZEROES_SLICE.max(options.merge_bytes.0);
        SliceLengths { data, zeroes, discard: INLINE_DISCARD_SLICE.max(options.merge_bytes.0) }
    }

    #[inline]
    fn of(&self, op: Op) -> u64 {
        match op {
            Op::Read | Op::Write { .. } => self.data,
            Op::WriteZeroes { .. } => self.zeroes,
            Op::Discard { .. } => self.discard,
            Op::Flush => u64::MAX,
        }
    }
}

/// A request submitted in slices.
#[derive(Debug)]
struct LongRequest {
    op: Op,
    start: ByteOffset,
    len: u64,
    tag: Tag,
    buffer: Option<Buffer>,
    /// Submitted bytes of it.
    submitted: u64,
    /// Slices at the channel.
    outstanding: u32,
    /// The first failure of a slice.
    failed: Option<Outcome>,
}

impl LongRequest {
    /// Returns true if it has slices to submit.
    fn has_more(&self) -> bool {
        self.failed.is_none() && self.submitted < self.len
    }

    fn complete(self) -> AnyCompletion {
        // Storage reports a length of 0 for operations without data.
        let done = Outcome::Done(if self.op.has_data() { ByteLen(self.len) } else { ByteLen::ZERO });
        AnyCompletion { outcome: self.failed.unwrap_or(done), tag: self.tag, buffer: self.buffer }
    }
}

/// A backend's channel, which gets long requests in slices.
pub(crate) struct SlicedChannel {
    inner: Box<dyn DiskChannel<UringContext>>,
    lengths: SliceLengths,
    budget: SliceBudget,
    /// Long requests, by the index in the tags of their slices.
    long: Vec<Option<LongRequest>>,
    free: Vec<u16>,
    /// Indexes of the long requests with slices to submit; the first is next.
    turns: VecDeque<u16>,
    /// Slices at the channel.
    outstanding: usize,
    /// Time to continue with the slices if nothing completes meanwhile: at once, if the turn's budget was spent. A
    /// channel that refuses a slice completes something before it takes one.
    retry: Option<Instant>,
    /// The slice that is being submitted; kept for its capacity.
    slice: Vec<AnyRequest>,
}

impl SlicedChannel {
    /// Returns the channel of a disk with these limits. Channels with the same `budget` share it.
    pub(crate) fn new(
        inner: Box<dyn DiskChannel<UringContext>>,
        options: &PlugOptions,
        limits: &Limits,
        budget: SliceBudget,
    ) -> SlicedChannel {
        SlicedChannel {
            inner,
            lengths: SliceLengths::new(options, limits),
            budget,
            long: Vec::new(),
            free: Vec::new(),
            turns: VecDeque::new(),
            outstanding: 0,
            retry: None,
            slice: Vec::with_capacity(1),
        }
    }

    /// Uses other options. Slices at the channel are unchanged.
    pub(crate) fn set_options(&mut self, options: &PlugOptions, limits: &Limits) {
        self.lengths = SliceLengths::new(options, limits);
    }

    #[inline]
    fn is_long(&self, request: &AnyRequest) -> bool {
        request.len.0 > DATA_SLICE && request.len.0 > self.lengths.of(request.op)
    }

    /// Returns true if there are no long requests.
    #[inline]
    fn is_idle(&self) -> bool {
        self.long.len() == self.free.len()
    }

    /// Takes the long requests of a batch, and submits the others. Returns the number of taken requests.
    fn submit_long(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        let before = batch.len();
        let lengths = self.lengths;
        let long = |request: &mut AnyRequest| request.len.0 > lengths.of(request.op);
        for request in batch.extract_if(.., long).collect::<Vec<_>>() {
            match self.take_index() {
                Some(index) => self.begin(context, index, request, finished),
                // It has the backend's longest length; the other long requests go first.
                None => batch.push(request),
            }
        }
        let refused = batch.len();
        let from = finished.len();
        let taken = if batch.is_empty() { 0 } else { self.inner.submit(context, batch, finished) };
        self.collect(context, from, finished);
        self.submit_slices(context, finished);
        before - refused + taken
    }

    fn take_index(&mut self) -> Option<u16> {
        self.free.pop().or_else(|| {
            let index = u16::try_from(self.long.len()).ok()?;
            self.long.push(None);
            Some(index)
        })
    }

    fn begin(&mut self, context: &UringContext, index: u16, request: AnyRequest, finished: &mut Vec<AnyCompletion>) {
        let AnyRequest { start, len, tag, op, buffer } = request;
        // The backend would refuse it.
        let fits = match &buffer {
            Some(buffer) => op.has_data() && context.buffers.len(buffer) == len,
            None => !op.has_data(),
        };
        if !fits {
            self.free.push(index);
            finished.push(AnyCompletion { outcome: Outcome::Failed(mqblk_core::Errno::INVAL), tag, buffer });
            return;
        }
        let (submitted, outstanding, failed) = (0, 0, None);
        self.long[usize::from(index)] =
            Some(LongRequest { op, start, len: len.0, tag, buffer, submitted, outstanding, failed });
        self.turns.push_back(index);
    }

    /// Submits slices, of one request after the other, as far as the turn allows.
    fn submit_slices(&mut self, context: &mut UringContext, finished: &mut Vec<AnyCompletion>) {
        self.retry = None;
        while self.outstanding < MAX_OUTSTANDING
            && let Some(index) = self.turns.pop_front()
        {
            if self.budget.is_spent() {
                self.turns.push_front(index);
                self.retry = Some(Instant::now());
                return;
            }
            let Some(request) = self.long[usize::from(index)].as_mut() else { continue };
            let at = request.submitted;
            let len = self.lengths.of(request.op).min(request.len - at);
            let buffer = request.buffer.as_ref().map(|buffer| context.buffers.slice(buffer, at, ByteLen(len)));
            let (start, tag) = (ByteOffset(request.start.0 + at), Tag::new(SLICED_SLOT, index));
            self.slice.push(AnyRequest { start, len: ByteLen(len), tag, buffer, op: request.op });
            let from = finished.len();
            self.inner.submit(context, &mut self.slice, finished);
            if let Some(refused) = self.slice.pop() {
                refused.buffer.into_iter().for_each(|buffer| context.buffers.release(buffer));
                self.turns.push_front(index);
                self.collect(context, from, finished);
                return;
            }
            self.budget.spend(len);
            request.submitted += len;
            request.outstanding += 1;
            self.outstanding += 1;
            if request.has_more() {
                self.turns.push_back(index);
            }
            self.collect(context, from, finished);
        }
    }

    /// Replaces the completions of slices, from index `from` on, by those of the long requests that end with them.
    fn collect(&mut self, context: &mut UringContext, from: usize, finished: &mut Vec<AnyCompletion>) {
        let mut at = from;
        while let Some(done) = finished.get(at) {
            if done.tag.queue() != SLICED_SLOT {
                at += 1;
                continue;
            }
            // The last one takes its index and is checked next.
            let AnyCompletion { outcome, tag, buffer } = finished.swap_remove(at);
            buffer.into_iter().for_each(|buffer| context.buffers.release(buffer));
            self.outstanding -= 1;
            let Some(request) = self.long[usize::from(tag.index())].as_mut() else { continue };
            request.outstanding -= 1;
            if !outcome.is_done() {
                request.failed.get_or_insert(outcome);
                self.turns.retain(|index| *index != tag.index());
            }
            if request.outstanding == 0 && !request.has_more() {
                finished.extend(self.end(tag.index()));
            }
        }
    }

    fn end(&mut self, index: u16) -> Option<AnyCompletion> {
        let request = self.long[usize::from(index)].take()?;
        self.free.push(index);
        Some(request.complete())
    }

    /// Cancels the chosen long requests: no more slices of them are submitted. Returns the tags of their slices at the
    /// channel.
    fn cancel_long(&mut self, chosen: impl Fn(Tag) -> bool, finished: &mut Vec<AnyCompletion>) -> Vec<Tag> {
        let mut tags = Vec::new();
        for index in 0..self.long.len() as u16 {
            let place = &mut self.long[usize::from(index)];
            let Some(request) = place.as_mut().filter(|request| chosen(request.tag)) else { continue };
            if request.has_more() {
                request.failed = Some(Outcome::Aborted);
                self.turns.retain(|waiting| *waiting != index);
            }
            if request.outstanding == 0 {
                finished.extend(self.end(index));
            } else {
                tags.push(Tag::new(SLICED_SLOT, index));
            }
        }
        tags
    }
}

impl DiskChannel<UringContext> for SlicedChannel {
    #[inline]
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyCompletion>,
    ) -> usize {
        // Of several, all lengths at once, at half the cost: requests below this are short.
        let lengths = match batch.as_slice() {
            [only] => only.len.0,
            all => all.iter().fold(0, |lengths, request| lengths | request.len.0),
        };
        if self.is_idle() && (lengths < DATA_SLICE || !batch.iter().any(|request| self.is_long(request))) {
            return self.inner.submit(context, batch, finished);
        }
        self.submit_long(context, batch, finished)
    }

    #[inline]
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<AnyCompletion>) -> usize {
        if self.is_idle() {
            return self.inner.reap(context, finished);
        }
        let from = finished.len();
        self.inner.reap(context, finished);
        self.collect(context, from, finished);
        self.submit_slices(context, finished);
        finished.len() - from
    }

    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<AnyCompletion>) {
        if self.is_idle() {
            return self.inner.cancel(context, tags, finished);
        }
        let slices = self.cancel_long(|tag| tags.binary_search(&tag).is_ok(), finished);
        let mut all = [tags, &slices].concat();
        all.sort_unstable();
        let from = finished.len();
        self.inner.cancel(context, &all, finished);
        self.collect(context, from, finished);
    }

    #[inline]
    fn outstanding(&self) -> u32 {
        self.inner.outstanding() + self.turns.len() as u32
    }

    fn deadline(&self) -> Option<Instant> {
        [self.retry, self.inner.deadline()].into_iter().flatten().min()
    }

    fn close(&mut self, context: &mut UringContext) {
        debug_assert!(self.is_idle(), "a channel is drained before it is closed");
        self.inner.close(context);
    }
}

#[cfg(test)]
mod tests;
