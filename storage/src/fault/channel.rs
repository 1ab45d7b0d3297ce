//! A channel that lets some requests fail, tears some, and holds answers back.

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
/// How soon to look again whether an inner channel that has nothing running takes what it refused.
const STALL: Duration = Duration::from_millis(1);

pub(super) struct FaultChannel {
    plan: Arc<Plan>,
    inner: Box<dyn DiskChannel<Lane>>,
    block: BlockSize,
    random: SmallRng,
    /// The plan's rules with what is left of their `TIMES`.
    rules: Vec<Rule>,
    /// What the inner channel has not taken yet.
    pending: Vec<Request<Buffer>>,
    torn: Vec<Torn>,
    slots: Option<BouncePool>,
    /// Answers that are held back.
    held: Vec<(Instant, Finished<Buffer>)>,
    /// What the inner channel has, and whether it was cancelled: then its answer is not held back.
    inside: Vec<(Tag, bool)>,
    /// Answers that are to go at once.
    released: Vec<Finished<Buffer>>,
    /// Scratch for the inner channel's answers.
    ended: Vec<Finished<Buffer>>,
    retry_at: Option<Instant>,
}

/// A request of which the inner channel does only a first part, through a slot.
struct Torn {
    tag: Tag,
    slot: u32,
    /// The request's own buffer.
    whole: Buffer,
    /// A read: what came is copied to the buffer.
    read: bool,
    part: ByteLen,
}

impl FaultChannel {
    pub(super) fn new(
        plan: Arc<Plan>,
        inner: Box<dyn DiskChannel<Lane>>,
        block: BlockSize,
        stream: u64,
        lane: &mut Lane,
    ) -> io::Result<FaultChannel> {
        let slots = (plan.torn > 0).then(|| BouncePool::new(&mut lane.buffers, TORN_SLOTS, TORN_LEN)).transpose()?;
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

    /// How a request fails, if it is to fail without being carried out.
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

    /// Makes a request into one for its first part only, if it is to be torn. A request of one block, or longer than a slot,
    /// or that finds no free slot, stays whole.
    fn tear(&mut self, lane: &mut Lane, mut request: Request<Buffer>) -> Request<Buffer> {
        let block = u64::from(self.block.bytes());
        let blocks = request.len.0 / block;
        if !request.op.has_data() || blocks < 2 || !self.random.random_ratio(self.plan.torn, 100) {
            return request;
        }
        let (Some(pool), Some(whole)) = (&mut self.slots, request.buffer.take()) else { return request };
        let part = ByteLen(self.random.random_range(1..blocks) * block);
        // What the inner disk would refuse, it is to refuse.
        let odd = lane.buffers.len(&whole) != request.len || !request.len.is_aligned(self.block);
        let slice = if odd { None } else { pool.take(&mut lane.buffers, part) };
        let Some((slice, slot)) = slice else {
            request.buffer = Some(whole);
            return request;
        };
        let read = request.op == Op::Read;
        if !read {
            let copied = lane.buffers.copy_range(&whole, 0, &slice, 0, part);
            debug_assert!(copied, "the part is shorter than the whole");
        }
        self.torn.push(Torn { tag: request.tag, slot, whole, read, part });
        request.buffer = Some(slice);
        request.len = part;
        request
    }

    /// Gives a torn request its own buffer back and makes it a failure.
    fn mend(&mut self, lane: &mut Lane, ended: Finished<Buffer>) -> Finished<Buffer> {
        let Some(at) = self.torn.iter().position(|torn| torn.tag == ended.tag) else { return ended };
        let torn = self.torn.swap_remove(at);
        if let (Some(pool), Some(slice)) = (&mut self.slots, ended.buffer) {
            if torn.read && ended.outcome.is_done() {
                let copied = lane.buffers.copy_range(&slice, 0, &torn.whole, 0, torn.part);
                debug_assert!(copied, "the part is shorter than the whole");
            }
            pool.release(&mut lane.buffers, slice, torn.slot);
        }
        let outcome = if ended.outcome.is_done() { TORN } else { ended.outcome };
        Finished { outcome, tag: torn.tag, buffer: Some(torn.whole) }
    }

    fn hold(&mut self, now: Instant, ended: Finished<Buffer>) {
        let jitter = if self.plan.jitter.is_zero() {
            Duration::ZERO
        } else {
            self.random.random_range(Duration::ZERO..=self.plan.jitter)
        };
        self.held.push((now + self.plan.latency + jitter, ended));
    }

    /// Whether answers may go as far as `fault-reorder` is concerned.
    fn enough(&self) -> bool {
        self.held.len() >= self.plan.reorder || (self.inner.outstanding() == 0 && self.pending.is_empty())
    }

    fn offer(&mut self, lane: &mut Lane) {
        if !self.pending.is_empty() {
            self.inside.extend(self.pending.iter().map(|request| (request.tag, false)));
            self.inner.submit(lane, &mut self.pending, &mut self.ended);
            self.inside.truncate(self.inside.len() - self.pending.len());
        }
        let starved = !self.pending.is_empty() && self.inner.outstanding() == 0;
        self.retry_at = starved.then(|| Instant::now() + STALL);
    }

    fn collect(&mut self, lane: &mut Lane) {
        let now = Instant::now();
        let mut ended = std::mem::take(&mut self.ended);
        for one in ended.drain(..) {
            let one = self.mend(lane, one);
            let at = self.inside.iter().position(|(tag, _)| *tag == one.tag);
            if at.is_some_and(|at| self.inside.swap_remove(at).1) {
                self.released.push(one);
            } else {
                self.hold(now, one);
            }
        }
        self.ended = ended;
    }

    fn let_go(&mut self, finished: &mut Vec<Finished<Buffer>>) {
        finished.append(&mut self.released);
        if self.held.is_empty() || !self.enough() {
            return;
        }
        let (now, first) = (Instant::now(), finished.len());
        if self.plan.latency.is_zero() && self.plan.jitter.is_zero() {
            finished.extend(self.held.drain(..).map(|(_, ended)| ended));
        } else {
            self.held.sort_by_key(|(due, _)| *due);
            let due = self.held.partition_point(|(due, _)| *due <= now);
            finished.extend(self.held.drain(..due).map(|(_, ended)| ended));
        }
        if self.plan.reorder > 0 {
            for last in (first + 1..finished.len()).rev() {
                finished.swap(last, self.random.random_range(first..=last));
            }
        }
    }
}

impl DiskChannel<Lane> for FaultChannel {
    fn submit(
        &mut self,
        lane: &mut Lane,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Finished<Buffer>>,
    ) -> usize {
        self.offer(lane);
        // What the inner channel refused is refused here.
        let taken = if self.pending.is_empty() { batch.len() } else { 0 };
        let now = Instant::now();
        for request in batch.drain(..taken) {
            match self.judge(&request) {
                Some(outcome) => self.hold(now, Finished { outcome, tag: request.tag, buffer: request.buffer }),
                None => {
                    let request = self.tear(lane, request);
                    self.pending.push(request);
                }
            }
        }
        self.offer(lane);
        self.collect(lane);
        self.let_go(finished);
        taken
    }

    fn reap(&mut self, lane: &mut Lane, finished: &mut Vec<Finished<Buffer>>) -> usize {
        let before = finished.len();
        self.inner.reap(lane, &mut self.ended);
        self.offer(lane);
        self.collect(lane);
        self.let_go(finished);
        finished.len() - before
    }

    /// What is held back ends at once, as aborted although the inner disk has done it: that is what a slow disk that is asked in
    /// time does. The inner channel is asked about what it has.
    fn cancel(&mut self, lane: &mut Lane, tags: &[Tag], finished: &mut Vec<Finished<Buffer>>) {
        let chosen = |tag: Tag| tags.binary_search(&tag).is_ok();
        let aborted = |tag, buffer| Finished { outcome: Outcome::Aborted, tag, buffer };
        finished
            .extend(self.held.extract_if(.., |(_, ended)| chosen(ended.tag)).map(|(_, e)| aborted(e.tag, e.buffer)));
        let pending: Vec<_> = self.pending.extract_if(.., |request| chosen(request.tag)).collect();
        finished.extend(pending.into_iter().map(|request| self.mend(lane, aborted(request.tag, request.buffer))));
        self.inside.iter_mut().for_each(|(tag, hurried)| *hurried |= chosen(*tag));
        self.inner.cancel(lane, tags, &mut self.ended);
        self.collect(lane);
        self.let_go(finished);
    }

    fn outstanding(&self) -> u32 {
        self.inner.outstanding() + (self.pending.len() + self.held.len() + self.released.len()) as u32
    }

    fn deadline(&self) -> Option<Instant> {
        let due = self.held.iter().map(|(due, _)| *due).min().filter(|_| self.enough());
        [due, self.inner.deadline(), self.retry_at].into_iter().flatten().min()
    }

    fn close(&mut self, lane: &mut Lane) {
        self.inner.close(lane);
        if let Some(slots) = self.slots.take() {
            slots.close(&mut lane.buffers);
        }
    }
}
