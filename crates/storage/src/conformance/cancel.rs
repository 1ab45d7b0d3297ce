//! Cancellation: each request completes once, and no other is affected.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::worker::MEMORY;
use super::{TestRequest, TestTarget, TestWorker};

const ROUNDS: u64 = 10;
/// Longer than a bounce slot, so that a request is several operations.
const LONGEST: u64 = 192 << 10;
const OLD: u8 = 0x11;
const NEW: u8 = 0x22;

/// Runs requests on disjoint ranges, some of which are cancelled at a random turn. Requests that are not cancelled
/// succeed and their data is right; each block of a cancelled one is old or new.
///
/// # Panics
/// When a check fails.
pub fn some_of_many(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) -> CancelCounts {
    let (size, block) = (disk.geometry().size.0, u64::from(disk.geometry().logical_block.bytes()));
    let area = LONGEST.next_multiple_of(block);
    let count = (size.min(MEMORY / 2) / area).min(24);
    let mut random = SmallRng::seed_from_u64(trial.seed ^ 0xca9ce1);
    let (mut aborted, mut too_late) = (0, 0);
    for round in 0..ROUNDS {
        // Some rings are too small for all requests at once; some memory must be bounced.
        let mut worker = TestWorker::new(disk.as_ref(), [8, 16, 64][(round % 3) as usize], FixedBufferUse::Auto);
        let shift = if round % 2 == 0 { 0 } else { 3 };
        let address = |at: u64| at * (area + 4096) + shift;
        for at in 0..count {
            worker.write_memory(address(at), &vec![OLD; area as usize]);
        }
        let old: Vec<TestRequest> =
            (0..count).map(|at| TestRequest::with_data(WRITE, at * area, area, address(at))).collect();
        assert!(worker.run(&old).iter().all(|result| result.outcome == Outcome::Done(ByteLen(area))), "{trial:?}");
        let requests: Vec<TestRequest> = (0..count)
            .map(|at| {
                let len = random.random_range(1..=area / block) * block;
                let op = match random.random_range(0..10) {
                    0..4 => Op::Read,
                    4..8 => Op::Write { fua: random.random_bool(0.2) },
                    8 => Op::WriteZeroes { may_unmap: random.random_bool(0.5), fua: random.random_bool(0.3) },
                    _ => Op::Flush,
                };
                let fill = if op == Op::Read { 0xee } else { NEW };
                worker.write_memory(address(at), &vec![fill; area as usize]);
                match op {
                    Op::Flush => TestRequest::without_data(op, 0, 0),
                    op if op.has_data() => TestRequest::with_data(op, at * area, len, address(at)),
                    op => TestRequest::without_data(op, at * area, len),
                }
            })
            .collect();
        let (when, share) = (random.random_range(0..4), random.random_range(0.1..=1.0));
        let cancelled = RefCell::new(HashSet::new());
        let results = worker.run_and_cancel(&requests, |turn| {
            // In two steps; the second repeats some of the first.
            if turn != when && turn != when + 1 {
                return vec![];
            }
            let now: Vec<usize> = (0..requests.len()).filter(|_| random.random_bool(share)).collect();
            cancelled.borrow_mut().extend(now.iter().copied());
            now
        });
        let cancelled = cancelled.into_inner();
        for (at, (request, result)) in requests.iter().zip(&results).enumerate() {
            let context = format!("{trial:?}, round {round}: {request:?}");
            let done = Outcome::Done(ByteLen(if request.op.has_data() { request.len } else { 0 }));
            if result.outcome == Outcome::Aborted {
                assert!(cancelled.contains(&at), "{context}: nobody cancelled it");
                aborted += 1;
            } else {
                assert_eq!(result.outcome, done, "{context}");
                too_late += u64::from(cancelled.contains(&at));
            }
            if trial.keeps_data && request.op == Op::Read && result.outcome == done {
                assert!(
                    worker.read_memory(address(at as u64), request.len as usize).iter().all(|b| *b == OLD),
                    "{context}"
                );
            }
        }
        if trial.keeps_data {
            for (at, (request, result)) in (0..).zip(requests.iter().zip(&results)) {
                assert_eq!(
                    worker.run_one(TestRequest::with_data(Op::Read, at * area, area, 0)),
                    Outcome::Done(ByteLen(area))
                );
                let found = worker.read_memory(0, area as usize);
                let (inside, beyond) = found.split_at(if request.op == Op::Read { 0 } else { request.len as usize });
                let new = if request.op.has_data() { NEW } else { 0 };
                let context = format!("{trial:?}, round {round}: {request:?} {result:?}");
                let is_done = result.outcome.is_done();
                let right = |bytes: &[u8]| {
                    bytes.iter().all(|byte| *byte == new) || (!is_done && bytes.iter().all(|byte| *byte == OLD))
                };
                assert!(inside.chunks(block as usize).all(right), "{context}");
                assert!(beyond.iter().all(|byte| *byte == OLD), "{context}: beyond its range");
            }
        }
        worker.close();
    }
    CancelCounts { aborted, too_late }
}

/// Outcomes of the cancelled requests.
#[derive(Clone, Copy, Debug)]
pub struct CancelCounts {
    /// Aborted.
    pub aborted: u64,
    /// Completed as if not cancelled.
    pub too_late: u64,
}

const WRITE: Op = Op::Write { fua: false };

/// Cancels tags that the channel does not have, or no longer has.
pub(super) fn unknown_tags(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let block = u64::from(disk.geometry().logical_block.bytes());
    let mut worker = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    worker.cancel_unknown_tags();
    let request = [TestRequest::with_data(WRITE, 0, block, 0), TestRequest::without_data(Op::Flush, 0, 0)];
    let done = Outcome::Done(ByteLen(block));
    assert_eq!(worker.run(&request)[0].outcome, done, "{trial:?}");
    worker.cancel_unknown_tags();
    assert_eq!(worker.run(&request)[0].outcome, done, "{trial:?}");
    worker.close();
}
