//! A virtio device whose backend can be killed: stepped workers over real queues, real rings with their in-flight
//! tables, and a real engine. [`World`] holds the state that survives the backend, [`Host`] the backend's own.

pub(crate) mod port;
pub(crate) mod store;

use std::sync::{Arc, Mutex, PoisonError};

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Call, DiskSlot, FinishedRequest, GuestQueue, Intake, Op, PublishResult, PullEnd,
    Wake,
};
use mqblk_engine::{AnyDisk, PlugOptions, QueueDisk, SteppedQueue, SteppedWorker, UringContext};
use mqblk_memory::{Buffer, GuestAddress, GuestMemory, MemoryShare, SharedWords};
use mqblk_ring::driver_ring::DriverRing;
use mqblk_ring::virtqueue::{DeviceRing, MappedRing, RingAddresses, RingFormat};
use mqblk_tests::stepped::{guest_memory, polled_queue, start_workers};
use mqblk_virtio::{QueueResources, QueueRole, VirtioDevice};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use self::store::{Store, StoreDisk};
use crate::harness::seeds::counters;
use crate::harness::storage::{Stinginess, queue_disk};
use crate::killable::{KillSwitch, Killable, killable_disk};

/// Entries of each ring.
pub(crate) const RING: u16 = 128;
/// Bytes of each ring's area: the ring, and its table.
pub(crate) const AREA: u64 = 0x1_0000;
/// Offset of the table in it.
const TABLE: u64 = 0xc000;
const EVENT_IDX: u64 = 1 << 29;
/// Turns after which each worker has replayed all requests.
const BEGUN: u32 = 20;
/// Turns after which a stopping backend has stopped.
const TURNS: u32 = 50_000;

/// The guest polls.
struct Silent;

impl Call for Silent {
    fn call(&self) {}
}

/// Keeps the tokens of a killed queue until the whole backend is dropped: a killed process drops nothing that surviving
/// workers could observe.
type Remains<T> = Arc<Mutex<Vec<T>>>;

/// A token held by a queue that may be killed.
struct Held<'a, T>(Option<T>, &'a Mutex<Vec<T>>);

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        self.1.lock().unwrap_or_else(PoisonError::into_inner).extend(self.0.take());
    }
}

/// Passes a kill point while holding a token.
fn moment<T>(kill: &KillSwitch, remains: &Mutex<Vec<T>>, token: T) -> T {
    let mut held = Held(Some(token), remains);
    kill.kill_point();
    held.0.take().expect("it is there until here")
}

/// A queue that can be killed within a pull, and before and after any other call from the engine.
struct MortalQueue<Q: GuestQueue>(Killable<Q>, Remains<Q::Token>);

struct MortalIntake<'a, T, I>(&'a mut I, Arc<KillSwitch>, Remains<T>);

impl<T, I: Intake<T, Buffer>> Intake<T, Buffer> for MortalIntake<'_, T, I> {
    fn room(&self) -> usize {
        self.0.room()
    }
    fn admit(&mut self, token: T, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<Buffer>) {
        let token = moment(&self.1, &self.2, token);
        self.0.admit(token, disk, op, start, len, buffer);
    }
    fn admit_parts(&mut self, token: T, disk: DiskSlot, op: Op, parts: &[(ByteOffset, ByteLen)]) {
        let token = moment(&self.1, &self.2, token);
        self.0.admit_parts(token, disk, op, parts);
    }
    fn cancel(&mut self, pick: &mut dyn FnMut(&mut T) -> bool) {
        self.1.kill_point();
        self.0.cancel(pick);
    }
    fn completed_locally(&mut self) {
        self.1.kill_point();
        self.0.completed_locally();
    }
    fn malformed(&mut self, why: &'static str) {
        self.1.kill_point();
        self.0.malformed(why);
    }
}

impl<Q: GuestQueue<Context = UringContext, Token: Send>> GuestQueue for MortalQueue<Q> {
    type Token = Q::Token;
    type Position = Q::Position;
    type Context = UringContext;

    fn depth(&self) -> u16 {
        self.0.0.depth()
    }
    fn enter(&mut self, context: &mut UringContext) -> Result<(), String> {
        self.0.0.enter(context)
    }
    fn leave(&mut self, context: &mut UringContext) {
        self.0.0.leave(context);
    }
    fn close(&mut self) {
        self.0.0.close();
    }
    fn pull<I: Intake<Q::Token, Buffer>>(&mut self, context: &mut UringContext, into: &mut I) -> PullEnd {
        let (kill, remains) = (Arc::clone(&self.0.1), Arc::clone(&self.1));
        self.0.with(|queue| queue.pull(context, &mut MortalIntake(into, kill, remains)))
    }
    fn finish<I: Intake<Q::Token, Buffer>>(
        &mut self,
        context: &mut UringContext,
        mut done: FinishedRequest<Q::Token, Buffer>,
        into: &mut I,
    ) {
        let Killable(queue, kill) = &mut self.0;
        done.token = moment(kill, &self.1, done.token);
        queue.finish(context, done, &mut MortalIntake(into, Arc::clone(kill), Arc::clone(&self.1)));
        kill.kill_point();
    }
    fn abandon(&mut self, context: &mut UringContext, mut token: Q::Token, buffer: Option<Buffer>) {
        token = moment(&self.0.1, &self.1, token);
        self.0.0.abandon(context, token, buffer);
    }
    fn woken<I: Intake<Q::Token, Buffer>>(
        &mut self,
        context: &mut UringContext,
        into: &mut I,
        running: bool,
    ) -> Result<(), &'static str> {
        let (kill, remains) = (Arc::clone(&self.0.1), Arc::clone(&self.1));
        self.0.with(|queue| queue.woken(context, &mut MortalIntake(into, kill, remains), running))
    }
    fn blocked(&self) -> usize {
        self.0.0.blocked()
    }
    fn publish(&mut self) -> PublishResult {
        self.0.with(Q::publish)
    }
    fn notify(&mut self) {
        self.0.0.notify();
    }
    fn arm(&mut self) -> ArmResult {
        self.0.0.arm()
    }
    fn disarm(&mut self) {
        self.0.0.disarm();
    }
    fn position(&self) -> Q::Position {
        self.0.0.position()
    }
}

/// A device whose queues can be killed while they hold tokens.
pub(crate) trait MortalDevice: VirtioDevice<UringContext, Queue: GuestQueue<Token: Send>> {}

impl<D: VirtioDevice<UringContext, Queue: GuestQueue<Token: Send>>> MortalDevice for D {}

/// A function that returns a device over disks.
pub(crate) type MakeDevice<D> = Box<dyn Fn(&[Arc<AnyDisk>]) -> Arc<D>>;

/// The parameters of a world.
pub(crate) struct Shape<D> {
    /// Returns a backend's device.
    pub make: MakeDevice<D>,
    /// The first driver has taken all initial notifications.
    pub heard: Box<dyn Fn()>,
    pub workers: usize,
    pub disks: usize,
    pub sectors: u64,
    pub plug: PlugOptions,
    /// Bytes of guest memory besides the rings.
    pub memory: u64,
    /// Format of the rings.
    pub format: RingFormat,
}

counters! {
    /// Counters of the simulation's coverage.
    pub(crate) struct Counts {
        kills,
        kills_in_midst,
        /// Of those, kills that other workers survived for a while.
        outlived,
        stops,
        replayed,
        /// Of those, with a recorded step.
        noted,
    }
}

/// The state that survives the backend: the guest's memory with its rings, the in-flight tables, and the storage.
pub(crate) struct World<D: MortalDevice> {
    pub memory: Arc<GuestMemory>,
    pub rings: Vec<DriverRing>,
    pub stores: Vec<Arc<Store>>,
    pub stinginess: Stinginess,
    pub counts: Counts,
    disks: Vec<QueueDisk>,
    kill: Arc<KillSwitch>,
    shape: Shape<D>,
    /// The features that the driver accepts: all.
    features: u64,
    host: Option<Host<D>>,
    /// The guest's positions in the rings.
    pub answers: u64,
    pub random: SmallRng,
}

/// A backend.
struct Host<D> {
    device: Arc<D>,
    workers: Vec<SteppedWorker>,
    seats: Vec<(usize, SteppedQueue)>,
    /// Workers that were killed before the others.
    dead: Vec<bool>,
    /// Steps until the others are killed too.
    left: Option<u32>,
}

fn places(ring: usize) -> RingAddresses {
    let start = ring as u64 * AREA;
    RingAddresses { desc: GuestAddress(start), avail: GuestAddress(start + 0x4000), used: GuestAddress(start + 0x8000) }
}

impl<D: MortalDevice> World<D> {
    /// Returns a guest without a backend.
    pub(crate) fn new(shape: Shape<D>, seed: u64) -> World<D> {
        let stores: Vec<_> = (0..shape.disks as u64).map(|at| Store::new(shape.sectors, seed ^ at << 32)).collect();
        let (kill, stinginess) = (KillSwitch::new(), Stinginess::new(seed));
        let disk = |(slot, store): (u16, &Arc<Store>)| {
            let inner: Arc<AnyDisk> = Arc::new(StoreDisk(Arc::clone(store)));
            let limits = inner.limits();
            let stingy = stinginess.disk(inner, limits, shape.plug.merge_bytes);
            queue_disk(slot, &killable_disk(stingy, &kill), shape.plug)
        };
        let disks: Vec<_> = (0..).zip(&stores).map(disk).collect();
        let device = (shape.make)(&disks.iter().map(|disk| Arc::clone(&disk.disk)).collect::<Vec<_>>());
        let (queues, features) = (device.num_queues(), device.features());
        let size = u64::from(queues) * AREA + shape.memory;
        let memory = guest_memory(size);
        let driver = |ring| DriverRing::new(&memory, &places(ring), RING, shape.format, true, None).expect("a ring");
        let rings = (0..usize::from(queues)).map(driver).collect();
        let random = SmallRng::seed_from_u64(seed);
        World {
            memory,
            rings,
            stores,
            stinginess,
            counts: Counts::default(),
            disks,
            kill,
            shape,
            features,
            host: None,
            answers: 0,
            random,
        }
    }

    fn words(&self, ring: usize) -> SharedWords {
        let words = MappedRing::inflight_bytes(RING, self.shape.format) / 8;
        self.memory.shared_words(GuestAddress(ring as u64 * AREA + TABLE), words as usize).expect("a table")
    }

    /// Returns the queues that were served before.
    fn used(&self) -> Vec<u16> {
        let version = |ring: usize| {
            let mut bytes = [0; 8];
            self.memory.read(GuestAddress(ring as u64 * AREA + TABLE + 8), &mut bytes).expect("a table");
            u64::from_ne_bytes(bytes)
        };
        (0..self.rings.len()).filter(|ring| version(*ring) != 0).map(|ring| ring as u16).collect()
    }

    /// Starts a backend that resumes the queues in any order. It may be killed meanwhile.
    fn start_backend(&mut self) {
        let used = self.used();
        if !used.is_empty() && self.random.random_ratio(1, 5) {
            self.kill.arm(self.random.random_range(0..20));
        }
        let disks: Vec<_> = self.disks.iter().map(|disk| Arc::clone(&disk.disk)).collect();
        let device = (self.shape.make)(&disks);
        // As a session does when a driver connects.
        device.reset();
        device.expect_replay(&used);
        device.set_features(self.features);
        device.driver_started(!used.is_empty());
        if used.is_empty() {
            (self.shape.heard)();
        }
        let workers = self.shape.workers;
        let host =
            Host { device, workers: start_workers(workers), seats: vec![], dead: vec![false; workers], left: None };
        self.host = Some(host);
        let mut order: Vec<usize> = (0..self.rings.len()).collect();
        while !order.is_empty() {
            let ring = order.swap_remove(self.random.random_range(0..order.len()));
            if KillSwitch::run(|| self.attach(ring)).is_none() {
                self.counts.kills_in_midst += 1;
                return self.drop_killed();
            }
            for _ in 0..self.random.random_range(0..4) {
                self.turn();
                if self.host.as_ref().is_none_or(|host| host.left.is_some()) {
                    return;
                }
            }
        }
    }

    fn attach(&mut self, index: usize) {
        self.kill.kill_point();
        let table = self.words(index);
        let Some(host) = &mut self.host else { return };
        let format = self.shape.format;
        let ring = MappedRing::resolve(&self.memory, &places(index), RING, format).expect("a ring");
        let (ring, forgotten) =
            DeviceRing::tracked(ring, format.first_base(), true, table).expect("a table that was killed is good");
        assert_eq!(forgotten, 0);
        self.kill.kill_point();
        self.counts.replayed += ring.replays() as u64;
        self.counts.noted += ring.recorded_steps() as u64;
        let requests = host.device.queue_role(index as u16) == QueueRole::Requests;
        let options = polled_queue(if requests { self.disks.clone() } else { vec![] });
        let worker = index % host.workers.len();
        let (device, memory, kill) = (&host.device, &self.memory, &self.kill);
        let features = self.features | EVENT_IDX;
        let seat = host.workers[worker].attach(options, |waker| {
            let share = MemoryShare::new(Arc::clone(memory), RING.into());
            let waker: Arc<dyn Wake> = Arc::new(Killable(Arc::clone(waker), Arc::clone(kill)));
            let parts = QueueResources { ring, share, call: Some(Box::new(Silent)), features, waker };
            let queue = device.create_queue(index as u16, parts);
            Ok(MortalQueue(Killable(queue, Arc::clone(kill)), Remains::default()))
        });
        host.seats.push((worker, seat.expect("a seat")));
    }

    /// Runs a turn of a live worker. After its kill, others may survive for a while.
    fn turn(&mut self) {
        let Some(host) = &mut self.host else { return };
        let worker = self.random.random_range(0..host.workers.len());
        if host.dead[worker] || KillSwitch::run(|| host.workers[worker].turn()).is_some() {
            return;
        }
        host.dead[worker] = true;
        if host.left.is_none() {
            self.counts.kills_in_midst += 1;
            let outlived = host.workers.len() > 1 && self.random.random();
            self.counts.outlived += u64::from(outlived);
            host.left = Some(if outlived { self.random.random_range(1..60) } else { 0 });
        }
    }

    /// Runs one step of the world: mostly a turn.
    pub(crate) fn step(&mut self) {
        let Some(host) = &mut self.host else { return self.start_backend() };
        match &mut host.left {
            Some(0) => return self.drop_killed(),
            Some(left) => {
                *left -= 1;
                return self.turn();
            }
            None => {}
        }
        // Until a request was completed, the driver counts as a new one.
        if self.answers == 0 {
            return self.turn();
        }
        match self.random.random_range(0..1000) {
            0..3 => {
                self.counts.kills += 1;
                self.drop_killed();
            }
            3..13 => self.kill.arm(self.random.random_range(0..150)),
            13..15 => self.stop(),
            _ => self.turn(),
        }
    }

    /// Stops the backend: it stops pulling and completes its requests.
    fn stop(&mut self) {
        let Some(Host { workers, seats, .. }) = &mut self.host else { return };
        let drained = KillSwitch::run(|| {
            // A backend that stops before all replays may wait, as long as it is allowed to, for a command that has
            // compared.
            (0..BEGUN).for_each(|_| workers.iter_mut().for_each(|worker| _ = worker.turn()));
            seats.iter().for_each(|(worker, seat)| workers[*worker].drain(*seat));
            for _ in 0..TURNS {
                workers.iter_mut().for_each(|worker| _ = worker.turn());
                if seats.iter().all(|(worker, seat)| !workers[*worker].serves(*seat)) {
                    return;
                }
            }
            panic!("the back end does not stop");
        });
        match drained {
            Some(()) => self.counts.stops += 1,
            None => self.counts.kills_in_midst += 1,
        }
        self.drop_killed();
    }

    /// Drops the killed backend, and checks that this changes no shared memory.
    fn drop_killed(&mut self) {
        let traces = |memory: &GuestMemory| {
            let mut bytes = vec![0; self.rings.len() * AREA as usize];
            memory.read(GuestAddress(0), &mut bytes).expect("the rings");
            bytes
        };
        let before = traces(&self.memory);
        self.kill.arm(KillSwitch::NEVER);
        self.host = None;
        assert!(before == traces(&self.memory), "it was killed, not shut down");
        self.stores.iter().for_each(|store| store.killed());
    }
}
