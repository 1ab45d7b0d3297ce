//! A connected controller: setup, properties, and teardown.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::ByteLen;
use mqblk_vhost_user_client::features as virtio;
use mqblk_vhost_user_client::{Client, HangupMonitor};

use super::control::ControlQueues;
use super::inquiry::LogicalUnit;
use super::layout::{ControlLayout, ScsiQueueLayout};
use super::queue::ScsiQueue;
use super::scan;
use super::set::{CommandExchange, ScsiQueueSet, SteeringPolicy, call_event};
use super::wire::{
    CDB_BYTES, CONFIG_BYTES, CONFIG_SENSE_SIZE, CONTROL_QUEUE, EVENT_BYTES, EVENT_QUEUE, FIRST_REQUEST_QUEUE,
    SENSE_BYTES, ScsiConfig, feature,
};
use crate::error::{check_queue_size, check_range};
use crate::setup::{AddressPlanner, DataArea, DescriptorLayout, SharedMemory, check_packed};
use crate::{DriverError, call_event::CallEvent};

/// Entries of the control and the event queue.
const CONTROL_QUEUE_SIZE: u16 = 64;

/// Options of [`ScsiController::connect`].
#[derive(Clone, Debug)]
pub struct ScsiConnectOptions {
    /// The server's socket.
    pub socket: PathBuf,
    /// Number of request queues to set up, at most what the server offers.
    pub queues: u16,
    /// Entries of each request queue, a power of two.
    pub queue_size: u16,
    /// Commands in flight on a queue at full depth, for [`DescriptorLayout::Auto`].
    pub depth: u32,
    /// Number of threads that own the queues: queue `q` belongs to set `q` modulo `threads`.
    pub threads: u16,
    /// Largest number of commands that a thread has outstanding on all queues together.
    pub max_outstanding: u32,
    /// Data memory of each queue.
    pub data_per_queue: ByteLen,
    /// Direct or indirect descriptors.
    pub descriptors: DescriptorLayout,
    /// True to use EVENT_IDX if offered.
    pub event_idx: bool,
    /// True to use packed rings, which the server must offer. With them, [`reconnect`](ScsiController::reconnect)
    /// needs an in-flight region.
    pub packed: bool,
    /// Selects the queue of a command.
    pub steering: SteeringPolicy,
    /// True to poison each response before its command, to detect a device that does not write it. Costs a cache line
    /// transfer.
    pub poison_status: bool,
    /// True to create an in-flight region, if the server supports it, so that the next server replays commands.
    pub inflight: bool,
    /// Longest time of retries to connect.
    pub connect_timeout: Duration,
    /// Longest wait for a reply on the socket, or for a completion in a scan.
    pub reply_timeout: Duration,
}

impl ScsiConnectOptions {
    /// Returns options for one queue of 256 entries with 1 MiB of data, owned by one thread.
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
            packed: false,
            steering: SteeringPolicy::Target,
            poison_status: false,
            inflight: true,
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
        }
    }
}

/// Properties of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// The configuration space, or QEMU's values if the server leaves it to the VMM.
    pub config: ScsiConfig,
    /// Largest number of request queues.
    pub queues: u16,
    /// The controller sends events for added and removed logical units.
    pub hotplug: bool,
    /// The controller sends events for changed parameters.
    pub change: bool,
    /// Negotiated virtio feature bits.
    pub features: u64,
}

/// A connected controller. Owns the connection; the queues are handed out once.
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
    /// Connects, negotiates features, and starts the queues.
    ///
    /// # Errors
    /// If the server cannot be reached, fails a message, or does not support the options.
    pub fn connect(options: &ScsiConnectOptions) -> Result<ScsiController, DriverError> {
        let mut client = Client::connect(&options.socket, options.connect_timeout, options.reply_timeout)?;
        let event = if options.event_idx { virtio::EVENT_IDX } else { 0 };
        let packed = if options.packed { virtio::RING_PACKED } else { 0 };
        let wanted = feature::ALL | virtio::VERSION_1 | virtio::INDIRECT_DESC | event | packed;
        let features = client.negotiate(wanted)?;
        check_packed(options.packed, features)?;
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
        let layout = |_| ScsiQueueLayout::new(&mut planner, options.queue_size, options.data_per_queue);
        let layouts: Vec<ScsiQueueLayout> = (0..options.queues).map(layout).collect();
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

    /// Connects again, to a server of the same controller, after the previous server has ended. The queues continue in
    /// the threads that own them. The new server completes the commands in flight.
    ///
    /// # Errors
    /// If the server cannot be reached within `timeout`, fails a message, or offers less than the previous one.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<(), DriverError> {
        let mut client = Client::connect(&self.socket, timeout, self.reply_timeout)?;
        client.renegotiate(self.info.features)?;
        self.info.config = read_config(&mut client, self.info.queues)?;
        self.shared.resume(&mut client)?;
        self.client = client;
        Ok(())
    }

    /// Returns the controller's properties.
    pub fn info(&self) -> &ControllerInfo {
        &self.info
    }

    /// Returns the request queues, a set for each thread. Empty at the second call.
    pub fn take_queues(&mut self) -> Vec<ScsiQueueSet> {
        std::mem::take(&mut self.sets)
    }

    /// Returns the control and the event queue. `None` at the second call.
    pub fn take_control(&mut self) -> Option<ControlQueues> {
        self.control.take()
    }

    /// Finds all logical units, in the order of their addresses. Uses the first queue of `set`, on which nothing else
    /// may be in flight.
    ///
    /// # Errors
    /// If the device violates the protocol, or does not complete a command in time.
    pub fn scan(&self, set: &mut ScsiQueueSet) -> Result<Vec<LogicalUnit>, DriverError> {
        scan::scan(set, &self.info.config, self.scan_area.start, self.reply_timeout)
    }

    /// Returns the server's process id, if known.
    pub fn server_pid(&self) -> Option<i32> {
        self.client.server_pid()
    }

    /// Returns a handle that detects the end of the server.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn hangup_monitor(&self) -> io::Result<HangupMonitor> {
        self.client.hangup_monitor()
    }

    /// Stops all queues. The server does not access the shared memory any more.
    ///
    /// # Errors
    /// If the server does not reply in time.
    pub fn stop(mut self, sets: Vec<ScsiQueueSet>) -> Result<(), DriverError> {
        // The control queue, which aborts commands, is stopped last. Its own responses are not waited for.
        for index in (0..self.ring_count).rev() {
            self.client.stop_queue(index)?;
        }
        drop(sets);
        Ok(())
    }
}

/// Reads and checks the configuration space. Sets `sense_size` and `cdb_size`, as Linux does.
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
    layouts: &[ScsiQueueLayout],
    features: u64,
) -> Result<Vec<ScsiQueueSet>, DriverError> {
    let indirect = features & virtio::INDIRECT_DESC != 0;
    let chain_layout = options.descriptors.resolve(indirect, options.depth, options.queue_size);
    let mut owners = vec![];
    for _ in 0..options.threads {
        let (call, calls) = call_event()?;
        owners.push((call, calls, vec![]));
    }
    let wakers = owners.iter().map(|(_, calls, _)| calls.waker()).collect::<io::Result<_>>();
    let exchange =
        Arc::new(CommandExchange::new(options.steering, options.queues, wakers.map_err(DriverError::eventfd)?));
    for (index, layout) in layouts.iter().enumerate() {
        let (call, _, queues) = &mut owners[index % usize::from(options.threads)];
        let ring = shared.start_queue(client, FIRST_REQUEST_QUEUE + index as u16, &layout.ring, features, call)?;
        let queue = ScsiQueue::new(ring, chain_layout, &shared.memory, *layout, options.poison_status);
        queues.push(queue.expect("the region was made for this layout"));
    }
    let set = |(index, (_, calls, queues)): (usize, (_, CallEvent, Vec<ScsiQueue>))| {
        ScsiQueueSet::new(index as u16, queues, calls, Arc::clone(&exchange), options.max_outstanding)
    };
    Ok(owners.into_iter().enumerate().map(set).collect())
}
