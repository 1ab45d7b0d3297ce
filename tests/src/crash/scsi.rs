//! virtio-scsi: several logical units behind the same queues.

use std::sync::Arc;

use mqblk_core::ByteLen;
use mqblk_driver::virtio_scsi::{
    Address, Cdb, Command, Control, Data, Device, Ending, Extent, Lba, Options, QueueSet, Response, Sense, Steer,
    TaskAnswer, TaskManagement,
};
use mqblk_driver::{Piece, Refused, Waker};
use mqblk_memory::{GuestAddress, GuestMemory};

use super::load::DATA;
use super::port::{End, Manage, Order, Port, Work};
use crate::hostile::PATIENCE;

/// The distribution that a load draws request types from.
pub const WORKS: [Work; 32] = {
    let mut works = [Work::Read; 32];
    let mut at = 13;
    while at < 23 {
        works[at] = Work::Write;
        at += 1;
    }
    works[23] = Work::WriteThrough;
    works[24] = Work::Discard;
    works[25] = Work::Zero;
    works[26] = Work::Flush;
    works[27] = Work::Compare;
    works[28] = Work::Compare;
    works[29] = Work::Compare;
    works[30] = Work::Or;
    works[31] = Work::Or;
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

/// Returns the options with which these tests connect to a socket.
pub fn options(socket: std::path::PathBuf, queues: u16) -> Options {
    let mut options = Options::new(socket);
    options.queues = queues;
    options.queue_size = 64;
    options.data_per_queue = ByteLen(DATA);
    options.steer = Steer::Submitter;
    options.poison_status = true;
    (options.patience, options.answer_limit) = (PATIENCE, PATIENCE);
    options
}

/// All queues of a controller.
pub struct Scsi {
    set: QueueSet,
    control: Control,
    units: Vec<Address>,
    /// Task management functions in flight.
    managing: u32,
}

impl Scsi {
    /// Connects, and clears the unit attentions. Returns the device and its queues.
    ///
    /// # Panics
    /// When the daemon does not play along.
    pub fn connect(options: &Options) -> (Device, Scsi) {
        let mut device = Device::connect(options).expect("the controller");
        let mut set = device.take_queues().pop().expect("one set of queues");
        let control = device.take_control().expect("the control queue");
        let units = device.scan(&mut set).expect("units").into_iter().map(|unit| unit.at).collect();
        (device, Scsi { set, control, units, managing: 0 })
    }

    /// Returns the queues.
    pub fn into_set(self) -> QueueSet {
        self.set
    }
}

/// Builds the command for a request. Its parameter list is put at the address of its data.
///
/// # Panics
/// When that address is not in `memory`.
pub fn command(request: &Order, to: Address, memory: &GuestMemory) -> Command {
    let (start, blocks) = (Lba(request.start()), request.sectors());
    let segment = Piece { address: request.data, len: blocks * 512 };
    let sixteen = |operation: u8, blocks: &[(usize, u8)]| {
        let mut cdb = [0; 16];
        cdb[0] = operation;
        cdb[2..10].copy_from_slice(&start.0.to_be_bytes());
        blocks.iter().for_each(|(at, count)| cdb[*at] = *count);
        Cdb::raw(&cdb)
    };
    match request.work {
        Work::Read => Command::read(to, start, blocks, segment),
        Work::Write => Command::write(to, start, blocks, segment, false),
        Work::WriteThrough => Command::write(to, start, blocks, segment, true),
        Work::Flush => Command::flush(to),
        Work::Zero => Command::write_same(to, start, blocks, Piece { len: 512, ..segment }, start.0 % 2 == 0),
        Work::Discard => {
            let extent = |&(start, blocks)| Extent { start: Lba(start), blocks };
            let extents: Vec<Extent> = request.ranges.iter().map(extent).collect();
            let scratch = Piece { len: 512, ..segment };
            Command::unmap(to, &extents, memory, scratch).expect("a few extents")
        }
        Work::Compare => {
            let data = Data::Out(Piece { len: 1024, ..segment });
            Command { to, cdb: sixteen(COMPARE_AND_WRITE, &[(13, 1)]), data }
        }
        Work::Or => Command { to, cdb: sixteen(ORWRITE, &[(13, 1)]), data: Data::Out(segment) },
    }
}

/// Maps the completion of a command to its outcome.
///
/// # Panics
/// When it is an unexpected one.
pub fn judge(user: u32, ending: Ending) -> End {
    match ending {
        Ending::Good => End::Good,
        Ending::Check(sense) if sense.key == MISCOMPARE => End::Miscompare,
        Ending::Check(Sense { key: Sense::UNIT_ATTENTION, asc, ascq, .. }) => End::Attention(asc, ascq),
        Ending::Status(ABORTED) | Ending::Response(Response::Aborted | Response::Reset) => End::Cancelled,
        other => panic!("request {user} failed: {other:?}"),
    }
}

impl Port for Scsi {
    fn queues(&mut self) -> usize {
        self.set.queues().len()
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(self.set.queues()[0].memory())
    }
    fn data(&mut self, queue: usize) -> GuestAddress {
        self.set.queues()[queue].data().0
    }
    fn largest(&mut self) -> u32 {
        u32::MAX
    }
    fn works(&self) -> &[Work] {
        &WORKS
    }
    fn submit(&mut self, queue: usize, user: u32, request: &Order) -> bool {
        let command = command(request, self.units[request.disk], self.set.queues()[0].memory());
        match self.set.submit(queue, user, &command) {
            Ok(()) => true,
            Err(Refused::Full) => false,
            Err(other) => panic!("{request:?}: {other}"),
        }
    }
    fn publish(&mut self) {
        self.set.publish().expect("the kick");
    }
    fn reap(&mut self, done: &mut Vec<(u32, End)>) {
        for queue in 0..self.queues() {
            self.set.look(queue).expect("a device that keeps the protocol");
            while let Some(one) = self.set.reap(queue).expect("a device that keeps the protocol") {
                done.push((one.user, judge(one.user, one.ending)));
            }
        }
        while let Some(task) = self.control.reap().expect("a device that keeps the protocol") {
            assert_eq!(task.answer, TaskAnswer::Complete);
            self.managing -= 1;
        }
        while self.control.event().expect("a device that keeps the protocol").is_some() {}
    }
    fn wait(&mut self) {
        self.set.wait(1).expect("a device that keeps the protocol");
    }
    fn waker(&mut self) -> Waker {
        self.set.waker().expect("a waker")
    }
    fn manage(&mut self, disk: usize, what: Manage) -> bool {
        let (task, tag) = match what {
            Manage::Abort(user) => (TaskManagement::AbortTask, self.set.tag(user)),
            Manage::Reset => (TaskManagement::LogicalUnitReset, 0),
        };
        let sent = self.managing < 4 && self.control.manage(0, task, self.units[disk], tag).expect("the kick");
        self.managing += u32::from(sent);
        sent
    }
    fn is_managing(&self) -> bool {
        self.managing > 0
    }
}
