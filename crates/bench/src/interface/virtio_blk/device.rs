//! The virtio-blk driver as a device to load.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_driver::virtio_blk::{self, BlkConnectOptions, BlkQueue, BlkQueueSet, SectorRange};
use mqblk_driver::{DataSegment, DeviceError, DriverError, SubmitError, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::BenchError;
use crate::device::{
    CompletedTransfer, Device, DeviceDisk, IoOp, ServerMonitor, ThreadQueues, Transfer, TransferStatus,
};
use crate::interface::vhost_user::server_monitor;
use crate::plan::{Combination, Plan};

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// Most data segments of a request of the driver.
const MAX_SEGMENTS: u64 = 14;

impl TransferStatus for virtio_blk::BlkStatus {
    const GOOD: Self = virtio_blk::BlkStatus::Ok;
}

/// A disk at a socket.
#[derive(Debug)]
pub(crate) struct BlkDevice(virtio_blk::BlkDevice);

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

impl BlkDevice {
    /// Connects to the disk at `socket`, trying for `timeout`.
    pub(crate) fn connect(
        plan: &Plan,
        combination: &Combination,
        socket: &Path,
        timeout: Duration,
    ) -> Result<BlkDevice, DriverError> {
        let depth = combination.depth_per_queue();
        let options = BlkConnectOptions {
            queues: combination.queues,
            queue_size: plan.queue_size,
            // Benchmark has checked it against the queue size.
            depth: depth as u16,
            threads: combination.threads(),
            data_per_queue: ByteLen(u64::from(depth) * combination.sizes.max.0),
            descriptors: plan.descriptors.shape(combination.sizes.max),
            packed: plan.packed,
            poison_status: plan.verify.is_some(),
            connect_timeout: timeout,
            ..BlkConnectOptions::new(socket)
        };
        virtio_blk::BlkDevice::connect(&options).map(BlkDevice)
    }
}

impl Device for BlkDevice {
    type Queues = BlkQueues;

    fn disks(&mut self, _combination: &Combination) -> Result<Vec<DeviceDisk>, BenchError> {
        let info = self.0.info();
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
        let piece_max = max_segment(self.0.info());
        let set = |mut set: BlkQueueSet| BlkQueues {
            memory: Arc::clone(set.queues_mut()[0].memory()),
            set,
            max_segment: piece_max,
        };
        self.0.take_queues().into_iter().map(set).collect()
    }

    fn server_pid(&self) -> Option<i32> {
        self.0.server_pid()
    }

    fn monitor(&self) -> Result<Box<dyn ServerMonitor>, DriverError> {
        server_monitor(self.0.hangup_monitor())
    }

    fn stop(self, sets: Vec<BlkQueues>) -> Result<(), DriverError> {
        self.0.stop(sets.into_iter().map(|set| set.set).collect())
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
    memory: Arc<GuestMemory>,
    /// Largest data segment that the device takes.
    max_segment: u32,
}

impl ThreadQueues for BlkQueues {
    type Status = virtio_blk::BlkStatus;

    const SPREADS: bool = true;
    const HANDS_OVER: bool = false;

    #[inline]
    fn queue_count(&self) -> usize {
        self.set.queues().len()
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    fn data_start(&self, queue: usize) -> GuestAddress {
        self.set.queues()[queue].data().0
    }

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
    fn will_have_space(&self, queue: usize) -> bool {
        self.set.queues()[queue].in_flight() != 0
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

    #[inline]
    fn peek(&mut self, queue: usize) -> Result<(u16, u16), DeviceError> {
        let queue = &mut self.set.queues_mut()[queue];
        Ok((queue.poll()?, queue.in_flight()))
    }

    #[inline(always)] // as above
    fn reap(&mut self, queue: usize) -> Result<Option<CompletedTransfer<virtio_blk::BlkStatus>>, DeviceError> {
        let done = self.set.queues_mut()[queue].reap()?;
        Ok(done.map(|done| CompletedTransfer { user: done.user_data, status: done.status }))
    }

    fn wait(&mut self, count: u16, limit: Option<Duration>) -> Result<(), DriverError> {
        match limit {
            None => self.set.wait(count),
            Some(limit) => self.set.wait_at_most(count, limit),
        }
    }

    fn kicks(&self) -> u64 {
        self.set.kicks()
    }

    fn calls(&mut self) -> std::io::Result<u64> {
        self.set.calls()
    }

    fn waker(&self) -> std::io::Result<Waker> {
        self.set.waker()
    }
}
