use super::*;
use crate::trial::{GEOMETRY, LIMITS};
use mqblk_core::{BlockSize, Request};
use mqblk_uring::UringOptions;

/// Takes what it is told to, and keeps it.
#[derive(Default)]
struct Storage {
    room: usize,
    taken: Vec<AnyRequest>,
    outcome: Option<Outcome>,
}

impl DiskChannel<UringContext> for Storage {
    fn submit(&mut self, _: &mut UringContext, batch: &mut Vec<AnyRequest>, _: &mut Vec<AnyCompletion>) -> usize {
        let count = self.room.min(batch.len());
        self.room -= count;
        self.taken.extend(batch.drain(..count));
        count
    }
    fn reap(&mut self, _: &mut UringContext, finished: &mut Vec<AnyCompletion>) -> usize {
        let Some(outcome) = self.outcome else { return 0 };
        let count = self.taken.len();
        let end = |request: AnyRequest| {
            let outcome = if outcome == Outcome::Done(ByteLen(1)) { Outcome::Done(request.len) } else { outcome };
            AnyCompletion { outcome, tag: request.tag, buffer: request.buffer }
        };
        finished.extend(self.taken.drain(..).map(end));
        count
    }
    fn outstanding(&self) -> u32 {
        self.taken.len() as u32
    }
    fn close(&mut self, _: &mut UringContext) {}
}

struct Bench {
    context: UringContext,
    merger: Box<Merger>,
    storage: Storage,
    plug: Vec<AnyRequest>,
    counts: PlugCounts,
    finished: Vec<AnyCompletion>,
}

const DISCARD: Op = Op::Discard { secure: false };

impl Bench {
    fn new() -> Bench {
        let options = PlugOptions::default();
        Bench {
            context: UringContext::new(UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 })
                .expect("io_uring"),
            merger: Merger::new(&options, &LIMITS, &GEOMETRY, 16).expect("it merges"),
            storage: Storage { room: 100, ..Storage::default() },
            plug: vec![],
            counts: PlugCounts::default(),
            finished: vec![],
        }
    }

    /// Plugs discards of one block; a queue each.
    fn plug(&mut self, blocks: &[u64]) {
        for (queue, block) in (0..).zip(blocks) {
            let tag = Tag::new(queue, *block as u16);
            let start = ByteOffset(block * u64::from(BlockSize::B512.bytes()));
            self.plug.push(Request { op: DISCARD, start, len: ByteLen(512), tag, buffer: None });
        }
    }

    fn submit(&mut self) -> usize {
        let Bench { context, merger, storage, plug, counts, finished } = self;
        let offer = SubmitQuota { most: usize::MAX, contended: false, part: &mut vec![] };
        merger.submit(context, storage, plug, offer, counts, finished)
    }

    fn reap(&mut self, outcome: Outcome) -> usize {
        self.storage.outcome = Some(outcome);
        let before = self.finished.len();
        self.storage.reap(&mut self.context, &mut self.finished);
        self.merger.fan_out(&mut self.context, before, &mut self.counts, &mut self.finished)
    }

    /// Who was answered, and how.
    fn answers(&mut self) -> Vec<(u16, Outcome)> {
        let mut all: Vec<_> = self.finished.drain(..).map(|done| (done.tag.index(), done.outcome)).collect();
        all.sort_by_key(|(index, _)| *index);
        all
    }

    fn taken(&self) -> Vec<(u64, u64)> {
        self.storage.taken.iter().map(|request| (request.start.0 / 512, request.len.0 / 512)).collect()
    }
}

const ALL: Outcome = Outcome::Done(ByteLen(1));
const FAILED: Outcome = Outcome::Failed(mqblk_core::Errno(5));

#[test]
fn whether_it_merges_is_the_user_s_choice_then_the_storage_s() {
    let cheap = Limits { cost_per_request: false, ..LIMITS };
    for (merge, limits, want) in [
        (MergeMode::Auto, LIMITS, true),
        (MergeMode::Auto, cheap, false),
        (MergeMode::On, cheap, true),
        (MergeMode::Off, LIMITS, false),
    ] {
        let options = PlugOptions { merge, ..PlugOptions::default() };
        assert_eq!(Merger::new(&options, &limits, &GEOMETRY, 1).is_some(), want);
    }
}

#[test]
fn members_are_answered_as_the_joined_request_was() {
    for (outcome, each) in [
        (ALL, Outcome::Done(ByteLen(512))),
        (Outcome::Done(ByteLen::ZERO), Outcome::Done(ByteLen::ZERO)),
        (Outcome::Aborted, Outcome::Aborted),
    ] {
        let mut bench = Bench::new();
        bench.plug(&[7, 5, 9, 6]);
        assert_eq!(bench.submit(), 2);
        assert_eq!(bench.taken(), [(5, 3), (9, 1)]);
        assert_eq!(bench.counts.merges, [1, 0, 0, 1].map(|others| Merges { others, ..Merges::default() }));
        assert_eq!(bench.reap(outcome), 0);
        let nine = if outcome == ALL { each } else { outcome };
        assert_eq!(bench.answers(), [(5, each), (6, each), (7, each), (9, nine)]);
        assert!(bench.merger.is_idle() && bench.counts.splits == 0);
    }
}

#[test]
fn members_of_a_failed_request_are_done_again_once_and_alone() {
    let mut bench = Bench::new();
    bench.plug(&[1, 2, 3]);
    bench.submit();
    assert_eq!(bench.reap(FAILED), 3, "to be offered again");
    assert_eq!((bench.answers(), bench.counts.splits), (vec![], 1));
    assert!(!bench.merger.is_idle());
    // A plug that would join them waits behind them.
    bench.plug(&[4, 5]);
    bench.storage.room = 2;
    assert_eq!(bench.submit(), 2);
    assert_eq!((bench.taken(), bench.plug.len()), (vec![(1, 1), (2, 1)], 2));
    bench.storage.room = 100;
    assert_eq!(bench.submit(), 2);
    assert_eq!(bench.taken(), [(1, 1), (2, 1), (3, 1), (4, 2)]);
    assert_eq!(bench.reap(FAILED), 2);
    assert_eq!(bench.answers(), [(1, FAILED), (2, FAILED), (3, FAILED)]);
    assert_eq!((bench.submit(), bench.reap(FAILED)), (2, 0));
    assert_eq!(bench.answers(), [(4, FAILED), (5, FAILED)]);
    assert!(bench.merger.is_idle());
}

#[test]
fn what_the_storage_does_not_take_stays_joined_and_goes_first() {
    let mut bench = Bench::new();
    bench.storage.room = 1;
    bench.plug(&[1, 2, 11, 12, 21]);
    assert_eq!(bench.submit(), 1);
    bench.plug(&[3, 13]);
    assert_eq!(bench.submit(), 0);
    bench.storage.room = 100;
    assert_eq!(bench.submit(), 4);
    assert_eq!(bench.taken(), [(1, 2), (11, 2), (21, 1), (3, 1), (13, 1)]);
    assert_eq!(bench.reap(ALL), 0);
    assert_eq!(bench.answers().len(), 7);
    // With nothing to join the plug itself is what is left.
    bench.storage.room = 1;
    bench.plug(&[31, 41]);
    assert_eq!((bench.submit(), bench.plug.len()), (1, 1));
    bench.plug(&[42]);
    bench.storage.room = 100;
    assert_eq!(bench.submit(), 1);
    assert_eq!(bench.taken(), [(31, 1), (41, 2)]);
}

#[test]
fn a_turn_pulls_deeply_while_there_is_something_to_join() {
    let mut bench = Bench::new();
    bench.storage.room = usize::MAX;
    assert!(bench.merger.wants_more(0) && !bench.merger.wants_more(DEEP));
    let mut deep = 0;
    for round in 0..u64::from(PROBE) * 4 {
        deep += u32::from(bench.merger.wants_more(0));
        bench.plug(&[round * 100, round * 100 + 50]);
        bench.submit();
    }
    assert_eq!(deep, 4, "now and then although nothing was merged");
    bench.plug(&[1, 2]);
    bench.submit();
    assert!(bench.merger.wants_more(0));
}
