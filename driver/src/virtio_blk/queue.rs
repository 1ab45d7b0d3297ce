//! One queue of a virtio-blk device, and the set of queues that one thread owns.

use std::io;
use std::sync::Arc;

use mqblk_core::{ByteLen, Sector512};
use mqblk_memory::{GuestAddress, GuestMemory, SharedArray};
use mqblk_ring::split::SplitDriver;
use mqblk_ring::split::driver::ChainLayout;
use mqblk_vhost_user_client::EventFd;

use super::layout::QueueLayout;
use super::wire::{HEADER_BYTES, ID_BYTES, MAX_RANGES, RANGE_BYTES, SectorRange, header, request_type};
use crate::call_event::{self, CallEvent};
use crate::{DataSegment, DeviceError, DriverError, SubmitError, Waker};

/// What a status byte holds before the device has written it, when [`Options::poison_status`](super::Options) is set.
const POISON: u8 = 0xff;

/// How the device says a request ended. Source: virtio 1.3 section 5.2.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlkStatus {
    /// Done.
    Ok,
    /// VIRTIO_BLK_S_IOERR.
    IoError,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
    /// The device answered without writing a status (seen only with [`Options::poison_status`](super::Options)).
    NotWritten,
    /// No status that the specification knows.
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

/// A request's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkCompletion {
    /// What the submission was given.
    pub user_data: u32,
    /// How it ended.
    pub status: BlkStatus,
    /// Bytes that the device says it wrote, the status byte included.
    pub written: u32,
}

/// One queue, owned by one thread. Nothing is allocated, and no system call made, for a request; [`publish`](Self::publish)
/// makes one when the server sleeps.
#[derive(Debug)]
pub struct BlkQueue {
    ring: SplitDriver,
    chain_layout: ChainLayout,
    memory: Arc<GuestMemory>,
    layout: QueueLayout,
    headers: SharedArray<[u64; 2]>,
    statuses: SharedArray<u8>,
    ranges: SharedArray<[u64; 2]>,
    /// Headers as last written: one that is the same (the same block again) is not stored again.
    written_headers: Box<[[u64; 2]]>,
    /// What submissions were given, by slot.
    user_data: Box<[u32]>,
    /// A stack, in step with the ring's stack of descriptors: a slot comes with the same descriptors again.
    free: Vec<u16>,
    poison: bool,
    kick: EventFd,
    kicks: u64,
}

impl BlkQueue {
    pub(crate) fn new(
        ring: SplitDriver,
        shape: ChainLayout,
        memory: &Arc<GuestMemory>,
        layout: QueueLayout,
        poison: bool,
        kick: EventFd,
    ) -> Option<BlkQueue> {
        let n = usize::from(ring.size());
        Some(BlkQueue {
            chain_layout: shape,
            headers: memory.shared_array(layout.headers, n)?,
            statuses: memory.shared_array(layout.statuses, n)?,
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

    /// The memory that data lies in.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// This queue's stretch of data memory, page aligned.
    pub fn data(&self) -> (GuestAddress, ByteLen) {
        (self.layout.data.start, self.layout.data.len)
    }

    /// Requests submitted and not yet reaped.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// Kicks written so far.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Reads from `start` into `data`.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
    #[inline]
    pub fn read(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::IN, start, [data], true)
    }

    /// Writes `data` at `start`.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
    #[inline]
    pub fn write(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::OUT, start, [data], false)
    }

    /// Reads from `start` into several pieces.
    ///
    /// # Errors
    /// [`Refused`]: full, or more pieces than a request can have.
    pub fn read_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::IN, start, data, true)
    }

    /// Writes several pieces at `start`.
    ///
    /// # Errors
    /// [`Refused`]: full, or more pieces than a request can have.
    pub fn write_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::OUT, start, data, false)
    }

    /// Makes all writes that have been reaped durable.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
    pub fn flush(&mut self, user_data: u32) -> Result<(), SubmitError> {
        self.submit(user_data, request_type::FLUSH, Sector512(0), [], false)
    }

    /// Says that the ranges' content is no longer needed. At most [`MAX_RANGES`].
    ///
    /// # Errors
    /// [`Refused`]: full, none, or too many ranges.
    pub fn discard(&mut self, user_data: u32, ranges: &[SectorRange]) -> Result<(), SubmitError> {
        self.submit_ranges(user_data, request_type::DISCARD, ranges)
    }

    /// Makes the ranges read as zeroes. At most [`MAX_RANGES`].
    ///
    /// # Errors
    /// [`Refused`]: full, none, or too many ranges.
    pub fn write_zeroes(&mut self, user_data: u32, ranges: &[SectorRange]) -> Result<(), SubmitError> {
        self.submit_ranges(user_data, request_type::WRITE_ZEROES, ranges)
    }

    /// Asks for the device's serial: 20 bytes at `address`, padded with zeroes.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
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

    /// Composes a request piece by piece: header, data, status.
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
        let at = u64::from(slot);
        let header_at = GuestAddress(self.layout.headers.0 + at * u64::from(HEADER_BYTES));
        let mut chain = self.ring.begin(self.chain_layout).readable(header_at, HEADER_BYTES)?;
        for piece in data {
            chain = match device_writes {
                true => chain.writable(piece.address, piece.len)?,
                false => chain.readable(piece.address, piece.len)?,
            };
        }
        chain = chain.writable(GuestAddress(self.layout.statuses.0 + at), 1)?;
        chain.commit(u32::from(slot))?;
        self.free.pop();
        let slot = usize::from(slot);
        self.user_data[slot] = user_data;
        let words = header(kind, start);
        if self.written_headers[slot] != words {
            self.written_headers[slot] = words;
            self.headers.set(slot, words);
        }
        if self.poison {
            self.statuses.set(slot, POISON);
        }
        Ok(())
    }

    /// Makes all submitted requests visible to the server, and kicks it if it asked for that.
    ///
    /// # Errors
    /// When the kick cannot be written.
    #[inline]
    pub fn publish(&mut self) -> io::Result<()> {
        if self.ring.publish() {
            self.kicks += 1;
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// Requests submitted and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.ring.unpublished()
    }

    /// Looks for answers; returns how many [`reap`](Self::reap) can take.
    ///
    /// # Errors
    /// When the device breaks the protocol: the queue is of no more use.
    #[inline]
    pub fn poll(&mut self) -> Result<u16, DeviceError> {
        Ok(self.ring.poll_used()?)
    }

    /// Takes one answer of those that the last [`look`](Self::look) saw.
    ///
    /// # Errors
    /// When the device breaks the protocol: the queue is of no more use.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<BlkCompletion>, DeviceError> {
        let Some(used) = self.ring.take()? else { return Ok(None) };
        let slot = used.token as usize;
        let status = BlkStatus::from_byte(self.statuses.get(slot));
        self.free.push(slot as u16);
        Ok(Some(BlkCompletion { user_data: self.user_data[slot], status, written: used.written }))
    }
}

/// The queues that one thread owns. They share one call eventfd, so that the thread waits in one place, with one system call.
#[derive(Debug)]
pub struct BlkQueueSet {
    queues: Vec<BlkQueue>,
    call_event: CallEvent,
}

impl BlkQueueSet {
    pub(crate) fn new(queues: Vec<BlkQueue>, call: EventFd) -> io::Result<BlkQueueSet> {
        Ok(BlkQueueSet { queues, call_event: CallEvent::new(call)? })
    }

    /// The queues.
    #[inline]
    pub fn queues_mut(&mut self) -> &mut [BlkQueue] {
        &mut self.queues
    }

    /// The queues, to look at.
    #[inline]
    pub fn queues(&self) -> &[BlkQueue] {
        &self.queues
    }

    /// Calls that the server has sent so far. A use of the [`Waker`] counts as one.
    ///
    /// # Errors
    /// When the eventfd cannot be read.
    pub fn calls(&mut self) -> io::Result<u64> {
        self.call_event.count()
    }

    /// Kicks written on all the queues.
    pub fn kicks(&self) -> u64 {
        self.queues.iter().map(BlkQueue::kicks).sum()
    }

    /// Sleeps until on one of the queues `count` answers are there (or all, if fewer are in flight there), or the [`Waker`]
    /// is used. Returns at once if nothing is in flight. May return early.
    ///
    /// # Errors
    /// When a device breaks the protocol, or the wait fails.
    pub fn wait(&mut self, count: u16) -> Result<(), DriverError> {
        let armed = call_event::arm_rings(self.queues.iter_mut().map(|queue| &mut queue.ring), count)?;
        if armed.has_in_flight && !armed.is_ready {
            self.call_event.sleep(None)?;
        }
        for queue in &self.queues {
            queue.ring.disarm();
        }
        Ok(())
    }

    /// Something to end a [`wait`](Self::wait) with from another thread.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn waker(&self) -> io::Result<Waker> {
        self.call_event.waker()
    }
}
