//! The virtio-scsi driver as a device to load: the logical units of a controller.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_driver::virtio_scsi::{
    self, Command, CommandOutcome, Extent, Lba, LogicalUnit, LunAddress, ScsiCompletion, ScsiConnectOptions,
    ScsiQueueSet, SteeringPolicy,
};
use mqblk_driver::{DataSegment, DeviceError, DriverError, SubmitError};
use mqblk_memory::{GuestAddress, GuestMemory};

use crate::BenchError;
use crate::device::{
    CompletedTransfer, Device, DeviceDisk, IoOp, MAX_PARTS, ServerMonitor, ThreadQueues, Transfer, TransferStatus,
};
use crate::interface::queue_set::of_every_set;
use crate::interface::vhost_user::server_monitor;
use crate::plan::{Case, Combination};

/// Bits of a command's `user` that name the I/O. The other bits are the part, because the command's tag is made of
/// `user` and must be unique.
const PART_SHIFT: u32 = u32::BITS - MAX_PARTS.trailing_zeros();
/// Linux's value for a controller without a `max_sectors`.
const DEFAULT_MAX_SECTORS: u32 = 0xffff;
/// Fewest commands that a thread may have outstanding.
const MIN_OUTSTANDING: u32 = 256;

impl TransferStatus for CommandOutcome {
    const GOOD: Self = CommandOutcome::Good;
}

/// A controller at a socket.
#[derive(Debug)]
pub(crate) struct ScsiDevice {
    device: virtio_scsi::ScsiController,
    sets: Vec<ScsiQueueSet>,
    units: Arc<[UnitGeometry]>,
}

/// Address and block size of a logical unit.
#[derive(Clone, Copy, Debug)]
struct UnitGeometry {
    at: LunAddress,
    /// log2 of a block's bytes.
    block_shift: u32,
    /// log2 of a block's sectors.
    sector_shift: u32,
}

impl UnitGeometry {
    fn new(unit: &LogicalUnit) -> UnitGeometry {
        UnitGeometry {
            at: unit.address,
            block_shift: unit.block_size.bytes().trailing_zeros(),
            sector_shift: unit.sectors_per_block().trailing_zeros(),
        }
    }
}

/// Returns the logical units to load: the first `luns` of each of the first `targets` targets that have this many.
fn select_units(units: &[LogicalUnit], targets: u16, luns: u16) -> Result<Vec<&LogicalUnit>, BenchError> {
    let of_targets: Vec<&[LogicalUnit]> = units.chunk_by(|a, b| a.address.target == b.address.target).collect();
    let wide: Vec<&[LogicalUnit]> =
        of_targets.iter().copied().filter(|units| units.len() >= usize::from(luns)).collect();
    if wide.is_empty() && !of_targets.is_empty() {
        let most = of_targets.iter().map(|units| units.len()).max().unwrap_or(0);
        return Err(BenchError::option("luns", luns, format!("at most {most}, what a target of the controller has")));
    }
    if wide.len() < usize::from(targets) {
        let expected = format!("at most {}, what the controller has with {luns} logical units each", wide.len());
        return Err(BenchError::option("targets", targets, expected));
    }
    Ok(wide[..targets.into()].iter().flat_map(|units| &units[..luns.into()]).collect())
}

impl ScsiDevice {
    /// Connects to the controller at `socket`, trying for `timeout`.
    pub(crate) fn connect(
        case: &Case<'_>,
        socket: &Path,
        steer: SteeringPolicy,
        timeout: Duration,
    ) -> Result<ScsiDevice, DriverError> {
        let Case { plan, combination, .. } = case;
        let depth = combination.depth_per_queue();
        let (threads, iodepth) = (combination.threads(), u32::from(combination.iodepth));
        let outstanding = u32::from(combination.jobs.div_ceil(threads)) * iodepth;
        let options = ScsiConnectOptions {
            queues: combination.queues,
            queue_size: plan.queue_size,
            depth,
            threads,
            max_outstanding: outstanding.max(MIN_OUTSTANDING),
            data_per_queue: ByteLen(u64::from(depth) * combination.sizes.max.0),
            descriptors: plan.descriptors.shape(combination.sizes.max),
            packed: plan.packed,
            steering: steer,
            poison_status: plan.verify.is_some(),
            connect_timeout: timeout,
            ..ScsiConnectOptions::new(socket)
        };
        let mut device = virtio_scsi::ScsiController::connect(&options)?;
        let sets = device.take_queues();
        Ok(ScsiDevice { device, sets, units: Arc::new([]) })
    }
}

impl Device for ScsiDevice {
    type Queues = ScsiQueues;

    fn disks(&mut self, combination: &Combination) -> Result<Vec<DeviceDisk>, BenchError> {
        let units = self.device.scan(&mut self.sets[0])?;
        let chosen = select_units(&units, combination.targets, combination.luns)?;
        let max_sectors = match self.device.info().config.max_sectors {
            0 => DEFAULT_MAX_SECTORS,
            max => max,
        };
        let disk = |unit: &&LogicalUnit| {
            let name = format!("logical unit {}", unit.address);
            let block = u64::from(unit.block_size.bytes());
            let hint = Sector512(max_sectors.into()).to_len().map_or(u64::MAX, |len| len.0);
            let own = unit.limits.max_transfer.map_or(u64::MAX, |blocks| u64::from(blocks) * block);
            let too_big =
                || BenchError::Failed(format!("{name} says it has {} blocks, 2^64 bytes or more", unit.blocks));
            Ok(DeviceDisk {
                capacity: unit.capacity().ok_or_else(too_big)?,
                name,
                block: unit.block_size,
                read_only: unit.read_only,
                max_request: (hint.min(own) / block).max(1) * block,
                max_trim: match unit.limits.max_unmap_blocks {
                    None | Some(0) => Err("UNMAP"),
                    Some(blocks) => Ok(u64::from(blocks) * block),
                },
                flush: Ok(()),
            })
        };
        let disks = chosen.iter().map(disk).collect::<Result<Vec<DeviceDisk>, BenchError>>()?;
        self.units = chosen.iter().map(|unit| UnitGeometry::new(unit)).collect();
        Ok(disks)
    }

    fn take_queues(&mut self) -> Vec<ScsiQueues> {
        let units = &self.units;
        let set = |mut set: ScsiQueueSet| {
            let memory = Arc::clone(set.queues_mut()[0].memory());
            let data = set.queues_mut().iter().map(|queue| queue.data().0).collect();
            ScsiQueues { set, memory, data, units: Arc::clone(units) }
        };
        std::mem::take(&mut self.sets).into_iter().map(set).collect()
    }

    fn server_pid(&self) -> Option<i32> {
        self.device.server_pid()
    }

    fn monitor(&self) -> Result<ServerMonitor, DriverError> {
        server_monitor(self.device.hangup_monitor())
    }

    fn stop(self, sets: Vec<ScsiQueues>) -> Result<(), DriverError> {
        self.device.stop(sets.into_iter().map(|set| set.set).collect())
    }
}

/// Request queues of a controller.
#[derive(Debug)]
pub(crate) struct ScsiQueues {
    set: ScsiQueueSet,
    memory: Arc<GuestMemory>,
    /// Start of each queue's data memory.
    data: Vec<GuestAddress>,
    units: Arc<[UnitGeometry]>,
}

#[inline(always)]
fn completed(completion: ScsiCompletion) -> CompletedTransfer<CommandOutcome> {
    CompletedTransfer { user: completion.user_data & ((1 << PART_SHIFT) - 1), status: completion.outcome }
}

impl ThreadQueues for ScsiQueues {
    type Status = CommandOutcome;

    of_every_set!();

    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    const SPREADS: bool = false;
    const HANDS_OVER: bool = true;

    #[inline]
    fn queue_count(&self) -> usize {
        self.data.len()
    }

    fn data_start(&self, queue: usize) -> GuestAddress {
        self.data[queue]
    }

    #[inline]
    fn submit(&mut self, queue: usize, transfer: Transfer) -> Result<(), SubmitError> {
        let Transfer { user, part, op, disk, start, address, len } = transfer;
        let UnitGeometry { at, block_shift, sector_shift } = self.units[usize::from(disk)];
        // The run has checked that all are whole blocks.
        let (start, blocks, data) = (Lba(start.0 >> sector_shift), len >> block_shift, DataSegment { address, len });
        let command = match op {
            IoOp::Read => Command::read(at, start, blocks, data),
            IoOp::Write => Command::write(at, start, blocks, data, false),
            IoOp::Flush => Command::flush(at),
            // The list of one extent fits into the data of any block.
            IoOp::Trim => {
                Command::unmap(at, &[Extent { start, blocks }], &self.memory, data).ok_or(SubmitError::Empty)?
            }
        };
        self.set.submit(queue, user | part << PART_SHIFT, &command)
    }

    #[inline]
    fn will_have_space(&self, _queue: usize) -> bool {
        // Space is freed by requests of this thread, or by others' on its queues.
        self.set.outstanding() != 0 || self.set.is_serving()
    }

    #[inline]
    fn publish(&mut self, _queue: usize) -> std::io::Result<()> {
        // The steering may have chosen another of this thread's queues.
        self.set.publish()
    }

    #[inline]
    fn publish_batch(&mut self, _queue: usize, batch: u16) -> std::io::Result<()> {
        self.set
            .queues_mut()
            .iter_mut()
            .filter(|queue| queue.unpublished() >= batch)
            .try_for_each(|queue| queue.publish())
    }

    #[inline]
    fn peek(&mut self, queue: usize) -> Result<(u16, u16), DeviceError> {
        let ready = self.set.poll(queue)?;
        Ok((ready, self.set.queues_mut()[queue].in_flight()))
    }

    #[inline(always)] // else the outcome goes through memory, and its load waits for the stores of its parts
    fn reap(&mut self, queue: usize) -> Result<Option<CompletedTransfer<CommandOutcome>>, DeviceError> {
        Ok(self.set.reap(queue)?.map(completed))
    }

    #[inline]
    fn receive_handovers(&mut self) -> std::io::Result<usize> {
        self.set.receive()
    }

    #[inline]
    fn next_handed_back(&mut self) -> Option<CompletedTransfer<CommandOutcome>> {
        self.set.reap_received().map(completed)
    }

    #[inline]
    fn outstanding_elsewhere(&self) -> u32 {
        self.set.remote_outstanding()
    }

    fn handed_over(&self) -> u64 {
        self.set.handed_over()
    }

    fn try_leave(&mut self) -> bool {
        self.set.finish()
    }

    fn calls(&mut self) -> std::io::Result<u64> {
        self.set.calls()
    }
}
