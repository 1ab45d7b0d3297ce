//! One queue with its tag table, counters and poll window, behind one dynamic call a batch.

use std::any::Any;

use mqblk_core::units::in_range;
use mqblk_core::{
    Armed, ByteLen, ByteOffset, Completed, Finished, Geometry, GuestQueue, Intake, Lane as LaneTypes, Notify, Op,
    Outcome, Pulled, Request, Tag,
};
use mqblk_uring::Lane;

use crate::clock::Moment;
use crate::counters::QueueCounters;
use crate::poll::{Idle, PollPolicy, PollState};
use crate::roster::Rest;
use crate::tags::TagTable;

pub(crate) type Buffer = <Lane as LaneTypes>::Buffer;
pub(crate) type AnyRequest = Request<Buffer>;
pub(crate) type AnyFinished = Finished<Buffer>;

/// A queue as its worker sees it.
pub(crate) trait Served: Any {
    /// Takes one batch of requests into `plug`; requests refused at admission go to `finished`.
    fn pull(
        &mut self,
        lane: &mut Lane,
        slot: u16,
        geometry: &Geometry,
        plug: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyFinished>,
    ) -> Found;
    /// Writes the answers of a run of ended requests, all of this queue.
    fn finish(&mut self, lane: &mut Lane, run: &mut [AnyFinished]);
    /// Publishes, and calls the guest if it wants that.
    fn publish(&mut self);
    /// Something happened: the poll window starts again.
    fn active(&mut self, now: Moment);
    /// Nothing happened: poll on, or arm and look again.
    fn rest(&mut self, now: Moment) -> Rest;
    /// The guest kicked: it is polled from here on.
    fn kicked(&mut self);
    /// Requests in flight.
    fn in_flight(&self) -> usize;
    /// Counters so far.
    fn counters(&self) -> QueueCounters;
    /// For typed access.
    fn as_any(&mut self) -> &mut dyn Any;
    /// For taking it apart.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// What a pull brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// No request.
    Nothing,
    /// Requests for the disk, or such as the queue answered itself.
    Requests,
    /// The ring is broken; why.
    Broken(&'static str),
}

/// A queue of a known type.
pub(crate) struct Runner<Q: GuestQueue> {
    pub(crate) queue: Q,
    tags: TagTable<Q::Token>,
    counters: QueueCounters,
    poll: PollState,
}

impl<Q: GuestQueue<Lane = Lane> + 'static> Runner<Q> {
    pub(crate) fn new(queue: Q, policy: PollPolicy, now: Moment) -> Runner<Q> {
        let tags = TagTable::new(queue.depth());
        Runner { queue, tags, counters: QueueCounters::default(), poll: PollState::new(policy, now) }
    }
}

/// The engine's side of one pull.
struct Gate<'a, T> {
    slot: u16,
    geometry: &'a Geometry,
    tags: &'a mut TagTable<T>,
    plug: &'a mut Vec<AnyRequest>,
    finished: &'a mut Vec<AnyFinished>,
    counters: &'a mut QueueCounters,
}

impl<T> Gate<'_, T> {
    #[inline]
    fn verdict(&self, op: Op, start: ByteOffset, len: ByteLen) -> Option<Outcome> {
        if op.modifies() && self.geometry.read_only {
            return Some(Outcome::ReadOnly);
        }
        (!in_range(start, len, self.geometry.size)).then_some(Outcome::OutOfRange)
    }
}

impl<T> Intake<T, Buffer> for Gate<'_, T> {
    #[inline]
    fn room(&self) -> usize {
        self.tags.room()
    }

    #[inline(always)] // else the token would travel through memory
    fn admit(&mut self, token: T, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<Buffer>) {
        let verdict = self.verdict(op, start, len);
        let index = self.tags.take(token, op, 1).expect("a queue looks at room() before each request");
        let tag = Tag::new(self.slot, index);
        match verdict {
            None => self.plug.push(Request { op, start, len, tag, buffer }),
            Some(outcome) => self.finished.push(Finished { outcome, tag, buffer }),
        }
    }

    fn admit_parts(&mut self, token: T, op: Op, parts: &[(ByteOffset, ByteLen)]) {
        let verdict = parts.iter().find_map(|(start, len)| self.verdict(op, *start, *len));
        let count = if verdict.is_some() { 1 } else { parts.len() as u16 };
        let index = self.tags.take(token, op, count).expect("a queue looks at room() before each request");
        let tag = Tag::new(self.slot, index);
        match verdict {
            None => {
                self.plug.extend(parts.iter().map(|&(start, len)| Request { op, start, len, tag, buffer: None }));
            }
            Some(outcome) => self.finished.push(Finished { outcome, tag, buffer: None }),
        }
    }

    #[inline]
    fn answered(&mut self, well_formed: bool) {
        self.counters.requests += 1;
        self.counters.answered_alone += 1;
        self.counters.malformed += u64::from(!well_formed);
    }
}

impl<Q: GuestQueue<Lane = Lane> + 'static> Served for Runner<Q> {
    #[inline]
    fn pull(
        &mut self,
        lane: &mut Lane,
        slot: u16,
        geometry: &Geometry,
        plug: &mut Vec<AnyRequest>,
        finished: &mut Vec<AnyFinished>,
    ) -> Found {
        let before = self.tags.in_flight() as u64 + self.counters.answered_alone;
        let (tags, counters) = (&mut self.tags, &mut self.counters);
        let pulled = self.queue.pull(lane, &mut Gate { slot, geometry, tags, plug, finished, counters });
        if let Pulled::Broken(why) = pulled {
            Found::Broken(why)
        } else if self.tags.in_flight() as u64 + self.counters.answered_alone > before {
            self.counters.turns += 1;
            Found::Requests
        } else {
            self.counters.empty_turns += 1;
            Found::Nothing
        }
    }

    #[inline]
    fn finish(&mut self, lane: &mut Lane, run: &mut [AnyFinished]) {
        for done in run {
            let Some((token, op, outcome)) = self.tags.finish_part(done.tag.index(), done.outcome) else { continue };
            let transferred = match outcome {
                Outcome::Done(len) => Some(len),
                _ => None,
            };
            self.counters.count(op, transferred);
            self.queue.finish(lane, Completed { token, outcome, buffer: done.buffer.take() });
        }
    }

    #[inline]
    fn publish(&mut self) {
        match self.queue.publish() {
            Notify::Wanted => {
                self.counters.calls += 1;
                self.queue.notify();
            }
            Notify::Suppressed => self.counters.calls_suppressed += 1,
            Notify::Nothing => {}
        }
    }

    #[inline]
    fn active(&mut self, now: Moment) {
        self.poll.active(now);
    }

    #[inline]
    fn rest(&mut self, now: Moment) -> Rest {
        if self.poll.idle(now) == Idle::KeepPolling {
            return Rest::Poll;
        }
        self.counters.arms += 1;
        self.counters.poll_ns += self.poll.idle_for(now);
        match self.queue.arm() {
            Armed::Sleepable => Rest::Armed,
            Armed::WorkWaiting => Rest::Poll,
        }
    }

    fn kicked(&mut self) {
        self.counters.kicks += 1;
        self.queue.disarm();
    }

    fn in_flight(&self) -> usize {
        self.tags.in_flight()
    }

    fn counters(&self) -> QueueCounters {
        self.counters
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
