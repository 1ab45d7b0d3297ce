//! The guest side.

use crate::IoContext;
use crate::request::{Op, Outcome};
use crate::units::{ByteLen, ByteOffset};

/// One of a queue's disks: a queue of a block device has only the first, one of a controller has many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskSlot(pub u16);

impl DiskSlot {
    /// The disk of a queue that has only one.
    pub const FIRST: DiskSlot = DiskSlot(0);
}

/// The engine's side of a pull: takes the requests of a queue.
pub trait Intake<T, B> {
    /// Returns how many more requests may be admitted in this batch. A queue must check before each request and stop at
    /// 0.
    fn room(&self) -> usize;

    /// Admits one request to one of the queue's disks. `token` comes back in exactly one [`FinishedRequest`].
    fn admit(&mut self, token: T, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<B>);

    /// Admits one guest request that covers several disk ranges (discard, write zeroes). It completes when all the
    /// ranges have, with the first failure if there was one. `parts` is not empty.
    fn admit_parts(&mut self, token: T, disk: DiskSlot, op: Op, parts: &[(ByteOffset, ByteLen)]);

    /// Cancels this queue's requests in flight whose token `pick` chooses, where that is possible: they are taken back
    /// before the storage has seen them, or the storage is asked to cancel them. Each still finishes exactly once, in
    /// this turn or later, never inside this call: with [`Outcome::Aborted`] if it was in time (it may have done
    /// nothing, a part or all of its work, but does nothing more), else with its own outcome. Requests that the storage
    /// cannot cancel (a transfer that a device works on, a flush) and requests merged with one that is not chosen are
    /// waited for. Not for the data path: `pick` is called for every token.
    fn cancel(&mut self, pick: &mut dyn FnMut(&mut T) -> bool);

    /// Counts a well-formed request that the queue completed itself (identification).
    fn completed_locally(&mut self);

    /// Counts a malformed request, which the queue completed itself with an error. `why`: for the log.
    fn malformed(&mut self, why: &'static str);
}

/// A way to call a guest: an eventfd that a VMM turns into an interrupt, or an event channel.
pub trait Call: Send {
    /// Calls the guest. Must not block and cannot fail: with a broken eventfd the guest misses its interrupts.
    fn call(&self);
}

/// The backend's end of an event channel. The channel is masked from the arrival of an event until
/// [`unmask`](Self::unmask): no other event arrives until then, so a guest that sends many costs no more than one that
/// sends one.
pub trait EventChannel: Send {
    /// Sends an event. Must not block and cannot fail: without another end the event is lost.
    fn notify(&self);

    /// Takes the pending event, if there is one: the descriptor is not readable afterwards.
    fn take(&self);

    /// Unmasks the channel. Called after the ring was checked; otherwise events could come faster than requests are
    /// handled.
    fn unmask(&self);
}

/// The end of a pull. `taken`: the number of requests that it took off the ring, including those that the queue has
/// completed in the pull, which are published because they were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullEnd {
    /// The ring was empty at the end of the batch.
    Empty {
        /// Requests of this pull.
        taken: usize,
    },
    /// The batch was full before the ring was empty.
    MoreWaiting {
        /// As above.
        taken: usize,
    },
    /// The ring violates the protocol; the reason, for the log. The queue is not pulled again.
    Broken(&'static str),
}

impl PullEnd {
    /// Returns the end of a pull that took `taken` requests; `more` are waiting.
    #[inline]
    pub const fn of(taken: usize, more: bool) -> PullEnd {
        if more { PullEnd::MoreWaiting { taken } } else { PullEnd::Empty { taken } }
    }
}

/// A completed request, as its queue gets it.
#[derive(Debug)]
pub struct FinishedRequest<T, B> {
    /// The queue's token from the admission.
    pub token: T,
    /// How the request ended.
    pub outcome: Outcome,
    /// The buffer from the admission.
    pub buffer: Option<B>,
}

/// The result of a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishResult {
    /// The guest asked for a call: [`GuestQueue::notify`] is due.
    Wanted,
    /// Completions were published; the guest asked not to be called.
    Suppressed,
    /// Nothing was published.
    Nothing,
}

/// The result of arming a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmResult {
    /// The ring is empty and the guest will kick for the next request: the worker may sleep.
    Sleepable,
    /// A request came meanwhile: pull again.
    WorkWaiting,
}

/// The personality of a ring: the guest side of one queue, owned by one worker.
///
/// Contract:
/// * Each guest byte is read once into a private copy, then checked. Every loop over guest data has a bound.
/// * A malformed request is completed by the queue itself, and counted. Only a broken ring ends the queue
///   ([`PullEnd::Broken`]), and never more than this queue. Nothing that a guest writes can make an implementation
///   panic.
/// * A token that was admitted is finished exactly once.
/// * A request that the queue completes itself inside `pull` (identification, malformed requests) is published by the
///   next [`publish`](Self::publish) like all others.
pub trait GuestQueue: Send + 'static {
    /// The queue's data to finish a request. Kept in the engine's tag table.
    type Token;
    /// The position at which a new owner resumes, for stop, migration and reconnect.
    type Position: Send + 'static;
    /// The worker's context.
    type Context: IoContext;

    /// Returns the most requests that can be in flight: the ring's size.
    fn depth(&self) -> u16;

    /// Takes the queue's resources of a worker's context, for example a lease on guest memory. Called before anything
    /// else when the queue is made, and when it moves to another worker.
    ///
    /// # Errors
    /// When the context refuses a resource; the reason. Nothing is taken then, and the queue may enter another context.
    fn enter(&mut self, context: &mut Self::Context) -> Result<(), String>;

    /// Releases the queue's resources of the context that it [entered](Self::enter). Nothing is in flight.
    fn leave(&mut self, context: &mut Self::Context);

    /// Closes the queue for good. Nothing is in flight. Called before the queue [leaves](Self::leave) its last context,
    /// or after the first one has refused it.
    fn close(&mut self) {}

    /// Takes one batch of requests off the ring.
    fn pull<I>(&mut self, context: &mut Self::Context, into: &mut I) -> PullEnd
    where
        I: Intake<Self::Token, <Self::Context as IoContext>::Buffer>;

    /// Writes the completion, which is not visible to the guest before [`publish`](Self::publish); or admits the
    /// request's next step (compare, then write). The finished request has left a free tag for that.
    fn finish<I>(
        &mut self,
        context: &mut Self::Context,
        done: FinishedRequest<Self::Token, <Self::Context as IoContext>::Buffer>,
        into: &mut I,
    ) where
        I: Intake<Self::Token, <Self::Context as IoContext>::Buffer>;

    /// Abandons a request without completing it: releases its buffer and its token's resources. Whoever serves the ring
    /// next replays it.
    fn abandon(
        &mut self,
        context: &mut Self::Context,
        token: Self::Token,
        buffer: Option<<Self::Context as IoContext>::Buffer>,
    );

    /// Handles a [`Wake`] of the queue. Called before the turn's pulls, after all earlier [finished](Self::finish)
    /// completions were published; completions from this call are published in this turn. Requests that it cancels are
    /// taken back before the turn's requests are submitted. `running`: the queue may take requests off its ring (it is
    /// not paused, broken or draining).
    ///
    /// # Errors
    /// As [`PullEnd::Broken`], when it took requests and found the ring broken.
    fn woken<I>(&mut self, _context: &mut Self::Context, _into: &mut I, _running: bool) -> Result<(), &'static str>
    where
        I: Intake<Self::Token, <Self::Context as IoContext>::Buffer>,
    {
        Ok(())
    }

    /// Returns the number of blocked requests: taken off the ring, and neither admitted nor completed. They wait for
    /// something other than a disk, and a drain waits for them.
    fn blocked(&self) -> usize {
        0
    }

    /// Makes all completions since the last publish visible: the ring's index is stored once.
    fn publish(&mut self) -> PublishResult;

    /// Calls the guest (an interrupt), once per batch.
    fn notify(&mut self);

    /// Asks the guest to kick for the next request, then checks the ring again. This order (ask, full fence, check)
    /// makes a lost wakeup impossible.
    fn arm(&mut self) -> ArmResult;

    /// Asks the guest not to kick while the queue is polled.
    fn disarm(&mut self);

    /// Returns the position at which a new owner resumes. Meaningful only when nothing is in flight.
    fn position(&self) -> Self::Position;
}

/// A waker of a queue, for any thread: the queue is [`woken`](GuestQueue::woken) in its worker's next turn. Wakes that
/// come before that count as one.
pub trait Wake: Send + Sync {
    /// Wakes the queue. Does not block.
    fn wake(&self);
}
