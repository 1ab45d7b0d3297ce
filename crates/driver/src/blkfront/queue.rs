//! A queue of a device: one ring.

use std::sync::Arc;

use mqblk_core::{ByteLen, EventChannel, Sector512};
use mqblk_memory::{GuestAddress, GuestMemory};
use mqblk_ring::blkif::request::{DISCARD_SECURE, MAX_SEGMENTS};
use mqblk_ring::blkif::{BlkifRequest, FrontRing, IndirectRequest, RawRequest, RequestBody, Segment, operation};

use super::segments::{RequestSegments, SegmentComposer};
use super::shadow::{BlkfrontCompletion, ShadowRing};
use crate::error::ResponseError;
use crate::setup::DataArea;
use crate::{DataSegment, DeviceError, SubmitError};

/// Keeps pages granted as long as it lives.
pub(super) type GrantGuard = Arc<dyn Send + Sync>;

/// The parts of a queue.
pub(super) struct QueueParts {
    pub(super) ring: FrontRing,
    pub(super) channel: Box<dyn EventChannel>,
    /// The `handle` field of each request. Backends ignore it.
    pub(super) handle: u16,
    /// Largest number of requests in flight.
    pub(super) depth: u16,
    pub(super) composer: SegmentComposer,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) data: DataArea,
    pub(super) guards: Vec<GrantGuard>,
}

/// A ring, owned by one thread, with ids, data pages and indirect pages for its requests. A request allocates nothing
/// and makes no system call. [`publish`](Self::publish) makes one if the backend sleeps.
pub struct BlkfrontQueue {
    pub(super) ring: FrontRing,
    channel: Box<dyn EventChannel>,
    shadow: ShadowRing,
    composer: SegmentComposer,
    handle: u16,
    memory: Arc<GuestMemory>,
    data: DataArea,
    notifications: u64,
    /// True if the event channel is masked: no event comes until it is unmasked.
    masked: bool,
    /// The protocol violation that has disabled the queue.
    error: Option<ResponseError>,
    /// Guards of the ring's, the data and the indirect pages.
    _guards: Vec<GrantGuard>,
}

impl BlkfrontQueue {
    pub(super) fn new(parts: QueueParts) -> BlkfrontQueue {
        let QueueParts { ring, channel, handle, depth, composer, memory, data, guards } = parts;
        let max_ids = composer.indirect_pages().map_or(u16::MAX, |pages| pages.ids());
        // A ring has at most 512 entries.
        let ids = depth.clamp(1, ring.size() as u16).min(max_ids);
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
            _guards: guards,
        }
    }

    /// Returns the data memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns this queue's data area, page aligned.
    pub fn data(&self) -> (GuestAddress, ByteLen) {
        (self.data.start, self.data.len)
    }

    /// Returns the number of entries of the ring.
    #[cfg(test)]
    pub(super) fn size(&self) -> u16 {
        self.ring.size() as u16
    }

    /// Returns the largest number of segments of a request. A segment is a part of one page.
    pub fn max_segments(&self) -> u16 {
        self.composer.max_segments()
    }

    /// Returns the number of requests submitted and not yet reaped.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight() as u16
    }

    /// Returns the number of events sent so far.
    pub fn kicks(&self) -> u64 {
        self.notifications
    }

    /// Reads from `start` into `data`.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or the data is invalid.
    #[inline]
    pub fn read(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit_single(user_data, operation::READ, start, data)
    }

    /// Writes `data` at `start`.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or the data is invalid.
    #[inline]
    pub fn write(&mut self, user_data: u32, start: Sector512, data: DataSegment) -> Result<(), SubmitError> {
        self.submit_single(user_data, operation::WRITE, start, data)
    }

    /// Reads from `start` into several segments.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or the data is invalid.
    pub fn read_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::READ, start, data)
    }

    /// Writes several segments at `start`.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or the data is invalid.
    pub fn write_segments(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::WRITE, start, data)
    }

    /// Writes several segments at `start` durably, after all earlier requests and before all later ones
    /// (BLKIF_OP_WRITE_BARRIER). At most 11 segments.
    ///
    /// # Errors
    /// [`SubmitError`]: the ring is full, or the data is invalid.
    pub fn barrier(
        &mut self,
        user_data: u32,
        start: Sector512,
        data: impl IntoIterator<Item = DataSegment>,
    ) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::WRITE_BARRIER, start, data)
    }

    /// Makes all reaped writes durable.
    ///
    /// # Errors
    /// [`SubmitError::Full`] until a completion is reaped.
    pub fn flush(&mut self, user_data: u32) -> Result<(), SubmitError> {
        self.submit_rw(user_data, operation::FLUSH_DISKCACHE, Sector512(0), [])
    }

    /// Discards `sectors` sectors from `start`. `secure`: the old content must become unreadable.
    ///
    /// # Errors
    /// [`SubmitError::Full`] until a completion is reaped.
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

    /// Submits a request with one data segment, which usually lies in one page.
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

    /// Submits a request whose segments are in the indirect pages of its id.
    fn submit_indirect(
        &mut self,
        id: u16,
        user_data: u32,
        inner: u8,
        sector: Sector512,
        count: u16,
    ) -> Result<(), SubmitError> {
        let pages = self.composer.indirect_pages().filter(|_| matches!(inner, operation::READ | operation::WRITE));
        let Some(pages) = pages else { return Err(SubmitError::TooManySegments(MAX_SEGMENTS as u16)) };
        let indirect = IndirectRequest { operation: inner, nr_segments: count, sector, pages: pages.grants(id) };
        self.put(id, user_data, operation::INDIRECT, inner, RequestBody::Indirect(indirect))
    }

    /// Returns the id of the next request.
    #[inline]
    fn next_id(&self) -> Result<u16, SubmitError> {
        match self.shadow.next_id() {
            Some(id) if self.error.is_none() => Ok(id),
            _ if self.error.is_some() => Err(SubmitError::Disabled),
            _ => Err(SubmitError::Full),
        }
    }

    /// Adds a request to the ring. `expected`: the operation that the response must have.
    #[inline]
    fn put(
        &mut self,
        id: u16,
        user_data: u32,
        operation: u8,
        expected: u8,
        what: RequestBody,
    ) -> Result<(), SubmitError> {
        let request = BlkifRequest { id: id.into(), operation, handle: self.handle, body: what };
        if !self.ring.put(&RawRequest::encode(self.ring.abi(), &request)) {
            return Err(SubmitError::Full);
        }
        self.shadow.claim(user_data, expected);
        Ok(())
    }

    /// Publishes all submitted requests, and sends an event if the backend has asked for one.
    #[inline]
    pub fn publish(&mut self) {
        if self.ring.publish() {
            self.notifications += 1;
            self.channel.notify();
        }
    }

    /// Returns the number of requests submitted and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.ring.unpublished() as u16
    }

    /// Checks for responses. Returns how many [`reap`](Self::reap) can take.
    ///
    /// # Errors
    /// If the backend violates the protocol. The queue cannot be used any more.
    #[inline]
    pub fn poll(&mut self) -> Result<u16, DeviceError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        match self.ring.poll_responses() {
            Ok(ready) => Ok(ready as u16),
            Err(error) => Err(self.disable(error.into())),
        }
    }

    /// Reaps one of the completions that the last [`poll`](Self::poll) has found.
    ///
    /// # Errors
    /// If the backend violates the protocol. The queue cannot be used any more.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<BlkfrontCompletion>, DeviceError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        let Some(response) = self.ring.take() else { return Ok(None) };
        match self.shadow.complete(response) {
            Ok(done) => Ok(Some(done)),
            Err(error) => Err(self.disable(error)),
        }
    }

    #[cold]
    fn disable(&mut self, why: ResponseError) -> DeviceError {
        self.error = Some(why);
        why.into()
    }

    /// Unmasks the event channel and arms the ring: an event comes when `count` responses are available, or all if
    /// fewer are in flight. Then checks the ring again. Returns true if they are already available.
    pub(super) fn arm(&mut self, count: u16) -> Result<bool, DeviceError> {
        if let Some(error) = self.error {
            return Err(error.into());
        }
        if std::mem::take(&mut self.masked) {
            self.channel.unmask();
        }
        let count = u32::from(count.clamp(1, self.in_flight().max(1)));
        match self.ring.arm(count) {
            Ok(ready) => Ok(ready >= count),
            Err(error) => Err(self.disable(error.into())),
        }
    }

    /// Takes the pending event.
    pub(super) fn take_event(&mut self) {
        self.channel.take();
        self.masked = true;
    }
}

impl std::fmt::Debug for BlkfrontQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlkfrontQueue").field("ring", &self.ring).field("error", &self.error).finish_non_exhaustive()
    }
}
