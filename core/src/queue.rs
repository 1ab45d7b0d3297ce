//! The guest side of the waist.

use crate::IoContext;
use crate::request::{Op, Outcome};
use crate::units::{ByteLen, ByteOffset};

/// Which of its disks a queue means: a queue of a block device has only the first, one of a controller has many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskSlot(pub u16);

impl DiskSlot {
    /// The disk of a queue that has only one.
    pub const FIRST: DiskSlot = DiskSlot(0);
}

/// Where a queue puts the requests that it pulls: the engine's side of a pull.
pub trait Intake<T, B> {
    /// How many more requests may be admitted in this batch. A queue must look before each request and stop at 0.
    fn room(&self) -> usize;

    /// Admits one request to one of the queue's disks. `token` comes back in exactly one [`Completed`].
    fn admit(&mut self, token: T, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<B>);

    /// Admits one guest request that covers several disk ranges (discard, write zeroes). It finishes when all the ranges
    /// have, with the first failure if there was one. `parts` is not empty.
    fn admit_parts(&mut self, token: T, disk: DiskSlot, op: Op, parts: &[(ByteOffset, ByteLen)]);

    /// Ends early, where that is possible, those requests in flight of this queue whose token `pick` chooses: they are taken
    /// back before the storage has seen them, or the storage is asked to give up. Each still finishes exactly once, in this turn
    /// or later, never inside this call: with [`Outcome::Aborted`] if it was in time, when it may have done nothing, a part or all
    /// of its work but does nothing more; else as it ended. What the storage cannot give up (a transfer that a device works on, a
    /// flush) is waited for, and so is a request that was merged into one that is not chosen. Not on the data path: every token
    /// is shown.
    fn cancel(&mut self, pick: &mut dyn FnMut(&mut T) -> bool);

    /// Counts a request that the queue answered itself: identification (`true`) or a mistake of the guest (`false`).
    fn completed_locally(&mut self, well_formed: bool);
}

/// How a guest is called: an eventfd that a VMM turns into an interrupt, an event channel.
pub trait Call: Send {
    /// Calls the guest. Must not block and cannot fail: an eventfd that is broken is the other side's loss.
    fn call(&self);
}

/// Our end of an event channel: how the other end is called, and how its events are heard. An event that has come is masked until
/// [`unmask`](Self::unmask): none comes after it until then, so a guest that sends many costs no more than one that sends one.
pub trait EventChannel: Send {
    /// Sends an event. Must not block and cannot fail: a channel whose other end is gone is the other side's loss.
    fn notify(&self);

    /// Takes the event that has come, if one has: the descriptor that was watched for it is not readable any more.
    fn take(&self);

    /// Lets the next event come. Called when the ring has been looked at, or events would come faster than work is done.
    fn unmask(&self);
}

/// What a pull found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullEnd {
    /// The ring was empty at the end of the batch.
    Empty,
    /// The batch was full before the ring was empty.
    MoreWaiting,
    /// The ring breaks the protocol; why, for the log. The queue will not be pulled again.
    Broken(&'static str),
}

/// A request's end, as its queue sees it.
#[derive(Debug)]
pub struct FinishedRequest<T, B> {
    /// What the queue gave at admission.
    pub token: T,
    /// How the request ended.
    pub outcome: Outcome,
    /// The buffer that the queue gave at admission.
    pub buffer: Option<B>,
}

/// Whether a publish made anything visible that the guest may want to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishResult {
    /// The guest asked for a call: [`GuestQueue::notify`] is due.
    Wanted,
    /// Answers were published; the guest asked not to be called.
    Suppressed,
    /// Nothing was published.
    Nothing,
}

/// What arming a queue found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmResult {
    /// The ring is empty and the next request will be kicked for: the worker may sleep.
    Sleepable,
    /// A request came in between: pull again.
    WorkWaiting,
}

/// A personality over a ring: the guest side of one queue, owned by one worker.
///
/// Contract:
/// * Each guest byte is read once into a private copy, then judged. Every loop over guest data has a bound.
/// * A guest's mistake is data: the queue answers it itself and counts it. Only a broken ring ends the queue
///   ([`Pulled::Broken`]), and never more than this queue. Nothing a guest writes can make an implementation panic.
/// * A token that was admitted is finished exactly once.
/// * A request answered by the queue itself inside `pull` (identification, malformed requests) is published by the next
///   [`publish`](Self::publish) like all others.
pub trait GuestQueue {
    /// What an answer needs. Kept in the engine's tag table.
    type Token;
    /// Where a new owner resumes, for stop, migration and reconnect.
    type Position;
    /// What the worker lends.
    type Context: IoContext;

    /// The most requests that can be in flight: the ring's size.
    fn depth(&self) -> u16;

    /// Takes one batch of requests off the ring.
    fn pull<I>(&mut self, context: &mut Self::Context, into: &mut I) -> PullEnd
    where
        I: Intake<Self::Token, <Self::Context as IoContext>::Buffer>;

    /// Writes the answer, which is not visible to the guest before [`publish`](Self::publish); or goes on with the same guest
    /// request, by admitting what it asks next (compare, then write). There is room for that: the finished request's.
    fn finish<I>(
        &mut self,
        context: &mut Self::Context,
        done: FinishedRequest<Self::Token, <Self::Context as IoContext>::Buffer>,
        into: &mut I,
    ) where
        I: Intake<Self::Token, <Self::Context as IoContext>::Buffer>;

    /// Somebody rang the queue's [`Wake`]. Called before the turn's pulls, after every answer that was
    /// [finished](Self::finish) before has been published; what it answers is published in this turn. What it cancels is taken
    /// back before the turn's requests are handed to the storage. `running`: the queue may take requests off its ring (it is
    /// neither paused, broken nor about to leave).
    ///
    /// # Errors
    /// Like [`Pulled::Broken`], when it took requests and found the ring broken.
    fn woken<I>(&mut self, _context: &mut Self::Context, _into: &mut I, _running: bool) -> Result<(), &'static str>
    where
        I: Intake<Self::Token, <Self::Context as IoContext>::Buffer>,
    {
        Ok(())
    }

    /// Guest requests that the queue took off its ring and has neither admitted nor answered: they wait for something other
    /// than a disk, and a drain waits for them.
    fn blocked(&self) -> usize {
        0
    }

    /// Makes all answers since the last publish visible: the ring's index is stored once.
    fn publish(&mut self) -> PublishResult;

    /// Calls the guest (an interrupt), once a batch.
    fn notify(&mut self);

    /// Asks the guest to kick for the next request, then looks again. The order (ask, full fence, look) is what makes a
    /// lost wake-up impossible.
    fn arm(&mut self) -> ArmResult;

    /// Asks the guest not to kick while the queue is polled.
    fn disarm(&mut self);

    /// Where a new owner resumes. Meaningful only when nothing is in flight.
    fn position(&self) -> Self::Position;
}

/// Rings for a queue from any thread: it is [`woken`](GuestQueue::woken) in its worker's next turn. Rings that come before
/// it is count as one.
pub trait Wake: Send + Sync {
    /// Rings. Does not block.
    fn wake(&self);
}
