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
pub struct TestLane(pub BufferPool);

impl IoContext for TestLane {
    type Buffer = Buffer;
}

impl PooledContext for TestLane {
    fn pool(&mut self) -> &mut BufferPool {
        &mut self.0
    }
}

/// An event channel that counts calls.
#[derive(Default)]
pub struct Channel {
    pub sent: AtomicU64,
    pub taken: AtomicU64,
    pub unmasked: AtomicU64,
}

struct ChannelEnd(Arc<Channel>);

impl EventChannel for ChannelEnd {
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
pub struct Bell(pub AtomicBool);

impl Wake for Bell {
    fn wake(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A request that is admitted and not completed.
pub struct Pending {
    pub token: BlkifToken,
    pub op: Op,
    pub start: ByteOffset,
    pub len: ByteLen,
    pub buffer: Option<Buffer>,
}

/// The engine's intake.
pub struct Door {
    room: usize,
    pub pending: VecDeque<Pending>,
    pub good: u64,
    pub bad: u64,
}

impl Intake<BlkifToken, Buffer> for Door {
    fn room(&self) -> usize {
        self.room
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
        self.room = self.room.checked_sub(1).expect("the queue has checked for space");
        self.pending.push_back(Pending { token, op, start, len, buffer });
    }

    fn admit_parts(&mut self, _: BlkifToken, _: DiskSlot, _: Op, _: &[(ByteOffset, ByteLen)]) {
        unreachable!("no request of a block device has several ranges");
    }

    fn cancel(&mut self, _: &mut dyn FnMut(&mut BlkifToken) -> bool) {}

    fn completed_locally(&mut self, well_formed: bool) {
        if well_formed {
            self.good += 1;
        } else {
            self.bad += 1;
        }
    }
}

/// Operations that the disk has executed.
#[derive(Default)]
pub struct Done {
    pub flushes: u64,
    /// Secure flag, first byte, bytes.
    pub discards: Vec<(bool, u64, u64)>,
    /// Operation, first byte, bytes, buffer segments.
    pub transfers: Vec<(Op, u64, u64, usize)>,
}

/// A queue with its fixtures.
pub struct Back {
    pub lane: TestLane,
    pub queue: BlkifQueue<TestLane>,
    pub door: Door,
    pub disk: Mapping,
    pub done: Done,
    /// Record operations in `done`.
    pub noting: bool,
    pub channel: Arc<Channel>,
    pub bell: Arc<Bell>,
    pub vbd: Arc<Vbd>,
    /// Outcomes of the next requests, which are not executed.
    pub outcomes: VecDeque<Outcome>,
}

impl Back {
    pub fn new(vbd: &Arc<Vbd>, domain: &Arc<Domain>, front: &Front) -> Back {
        Back::resumed(vbd, domain, front, RingPosition::default(), None, vec![])
    }

    pub fn resumed(
        vbd: &Arc<Vbd>,
        domain: &Arc<Domain>,
        front: &Front,
        position: RingPosition,
        journal: Option<Journal>,
        replay: Vec<(JournalSlot, RawRequest)>,
    ) -> Back {
        Back::with_grants(vbd, domain.access(), front, position, journal, replay)
    }

    pub fn with_grants(
        vbd: &Arc<Vbd>,
        grants: Box<dyn GrantAccess>,
        front: &Front,
        position: RingPosition,
        journal: Option<Journal>,
        replay: Vec<(JournalSlot, RawRequest)>,
    ) -> Back {
        let mut lane = TestLane::default();
        let (channel, bell) = (Arc::<Channel>::default(), Arc::<Bell>::default());
        let parts = RingParts {
            ring: front.back_end(position),
            grants,
            channel: Box::new(ChannelEnd(Arc::clone(&channel))),
            waker: Arc::clone(&bell) as Arc<dyn Wake>,
            journal,
            replay,
            keep: None,
        };
        let queue = vbd.queue(&mut lane, parts).unwrap();
        let size = vbd.options().geometry.size.0 as usize;
        let room = queue.depth().into();
        Back {
            lane,
            queue,
            door: Door { room, pending: VecDeque::with_capacity(room), good: 0, bad: 0 },
            disk: Mapping::anonymous(size).unwrap(),
            done: Done::default(),
            noting: true,
            channel,
            bell,
            vbd: Arc::clone(vbd),
            outcomes: VecDeque::new(),
        }
    }

    /// Handles a wakeup of the queue, as its worker does. Returns true if there was one.
    pub fn read_mail(&mut self) -> bool {
        let woken = self.bell.0.swap(false, Ordering::AcqRel);
        if woken {
            self.queue.woken(&mut self.lane, &mut self.door, true).unwrap();
            self.publish();
        }
        woken
    }

    pub fn pull(&mut self) -> PullEnd {
        self.queue.pull(&mut self.lane, &mut self.door)
    }

    /// Pulls until the ring is empty.
    pub fn pull_all(&mut self) {
        for _ in 0..1000 {
            match self.pull() {
                PullEnd::Empty => return,
                PullEnd::MoreWaiting => {}
                PullEnd::Broken(why) => panic!("{why}"),
            }
        }
        panic!("the ring was never empty");
    }

    /// Completes the pending request at `at`.
    pub fn finish(&mut self, at: usize) {
        let Pending { token, op, start, len, buffer } = self.door.pending.remove(at).unwrap();
        let outcome = match self.outcomes.pop_front() {
            Some(outcome) => outcome,
            None => self.carry_out(op, start, len, buffer.as_ref()),
        };
        self.door.room += 1;
        self.queue.finish(&mut self.lane, FinishedRequest { token, outcome, buffer }, &mut self.door);
    }

    fn carry_out(&mut self, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<&Buffer>) -> Outcome {
        let pool = &self.lane.0;
        if !in_range(start, len, ByteLen(self.disk.len() as u64)) {
            return Outcome::OutOfRange;
        }
        if let Some(buffer) = buffer {
            assert_eq!(pool.len(buffer), len);
            if self.noting {
                self.done.transfers.push((op, start.0, len.0, pool.segments(buffer).len()));
            }
        }
        let good = match (op, buffer) {
            (Op::Read, Some(buffer)) => pool.fill_from(buffer, &self.disk, start),
            (Op::Write { .. }, Some(buffer)) => pool.store_to(buffer, &self.disk, start),
            (Op::Flush, None) => {
                self.done.flushes += 1;
                true
            }
            (Op::Discard { secure }, None) => {
                if self.noting {
                    self.done.discards.push((secure, start.0, len.0));
                    assert!(self.disk.write(start, &vec![0; len.0 as usize]));
                }
                true
            }
            other => panic!("{other:?}"),
        };
        assert!(good);
        Outcome::Done(len)
    }

    pub fn publish(&mut self) -> PublishResult {
        let notify = self.queue.publish();
        if notify == PublishResult::Wanted {
            self.queue.notify();
        }
        notify
    }

    /// One turn of a worker: wakeup, one pull, completion of all pending requests, one publish.
    pub fn turn(&mut self) {
        self.read_mail();
        self.pull();
        while !self.door.pending.is_empty() {
            self.finish(0);
        }
        self.publish();
    }

    /// Runs turns until there is no work left.
    pub fn run(&mut self) {
        for _ in 0..1000 {
            self.turn();
            let idle = self.door.pending.is_empty() && !self.bell.0.load(Ordering::Acquire);
            if idle && self.queue.arm() == ArmResult::Sleepable {
                return;
            }
        }
        panic!("the queue never becomes idle");
    }

    /// Closes the queue.
    pub fn close(&mut self) {
        assert!(self.door.pending.is_empty());
        self.queue.close(&mut self.lane);
    }

    pub fn write_disk(&self, sector: u64, bytes: &[u8]) {
        assert!(self.disk.write(ByteOffset(sector * super::SECTOR), bytes));
    }

    pub fn read_disk(&self, sector: u64, sectors: u64) -> Vec<u8> {
        let mut bytes = vec![0; (sectors * super::SECTOR) as usize];
        assert!(self.disk.read(ByteOffset(sector * super::SECTOR), &mut bytes));
        bytes
    }
}
