//! A connected controller: set-up, what it says of itself, and tear-down.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_memory::GuestAddress;
use mqblk_vhost_user_client::features as virtio;
use mqblk_vhost_user_client::{Client, HangupMonitor};

use super::control::ControlQueues;
use super::inquiry::LogicalUnit;
use super::layout::{ControlLayout, QueueLayout};
use super::queue::ScsiQueue;
use super::scan;
use super::set::{CommandExchange, ScsiQueueSet, SteeringPolicy, call_event};
use super::wire::{
    CDB_BYTES, CONFIG_BYTES, CONFIG_SENSE_SIZE, CONTROL_QUEUE, EVENT_BYTES, EVENT_QUEUE, FIRST_REQUEST_QUEUE,
    SENSE_BYTES, ScsiConfig, feature,
};
use crate::error::{check_queue_size, check_range};
use crate::setup::{AddressPlanner, DataArea, DescriptorLayout, SharedMemory};
use crate::{DriverError, call_event::CallEvent};

/// Entries of the control and the event queue.
const CONTROL_QUEUE_SIZE: u16 = 64;

/// How to connect.
#[derive(Clone, Debug)]
pub struct ScsiConnectOptions {
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
    pub max_outstanding: u32,
    /// Data memory of each queue.
    pub data_per_queue: ByteLen,
    /// Direct or indirect descriptors.
    pub descriptors: DescriptorLayout,
    /// Use EVENT_IDX when offered.
    pub event_idx: bool,
    /// Which queue a command goes to.
    pub steering: SteeringPolicy,
    /// Spoil each answer before its command, to see a device that does not write it. Costs a cache line's way.
    pub poison_status: bool,
    /// Have the server keep which commands are in flight, if it can, where a server after it goes on.
    pub inflight: bool,
    /// How long to try to connect.
    pub connect_timeout: Duration,
    /// How long to wait for an answer, on the socket or while scanning.
    pub reply_timeout: Duration,
}

impl ScsiConnectOptions {
    /// One queue of 256 entries with 1 MiB of data, owned by one thread.
    pub fn new(socket: impl Into<PathBuf>) -> ScsiConnectOptions {
        ScsiConnectOptions {
            socket: socket.into(),
            queues: 1,
            queue_size: 256,
            depth: 64,
            threads: 1,
            max_outstanding: 1024,
            data_per_queue: ByteLen(1 << 20),
            descriptors: DescriptorLayout::Auto,
            event_idx: true,
            steering: SteeringPolicy::Target,
            poison_status: false,
            inflight: true,
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
        }
    }
}

/// What the controller says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// The configuration, or what QEMU would say where the server leaves it to the VMM.
    pub config: ScsiConfig,
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
pub struct ScsiController {
    client: Client,
    info: ControllerInfo,
    ring_count: u16,
    sets: Vec<ScsiQueueSet>,
    control: Option<ControlQueues>,
    scan_area: DataArea,
    reply_timeout: Duration,
    shared: SharedMemory,
    socket: PathBuf,
}

impl ScsiController {
    /// Connects, agrees on features, and starts the queues.
    ///
    /// # Errors
    /// When the server is not there, refuses a step, or cannot do what the options ask for.
    pub fn connect(options: &ScsiConnectOptions) -> Result<ScsiController, DriverError> {
        let mut client = Client::connect(&options.socket, options.connect_timeout, options.reply_timeout)?;
        let event = if options.event_idx { virtio::EVENT_IDX } else { 0 };
        let wanted = feature::ALL | virtio::VERSION_1 | virtio::INDIRECT_DESC | event;
        let features = client.negotiate(wanted)?;
        // A server without MQ has one request queue.
        let offered = client.queue_count()?.saturating_sub(FIRST_REQUEST_QUEUE).max(1);
        let config = read_config(&mut client, offered)?;
        let has = |bit: u64| features & bit != 0;
        let queues = offered.min(config.num_queues.clamp(1, u16::MAX.into()) as u16);
        let (hotplug, change) = (has(feature::HOTPLUG), has(feature::CHANGE));
        let info = ControllerInfo { config, queues, hotplug, change, features };
        check_range("queues", options.queues, 1..=info.queues)?;
        check_range("threads", options.threads, 1..=options.queues)?;
        check_queue_size(options.queue_size)?;

        let mut planner = AddressPlanner::new();
        let control = ControlLayout::new(&mut planner, CONTROL_QUEUE_SIZE);
        let scan = DataArea { start: planner.allocate(scan::SCAN_MEMORY.0), len: scan::SCAN_MEMORY };
        let layout = |_| QueueLayout::new(&mut planner, options.queue_size, options.data_per_queue);
        let layouts: Vec<QueueLayout> = (0..options.queues).map(layout).collect();
        let mut shared = planner.share(&mut client)?;
        if options.inflight {
            let size = options.queue_size.max(CONTROL_QUEUE_SIZE);
            shared.create_inflight(&mut client, FIRST_REQUEST_QUEUE + options.queues, size)?;
        }
        let control = start_control(&mut client, &mut shared, control, features)?;
        let sets = start_queues(&mut client, &mut shared, options, &layouts, features)?;
        tracing::debug!(?info, queues = options.queues, "controller started");
        Ok(ScsiController {
            client,
            info,
            ring_count: FIRST_REQUEST_QUEUE + options.queues,
            sets,
            control: Some(control),
            scan_area: scan,
            reply_timeout: options.reply_timeout,
            shared,
            socket: options.socket.clone(),
        })
    }

    /// Connects again, to a server that serves the same controller: the one before has left or died. The queues go on where they
    /// were, in whichever threads they are; commands in flight are answered by the new server.
    ///
    /// # Errors
    /// When the server is not there within `patience`, refuses a step, or is not as the one before was.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<(), DriverError> {
        let mut client = Client::connect(&self.socket, timeout, self.reply_timeout)?;
        client.renegotiate(self.info.features)?;
        self.info.config = read_config(&mut client, self.info.queues)?;
        self.shared.resume(&mut client)?;
        self.client = client;
        Ok(())
    }

    /// What the controller says of itself.
    pub fn info(&self) -> &ControllerInfo {
        &self.info
    }

    /// The request queues, a set for each thread. Empty the second time.
    pub fn take_queues(&mut self) -> Vec<ScsiQueueSet> {
        std::mem::take(&mut self.sets)
    }

    /// The control and the event queue. None the second time.
    pub fn take_control(&mut self) -> Option<ControlQueues> {
        self.control.take()
    }

    /// Finds all logical units, in the order of their addresses, with the first queue of `set`, on which nothing else may be in
    /// flight.
    ///
    /// # Errors
    /// When the device breaks the protocol, or leaves a command unanswered.
    pub fn scan(&self, set: &mut ScsiQueueSet) -> Result<Vec<LogicalUnit>, DriverError> {
        scan::scan(set, &self.info.config, self.scan_area.start, self.reply_timeout)
    }

    /// Memory of the scan, for whoever needs some between scans: page aligned.
    pub fn scratch(&self) -> (GuestAddress, ByteLen) {
        (self.scan_area.start, self.scan_area.len)
    }

    /// The server's process, if the system says.
    pub fn server_pid(&self) -> Option<i32> {
        self.client.server_pid()
    }

    /// Something to see the server's end with.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn hangup_monitor(&self) -> io::Result<HangupMonitor> {
        self.client.hangup_monitor()
    }

    /// Stops all queues: the server touches the shared memory no more.
    ///
    /// # Errors
    /// When the server does not answer, or not in time.
    pub fn stop(mut self, sets: Vec<ScsiQueueSet>) -> Result<(), DriverError> {
        // What ends commands last; its own answers are waited for by nobody.
        for index in (0..self.ring_count).rev() {
            self.client.stop_queue(index)?;
        }
        drop(sets);
        Ok(())
    }
}

/// Reads and judges the configuration, and sets the sizes that a driver sets, as Linux does.
fn read_config(client: &mut Client, offered: u16) -> Result<ScsiConfig, DriverError> {
    if !client.has_config() {
        return Ok(ScsiConfig::vmm_default(offered.into()));
    }
    let mut bytes = [0; CONFIG_BYTES];
    client.read_config(0, &mut bytes)?;
    let mut config = ScsiConfig::from_bytes(&bytes);
    let (sense, cdb) = (SENSE_BYTES as u32, CDB_BYTES as u32);
    if (config.sense_size, config.cdb_size) != (sense, cdb) {
        let sizes: Vec<u8> = [sense, cdb].into_iter().flat_map(u32::to_le_bytes).collect();
        client.write_config(CONFIG_SENSE_SIZE, &sizes)?;
        client.read_config(0, &mut bytes)?;
        config = ScsiConfig::from_bytes(&bytes);
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
    if config.max_lun > super::LunAddress::MAX_LUN.into() {
        return Err(wrong("max_lun", config.max_lun, "at most 16383"));
    }
    Ok(config)
}

fn start_control(
    client: &mut Client,
    shared: &mut SharedMemory,
    layout: ControlLayout,
    features: u64,
) -> Result<ControlQueues, DriverError> {
    let (call, calls) = call_event()?;
    let control = shared.start_queue(client, CONTROL_QUEUE, &layout.control, features, &call)?;
    let event = shared.start_queue(client, EVENT_QUEUE, &layout.event, features, &call)?;
    ControlQueues::new(control, event, &shared.memory, layout, calls)
}

fn start_queues(
    client: &mut Client,
    shared: &mut SharedMemory,
    options: &ScsiConnectOptions,
    layouts: &[QueueLayout],
    features: u64,
) -> Result<Vec<ScsiQueueSet>, DriverError> {
    let indirect = features & virtio::INDIRECT_DESC != 0;
    let shape = options.descriptors.resolve(indirect, options.depth, options.queue_size);
    let mut owners = vec![];
    for _ in 0..options.threads {
        let (call, calls) = call_event()?;
        owners.push((call, calls, vec![]));
    }
    let wakers = owners.iter().map(|(_, calls, _)| calls.waker()).collect::<io::Result<_>>();
    let net = Arc::new(CommandExchange::new(options.steering, options.queues, wakers.map_err(DriverError::eventfd)?));
    for (index, layout) in layouts.iter().enumerate() {
        let (call, _, queues) = &mut owners[index % usize::from(options.threads)];
        let ring = shared.start_queue(client, FIRST_REQUEST_QUEUE + index as u16, &layout.ring, features, call)?;
        let queue = ScsiQueue::new(ring, shape, &shared.memory, *layout, options.poison_status);
        queues.push(queue.expect("the region was made for this layout"));
    }
    let set = |(index, (_, calls, queues)): (usize, (_, CallEvent, Vec<ScsiQueue>))| {
        ScsiQueueSet::new(index as u16, queues, calls, Arc::clone(&net), options.max_outstanding)
    };
    Ok(owners.into_iter().enumerate().map(set).collect())
}
