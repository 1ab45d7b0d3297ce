//! Large loads: batches larger than the ring, many segments, the whole disk in one request.

use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};

use super::worker::MEMORY;
use super::{TestRequest, TestTarget, TestWorker};

const WRITE: Op = Op::Write { fua: false };

/// Returns the content of block `at`: its number repeated, so that a misplaced block is detected.
fn marked(at: u64, block: u64) -> Vec<u8> {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).to_le_bytes().repeat(block as usize / 8)
}

/// Thousands of requests in one batch to a ring of few entries: back-pressure, and all complete. With memory that
/// direct I/O can use directly, and with memory that must be bounced.
pub(super) fn a_batch_larger_than_the_ring(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let block = u64::from(disk.geometry().logical_block.bytes());
    let count = (MEMORY / block / 2).min(disk.geometry().size.0 / block).min(5000);
    for shift in [0, 3] {
        let mut worker = TestWorker::new(disk.as_ref(), 16, FixedBufferUse::Off);
        let address = |at: u64| at * block + shift;
        let each = |op| -> Vec<TestRequest> {
            (0..count).map(|at| TestRequest::with_data(op, at * block, block, address(at))).collect()
        };
        for at in 0..count {
            worker.write_memory(address(at), &marked(at, block));
        }
        let done = Outcome::Done(ByteLen(block));
        assert!(worker.run(&each(WRITE)).iter().all(|result| result.outcome == done), "{trial:?}");
        worker.write_memory(0, &vec![0xdd; (count * block + shift) as usize]);
        assert!(worker.run(&each(Op::Read)).iter().all(|result| result.outcome == done), "{trial:?}");
        for at in 0..if trial.keeps_data { count } else { 0 } {
            assert_eq!(worker.read_memory(address(at), block as usize), marked(at, block), "{trial:?}: block {at}");
        }
        worker.close();
    }
}

/// As many segments as the disk allows, whole blocks and odd bytes, in guest memory in reverse order.
pub(super) fn many_segments(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let block = u64::from(disk.geometry().logical_block.bytes());
    let mut worker = TestWorker::new(disk.as_ref(), 16, FixedBufferUse::Auto);
    for segment in [8, 24, block] {
        let space = (disk.geometry().size.0 / 2 / segment).min(MEMORY / 2 / segment);
        let limit = u64::from(disk.limits().max_segments).min(4096).min(space);
        let count = limit - limit % (block / segment.min(block)).max(1);
        let len = (count * segment) / block * block;
        let count = len.div_ceil(segment);
        let place = |at: u64| (MEMORY - (at + 1) * 2 * segment, segment.min(len - at * segment) as u32);
        let segments: Vec<(u64, u32)> = (0..count).map(place).collect();
        assert_eq!(segments.iter().map(|(_, len)| u64::from(*len)).sum::<u64>(), len);
        let data: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
        for ((address, run), at) in segments.iter().zip((0..).step_by(segment as usize)) {
            worker.write_memory(*address, &data[at..at + *run as usize]);
        }
        let request = |op| TestRequest { op, start: block, len, segments: Some(segments.clone()) };
        let done = Outcome::Done(ByteLen(len));
        assert_eq!(worker.run_one(request(WRITE)), done, "{trial:?}: {count} segments of {segment}");
        worker.write_memory(0, &vec![0; MEMORY as usize]);
        assert_eq!(worker.run_one(request(Op::Read)), done, "{trial:?}: {count} segments of {segment}");
        if trial.keeps_data {
            let found: Vec<u8> =
                segments.iter().flat_map(|(address, run)| worker.read_memory(*address, *run as usize)).collect();
            assert!(found == data, "{trial:?}: {count} segments of {segment}");
        }
    }
    worker.close();
}

/// The largest transfer that memory allows, aligned and not, then the whole disk zeroed and discarded at once.
pub(super) fn large_ranges(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let (size, block) = (disk.geometry().size.0, u64::from(disk.geometry().logical_block.bytes()));
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Auto);
    let len = size.min(MEMORY - block) / block * block;
    for address in [0, 5] {
        let data: Vec<u8> = (0..len / block).flat_map(|at| marked(at + address, block)).collect();
        worker.write_memory(address, &data);
        assert_eq!(
            worker.run_one(TestRequest::with_data(Op::Write { fua: true }, 0, len, address)),
            Outcome::Done(ByteLen(len))
        );
        worker.write_memory(address, &vec![0xdd; len as usize]);
        assert_eq!(
            worker.run_one(TestRequest::with_data(Op::Read, 0, len, address)),
            Outcome::Done(ByteLen(len)),
            "{trial:?}"
        );
        if trial.keeps_data {
            assert!(
                worker.read_memory(address, len as usize) == data,
                "{trial:?}: {len} bytes at memory address {address}"
            );
        }
    }
    for op in [Op::WriteZeroes { may_unmap: true, fua: true }, Op::WriteZeroes { may_unmap: false, fua: false }] {
        worker.write_memory(0, &vec![0xdd; len as usize]);
        assert_eq!(worker.run_one(TestRequest::with_data(WRITE, 0, len, 0)), Outcome::Done(ByteLen(len)));
        assert_eq!(
            worker.run_one(TestRequest::without_data(op, 0, size)),
            Outcome::Done(ByteLen::ZERO),
            "{trial:?}: {op:?}"
        );
        assert_eq!(worker.run_one(TestRequest::with_data(Op::Read, 0, len, 0)), Outcome::Done(ByteLen(len)));
        if trial.keeps_data {
            assert!(worker.read_memory(0, len as usize) == vec![0; len as usize], "{trial:?}: {op:?}");
        }
    }
    if disk.limits().discard.is_some() {
        let discard = worker.run_one(TestRequest::without_data(Op::Discard { secure: false }, 0, size));
        assert_eq!(discard, Outcome::Done(ByteLen::ZERO), "{trial:?}");
    }
    worker.close();
}

/// Data that one channel wrote is read by another, after the first was closed and beside one that is open.
pub(super) fn closed_and_opened_again(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let block = u64::from(disk.geometry().logical_block.bytes());
    let done = Outcome::Done(ByteLen(block));
    let mut first = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    let mut second = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    for round in 0..5 {
        first.write_memory(0, &marked(round, block));
        assert_eq!(first.run_one(TestRequest::with_data(WRITE, round * block, block, 0)), done, "{trial:?}");
        first.close();
        assert_eq!(second.run_one(TestRequest::with_data(Op::Read, round * block, block, 0)), done, "{trial:?}");
        assert!(!trial.keeps_data || second.read_memory(0, block as usize) == marked(round, block), "{trial:?}");
        first = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    }
    first.close();
    second.close();
}
