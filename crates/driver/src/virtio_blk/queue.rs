//! A queue of a virtio-blk device, and the set of queues that a thread owns.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{ByteLen, Sector512};
use mqblk_memory::{GuestAddress, GuestMemory, SharedArray};
use mqblk_ring::driver_ring::{ChainLayout, ChainRefused, DriverRing, RequestChain};
use mqblk_vhost_user_client::EventFd;

use super::layout::{BlkQueueLayout, REQUEST_STRIDE, STATUS_OFFSET};
use super::wire::{HEADER_BYTES, ID_BYTES, MAX_RANGES, RANGE_BYTES, SectorRange, header, request_type};
use crate::call_event::{self, CallEvent};
use crate::line::{prefetch_found, prefetch_later};
use crate::{DataSegment, DeviceError, DriverError, SubmitError, Waker};

/// A status byte that the device has not written, if [`BlkConnectOptions::poison_status`](super::BlkConnectOptions) is
/// set.
const POISON: u8 = 0xff;

/// Headers that a request's line has room for.
const HEADERS: usize = (REQUEST_STRIDE / HEADER_BYTES) as usize;

/// Status of a completed request. Source: virtio 1.3 section 5.2.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlkStatus {
    /// Done.
    Ok,
    /// VIRTIO_BLK_S_IOERR.
    IoError,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
    /// The device has not written a status (detected only with
    /// [`BlkConnectOptions::poison_status`](super::BlkConnectOptions)).
    NotWritten,
    /// A status that the specification does not define.
    Unknown(u8),
}

impl BlkStatus {
    #[inline]
    fn from_byte(byte: u8) -> BlkStatus {
        match byte {
            0 => BlkStatus::Ok,
            1 => BlkStatus::IoError,
            2 => BlkStatus::Unsupported,
            POISON => BlkStatus::NotWritten,
            other => BlkStatus::Unknown(other),
        }
    }
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkCompletion {
    /// The value given at submission.
    pub user_data: u32,
    /// Its status.
    pub status: BlkStatus,
    /// Bytes that the device has written, as reported by it, including the status byte.
    pub written: u32,
}

/// A queue, owned by one thread. A request allocates nothing and makes no system call. [`publish`](Self::publish) makes
/// one if the server sleeps.
#[derive(Debug)]
pub struct BlkQueue {
    ring: DriverRing,
    chain_layout: ChainLayout,
    memory: Arc<GuestMemory>,
    layout: BlkQueueLayout,
    headers: SharedArray<[u64; 2]>,
    statuses: SharedArray<u8>,
    ranges: SharedArray<[u64; 2]>,
    /// Headers as last written. An equal header (the same block again) is not stored again.
    written_headers: Box<[[u64; 2]]>,
    /// The values given at submission, by slot.
    user_data: Box<[u32]>,
    /// Free slots, a stack in step with the ring's stack of descriptors: a slot always gets the same descriptors.
    free: Vec<u16>,
    poison: bool,
    kick: EventFd,
    kicks: u64,
}

impl BlkQueue {
    pub(crate) fn new(
        ring: DriverRing,
        chain_layout: ChainLayout,
        memory: &Arc<GuestMemory>,
        layout: BlkQueueLayout,
        poison: bool,
        kick: EventFd,
    ) -> Option<BlkQueue> {
        let n = usize::from(ring.size());
        Some(BlkQueue {
            chain_layout,
            headers: memory.shared_array(layout.requests, n * HEADERS)?,
            statuses: memory.shared_array(layout.requests, n * REQUEST_STRIDE as usize)?,
            ranges: memory.shared_array(layout.ranges, n * MAX_RANGES)?,
            memory: Arc::clone(memory),
            layout,
            // No header has this type.
            written_headers: vec![[u64::MAX; 2]; n].into(),
            user_data: vec![0; n].into(),
            free: (0..ring.size()).rev().collect(),
            ring,
            poison,
            kick,
            kicks: 0,
        })
    }

    /// Returns the shared memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns this queue's data area, page aligned.
    pub fn data(&self) -> (GuestAddress, ByteLen) {
        (self.layout.data.start, self.layout.data.len)
    }

    /// Returns the number of requests submitted and not yet reaped.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// Returns the number of kicks so far.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Reads from `start` into `data`.
    ///
    /// # Errors
    /// [`SubmitError::Full`] until a completion is reaped.
    #[inline]
    pub fn read(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::IN, start, [data], true)
    }

    /// Writes `data` at `start`.
    ///
    /// # Errors
    /// [`SubmitError::Full`] until a completion is reaped.
    #[inline]
    pub fn write(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::OUT, start, [data], false)
    }

    /// Reads from `start` into several segments.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or the request has too many segments.
    pub fn read_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::IN, start, data, true)
    }

    /// Writes several segments at `start`.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or the request has too many segments.
    pub fn write_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::OUT, start, data, false)
    }

    /// Makes all reaped writes durable.
    ///
    /// # Errors
    /// [`SubmitError::Full`] until a completion is reaped.
    pub fn flush(&mut self, user_data: u32) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::FLUSH, Sector512(0), [], false)
    }

    /// Discards at most 32 ranges.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or there are no or too many ranges.
    pub fn discard(&mut self, user_data: u32, ranges: &[SectorRange]) -> Result<(), SubmitError> {
        self.submit_ranges(user_data, request_type::DISCARD, ranges)
    }

    /// Writes zeroes to at most 32 ranges.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or there are no or too many ranges.
    pub fn write_zeroes(&mut self, user_data: u32, ranges: &[SectorRange]) -> Result<(), SubmitError> {
        self.submit_ranges(user_data, request_type::WRITE_ZEROES, ranges)
    }

    /// Reads the device's serial: 20 bytes at `address`, padded with zeroes.
    ///
    /// # Errors
    /// [`SubmitError::Full`] until a completion is reaped.
    pub fn get_id(&mut self, user_data: u32, address: GuestAddress) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::GET_ID, Sector512(0), [DataSegment { address, len: ID_BYTES }], true)
    }

    fn submit_ranges(&mut self, user_data: u32, kind: u32, ranges: &[SectorRange]) -> Result<(), SubmitError> {
        if ranges.len() > MAX_RANGES {
            return Err(SubmitError::TooManySegments(MAX_RANGES as u16));
        }
        let slot = usize::from(*self.free.last().ok_or(SubmitError::Full)?);
        for (at, range) in ranges.iter().enumerate() {
            self.ranges.set(slot * MAX_RANGES + at, range.to_words());
        }
        let bytes = u64::from(RANGE_BYTES);
        let address = GuestAddress(self.layout.ranges.0 + (slot * MAX_RANGES) as u64 * bytes);
        self.submit(
            user_data,
            kind,
            Sector512(0),
            [DataSegment { address, len: ranges.len() as u32 * RANGE_BYTES }],
            false,
        )
    }

    /// Builds the descriptor chain of a request: header, data, status.
    #[inline]
    fn submit(
        &mut self,
        user_data: u32,
        kind: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
        device_writes: bool,
    ) -> Result<(), SubmitError> {
        let slot = *self.free.last().ok_or(SubmitError::Full)?;
        let (header_at, status_at) = self.layout.request(slot);
        let request = (header_at, data, device_writes, status_at);
        match &mut self.ring {
            DriverRing::Split(ring) => build(ring.begin(self.chain_layout), request, slot)?,
            DriverRing::Packed(ring) => build(ring.begin(self.chain_layout), request, slot)?,
        }
        self.free.pop();
        let slot = usize::from(slot);
        self.user_data[slot] = user_data;
        let words = header(kind, start);
        if self.written_headers[slot] != words {
            self.written_headers[slot] = words;
            self.headers.set(slot * HEADERS, words);
        }
        if self.poison {
            self.statuses.set(status(slot), POISON);
        }
        Ok(())
    }

    /// Publishes all submitted requests, and kicks the server if it has asked for kicks.
    ///
    /// # Errors
    /// If the kick cannot be written.
    #[inline]
    pub fn publish(&mut self) -> io::Result<()> {
        if self.ring.publish() {
            self.kicks += 1;
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// Returns the number of requests submitted and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.ring.unpublished()
    }

    /// Checks for completions. Returns how many [`reap`](Self::reap) can take.
    ///
    /// # Errors
    /// If the device violates the protocol. The queue cannot be used any more.
    #[inline]
    pub fn poll(&mut self) -> Result<u16, DeviceError> {
        let found = self.ring.poll_used()?;
        prefetch_found((&self.ring, &self.statuses), found, status);
        Ok(found)
    }

    /// Reaps one of the completions that the last [`poll`](Self::poll) has found.
    ///
    /// # Errors
    /// If the device violates the protocol. The queue cannot be used any more.
    #[inline(always)] // else the completion travels through memory, where its status is stored in two parts and loaded as one
    pub fn reap(&mut self) -> Result<Option<BlkCompletion>, DeviceError> {
        prefetch_later((&self.ring, &self.statuses), status);
        let Some(used) = self.ring.take()? else { return Ok(None) };
        let slot = used.token as usize;
        let status = BlkStatus::from_byte(self.statuses.get(status(slot)));
        self.free.push(slot as u16);
        Ok(Some(BlkCompletion { user_data: self.user_data[slot], status, written: used.written }))
    }
}

/// Returns the index of a slot's status byte.
#[inline]
fn status(slot: usize) -> usize {
    slot * REQUEST_STRIDE as usize + STATUS_OFFSET as usize
}

/// Builds a request: header, data (which the device writes or reads), status.
#[inline(always)]
fn build<C: RequestChain>(
    chain: C,
    (header, data, device_writes, status): (GuestAddress, impl IntoIterator<Item = DataSegment>, bool, GuestAddress),
    slot: u16,
) -> Result<(), ChainRefused> {
    let mut chain = chain.readable(header, HEADER_BYTES)?;
    for segment in data {
        chain = match device_writes {
            true => chain.writable(segment.address, segment.len)?,
            false => chain.readable(segment.address, segment.len)?,
        };
    }
    chain.writable(status, 1)?.commit(u32::from(slot))
}

/// The queues that a thread owns. They share a call eventfd, so the thread waits with one system call.
#[derive(Debug)]
pub struct BlkQueueSet {
    queues: Vec<BlkQueue>,
    call_event: CallEvent,
}

impl BlkQueueSet {
    pub(crate) fn new(queues: Vec<BlkQueue>, call: EventFd) -> io::Result<BlkQueueSet> {
        Ok(BlkQueueSet { queues, call_event: CallEvent::new(call)? })
    }

    /// Returns the queues.
    #[inline]
    pub fn queues_mut(&mut self) -> &mut [BlkQueue] {
        &mut self.queues
    }

    /// Returns the queues.
    #[inline]
    pub fn queues(&self) -> &[BlkQueue] {
        &self.queues
    }

    /// Returns the number of calls so far. A use of the [`Waker`] counts as one.
    ///
    /// # Errors
    /// If the eventfd cannot be read.
    pub fn calls(&mut self) -> io::Result<u64> {
        self.call_event.count()
    }

    /// Returns the number of kicks of all queues.
    pub fn kicks(&self) -> u64 {
        self.queues.iter().map(BlkQueue::kicks).sum()
    }

    /// Sleeps until a queue has `count` completions (or all, if fewer are in flight), or the [`Waker`] is used. Returns
    /// at once if nothing is in flight. May return early.
    ///
    /// # Errors
    /// If the device violates the protocol, or the wait fails.
    pub fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        self.arm_and_sleep(count, None)
    }

    /// As [`wait`](Self::wait), for at most `limit`, exact to microseconds. Sleeps also if nothing is in flight.
    ///
    /// # Errors
    /// Those of [`wait`](Self::wait).
    pub fn wait_at_most(&mut self, count: u16, limit: Duration) -> Result<(), DriverError> {
        self.arm_and_sleep(count, Some(limit))
    }

    fn arm_and_sleep(&mut self, count: u16, limit: Option<Duration>) -> Result<(), DriverError> {
        let armed = call_event::arm_rings(self.queues.iter_mut().map(|queue| &mut queue.ring), count)?;
        match limit {
            _ if armed.is_ready => {}
            Some(limit) => self.call_event.sleep_exactly(limit)?,
            None if armed.has_in_flight => self.call_event.sleep(None)?,
            None => {}
        }
        for queue in &self.queues {
            queue.ring.disarm();
        }
        Ok(())
    }

    /// Returns a handle that ends a [`wait`](Self::wait) from another thread.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn waker(&self) -> io::Result<Waker> {
        self.call_event.waker()
    }
}
