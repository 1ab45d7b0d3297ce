//! virtio-blk: one disk.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_driver::virtio_blk::{self, Options, QueueSet};
use mqblk_driver::{DeviceError, DriverError, Piece, Refused, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use super::{Device, Disk, Done, Endpoint, Lifeline, Set, Status, Transfer, lifeline, socket};
use crate::BenchError;
use crate::plan::{Combination, Plan};

/// Most data pieces of a request that the driver composes.
const MOST_PIECES: u64 = 14;

impl Status for virtio_blk::Status {
    const GOOD: Self = virtio_blk::Status::Ok;
}

/// A disk at a socket.
#[derive(Debug)]
pub struct BlkDevice(virtio_blk::Device);

/// The largest piece that the device takes.
fn piece_max(info: &virtio_blk::Info) -> u32 {
    info.size_max.filter(|max| *max != 0).unwrap_or(u32::MAX)
}

/// The most bytes of a request: whole blocks, in as many pieces as the device and the driver take. Blocks that are larger are
/// several requests, as Linux splits a bio by the limits of its queue.
fn request_max(info: &virtio_blk::Info) -> Result<u64, BenchError> {
    let pieces = info.seg_max.map_or(MOST_PIECES, |max| MOST_PIECES.min(max.max(1).into()));
    let most = pieces * u64::from(piece_max(info));
    let block = u64::from(info.block.bytes());
    if most < block {
        let text =
            format!("the disk's SEG_MAX and SIZE_MAX: found {most} bytes a request, expected a block of {block}");
        return Err(BenchError::Failed(text));
    }
    Ok(most / block * block)
}

impl Device for BlkDevice {
    type Set = BlkSet;

    fn connect(
        plan: &Plan,
        combination: &Combination,
        endpoint: &Endpoint,
        patience: Duration,
    ) -> Result<Self, DriverError> {
        let depth = combination.depth_per_queue();
        let options = Options {
            queues: combination.queues,
            queue_size: plan.queue_size,
            // The plan has checked it against the queue size.
            depth: depth as u16,
            threads: combination.threads(),
            data_per_queue: ByteLen(u64::from(depth) * combination.sizes.max.0),
            shape: plan.descriptors.shape(combination.sizes.max),
            poison_status: plan.verify.is_some(),
            patience,
            ..Options::new(socket(endpoint))
        };
        virtio_blk::Device::connect(&options).map(BlkDevice)
    }

    fn disks(&mut self, _combination: &Combination) -> Result<Vec<Disk>, BenchError> {
        let info = self.0.info();
        let too_big =
            || BenchError::Failed(format!("the disk says it has {} sectors, more than 2^64 bytes", info.capacity.0));
        Ok(vec![Disk {
            name: "the disk".into(),
            capacity: info.capacity.to_len().ok_or_else(too_big)?,
            block: info.block,
            read_only: info.read_only,
            request_max: request_max(info)?,
        }])
    }

    fn take_sets(&mut self) -> Vec<BlkSet> {
        let piece_max = piece_max(self.0.info());
        let set = |mut set: QueueSet| BlkSet { memory: Arc::clone(set.queues()[0].memory()), set, piece_max };
        self.0.take_queues().into_iter().map(set).collect()
    }

    fn server_pid(&self) -> Option<i32> {
        self.0.server_pid()
    }

    fn lifeline(&self) -> Result<Box<dyn Lifeline>, DriverError> {
        lifeline(self.0.lifeline())
    }

    fn stop(self, sets: Vec<BlkSet>) -> Result<(), DriverError> {
        self.0.stop(sets.into_iter().map(|set| set.set).collect())
    }
}

/// Queues of a disk.
#[derive(Debug)]
pub struct BlkSet {
    set: QueueSet,
    memory: Arc<GuestMemory>,
    /// Largest piece of data that the device takes.
    piece_max: u32,
}

impl Set for BlkSet {
    type Status = virtio_blk::Status;

    const SPREADS: bool = true;
    const HANDS_OVER: bool = false;

    #[inline]
    fn queues(&self) -> usize {
        self.set.queues_ref().len()
    }

    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    fn data(&self, queue: usize) -> GuestAddress {
        self.set.queues_ref()[queue].data().0
    }

    #[inline(always)] // else the transfer goes through memory, which was counted at 25 instructions a request
    fn submit(&mut self, queue: usize, transfer: Transfer) -> Result<(), Refused> {
        let Transfer { user, write, start, address, len, .. } = transfer;
        let piece_max = self.piece_max;
        let queue = &mut self.set.queues()[queue];
        if len <= piece_max {
            let data = Piece { address, len };
            return if write { queue.write(user, start, data) } else { queue.read(user, start, data) };
        }
        let pieces = (0..len)
            .step_by(piece_max as usize)
            .map(|at| Piece { address: GuestAddress(address.0 + u64::from(at)), len: piece_max.min(len - at) });
        if write { queue.write_pieces(user, start, pieces) } else { queue.read_pieces(user, start, pieces) }
    }

    #[inline]
    fn makes_room(&self, queue: usize) -> bool {
        self.set.queues_ref()[queue].in_flight() != 0
    }

    #[inline]
    fn publish(&mut self, queue: usize) -> std::io::Result<()> {
        self.set.queues()[queue].publish()
    }

    #[inline]
    fn publish_batch(&mut self, queue: usize, batch: u16) -> std::io::Result<()> {
        let queue = &mut self.set.queues()[queue];
        if queue.unpublished() >= batch { queue.publish() } else { Ok(()) }
    }

    #[inline]
    fn look(&mut self, queue: usize) -> Result<(u16, u16), DeviceError> {
        let queue = &mut self.set.queues()[queue];
        Ok((queue.look()?, queue.in_flight()))
    }

    #[inline(always)] // as above
    fn reap(&mut self, queue: usize) -> Result<Option<Done<virtio_blk::Status>>, DeviceError> {
        let done = self.set.queues()[queue].reap()?;
        Ok(done.map(|done| Done { user: done.user, status: done.status }))
    }

    fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        self.set.wait(count)
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
