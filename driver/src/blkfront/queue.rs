//! One ring of a device.

use std::sync::Arc;

use mqblk_core::{ByteLen, EventChannel, Sector512};
use mqblk_memory::{GuestAddress, GuestMemory};
use mqblk_ring::blkif::request::{DISCARD_SECURE, MAX_SEGMENTS};
use mqblk_ring::blkif::{BlkifRequest, FrontRing, IndirectRequest, RawRequest, RequestBody, Segment, operation};

use super::segments::{RequestSegments, SegmentComposer};
use super::shadow::{BlkfrontCompletion, ResponseError, ShadowRing};
use crate::setup::DataArea;
use crate::{DataSegment, DeviceError, SubmitError};

/// Keeps pages granted.
pub(super) type GrantGuard = Arc<dyn Send + Sync>;

/// What a queue is made of.
pub(super) struct QueueParts {
    pub(super) ring: FrontRing,
    pub(super) channel: Box<dyn EventChannel>,
    /// Goes into each request; backends do not look at it.
    pub(super) handle: u16,
    /// Most requests in flight.
    pub(super) depth: u16,
    pub(super) composer: SegmentComposer,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) data: DataArea,
    pub(super) guards: Vec<GrantGuard>,
}

/// One ring, owned by one thread, and all that its requests need: ids, pages of data, pages of segments. Nothing is allocated, and
/// no system call made, for a request; [`publish`](Self::publish) makes one when the backend sleeps.
pub struct BlkfrontQueue {
    pub(super) ring: FrontRing,
    channel: Box<dyn EventChannel>,
    shadow: ShadowRing,
    composer: SegmentComposer,
    handle: u16,
    memory: Arc<GuestMemory>,
    data: DataArea,
    notifications: u64,
    /// An event was taken, and none comes until the channel is unmasked.
    masked: bool,
    /// Why the queue is disabled.
    error: Option<ResponseError>,
    /// Of the ring's pages, the data's and the segments'.
    _guards: Vec<GrantGuard>,
}

impl BlkfrontQueue {
    pub(super) fn new(parts: QueueParts) -> BlkfrontQueue {
        let QueueParts { ring, channel, handle, depth, composer, memory, data, guards: keepers } = parts;
        let held = composer.indirect_pages().map_or(u16::MAX, |tables| tables.ids());
        // A ring has at most 512 entries.
        let ids = depth.clamp(1, ring.size() as u16).min(held);
        BlkfrontQueue {
            ring,
            channel,
            shadow: ShadowRing::new(ids),
            composer,
            handle,
            memory,
            data,
            notifications: 0,
            masked: false,
            error: None,
            _guards: keepers,
        }
    }

    /// The memory that data lies in.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// This queue's stretch of data memory, page aligned.
    pub fn data(&self) -> (GuestAddress, ByteLen) {
        (self.data.start, self.data.len)
    }

    /// Entries of the ring.
    pub fn size(&self) -> u16 {
        self.ring.size() as u16
    }

    /// Most segments of a request: parts of pages, each of at most 4096 bytes.
    pub fn max_segments(&self) -> u16 {
        self.composer.max_segments()
    }

    /// Requests submitted and not yet reaped.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight() as u16
    }

    /// Events sent so far.
    pub fn kicks(&self) -> u64 {
        self.notifications
    }

    /// Reads from `start` into `data`.
    ///
    /// # Errors
    /// [`Refused`]: full, or not data for a request.
    #[inline]
    pub fn read(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit_single(user_data, operation::READ, start, data)
    }

    /// Writes `data` at `start`.
    ///
    /// # Errors
    /// [`Refused`]: full, or not data for a request.
    #[inline]
    pub fn write(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit_single(user_data, operation::WRITE, start, data)
    }

    /// Reads from `start` into several pieces.
    ///
    /// # Errors
    /// [`Refused`]: full, or not data for a request.
    pub fn read_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::READ, start, data)
    }

    /// Writes several pieces at `start`.
    ///
    /// # Errors
    /// [`Refused`]: full, or not data for a request.
    pub fn write_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::WRITE, start, data)
    }

    /// Writes several pieces at `start` after all that was submitted before, durably, and before all that is submitted after it. At
    /// most 11 segments.
    ///
    /// # Errors
    /// [`Refused`]: full, or not data for a request.
    pub fn barrier(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::WRITE_BARRIER, start, data)
    }

    /// Makes all writes that have been reaped durable.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
    pub fn flush(&mut self, user_data: u32) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::FLUSH_DISKCACHE, Sector512(0), [])
    }

    /// Gives the space of `sectors` sectors from `start` back; `secure`: what was there must not be found again.
    ///
    /// # Errors
    /// [`Refused::Full`] until something is reaped.
    pub fn discard(&mut self, user_data: u32, start: Sector512, sectors: u64, secure: bool) -> Result<(), SubmitError> {
        let id = self.next_id()?;
        let flag = if secure { DISCARD_SECURE } else { 0 };
        self.put(
            id,
            user_data,
            operation::DISCARD,
            operation::DISCARD,
            RequestBody::Discard { flag, sector: start, sectors },
        )
    }

    /// One piece, which mostly lies in one page.
    #[inline]
    fn submit_single(
        &mut self,
        user_data: u32,
        operation: u8,
        sector: Sector512,
        data: DataSegment,
    ) -> Result<(), SubmitError> {
        let id = self.next_id()?;
        match self.composer.single(data)? {
            Some(segment) => self.put_rw(id, user_data, operation, sector, &[segment]),
            None => self.submit_rw(user_data, operation, sector, [data]),
        }
    }

    #[inline]
    fn put_rw(
        &mut self,
        id: u16,
        user_data: u32,
        operation: u8,
        sector: Sector512,
        segments: &[Segment],
    ) -> Result<(), SubmitError> {
        if !self.ring.put_rw(id.into(), operation, self.handle, sector, segments) {
            return Err(SubmitError::Full);
        }
        self.shadow.claim(user_data, operation);
        Ok(())
    }

    fn submit_rw(
        &mut self,
        user_data: u32,
        operation: u8,
        sector: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        let id = self.next_id()?;
        let RequestSegments { count, first } = self.composer.compose(id, data)?;
        if usize::from(count) <= MAX_SEGMENTS {
            if count == 0 && matches!(operation, operation::READ | operation::WRITE) {
                return Err(SubmitError::Empty);
            }
            return self.put_rw(id, user_data, operation, sector, &first[..count.into()]);
        }
        self.submit_indirect(id, user_data, operation, sector, count)
    }

    /// Puts a request on whose segments are in the pages of its id.
    fn submit_indirect(
        &mut self,
        id: u16,
        user_data: u32,
        inner: u8,
        sector: Sector512,
        count: u16,
    ) -> Result<(), SubmitError> {
        let tables = self.composer.indirect_pages().filter(|_| matches!(inner, operation::READ | operation::WRITE));
        let Some(tables) = tables else { return Err(SubmitError::TooManySegments(MAX_SEGMENTS as u16)) };
        let indirect = IndirectRequest { operation: inner, nr_segments: count, sector, pages: tables.grants(id) };
        self.put(id, user_data, operation::INDIRECT, inner, RequestBody::Indirect(indirect))
    }

    /// The id of the next request.
    #[inline]
    fn next_id(&self) -> Result<u16, SubmitError> {
        match self.shadow.next_id() {
            Some(id) if self.error.is_none() => Ok(id),
            _ if self.error.is_some() => Err(SubmitError::Disabled),
            _ => Err(SubmitError::Full),
        }
    }

    /// `answer`: what the response has to say.
    #[inline]
    fn put(
        &mut self,
        id: u16,
        user_data: u32,
        operation: u8,
        answer: u8,
        what: RequestBody,
    ) -> Result<(), SubmitError> {
        let request = BlkifRequest { id: id.into(), operation, handle: self.handle, body: what };
        if !self.ring.put(&RawRequest::encode(self.ring.abi(), &request)) {
            return Err(SubmitError::Full);
        }
        self.shadow.claim(user_data, answer);
        Ok(())
    }

    /// Makes all submitted requests visible to the backend, and sends it an event if it asked for that.
    #[inline]
    pub fn publish(&mut self) {
        if self.ring.publish() {
            self.notifications += 1;
            self.channel.notify();
        }
    }

    /// Requests submitted and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.ring.unpublished() as u16
    }

    /// Looks for answers; returns how many [`reap`](Self::reap) can take.
    ///
    /// # Errors
    /// When the backend breaks the protocol: the queue is of no more use.
    #[inline]
    pub fn poll(&mut self) -> Result<u16, DeviceError> {
        if let Some(broken) = self.error {
            return Err(broken.into());
        }
        match self.ring.poll_responses() {
            Ok(ready) => Ok(ready as u16),
            Err(broken) => Err(self.disable(broken.into())),
        }
    }

    /// Takes one answer of those that the last [`look`](Self::look) saw.
    ///
    /// # Errors
    /// When the backend breaks the protocol: the queue is of no more use.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<BlkfrontCompletion>, DeviceError> {
        if let Some(broken) = self.error {
            return Err(broken.into());
        }
        let Some(response) = self.ring.take() else { return Ok(None) };
        match self.shadow.complete(response) {
            Ok(done) => Ok(Some(done)),
            Err(broken) => Err(self.disable(broken)),
        }
    }

    #[cold]
    fn disable(&mut self, why: ResponseError) -> DeviceError {
        self.error = Some(why);
        why.into()
    }

    /// Lets events come, asks for one when `count` answers are there (or all, if fewer are in flight), and checks again. Whether they
    /// are there.
    pub(super) fn arm(&mut self, count: u16) -> Result<bool, DeviceError> {
        if let Some(broken) = self.error {
            return Err(broken.into());
        }
        if std::mem::take(&mut self.masked) {
            self.channel.unmask();
        }
        let count = u32::from(count.clamp(1, self.in_flight().max(1)));
        match self.ring.arm(count) {
            Ok(ready) => Ok(ready >= count),
            Err(broken) => Err(self.disable(broken.into())),
        }
    }

    /// Takes the event that has come.
    pub(super) fn take_event(&mut self) {
        self.channel.take();
        self.masked = true;
    }
}

impl std::fmt::Debug for BlkfrontQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("ring", &self.ring).field("broken", &self.error).finish_non_exhaustive()
    }
}
