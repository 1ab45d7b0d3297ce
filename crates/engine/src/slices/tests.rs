//! Requests without data, which are sliced like those with data. Slices of buffers have their own tests (memory/), and
//! slices with data are tested with hostile guests.

use mqblk_core::Errno;
use mqblk_uring::UringOptions;

use super::*;
use crate::options::MergeMode;
use crate::trial::LIMITS;

const MIB: u64 = 1 << 20;
const ZEROES: Op = Op::WriteZeroes { may_unmap: false, fua: false };

/// Storage that completes its requests on command.
#[derive(Default)]
struct Storage {
    taken: Vec<AnyRequest>,
    /// All requests that it took: operation, start and length in MiB.
    seen: Vec<(Op, u64, u64)>,
    /// Start of a request that it fails.
    bad: Option<u64>,
    /// It takes no more requests than this.
    room: Option<usize>,
    /// Tags of cancel calls.
    cancelled: Vec<Tag>,
}

struct Inner(Rc<std::cell::RefCell<Storage>>);

impl DiskChannel<UringContext> for Inner {
    fn submit(&mut self, _: &mut UringContext, batch: &mut Vec<AnyRequest>, _: &mut Vec<AnyCompletion>) -> usize {
        let mut storage = self.0.borrow_mut();
        let count = storage.room.map_or(batch.len(), |room| room.saturating_sub(storage.taken.len()).min(batch.len()));
        storage.seen.extend(batch[..count].iter().map(|one| (one.op, one.start.0 / MIB, one.len.0 / MIB)));
        storage.taken.extend(batch.drain(..count));
        count
    }

    fn reap(&mut self, _: &mut UringContext, finished: &mut Vec<AnyCompletion>) -> usize {
        let mut storage = self.0.borrow_mut();
        let bad = storage.bad;
        let taken = std::mem::take(&mut storage.taken);
        finished.extend(taken.into_iter().map(|request| {
            let outcome = if bad == Some(request.start.0 / MIB) { EIO } else { Outcome::Done(ByteLen::ZERO) };
            AnyCompletion { outcome, tag: request.tag, buffer: request.buffer }
        }));
        finished.len()
    }

    fn cancel(&mut self, _: &mut UringContext, tags: &[Tag], finished: &mut Vec<AnyCompletion>) {
        assert!(tags.is_sorted());
        let mut storage = self.0.borrow_mut();
        storage.cancelled.extend(tags);
        let chosen = storage.taken.extract_if(.., |request| tags.contains(&request.tag));
        finished.extend(chosen.map(crate::request::cancelled));
    }

    fn outstanding(&self) -> u32 {
        self.0.borrow().taken.len() as u32
    }

    fn close(&mut self, _: &mut UringContext) {}
}

const EIO: Outcome = Outcome::Failed(Errno(5));

struct Rig {
    context: UringContext,
    storage: Rc<std::cell::RefCell<Storage>>,
    budget: SliceBudget,
    channel: SlicedChannel,
}

impl Rig {
    fn new(options: PlugOptions, limits: &Limits) -> Rig {
        let options_of_ring = UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 };
        let context = UringContext::new(options_of_ring).expect("the host has io_uring");
        let storage = Rc::new(std::cell::RefCell::new(Storage::default()));
        let budget = SliceBudget::default();
        budget.renew();
        let channel = SlicedChannel::new(Box::new(Inner(Rc::clone(&storage))), &options, limits, budget.clone());
        Rig { context, storage, budget, channel }
    }

    fn submit(&mut self, mut batch: Vec<AnyRequest>) -> (usize, Vec<(u16, Outcome)>) {
        let mut finished = Vec::new();
        let taken = self.channel.submit(&mut self.context, &mut batch, &mut finished);
        (taken, ended(finished))
    }

    fn reap(&mut self) -> Vec<(u16, Outcome)> {
        let mut finished = Vec::new();
        self.channel.reap(&mut self.context, &mut finished);
        ended(finished)
    }

    /// A turn: a new budget, then a reap.
    fn turn(&mut self) -> Vec<(u16, Outcome)> {
        self.budget.renew();
        self.reap()
    }

    fn cancel(&mut self, indexes: &[u16]) -> Vec<(u16, Outcome)> {
        let mut finished = Vec::new();
        let tags: Vec<Tag> = indexes.iter().map(|index| Tag::new(0, *index)).collect();
        self.channel.cancel(&mut self.context, &tags, &mut finished);
        ended(finished)
    }

    fn seen(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.storage.borrow_mut().seen).into_iter().map(|(_, start, len)| (start, len)).collect()
    }

    /// Nothing is left, and the worker may sleep.
    fn check_idle(&self) {
        assert_eq!((self.channel.outstanding(), self.channel.deadline()), (0, None));
        assert!(self.channel.is_idle());
    }
}

/// Limits of storage that executes requests inside `submit`.
const INLINE: Limits = Limits { cost_per_request: false, ..LIMITS };

fn rig() -> Rig {
    Rig::new(PlugOptions::default(), &INLINE)
}

const DONE: Outcome = Outcome::Done(ByteLen::ZERO);

/// A request of this many MiB.
fn request(op: Op, index: u16, start: u64, len: u64) -> AnyRequest {
    AnyRequest { op, start: ByteOffset(start * MIB), len: ByteLen(len * MIB), tag: Tag::new(0, index), buffer: None }
}

fn ended(finished: Vec<AnyCompletion>) -> Vec<(u16, Outcome)> {
    assert!(finished.iter().all(|done| done.tag.queue() == 0), "no slice is seen outside");
    finished.into_iter().map(|done| (done.tag.index(), done.outcome)).collect()
}

#[test]
fn a_turn_submits_one_slice_and_short_requests_pass() {
    let mut rig = rig();
    let batch = vec![request(ZEROES, 0, 10, 3), request(ZEROES, 1, 20, 1), request(ZEROES, 2, 30, 2)];
    assert_eq!(rig.submit(batch), (3, vec![]));
    assert_eq!(rig.seen(), [(20, 1), (10, 1)], "the short one, and a slice");
    assert!(rig.channel.deadline().is_some(), "the worker does not sleep");
    assert_eq!(rig.turn(), [(1, DONE)]);
    assert_eq!(rig.seen(), [(30, 1)], "long requests take turns");
    assert_eq!(rig.reap(), [], "in the same turn no other slice is submitted");
    assert_eq!(rig.seen(), []);
    assert_eq!((rig.turn(), rig.turn()), (vec![], vec![]));
    assert_eq!(rig.seen(), [(11, 1), (31, 1)]);
    assert_eq!(rig.turn(), [(2, DONE)]);
    assert_eq!((rig.seen(), rig.turn()), (vec![(12, 1)], vec![(0, DONE)]));
    rig.check_idle();
}

#[test]
fn the_first_failure_ends_a_request() {
    let mut rig = rig();
    rig.storage.borrow_mut().bad = Some(11);
    let batch = vec![request(ZEROES, 7, 10, 5)];
    assert_eq!(rig.submit(batch), (1, vec![]));
    assert_eq!((rig.turn(), rig.turn()), (vec![], vec![(7, EIO)]));
    assert_eq!(rig.seen(), [(10, 1), (11, 1)]);
    rig.check_idle();
}

#[test]
fn slices_at_the_storage_are_bounded() {
    let mut rig = rig();
    let batch = vec![request(ZEROES, 0, 0, 100)];
    rig.submit(batch);
    for _ in 0..60 {
        rig.budget.renew();
        let Rig { channel, context, .. } = &mut rig;
        channel.submit_slices(context, &mut Vec::new());
    }
    assert_eq!(rig.channel.outstanding() as usize, MAX_OUTSTANDING + 1);
    assert_eq!(rig.channel.deadline(), None, "a completion makes room");
    while rig.turn().is_empty() {}
    assert_eq!(rig.seen().len(), 100);
    rig.check_idle();
}

#[test]
fn a_storage_that_takes_nothing_now_is_offered_the_slice_again() {
    let mut rig = rig();
    rig.storage.borrow_mut().room = Some(0);
    let batch = vec![request(ZEROES, 0, 0, 2), request(ZEROES, 1, 9, 1)];
    assert_eq!(rig.submit(batch), (1, vec![]), "the short one is refused");
    assert_eq!((rig.turn(), rig.seen(), rig.channel.outstanding()), (vec![], vec![], 1));
    rig.storage.borrow_mut().room = None;
    assert_eq!((rig.turn(), rig.turn(), rig.turn()), (vec![], vec![], vec![(0, DONE)]));
    rig.check_idle();
}

#[test]
fn cancelled_requests_submit_no_more_slices() {
    let mut rig = rig();
    let batch = vec![request(ZEROES, 0, 0, 3), request(ZEROES, 1, 10, 3), request(ZEROES, 2, 20, 3)];
    rig.submit(batch);
    assert_eq!(rig.cancel(&[1]), [(1, Outcome::Aborted)], "none of its slices was submitted");
    assert_eq!(rig.cancel(&[0]), [(0, Outcome::Aborted)], "the storage cancels its slice");
    assert!(rig.storage.borrow().cancelled.contains(&Tag::new(SLICED_SLOT, 0)));
    assert_eq!(rig.seen(), [(0, 1)]);
    let mut ended = vec![];
    while ended.is_empty() {
        ended = rig.turn();
    }
    assert_eq!((ended, rig.seen()), (vec![(2, DONE)], vec![(20, 1), (21, 1), (22, 1)]));
    rig.check_idle();
}

#[test]
fn a_request_without_its_buffer_fails_alone() {
    let mut rig = rig();
    let batch = vec![request(Op::Read, 0, 0, 2), request(ZEROES, 1, 9, 2)];
    assert_eq!(rig.submit(batch), (2, vec![(0, Outcome::Failed(Errno::INVAL))]));
    while rig.turn().is_empty() {}
    assert_eq!(rig.seen(), [(9, 1), (10, 1)]);
    rig.check_idle();
}

#[test]
fn requests_without_data_are_sliced_only_for_storage_that_executes_them_at_once() {
    let discard = Op::Discard { secure: false };
    for (cost_per_request, want) in [(true, vec![(0, 40), (40, 40)]), (false, vec![(0, 1), (40, 16)])] {
        let mut rig = Rig::new(PlugOptions::default(), &Limits { cost_per_request, ..LIMITS });
        let batch = vec![request(ZEROES, 0, 0, 40), request(discard, 1, 40, 40)];
        rig.submit(batch);
        let mut ended = rig.turn();
        while ended.len() < 2 {
            ended.extend(rig.turn());
        }
        let seen = rig.seen();
        assert_eq!((seen[0], seen[1]), (want[0], want[1]));
        assert_eq!(seen.iter().map(|slice| slice.1).sum::<u64>(), 80);
        rig.check_idle();
    }
}

#[test]
fn longer_slices_are_configured_with_longer_merged_requests() {
    let options = PlugOptions { merge: MergeMode::On, merge_bytes: ByteLen(8 * MIB), ..PlugOptions::default() };
    let mut rig = Rig::new(options, &INLINE);
    let batch = vec![request(ZEROES, 0, 0, 8), request(ZEROES, 1, 10, 12)];
    rig.submit(batch);
    assert_eq!((rig.turn(), rig.turn()), (vec![(0, DONE)], vec![(1, DONE)]));
    assert_eq!(rig.seen(), [(0, 8), (10, 8), (18, 4)]);
}
