use super::*;
use crate::quota::ByteQuota;
use crate::trial::{GEOMETRY, LIMITS};
use mqblk_core::{BlockSize, Request};
use mqblk_uring::UringOptions;

/// A channel that takes as many requests as the test allows, and keeps them until the test sets an outcome.
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

struct Fixture {
    context: UringContext,
    merger: Box<Merger>,
    storage: Storage,
    plug: Vec<AnyRequest>,
    counts: PlugCounters,
    finished: Vec<AnyCompletion>,
}

const DISCARD: Op = Op::Discard { secure: false };

impl Fixture {
    fn new() -> Fixture {
        let options = PlugOptions::default();
        Fixture {
            context: UringContext::new(UringOptions { submissions: 8, in_flight: 16, files: 1, buffers: 1 })
                .expect("io_uring"),
            merger: Merger::new(&options, &LIMITS, &GEOMETRY, 16).expect("it merges"),
            storage: Storage { room: 100, ..Storage::default() },
            plug: vec![],
            counts: PlugCounters::default(),
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
        let Fixture { context, merger, storage, plug, counts, finished } = self;
        let quota = SubmitQuota { most: usize::MAX, bytes: &mut { ByteQuota::UNLIMITED }, part: &mut vec![] };
        merger.submit(context, storage, plug, quota, counts, finished)
    }

    fn reap(&mut self, outcome: Outcome) -> usize {
        self.storage.outcome = Some(outcome);
        let before = self.finished.len();
        self.storage.reap(&mut self.context, &mut self.finished);
        self.merger.fan_out(&mut self.context, before, &mut self.counts, &mut self.finished)
    }

    /// Takes the completions since the last time, as tag index and outcome.
    fn completions(&mut self) -> Vec<(u16, Outcome)> {
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
fn merging_is_configured_and_by_default_depends_on_the_storage() {
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
fn members_end_with_the_outcome_of_the_merged_request() {
    for (outcome, each) in [
        (ALL, Outcome::Done(ByteLen(512))),
        (Outcome::Done(ByteLen::ZERO), Outcome::Done(ByteLen::ZERO)),
        (Outcome::Aborted, Outcome::Aborted),
    ] {
        let mut fixture = Fixture::new();
        fixture.plug(&[7, 5, 9, 6]);
        assert_eq!(fixture.submit(), 2);
        assert_eq!(fixture.taken(), [(5, 3), (9, 1)]);
        assert_eq!(fixture.counts.merges, [1, 0, 0, 1].map(|others| Merges { others, ..Merges::default() }));
        assert_eq!(fixture.reap(outcome), 0);
        let nine = if outcome == ALL { each } else { outcome };
        assert_eq!(fixture.completions(), [(5, each), (6, each), (7, each), (9, nine)]);
        assert!(fixture.merger.is_idle() && fixture.counts.splits == 0);
    }
}

#[test]
fn members_of_a_failed_merged_request_are_repeated_once_and_one_by_one() {
    let mut fixture = Fixture::new();
    fixture.plug(&[1, 2, 3]);
    fixture.submit();
    assert_eq!(fixture.reap(FAILED), 3, "to be offered again");
    assert_eq!((fixture.completions(), fixture.counts.splits), (vec![], 1));
    assert!(!fixture.merger.is_idle());
    // Requests that touch them wait in the plug.
    fixture.plug(&[4, 5]);
    fixture.storage.room = 2;
    assert_eq!(fixture.submit(), 2);
    assert_eq!((fixture.taken(), fixture.plug.len()), (vec![(1, 1), (2, 1)], 2));
    fixture.storage.room = 100;
    assert_eq!(fixture.submit(), 2);
    assert_eq!(fixture.taken(), [(1, 1), (2, 1), (3, 1), (4, 2)]);
    assert_eq!(fixture.reap(FAILED), 2);
    assert_eq!(fixture.completions(), [(1, FAILED), (2, FAILED), (3, FAILED)]);
    assert_eq!((fixture.submit(), fixture.reap(FAILED)), (2, 0));
    assert_eq!(fixture.completions(), [(4, FAILED), (5, FAILED)]);
    assert!(fixture.merger.is_idle());
}

#[test]
fn requests_that_the_storage_does_not_take_stay_merged_and_are_submitted_first() {
    let mut fixture = Fixture::new();
    fixture.storage.room = 1;
    fixture.plug(&[1, 2, 11, 12, 21]);
    assert_eq!(fixture.submit(), 1);
    fixture.plug(&[3, 13]);
    assert_eq!(fixture.submit(), 0);
    fixture.storage.room = 100;
    assert_eq!(fixture.submit(), 4);
    assert_eq!(fixture.taken(), [(1, 2), (11, 2), (21, 1), (3, 1), (13, 1)]);
    assert_eq!(fixture.reap(ALL), 0);
    assert_eq!(fixture.completions().len(), 7);
    // Without merges the remaining requests stay in the plug.
    fixture.storage.room = 1;
    fixture.plug(&[31, 41]);
    assert_eq!((fixture.submit(), fixture.plug.len()), (1, 1));
    fixture.plug(&[42]);
    fixture.storage.room = 100;
    assert_eq!(fixture.submit(), 1);
    assert_eq!(fixture.taken(), [(31, 1), (41, 2)]);
}

#[test]
fn a_turn_pulls_deep_while_requests_are_merged() {
    let mut fixture = Fixture::new();
    fixture.storage.room = usize::MAX;
    assert!(fixture.merger.wants_more(0) && !fixture.merger.wants_more(DEEP));
    let mut deep = 0;
    for round in 0..u64::from(PROBE) * 4 {
        deep += u32::from(fixture.merger.wants_more(0));
        fixture.plug(&[round * 100, round * 100 + 50]);
        fixture.submit();
    }
    assert_eq!(deep, 4, "now and then although nothing was merged");
    fixture.plug(&[1, 2]);
    fixture.submit();
    assert!(fixture.merger.wants_more(0));
}

#[test]
fn a_merger_that_merges_nothing_more_ends_what_it_has_merged() {
    let mut fixture = Fixture::new();
    fixture.plug(&[0, 1]);
    fixture.submit();
    assert_eq!(fixture.storage.taken.len(), 1, "one merged request");
    let off = PlugOptions { merge: MergeMode::Off, ..PlugOptions::default() };
    fixture.merger.set_options(&off, &LIMITS, &GEOMETRY);
    assert!(fixture.merger.is_retired() && !fixture.merger.is_idle() && !fixture.merger.wants_more(1));
    fixture.plug(&[2, 3]);
    fixture.submit();
    assert_eq!(fixture.storage.taken.len(), 3, "the later ones as they are");
    fixture.reap(Outcome::Done(ByteLen(1)));
    let mut tags: Vec<u16> = fixture.finished.iter().map(|done| done.tag.index()).collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3]);
    assert!(fixture.merger.is_idle());
    fixture.merger.set_options(&PlugOptions::default(), &LIMITS, &GEOMETRY);
    assert!(!fixture.merger.is_retired() && fixture.merger.wants_more(1));
    fixture.plug(&[4, 5]);
    fixture.submit();
    assert_eq!(fixture.storage.taken.len(), 1, "it merges again");
}
