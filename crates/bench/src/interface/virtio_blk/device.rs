//! The virtio-blk driver as a device to load.

use mqblk_driver::virtio_blk::{self, BlkQueue, BlkQueueSet, SectorRange};
use mqblk_driver::{DataSegment, DriverError, SubmitError};
use mqblk_memory::GuestAddress;

use crate::BenchError;
use crate::device::{Device, DeviceDisk, IoOp, ServerMonitor, ThreadQueues, Transfer, TransferStatus};
use crate::interface::queue_set::{of_a_disks_set, of_every_set};
use crate::interface::vhost_user::server_monitor;
use crate::plan::Combination;

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// Most data segments of a request of the driver.
const MAX_SEGMENTS: u64 = 14;

impl TransferStatus for virtio_blk::BlkStatus {
    const GOOD: Self = virtio_blk::BlkStatus::Ok;
}

/// Returns the largest segment that the device takes.
fn max_segment(info: &virtio_blk::BlkInfo) -> u32 {
    info.size_max.filter(|max| *max != 0).unwrap_or(u32::MAX)
}

/// Returns the most bytes of a request: whole blocks, in as many segments as the device and the driver take. Larger
/// blocks are several requests, as Linux splits a bio by the limits of its queue.
fn max_request(info: &virtio_blk::BlkInfo) -> Result<u64, BenchError> {
    let pieces = info.seg_max.map_or(MAX_SEGMENTS, |max| MAX_SEGMENTS.min(max.max(1).into()));
    let most = pieces * u64::from(max_segment(info));
    let block = u64::from(info.block_size.bytes());
    if most < block {
        let text =
            format!("the disk's SEG_MAX and SIZE_MAX: found {most} bytes a request, expected a block of {block}");
        return Err(BenchError::Failed(text));
    }
    Ok(most / block * block)
}

/// Returns the most bytes of a discard: whole blocks.
fn max_trim(info: &virtio_blk::BlkInfo) -> Result<u64, &'static str> {
    let block = u64::from(info.block_size.bytes());
    let most = info.discard.map_or(0, |(sectors, _)| u64::from(sectors) * SECTOR / block * block);
    if most == 0 { Err("VIRTIO_BLK_F_DISCARD") } else { Ok(most) }
}

impl Device for virtio_blk::BlkDevice {
    type Queues = BlkQueues;

    fn disks(&mut self, _combination: &Combination) -> Result<Vec<DeviceDisk>, BenchError> {
        let info = self.info();
        let too_big =
            || BenchError::Failed(format!("the disk says it has {} sectors, more than 2^64 bytes", info.capacity.0));
        Ok(vec![DeviceDisk {
            name: "the disk".into(),
            capacity: info.capacity.to_len().ok_or_else(too_big)?,
            block: info.block_size,
            read_only: info.read_only,
            max_request: max_request(info)?,
            max_trim: max_trim(info),
            flush: info.flush.then_some(()).ok_or("VIRTIO_BLK_F_FLUSH"),
        }])
    }

    fn take_queues(&mut self) -> Vec<BlkQueues> {
        let max_segment = max_segment(self.info());
        let sets = virtio_blk::BlkDevice::take_queues(self).into_iter();
        sets.map(|set| BlkQueues { set, max_segment }).collect()
    }

    fn server_pid(&self) -> Option<i32> {
        virtio_blk::BlkDevice::server_pid(self)
    }

    fn monitor(&self) -> Result<ServerMonitor, DriverError> {
        server_monitor(self.hangup_monitor())
    }

    fn stop(self, sets: Vec<BlkQueues>) -> Result<(), DriverError> {
        virtio_blk::BlkDevice::stop(self, sets.into_iter().map(|set| set.set).collect())
    }
}

/// Puts a discard or a flush on a queue.
#[cold] // in the hot path it would cost the others instructions
fn submit_without_data(queue: &mut BlkQueue, transfer: Transfer) -> Result<(), SubmitError> {
    let Transfer { user, op, start, len, .. } = transfer;
    let range = SectorRange { start, sectors: (u64::from(len) / SECTOR) as u32, unmap: false };
    if op == IoOp::Flush { queue.flush(user) } else { queue.discard(user, &[range]) }
}

/// Queues of a disk.
#[derive(Debug)]
pub(crate) struct BlkQueues {
    set: BlkQueueSet,
    /// Largest data segment that the device takes.
    max_segment: u32,
}

impl ThreadQueues for BlkQueues {
    type Status = virtio_blk::BlkStatus;

    of_every_set!();
    of_a_disks_set!();

    #[inline(always)] // else the transfer goes through memory: 25 instructions a request
    fn submit(&mut self, queue: usize, transfer: Transfer) -> Result<(), SubmitError> {
        let Transfer { user, op, start, address, len, .. } = transfer;
        let piece_max = self.max_segment;
        let queue = &mut self.set.queues_mut()[queue];
        let write = match op {
            IoOp::Read => false,
            IoOp::Write => true,
            IoOp::Trim | IoOp::Flush => return submit_without_data(queue, transfer),
        };
        if len <= piece_max {
            let data = DataSegment { address, len };
            return if write { queue.write(user, start, data) } else { queue.read(user, start, data) };
        }
        let pieces = (0..len)
            .step_by(piece_max as usize)
            .map(|at| DataSegment { address: GuestAddress(address.0 + u64::from(at)), len: piece_max.min(len - at) });
        if write { queue.write_segments(user, start, pieces) } else { queue.read_segments(user, start, pieces) }
    }

    #[inline]
    fn publish(&mut self, queue: usize) -> std::io::Result<()> {
        self.set.queues_mut()[queue].publish()
    }

    #[inline]
    fn publish_batch(&mut self, queue: usize, batch: u16) -> std::io::Result<()> {
        let queue = &mut self.set.queues_mut()[queue];
        if queue.unpublished() >= batch { queue.publish() } else { Ok(()) }
    }

    fn calls(&mut self) -> std::io::Result<u64> {
        self.set.calls()
    }
}
