//! Resizing a disk while it is open.

use std::sync::Arc;

use mqblk_core::{ByteLen, Disk, DiskError, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};

use super::{TestRequest, TestTarget, TestWorker};

const WRITE: Op = Op::Write { fua: false };

fn refused(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>, size: u64) {
    let before = disk.geometry();
    let result = disk.resize(Some(ByteLen(size)));
    assert!(matches!(result, Err(DiskError::Size { .. })), "{trial:?}: {size} bytes: {result:?}");
    assert_eq!(disk.geometry(), before, "{trial:?}: after {size} bytes");
}

/// Shrinks and grows a disk under an open channel: requests are checked against the current size, and space that is
/// added again reads as zeroes. Storage that cannot be resized refuses and is unchanged.
pub(super) fn of_writable(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let (whole, block) = (disk.geometry().size.0, u64::from(disk.geometry().logical_block.bytes()));
    assert_eq!(disk.resize(None).ok(), Some(ByteLen(whole)), "{trial:?}");
    for odd in [0, 1, whole + 1, block / 2] {
        refused(trial, disk, odd);
    }
    let mut worker = TestWorker::new(disk.as_ref(), 16, FixedBufferUse::Off);
    let half = whole / 2 - whole / 2 % block;
    let done = Outcome::Done(ByteLen(block));
    worker.write_memory(0, &vec![0x77; block as usize]);
    for at in [half - block, half, whole - block] {
        assert_eq!(worker.run_one(TestRequest::with_data(WRITE, at, block, 0)), done, "{trial:?}");
    }
    let read = |worker: &mut TestWorker, at| {
        worker.write_memory(0, &vec![0xdd; block as usize]);
        let outcome = worker.run_one(TestRequest::with_data(Op::Read, at, block, 0));
        (outcome, worker.read_memory(0, block as usize))
    };
    let holds = |found: &[u8], byte| !trial.keeps_data || found.iter().all(|found| *found == byte);
    if disk.resize(Some(ByteLen(half))).is_err() {
        refused(trial, disk, half);
        assert_eq!(read(&mut worker, whole - block).0, done, "{trial:?}");
        worker.close();
        return;
    }
    assert_eq!(disk.geometry().size, ByteLen(half), "{trial:?}");
    assert_eq!(disk.resize(None).ok(), Some(ByteLen(half)), "{trial:?}");
    for (op, at, len) in [(Op::Read, half, block), (WRITE, half, block), (WRITE, half - block, 2 * block)] {
        assert_eq!(
            worker.run_one(TestRequest::with_data(op, at, len, 0)),
            Outcome::OutOfRange,
            "{trial:?}: {op:?} at {at}"
        );
    }
    let (outcome, found) = read(&mut worker, half - block);
    assert!(outcome == done && holds(&found, 0x77), "{trial:?}: {outcome:?}");
    assert_eq!(disk.resize(Some(ByteLen(whole))).ok(), Some(ByteLen(whole)), "{trial:?}");
    for (at, byte) in [(half - block, 0x77), (half, 0), (whole - block, 0)] {
        let (outcome, found) = read(&mut worker, at);
        assert!(outcome == done && holds(&found, byte), "{trial:?}: at {at}: {outcome:?}");
    }
    assert_eq!(read(&mut worker, whole).0, Outcome::OutOfRange, "{trial:?}");
    match disk.resize(Some(ByteLen(whole + block))) {
        Err(_) => assert_eq!(disk.geometry().size, ByteLen(whole), "{trial:?}"),
        Ok(size) => {
            assert_eq!((size, disk.geometry().size), (ByteLen(whole + block), size), "{trial:?}");
            let (outcome, found) = read(&mut worker, whole);
            assert!(outcome == done && holds(&found, 0), "{trial:?}: {outcome:?}");
            assert_eq!(worker.run_one(TestRequest::with_data(WRITE, whole, block, 0)), done, "{trial:?}");
            assert_eq!(disk.resize(Some(ByteLen(whole))).ok(), Some(ByteLen(whole)), "{trial:?}");
        }
    }
    worker.close();
}

pub(super) fn of_read_only(trial: &TestTarget<'_>, disk: &Arc<dyn Disk<UringContext>>) {
    let size = disk.geometry().size;
    assert_eq!(disk.resize(None).ok(), Some(size), "{trial:?}");
    for requested in [size.0, size.0 / 2, 2 * size.0] {
        refused(trial, disk, requested - requested % u64::from(disk.geometry().logical_block.bytes()));
    }
}
