//! A connected device: set-up, what it looks like, and tear-down.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen, Sector512};
use mqblk_vhost_user_client::features as virtio;
use mqblk_vhost_user_client::{BackendChannel, Client, EventFd, HangupMonitor};

use super::layout::QueueLayout;
use super::queue::{BlkQueue, BlkQueueSet};
use super::wire::{BlkConfig, CONFIG_BYTES, CONFIG_WRITEBACK, feature};
use crate::DriverError;
use crate::error::{check_queue_size, check_range};
use crate::setup::{AddressPlanner, DescriptorLayout, SharedMemory};

/// How to connect.
#[derive(Clone, Debug)]
pub struct BlkConnectOptions {
    /// The server's socket.
    pub socket: PathBuf,
    /// Queues to set up; fewer than the server offers is fine.
    pub queues: u16,
    /// Entries of each queue, a power of two.
    pub queue_size: u16,
    /// Requests that will be in flight on one queue, for [`ShapeChoice::Auto`].
    pub depth: u16,
    /// Threads that will own the queues: queue `q` goes to set `q` modulo `threads`.
    pub threads: u16,
    /// Data memory of each queue.
    pub data_per_queue: ByteLen,
    /// Direct or indirect descriptors.
    pub descriptors: DescriptorLayout,
    /// Use EVENT_IDX when offered.
    pub event_idx: bool,
    /// Spoil each status byte before its request, to see a device that does not write it. Costs a cache line's way.
    pub poison_status: bool,
    /// Have the server keep which requests are in flight, if it can, where a server after it goes on.
    pub inflight: bool,
    /// Have the server tell when its configuration changes: it may wait for [`Device::changed`] then.
    pub config_changes: bool,
    /// How long to try to connect.
    pub connect_timeout: Duration,
    /// How long to wait for an answer on the socket.
    pub reply_timeout: Duration,
}

impl BlkConnectOptions {
    /// One queue of 256 entries with 1 MiB of data, owned by one thread.
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
            poison_status: false,
            inflight: true,
            config_changes: false,
            connect_timeout: Duration::from_secs(5),
            reply_timeout: Duration::from_secs(10),
        }
    }
}

/// What the device says of itself. Fields of features that it does not have are as if it had said nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkInfo {
    /// Size.
    pub capacity: Sector512,
    /// Logical block size.
    pub block_size: BlockSize,
    /// Writes are refused.
    pub read_only: bool,
    /// It has a volatile cache and takes flushes.
    pub flush: bool,
    /// The cache mode can be switched; and whether it writes back now.
    pub writeback: Option<bool>,
    /// Most queues.
    pub queues: u16,
    /// Most pieces of data of one request, when it says.
    pub seg_max: Option<u32>,
    /// Largest piece, in bytes, when it says.
    pub size_max: Option<u32>,
    /// Physical block size: logical blocks, as a power of two.
    pub physical_block_exp: u8,
    /// Largest discard in sectors, and most ranges of one request, when it takes them.
    pub discard: Option<(u32, u32)>,
    /// Largest write of zeroes in sectors, and most ranges of one request, when it takes them.
    pub write_zeroes: Option<(u32, u32)>,
    /// Virtio feature bits agreed on.
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

/// A connected device. The queues are handed out once; this end keeps the conversation.
#[derive(Debug)]
pub struct BlkDevice {
    client: Client,
    /// Where the server says that its configuration has changed.
    backend_channel: Option<BackendChannel>,
    info: BlkInfo,
    queues: u16,
    sets: Vec<BlkQueueSet>,
    shared: SharedMemory,
    options: BlkConnectOptions,
    /// The cache mode that was asked for.
    writeback: Option<bool>,
}

impl BlkDevice {
    /// Connects, agrees on features, and starts the queues.
    ///
    /// # Errors
    /// When the server is not there, refuses a step, or cannot do what the options ask for.
    pub fn connect(options: &BlkConnectOptions) -> Result<BlkDevice, DriverError> {
        let mut client = Client::connect(&options.socket, options.connect_timeout, options.reply_timeout)?;
        if options.config_changes {
            client.accept_backend_requests();
        }
        let event = if options.event_idx { virtio::EVENT_IDX } else { 0 };
        let wanted = feature::ALL | virtio::VERSION_1 | virtio::INDIRECT_DESC | event;
        let features = client.negotiate(wanted)?;
        let server_queues = client.queue_count()?;
        let requests = client.open_backend_channel()?;
        let mut config = BlkConfig([0; CONFIG_BYTES]);
        client.read_config(0, &mut config.0)?;
        let info = BlkInfo::new(&config, features, server_queues)?;
        check_range("queues", options.queues, 1..=info.queues)?;
        check_range("threads", options.threads, 1..=options.queues)?;
        check_queue_size(options.queue_size)?;

        let mut planner = AddressPlanner::new();
        let layout = |_| QueueLayout::new(&mut planner, options.queue_size, options.data_per_queue);
        let layouts: Vec<QueueLayout> = (0..options.queues).map(layout).collect();
        let mut shared = planner.share(&mut client)?;
        if options.inflight {
            shared.create_inflight(&mut client, options.queues, options.queue_size)?;
        }
        let (queues, options) = (options.queues, options.clone());
        let mut device = BlkDevice {
            client,
            backend_channel: requests,
            info,
            queues,
            sets: vec![],
            shared,
            options,
            writeback: None,
        };
        let options = &device.options.clone();
        device.start_queues(options, &layouts)?;
        tracing::debug!(?info, queues = options.queues, "device started");
        Ok(device)
    }

    fn start_queues(&mut self, options: &BlkConnectOptions, layouts: &[QueueLayout]) -> Result<(), DriverError> {
        let features = self.info.features;
        let indirect = features & virtio::INDIRECT_DESC != 0;
        let shape = options.descriptors.resolve(indirect, options.depth.into(), options.queue_size);
        let mut sets = Vec::with_capacity(options.threads.into());
        for _ in 0..options.threads {
            sets.push((Vec::new(), EventFd::new(0).map_err(DriverError::eventfd)?));
        }
        for (index, layout) in layouts.iter().enumerate() {
            let (queues, call) = &mut sets[index % usize::from(options.threads)];
            let (ring, kick) = self.shared.start_queue(&mut self.client, index as u16, &layout.ring, features, call)?;
            let queue = BlkQueue::new(ring, shape, &self.shared.memory, *layout, options.poison_status, kick);
            queues.push(queue.expect("the region was made for this layout"));
        }
        let sets = sets.into_iter().map(|(queues, call)| BlkQueueSet::new(queues, call));
        self.sets = sets.collect::<io::Result<_>>().map_err(DriverError::eventfd)?;
        Ok(())
    }

    /// What the device says of itself.
    pub fn info(&self) -> &BlkInfo {
        &self.info
    }

    /// The queues, a set for each thread. Empty the second time.
    pub fn take_queues(&mut self) -> Vec<BlkQueueSet> {
        std::mem::take(&mut self.sets)
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

    /// Connects again, to a server that serves the same disk: the one before has left or died. The queues go on where they were,
    /// in whichever threads they are; requests in flight are answered by the new server.
    ///
    /// # Errors
    /// When the server is not there within `patience`, refuses a step, or is not as the one before was.
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

    /// Switches the write cache: write-back or write-through (CONFIG_WCE).
    ///
    /// # Errors
    /// When the server refuses (as far as it says so).
    pub fn set_writeback(&mut self, on: bool) -> Result<(), DriverError> {
        self.client.write_config(CONFIG_WRITEBACK, &[u8::from(on)])?;
        self.writeback = Some(on);
        Ok(())
    }

    /// Reads the configuration again.
    ///
    /// # Errors
    /// When the server refuses or the configuration makes no sense.
    pub fn refresh(&mut self) -> Result<&BlkInfo, DriverError> {
        let mut config = BlkConfig([0; CONFIG_BYTES]);
        self.client.read_config(0, &mut config.0)?;
        self.info = BlkInfo::new(&config, self.info.features, self.info.queues)?;
        Ok(&self.info)
    }

    /// Waits at most `timeout` for the server to say that its configuration has changed, reads it again, and answers. Whether it
    /// was said; never by a server that has no messages for us, nor without [`Options::config_changes`].
    ///
    /// # Errors
    /// When the server says something else, refuses, or the configuration makes no sense.
    pub fn wait_config_change(&mut self, timeout: Duration) -> Result<bool, DriverError> {
        let Some(requests) = self.backend_channel.take() else { return Ok(false) };
        let read = |device: &mut BlkDevice| match requests.wait_config_change(timeout) {
            Ok(None) => Ok(false),
            Ok(Some(change)) => {
                let read = device.refresh().map(drop);
                change.reply(read.is_ok()).map_err(DriverError::backend_channel)?;
                read.map(|()| true)
            }
            Err(error) => Err(DriverError::backend_channel(error)),
        };
        let changed = read(self);
        self.backend_channel = Some(requests);
        changed
    }

    /// Stops all queues: the server touches the shared memory no more.
    ///
    /// # Errors
    /// When the server does not answer, or not in time.
    pub fn stop(mut self, sets: Vec<BlkQueueSet>) -> Result<(), DriverError> {
        for index in 0..self.queues {
            self.client.stop_queue(index)?;
        }
        drop(sets);
        Ok(())
    }
}
