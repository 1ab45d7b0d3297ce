use super::*;
use mqblk_core::{ByteOffset, DiscardLimits, Tag};
use proptest::prelude::*;

/// A request's buffer: a memory address and a number of segments.
type Memory = (u64, u32);

fn bounds(data: u64, segments: u32) -> Bounds {
    Bounds { data, discard: 5 * 512, zeroes: 4 * 512, segments, block: BlockSize::B512 }
}

fn request(op: Op, start: u64, len: u64, number: usize) -> Request<Memory> {
    let buffer = op.has_data().then_some((number as u64 * 0x1_0000, 1));
    Request { op, start: ByteOffset(start), len: ByteLen(len), tag: Tag::new(0, number as u16), buffer }
}

fn segments(request: &Request<Memory>) -> Option<u32> {
    Some(request.buffer.map_or(0, |(_, segments)| segments))
}

/// Returns the groups that are merged, as indices. `None`: nothing is merged.
fn groups(planner: &mut Planner, batch: &[Request<Memory>], bounds: &Bounds) -> Option<Vec<Vec<usize>>> {
    let merged = planner.plan(batch, bounds, segments);
    if merged == 0 {
        return None;
    }
    let mut groups: Vec<Vec<usize>> = vec![];
    for planned in planner.planned() {
        match groups.last_mut() {
            Some(group) if planned.merged => group.push(planned.index as usize),
            _ => groups.push(vec![planned.index as usize]),
        }
    }
    assert_eq!(merged, batch.len() - groups.len());
    Some(groups)
}

fn planned(list: &[(Op, u64, u64)]) -> Option<Vec<Vec<usize>>> {
    let batch: Vec<_> =
        list.iter().enumerate().map(|(number, (op, at, len))| request(*op, at * 512, len * 512, number)).collect();
    groups(&mut Planner::default(), &batch, &bounds(6 * 512, 100))
}

const READ: Op = Op::Read;
const WRITE: Op = Op::Write { fua: false };
const DURABLE: Op = Op::Write { fua: true };
const DISCARD: Op = Op::Discard { secure: false };
const ZEROES: Op = Op::WriteZeroes { may_unmap: false, fua: false };
const UNMAP: Op = Op::WriteZeroes { may_unmap: true, fua: false };

#[test]
fn neighbours_are_merged_in_any_order_of_arrival() {
    assert_eq!(planned(&[(READ, 0, 1), (READ, 1, 2), (READ, 3, 1)]), Some(vec![vec![0, 1, 2]]));
    assert_eq!(planned(&[(READ, 3, 1), (READ, 1, 2), (READ, 0, 1)]), Some(vec![vec![2, 1, 0]]));
    let two = [(WRITE, 10, 1), (WRITE, 50, 1), (WRITE, 11, 1), (WRITE, 51, 1), (WRITE, 90, 1)];
    assert_eq!(planned(&two), Some(vec![vec![0, 2], vec![1, 3], vec![4]]));
    // A read beside a write that it does not overlap.
    let mixed = [(READ, 0, 1), (WRITE, 1, 1), (READ, 5, 1), (READ, 6, 1), (WRITE, 2, 1)];
    assert_eq!(planned(&mixed), Some(vec![vec![0], vec![1, 4], vec![2, 3]]));
}

#[test]
fn requests_that_do_not_touch_are_not_merged() {
    assert_eq!(planned(&[]), None);
    assert_eq!(planned(&[(READ, 0, 1)]), None);
    assert_eq!(planned(&[(READ, 0, 1), (READ, 2, 1)]), None);
    assert_eq!(planned(&[(READ, 4, 1), (READ, 4, 1), (READ, 3, 2)]), None);
}

#[test]
fn operations_and_flags_are_not_mixed() {
    let kinds = [READ, WRITE, DURABLE, DISCARD, Op::Discard { secure: true }, ZEROES, UNMAP];
    for (first, second) in kinds.iter().flat_map(|first| kinds.iter().map(move |second| (*first, *second))) {
        let found = planned(&[(first, 0, 1), (second, 1, 1)]);
        assert_eq!(found.is_some(), first == second, "{first:?} {second:?}");
    }
}

#[test]
fn nothing_is_merged_across_a_flush() {
    let list = [(WRITE, 0, 1), (Op::Flush, 0, 0), (WRITE, 1, 1), (WRITE, 2, 1), (Op::Flush, 0, 0), (Op::Flush, 0, 0)];
    assert_eq!(planned(&list), Some(vec![vec![0], vec![1], vec![2, 3], vec![4], vec![5]]));
    assert_eq!(planned(&[(WRITE, 0, 1), (Op::Flush, 0, 0), (WRITE, 1, 1)]), None);
}

#[test]
fn lengths_and_segments_are_bounded() {
    let run = |op| (0..12).map(|at| (op, at, 1)).collect::<Vec<_>>();
    let sizes = |op| planned(&run(op)).unwrap().iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!((sizes(READ), sizes(WRITE)), (vec![6, 6], vec![6, 6]));
    assert_eq!((sizes(DISCARD), sizes(ZEROES)), (vec![5, 5, 2], vec![4, 4, 4]));
    // Requests above the bound are not merged.
    assert_eq!(planned(&[(READ, 0, 7), (READ, 7, 1), (READ, 8, 1)]), Some(vec![vec![0], vec![1, 2]]));
    let batch: Vec<_> = (0..7).map(|at| request(READ, at * 512, 512, at as usize)).collect();
    let found = groups(&mut Planner::default(), &batch, &bounds(1 << 20, 3)).unwrap();
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 1]);
}

#[test]
fn the_tighter_bound_counts() {
    let options = PlugOptions { merge_bytes: ByteLen(1 << 20), merge_segments: 100, ..PlugOptions::default() };
    let mut limits = Limits {
        max_transfer: ByteLen(1 << 16),
        max_segments: 7,
        discard: Some(DiscardLimits { granularity: ByteLen(512), max_len: ByteLen(1 << 30) }),
        write_zeroes: None,
        volatile_cache: true,
        cost_per_request: true,
        pins_memory: false,
    };
    let found = Bounds::new(&options, &limits, BlockSize::B4096);
    let want = Bounds { data: 1 << 16, discard: 1 << 20, zeroes: 0, segments: 7, block: BlockSize::B4096 };
    assert_eq!(found, want);
    limits.max_segments = u32::MAX;
    let options = PlugOptions { merge_segments: u32::MAX, ..options };
    assert_eq!(Bounds::new(&options, &limits, BlockSize::B4096).segments, 65535);
}

#[test]
fn a_section_whose_order_may_matter_stays_in_the_order_of_arrival() {
    // The write at 0 overlaps the read after it; the section after the flush is merged.
    let list =
        [(WRITE, 8, 1), (READ, 1, 1), (WRITE, 0, 2), (READ, 2, 1), (Op::Flush, 0, 0), (READ, 2, 1), (READ, 1, 1)];
    let want = [vec![0], vec![1], vec![2], vec![3], vec![4], vec![6, 5]];
    assert_eq!(planned(&list), Some(want.to_vec()));
    assert_eq!(planned(&[(READ, 0, 1), (READ, 1, 1), (READ, 9, 0)]), None, "an empty range");
    // A long write overlaps a read, but not the request next to it.
    assert_eq!(planned(&[(WRITE, 0, 9), (READ, 10, 1), (READ, 11, 1), (READ, 8, 1)]), None);
    assert_eq!(planned(&[(READ, 0, 9), (READ, 10, 1), (READ, 11, 1), (WRITE, 8, 1)]), None);
    // Reads may overlap.
    assert_eq!(planned(&[(READ, 0, 3), (READ, 1, 1), (READ, 2, 1)]), Some(vec![vec![0], vec![1, 2]]));
}

#[test]
fn requests_that_storage_would_refuse_are_not_merged() {
    let odd = [request(READ, 0, 100, 0), request(READ, 100, 412, 1), request(READ, 512, 512, 2)];
    assert_eq!(groups(&mut Planner::default(), &odd, &bounds(1 << 20, 100)), None);
    let mut batch: Vec<_> = (0..4).map(|at| request(READ, at * 512, 512, at as usize)).collect();
    batch[1].buffer = None;
    let mut planner = Planner::default();
    let merged = planner.plan(&batch, &bounds(1 << 20, 100), |request| request.buffer.map(|(_, count)| count));
    assert_eq!(merged, 1);
    assert_eq!(planner.planned().iter().map(|step| step.merged).collect::<Vec<_>>(), [false, false, false, true]);
}

#[test]
fn hostile_numbers_do_not_overflow() {
    let most = u64::MAX - 511;
    let batch = [
        request(READ, most, 511, 0),
        request(READ, most - 512, 512, 1),
        request(READ, u64::MAX, u64::MAX, 2),
        request(READ, u64::MAX - 1, 1, 3),
    ];
    for split in 0..batch.len() {
        let _ = groups(&mut Planner::default(), &batch[split..], &bounds(u64::MAX, u32::MAX));
    }
    let two = [request(READ, most - 512, 512, 0), request(READ, most, 0, 1)];
    assert_eq!(groups(&mut Planner::default(), &two, &bounds(u64::MAX, u32::MAX)), None);
    let two = [request(READ, most - 1024, 512, 0), request(READ, most - 512, 512, 1)];
    assert!(groups(&mut Planner::default(), &two, &bounds(u64::MAX, u32::MAX)).is_some());
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => Just(READ),
        8 => Just(WRITE),
        2 => Just(DURABLE),
        2 => Just(DISCARD),
        1 => Just(Op::Discard { secure: true }),
        1 => Just(ZEROES),
        1 => Just(UNMAP),
        1 => Just(Op::Flush),
    ]
}

/// Batches on a small disk, where many requests touch and some overlap, or on a larger one, where few do.
fn any_batch() -> impl Strategy<Value = Vec<Request<Memory>>> {
    let one = |blocks: u64| (any_op(), 0..blocks, 1_u64..4, 1_u32..4);
    let some = move |blocks| proptest::collection::vec(one(blocks), 0..60);
    // A stream of a few operations, cut and shuffled: much to merge, no overlap.
    let stream =
        (proptest::collection::vec((any_op(), 1_u64..4, 1_u32..4), 1..60), any::<bool>()).prop_map(|(list, one)| {
            let mut at = 0;
            let first = list[0].0;
            let place = |(op, len, segments): (Op, u64, u32)| {
                at += len;
                (if one && op != Op::Flush { first } else { op }, at - len, len, segments)
            };
            list.into_iter().map(place).collect::<Vec<_>>()
        });
    prop_oneof![some(16), some(200), some(10_000), stream.prop_shuffle()].prop_map(|list| {
        let make = |(number, (op, at, len, segments)): (usize, (Op, u64, u64, u32))| {
            let (at, len) = if op == Op::Flush { (0, 0) } else { (at * 512, len * 512) };
            let mut made = request(op, at, len, number);
            if let Some(buffer) = &mut made.buffer {
                buffer.1 = segments;
            }
            made
        };
        list.into_iter().enumerate().map(make).collect()
    })
}

/// Returns a batch's effects: each disk block with its memory, operation and tag.
fn effects<'a>(requests: impl Iterator<Item = &'a Request<Memory>>) -> Vec<(u64, u64, String, usize)> {
    let mut all = vec![];
    for request in requests {
        let memory = request.buffer.map_or(0, |(memory, _)| memory);
        for block in 0..request.len.0.div_ceil(512).max(1) {
            all.push((
                request.start.0 + block * 512,
                memory + block * 512,
                format!("{:?}", request.op),
                request.tag.index().into(),
            ));
        }
    }
    all.sort();
    all
}

fn overlap(one: &Request<Memory>, other: &Request<Memory>) -> bool {
    one.start.0 < other.start.0 + other.len.0 && other.start.0 < one.start.0 + one.len.0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Checks the whole contract of a plan by brute force.
    #[test]
    fn a_plan_changes_nothing_but_the_number_of_requests(batch in any_batch(), most in 1_u64..9, segs in 2_u32..20) {
        let bounds = bounds(most * 512, segs);
        let mut planner = Planner::default();
        let Some(groups) = groups(&mut planner, &batch, &bounds) else {
            // Nothing was merged: checks that nothing could have been.
            for (first, second) in batch.iter().flat_map(|one| batch.iter().map(move |other| (one, other))) {
                let at = |request: &Request<Memory>| usize::from(request.tag.index());
                let (from, to) = (at(first).min(at(second)), at(first).max(at(second)));
                if first.start.0 + first.len.0 != second.start.0 || first.op != second.op || first.len == ByteLen::ZERO
                    || batch[from..to].iter().any(|request| request.op == Op::Flush)
                    || first.len.0 + second.len.0 > bounds.longest(first.op)
                    || segments(first).unwrap() + segments(second).unwrap() > segs {
                    continue;
                }
                // They could, unless requests of their section overlap.
                let start = batch[..from].iter().rposition(|request| request.op == Op::Flush).map_or(0, |at| at + 1);
                let end = batch[to..].iter().position(|request| request.op == Op::Flush).map_or(batch.len(), |at| to + at);
                let section = &batch[start..end];
                let overlaps = section.iter().enumerate().any(|(at, one)| section[..at].iter().any(|other| overlap(one, other)));
                prop_assert!(overlaps, "{first:?} and {second:?} of {batch:?}");
            }
            return Ok(());
        };
        let order: Vec<usize> = groups.iter().flatten().copied().collect();
        // No request is lost or repeated, and every byte keeps its memory.
        prop_assert_eq!(effects(order.iter().map(|at| &batch[*at])), effects(batch.iter()));
        for group in &groups {
            let members: Vec<_> = group.iter().map(|at| &batch[*at]).collect();
            for pair in members.windows(2) {
                prop_assert_eq!(pair[0].start.0 + pair[0].len.0, pair[1].start.0);
                prop_assert_eq!(pair[0].op, pair[1].op);
            }
            if members.len() > 1 {
                let len: u64 = members.iter().map(|member| member.len.0).sum();
                prop_assert!(len <= bounds.longest(members[0].op));
                prop_assert!(members.iter().map(|member| segments(member).unwrap()).sum::<u32>() <= segs);
            }
        }
        for (place, later) in order.iter().enumerate() {
            for earlier in &order[..place] {
                let swapped = earlier > later;
                let (one, other) = (&batch[*earlier], &batch[*later]);
                let cut = one.op == Op::Flush || other.op == Op::Flush;
                let ordered = overlap(one, other) && (one.op.modifies() || other.op.modifies());
                prop_assert!(!swapped || (!cut && !ordered), "{:?} before {:?}", one, other);
            }
        }
    }
}
