//! A channel that fails some requests, tears some, and delays completions.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{BlockSize, ByteLen, Completion, DiskChannel, Errno, Op, Outcome, Request, Tag};
use mqblk_memory::{BouncePool, Buffer};
use mqblk_uring::UringContext;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::plan::{FaultPlan, FaultRule};
use crate::connection::{ConnectionHandle, SessionChannel};

const TORN_SLOTS: u32 = 64;
const TORN_LEN: ByteLen = ByteLen(256 << 10);
const TORN: Outcome = Outcome::Failed(Errno(5)); // EIO
/// The outcome of requests submitted after the loss of the connection.
const LOST: Outcome = Outcome::Failed(Errno(107)); // ENOTCONN
/// Retry interval of requests that an idle inner channel refused.
const STALL: Duration = Duration::from_millis(1);

pub(super) struct FaultChannel {
    plan: Arc<FaultPlan>,
    inner: Box<dyn DiskChannel<UringContext>>,
    block: BlockSize,
    random: SmallRng,
    /// The plan's rules with the remaining counts of their `TIMES`.
    rules: Vec<FaultRule>,
    /// Requests that the inner channel has not taken yet.
    pending: Vec<Request<Buffer>>,
    torn: Vec<TornRequest>,
    slots: Option<BouncePool>,
    /// Delayed completions.
    delayed: Vec<(Instant, Completion<Buffer>)>,
    /// Requests in the inner channel. True for a cancelled one: its completion is not delayed.
    submitted: Vec<(Tag, bool)>,
    /// Completions of cancelled requests, which are not delayed.
    cancelled: Vec<Completion<Buffer>>,
    /// Scratch for the inner channel's completions.
    inner_completions: Vec<Completion<Buffer>>,
    retry_at: Option<Instant>,
    connection: Option<ConnectionHandle>,
    /// Requests until the connection is lost.
    requests_left: u64,
}

/// A torn request: the inner channel transfers only its first part, through a slot.
struct TornRequest {
    tag: Tag,
    slot: u32,
    /// The request's own buffer.
    buffer: Buffer,
    /// True for a read: the part read is copied to the buffer.
    read: bool,
    torn_len: ByteLen,
}

impl FaultChannel {
    pub(super) fn new(
        plan: Arc<FaultPlan>,
        inner: Box<dyn DiskChannel<UringContext>>,
        block: BlockSize,
        stream: u64,
        connection: Option<ConnectionHandle>,
        context: &mut UringContext,
    ) -> io::Result<FaultChannel> {
        let slots =
            (plan.torn_percent > 0).then(|| BouncePool::new(&mut context.buffers, TORN_SLOTS, TORN_LEN)).transpose()?;
        Ok(FaultChannel {
            random: SmallRng::seed_from_u64(plan.seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            rules: plan.rules.clone(),
            requests_left: if plan.lost_after == 0 { u64::MAX } else { plan.lost_after },
            connection,
            plan,
            inner,
            block,
            pending: Vec::new(),
            torn: Vec::new(),
            slots,
            delayed: Vec::new(),
            submitted: Vec::new(),
            cancelled: Vec::new(),
            inner_completions: Vec::new(),
            retry_at: None,
        })
    }

    /// Returns the outcome of a request that must fail without being executed.
    fn injected_failure(&mut self, request: &Request<Buffer>) -> Option<Outcome> {
        if self.requests_left == 0 {
            return Some(LOST);
        }
        self.requests_left -= 1;
        if let (0, Some(connection)) = (self.requests_left, &self.connection) {
            connection.lost("fault-lost-after");
        }
        for rule in &mut self.rules {
            let Some(outcome) = rule.outcome_for(request) else { continue };
            match &mut rule.times {
                Some(0) => continue,
                Some(times) => *times -= 1,
                None => {}
            }
            return Some(outcome);
        }
        None
    }

    /// Replaces a request by one for its first part, if it must be torn. A request of one block, or longer than a slot,
    /// or without a free slot, stays whole.
    fn tear(&mut self, context: &mut UringContext, mut request: Request<Buffer>) -> Request<Buffer> {
        let block = u64::from(self.block.bytes());
        let blocks = request.len.0 / block;
        if !request.op.has_data() || blocks < 2 || !self.random.random_ratio(self.plan.torn_percent, 100) {
            return request;
        }
        let (Some(pool), Some(whole)) = (&mut self.slots, request.buffer.take()) else { return request };
        let part = ByteLen(self.random.random_range(1..blocks) * block);
        // A request that the inner disk refuses is passed on unchanged.
        let odd = context.buffers.len(&whole) != request.len || !request.len.is_aligned(self.block);
        let slice = if odd { None } else { pool.take(&mut context.buffers, part) };
        let Some((slice, slot)) = slice else {
            request.buffer = Some(whole);
            return request;
        };
        let read = request.op == Op::Read;
        if !read {
            // Lost memory is copied as zeroes: this storage tears writes anyway.
            let _ = context.buffers.copy_range(&whole, 0, &slice, 0, part);
        }
        self.torn.push(TornRequest { tag: request.tag, slot, buffer: whole, read, torn_len: part });
        request.buffer = Some(slice);
        request.len = part;
        request
    }

    /// Restores the original buffer of a torn request and makes it a failure.
    fn untear(&mut self, context: &mut UringContext, completion: Completion<Buffer>) -> Completion<Buffer> {
        let Some(at) = self.torn.iter().position(|torn| torn.tag == completion.tag) else { return completion };
        let torn = self.torn.swap_remove(at);
        if let (Some(pool), Some(slice)) = (&mut self.slots, completion.buffer) {
            if torn.read && completion.outcome.is_done() {
                // It fails in any case.
                let _ = context.buffers.copy_range(&slice, 0, &torn.buffer, 0, torn.torn_len);
            }
            pool.release(&mut context.buffers, slice, torn.slot);
        }
        let outcome = if completion.outcome.is_done() { TORN } else { completion.outcome };
        Completion { outcome, tag: torn.tag, buffer: Some(torn.buffer) }
    }

    fn delay(&mut self, now: Instant, completion: Completion<Buffer>) {
        let jitter = if self.plan.jitter.is_zero() {
            Duration::ZERO
        } else {
            self.random.random_range(Duration::ZERO..=self.plan.jitter)
        };
        self.delayed.push((now + self.plan.latency + jitter, completion));
    }

    /// Returns true if `fault-reorder` allows completions to be released.
    fn can_release(&self) -> bool {
        self.delayed.len() >= self.plan.reorder || (self.inner.outstanding() == 0 && self.pending.is_empty())
    }

    fn submit_pending(&mut self, context: &mut UringContext) {
        if !self.pending.is_empty() {
            self.submitted.extend(self.pending.iter().map(|request| (request.tag, false)));
            self.inner.submit(context, &mut self.pending, &mut self.inner_completions);
            self.submitted.truncate(self.submitted.len() - self.pending.len());
        }
        let stalled = !self.pending.is_empty() && self.inner.outstanding() == 0;
        self.retry_at = stalled.then(|| Instant::now() + STALL);
    }

    fn collect_completions(&mut self, context: &mut UringContext) {
        let now = Instant::now();
        let mut completions = std::mem::take(&mut self.inner_completions);
        for completion in completions.drain(..) {
            let completion = self.untear(context, completion);
            let at = self.submitted.iter().position(|(tag, _)| *tag == completion.tag);
            if at.is_some_and(|at| self.submitted.swap_remove(at).1) {
                self.cancelled.push(completion);
            } else {
                self.delay(now, completion);
            }
        }
        self.inner_completions = completions;
    }

    fn release_due(&mut self, completions: &mut Vec<Completion<Buffer>>) {
        completions.append(&mut self.cancelled);
        if self.delayed.is_empty() || !self.can_release() {
            return;
        }
        let (now, first) = (Instant::now(), completions.len());
        if self.plan.latency.is_zero() && self.plan.jitter.is_zero() {
            completions.extend(self.delayed.drain(..).map(|(_, completion)| completion));
        } else {
            self.delayed.sort_by_key(|(due, _)| *due);
            let due = self.delayed.partition_point(|(due, _)| *due <= now);
            completions.extend(self.delayed.drain(..due).map(|(_, completion)| completion));
        }
        if self.plan.reorder > 0 {
            for last in (first + 1..completions.len()).rev() {
                completions.swap(last, self.random.random_range(first..=last));
            }
        }
    }
}

/// Requests of a lost connection end with the inner disk's outcome.
impl SessionChannel for FaultChannel {}

impl DiskChannel<UringContext> for FaultChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        self.submit_pending(context);
        // While the inner channel refuses requests, so does this one.
        let taken = if self.pending.is_empty() { batch.len() } else { 0 };
        let now = Instant::now();
        for request in batch.drain(..taken) {
            match self.injected_failure(&request) {
                Some(outcome) => self.delay(now, Completion { outcome, tag: request.tag, buffer: request.buffer }),
                None => {
                    let request = self.tear(context, request);
                    self.pending.push(request);
                }
            }
        }
        self.submit_pending(context);
        self.collect_completions(context);
        self.release_due(completions);
        taken
    }

    fn reap(&mut self, context: &mut UringContext, completions: &mut Vec<Completion<Buffer>>) -> usize {
        let before = completions.len();
        self.inner.reap(context, &mut self.inner_completions);
        self.submit_pending(context);
        self.collect_completions(context);
        self.release_due(completions);
        completions.len() - before
    }

    /// Aborts delayed requests at once, although the inner disk has executed them, like a slow disk that is cancelled
    /// in time. Requests in the inner channel are cancelled there.
    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], completions: &mut Vec<Completion<Buffer>>) {
        let is_cancelled = |tag: Tag| tags.binary_search(&tag).is_ok();
        let aborted = |tag, buffer| Completion { outcome: Outcome::Aborted, tag, buffer };
        completions.extend(
            self.delayed
                .extract_if(.., |(_, completion)| is_cancelled(completion.tag))
                .map(|(_, e)| aborted(e.tag, e.buffer)),
        );
        let pending: Vec<_> = self.pending.extract_if(.., |request| is_cancelled(request.tag)).collect();
        completions
            .extend(pending.into_iter().map(|request| self.untear(context, aborted(request.tag, request.buffer))));
        self.submitted.iter_mut().for_each(|(tag, cancelled)| *cancelled |= is_cancelled(*tag));
        self.inner.cancel(context, tags, &mut self.inner_completions);
        self.collect_completions(context);
        self.release_due(completions);
    }

    fn outstanding(&self) -> u32 {
        self.inner.outstanding() + (self.pending.len() + self.delayed.len() + self.cancelled.len()) as u32
    }

    fn deadline(&self) -> Option<Instant> {
        let due = self.delayed.iter().map(|(due, _)| *due).min().filter(|_| self.can_release());
        [due, self.inner.deadline(), self.retry_at].into_iter().flatten().min()
    }

    fn close(&mut self, context: &mut UringContext) {
        self.inner.close(context);
        if let Some(slots) = self.slots.take() {
            slots.close(&mut context.buffers);
        }
    }
}
