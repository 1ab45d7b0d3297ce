//! A connected device: set-up, what it looks like, and tear-down.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen, Sector512};
use mqblk_memory::{GuestMemory, MemoryError, Region};
use mqblk_ring::split::SetupError;
use mqblk_ring::split::SplitDriver;
use mqblk_ring::split::driver::{DeviceError, Features, IndirectArea, Shape};
use mqblk_vhost_user_client::features as common;
use mqblk_vhost_user_client::{Client, ClientError, EventFd, Lifeline, QueueSetup, SharedRegion};

use super::layout::{BASE, PER_TABLE, QueueLayout};
use super::queue::{Queue, QueueSet};
use super::wire::{CONFIG_BYTES, CONFIG_WRITEBACK, Config, feature};

/// How requests lie in the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShapeChoice {
    /// Direct while the ring has room for three descriptors for each of [`Options::depth`] requests, else indirect.
    #[default]
    Auto,
    /// A ring descriptor for each piece.
    Direct,
    /// A table for each request, when the server takes them.
    Indirect,
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct Options {
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
    pub shape: ShapeChoice,
    /// Use EVENT_IDX when offered.
    pub event_idx: bool,
    /// Spoil each status byte before its request, to see a device that does not write it. Costs a cache line's way.
    pub poison_status: bool,
    /// How long to try to connect.
    pub patience: Duration,
    /// How long to wait for an answer on the socket.
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
            data_per_queue: ByteLen(1 << 20),
            shape: ShapeChoice::Auto,
            event_idx: true,
            poison_status: false,
            patience: Duration::from_secs(5),
            answer_limit: Duration::from_secs(10),
        }
    }
}

/// Why a device cannot be used (any more).
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The conversation on the socket failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Shared memory could not be made.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A ring could not be laid out.
    #[error(transparent)]
    Ring(#[from] SetupError),
    /// The device broke the protocol.
    #[error("the device broke the ring's protocol: {0}")]
    Device(#[from] DeviceError),
    /// The host refused a resource.
    #[error("{what}: {source}")]
    Host {
        /// What was asked for.
        what: &'static str,
        /// The host's answer.
        source: io::Error,
    },
    /// A value of the options does not fit the server.
    #[error("{field}: found {found}, expected {expected}")]
    Option {
        /// Which one.
        field: &'static str,
        /// What it was.
        found: u64,
        /// What it may be.
        expected: String,
    },
    /// The device's configuration makes no sense.
    #[error("configuration field {field}: found {found}, expected {expected}")]
    Config {
        /// Which one.
        field: &'static str,
        /// What the device says.
        found: u64,
        /// What it may say.
        expected: &'static str,
    },
}

/// What the device says of itself. Fields of features that it does not have are as if it had said nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Size.
    pub capacity: Sector512,
    /// Logical block size.
    pub block: BlockSize,
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

impl Info {
    fn new(config: &Config, features: u64, server_queues: u16) -> Result<Info, DriverError> {
        let has = |bit: u64| features & bit != 0;
        let block = if has(feature::BLK_SIZE) { config.u32(20) } else { 512 };
        let bad_block = DriverError::Config {
            field: "blk_size",
            found: block.into(),
            expected: "a power of two from 512 to 65536",
        };
        let config_queues = if has(feature::MQ) { config.u16(34) } else { 1 };
        Ok(Info {
            capacity: Sector512(config.u64(0)),
            block: BlockSize::new(block).ok_or(bad_block)?,
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
pub struct Device {
    client: Client,
    info: Info,
    queues: u16,
    sets: Vec<QueueSet>,
    /// What the server maps; kept until the conversation ends.
    _memory: (Arc<GuestMemory>, File),
}

impl Device {
    /// Connects, agrees on features, and starts the queues.
    ///
    /// # Errors
    /// When the server is not there, refuses a step, or cannot do what the options ask for.
    pub fn connect(options: &Options) -> Result<Device, DriverError> {
        let mut client = Client::connect(&options.socket, options.patience, options.answer_limit)?;
        let event = if options.event_idx { common::EVENT_IDX } else { 0 };
        let wanted = feature::ALL | common::VERSION_1 | common::INDIRECT_DESC | event;
        let features = client.negotiate(wanted)?;
        let server_queues = client.queue_count()?;
        let mut config = Config([0; CONFIG_BYTES]);
        client.read_config(0, &mut config.0)?;
        let info = Info::new(&config, features, server_queues)?;
        check("queues", options.queues, 1..=info.queues)?;
        check("threads", options.threads, 1..=options.queues)?;
        if !options.queue_size.is_power_of_two() || !(4..=32768).contains(&options.queue_size) {
            let expected = "a power of two from 4 to 32768".to_owned();
            return Err(DriverError::Option { field: "queue size", found: options.queue_size.into(), expected });
        }

        let mut layouts: Vec<QueueLayout> = Vec::with_capacity(options.queues.into());
        let mut next = BASE;
        for _ in 0..options.queues {
            let layout = QueueLayout::new(next, options.queue_size, options.data_per_queue);
            next = layout.end;
            layouts.push(layout);
        }
        let (region, file) = Region::shared("mqblk-driver", next.0 - BASE.0, BASE)?;
        let region = Arc::new(region);
        let memory = Arc::new(GuestMemory::new(vec![Arc::clone(&region)])?);
        client.set_memory(&[SharedRegion { region: &region, file: &file }])?;

        let indirect = features & common::INDIRECT_DESC != 0;
        let shape = match options.shape {
            ShapeChoice::Indirect if indirect => Shape::Indirect,
            ShapeChoice::Auto if indirect && u32::from(options.depth) * 3 > options.queue_size.into() => {
                Shape::Indirect
            }
            _ => Shape::Direct,
        };
        let mut device =
            Device { client, info, queues: options.queues, sets: vec![], _memory: (Arc::clone(&memory), file) };
        device.start(options, &layouts, &region, &memory, shape)?;
        tracing::debug!(?info, ?shape, queues = options.queues, "device started");
        Ok(device)
    }

    fn start(
        &mut self,
        options: &Options,
        layouts: &[QueueLayout],
        region: &Region,
        memory: &Arc<GuestMemory>,
        shape: Shape,
    ) -> Result<(), DriverError> {
        let host = |source| DriverError::Host { what: "eventfd", source };
        let has = |bit: u64| self.info.features & bit != 0;
        let (event_idx, indirect) = (has(common::EVENT_IDX), has(common::INDIRECT_DESC));
        let mut sets = Vec::with_capacity(options.threads.into());
        for _ in 0..options.threads {
            sets.push((Vec::new(), EventFd::new(0).map_err(host)?));
        }
        for (index, layout) in layouts.iter().enumerate() {
            let size = options.queue_size;
            let tables = indirect.then_some(IndirectArea { start: layout.tables, per_table: PER_TABLE });
            let ring = SplitDriver::new(memory, &layout.ring, size, Features { event_idx }, tables)?;
            let (queues, call) = &mut sets[index % usize::from(options.threads)];
            let kick = EventFd::new(0).map_err(host)?;
            let setup = QueueSetup { size, at: layout.ring, region, base: 0, kick: &kick, call };
            self.client.start_queue(index as u16, &setup)?;
            let queue = Queue::new(ring, shape, Arc::clone(memory), *layout, options.poison_status, kick);
            queues.push(queue.expect("the region was made for this layout"));
        }
        let sets = sets.into_iter().map(|(queues, call)| QueueSet::new(queues, call));
        self.sets = sets.collect::<io::Result<_>>().map_err(host)?;
        Ok(())
    }

    /// What the device says of itself.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The queues, a set for each thread. Empty the second time.
    pub fn take_queues(&mut self) -> Vec<QueueSet> {
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
    pub fn lifeline(&self) -> io::Result<Lifeline> {
        self.client.lifeline()
    }

    /// Switches the write cache: write-back or write-through (CONFIG_WCE).
    ///
    /// # Errors
    /// When the server refuses (as far as it says so).
    pub fn set_writeback(&mut self, on: bool) -> Result<(), DriverError> {
        Ok(self.client.write_config(CONFIG_WRITEBACK, &[u8::from(on)])?)
    }

    /// Reads the configuration again.
    ///
    /// # Errors
    /// When the server refuses or the configuration makes no sense.
    pub fn refresh(&mut self) -> Result<&Info, DriverError> {
        let mut config = Config([0; CONFIG_BYTES]);
        self.client.read_config(0, &mut config.0)?;
        self.info = Info::new(&config, self.info.features, self.info.queues)?;
        Ok(&self.info)
    }

    /// Stops all queues: the server touches the shared memory no more.
    ///
    /// # Errors
    /// When the server does not answer, or not in time.
    pub fn stop(mut self, sets: Vec<QueueSet>) -> Result<(), DriverError> {
        for index in 0..self.queues {
            self.client.stop_queue(index)?;
        }
        drop(sets);
        Ok(())
    }
}

fn check(field: &'static str, found: u16, range: std::ops::RangeInclusive<u16>) -> Result<(), DriverError> {
    if range.contains(&found) {
        return Ok(());
    }
    let expected = format!("{} to {}", range.start(), range.end());
    Err(DriverError::Option { field, found: found.into(), expected })
}
