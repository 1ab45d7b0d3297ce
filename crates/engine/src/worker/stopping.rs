//! Disks that stop and are resumed, or that retry: the worker is stepped, and the storage fails as the test says.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, Errno, FinishedRequest, GuestQueue, Intake, Op,
    Outcome, PublishResult, PullEnd, Request,
};

use super::*;
use crate::errors::{DiskHealth, ErrorPolicy, OnError, OnNoSpace};
use crate::mailbox::Mailbox;
use crate::options::{MergeMode, PlugOptions};
use crate::poll::PollPolicy;
use crate::queue_options::QueueOptions;
use crate::request::Buffer;
use crate::resume::Resume;
use crate::trial::TrialDisk;

pub(super) const WRITE: Op = Op::Write { fua: false };
pub(super) const DISCARD: Op = Op::Discard { secure: false };
pub(super) const EIO: Outcome = Outcome::Failed(Errno(5));
pub(super) const SECTOR: u64 = 512;

/// A guest: its requests and their completions.
#[derive(Default)]
pub(super) struct Guest {
    pub(super) waiting: VecDeque<(Op, u64)>,
    pub(super) completed: Vec<(u64, Outcome)>,
    abandoned: Vec<u64>,
    /// The request to cancel at the next wake.
    pub(super) cancel: Option<u64>,
}

pub(super) type SharedGuest = Arc<Mutex<Guest>>;

/// A queue whose tokens are the sectors where the requests start.
pub(super) struct Queue(SharedGuest);

impl GuestQueue for Queue {
    type Token = u64;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        64
    }

    fn enter(&mut self, _: &mut UringContext) -> Result<(), String> {
        Ok(())
    }

    fn leave(&mut self, _: &mut UringContext) {}

    fn pull<I: Intake<u64, Buffer>>(&mut self, _: &mut UringContext, into: &mut I) -> PullEnd {
        let waiting = std::mem::take(&mut self.0.lock().unwrap().waiting);
        let taken = waiting.len();
        for (op, sector) in waiting {
            let (start, len) = (ByteOffset(sector * SECTOR), ByteLen(SECTOR));
            match op {
                Op::Flush => into.admit(sector, DiskSlot::FIRST, op, ByteOffset(0), ByteLen::ZERO, None),
                Op::Discard { .. } => {
                    let parts = [0, 1, 2].map(|part| (ByteOffset(start.0 + part * 2 * SECTOR), len));
                    into.admit_parts(sector, DiskSlot::FIRST, op, &parts);
                }
                _ => into.admit(sector, DiskSlot::FIRST, op, start, len, None),
            }
        }
        PullEnd::Empty { taken }
    }

    fn finish<I: Intake<u64, Buffer>>(&mut self, _: &mut UringContext, done: FinishedRequest<u64, Buffer>, _: &mut I) {
        self.0.lock().unwrap().completed.push((done.token, done.outcome));
    }

    fn abandon(&mut self, _: &mut UringContext, token: u64, _: Option<Buffer>) {
        self.0.lock().unwrap().abandoned.push(token);
    }

    fn woken<I: Intake<u64, Buffer>>(
        &mut self,
        _: &mut UringContext,
        into: &mut I,
        _: bool,
    ) -> Result<(), &'static str> {
        if let Some(cancelled) = self.0.lock().unwrap().cancel.take() {
            into.cancel(&mut |token| *token == cancelled);
        }
        Ok(())
    }

    fn publish(&mut self) -> PublishResult {
        PublishResult::Suppressed
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> ArmResult {
        ArmResult::WorkWaiting
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}

/// The storage: its behaviour, and its requests.
#[derive(Default)]
pub(super) struct Storage {
    /// Sectors whose requests fail, with the outcome.
    bad: Vec<(u64, Outcome)>,
    pub(super) seen: Vec<(Op, u64, u64)>,
    /// True if it completes nothing.
    pub(super) hangs: bool,
    /// Most requests that it takes of an offer.
    most: Option<usize>,
}

impl Storage {
    fn end(&mut self, request: Request<Buffer>) -> Completion<Buffer> {
        let (first, sectors) = (request.start.0 / SECTOR, request.len.0 / SECTOR);
        let hit = |bad: &&(u64, Outcome)| (first..first + sectors.max(1)).contains(&bad.0);
        let outcome = self.bad.iter().find(hit).map_or(Outcome::Done(request.len), |bad| bad.1);
        Completion { outcome, tag: request.tag, buffer: request.buffer }
    }
}

pub(super) type SharedStorage = Arc<Mutex<Storage>>;

struct Channel(SharedStorage, Vec<Request<Buffer>>);

impl DiskChannel<UringContext> for Channel {
    fn submit(
        &mut self,
        _: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        _: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let mut storage = self.0.lock().unwrap();
        let count = storage.most.map_or(batch.len(), |most| most.min(batch.len()));
        storage.seen.extend(batch[..count].iter().map(|one| (one.op, one.start.0 / SECTOR, one.len.0 / SECTOR)));
        self.1.extend(batch.drain(..count));
        count
    }

    fn reap(&mut self, _: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        let mut storage = self.0.lock().unwrap();
        let count = if storage.hangs { 0 } else { self.1.len() };
        finished.extend(self.1.drain(..count).map(|request| storage.end(request)));
        count
    }

    fn outstanding(&self) -> u32 {
        self.1.len() as u32
    }

    fn close(&mut self, _: &mut UringContext) {
        assert!(self.1.is_empty(), "a channel is drained before it is closed");
    }
}

/// A worker with a queue of a disk.
pub(super) struct Rig {
    pub(super) worker: Worker,
    pub(super) guest: SharedGuest,
    pub(super) storage: SharedStorage,
    pub(super) health: Arc<DiskHealth>,
    pub(super) attached_at: (u16, u32),
    pub(super) waker: Arc<dyn mqblk_core::Wake>,
    _mailbox: Mailbox<Worker>,
}

pub(super) const STOP: ErrorPolicy = ErrorPolicy { on_error: OnError::Stop, on_enospc: OnNoSpace::Stop };

/// A queue of a disk that is attached to a worker.
pub(super) struct Attached {
    pub(super) guest: SharedGuest,
    pub(super) storage: SharedStorage,
    pub(super) attached_at: (u16, u32),
    waker: Arc<dyn mqblk_core::Wake>,
}

impl Attached {
    pub(super) fn new(worker: &mut Worker, health: &Arc<DiskHealth>, merge: MergeMode) -> Attached {
        let (guest, storage) = (SharedGuest::default(), SharedStorage::default());
        let of_disk = Arc::clone(&storage);
        let disk =
            TrialDisk(move || Box::new(Channel(Arc::clone(&of_disk), vec![])) as Box<dyn DiskChannel<UringContext>>);
        let options = QueueOptions {
            disks: vec![QueueDisk {
                slot: DiskSlot::FIRST,
                disk: Arc::new(disk),
                plug: PlugOptions { merge, ..PlugOptions::default() },
                health: Arc::clone(health),
            }],
            kick: None,
            policy: PollPolicy::Busy.into(),
            paused: false,
            on_fault: Box::new(|fault| panic!("{fault:?}")),
        };
        let mut waker = None;
        let make = |own: &Arc<dyn mqblk_core::Wake>| {
            waker = Some(Arc::clone(own));
            Ok(Queue(Arc::clone(&guest)))
        };
        let attached_at = worker.attach_queue(options, make).expect("attached");
        let waker = waker.expect("it was made");
        Attached { guest, storage, attached_at, waker }
    }
}

impl Rig {
    fn new(policy: ErrorPolicy, merge: MergeMode) -> Rig {
        Rig::of(&Arc::new(DiskHealth::new("trial", policy)), merge)
    }

    pub(super) fn of(health: &Arc<DiskHealth>, merge: MergeMode) -> Rig {
        let (mailbox, receiver) = Mailbox::new(0).expect("a mailbox");
        let options = UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 };
        let mut worker = Worker::new(options, receiver).expect("the host has io_uring");
        let Attached { guest, storage, attached_at, waker } = Attached::new(&mut worker, health, merge);
        Rig { worker, guest, storage, health: Arc::clone(health), attached_at, waker, _mailbox: mailbox }
    }

    /// Submits requests, runs turns until the worker is idle, and takes the completions.
    pub(super) fn submit(&mut self, discards: &[(Op, u64)]) -> Vec<(u64, Outcome)> {
        self.guest.lock().unwrap().waiting.extend(discards);
        self.run_until_idle()
    }

    pub(super) fn run_until_idle(&mut self) -> Vec<(u64, Outcome)> {
        let mut quiet = 0;
        while quiet < 3 {
            quiet = if self.worker.turn() { 0 } else { quiet + 1 };
        }
        let mut completed = std::mem::take(&mut self.guest.lock().unwrap().completed);
        completed.sort_by_key(|(sector, _)| *sector);
        completed
    }

    /// Takes the abandoned requests.
    pub(super) fn abandoned(&self) -> Vec<u64> {
        let mut abandoned = std::mem::take(&mut self.guest.lock().unwrap().abandoned);
        abandoned.sort_unstable();
        abandoned
    }

    pub(super) fn bad(&self, bad: &[(u64, Outcome)]) {
        self.storage.lock().unwrap().bad = bad.to_vec();
    }

    /// Takes the first sectors of the requests that the storage got since the last time.
    pub(super) fn seen(&self) -> Vec<u64> {
        std::mem::take(&mut self.storage.lock().unwrap().seen).iter().map(|seen| seen.1).collect()
    }

    fn resume(&mut self, how: Resume) -> Vec<(u64, Outcome)> {
        let outcome = self.health.clear_stop().expect("it is stopped");
        let health = Arc::clone(&self.health);
        self.worker.resume(&health, how, outcome);
        self.run_until_idle()
    }

    fn parked(&self) -> u64 {
        self.health.stats().parked
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.worker.stats(0).queues[0].1.in_flight
    }
}

pub(super) const DONE: Outcome = Outcome::Done(ByteLen(SECTOR));

#[test]
fn a_stopped_disk_parks_what_failed_and_what_follows_and_replays_in_the_order_of_arrival() {
    for (failure, of_space) in [(EIO, false), (Outcome::NoSpace, true)] {
        let mut rig = Rig::new(STOP, MergeMode::Off);
        rig.bad(&[(7, failure), (3, failure)]);
        // All are at the storage together: good ones complete, failed ones are parked.
        assert_eq!(rig.submit(&[(WRITE, 9), (WRITE, 7), (WRITE, 5), (Op::Read, 3)]), [(5, DONE), (9, DONE)]);
        let stats = rig.health.stats();
        assert_eq!((stats.parked, stats.stops), (2, 1));
        assert_eq!(stats.stopped.expect("it is stopped").no_space, of_space);
        assert_eq!(rig.seen(), [9, 7, 5, 3]);
        // New requests do not reach the storage.
        assert_eq!(rig.submit(&[(Op::Read, 1), (WRITE, 2)]), []);
        assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![], 4, 4));
        // The failures are not repaired: it stops again, and later requests are not tried.
        assert_eq!(rig.resume(Resume::Replay).len(), 2);
        assert_eq!((rig.seen(), rig.parked(), rig.health.stats().stops), (vec![7, 3, 1, 2], 2, 2));
        assert_eq!(rig.submit(&[(WRITE, 8)]), []);
        rig.bad(&[]);
        assert_eq!(rig.resume(Resume::Replay), [(3, DONE), (7, DONE), (8, DONE)]);
        assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![7, 3, 8], 0, 0));
        assert_eq!(rig.submit(&[(WRITE, 8)]), [(8, DONE)]);
        assert_eq!(rig.worker.stats(0).queues[0].1.counters.errors, 0, "no guest got an error");
    }
}

#[test]
fn replayed_requests_that_the_storage_does_not_take_at_once_go_before_new_ones() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(1, EIO)]);
    assert_eq!(rig.submit(&[(WRITE, 1)]), []);
    assert_eq!(rig.submit(&[(WRITE, 2), (WRITE, 3)]), []);
    rig.bad(&[]);
    rig.seen();
    rig.storage.lock().unwrap().most = Some(0);
    assert_eq!(rig.resume(Resume::Replay), []);
    assert_eq!((rig.submit(&[(WRITE, 4)]), rig.parked(), rig.in_flight()), (vec![], 0, 4));
    rig.storage.lock().unwrap().most = None;
    assert_eq!(rig.run_until_idle(), [(1, DONE), (2, DONE), (3, DONE), (4, DONE)]);
    assert_eq!(rig.seen(), [1, 2, 3, 4]);
}

#[test]
fn parked_requests_may_be_failed() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, Outcome::NoSpace)]);
    rig.submit(&[(WRITE, 7)]);
    rig.bad(&[(7, EIO)]);
    rig.submit(&[(Op::Read, 8)]);
    assert_eq!(rig.resume(Resume::Report), [(7, Outcome::NoSpace), (8, Outcome::NoSpace)]);
    assert_eq!((rig.parked(), rig.in_flight(), rig.health.is_stopped()), (0, 0, false));
    assert_eq!(rig.worker.stats(0).queues[0].1.counters.errors, 2);
}

#[test]
fn outcomes_other_than_storage_failures_stop_nothing() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    let others = [Outcome::OutOfRange, Outcome::ReadOnly, Outcome::Unsupported, Outcome::Aborted];
    for other in others {
        rig.bad(&[(7, other)]);
        assert_eq!(rig.submit(&[(WRITE, 7)]), [(7, other)]);
    }
    let beyond = crate::trial::GEOMETRY.size.0 / SECTOR;
    assert_eq!(rig.submit(&[(WRITE, beyond)]), [(beyond, Outcome::OutOfRange)]);
    let only_space = ErrorPolicy { on_enospc: OnNoSpace::Stop, ..ErrorPolicy::default() };
    let mut other = Rig::new(only_space, MergeMode::Off);
    other.bad(&[(7, EIO)]);
    assert_eq!(other.submit(&[(WRITE, 7)]), [(7, EIO)]);
    assert!(!rig.health.is_stopped() && !other.health.is_stopped());
}

#[test]
fn of_a_request_of_several_ranges_only_failed_ones_are_repeated() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(12, EIO)]);
    assert_eq!(rig.submit(&[(DISCARD, 10)]), []);
    assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![10, 12, 14], 1, 1));
    assert_eq!(rig.submit(&[(DISCARD, 20)]), []);
    assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![], 4, 2));
    rig.bad(&[]);
    let whole = Outcome::Done(ByteLen(3 * SECTOR));
    assert_eq!(rig.resume(Resume::Replay), [(10, whole), (20, whole)]);
    assert_eq!(rig.seen(), [12, 20, 22, 24]);
}

#[test]
fn a_flush_that_failed_behind_the_page_cache_is_not_replayed() {
    // The disk of these tests has a cache and does not pin memory: a file without direct I/O.
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(0, EIO)]);
    assert_eq!(rig.submit(&[(Op::Flush, 99)]), []);
    assert_eq!(rig.submit(&[(Op::Flush, 98), (Op::Write { fua: true }, 5)]), []);
    rig.bad(&[]);
    let flushed = Outcome::Done(ByteLen::ZERO);
    assert_eq!(rig.resume(Resume::Replay), [(5, DONE), (98, flushed), (99, EIO)]);
    rig.bad(&[(5, EIO)]);
    rig.submit(&[(Op::Write { fua: true }, 5)]);
    rig.bad(&[]);
    assert_eq!(rig.resume(Resume::Replay), [(5, EIO)]);
    // The write was refused for lack of space before anything was in the cache.
    rig.bad(&[(5, Outcome::NoSpace)]);
    rig.submit(&[(Op::Write { fua: true }, 5)]);
    rig.bad(&[]);
    assert_eq!(rig.resume(Resume::Replay), [(5, DONE)]);
}

#[test]
fn parked_requests_are_aborted_like_others() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.submit(&[(WRITE, 7), (WRITE, 8)]);
    rig.submit(&[(DISCARD, 20), (WRITE, 9)]);
    for cancelled in [20, 7] {
        rig.guest.lock().unwrap().cancel = Some(cancelled);
        rig.waker.wake();
        assert_eq!(rig.run_until_idle(), [(cancelled, Outcome::Aborted)]);
    }
    assert_eq!((rig.parked(), rig.in_flight(), rig.health.is_stopped()), (1, 1, true));
    assert_eq!(rig.resume(Resume::Replay), [(9, DONE)]);
}

#[test]
fn a_cancelled_request_that_fails_is_completed() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.storage.lock().unwrap().hangs = true;
    rig.submit(&[(WRITE, 7)]);
    rig.guest.lock().unwrap().cancel = Some(7);
    rig.waker.wake();
    assert_eq!(rig.run_until_idle(), []);
    rig.storage.lock().unwrap().hangs = false;
    assert_eq!(rig.run_until_idle(), [(7, EIO)]);
    assert!(!rig.health.is_stopped());
}

#[test]
fn members_of_a_merged_request_are_parked_one_by_one() {
    let mut rig = Rig::new(STOP, MergeMode::On);
    rig.bad(&[(5, EIO), (6, EIO)]);
    let discards = [(DISCARD, 5), (DISCARD, 6)];
    // Six ranges that touch: one request at the storage.
    assert_eq!(rig.submit(&discards), []);
    assert!(rig.storage.lock().unwrap().seen.iter().any(|(_, first, sectors)| (*first, *sectors) == (5, 6)));
    assert_eq!(rig.submit(&[(DISCARD, 30), (DISCARD, 31)]), []);
    assert!(rig.parked() >= 6 && rig.in_flight() == 4);
    rig.guest.lock().unwrap().cancel = Some(31);
    rig.waker.wake();
    assert_eq!(rig.run_until_idle(), [(31, Outcome::Aborted)]);
    rig.bad(&[]);
    rig.seen();
    let whole = Outcome::Done(ByteLen(3 * SECTOR));
    assert_eq!(rig.resume(Resume::Replay), [(5, whole), (6, whole), (30, whole)]);
    assert_eq!((rig.parked(), rig.in_flight()), (0, 0));
    let seen = rig.seen();
    let late = seen.iter().position(|sector| *sector >= 30).unwrap();
    assert!(
        seen[..late].iter().all(|sector| *sector < 30) && seen[late..].iter().all(|sector| *sector >= 30),
        "{seen:?}"
    );
}

#[test]
fn a_cancelled_member_of_a_failed_merged_request_is_not_repeated() {
    let mut rig = Rig::new(STOP, MergeMode::On);
    rig.bad(&[(6, EIO)]);
    rig.storage.lock().unwrap().hangs = true;
    rig.submit(&[(WRITE, 5), (WRITE, 6), (DISCARD, 15), (DISCARD, 16)]);
    rig.guest.lock().unwrap().cancel = Some(16);
    rig.waker.wake();
    rig.run_until_idle();
    rig.bad(&[(16, EIO), (17, EIO)]);
    rig.storage.lock().unwrap().hangs = false;
    let completed = rig.run_until_idle();
    assert!(completed.contains(&(16, Outcome::Aborted)), "{completed:?}");
    assert_eq!((rig.parked(), rig.health.is_stopped()), (1, true), "sector 17 is the other request's");
}

#[test]
fn a_draining_queues_parked_requests_fail() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, Outcome::NoSpace)]);
    rig.submit(&[(WRITE, 7), (DISCARD, 10)]);
    rig.submit(&[(WRITE, 8)]);
    rig.storage.lock().unwrap().hangs = true;
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain(rig.attached_at.0, rig.attached_at.1, done);
    assert_eq!(rig.run_until_idle(), [(7, Outcome::NoSpace), (8, Outcome::NoSpace)]);
    assert_eq!(left.try_recv().expect("it is detached").report.counters.errors, 2);
    assert_eq!(rig.parked(), 0);
    assert!(rig.health.is_stopped(), "for the next queue");
}

#[test]
fn a_draining_queues_failed_requests_are_completed() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.storage.lock().unwrap().hangs = true;
    rig.submit(&[(WRITE, 7)]);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain(rig.attached_at.0, rig.attached_at.1, done);
    assert_eq!(rig.run_until_idle(), []);
    rig.storage.lock().unwrap().hangs = false;
    assert_eq!(rig.run_until_idle(), [(7, EIO)]);
    assert!(left.try_recv().is_ok() && !rig.health.is_stopped());
}

#[test]
fn a_queue_may_be_detached_with_its_parked_requests_dropped() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO), (12, EIO)]);
    rig.submit(&[(WRITE, 7), (WRITE, 8)]);
    rig.submit(&[(DISCARD, 20)]);
    let (slot, generation) = rig.attached_at;
    assert_eq!(rig.worker.unserved(slot, generation).len(), 2);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain_keeping_parked(slot, generation, done);
    assert_eq!(rig.run_until_idle(), []);
    assert!(left.try_recv().is_err(), "two are in flight");
    assert_eq!(rig.worker.abandon_unserved(slot, generation), 2);
    assert_eq!(rig.abandoned(), [7, 20]);
    assert!(left.try_recv().is_ok());
    assert_eq!((rig.run_until_idle(), rig.parked()), (vec![], 0));
}

/// Storage hangs, and whoever serves the ring next replays its requests.
#[test]
fn a_frozen_queue_is_detached_when_its_requests_have_ended() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.storage.lock().unwrap().hangs = true;
    assert_eq!(rig.submit(&[(WRITE, 7), (DISCARD, 20)]), []);
    let (slot, generation) = rig.attached_at;
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain_keeping_parked(slot, generation, done);
    assert!(rig.worker.freeze(slot, generation).is_some());
    assert_eq!((rig.run_until_idle(), rig.abandoned(), left.try_recv().is_err()), (vec![], vec![], true));
    rig.storage.lock().unwrap().hangs = false;
    assert_eq!((rig.run_until_idle(), rig.abandoned()), (vec![], vec![7, 20]), "nothing is completed");
    assert!(left.try_recv().is_ok());
    assert!(rig.worker.freeze(slot, generation).is_none(), "it is detached");
}

#[test]
fn closing_a_disk_aborts_its_parked_requests() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.submit(&[(WRITE, 7)]);
    rig.submit(&[(WRITE, 8)]);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.close_disk(rig.attached_at.0, rig.attached_at.1, DiskSlot::FIRST, done);
    assert_eq!(rig.run_until_idle(), [(7, Outcome::Aborted), (8, Outcome::Aborted)]);
    assert!(left.try_recv().is_ok());
    assert_eq!(rig.parked(), 0);
}

#[test]
fn all_workers_of_a_disk_stop_and_resume() {
    let health = Arc::new(DiskHealth::new("trial", STOP));
    let (mut one, mut other) = (Rig::of(&health, MergeMode::Off), Rig::of(&health, MergeMode::Off));
    one.bad(&[(7, EIO)]);
    one.submit(&[(WRITE, 7)]);
    assert_eq!((other.submit(&[(WRITE, 1)]), other.seen(), health.stats().parked), (vec![], vec![], 2));
    one.bad(&[]);
    let outcome = health.clear_stop().unwrap();
    // The other worker is not resumed yet, and keeps the order.
    assert_eq!((other.submit(&[(WRITE, 2)]), other.seen()), (vec![], vec![]));
    one.worker.resume(&health, Resume::Replay, outcome);
    other.worker.resume(&health, Resume::Replay, outcome);
    assert_eq!((one.run_until_idle(), other.run_until_idle()), (vec![(7, DONE)], vec![(1, DONE), (2, DONE)]));
    assert_eq!(other.seen(), [1, 2]);
}

/// Runs turns until this many requests are completed.
fn wait(rig: &mut Rig, count: usize) -> Vec<(u64, Outcome)> {
    let mut completed = rig.run_until_idle();
    while completed.len() < count {
        assert!(rig.worker.channels.deadline().is_some(), "its retry must wake the worker");
        rig.worker.sleep(None);
        completed.extend(rig.run_until_idle());
    }
    completed
}

#[test]
fn a_failed_request_is_repeated_until_it_succeeds() {
    let policy = ErrorPolicy { on_error: OnError::Retry(Duration::from_secs(3600)), ..ErrorPolicy::default() };
    let mut rig = Rig::new(policy, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    // Other requests complete meanwhile.
    assert_eq!(rig.submit(&[(WRITE, 7), (WRITE, 8)]), [(8, DONE)]);
    while rig.health.stats().retries < 2 {
        rig.worker.sleep(None);
        assert_eq!(rig.submit(&[(WRITE, 9)]), [(9, DONE)]);
    }
    assert_eq!((rig.in_flight(), rig.health.is_stopped()), (1, false));
    rig.bad(&[]);
    assert_eq!(wait(&mut rig, 1), [(7, DONE)]);
    assert_eq!(rig.worker.stats(0).queues[0].1.counters.errors, 0);
}

#[test]
fn a_request_that_goes_on_failing_is_completed_with_its_error() {
    let policy = ErrorPolicy { on_error: OnError::Retry(Duration::from_millis(250)), ..ErrorPolicy::default() };
    let mut rig = Rig::new(policy, MergeMode::Off);
    rig.bad(&[(7, EIO), (8, Outcome::NoSpace), (0, EIO)]);
    assert_eq!(rig.submit(&[(WRITE, 7), (WRITE, 8), (Op::Flush, 99)]), [(8, Outcome::NoSpace), (99, EIO)]);
    assert_eq!(wait(&mut rig, 1), [(7, EIO)]);
    assert!(rig.health.stats().retries >= 2);
    assert_eq!((rig.in_flight(), rig.worker.channels.deadline()), (0, None));
}

#[test]
fn a_request_that_waits_for_a_retry_can_be_aborted_and_does_not_delay_a_drain() {
    let policy = ErrorPolicy { on_error: OnError::Retry(Duration::from_secs(3600)), ..ErrorPolicy::default() };
    let mut rig = Rig::new(policy, MergeMode::Off);
    rig.bad(&[(7, EIO), (8, EIO)]);
    assert_eq!(rig.submit(&[(WRITE, 7), (WRITE, 8)]), []);
    rig.guest.lock().unwrap().cancel = Some(7);
    rig.waker.wake();
    assert_eq!(rig.run_until_idle(), [(7, Outcome::Aborted)]);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain(rig.attached_at.0, rig.attached_at.1, done);
    assert_eq!(rig.run_until_idle(), [(8, EIO)]);
    assert!(left.try_recv().is_ok());
}

#[test]
fn requests_in_flight_have_an_age() {
    let mut rig = Rig::new(ErrorPolicy::default(), MergeMode::Off);
    assert_eq!((rig.worker.stats(0).queues[0].1.oldest_ns, rig.worker.ages().len()), (None, 0));
    rig.storage.lock().unwrap().hangs = true;
    rig.submit(&[(WRITE, 7)]);
    let young = rig.worker.stats(0).queues[0].1.oldest_ns.expect("one is in flight");
    rig.submit(&[(WRITE, 8)]);
    let stats = rig.worker.stats(0);
    let queue = &stats.queues[0].1;
    assert!(queue.oldest_ns.is_some_and(|old| old > young) && queue.disks[0].oldest_ns == queue.oldest_ns);
    let ages = rig.worker.ages();
    assert_eq!((ages.len(), ages[0].in_flight, ages[0].health.name()), (1, 2, "trial"));
    assert!(ages[0].oldest.as_nanos() >= u128::from(young));
    rig.storage.lock().unwrap().hangs = false;
    assert_eq!((rig.run_until_idle().len(), rig.worker.ages().len()), (2, 0));
}
