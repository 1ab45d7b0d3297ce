//! Invalid requests, and the one right outcome of each.

use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, Errno, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};

use super::{TestRequest, TestTarget, TestWorker};

const INVALID: Outcome = Outcome::Failed(Errno(22)); // EINVAL
const NOTHING: Outcome = Outcome::Done(ByteLen::ZERO);
const MODIFYING: [Op; 5] = [
    Op::Write { fua: false },
    Op::Write { fua: true },
    Op::Discard { secure: false },
    Op::WriteZeroes { may_unmap: true, fua: false },
    Op::WriteZeroes { may_unmap: false, fua: true },
];

/// Unusual ranges, with the outcome of a data request on each.
fn ranges(size: u64, block: u64) -> Vec<(u64, u64, Outcome)> {
    let last = u64::MAX - u64::MAX % block;
    vec![
        (size, block, Outcome::OutOfRange),
        (size - block, 2 * block, Outcome::OutOfRange),
        (0, size + block, Outcome::OutOfRange),
        (size + block, 0, Outcome::OutOfRange),
        (last, block, Outcome::OutOfRange),
        (block, last, Outcome::OutOfRange),
        (last, last, Outcome::OutOfRange),
        (u64::MAX, u64::MAX, Outcome::OutOfRange),
        (1 << 63, block, Outcome::OutOfRange),
        (0, 0, NOTHING),
        (size, 0, NOTHING),
        (1, block, INVALID),
        (block / 2, block, INVALID),
        (0, block - 1, INVALID),
        (0, 1, INVALID),
        (size - block / 2, block / 2, INVALID),
    ]
}

/// Returns a request on a range; data requests have one block of memory for any range.
fn request(op: Op, start: u64, len: u64, block: u64) -> TestRequest {
    let segments = op.has_data().then(|| vec![(0, block as u32)]);
    TestRequest { op, start, len, segments }
}

/// The disk is filled by requests of this many bytes.
const PIECE: u64 = 64 << 10;

pub(super) fn of_writable(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let (size, block) = (disk.geometry().size.0, u64::from(disk.geometry().logical_block.bytes()));
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Auto);
    worker.write_memory(0, &vec![0x11; size.min(super::worker::MEMORY) as usize]);
    for start in (0..size).step_by(PIECE as usize) {
        let len = PIECE.min(size - start);
        let write = TestRequest::with_data(Op::Write { fua: false }, start, len, 0);
        assert_eq!(worker.run_one(write), Outcome::Done(ByteLen(len)), "{trial:?}: write of {len} bytes at {start}");
    }
    worker.write_memory(0, &[0xee; 65536]);
    for op in MODIFYING.into_iter().chain([Op::Read]) {
        for (start, len, want) in ranges(size, block) {
            let got = worker.run_one(request(op, start, len, block));
            assert_eq!(got, want, "{trial:?}: {op:?} of {len} bytes at {start}");
        }
        if op.has_data() {
            assert_eq!(
                worker.run_one(TestRequest::without_data(op, 0, block)),
                INVALID,
                "{trial:?}: {op:?} without a buffer"
            );
            if trial.keeps_data {
                let short = request(op, 0, 2 * block, block);
                assert_eq!(worker.run_one(short), INVALID, "{trial:?}: {op:?} with a buffer that is too short");
            }
        }
    }
    let secure = worker.run_one(TestRequest::without_data(Op::Discard { secure: true }, 0, block));
    assert_eq!(secure, Outcome::Unsupported, "{trial:?}: no backend erases");
    // An invalid request between valid ones does not affect them.
    let good = || request(Op::Read, 0, block, block);
    let mixed = worker.run(&[good(), request(Op::Read, size, block, block), good()]);
    let outcomes: Vec<Outcome> = mixed.iter().map(|result| result.outcome).collect();
    let done = Outcome::Done(ByteLen(block));
    assert_eq!(outcomes, [done, Outcome::OutOfRange, done], "{trial:?}");
    if trial.keeps_data {
        for at in 0..size / block {
            assert_eq!(worker.run_one(request(Op::Read, at * block, block, block)), done);
            assert!(
                worker.read_memory(0, block as usize).iter().all(|byte| *byte == 0x11),
                "{trial:?}: block {at} changed"
            );
        }
    }
    worker.close();
}

pub(super) fn of_read_only(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let (size, block) = (disk.geometry().size.0, u64::from(disk.geometry().logical_block.bytes()));
    assert!(disk.geometry().read_only && disk.limits().discard.is_none() && disk.limits().write_zeroes.is_none());
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Auto);
    let first = |worker: &mut TestWorker| {
        assert_eq!(worker.run_one(request(Op::Read, 0, block, block)), Outcome::Done(ByteLen(block)));
        worker.read_memory(0, block as usize)
    };
    let before = first(&mut worker);
    worker.write_memory(0, &vec![0x77; block as usize]);
    for op in MODIFYING.into_iter().chain([Op::Discard { secure: true }]) {
        for (start, len) in [(0, block), (0, size), (size, block), (u64::MAX, u64::MAX), (0, 0), (1, 1)] {
            let got = worker.run_one(request(op, start, len, block));
            assert_eq!(got, Outcome::ReadOnly, "{trial:?}: {op:?} of {len} bytes at {start}");
        }
    }
    for (start, len, want) in ranges(size, block) {
        let got = worker.run_one(request(Op::Read, start, len, block));
        assert_eq!(got, want, "{trial:?}: read of {len} bytes at {start}");
    }
    assert_eq!(worker.run_one(TestRequest::without_data(Op::Flush, 0, 0)), NOTHING, "{trial:?}");
    if trial.keeps_data {
        assert_eq!(first(&mut worker), before, "{trial:?}");
    }
    worker.close();
}
