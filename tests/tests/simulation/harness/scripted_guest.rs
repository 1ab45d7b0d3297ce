//! A guest whose queue has no ring: its requests reach the engine unchanged, so that the engine alone is tested.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, DiskSlot, FinishedRequest, GuestQueue, Intake, Op, Outcome, PublishResult, PullEnd,
    Wake,
};
use mqblk_engine::{QueueDisk, SteppedQueue, SteppedWorker, UringContext};
use mqblk_memory::{Buffer, GuestAddress, GuestMemory, MemoryShare};
use mqblk_tests::crash::oracle::SECTOR;
use mqblk_tests::load_queues::SectorRange;
use mqblk_tests::stepped::{guest_memory, polled_queue};
use rand::RngExt;
use rand::rngs::SmallRng;

use super::disk_model::{DiskModel, contents, sectors};

/// Requests in flight.
pub(crate) const DEPTH: u16 = 64;
/// Longest read or write, in sectors.
pub(crate) const MOST_SECTORS: u32 = 8;
/// Guest memory of one request in flight: its data, and gaps.
const AREA: u64 = 2 * MOST_SECTORS as u64 * SECTOR as u64;
/// Most disks of a guest.
pub(crate) const MOST_DISKS: usize = 4;

/// A request, and its outcome.
#[derive(Clone, Debug)]
pub(crate) struct GuestRequest {
    /// Identifies it, and the data that it writes.
    pub id: u64,
    pub disk: u16,
    pub op: Op,
    /// One range of a read or write, none of a flush.
    pub ranges: Vec<SectorRange>,
    /// A write that is read back in a second step.
    pub read_back: bool,
    pub second_step: bool,
    /// True if it was cancelled.
    pub chosen: bool,
    /// True if its disk was being closed.
    pub homeless: bool,
    /// Segments of its data.
    segments: Vec<(u64, u32)>,
    area: u64,
}

impl GuestRequest {
    pub(crate) fn new(id: u64, disk: u16, op: Op, ranges: Vec<SectorRange>) -> GuestRequest {
        GuestRequest {
            id,
            disk,
            op,
            ranges,
            read_back: false,
            second_step: false,
            chosen: false,
            homeless: false,
            segments: vec![],
            area: 0,
        }
    }

    /// Returns the identifier of its content: 0 for zeroes.
    fn content(&self) -> u64 {
        if self.op.has_data() { self.id } else { 0 }
    }

    fn bytes(&self) -> u64 {
        sectors(&self.ranges).count() as u64 * SECTOR as u64
    }
}

/// The requests to cancel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CancelOrder {
    OfDisk(u16),
    One(u64),
    /// One in *n* requests.
    Share(u64),
    All,
}

impl CancelOrder {
    fn matches(self, request: &GuestRequest) -> bool {
        match self {
            CancelOrder::OfDisk(disk) => request.disk == disk,
            CancelOrder::One(id) => request.id == id,
            CancelOrder::Share(of) => request.id.is_multiple_of(of),
            CancelOrder::All => true,
        }
    }
}

/// State that the guest shares with the worker's queue.
pub(crate) struct GuestSide {
    memory: Arc<GuestMemory>,
    /// Requests not pulled yet.
    waiting: VecDeque<GuestRequest>,
    completed: Vec<(GuestRequest, Outcome)>,
    /// Free areas of its memory.
    areas: Vec<u64>,
    orders: Vec<CancelOrder>,
    /// Disks that are being closed, or are not open.
    pub away: [bool; MOST_DISKS],
    /// True if nothing is in flight: no buffer may be in use.
    audit: bool,
    audited: u32,
}

/// The guest of one queue.
pub(crate) struct ScriptedGuest {
    side: Arc<Mutex<GuestSide>>,
    waker: Option<Arc<dyn Wake>>,
    queue: Option<SteppedQueue>,
}

impl ScriptedGuest {
    pub(crate) fn new() -> ScriptedGuest {
        let side = GuestSide {
            memory: guest_memory(u64::from(DEPTH) * AREA),
            waiting: VecDeque::new(),
            completed: vec![],
            areas: (0..u64::from(DEPTH)).map(|at| at * AREA).collect(),
            orders: vec![],
            away: [false; MOST_DISKS],
            audit: false,
            audited: 0,
        };
        ScriptedGuest { side: Arc::new(Mutex::new(side)), waker: None, queue: None }
    }

    pub(crate) fn side(&self) -> MutexGuard<'_, GuestSide> {
        self.side.lock().unwrap()
    }

    /// Attaches its queue. A `restless` one cancels requests by itself now and then.
    pub(crate) fn attach(
        &mut self,
        worker: &mut SteppedWorker,
        disks: Vec<QueueDisk>,
        random: SmallRng,
        restless: bool,
    ) {
        let side = Arc::clone(&self.side);
        let attached = worker.attach(polled_queue(disks), |waker| {
            self.waker = Some(Arc::clone(waker));
            let share = MemoryShare::new(Arc::clone(&side.lock().unwrap().memory), DEPTH.into());
            Ok(ScriptedQueue { side, share, random, restless, finished: vec![] })
        });
        self.queue = Some(attached.unwrap());
    }

    /// Returns its queue if it is attached, as far as the guest knows.
    pub(crate) fn queue(&self) -> Option<SteppedQueue> {
        self.queue
    }

    /// Notices that the queue was detached. Its pulled requests are complete then; the others wait for the next queue.
    pub(crate) fn notice_detached(&mut self, worker: &mut SteppedWorker) {
        if self.queue.is_some_and(|queue| !worker.serves(queue)) {
            self.queue = None;
            let side = self.side();
            assert_eq!(side.areas.len() + side.waiting.len(), usize::from(DEPTH), "a detached queue has lost requests");
        }
    }

    /// Puts a request on the queue. Returns false if there is no room, or if the model allows no overlap.
    pub(crate) fn send(&self, mut request: GuestRequest, model: &mut DiskModel, random: &mut SmallRng) -> bool {
        let mut side = self.side();
        let Some(area) = side.areas.pop() else { return false };
        let (id, ranges) = (request.id, &request.ranges);
        let sent = match request.op.modifies() {
            true => model.send_write(id, request.content(), ranges),
            false => model.send_read(id, ranges),
        };
        if !sent {
            side.areas.push(area);
            return false;
        }
        request.area = area;
        if request.op.has_data() {
            // In a few segments, with and without gaps between them.
            let (mut at, mut left) = (area, request.bytes());
            while left > 0 {
                let len = random.random_range(1..=left / SECTOR as u64) * SECTOR as u64;
                request.segments.push((at, len as u32));
                at += len + random.random_range(0..3_u64) / 2 * SECTOR as u64;
                left -= len;
            }
            let mut bytes = contents(id, &request.ranges);
            if request.op == Op::Read {
                bytes.fill(0xee);
            }
            let mut bytes = &bytes[..];
            for (at, len) in &request.segments {
                side.memory
                    .write(GuestAddress(*at), bytes.split_off(..*len as usize).expect("enough"))
                    .expect("mapped");
            }
        }
        side.waiting.push_back(request);
        true
    }

    /// Cancels pulled requests.
    pub(crate) fn cancel(&self, order: CancelOrder) {
        self.side().orders.push(order);
        self.wake();
    }

    /// Checks at the next wake that no buffer is in use.
    pub(crate) fn audit(&self) {
        self.side().audit = true;
        self.wake();
    }

    /// Returns the number of these checks.
    pub(crate) fn audited(&self) -> u32 {
        self.side().audited
    }

    fn wake(&self) {
        self.waker.as_ref().expect("an attached queue").wake();
    }

    /// Takes the completed requests.
    pub(crate) fn take_completed(&self) -> Vec<(GuestRequest, Outcome)> {
        let mut side = self.side();
        let completed = std::mem::take(&mut side.completed);
        side.areas.extend(completed.iter().map(|(request, _)| request.area));
        completed
    }

    /// Returns the data of a request that was just taken.
    pub(crate) fn data(&self, request: &GuestRequest) -> Vec<u8> {
        let side = self.side();
        let segment = |(at, len): &(u64, u32)| {
            let mut bytes = vec![0; *len as usize];
            side.memory.read(GuestAddress(*at), &mut bytes).expect("mapped");
            bytes
        };
        request.segments.iter().flat_map(segment).collect()
    }
}

/// The worker's end of the queue.
struct ScriptedQueue {
    side: Arc<Mutex<GuestSide>>,
    share: MemoryShare,
    random: SmallRng,
    restless: bool,
    finished: Vec<(GuestRequest, Outcome)>,
}

impl ScriptedQueue {
    fn take(
        &mut self,
        context: &mut UringContext,
        into: &mut impl Intake<GuestRequest, Buffer>,
        most: usize,
    ) -> PullEnd {
        let most = most.min(into.room());
        for taken in 0..most {
            let mut side = self.side.lock().unwrap();
            let Some(mut request) = side.waiting.pop_front() else { return PullEnd::Empty { taken } };
            request.homeless = side.away[usize::from(request.disk)];
            drop(side);
            self.admit(context, into, request);
        }
        PullEnd::of(most, !self.side.lock().unwrap().waiting.is_empty())
    }

    fn admit(&self, context: &mut UringContext, into: &mut impl Intake<GuestRequest, Buffer>, request: GuestRequest) {
        let (disk, op) = (DiskSlot(request.disk), if request.second_step { Op::Read } else { request.op });
        let bytes = |sectors: u64| sectors * SECTOR as u64;
        let range = |(first, count): &SectorRange| (ByteOffset(bytes(*first)), ByteLen(bytes(u64::from(*count))));
        match op {
            Op::Flush => into.admit(request, disk, op, ByteOffset(0), ByteLen::ZERO, None),
            op if op.has_data() => {
                let buffer = context.buffers.take(self.share.lease());
                for (at, len) in &request.segments {
                    context.buffers.push(&buffer, GuestAddress(*at), *len, 64).expect("mapped");
                }
                let (start, len) = range(&request.ranges[0]);
                into.admit(request, disk, op, start, len, Some(buffer));
            }
            op => {
                let parts: Vec<_> = request.ranges.iter().map(range).collect();
                into.admit_parts(request, disk, op, &parts);
            }
        }
    }

    fn cancel(into: &mut impl Intake<GuestRequest, Buffer>, order: CancelOrder) {
        into.cancel(&mut |request| {
            let chosen = order.matches(request);
            request.chosen |= chosen;
            chosen
        });
    }

    fn cancel_one_time_in(&mut self, times: u32, into: &mut impl Intake<GuestRequest, Buffer>) {
        if self.restless && self.random.random_ratio(1, times) {
            Self::cancel(into, CancelOrder::Share(self.random.random_range(2..6)));
        }
    }
}

impl GuestQueue for ScriptedQueue {
    type Token = GuestRequest;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        DEPTH
    }

    fn enter(&mut self, context: &mut UringContext) -> Result<(), String> {
        self.share.enter(context)
    }

    fn leave(&mut self, context: &mut UringContext) {
        self.share.leave(context);
    }

    fn pull<I: Intake<GuestRequest, Buffer>>(&mut self, context: &mut UringContext, into: &mut I) -> PullEnd {
        let most = self.random.random_range(1..=16);
        let pulled = self.take(context, into, most);
        self.cancel_one_time_in(40, into);
        pulled
    }

    fn finish<I: Intake<GuestRequest, Buffer>>(
        &mut self,
        context: &mut UringContext,
        done: FinishedRequest<GuestRequest, Buffer>,
        into: &mut I,
    ) {
        let FinishedRequest { token: mut request, outcome, buffer } = done;
        assert_eq!(buffer.is_some(), request.op.has_data(), "{request:?}");
        if let Some(buffer) = buffer {
            // The request's own buffer, not a merged one.
            let len = context.buffers.len(&buffer).0;
            assert!(!context.buffers.is_merged(&buffer) && len == request.bytes(), "{request:?}");
            context.buffers.release(buffer);
        }
        self.cancel_one_time_in(200, into);
        if request.read_back && !request.second_step && outcome.is_done() {
            request.second_step = true;
            request.homeless |= self.side.lock().unwrap().away[usize::from(request.disk)];
            self.admit(context, into, request);
            return;
        }
        self.finished.push((request, outcome));
    }

    fn woken<I: Intake<GuestRequest, Buffer>>(
        &mut self,
        context: &mut UringContext,
        into: &mut I,
        running: bool,
    ) -> Result<(), &'static str> {
        assert!(self.finished.is_empty(), "all that was finished before has been published");
        if running && self.random.random_bool(0.5) {
            self.take(context, into, usize::MAX);
        }
        let orders = std::mem::take(&mut self.side.lock().unwrap().orders);
        orders.into_iter().for_each(|order| Self::cancel(into, order));
        let mut side = self.side.lock().unwrap();
        if std::mem::take(&mut side.audit) {
            assert_eq!(context.buffers.buffers_in_use(self.share.lease()), 0, "buffers were left behind");
            side.audited += 1;
        }
        Ok(())
    }

    fn abandon(&mut self, _: &mut UringContext, _: GuestRequest, _: Option<Buffer>) {}

    fn publish(&mut self) -> PublishResult {
        self.side.lock().unwrap().completed.append(&mut self.finished);
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::WorkWaiting
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}
