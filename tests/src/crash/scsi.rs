//! virtio-scsi: several logical units behind the same queues, and a daemon with them.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_driver::virtio_scsi::{
    Cdb, Command, CommandData, CommandOutcome, CommandResponse, ControlQueues, Extent, Lba, LunAddress,
    ScsiConnectOptions, ScsiController, ScsiQueueSet, Sense, SteeringPolicy, TaskManagementFunction,
    TaskManagementResponse,
};
use mqblk_driver::{DataSegment, SubmitError, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use super::daemon::RestartableDaemon;
use super::load::DATA_BYTES;
use super::rig::{CrashRig, Device};
use crate::hostile::TIMEOUT;
use crate::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType, TaskFunction};

/// Distribution of a load's request types.
pub const REQUEST_MIX: [RequestType; 32] = {
    let mut works = [RequestType::Read; 32];
    let mut at = 13;
    while at < 23 {
        works[at] = RequestType::Write;
        at += 1;
    }
    works[23] = RequestType::WriteThrough;
    works[24] = RequestType::Discard;
    works[25] = RequestType::WriteZeroes;
    works[26] = RequestType::Flush;
    works[27] = RequestType::CompareAndWrite;
    works[28] = RequestType::CompareAndWrite;
    works[29] = RequestType::CompareAndWrite;
    works[30] = RequestType::OrWrite;
    works[31] = RequestType::OrWrite;
    works
};

/// COMPARE AND WRITE of one block.
const COMPARE_AND_WRITE: u8 = 0x89;
/// ORWRITE (16).
const ORWRITE: u8 = 0x8b;
/// TASK ABORTED.
const ABORTED: u8 = 0x40;
/// MISCOMPARE DURING VERIFY OPERATION.
const MISCOMPARE: u8 = 0x0e;

/// Returns the options for connections of these tests to a socket.
pub fn connect_options(socket: std::path::PathBuf, queues: u16) -> ScsiConnectOptions {
    let mut options = ScsiConnectOptions::new(socket);
    options.queues = queues;
    options.queue_size = 64;
    options.data_per_queue = ByteLen(DATA_BYTES);
    options.steering = SteeringPolicy::Submitter;
    options.poison_status = true;
    (options.connect_timeout, options.reply_timeout) = (TIMEOUT.time(), TIMEOUT.time());
    options
}

/// All queues of a controller.
pub struct ScsiQueues {
    set: ScsiQueueSet,
    control: ControlQueues,
    units: Vec<LunAddress>,
    /// Task management functions in flight.
    tmf_in_flight: u32,
}

impl ScsiQueues {
    /// Connects, and clears the unit attentions. Returns the device and its queues.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(options: &ScsiConnectOptions) -> (ScsiController, ScsiQueues) {
        let mut device = ScsiController::connect(options).expect("the controller");
        let mut set = device.take_queues().pop().expect("one set of queues");
        let control = device.take_control().expect("the control queue");
        let units = device.scan(&mut set).expect("units").into_iter().map(|unit| unit.address).collect();
        (device, ScsiQueues { set, control, units, tmf_in_flight: 0 })
    }

    /// Returns the queues.
    pub fn into_set(self) -> ScsiQueueSet {
        self.set
    }
}

/// Builds the command for a request. Writes its parameter list to the address of its data.
///
/// # Panics
/// When that address is not in `memory`.
pub fn scsi_command(request: &LoadRequest, to: LunAddress, memory: &GuestMemory) -> Command {
    let (start, blocks) = (Lba(request.start()), request.sectors());
    let segment = DataSegment { address: request.data, len: blocks * 512 };
    let sixteen = |operation: u8, blocks: &[(usize, u8)]| {
        let mut cdb = [0; 16];
        cdb[0] = operation;
        cdb[2..10].copy_from_slice(&start.0.to_be_bytes());
        blocks.iter().for_each(|(at, count)| cdb[*at] = *count);
        Cdb::raw(&cdb)
    };
    match request.request_type {
        RequestType::Read => Command::read(to, start, blocks, segment),
        RequestType::Write => Command::write(to, start, blocks, segment, false),
        RequestType::WriteThrough => Command::write(to, start, blocks, segment, true),
        RequestType::Flush => Command::flush(to),
        RequestType::WriteZeroes => {
            Command::write_same(to, start, blocks, DataSegment { len: 512, ..segment }, start.0 % 2 == 0)
        }
        RequestType::Discard => {
            let extent = |&(start, blocks)| Extent { start: Lba(start), blocks };
            let extents: Vec<Extent> = request.ranges.iter().map(extent).collect();
            let scratch = DataSegment { len: 512, ..segment };
            Command::unmap(to, &extents, memory, scratch).expect("a few extents")
        }
        RequestType::CompareAndWrite => {
            let data = CommandData::Out(DataSegment { len: 1024, ..segment });
            Command { address: to, cdb: sixteen(COMPARE_AND_WRITE, &[(13, 1)]), data }
        }
        RequestType::OrWrite => {
            Command { address: to, cdb: sixteen(ORWRITE, &[(13, 1)]), data: CommandData::Out(segment) }
        }
    }
}

/// Maps the completion of a command to its outcome.
///
/// # Panics
/// When it is unexpected.
pub fn request_outcome(user: u32, ending: CommandOutcome) -> RequestOutcome {
    match ending {
        CommandOutcome::Good => RequestOutcome::Good,
        CommandOutcome::CheckCondition(sense) if sense.key == MISCOMPARE => RequestOutcome::Miscompare,
        CommandOutcome::CheckCondition(Sense { key: Sense::UNIT_ATTENTION, asc, ascq, .. }) => {
            RequestOutcome::Attention(asc, ascq)
        }
        CommandOutcome::Status(ABORTED)
        | CommandOutcome::Response(CommandResponse::Aborted | CommandResponse::Reset) => RequestOutcome::Cancelled,
        other => panic!("request {user} failed: {other:?}"),
    }
}

impl DeviceQueues for ScsiQueues {
    fn queue_count(&mut self) -> usize {
        self.set.queues_mut().len()
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(self.set.queues_mut()[0].memory())
    }
    fn data_address(&mut self, queue: usize) -> GuestAddress {
        self.set.queues_mut()[queue].data().0
    }
    fn max_request_bytes(&mut self) -> u32 {
        u32::MAX
    }
    fn request_mix(&self) -> &[RequestType] {
        &REQUEST_MIX
    }
    fn submit(&mut self, queue: usize, user: u32, request: &LoadRequest) -> bool {
        let command = scsi_command(request, self.units[request.disk], self.set.queues_mut()[0].memory());
        match self.set.submit(queue, user, &command) {
            Ok(()) => true,
            Err(SubmitError::Full) => false,
            Err(other) => panic!("{request:?}: {other}"),
        }
    }
    fn publish(&mut self) {
        self.set.publish().expect("the kick");
    }
    fn reap(&mut self, done: &mut Vec<(u32, RequestOutcome)>) {
        for queue in 0..self.queue_count() {
            self.set.poll(queue).expect("a device that keeps the protocol");
            while let Some(one) = self.set.reap(queue).expect("a device that keeps the protocol") {
                done.push((one.user_data, request_outcome(one.user_data, one.outcome)));
            }
        }
        while let Some(task) = self.control.reap().expect("a device that keeps the protocol") {
            assert_eq!(task.response, TaskManagementResponse::Complete);
            self.tmf_in_flight -= 1;
        }
        while self.control.take_event().expect("a device that keeps the protocol").is_some() {}
    }
    fn wait(&mut self) {
        self.set.wait(1).expect("a device that keeps the protocol");
    }
    fn waker(&mut self) -> Waker {
        self.set.waker().expect("a waker")
    }
    fn manage(&mut self, disk: usize, what: TaskFunction) -> bool {
        let (task, tag) = match what {
            TaskFunction::Abort(user) => (TaskManagementFunction::AbortTask, self.set.tag(user)),
            TaskFunction::Reset => (TaskManagementFunction::LogicalUnitReset, 0),
        };
        let sent = self.tmf_in_flight < 4 && self.control.submit(0, task, self.units[disk], tag).expect("the kick");
        self.tmf_in_flight += u32::from(sent);
        sent
    }
    fn is_managing(&self) -> bool {
        self.tmf_in_flight > 0
    }
}

impl Device for ScsiController {
    fn reconnect(&mut self, timeout: Duration) -> Result<(), String> {
        ScsiController::reconnect(self, timeout).map_err(|error| error.to_string())
    }
}

/// A daemon and its controller.
pub type ScsiRig = CrashRig<RestartableDaemon, ScsiController>;

impl ScsiRig {
    /// Starts a daemon with these logical units, by name and settings, in the order of their numbers.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(units: &[(&str, &str)], more: &[&str]) -> ScsiRig {
        let controller = ["--controller", "id=c,socket=FOLDER/c.sock,queues=3"].map(str::to_owned);
        let luns = units.iter().enumerate().flat_map(|(lun, (name, settings))| {
            let unit = format!("controller=c,target=0,lun={lun},path=FOLDER/{name}.img,{settings}");
            ["--lun".to_owned(), unit]
        });
        let names = units.iter().map(|(name, _)| *name);
        CrashRig {
            daemon: RestartableDaemon::of_disks(more, controller.into_iter().chain(luns), names),
            devices: vec![],
        }
    }

    /// Connects to the controller.
    ///
    /// # Panics
    /// When the daemon refuses.
    pub fn connect(&mut self, packed: bool) -> ScsiQueues {
        let options = connect_options(self.path("c.sock"), 3);
        let (device, port) = ScsiQueues::connect(&ScsiConnectOptions { packed, ..options });
        self.devices.push(device);
        port
    }
}
