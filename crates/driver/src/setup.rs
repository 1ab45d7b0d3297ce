//! Setup that all vhost-user devices share: shared memory, the rings in it, and the layout of requests.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_core::ByteLen;
use mqblk_memory::{GuestAddress, GuestMemory, Region};
use mqblk_ring::driver_ring::{ChainLayout, DriverRing, IndirectArea};
use mqblk_ring::virtqueue::{RingAddresses, RingFormat};
use mqblk_vhost_user_client::features as virtio;
use mqblk_vhost_user_client::{Client, EventFd, InflightMemory, QueueSetup, SharedRegion};

use crate::DriverError;
use crate::call_event::new_eventfd;

/// First guest address in use. Not 0, so that a zeroed descriptor is invalid.
const FIRST_ADDRESS: GuestAddress = GuestAddress(1 << 20);
/// Areas start on page boundaries, so the two sides never write the same page.
const PAGE: u64 = 4096;
/// Descriptors of an indirect table: header, status, and up to 14 data segments.
const TABLE_DESCRIPTORS: u16 = 16;

/// A contiguous part of a request's data in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSegment {
    /// Its guest address.
    pub address: GuestAddress,
    /// Its length in bytes.
    pub len: u32,
}

/// Layout of requests: direct or indirect descriptors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DescriptorLayout {
    /// Direct if the ring has three descriptors for each request in flight at full depth, else indirect.
    #[default]
    Auto,
    /// A ring descriptor for each segment.
    Direct,
    /// An indirect table for each request, if the server supports them.
    Indirect,
}

impl DescriptorLayout {
    /// Returns the layout for `depth` requests on a ring of `size` entries. `indirect`: the server supports indirect
    /// descriptors.
    pub(crate) fn resolve(self, indirect: bool, depth: u32, size: u16) -> ChainLayout {
        match self {
            DescriptorLayout::Indirect if indirect => ChainLayout::Indirect,
            DescriptorLayout::Auto if indirect && depth * 3 > size.into() => ChainLayout::Indirect,
            _ => ChainLayout::Direct,
        }
    }
}

/// Allocates page-aligned ranges of guest addresses in ascending order.
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
        // An overflow is reported when the memory is allocated.
        self.next = self.next.saturating_add(bytes).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        at
    }

    /// Allocates a ring of `size` entries and its indirect tables.
    pub(crate) fn allocate_ring(&mut self, size: u16) -> RingLayout {
        let n = u64::from(size);
        let at = RingAddresses {
            desc: self.allocate(16 * n),
            avail: self.allocate(6 + 2 * n),
            used: self.allocate(6 + 8 * n),
        };
        RingLayout { addresses: at, size, tables: self.allocate(IndirectArea::bytes(size, TABLE_DESCRIPTORS)) }
    }

    /// Allocates the memory and shares it with the server.
    pub(crate) fn share(self, client: &mut Client) -> Result<SharedMemory, DriverError> {
        let (region, file) = Region::shared("mqblk-driver", self.next - FIRST_ADDRESS.0, FIRST_ADDRESS)?;
        let region = Arc::new(region);
        let memory = Arc::new(GuestMemory::new(vec![Arc::clone(&region)])?);
        client.set_memory(&[SharedRegion { region: &region, file: &file }])?;
        Ok(SharedMemory { region, memory, file, inflight: None, started_queues: Vec::new() })
    }
}

/// Guest addresses of a ring and of its indirect tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingLayout {
    addresses: RingAddresses,
    pub(crate) size: u16,
    tables: GuestAddress,
}

/// Memory shared with the server, and the queues in it. It lives as long as the device, and is shared with the next
/// server after a reconnect.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    region: Arc<Region>,
    pub(crate) memory: Arc<GuestMemory>,
    file: File,
    /// The in-flight region, in which the server records requests.
    inflight: Option<InflightMemory>,
    started_queues: Vec<StartedQueue>,
}

/// A started queue, with the data to start it at the next server.
#[derive(Debug)]
struct StartedQueue {
    index: u16,
    addresses: RingAddresses,
    size: u16,
    format: RingFormat,
    kick: EventFd,
    call: EventFd,
}

impl SharedMemory {
    /// Creates an in-flight region for `queues` queues, so that the next server replays requests. Called before any
    /// queue starts.
    pub(crate) fn create_inflight(&mut self, client: &mut Client, queues: u16, size: u16) -> Result<(), DriverError> {
        self.inflight = client.create_inflight(queues, size)?;
        Ok(())
    }

    /// Starts the queues at another server. Requests may be in flight.
    pub(crate) fn resume(&mut self, client: &mut Client) -> Result<(), DriverError> {
        let SharedMemory { region, file, memory, inflight, started_queues: started } = self;
        client.set_memory(&[SharedRegion { region, file }])?;
        if let Some(inflight) = inflight {
            client.set_inflight(inflight)?;
        }
        for StartedQueue { index, addresses: at, size, format, kick, call } in started {
            let base = match format {
                // The used index is the number of completed requests. A server without an in-flight region repeats all
                // requests after it, which is correct if the previous server completed them in order.
                RingFormat::Split => {
                    let used = memory.shared_u16(GuestAddress(at.used.0 + 2));
                    u16::from_le(used.map_or(0, |used| used.load(Ordering::Acquire)))
                }
                // Used descriptors are written over those of requests in flight: only the in-flight region has these.
                RingFormat::Packed if inflight.is_some() => first_base(RingFormat::Packed),
                RingFormat::Packed => return Err(DriverError::NotResumable),
            };
            client.start_queue(*index, &QueueSetup { size: *size, addresses: *at, region, base, kick, call })?;
        }
        Ok(())
    }

    /// Sets up and starts queue `index` at `layout`. Its calls go to `call`. Returns the ring and the kick eventfd.
    pub(crate) fn start_queue(
        &mut self,
        client: &mut Client,
        index: u16,
        layout: &RingLayout,
        features: u64,
        call: &EventFd,
    ) -> Result<(DriverRing, EventFd), DriverError> {
        let has = |bit: u64| features & bit != 0;
        let tables = IndirectArea { start: layout.tables, per_table: TABLE_DESCRIPTORS };
        let tables = has(virtio::INDIRECT_DESC).then_some(tables);
        let event_idx = has(virtio::EVENT_IDX);
        let format = if has(virtio::RING_PACKED) { RingFormat::Packed } else { RingFormat::Split };
        let (at, size) = (layout.addresses, layout.size);
        let ring = DriverRing::new(&self.memory, &at, size, format, event_idx, tables)?;
        let kick = new_eventfd().map_err(DriverError::eventfd)?;
        let region = &self.region;
        let setup = QueueSetup { size, addresses: at, region, base: first_base(format), kick: &kick, call };
        client.start_queue(index, &setup)?;
        let clone = |event: &EventFd| event.try_clone().map_err(DriverError::eventfd);
        let (kick_clone, call) = (clone(&kick)?, clone(call)?);
        self.started_queues.push(StartedQueue { index, addresses: at, size, format, kick: kick_clone, call });
        Ok((ring, kick))
    }
}

/// Returns the base of a new ring in the form of [`QueueSetup::base`].
const fn first_base(format: RingFormat) -> u16 {
    // The low half: the available position.
    format.first_base() as u16
}

/// Checks that the server offers packed rings if they are wanted.
pub(crate) fn check_packed(wanted: bool, features: u64) -> Result<(), DriverError> {
    if !wanted || features & virtio::RING_PACKED != 0 {
        return Ok(());
    }
    let expected = "0: the server does not offer VIRTIO_F_RING_PACKED".to_owned();
    Err(DriverError::Option { field: "packed rings", found: 1, expected })
}

/// Data memory of a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataArea {
    pub(crate) start: GuestAddress,
    pub(crate) len: ByteLen,
}
