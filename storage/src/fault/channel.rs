//! A channel that lets some requests fail, tears some, and delays completions.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{BlockSize, ByteLen, DiskChannel, Errno, Finished, Op, Outcome, Request, Tag};
use mqblk_memory::{BouncePool, Buffer};
use mqblk_uring::Lane;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::plan::{Plan, Rule};

const TORN_SLOTS: u32 = 64;
const TORN_LEN: ByteLen = ByteLen(256 << 10);
const TORN: Outcome = Outcome::Failed(Errno(5)); // EIO
/// Retry interval of requests that an idle inner channel refused.
const STALL: Duration = Duration::from_millis(1);

pub(super) struct FaultChannel {
    plan: Arc<Plan>,
    inner: Box<dyn DiskChannel<Lane>>,
    block: BlockSize,
    random: SmallRng,
    /// The plan's rules with the remaining counts of their `TIMES`.
    rules: Vec<Rule>,
    /// Requests that the inner channel has not taken yet.
    pending: Vec<Request<Buffer>>,
    torn: Vec<Torn>,
    slots: Option<BouncePool>,
    /// Delayed completions.
    held: Vec<(Instant, Finished<Buffer>)>,
    /// Requests in the inner channel. True for a cancelled one: its completion is not delayed.
    inside: Vec<(Tag, bool)>,
    /// Completions of cancelled requests, which are not delayed.
    released: Vec<Finished<Buffer>>,
    /// Scratch for the inner channel's completions.
    ended: Vec<Finished<Buffer>>,
    retry_at: Option<Instant>,
}

/// A torn request: the inner channel transfers only its first part, through a slot.
struct Torn {
    tag: Tag,
    slot: u32,
    /// The request's own buffer.
    whole: Buffer,
    /// True for a read: the part read is copied to the buffer.
    read: bool,
    part: ByteLen,
}

impl FaultChannel {
    pub(super) fn new(
        plan: Arc<Plan>,
        inner: Box<dyn DiskChannel<Lane>>,
        block: BlockSize,
        stream: u64,
        context: &mut Lane,
    ) -> io::Result<FaultChannel> {
        let slots = (plan.torn > 0).then(|| BouncePool::new(&mut context.buffers, TORN_SLOTS, TORN_LEN)).transpose()?;
        Ok(FaultChannel {
            random: SmallRng::seed_from_u64(plan.seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            rules: plan.rules.clone(),
            plan,
            inner,
            block,
            pending: Vec::new(),
            torn: Vec::new(),
            slots,
            held: Vec::new(),
            inside: Vec::new(),
            released: Vec::new(),
            ended: Vec::new(),
            retry_at: None,
        })
    }

    /// Returns the outcome of a request that must fail without being executed.
    fn judge(&mut self, request: &Request<Buffer>) -> Option<Outcome> {
        for rule in &mut self.rules {
            let Some(outcome) = rule.judge(request) else { continue };
            match &mut rule.times {
                Some(0) => continue,
                Some(times) => *times -= 1,
                None => {}
            }
            return Some(outcome);
        }
        None
    }

    /// Replaces a request by one for its first part, if it is to be torn. A request of one block, or longer than a slot, or without a free
    /// slot, stays whole.
    fn tear(&mut self, context: &mut Lane, mut request: Request<Buffer>) -> Request<Buffer> {
        let block = u64::from(self.block.bytes());
        let blocks = request.len.0 / block;
        if !request.op.has_data() || blocks < 2 || !self.random.random_ratio(self.plan.torn, 100) {
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
            let copied = context.buffers.copy_range(&whole, 0, &slice, 0, part);
            debug_assert!(copied, "the part is shorter than the whole");
        }
        self.torn.push(Torn { tag: request.tag, slot, whole, read, part });
        request.buffer = Some(slice);
        request.len = part;
        request
    }

    /// Restores the own buffer of a torn request and makes it a failure.
    fn mend(&mut self, context: &mut Lane, completion: Finished<Buffer>) -> Finished<Buffer> {
        let Some(at) = self.torn.iter().position(|torn| torn.tag == completion.tag) else { return completion };
        let torn = self.torn.swap_remove(at);
        if let (Some(pool), Some(slice)) = (&mut self.slots, completion.buffer) {
            if torn.read && completion.outcome.is_done() {
                let copied = context.buffers.copy_range(&slice, 0, &torn.whole, 0, torn.part);
                debug_assert!(copied, "the part is shorter than the whole");
            }
            pool.release(&mut context.buffers, slice, torn.slot);
        }
        let outcome = if completion.outcome.is_done() { TORN } else { completion.outcome };
        Finished { outcome, tag: torn.tag, buffer: Some(torn.whole) }
    }

    fn hold(&mut self, now: Instant, completion: Finished<Buffer>) {
        let jitter = if self.plan.jitter.is_zero() {
            Duration::ZERO
        } else {
            self.random.random_range(Duration::ZERO..=self.plan.jitter)
        };
        self.held.push((now + self.plan.latency + jitter, completion));
    }

    /// Returns true if `fault-reorder` allows completions to be released.
    fn enough(&self) -> bool {
        self.held.len() >= self.plan.reorder || (self.inner.outstanding() == 0 && self.pending.is_empty())
    }

    fn offer(&mut self, context: &mut Lane) {
        if !self.pending.is_empty() {
            self.inside.extend(self.pending.iter().map(|request| (request.tag, false)));
            self.inner.submit(context, &mut self.pending, &mut self.ended);
            self.inside.truncate(self.inside.len() - self.pending.len());
        }
        let stalled = !self.pending.is_empty() && self.inner.outstanding() == 0;
        self.retry_at = stalled.then(|| Instant::now() + STALL);
    }

    fn collect(&mut self, context: &mut Lane) {
        let now = Instant::now();
        let mut completions = std::mem::take(&mut self.ended);
        for completion in completions.drain(..) {
            let completion = self.mend(context, completion);
            let at = self.inside.iter().position(|(tag, _)| *tag == completion.tag);
            if at.is_some_and(|at| self.inside.swap_remove(at).1) {
                self.released.push(completion);
            } else {
                self.hold(now, completion);
            }
        }
        self.ended = completions;
    }

    fn let_go(&mut self, completions: &mut Vec<Finished<Buffer>>) {
        completions.append(&mut self.released);
        if self.held.is_empty() || !self.enough() {
            return;
        }
        let (now, first) = (Instant::now(), completions.len());
        if self.plan.latency.is_zero() && self.plan.jitter.is_zero() {
            completions.extend(self.held.drain(..).map(|(_, completion)| completion));
        } else {
            self.held.sort_by_key(|(due, _)| *due);
            let due = self.held.partition_point(|(due, _)| *due <= now);
            completions.extend(self.held.drain(..due).map(|(_, completion)| completion));
        }
        if self.plan.reorder > 0 {
            for last in (first + 1..completions.len()).rev() {
                completions.swap(last, self.random.random_range(first..=last));
            }
        }
    }
}

impl DiskChannel<Lane> for FaultChannel {
    fn submit(
        &mut self,
        context: &mut Lane,
        batch: &mut Vec<Request<Buffer>>,
        completions: &mut Vec<Finished<Buffer>>,
    ) -> usize {
        self.offer(context);
        // While the inner channel refuses requests, so does this one.
        let taken = if self.pending.is_empty() { batch.len() } else { 0 };
        let now = Instant::now();
        for request in batch.drain(..taken) {
            match self.judge(&request) {
                Some(outcome) => self.hold(now, Finished { outcome, tag: request.tag, buffer: request.buffer }),
                None => {
                    let request = self.tear(context, request);
                    self.pending.push(request);
                }
            }
        }
        self.offer(context);
        self.collect(context);
        self.let_go(completions);
        taken
    }

    fn reap(&mut self, context: &mut Lane, completions: &mut Vec<Finished<Buffer>>) -> usize {
        let before = completions.len();
        self.inner.reap(context, &mut self.ended);
        self.offer(context);
        self.collect(context);
        self.let_go(completions);
        completions.len() - before
    }

    /// Aborts delayed requests at once, although the inner disk has executed them: a slow disk that is cancelled in time does the same.
    /// Requests in the inner channel are cancelled there.
    fn cancel(&mut self, context: &mut Lane, tags: &[Tag], completions: &mut Vec<Finished<Buffer>>) {
        let is_cancelled = |tag: Tag| tags.binary_search(&tag).is_ok();
        let aborted = |tag, buffer| Finished { outcome: Outcome::Aborted, tag, buffer };
        completions.extend(
            self.held
                .extract_if(.., |(_, completion)| is_cancelled(completion.tag))
                .map(|(_, e)| aborted(e.tag, e.buffer)),
        );
        let pending: Vec<_> = self.pending.extract_if(.., |request| is_cancelled(request.tag)).collect();
        completions.extend(pending.into_iter().map(|request| self.mend(context, aborted(request.tag, request.buffer))));
        self.inside.iter_mut().for_each(|(tag, cancelled)| *cancelled |= is_cancelled(*tag));
        self.inner.cancel(context, tags, &mut self.ended);
        self.collect(context);
        self.let_go(completions);
    }

    fn outstanding(&self) -> u32 {
        self.inner.outstanding() + (self.pending.len() + self.held.len() + self.released.len()) as u32
    }

    fn deadline(&self) -> Option<Instant> {
        let due = self.held.iter().map(|(due, _)| *due).min().filter(|_| self.enough());
        [due, self.inner.deadline(), self.retry_at].into_iter().flatten().min()
    }

    fn close(&mut self, context: &mut Lane) {
        self.inner.close(context);
        if let Some(slots) = self.slots.take() {
            slots.close(&mut context.buffers);
        }
    }
}
