//! The backend of a ring, stepped by the test, over a disk in memory.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mqblk_blkif::journal::{Journal, JournalSlot};
use mqblk_blkif::{BlkifQueue, BlkifToken, RingParts, Vbd};
use mqblk_core::units::in_range;
use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, DiskSlot, EventChannel, FinishedRequest, GuestQueue, Intake, IoContext, Op,
    Outcome, PublishResult, PullEnd, Wake,
};
use mqblk_memory::{Buffer, BufferPool, GrantAccess, Mapping, PooledContext};
use mqblk_ring::blkif::{RawRequest, RingPosition};

use super::domain::Domain;
use super::front::Front;

#[derive(Default)]
pub(crate) struct TestContext(pub BufferPool);

impl IoContext for TestContext {
    type Buffer = Buffer;
}

impl PooledContext for TestContext {
    fn pool(&mut self) -> &mut BufferPool {
        &mut self.0
    }
}

/// An event channel that counts calls.
#[derive(Default)]
pub(crate) struct TestChannel {
    pub sent: AtomicU64,
    pub taken: AtomicU64,
    pub unmasked: AtomicU64,
}

struct TestChannelEnd(Arc<TestChannel>);

impl EventChannel for TestChannelEnd {
    fn notify(&self) {
        self.0.sent.fetch_add(1, Ordering::Relaxed);
    }
    fn take(&self) {
        self.0.taken.fetch_add(1, Ordering::Relaxed);
    }
    fn unmask(&self) {
        self.0.unmasked.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Default)]
pub(crate) struct TestWaker(pub AtomicBool);

impl Wake for TestWaker {
    fn wake(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A request that is admitted and not completed.
pub(crate) struct Pending {
    pub token: BlkifToken,
    pub op: Op,
    pub start: ByteOffset,
    pub len: ByteLen,
    pub buffer: Option<Buffer>,
}

/// The engine's intake.
pub(crate) struct TestIntake {
    space: usize,
    pub pending: VecDeque<Pending>,
    pub good: u64,
    pub bad: u64,
}

impl Intake<BlkifToken, Buffer> for TestIntake {
    fn room(&self) -> usize {
        self.space
    }

    fn admit(
        &mut self,
        token: BlkifToken,
        disk: DiskSlot,
        op: Op,
        start: ByteOffset,
        len: ByteLen,
        buffer: Option<Buffer>,
    ) {
        assert_eq!(disk, DiskSlot::FIRST);
        assert_eq!(op.has_data(), buffer.is_some());
        self.space = self.space.checked_sub(1).expect("the queue has checked for space");
        self.pending.push_back(Pending { token, op, start, len, buffer });
    }

    fn admit_parts(&mut self, _: BlkifToken, _: DiskSlot, _: Op, _: &[(ByteOffset, ByteLen)]) {
        unreachable!("no request of a block device has several ranges");
    }

    fn cancel(&mut self, _: &mut dyn FnMut(&mut BlkifToken) -> bool) {}

    fn completed_locally(&mut self) {
        self.good += 1;
    }

    fn malformed(&mut self, _: &'static str) {
        self.bad += 1;
    }
}

/// Operations that the disk has executed.
#[derive(Default)]
pub(crate) struct DiskOperations {
    pub flushes: u64,
    /// Secure flag, first byte, bytes.
    pub discards: Vec<(bool, u64, u64)>,
    /// Operation, first byte, bytes, buffer segments.
    pub transfers: Vec<(Op, u64, u64, usize)>,
}

/// A queue with its fixtures.
pub(crate) struct TestBackend {
    pub context: TestContext,
    pub queue: BlkifQueue<TestContext>,
    pub intake: TestIntake,
    pub disk: Mapping,
    pub operations: DiskOperations,
    /// Record operations in `operations`.
    pub recording: bool,
    pub channel: Arc<TestChannel>,
    pub waker: Arc<TestWaker>,
    pub vbd: Arc<Vbd>,
    /// Outcomes of the next requests, which are not executed.
    pub outcomes: VecDeque<Outcome>,
}

impl TestBackend {
    pub(crate) fn new(vbd: &Arc<Vbd>, domain: &Arc<Domain>, front: &Front) -> TestBackend {
        TestBackend::resumed(vbd, domain, front, RingPosition::default(), None, vec![])
    }

    pub(crate) fn resumed(
        vbd: &Arc<Vbd>,
        domain: &Arc<Domain>,
        front: &Front,
        position: RingPosition,
        journal: Option<Journal>,
        replay: Vec<(JournalSlot, RawRequest)>,
    ) -> TestBackend {
        TestBackend::with_grants(vbd, domain.access(), front, position, journal, replay)
    }

    pub(crate) fn with_grants(
        vbd: &Arc<Vbd>,
        grants: Box<dyn GrantAccess>,
        front: &Front,
        position: RingPosition,
        journal: Option<Journal>,
        replay: Vec<(JournalSlot, RawRequest)>,
    ) -> TestBackend {
        let mut context = TestContext::default();
        let (channel, waker) = (Arc::<TestChannel>::default(), Arc::<TestWaker>::default());
        let parts = RingParts {
            ring: front.back_end(position),
            grants,
            channel: Box::new(TestChannelEnd(Arc::clone(&channel))),
            waker: Arc::clone(&waker) as Arc<dyn Wake>,
            journal,
            replay,
            fence: None,
            guard: None,
        };
        let mut queue = BlkifQueue::open(Arc::clone(vbd), parts).unwrap();
        queue.enter(&mut context).unwrap();
        let size = vbd.options().geometry.size.0 as usize;
        let room = queue.depth().into();
        TestBackend {
            context,
            queue,
            intake: TestIntake { space: room, pending: VecDeque::with_capacity(room), good: 0, bad: 0 },
            disk: Mapping::anonymous(size).unwrap(),
            operations: DiskOperations::default(),
            recording: true,
            channel,
            waker,
            vbd: Arc::clone(vbd),
            outcomes: VecDeque::new(),
        }
    }

    /// Handles a wakeup of the queue, as its worker does. Returns true if there was one.
    pub(crate) fn handle_wakeup(&mut self) -> bool {
        let woken = self.waker.0.swap(false, Ordering::AcqRel);
        if woken {
            self.queue.woken(&mut self.context, &mut self.intake, true).unwrap();
            self.publish();
        }
        woken
    }

    /// Pulls a batch.
    pub(crate) fn pull(&mut self) -> PullEnd {
        self.queue.pull(&mut self.context, &mut self.intake)
    }

    /// Pulls until the ring is empty.
    pub(crate) fn pull_all(&mut self) {
        for _ in 0..1000 {
            match self.pull() {
                PullEnd::Empty { .. } => return,
                PullEnd::MoreWaiting { .. } => {}
                PullEnd::Broken(why) => panic!("{why}"),
            }
        }
        panic!("the ring was never empty");
    }

    /// Completes the pending request at `at`.
    pub(crate) fn finish(&mut self, at: usize) {
        let Pending { token, op, start, len, buffer } = self.intake.pending.remove(at).unwrap();
        let outcome = match self.outcomes.pop_front() {
            Some(outcome) => outcome,
            None => self.carry_out(op, start, len, buffer.as_ref()),
        };
        self.intake.space += 1;
        self.queue.finish(&mut self.context, FinishedRequest { token, outcome, buffer }, &mut self.intake);
    }

    fn carry_out(&mut self, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<&Buffer>) -> Outcome {
        let pool = &self.context.0;
        if !in_range(start, len, ByteLen(self.disk.len() as u64)) {
            return Outcome::OutOfRange;
        }
        if let Some(buffer) = buffer {
            assert_eq!(pool.len(buffer), len);
            if self.recording {
                self.operations.transfers.push((op, start.0, len.0, pool.segments(buffer).len()));
            }
        }
        let good = match (op, buffer) {
            (Op::Read, Some(buffer)) => pool.fill_from(buffer, &self.disk, start),
            (Op::Write { .. }, Some(buffer)) => pool.store_to(buffer, &self.disk, start),
            (Op::Flush, None) => {
                self.operations.flushes += 1;
                true
            }
            (Op::Discard { secure }, None) => {
                if self.recording {
                    self.operations.discards.push((secure, start.0, len.0));
                    assert!(self.disk.write(start, &vec![0; len.0 as usize]));
                }
                true
            }
            other => panic!("{other:?}"),
        };
        assert!(good);
        Outcome::Done(len)
    }

    pub(crate) fn publish(&mut self) -> PublishResult {
        let notify = self.queue.publish();
        if notify == PublishResult::Wanted {
            self.queue.notify();
        }
        notify
    }

    /// One turn of a worker: wakeup, one pull, completion of all pending requests, one publish.
    pub(crate) fn turn(&mut self) {
        self.handle_wakeup();
        self.pull();
        while !self.intake.pending.is_empty() {
            self.finish(0);
        }
        self.publish();
    }

    /// Runs turns until there is no work left.
    pub(crate) fn run(&mut self) {
        for _ in 0..1000 {
            self.turn();
            let idle = self.intake.pending.is_empty() && !self.waker.0.load(Ordering::Acquire);
            if idle && self.queue.arm() == ArmResult::Sleepable {
                return;
            }
        }
        panic!("the queue never becomes idle");
    }

    /// Closes the queue.
    pub(crate) fn close(&mut self) {
        assert!(self.intake.pending.is_empty());
        self.queue.close();
        self.queue.leave(&mut self.context);
    }

    pub(crate) fn write_disk(&self, sector: u64, bytes: &[u8]) {
        assert!(self.disk.write(ByteOffset(sector * super::SECTOR), bytes));
    }

    pub(crate) fn read_disk(&self, sector: u64, sectors: u64) -> Vec<u8> {
        let mut bytes = vec![0; (sectors * super::SECTOR) as usize];
        assert!(self.disk.read(ByteOffset(sector * super::SECTOR), &mut bytes));
        bytes
    }
}
