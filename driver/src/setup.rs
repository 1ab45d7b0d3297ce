//! What the set-up of every device has: shared memory, rings in it, and how requests lie in them.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_core::ByteLen;
use mqblk_memory::{GuestAddress, GuestMemory, Region};
use mqblk_ring::split::driver::{ChainLayout, IndirectArea, RingFeatures};
use mqblk_ring::split::{SplitAddresses, SplitDriver};
use mqblk_vhost_user_client::features as virtio;
use mqblk_vhost_user_client::{Client, EventFd, InflightMemory, QueueSetup, SharedRegion};

use crate::DriverError;

/// The first guest address in use: not 0, so that a zeroed descriptor names nothing.
const FIRST_ADDRESS: GuestAddress = GuestAddress(1 << 20);
/// Parts that different sides write start on different pages.
const PAGE: u64 = 4096;
/// Descriptors of an indirect table: header, status, and up to 14 pieces of data.
const TABLE_DESCRIPTORS: u16 = 16;

/// A stretch of shared memory that a request's data lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSegment {
    /// Where.
    pub address: GuestAddress,
    /// How many bytes.
    pub len: u32,
}

/// How requests lie in the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DescriptorLayout {
    /// Direct while the ring has room for three descriptors for each request that will be in flight, else indirect.
    #[default]
    Auto,
    /// A ring descriptor for each piece.
    Direct,
    /// A table for each request, when the server takes them.
    Indirect,
}

impl DescriptorLayout {
    /// What it is for `depth` requests on a ring of `size` entries.
    pub(crate) fn resolve(self, indirect: bool, depth: u32, size: u16) -> ChainLayout {
        match self {
            DescriptorLayout::Indirect if indirect => ChainLayout::Indirect,
            DescriptorLayout::Auto if indirect && depth * 3 > size.into() => ChainLayout::Indirect,
            _ => ChainLayout::Direct,
        }
    }
}

/// Hands out page-aligned stretches of guest addresses, one behind the other.
#[derive(Debug)]
pub(crate) struct AddressPlanner {
    next: u64,
}

impl AddressPlanner {
    pub(crate) fn new() -> AddressPlanner {
        AddressPlanner { next: FIRST_ADDRESS.0 }
    }

    pub(crate) fn allocate(&mut self, bytes: u64) -> GuestAddress {
        let at = GuestAddress(self.next);
        // What is too much is refused when the memory is made.
        self.next = self.next.saturating_add(bytes).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        at
    }

    /// A ring of `size` entries, and its indirect tables.
    pub(crate) fn allocate_ring(&mut self, size: u16) -> RingLayout {
        let n = u64::from(size);
        let at = SplitAddresses {
            desc: self.allocate(16 * n),
            avail: self.allocate(6 + 2 * n),
            used: self.allocate(6 + 8 * n),
        };
        RingLayout { addresses: at, size, tables: self.allocate(IndirectArea::bytes(size, TABLE_DESCRIPTORS)) }
    }

    /// Makes the memory and shows it to the server.
    pub(crate) fn share(self, client: &mut Client) -> Result<SharedMemory, DriverError> {
        let (region, file) = Region::shared("mqblk-driver", self.next - FIRST_ADDRESS.0, FIRST_ADDRESS)?;
        let region = Arc::new(region);
        let memory = Arc::new(GuestMemory::new(vec![Arc::clone(&region)])?);
        client.set_memory(&[SharedRegion { region: &region, file: &file }])?;
        Ok(SharedMemory { region, memory, file, inflight: None, started_queues: Vec::new() })
    }
}

/// One ring's place, in guest addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingLayout {
    addresses: SplitAddresses,
    pub(crate) size: u16,
    tables: GuestAddress,
}

/// Memory that the driver shares with the server, and the queues in it. What the server maps is kept until the conversation ends,
/// and shown to the next server when it ends early.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    region: Arc<Region>,
    pub(crate) memory: Arc<GuestMemory>,
    file: File,
    /// Where the server keeps which requests are in flight.
    inflight: Option<InflightMemory>,
    started_queues: Vec<StartedQueue>,
}

/// A queue that was started.
#[derive(Debug)]
struct StartedQueue {
    index: u16,
    addresses: SplitAddresses,
    size: u16,
    kick: EventFd,
    call: EventFd,
}

impl SharedMemory {
    /// Has the server keep which requests of `queues` queues are in flight where its successor finds it. Before any queue starts.
    pub(crate) fn create_inflight(&mut self, client: &mut Client, queues: u16, size: u16) -> Result<(), DriverError> {
        self.inflight = client.create_inflight(queues, size)?;
        Ok(())
    }

    /// Has another server go on with the queues, in the middle of whatever they were doing.
    pub(crate) fn resume(&mut self, client: &mut Client) -> Result<(), DriverError> {
        let SharedMemory { region, file, memory, inflight, started_queues: started } = self;
        client.set_memory(&[SharedRegion { region, file }])?;
        if let Some(inflight) = inflight {
            client.set_inflight(inflight)?;
        }
        for StartedQueue { index, addresses: at, size, kick, call } in started {
            // What was answered is used: a server without the in-flight memory does all that comes after it again, which is right
            // if the one before answered in order.
            let used = memory.shared_u16(GuestAddress(at.used.0 + 2)).map_or(0, |used| used.load(Ordering::Acquire));
            let base = u16::from_le(used);
            client.start_queue(*index, &QueueSetup { size: *size, addresses: *at, region, base, kick, call })?;
        }
        Ok(())
    }

    /// Sets queue `index` up at `layout` and starts it; its calls go to `call`. Returns its ring, and what to kick it with.
    pub(crate) fn start_queue(
        &mut self,
        client: &mut Client,
        index: u16,
        layout: &RingLayout,
        features: u64,
        call: &EventFd,
    ) -> Result<(SplitDriver, EventFd), DriverError> {
        let has = |bit: u64| features & bit != 0;
        let tables = IndirectArea { start: layout.tables, per_table: TABLE_DESCRIPTORS };
        let tables = has(virtio::INDIRECT_DESC).then_some(tables);
        let event_idx = has(virtio::EVENT_IDX);
        let ring = SplitDriver::new(&self.memory, &layout.addresses, layout.size, RingFeatures { event_idx }, tables)?;
        let kick = EventFd::new(0).map_err(DriverError::eventfd)?;
        let region = &self.region;
        let setup = QueueSetup { size: layout.size, addresses: layout.addresses, region, base: 0, kick: &kick, call };
        client.start_queue(index, &setup)?;
        let clone = |event: &EventFd| event.try_clone().map_err(DriverError::eventfd);
        let (at, size) = (layout.addresses, layout.size);
        self.started_queues.push(StartedQueue { index, addresses: at, size, kick: clone(&kick)?, call: clone(call)? });
        Ok((ring, kick))
    }
}

/// Data memory of one queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataArea {
    pub(crate) start: GuestAddress,
    pub(crate) len: ByteLen,
}
