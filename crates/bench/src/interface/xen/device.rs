//! The blkfront driver as a device to load.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_driver::blkfront::{self, BlkfrontInfo, BlkfrontOptions, BlkfrontQueueSet};
use mqblk_driver::{DataSegment, DeviceError, DriverError, SubmitError, Waker};
use mqblk_memory::{GuestAddress, GuestMemory, PAGE_BYTES};

use super::options::XenOptions;
use super::server::Vbd;
use crate::BenchError;
use crate::device::{
    CompletedTransfer, Device, DeviceDisk, IoOp, ServerMonitor, ThreadQueues, Transfer, TransferStatus,
};
use crate::plan::Combination;

/// Most bytes of a segment.
const PAGE: u64 = PAGE_BYTES as u64;

impl TransferStatus for blkfront::BlkfrontStatus {
    const GOOD: Self = blkfront::BlkfrontStatus::Ok;
}

/// The longest wait for a backend. One that closes waits for its storage, by default 30 s, and flushes.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// A disk of the domain that the benchmark runs in, or acts for on a simulated machine.
#[derive(Debug)]
pub(crate) struct XenDevice(blkfront::BlkfrontDevice);

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

impl XenDevice {
    /// Connects to the backend of `vbd`, trying for `timeout`.
    pub(super) fn connect(
        options: &XenOptions,
        combination: &Combination,
        vbd: &Vbd,
        timeout: Duration,
    ) -> Result<XenDevice, DriverError> {
        let depth = combination.depth_per_queue();
        let own = BlkfrontOptions::new(Arc::clone(&vbd.xen), vbd.number);
        let driver_options = BlkfrontOptions {
            queues: combination.queues,
            ring_order: options.ring_order,
            abi: options.layout().2,
            indirect_segments: options.indirect_segments.unwrap_or(own.indirect_segments),
            // Requests that find no space in the ring wait.
            depth: depth.min(u16::MAX.into()) as u16,
            threads: combination.threads(),
            data_per_queue: ByteLen(u64::from(depth) * combination.sizes.max.0.next_multiple_of(PAGE)),
            connect_timeout: timeout,
            reply_timeout: REPLY_TIMEOUT,
            ..own
        };
        blkfront::BlkfrontDevice::connect(&driver_options).map(XenDevice)
    }
}

impl Device for XenDevice {
    type Queues = XenRings;

    fn disks(&mut self, _combination: &Combination) -> Result<Vec<DeviceDisk>, BenchError> {
        let info = self.0.info();
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
        let set = |mut set: BlkfrontQueueSet| XenRings { memory: Arc::clone(set.queues_mut()[0].memory()), set };
        self.0.take_queues().into_iter().map(set).collect()
    }

    fn server_pid(&self) -> Option<i32> {
        None
    }

    fn monitor(&self) -> Result<Box<dyn ServerMonitor>, DriverError> {
        Ok(Box::new(BackendMonitor(Mutex::new(self.0.backend_monitor()?))))
    }

    fn stop(self, sets: Vec<XenRings>) -> Result<(), DriverError> {
        self.0.stop(sets.into_iter().map(|set| set.set).collect())
    }
}

/// Watches the backend's xenbus state.
#[derive(Debug)]
struct BackendMonitor(Mutex<blkfront::BackendMonitor>);

impl ServerMonitor for BackendMonitor {
    fn wait_gone(&self, limit: Duration) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).wait_gone(limit)
    }
}

/// Rings of a disk.
#[derive(Debug)]
pub(crate) struct XenRings {
    set: BlkfrontQueueSet,
    memory: Arc<GuestMemory>,
}

impl ThreadQueues for XenRings {
    type Status = blkfront::BlkfrontStatus;

    const SPREADS: bool = true;
    const HANDS_OVER: bool = false;
    // As a guest's pages: a request has no more segments than it needs, and no two requests share a page.
    const DATA_ALIGN: u64 = PAGE;

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
    fn will_have_space(&self, queue: usize) -> bool {
        self.set.queues()[queue].in_flight() != 0
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

    #[inline]
    fn peek(&mut self, queue: usize) -> Result<(u16, u16), DeviceError> {
        let queue = &mut self.set.queues_mut()[queue];
        Ok((queue.poll()?, queue.in_flight()))
    }

    #[inline(always)] // as above
    fn reap(&mut self, queue: usize) -> Result<Option<CompletedTransfer<blkfront::BlkfrontStatus>>, DeviceError> {
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
        Ok(self.set.calls())
    }

    fn waker(&self) -> std::io::Result<Waker> {
        self.set.waker()
    }
}
