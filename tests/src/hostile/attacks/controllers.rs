//! Guests of a SCSI controller whose commands and task management functions are hostile.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mqblk_core::ByteLen;
use mqblk_driver::virtio_scsi::{
    Cdb, Command, CommandData, ControlQueues, LunAddress, ScsiConnectOptions, ScsiController, ScsiQueueSet,
    SteeringPolicy, TaskManagementFunction,
};
use mqblk_driver::{DataSegment, SubmitError};
use mqblk_memory::GuestAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{Attack, AttackControl};
use crate::hostile::TIMEOUT;

/// Commands in flight on each of two queues.
const DEPTH: u32 = 128;
const QUEUES: u16 = 2;
/// Bytes of a command's data at most.
const DATA: u32 = 4096;
/// Pause while nothing has completed.
const FULL: Duration = Duration::from_micros(200);

const FUNCTIONS: [TaskManagementFunction; 7] = [
    TaskManagementFunction::AbortTask,
    TaskManagementFunction::AbortTaskSet,
    TaskManagementFunction::ClearTaskSet,
    TaskManagementFunction::NexusReset,
    TaskManagementFunction::LogicalUnitReset,
    TaskManagementFunction::QueryTask,
    TaskManagementFunction::QueryTaskSet,
];

/// A controller with its queues. Each command has to end, with any result.
struct HostileController {
    _device: ScsiController,
    set: ScsiQueueSet,
    control: ControlQueues,
    /// Numbers of commands that are not in flight, by queue.
    free: Vec<Vec<u32>>,
    completed_at: Instant,
    random: SmallRng,
}

impl HostileController {
    fn connect(socket: &Path, seed: u64) -> HostileController {
        let mut options = ScsiConnectOptions::new(socket);
        options.queues = QUEUES;
        options.queue_size = 256;
        options.depth = DEPTH;
        options.data_per_queue = ByteLen(u64::from(DEPTH * DATA));
        options.steering = SteeringPolicy::Submitter;
        (options.connect_timeout, options.reply_timeout) = (TIMEOUT.time(), TIMEOUT.time());
        let mut device = ScsiController::connect(&options).expect("the controller");
        let set = device.take_queues().pop().expect("one set of queues");
        let control = device.take_control().expect("the control queue");
        let free = (0..u32::from(QUEUES)).map(|queue| (queue * DEPTH..(queue + 1) * DEPTH).collect()).collect();
        let random = SmallRng::seed_from_u64(seed);
        HostileController { _device: device, set, control, free, completed_at: Instant::now(), random }
    }

    fn address(&mut self) -> LunAddress {
        let target = [0, 0, 0, 0, 1, 255][self.random.random_range(0..6)];
        LunAddress { target, lun: [0, 0, 0, 0, 1, 16383][self.random.random_range(0..6)] }
    }

    /// Fills both queues with commands built by `cdb` and any data.
    fn fill(&mut self, mut cdb: impl FnMut(&mut SmallRng) -> Cdb) {
        for queue in 0..usize::from(QUEUES) {
            let start = self.set.queues_mut()[queue].data().0;
            while let Some(user) = self.free[queue].pop() {
                let at = GuestAddress(start.0 + u64::from(user % DEPTH * DATA));
                let segment = DataSegment { address: at, len: [512, 1, 4096, 24][self.random.random_range(0..4)] };
                let data = match self.random.random_range(0..5) {
                    0 => CommandData::None,
                    1..3 => CommandData::In(segment),
                    _ => CommandData::Out(segment),
                };
                let command = Command { address: self.address(), cdb: cdb(&mut self.random), data };
                match self.set.submit(queue, user, &command) {
                    Ok(()) => {}
                    Err(SubmitError::Full) => {
                        self.free[queue].push(user);
                        break;
                    }
                    Err(other) => panic!("{command:?}: {other}"),
                }
            }
        }
        self.set.publish().expect("the kick");
    }

    /// Fills the control queue.
    fn fill_control(&mut self) {
        loop {
            let function = FUNCTIONS[self.random.random_range(0..FUNCTIONS.len())];
            let (address, user) = (self.address(), self.random.random_range(0..2 * DEPTH));
            let tag = self.set.tag(user);
            if !self.control.submit(0, function, address, tag).expect("the kick") {
                return;
            }
        }
    }

    /// Reaps completions. Returns true if there were any.
    fn reap(&mut self) -> bool {
        let mut any = false;
        for queue in 0..usize::from(QUEUES) {
            self.set.poll(queue).expect("a device that keeps the protocol");
            while let Some(done) = self.set.reap(queue).expect("a device that keeps the protocol") {
                self.free[queue].push(done.user_data);
                any = true;
            }
        }
        while self.control.reap().expect("a device that keeps the protocol").is_some() {
            any = true;
        }
        while self.control.take_event().expect("a device that keeps the protocol").is_some() {}
        if any {
            self.completed_at = Instant::now();
        }
        any
    }

    fn is_idle(&self) -> bool {
        self.free.iter().all(|free| free.len() == DEPTH as usize)
    }

    /// Counts a step if there were completions, else waits for [`FULL`].
    fn settle(&mut self, control: &AttackControl) {
        match self.reap() {
            true => control.count(),
            false => control.pause(FULL),
        }
        // A command may fail or be aborted, but not be lost.
        assert!(self.is_idle() || !TIMEOUT.is_exceeded_since(self.completed_at), "commands do not end");
    }
}

/// Command descriptor blocks of any bytes; every second one has an operation code that exists, with any fields.
fn any_cdb(random: &mut SmallRng) -> Cdb {
    const OPERATIONS: [u8; 24] = [
        0x00, 0x03, 0x12, 0x15, 0x1a, 0x1b, 0x25, 0x28, 0x2a, 0x2e, 0x35, 0x41, 0x42, 0x4d, 0x55, 0x5a, 0x5e, 0x83,
        0x88, 0x89, 0x8a, 0x8b, 0x9e, 0xa0,
    ];
    let mut bytes = [0; 32];
    random.fill(&mut bytes[..]);
    if random.random_bool(0.5) {
        bytes[0] = OPERATIONS[random.random_range(0..OPERATIONS.len())];
        // A small address and length, likely in range.
        bytes[2..16].fill(0);
        bytes[5] = random.random_range(0..16);
        bytes[8] = random.random_range(0..9);
        bytes[13] = random.random_range(0..9);
    }
    Cdb::raw(&bytes)
}

/// Any commands on two queues, 128 at a time on each.
pub fn bad_commands(socket: PathBuf, seed: u64) -> Attack {
    Box::new(move |control| {
        let mut controller = HostileController::connect(&socket, seed);
        while !control.is_stopped() {
            controller.fill(any_cdb);
            controller.settle(control);
        }
    })
}

/// Task management functions that fill the control queue, while reads, writes and COMPARE AND WRITEs are in flight.
pub fn task_management(socket: PathBuf, seed: u64) -> Attack {
    Box::new(move |control| {
        let mut controller = HostileController::connect(&socket, seed);
        while !control.is_stopped() {
            controller.fill(|random| {
                let mut bytes = [0; 16];
                bytes[0] = [0x88, 0x8a, 0x89, 0x8b][random.random_range(0..4)];
                (bytes[9], bytes[13]) = (random.random_range(0..64), 1);
                Cdb::raw(&bytes)
            });
            controller.fill_control();
            controller.settle(control);
        }
    })
}
