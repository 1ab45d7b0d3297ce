//! Requests that are ended early: each ends once, nothing else is harmed.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, Op, Outcome};
use mqblk_uring::{FixedBufferUse, Lane};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::worker::MEMORY;
use super::{Trial, Want, Worker};

const ROUNDS: u64 = 10;
/// Longer than a bounce slot, so that a request is several operations.
const LONGEST: u64 = 192 << 10;
const OLD: u8 = 0x11;
const NEW: u8 = 0x22;

/// Requests on stretches that do not overlap, some of which are cancelled at some moment: those that are not are done and their
/// data is right; of those that are, each block is as it was or as it was to be.
///
/// # Panics
/// When it is otherwise.
pub fn some_of_many(trial: &Trial<'_>, disk: &Arc<dyn Disk<Lane>>) -> Seen {
    let (size, block) = (disk.geometry().size.0, u64::from(disk.geometry().logical_block.bytes()));
    let stretch = LONGEST.next_multiple_of(block);
    let count = (size.min(MEMORY / 2) / stretch).min(24);
    let mut random = SmallRng::seed_from_u64(trial.seed ^ 0xca9ce1);
    let (mut aborted, mut too_late) = (0, 0);
    for round in 0..ROUNDS {
        // Rings of which some are too small for all at once; memory of which some must be bounced.
        let mut worker = Worker::new(disk.as_ref(), [8, 16, 64][(round % 3) as usize], FixedBufferUse::Auto);
        let shift = if round % 2 == 0 { 0 } else { 3 };
        let address = |at: u64| at * (stretch + 4096) + shift;
        for at in 0..count {
            worker.fill(address(at), &vec![OLD; stretch as usize]);
        }
        let old: Vec<Want> = (0..count).map(|at| Want::at(WRITE, at * stretch, stretch, address(at))).collect();
        assert!(worker.run(&old).iter().all(|answer| answer.outcome == Outcome::Done(ByteLen(stretch))), "{trial:?}");
        let wanted: Vec<Want> = (0..count)
            .map(|at| {
                let len = random.random_range(1..=stretch / block) * block;
                let op = match random.random_range(0..10) {
                    0..4 => Op::Read,
                    4..8 => Op::Write { fua: random.random_bool(0.2) },
                    8 => Op::WriteZeroes { may_unmap: random.random_bool(0.5), fua: random.random_bool(0.3) },
                    _ => Op::Flush,
                };
                let fill = if op == Op::Read { 0xee } else { NEW };
                worker.fill(address(at), &vec![fill; stretch as usize]);
                match op {
                    Op::Flush => Want::bare(op, 0, 0),
                    op if op.has_data() => Want::at(op, at * stretch, len, address(at)),
                    op => Want::bare(op, at * stretch, len),
                }
            })
            .collect();
        let (when, share) = (random.random_range(0..4), random.random_range(0.1..=1.0));
        let chosen = RefCell::new(HashSet::new());
        let answers = worker.run_and_cancel(&wanted, |turn| {
            // In two goes, the second of which names some of the first again.
            if turn != when && turn != when + 1 {
                return vec![];
            }
            let now: Vec<usize> = (0..wanted.len()).filter(|_| random.random_bool(share)).collect();
            chosen.borrow_mut().extend(now.iter().copied());
            now
        });
        let chosen = chosen.into_inner();
        for (at, (want, answer)) in wanted.iter().zip(&answers).enumerate() {
            let context = format!("{trial:?}, round {round}: {want:?}");
            let done = Outcome::Done(ByteLen(if want.op.has_data() { want.len } else { 0 }));
            if answer.outcome == Outcome::Aborted {
                assert!(chosen.contains(&at), "{context}: nobody cancelled it");
                aborted += 1;
            } else {
                assert_eq!(answer.outcome, done, "{context}");
                too_late += u64::from(chosen.contains(&at));
            }
            if trial.keeps_data && want.op == Op::Read && answer.outcome == done {
                assert!(worker.found(address(at as u64), want.len as usize).iter().all(|b| *b == OLD), "{context}");
            }
        }
        if trial.keeps_data {
            for (at, (want, answer)) in (0..).zip(wanted.iter().zip(&answers)) {
                assert_eq!(worker.one(Want::at(Op::Read, at * stretch, stretch, 0)), Outcome::Done(ByteLen(stretch)));
                let found = worker.found(0, stretch as usize);
                let (inside, beyond) = found.split_at(if want.op == Op::Read { 0 } else { want.len as usize });
                let new = if want.op.has_data() { NEW } else { 0 };
                let context = format!("{trial:?}, round {round}: {want:?} {answer:?}");
                let ended = answer.outcome.is_done();
                let right = |bytes: &[u8]| {
                    bytes.iter().all(|byte| *byte == new) || (!ended && bytes.iter().all(|byte| *byte == OLD))
                };
                assert!(inside.chunks(block as usize).all(right), "{context}");
                assert!(beyond.iter().all(|byte| *byte == OLD), "{context}: beyond its range");
            }
        }
        worker.close();
    }
    Seen { aborted, too_late }
}

/// What became of the requests that were cancelled.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// They were given up.
    pub aborted: u64,
    /// They ended as if nobody had asked.
    pub too_late: u64,
}

const WRITE: Op = Op::Write { fua: false };

/// Tags that the channel has not, or has no more.
pub(super) fn what_is_not_there(trial: &Trial<'_>, disk: &Arc<dyn Disk<Lane>>) {
    let block = u64::from(disk.geometry().logical_block.bytes());
    let mut worker = Worker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    worker.cancel_strangers();
    let want = [Want::at(WRITE, 0, block, 0), Want::bare(Op::Flush, 0, 0)];
    let done = Outcome::Done(ByteLen(block));
    assert_eq!(worker.run(&want)[0].outcome, done, "{trial:?}");
    worker.cancel_strangers();
    assert_eq!(worker.run(&want)[0].outcome, done, "{trial:?}");
    worker.close();
}
