//! A connected device: setup, properties, and teardown.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen, Sector512};
use mqblk_vhost_user_client::features as virtio;
use mqblk_vhost_user_client::{BackendChannel, Client, HangupMonitor};

use super::layout::BlkQueueLayout;
use super::queue::{BlkQueue, BlkQueueSet};
use super::wire::{BlkConfig, CONFIG_BYTES, CONFIG_WRITEBACK, feature};
use crate::DriverError;
use crate::call_event::new_eventfd;
use crate::error::{check_queue_size, check_range};
use crate::setup::{AddressPlanner, DescriptorLayout, SharedMemory, check_packed};

/// Options of [`BlkDevice::connect`].
#[derive(Clone, Debug)]
pub struct BlkConnectOptions {
    /// The server's socket.
    pub socket: PathBuf,
    /// Number of queues to set up, at most what the server offers.
    pub queues: u16,
    /// Entries of each queue, a power of two.
    pub queue_size: u16,
    /// Requests in flight on a queue at full depth, for [`DescriptorLayout::Auto`].
    pub depth: u16,
    /// Number of threads that own the queues: queue `q` belongs to set `q` modulo `threads`.
    pub threads: u16,
    /// Data memory of each queue.
    pub data_per_queue: ByteLen,
    /// Direct or indirect descriptors.
    pub descriptors: DescriptorLayout,
    /// True to use EVENT_IDX if offered.
    pub event_idx: bool,
    /// True to use packed rings, which the server must offer. With them, [`reconnect`](BlkDevice::reconnect) needs an
    /// in-flight region.
    pub packed: bool,
    /// True to poison each status byte before its request, to detect a device that does not write it. Costs a cache
    /// line transfer.
    pub poison_status: bool,
    /// True to create an in-flight region, if the server supports it, so that the next server replays requests.
    pub inflight: bool,
    /// True to accept config change messages. The server may wait for [`BlkDevice::wait_config_change`] then.
    pub config_changes: bool,
    /// Longest time of retries to connect.
    pub connect_timeout: Duration,
    /// Longest wait for a reply on the socket.
    pub reply_timeout: Duration,
}

impl BlkConnectOptions {
    /// Returns options for one queue of 256 entries with 1 MiB of data, owned by one thread.
    pub fn new(socket: impl Into<PathBuf>) -> BlkConnectOptions {
        BlkConnectOptions {
            socket: socket.into(),
            queues: 1,
            queue_size: 256,
            depth: 64,
            threads: 1,
            data_per_queue: ByteLen(1 << 20),
            descriptors: DescriptorLayout::Auto,
            event_idx: true,
            packed: false,
            poison_status: false,
            inflight: true,
            config_changes: false,
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
        }
    }
}

/// Properties of a device. Fields of features that were not negotiated have their defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkInfo {
    /// Size.
    pub capacity: Sector512,
    /// Logical block size.
    pub block_size: BlockSize,
    /// The device is read-only.
    pub read_only: bool,
    /// The device has a volatile cache and supports flushes.
    pub flush: bool,
    /// The cache mode, if it can be switched: true for write-back.
    pub writeback: Option<bool>,
    /// Largest number of queues.
    pub queues: u16,
    /// Largest number of data segments of a request, if known.
    pub seg_max: Option<u32>,
    /// Largest segment in bytes, if known.
    pub size_max: Option<u32>,
    /// Logical blocks in a physical block, as a power of two.
    pub physical_block_exp: u8,
    /// Largest discard in sectors and largest number of ranges of a request, if supported.
    pub discard: Option<(u32, u32)>,
    /// Largest write-zeroes in sectors and largest number of ranges of a request, if supported.
    pub write_zeroes: Option<(u32, u32)>,
    /// Negotiated virtio feature bits.
    pub features: u64,
}

impl BlkInfo {
    fn new(config: &BlkConfig, features: u64, server_queues: u16) -> Result<BlkInfo, DriverError> {
        let has = |bit: u64| features & bit != 0;
        let block = if has(feature::BLK_SIZE) { config.u32(20) } else { 512 };
        let bad_block = DriverError::Config {
            field: "blk_size",
            found: block.into(),
            expected: "a power of two from 512 to 65536",
        };
        let config_queues = if has(feature::MQ) { config.u16(34) } else { 1 };
        Ok(BlkInfo {
            capacity: Sector512(config.u64(0)),
            block_size: BlockSize::new(block).ok_or(bad_block)?,
            read_only: has(feature::RO),
            flush: has(feature::FLUSH),
            writeback: has(feature::CONFIG_WCE).then_some(config.0[32] != 0),
            queues: config_queues.clamp(1, server_queues.max(1)),
            seg_max: has(feature::SEG_MAX).then_some(config.u32(12)),
            size_max: has(feature::SIZE_MAX).then_some(config.u32(8)),
            physical_block_exp: if has(feature::TOPOLOGY) { config.0[24] } else { 0 },
            discard: has(feature::DISCARD).then_some((config.u32(36), config.u32(40))),
            write_zeroes: has(feature::WRITE_ZEROES).then_some((config.u32(48), config.u32(52))),
            features,
        })
    }
}

/// A connected device. Owns the connection; the queues are handed out once.
#[derive(Debug)]
pub struct BlkDevice {
    client: Client,
    /// The channel for config change messages.
    backend_channel: Option<BackendChannel>,
    info: BlkInfo,
    queues: u16,
    sets: Vec<BlkQueueSet>,
    shared: SharedMemory,
    options: BlkConnectOptions,
    /// The cache mode that was set.
    writeback: Option<bool>,
}

impl BlkDevice {
    /// Connects, negotiates features, and starts the queues.
    ///
    /// # Errors
    /// If the server cannot be reached, fails a message, or does not support the options.
    pub fn connect(options: &BlkConnectOptions) -> Result<BlkDevice, DriverError> {
        let mut client = Client::connect(&options.socket, options.connect_timeout, options.reply_timeout)?;
        if options.config_changes {
            client.accept_backend_requests();
        }
        let event = if options.event_idx { virtio::EVENT_IDX } else { 0 };
        let packed = if options.packed { virtio::RING_PACKED } else { 0 };
        let wanted = feature::ALL | virtio::VERSION_1 | virtio::INDIRECT_DESC | event | packed;
        let features = client.negotiate(wanted)?;
        check_packed(options.packed, features)?;
        let server_queues = client.queue_count()?;
        let backend_channel = client.open_backend_channel()?;
        let mut config = BlkConfig([0; CONFIG_BYTES]);
        client.read_config(0, &mut config.0)?;
        let info = BlkInfo::new(&config, features, server_queues)?;
        check_range("queues", options.queues, 1..=info.queues)?;
        check_range("threads", options.threads, 1..=options.queues)?;
        check_queue_size(options.queue_size)?;

        let mut planner = AddressPlanner::new();
        let layout = |_| BlkQueueLayout::new(&mut planner, options.queue_size, options.data_per_queue);
        let layouts: Vec<BlkQueueLayout> = (0..options.queues).map(layout).collect();
        let mut shared = planner.share(&mut client)?;
        if options.inflight {
            shared.create_inflight(&mut client, options.queues, options.queue_size)?;
        }
        let (queues, options) = (options.queues, options.clone());
        let mut device =
            BlkDevice { client, backend_channel, info, queues, sets: vec![], shared, options, writeback: None };
        let options = &device.options.clone();
        device.start_queues(options, &layouts)?;
        tracing::debug!(?info, queues = options.queues, "device started");
        Ok(device)
    }

    fn start_queues(&mut self, options: &BlkConnectOptions, layouts: &[BlkQueueLayout]) -> Result<(), DriverError> {
        let features = self.info.features;
        let indirect = features & virtio::INDIRECT_DESC != 0;
        let chain_layout = options.descriptors.resolve(indirect, options.depth.into(), options.queue_size);
        let mut sets = Vec::with_capacity(options.threads.into());
        for _ in 0..options.threads {
            sets.push((Vec::new(), new_eventfd().map_err(DriverError::eventfd)?));
        }
        for (index, layout) in layouts.iter().enumerate() {
            let (queues, call) = &mut sets[index % usize::from(options.threads)];
            let (ring, kick) = self.shared.start_queue(&mut self.client, index as u16, &layout.ring, features, call)?;
            let queue = BlkQueue::new(ring, chain_layout, &self.shared.memory, *layout, options.poison_status, kick);
            queues.push(queue.expect("the region was made for this layout"));
        }
        let sets = sets.into_iter().map(|(queues, call)| BlkQueueSet::new(queues, call));
        self.sets = sets.collect::<io::Result<_>>().map_err(DriverError::eventfd)?;
        Ok(())
    }

    /// Returns the device's properties.
    pub fn info(&self) -> &BlkInfo {
        &self.info
    }

    /// Returns the queues, a set for each thread. Empty at the second call.
    pub fn take_queues(&mut self) -> Vec<BlkQueueSet> {
        std::mem::take(&mut self.sets)
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

    /// Connects again, to a server of the same disk, after the previous server has ended. The queues continue in the
    /// threads that own them. The new server completes the requests in flight.
    ///
    /// # Errors
    /// If the server cannot be reached within `timeout`, fails a message, or offers less than the previous one.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<(), DriverError> {
        let mut client = Client::connect(&self.options.socket, timeout, self.options.reply_timeout)?;
        if self.options.config_changes {
            client.accept_backend_requests();
        }
        client.renegotiate(self.info.features)?;
        self.backend_channel = client.open_backend_channel()?;
        if let Some(on) = self.writeback {
            client.write_config(CONFIG_WRITEBACK, &[u8::from(on)])?;
        }
        self.shared.resume(&mut client)?;
        self.client = client;
        self.refresh().map(|_| ())
    }

    /// Sets the cache mode: write-back or write-through (CONFIG_WCE).
    ///
    /// # Errors
    /// If the server reports a failure.
    pub fn set_writeback(&mut self, on: bool) -> Result<(), DriverError> {
        self.client.write_config(CONFIG_WRITEBACK, &[u8::from(on)])?;
        self.writeback = Some(on);
        Ok(())
    }

    /// Reads the configuration space again.
    ///
    /// # Errors
    /// If the server fails the message or the configuration space is invalid.
    pub fn refresh(&mut self) -> Result<&BlkInfo, DriverError> {
        let mut config = BlkConfig([0; CONFIG_BYTES]);
        self.client.read_config(0, &mut config.0)?;
        self.info = BlkInfo::new(&config, self.info.features, self.info.queues)?;
        Ok(&self.info)
    }

    /// Waits at most `timeout` for a config change message, reads the configuration space again, and replies. Returns
    /// true if a message came. None comes without a backend channel or without
    /// [`BlkConnectOptions::config_changes`].
    ///
    /// # Errors
    /// If the server sends another message, fails one, or the configuration space is invalid.
    pub fn wait_config_change(&mut self, timeout: Duration) -> Result<bool, DriverError> {
        let Some(channel) = self.backend_channel.take() else { return Ok(false) };
        let read = |device: &mut BlkDevice| match channel.wait_config_change(timeout) {
            Ok(None) => Ok(false),
            Ok(Some(change)) => {
                let read = device.refresh().map(drop);
                change.reply(read.is_ok()).map_err(DriverError::backend_channel)?;
                read.map(|()| true)
            }
            Err(error) => Err(DriverError::backend_channel(error)),
        };
        let changed = read(self);
        self.backend_channel = Some(channel);
        changed
    }

    /// Stops all queues. The server does not access the shared memory any more.
    ///
    /// # Errors
    /// If the server does not reply in time.
    pub fn stop(mut self, sets: Vec<BlkQueueSet>) -> Result<(), DriverError> {
        for index in 0..self.queues {
            self.client.stop_queue(index)?;
        }
        drop(sets);
        Ok(())
    }
}
