//! The blkfront driver as a device to load.

use std::sync::{Mutex, PoisonError};

use mqblk_core::ByteLen;
use mqblk_driver::blkfront::{self, BlkfrontInfo, BlkfrontQueueSet};
use mqblk_driver::{DataSegment, DriverError, SubmitError};
use mqblk_memory::PAGE_BYTES;

use crate::BenchError;
use crate::device::{Device, DeviceDisk, IoOp, ServerMonitor, ThreadQueues, Transfer, TransferStatus};
use crate::interface::queue_set::{of_a_disks_set, of_every_set};
use crate::plan::Combination;

/// Most bytes of a segment.
pub(super) const PAGE: u64 = PAGE_BYTES as u64;

impl TransferStatus for blkfront::BlkfrontStatus {
    const GOOD: Self = blkfront::BlkfrontStatus::Ok;
}

/// Returns the most bytes of a request whose data starts at a page: whole blocks. Larger blocks are several requests,
/// as Linux splits a bio by the limits of its queue.
fn max_request(info: &BlkfrontInfo) -> Result<u64, BenchError> {
    let (most, block) = (u64::from(info.max_segments) * PAGE, u64::from(info.block_size.bytes()));
    if most < block {
        let text = format!("{} segments a request: found {most} bytes, expected a block of {block}", info.max_segments);
        return Err(BenchError::Failed(text));
    }
    Ok(most / block * block)
}

impl Device for blkfront::BlkfrontDevice {
    type Queues = XenRings;

    fn disks(&mut self, _combination: &Combination) -> Result<Vec<DeviceDisk>, BenchError> {
        let info = self.info();
        let too_big =
            || BenchError::Failed(format!("the disk says it has {} sectors, 2^64 bytes or more", info.capacity.0));
        Ok(vec![DeviceDisk {
            name: "the disk".into(),
            capacity: info.capacity.to_len().ok_or_else(too_big)?,
            block: info.block_size,
            read_only: info.read_only,
            max_request: max_request(info)?,
            // A request has the number of its sectors in 64 bits.
            max_trim: info.discard.map(|_| u64::from(u32::MAX) / PAGE * PAGE).ok_or("feature-discard"),
            flush: info.flush.then_some(()).ok_or("feature-flush-cache"),
        }])
    }

    fn take_queues(&mut self) -> Vec<XenRings> {
        blkfront::BlkfrontDevice::take_queues(self).into_iter().map(|set| XenRings { set }).collect()
    }

    fn monitor(&self) -> Result<ServerMonitor, DriverError> {
        let backend = Mutex::new(self.backend_monitor()?);
        Ok(Box::new(move |limit| backend.lock().unwrap_or_else(PoisonError::into_inner).wait_gone(limit)))
    }

    fn stop(self, sets: Vec<XenRings>) -> Result<(), DriverError> {
        blkfront::BlkfrontDevice::stop(self, sets.into_iter().map(|set| set.set).collect())
    }
}

/// Rings of a disk.
#[derive(Debug)]
pub(crate) struct XenRings {
    set: BlkfrontQueueSet,
}

impl ThreadQueues for XenRings {
    type Status = blkfront::BlkfrontStatus;

    of_every_set!();
    of_a_disks_set!();
    // As a guest's pages: a request has no more segments than it needs, and no two requests share a page.
    const DATA_ALIGN: u64 = PAGE;

    #[inline(always)] // as for virtio-blk: else the transfer goes through memory
    fn submit(&mut self, queue: usize, transfer: Transfer) -> Result<(), SubmitError> {
        let Transfer { user, op, start, address, len, .. } = transfer;
        let queue = &mut self.set.queues_mut()[queue];
        let data = DataSegment { address, len };
        match op {
            IoOp::Read => queue.read(user, start, data),
            IoOp::Write => queue.write(user, start, data),
            IoOp::Flush => queue.flush(user),
            IoOp::Trim => queue.discard(user, start, ByteLen(len.into()).sectors().0, false),
        }
    }

    #[inline]
    fn publish(&mut self, queue: usize) -> std::io::Result<()> {
        self.set.queues_mut()[queue].publish();
        Ok(())
    }

    #[inline]
    fn publish_batch(&mut self, queue: usize, batch: u16) -> std::io::Result<()> {
        let queue = &mut self.set.queues_mut()[queue];
        if queue.unpublished() >= batch {
            queue.publish();
        }
        Ok(())
    }

    fn calls(&mut self) -> std::io::Result<u64> {
        Ok(self.set.calls())
    }
}
