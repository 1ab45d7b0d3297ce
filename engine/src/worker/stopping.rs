//! A disk that stops, is told to go on, or tries again: stepped, with a storage that fails as the test says.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, Completion, DiskChannel, DiskSlot, Errno, FinishedRequest, GuestQueue, Intake, Op,
    Outcome, PublishResult, PullEnd, Request,
};

use super::*;
use crate::engine::{QueueOptions, attached};
use crate::errors::{DiskHealth, ErrorPolicy, OnError, OnNoSpace, Resume};
use crate::mailbox::Mailbox;
use crate::options::{Coalesce, MergeMode, PlugOptions};
use crate::poll::PollPolicy;
use crate::runner::Buffer;
use crate::trial::TrialDisk;

const WRITE: Op = Op::Write { fua: false };
const DISCARD: Op = Op::Discard { secure: false };
const EIO: Outcome = Outcome::Failed(Errno(5));
const SECTOR: u64 = 512;

/// What guests ask, and what they were answered.
#[derive(Default)]
struct Guest {
    waiting: VecDeque<(Op, u64)>,
    answered: Vec<(u64, Outcome)>,
    /// To be cancelled at the next wake.
    cancel: Option<u64>,
}

type SharedGuest = Arc<Mutex<Guest>>;

/// A queue whose requests are named by the sector where they start.
struct Queue(SharedGuest);

impl GuestQueue for Queue {
    type Token = u64;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        64
    }

    fn pull<I: Intake<u64, Buffer>>(&mut self, _: &mut UringContext, into: &mut I) -> PullEnd {
        for (op, sector) in self.0.lock().unwrap().waiting.drain(..) {
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
        PullEnd::Empty
    }

    fn finish<I: Intake<u64, Buffer>>(&mut self, _: &mut UringContext, done: FinishedRequest<u64, Buffer>, _: &mut I) {
        self.0.lock().unwrap().answered.push((done.token, done.outcome));
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

/// What the storage does, and what it saw.
#[derive(Default)]
struct Storage {
    /// How requests fail that start in these sectors.
    bad: Vec<(u64, Outcome)>,
    seen: Vec<(Op, u64, u64)>,
    /// Ends nothing.
    hangs: bool,
    /// Takes no more than this of an offer.
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

type SharedStorage = Arc<Mutex<Storage>>;

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
struct Rig {
    worker: Worker,
    guest: SharedGuest,
    storage: SharedStorage,
    health: Arc<DiskHealth>,
    place: (u16, u32),
    waker: Arc<dyn mqblk_core::Wake>,
    _mailbox: Mailbox,
}

const STOP: ErrorPolicy = ErrorPolicy { on_error: OnError::Stop, on_enospc: OnNoSpace::Stop };

impl Rig {
    fn new(policy: ErrorPolicy, merge: MergeMode) -> Rig {
        Rig::of(&Arc::new(DiskHealth::new("trial", policy)), merge)
    }

    fn of(health: &Arc<DiskHealth>, merge: MergeMode) -> Rig {
        let (mailbox, receiver) = Mailbox::new().expect("a mailbox");
        let options = UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 };
        let mut worker = Worker::new(options, receiver).expect("the host has io_uring");
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
            poll: PollPolicy::Busy,
            coalesce: Coalesce::default(),
            paused: false,
            on_broken: Box::new(|why| panic!("{why}")),
        };
        let mut waker = None;
        let make = |_: &mut UringContext, own: &Arc<dyn mqblk_core::Wake>| {
            waker = Some(Arc::clone(own));
            Ok(Queue(Arc::clone(&guest)))
        };
        let place = attached(&mut worker, options, make, |_, _| {}).expect("attached");
        let waker = waker.expect("it was made");
        Rig { worker, guest, storage, health: Arc::clone(health), place, waker, _mailbox: mailbox }
    }

    /// Asks, turns until nothing happens any more, and takes the answers.
    fn ask(&mut self, asks: &[(Op, u64)]) -> Vec<(u64, Outcome)> {
        self.guest.lock().unwrap().waiting.extend(asks);
        self.settle()
    }

    fn settle(&mut self) -> Vec<(u64, Outcome)> {
        let mut quiet = 0;
        while quiet < 3 {
            quiet = if self.worker.turn() { 0 } else { quiet + 1 };
        }
        let mut answered = std::mem::take(&mut self.guest.lock().unwrap().answered);
        answered.sort_by_key(|(sector, _)| *sector);
        answered
    }

    fn bad(&self, bad: &[(u64, Outcome)]) {
        self.storage.lock().unwrap().bad = bad.to_vec();
    }

    /// The sectors that the storage saw since the last time.
    fn seen(&self) -> Vec<u64> {
        std::mem::take(&mut self.storage.lock().unwrap().seen).iter().map(|seen| seen.1).collect()
    }

    fn resume(&mut self, how: Resume) -> Vec<(u64, Outcome)> {
        let outcome = self.health.go_on().expect("it is stopped");
        let health = Arc::clone(&self.health);
        self.worker.resume(&health, how, outcome);
        self.settle()
    }

    fn parked(&self) -> u64 {
        self.health.stats().parked
    }

    fn in_flight(&self) -> u32 {
        self.worker.stats(0).queues[0].1.in_flight
    }
}

const DONE: Outcome = Outcome::Done(ByteLen(SECTOR));

#[test]
fn a_stopped_disk_parks_what_failed_and_what_follows_and_replays_in_the_order_of_arrival() {
    for (failure, of_space) in [(EIO, false), (Outcome::NoSpace, true)] {
        let mut rig = Rig::new(STOP, MergeMode::Off);
        rig.bad(&[(7, failure), (3, failure)]);
        // In the storage together: what is good ends, whatever fails is parked.
        assert_eq!(rig.ask(&[(WRITE, 9), (WRITE, 7), (WRITE, 5), (Op::Read, 3)]), [(5, DONE), (9, DONE)]);
        let report = rig.health.stats();
        assert_eq!((report.parked, report.stops), (2, 1));
        assert_eq!(report.stopped.expect("it is stopped").no_space, of_space);
        assert_eq!(rig.seen(), [9, 7, 5, 3]);
        // What comes now does not reach the storage.
        assert_eq!(rig.ask(&[(Op::Read, 1), (WRITE, 2)]), []);
        assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![], 4, 4));
        // Nothing has changed: it stops again, and what follows is not tried.
        assert_eq!(rig.resume(Resume::Replay).len(), 2);
        assert_eq!((rig.seen(), rig.parked(), rig.health.stats().stops), (vec![7, 3, 1, 2], 2, 2));
        assert_eq!(rig.ask(&[(WRITE, 8)]), []);
        rig.bad(&[]);
        assert_eq!(rig.resume(Resume::Replay), [(3, DONE), (7, DONE), (8, DONE)]);
        assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![7, 3, 8], 0, 0));
        assert_eq!(rig.ask(&[(WRITE, 8)]), [(8, DONE)]);
        assert_eq!(rig.worker.stats(0).queues[0].1.counters.errors, 0, "no guest heard of it");
    }
}

#[test]
fn replays_that_the_storage_does_not_take_at_once_go_before_what_is_new() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(1, EIO)]);
    assert_eq!(rig.ask(&[(WRITE, 1)]), []);
    assert_eq!(rig.ask(&[(WRITE, 2), (WRITE, 3)]), []);
    rig.bad(&[]);
    rig.seen();
    rig.storage.lock().unwrap().most = Some(0);
    assert_eq!(rig.resume(Resume::Replay), []);
    assert_eq!((rig.ask(&[(WRITE, 4)]), rig.parked(), rig.in_flight()), (vec![], 0, 4));
    rig.storage.lock().unwrap().most = None;
    assert_eq!(rig.settle(), [(1, DONE), (2, DONE), (3, DONE), (4, DONE)]);
    assert_eq!(rig.seen(), [1, 2, 3, 4]);
}

#[test]
fn parked_requests_may_be_given_back_as_errors() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, Outcome::NoSpace)]);
    rig.ask(&[(WRITE, 7)]);
    rig.bad(&[(7, EIO)]);
    rig.ask(&[(Op::Read, 8)]);
    assert_eq!(rig.resume(Resume::Report), [(7, Outcome::NoSpace), (8, Outcome::NoSpace)]);
    assert_eq!((rig.parked(), rig.in_flight(), rig.health.is_stopped()), (0, 0, false));
    assert_eq!(rig.worker.stats(0).queues[0].1.counters.errors, 2);
}

#[test]
fn what_is_no_failure_of_the_storage_stops_nothing() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    let others = [Outcome::OutOfRange, Outcome::ReadOnly, Outcome::Unsupported, Outcome::Aborted];
    for other in others {
        rig.bad(&[(7, other)]);
        assert_eq!(rig.ask(&[(WRITE, 7)]), [(7, other)]);
    }
    let beyond = crate::trial::GEOMETRY.size.0 / SECTOR;
    assert_eq!(rig.ask(&[(WRITE, beyond)]), [(beyond, Outcome::OutOfRange)]);
    let only_space = ErrorPolicy { on_enospc: OnNoSpace::Stop, ..ErrorPolicy::default() };
    let mut other = Rig::new(only_space, MergeMode::Off);
    other.bad(&[(7, EIO)]);
    assert_eq!(other.ask(&[(WRITE, 7)]), [(7, EIO)]);
    assert!(!rig.health.is_stopped() && !other.health.is_stopped());
}

#[test]
fn of_a_request_of_several_ranges_only_those_are_done_again_that_failed() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(12, EIO)]);
    assert_eq!(rig.ask(&[(DISCARD, 10)]), []);
    assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![10, 12, 14], 1, 1));
    assert_eq!(rig.ask(&[(DISCARD, 20)]), []);
    assert_eq!((rig.seen(), rig.parked(), rig.in_flight()), (vec![], 4, 2));
    rig.bad(&[]);
    let whole = Outcome::Done(ByteLen(3 * SECTOR));
    assert_eq!(rig.resume(Resume::Replay), [(10, whole), (20, whole)]);
    assert_eq!(rig.seen(), [12, 20, 22, 24]);
}

#[test]
fn a_flush_that_failed_behind_the_page_cache_is_answered_so() {
    // The disk of these tests has a cache and does not pin memory: a file without direct I/O.
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(0, EIO)]);
    assert_eq!(rig.ask(&[(Op::Flush, 99)]), []);
    assert_eq!(rig.ask(&[(Op::Flush, 98), (Op::Write { fua: true }, 5)]), []);
    rig.bad(&[]);
    let flushed = Outcome::Done(ByteLen::ZERO);
    assert_eq!(rig.resume(Resume::Replay), [(5, DONE), (98, flushed), (99, EIO)]);
    rig.bad(&[(5, EIO)]);
    rig.ask(&[(Op::Write { fua: true }, 5)]);
    rig.bad(&[]);
    assert_eq!(rig.resume(Resume::Replay), [(5, EIO)]);
    // No space was found before anything was in the cache.
    rig.bad(&[(5, Outcome::NoSpace)]);
    rig.ask(&[(Op::Write { fua: true }, 5)]);
    rig.bad(&[]);
    assert_eq!(rig.resume(Resume::Replay), [(5, DONE)]);
}

#[test]
fn parked_requests_are_aborted_like_others() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.ask(&[(WRITE, 7), (WRITE, 8)]);
    rig.ask(&[(DISCARD, 20), (WRITE, 9)]);
    for cancelled in [20, 7] {
        rig.guest.lock().unwrap().cancel = Some(cancelled);
        rig.waker.wake();
        assert_eq!(rig.settle(), [(cancelled, Outcome::Aborted)]);
    }
    assert_eq!((rig.parked(), rig.in_flight(), rig.health.is_stopped()), (1, 1, true));
    assert_eq!(rig.resume(Resume::Replay), [(9, DONE)]);
}

#[test]
fn a_cancelled_request_that_fails_is_answered() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.storage.lock().unwrap().hangs = true;
    rig.ask(&[(WRITE, 7)]);
    rig.guest.lock().unwrap().cancel = Some(7);
    rig.waker.wake();
    assert_eq!(rig.settle(), []);
    rig.storage.lock().unwrap().hangs = false;
    assert_eq!(rig.settle(), [(7, EIO)]);
    assert!(!rig.health.is_stopped());
}

#[test]
fn members_of_a_joined_request_are_parked_each_for_itself() {
    let mut rig = Rig::new(STOP, MergeMode::On);
    rig.bad(&[(5, EIO), (6, EIO)]);
    let asks = [(DISCARD, 5), (DISCARD, 6)];
    // Six ranges that touch: one request to the storage.
    assert_eq!(rig.ask(&asks), []);
    assert!(rig.storage.lock().unwrap().seen.iter().any(|(_, first, sectors)| (*first, *sectors) == (5, 6)));
    assert_eq!(rig.ask(&[(DISCARD, 30), (DISCARD, 31)]), []);
    assert!(rig.parked() >= 6 && rig.in_flight() == 4);
    rig.guest.lock().unwrap().cancel = Some(31);
    rig.waker.wake();
    assert_eq!(rig.settle(), [(31, Outcome::Aborted)]);
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
fn a_cancelled_member_of_a_joined_request_that_fails_is_not_done_again() {
    let mut rig = Rig::new(STOP, MergeMode::On);
    rig.bad(&[(6, EIO)]);
    rig.storage.lock().unwrap().hangs = true;
    rig.ask(&[(WRITE, 5), (WRITE, 6), (DISCARD, 15), (DISCARD, 16)]);
    rig.guest.lock().unwrap().cancel = Some(16);
    rig.waker.wake();
    rig.settle();
    rig.bad(&[(16, EIO), (17, EIO)]);
    rig.storage.lock().unwrap().hangs = false;
    let answered = rig.settle();
    assert!(answered.contains(&(16, Outcome::Aborted)), "{answered:?}");
    assert_eq!((rig.parked(), rig.health.is_stopped()), (1, true), "sector 17 is the other one's");
}

#[test]
fn a_queue_that_leaves_has_its_parked_requests_fail() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, Outcome::NoSpace)]);
    rig.ask(&[(WRITE, 7), (DISCARD, 10)]);
    rig.ask(&[(WRITE, 8)]);
    rig.storage.lock().unwrap().hangs = true;
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain(rig.place.0, rig.place.1, done);
    assert_eq!(rig.settle(), [(7, Outcome::NoSpace), (8, Outcome::NoSpace)]);
    assert_eq!(left.try_recv().expect("it has left").report.counters.errors, 2);
    assert_eq!(rig.parked(), 0);
    assert!(rig.health.is_stopped(), "it is, for who comes next");
}

#[test]
fn what_fails_while_its_queue_leaves_is_answered() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.storage.lock().unwrap().hangs = true;
    rig.ask(&[(WRITE, 7)]);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain(rig.place.0, rig.place.1, done);
    assert_eq!(rig.settle(), []);
    rig.storage.lock().unwrap().hangs = false;
    assert_eq!(rig.settle(), [(7, EIO)]);
    assert!(left.try_recv().is_ok() && !rig.health.is_stopped());
}

#[test]
fn a_queue_may_leave_with_its_parked_requests_unanswered() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO), (12, EIO)]);
    rig.ask(&[(WRITE, 7), (WRITE, 8)]);
    rig.ask(&[(DISCARD, 20)]);
    let (slot, generation) = rig.place;
    assert_eq!(rig.worker.parked::<Queue>(slot, generation).len(), 2);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain_as_it_is(slot, generation, done);
    assert_eq!(rig.settle(), []);
    assert!(left.try_recv().is_err(), "two are in flight");
    let mut dropped = Vec::new();
    assert_eq!(rig.worker.drop_parked::<Queue>(slot, generation, |_, _, token, _| dropped.push(token)), 2);
    dropped.sort_unstable();
    assert_eq!(dropped, [7, 20]);
    assert!(left.try_recv().is_ok());
    assert_eq!((rig.settle(), rig.parked()), (vec![], 0));
}

#[test]
fn a_disk_that_is_taken_away_takes_its_parked_requests_along() {
    let mut rig = Rig::new(STOP, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    rig.ask(&[(WRITE, 7)]);
    rig.ask(&[(WRITE, 8)]);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.close_disk(rig.place.0, rig.place.1, DiskSlot::FIRST, done);
    assert_eq!(rig.settle(), [(7, Outcome::Aborted), (8, Outcome::Aborted)]);
    assert!(left.try_recv().is_ok());
    assert_eq!(rig.parked(), 0);
}

#[test]
fn all_workers_of_a_disk_stop_and_go_on() {
    let health = Arc::new(DiskHealth::new("trial", STOP));
    let (mut one, mut other) = (Rig::of(&health, MergeMode::Off), Rig::of(&health, MergeMode::Off));
    one.bad(&[(7, EIO)]);
    one.ask(&[(WRITE, 7)]);
    assert_eq!((other.ask(&[(WRITE, 1)]), other.seen(), health.stats().parked), (vec![], vec![], 2));
    one.bad(&[]);
    let outcome = health.go_on().unwrap();
    // It has not heard of it yet, and keeps the order.
    assert_eq!((other.ask(&[(WRITE, 2)]), other.seen()), (vec![], vec![]));
    one.worker.resume(&health, Resume::Replay, outcome);
    other.worker.resume(&health, Resume::Replay, outcome);
    assert_eq!((one.settle(), other.settle()), (vec![(7, DONE)], vec![(1, DONE), (2, DONE)]));
    assert_eq!(other.seen(), [1, 2]);
}

/// Turns until so many are answered.
fn wait(rig: &mut Rig, answers: usize) -> Vec<(u64, Outcome)> {
    let mut answered = rig.settle();
    while answered.len() < answers {
        assert!(rig.worker.channels.deadline().is_some(), "somebody must wake it");
        rig.worker.sleep();
        answered.extend(rig.settle());
    }
    answered
}

#[test]
fn a_failed_request_is_tried_again_until_it_succeeds() {
    let policy = ErrorPolicy { on_error: OnError::Retry(Duration::from_secs(3600)), ..ErrorPolicy::default() };
    let mut rig = Rig::new(policy, MergeMode::Off);
    rig.bad(&[(7, EIO)]);
    // Others go on meanwhile.
    assert_eq!(rig.ask(&[(WRITE, 7), (WRITE, 8)]), [(8, DONE)]);
    while rig.health.stats().retries < 2 {
        rig.worker.sleep();
        assert_eq!(rig.ask(&[(WRITE, 9)]), [(9, DONE)]);
    }
    assert_eq!((rig.in_flight(), rig.health.is_stopped()), (1, false));
    rig.bad(&[]);
    assert_eq!(wait(&mut rig, 1), [(7, DONE)]);
    assert_eq!(rig.worker.stats(0).queues[0].1.counters.errors, 0);
}

#[test]
fn what_goes_on_failing_is_reported_in_the_end() {
    let policy = ErrorPolicy { on_error: OnError::Retry(Duration::from_millis(250)), ..ErrorPolicy::default() };
    let mut rig = Rig::new(policy, MergeMode::Off);
    rig.bad(&[(7, EIO), (8, Outcome::NoSpace), (0, EIO)]);
    assert_eq!(rig.ask(&[(WRITE, 7), (WRITE, 8), (Op::Flush, 99)]), [(8, Outcome::NoSpace), (99, EIO)]);
    assert_eq!(wait(&mut rig, 1), [(7, EIO)]);
    assert!(rig.health.stats().retries >= 2);
    assert_eq!((rig.in_flight(), rig.worker.channels.deadline()), (0, None));
}

#[test]
fn what_waits_to_be_tried_again_can_be_aborted_and_does_not_hold_up_a_queue_that_leaves() {
    let policy = ErrorPolicy { on_error: OnError::Retry(Duration::from_secs(3600)), ..ErrorPolicy::default() };
    let mut rig = Rig::new(policy, MergeMode::Off);
    rig.bad(&[(7, EIO), (8, EIO)]);
    assert_eq!(rig.ask(&[(WRITE, 7), (WRITE, 8)]), []);
    rig.guest.lock().unwrap().cancel = Some(7);
    rig.waker.wake();
    assert_eq!(rig.settle(), [(7, Outcome::Aborted)]);
    let (done, left) = std::sync::mpsc::sync_channel(1);
    rig.worker.drain(rig.place.0, rig.place.1, done);
    assert_eq!(rig.settle(), [(8, EIO)]);
    assert!(left.try_recv().is_ok());
}

#[test]
fn requests_in_flight_have_an_age() {
    let mut rig = Rig::new(ErrorPolicy::default(), MergeMode::Off);
    assert_eq!((rig.worker.stats(0).queues[0].1.oldest_ns, rig.worker.ages().len()), (None, 0));
    rig.storage.lock().unwrap().hangs = true;
    rig.ask(&[(WRITE, 7)]);
    let young = rig.worker.stats(0).queues[0].1.oldest_ns.expect("one is in flight");
    rig.ask(&[(WRITE, 8)]);
    let report = rig.worker.stats(0);
    let queue = &report.queues[0].1;
    assert!(queue.oldest_ns.is_some_and(|old| old > young) && queue.disks[0].oldest_ns == queue.oldest_ns);
    let ages = rig.worker.ages();
    assert_eq!((ages.len(), ages[0].in_flight, ages[0].health.name()), (1, 2, "trial"));
    assert!(ages[0].oldest.as_nanos() >= u128::from(young));
    rig.storage.lock().unwrap().hangs = false;
    assert_eq!((rig.settle().len(), rig.worker.ages().len()), (2, 0));
}
