//! A connected controller: set-up, what it says of itself, and tear-down.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;
use mqblk_vhost_user_client::features as virtio;
use mqblk_vhost_user_client::{Client, HangupMonitor};

use super::control::Control;
use super::inquiry::Unit;
use super::layout::{ControlLayout, QueueLayout};
use super::queue::Queue;
use super::scan;
use super::set::{Net, QueueSet, Steer, bell};
use super::wire::{
    CDB_BYTES, CONFIG_BYTES, CONFIG_SENSE_SIZE, CONTROL_QUEUE, Config, EVENT_BYTES, EVENT_QUEUE, FIRST_REQUEST_QUEUE,
    SENSE_BYTES, feature,
};
use crate::error::{check, check_queue_size};
use crate::setup::{DataArea, Planner, ShapeChoice, Shared};
use crate::{DriverError, calls::Calls};

/// Entries of the control and the event queue.
const CONTROL_QUEUE_SIZE: u16 = 64;

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
    /// The server's socket.
    pub socket: PathBuf,
    /// Request queues to set up; fewer than the server offers is fine.
    pub queues: u16,
    /// Entries of each request queue, a power of two.
    pub queue_size: u16,
    /// Commands that will be in flight on one queue, for [`ShapeChoice::Auto`].
    pub depth: u32,
    /// Threads that will own the queues: queue `q` goes to set `q` modulo `threads`.
    pub threads: u16,
    /// Most commands that one thread has outstanding, on whatever queues.
    pub outstanding: u32,
    /// Data memory of each queue.
    pub data_per_queue: ByteLen,
    /// Direct or indirect descriptors.
    pub shape: ShapeChoice,
    /// Use EVENT_IDX when offered.
    pub event_idx: bool,
    /// Which queue a command goes to.
    pub steer: Steer,
    /// Spoil each answer before its command, to see a device that does not write it. Costs a cache line's way.
    pub poison_status: bool,
    /// Have the server keep which commands are in flight, if it can, where a server after it goes on.
    pub inflight: bool,
    /// How long to try to connect.
    pub patience: Duration,
    /// How long to wait for an answer, on the socket or while scanning.
    pub answer_limit: Duration,
}

impl Options {
    /// One queue of 256 entries with 1 MiB of data, owned by one thread.
    pub fn new(socket: impl Into<PathBuf>) -> Options {
        Options {
            socket: socket.into(),
            queues: 1,
            queue_size: 256,
            depth: 64,
            threads: 1,
            outstanding: 1024,
            data_per_queue: ByteLen(1 << 20),
            shape: ShapeChoice::Auto,
            event_idx: true,
            steer: Steer::Target,
            poison_status: false,
            inflight: true,
            patience: Duration::from_secs(5),
            answer_limit: Duration::from_secs(10),
        }
    }
}

/// What the controller says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// The configuration, or what QEMU would say where the server leaves it to the VMM.
    pub config: Config,
    /// Request queues that can be set up.
    pub queues: u16,
    /// Logical units that come and go are events.
    pub hotplug: bool,
    /// Parameters that change are events.
    pub change: bool,
    /// Virtio feature bits agreed on.
    pub features: u64,
}

/// A connected controller. The queues are handed out once; this end keeps the conversation.
#[derive(Debug)]
pub struct Device {
    client: Client,
    info: Info,
    rings: u16,
    sets: Vec<QueueSet>,
    control: Option<Control>,
    scan: DataArea,
    answer_limit: Duration,
    shared: Shared,
    socket: PathBuf,
}

impl Device {
    /// Connects, agrees on features, and starts the queues.
    ///
    /// # Errors
    /// When the server is not there, refuses a step, or cannot do what the options ask for.
    pub fn connect(options: &Options) -> Result<Device, DriverError> {
        let mut client = Client::connect(&options.socket, options.patience, options.answer_limit)?;
        let event = if options.event_idx { virtio::EVENT_IDX } else { 0 };
        let wanted = feature::ALL | virtio::VERSION_1 | virtio::INDIRECT_DESC | event;
        let features = client.negotiate(wanted)?;
        // A server without MQ has one request queue.
        let offered = client.queue_count()?.saturating_sub(FIRST_REQUEST_QUEUE).max(1);
        let config = configuration(&mut client, offered)?;
        let has = |bit: u64| features & bit != 0;
        let queues = offered.min(config.num_queues.clamp(1, u16::MAX.into()) as u16);
        let (hotplug, change) = (has(feature::HOTPLUG), has(feature::CHANGE));
        let info = Info { config, queues, hotplug, change, features };
        check("queues", options.queues, 1..=info.queues)?;
        check("threads", options.threads, 1..=options.queues)?;
        check_queue_size(options.queue_size)?;

        let mut planner = Planner::new();
        let control = ControlLayout::new(&mut planner, CONTROL_QUEUE_SIZE);
        let scan = DataArea { start: planner.part(scan::MEMORY.0), len: scan::MEMORY };
        let layout = |_| QueueLayout::new(&mut planner, options.queue_size, options.data_per_queue);
        let layouts: Vec<QueueLayout> = (0..options.queues).map(layout).collect();
        let mut shared = planner.share(&mut client)?;
        if options.inflight {
            let size = options.queue_size.max(CONTROL_QUEUE_SIZE);
            shared.track(&mut client, FIRST_REQUEST_QUEUE + options.queues, size)?;
        }
        let control = start_control(&mut client, &mut shared, control, features)?;
        let sets = start_queues(&mut client, &mut shared, options, &layouts, features)?;
        tracing::debug!(?info, queues = options.queues, "controller started");
        Ok(Device {
            client,
            info,
            rings: FIRST_REQUEST_QUEUE + options.queues,
            sets,
            control: Some(control),
            scan,
            answer_limit: options.answer_limit,
            shared,
            socket: options.socket.clone(),
        })
    }

    /// Connects again, to a server that serves the same controller: the one before has left or died. The queues go on where they
    /// were, in whichever threads they are; commands in flight are answered by the new server.
    ///
    /// # Errors
    /// When the server is not there within `patience`, refuses a step, or is not as the one before was.
    pub fn reconnect(&mut self, patience: Duration) -> Result<(), DriverError> {
        let mut client = Client::connect(&self.socket, patience, self.answer_limit)?;
        client.renegotiate(self.info.features)?;
        self.info.config = configuration(&mut client, self.info.queues)?;
        self.shared.resume(&mut client)?;
        self.client = client;
        Ok(())
    }

    /// What the controller says of itself.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The request queues, a set for each thread. Empty the second time.
    pub fn take_queues(&mut self) -> Vec<QueueSet> {
        std::mem::take(&mut self.sets)
    }

    /// The control and the event queue. None the second time.
    pub fn take_control(&mut self) -> Option<Control> {
        self.control.take()
    }

    /// Finds all logical units, in the order of their addresses, with the first queue of `set`, on which nothing else may be in
    /// flight.
    ///
    /// # Errors
    /// When the device breaks the protocol, or leaves a command unanswered.
    pub fn scan(&self, set: &mut QueueSet) -> Result<Vec<Unit>, DriverError> {
        scan::scan(set, &self.info.config, self.scan.start, self.answer_limit)
    }

    /// Memory of the scan, for whoever needs some between scans: page aligned.
    pub fn scratch(&self) -> (GuestAddress, ByteLen) {
        (self.scan.start, self.scan.len)
    }

    /// The server's process, if the system says.
    pub fn server_pid(&self) -> Option<i32> {
        self.client.server_pid()
    }

    /// Something to see the server's end with.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn lifeline(&self) -> io::Result<HangupMonitor> {
        self.client.hangup_monitor()
    }

    /// Stops all queues: the server touches the shared memory no more.
    ///
    /// # Errors
    /// When the server does not answer, or not in time.
    pub fn stop(mut self, sets: Vec<QueueSet>) -> Result<(), DriverError> {
        // What ends commands last; its own answers are waited for by nobody.
        for index in (0..self.rings).rev() {
            self.client.stop_queue(index)?;
        }
        drop(sets);
        Ok(())
    }
}

/// Reads and judges the configuration, and sets the sizes that a driver sets, as Linux does.
fn configuration(client: &mut Client, offered: u16) -> Result<Config, DriverError> {
    if !client.has_config() {
        return Ok(Config::of_vmm(offered.into()));
    }
    let mut bytes = [0; CONFIG_BYTES];
    client.read_config(0, &mut bytes)?;
    let mut config = Config::from_bytes(&bytes);
    let (sense, cdb) = (SENSE_BYTES as u32, CDB_BYTES as u32);
    if (config.sense_size, config.cdb_size) != (sense, cdb) {
        let sizes: Vec<u8> = [sense, cdb].into_iter().flat_map(u32::to_le_bytes).collect();
        client.write_config(CONFIG_SENSE_SIZE, &sizes)?;
        client.read_config(0, &mut bytes)?;
        config = Config::from_bytes(&bytes);
    }
    let wrong = |field, found: u32, expected| DriverError::Config { field, found: found.into(), expected };
    if config.num_queues == 0 {
        return Err(wrong("num_queues", 0, "at least 1"));
    }
    if config.sense_size != sense {
        return Err(wrong("sense_size", config.sense_size, "96, as was written"));
    }
    if config.cdb_size != cdb {
        return Err(wrong("cdb_size", config.cdb_size, "32, as was written"));
    }
    if config.event_info_size > EVENT_BYTES || config.event_info_size == 0 {
        return Err(wrong("event_info_size", config.event_info_size, "1 to 16"));
    }
    if config.max_target > 255 {
        return Err(wrong("max_target", config.max_target.into(), "at most 255"));
    }
    if config.max_lun > super::Address::MAX_LUN.into() {
        return Err(wrong("max_lun", config.max_lun, "at most 16383"));
    }
    Ok(config)
}

fn start_control(
    client: &mut Client,
    shared: &mut Shared,
    layout: ControlLayout,
    features: u64,
) -> Result<Control, DriverError> {
    let (call, calls) = bell()?;
    let control = shared.start(client, CONTROL_QUEUE, &layout.control, features, &call)?;
    let event = shared.start(client, EVENT_QUEUE, &layout.event, features, &call)?;
    Control::new(control, event, &shared.memory, layout, calls)
}

fn start_queues(
    client: &mut Client,
    shared: &mut Shared,
    options: &Options,
    layouts: &[QueueLayout],
    features: u64,
) -> Result<Vec<QueueSet>, DriverError> {
    let indirect = features & virtio::INDIRECT_DESC != 0;
    let shape = options.shape.resolve(indirect, options.depth, options.queue_size);
    let mut owners = vec![];
    for _ in 0..options.threads {
        let (call, calls) = bell()?;
        owners.push((call, calls, vec![]));
    }
    let wakers = owners.iter().map(|(_, calls, _)| calls.waker()).collect::<io::Result<_>>();
    let net = Arc::new(Net::new(options.steer, options.queues, wakers.map_err(DriverError::event)?));
    for (index, layout) in layouts.iter().enumerate() {
        let (call, _, queues) = &mut owners[index % usize::from(options.threads)];
        let ring = shared.start(client, FIRST_REQUEST_QUEUE + index as u16, &layout.ring, features, call)?;
        let queue = Queue::new(ring, shape, &shared.memory, *layout, options.poison_status);
        queues.push(queue.expect("the region was made for this layout"));
    }
    let set = |(index, (_, calls, queues)): (usize, (_, Calls, Vec<Queue>))| {
        QueueSet::new(index as u16, queues, calls, Arc::clone(&net), options.outstanding)
    };
    Ok(owners.into_iter().enumerate().map(set).collect())
}
