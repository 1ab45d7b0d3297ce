//! A worker's channel to a file: a table of running requests over the worker's ring.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{ByteLen, DiskChannel, Finished, Geometry, Op, Outcome, Request, Tag};
use mqblk_memory::{BouncePool, Buffer};
use mqblk_uring::{Completion, Lane, Owner, Refused, RingFile};
use rustix::fs::FallocateFlags;

use super::OpenFile;
use super::inline::Inline;
use super::running::{Lacking, Next, Running, Stage};
use crate::admission;

/// Most requests in a channel: all that a lane can have in flight.
const MOST_RUNNING: usize = 4096;
/// Slots for guest memory that is not aligned enough; longer requests are done in slices.
const BOUNCE_SLOTS: u32 = 32;
const BOUNCE_LEN: ByteLen = ByteLen(128 << 10);
/// Slots of zeroes, for hosts that cannot zero without data. They are never written, so they cost no memory.
const ZERO_SLOTS: u32 = 8;
const ZERO_LEN: ByteLen = ByteLen(1 << 20);
/// Direct transfers are handed to the kernel as soon as this many were issued: storage starts on them while the rest of the
/// batch is prepared. At depth 32 on a virtio disk 4 gave 65 800 IOPS where a whole batch at once gave 55 000 and single ones
/// 64 500 (medians of 7 interleaved runs; 3.7, 4.1 and 4.7 us of CPU per I/O).
const HANDOVER: usize = 4;
/// How soon to look again for room in a lane that others have filled.
const STALL: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct FileChannel {
    file: Arc<OpenFile>,
    /// With the size as of the last batch.
    geometry: Geometry,
    ring: RingFile,
    owner: Owner,
    inline: Inline,
    pub(super) lacking: Lacking,
    running: Vec<Option<Running>>,
    free: Vec<u32>,
    /// Requests that wait for a bounce slot or for room in the lane, first come first served.
    stalled: VecDeque<u32>,
    /// When to look for room again although none of ours is in flight.
    retry_at: Option<Instant>,
    bounce: Option<BouncePool>,
    zeroes: Option<BouncePool>,
}

/// The operation could not be issued now; the request is as it was.
struct Stalled;

impl FileChannel {
    pub(super) fn new(file: Arc<OpenFile>, lane: &mut Lane) -> io::Result<FileChannel> {
        let bounce = file.direct.map(|_| BouncePool::new(&mut lane.buffers, BOUNCE_SLOTS, BOUNCE_LEN)).transpose()?;
        let writable = !file.geometry.read_only;
        let zeroes = writable.then(|| BouncePool::new(&mut lane.buffers, ZERO_SLOTS, ZERO_LEN)).transpose()?;
        Ok(FileChannel {
            ring: lane.register_file(Arc::clone(&file.fd)),
            owner: lane.add_owner(),
            inline: Inline::new(&file),
            lacking: Lacking::default(),
            // Reserved, not touched: memory is taken from the host as far as requests are in flight at once.
            running: Vec::with_capacity(MOST_RUNNING),
            free: Vec::with_capacity(MOST_RUNNING),
            stalled: VecDeque::with_capacity(MOST_RUNNING),
            retry_at: None,
            bounce,
            zeroes,
            geometry: file.geometry,
            file,
        })
    }

    /// The stage that a request starts with, or its end.
    #[inline]
    fn first_stage(&self, lane: &Lane, request: &Request<Buffer>) -> Result<Stage, Outcome> {
        match (request.op, &request.buffer) {
            (Op::Flush, _) if self.inline.is_memory() => Err(Outcome::Done(ByteLen::ZERO)),
            (Op::Flush, _) => Ok(Stage::Sync),
            (Op::Read | Op::Write { .. }, Some(buffer)) => {
                if lane.buffers.len(buffer) != request.len {
                    return Err(admission::INVALID);
                }
                let Some(direct) = self.file.direct else { return Ok(Stage::Transfer) };
                let (memory, length) = (u64::from(direct.memory) - 1, direct.offset - 1);
                let pieces = lane.buffers.segments(buffer);
                let fits = pieces.iter().all(|piece| piece.address() & memory == 0 && piece.len() & length == 0);
                Ok(if fits { Stage::Transfer } else { Stage::Bounce })
            }
            (Op::Read | Op::Write { .. }, None) => Err(admission::INVALID),
            (Op::Discard { .. }, _) if self.file.discard.is_none() || self.lacking.punch => Err(Outcome::Unsupported),
            (Op::Discard { .. }, _) => Ok(Stage::Punch),
            (Op::WriteZeroes { may_unmap, .. }, _) => Ok(match self.lacking {
                Lacking { punch: false, .. } if may_unmap && self.file.discard.is_some() => Stage::Punch,
                Lacking { zero_range: false, .. } => Stage::ZeroRange,
                _ => Stage::ZeroWrite,
            }),
        }
    }

    /// Takes a request: ends it, or puts it in the table and issues its first operation.
    #[inline]
    fn start(&mut self, lane: &mut Lane, request: Request<Buffer>) -> Option<Finished<Buffer>> {
        let end = |request: Request<Buffer>, outcome| Finished { outcome, tag: request.tag, buffer: request.buffer };
        if let Some(outcome) = admission::judge(&self.geometry, &request) {
            return Some(end(request, outcome));
        }
        let stage = match self.first_stage(lane, &request) {
            Ok(stage) => stage,
            Err(outcome) => return Some(end(request, outcome)),
        };
        let mut done = 0;
        if stage == Stage::Transfer {
            done = self.inline.transfer(lane, &self.file, &request);
            if done == request.len.0 {
                let outcome = Outcome::Done(request.len);
                return Some(end(request, outcome));
            }
        }
        let running = Running::new(request, stage, done);
        let index = match self.free.pop() {
            Some(index) => {
                self.running[index as usize] = Some(running);
                index
            }
            None => {
                self.running.push(Some(running));
                self.running.len() as u32 - 1
            }
        };
        self.issue_or_stall(lane, index);
        None
    }

    #[inline]
    fn issue_or_stall(&mut self, lane: &mut Lane, index: u32) {
        // Whoever waits already goes first.
        if !self.stalled.is_empty() || self.issue(lane, index).is_err() {
            self.stalled.push_back(index);
            self.retry_at = Some(Instant::now() + STALL);
        }
    }

    /// Issues the operation of the stage that a request is in.
    #[inline]
    fn issue(&mut self, lane: &mut Lane, index: u32) -> Result<(), Stalled> {
        let Some(running) = self.running[index as usize].as_mut() else { return Ok(()) };
        let (cookie, at, left) = (u64::from(index), running.at(), running.left());
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        let refused = match running.stage {
            Stage::Transfer => {
                let Some(buffer) = running.held.take() else { return Ok(()) };
                let refused = match running.op {
                    Op::Write { fua } => lane.write(self.owner, cookie, &self.ring, at, buffer, running.done, fua),
                    _ => lane.read(self.owner, cookie, &self.ring, at, buffer, running.done),
                };
                return refused.map_err(|Refused(buffer)| {
                    running.held = buffer;
                    Stalled
                });
            }
            Stage::Bounce | Stage::ZeroWrite => return self.issue_slice(lane, index),
            Stage::Sync => lane.datasync(self.owner, cookie, &self.ring),
            Stage::Punch => lane.fallocate(self.owner, cookie, &self.ring, punch, at, left),
            Stage::ZeroRange => lane.fallocate(self.owner, cookie, &self.ring, zero, at, left),
        };
        refused.map_err(|_| Stalled)
    }

    /// Issues the next slice of a request that goes through a slot of ours.
    fn issue_slice(&mut self, lane: &mut Lane, index: u32) -> Result<(), Stalled> {
        let Some(running) = self.running[index as usize].as_mut() else { return Ok(()) };
        let (cookie, at) = (u64::from(index), running.at());
        let pool = if running.stage == Stage::Bounce { &mut self.bounce } else { &mut self.zeroes };
        let Some(pool) = pool else { return Err(Stalled) };
        let len = running.left().min(pool.slot_len());
        let Some((slice, slot)) = pool.take(&mut lane.buffers, len) else { return Err(Stalled) };
        let fua = running.op == Op::Write { fua: true };
        if let (Op::Write { .. }, Some(buffer)) = (running.op, &running.held) {
            let copied = lane.buffers.copy_range(buffer, running.done, &slice, 0, len);
            debug_assert!(copied, "the buffer is as long as the request");
        }
        let issued = match running.op {
            Op::Read => lane.read(self.owner, cookie, &self.ring, at, slice, 0),
            _ => lane.write(self.owner, cookie, &self.ring, at, slice, 0, fua),
        };
        match issued {
            Ok(()) => {
                running.slot = Some(slot);
                Ok(())
            }
            Err(Refused(slice)) => {
                if let Some(slice) = slice {
                    pool.release(&mut lane.buffers, slice, slot);
                }
                Err(Stalled)
            }
        }
    }

    /// Takes a completion: the request's next operation is issued, or the request ends.
    #[inline]
    fn complete(&mut self, lane: &mut Lane, completion: Completion) -> Option<Finished<Buffer>> {
        let Completion { cookie, result, buffer, .. } = completion;
        let index = cookie as u32;
        let place = self.running.get_mut(index as usize)?;
        let running = place.as_mut()?;
        match (running.slot.take(), buffer) {
            (Some(slot), Some(slice)) => {
                if let (Op::Read, Some(buffer), Ok(len)) = (running.op, &running.held, u64::try_from(result)) {
                    let copied = lane.buffers.copy_range(&slice, 0, buffer, running.done, ByteLen(len));
                    debug_assert!(copied, "a slice ends where the request ends, or before");
                }
                let pool = if running.stage == Stage::Bounce { &mut self.bounce } else { &mut self.zeroes };
                if let Some(pool) = pool {
                    pool.release(&mut lane.buffers, slice, slot);
                }
            }
            (None, Some(buffer)) => running.held = Some(buffer),
            (_, None) => {}
        }
        let unit = self.file.direct.map_or(1, |direct| direct.offset);
        match running.advance(result, unit, &mut self.lacking) {
            Next::Issue => {
                self.issue_or_stall(lane, index);
                None
            }
            Next::End(outcome) => {
                self.free.push(index);
                Some(place.take()?.end(outcome))
            }
        }
    }

    /// Issues what waits, as far as there is room.
    fn issue_stalled(&mut self, lane: &mut Lane) {
        while let Some(index) = self.stalled.front().copied() {
            if self.issue(lane, index).is_err() {
                self.retry_at = Some(Instant::now() + STALL);
                return;
            }
            self.stalled.pop_front();
        }
        self.retry_at = None;
    }

    fn room(&self) -> usize {
        MOST_RUNNING - (self.running.len() - self.free.len())
    }
}

impl DiskChannel<Lane> for FileChannel {
    fn submit(
        &mut self,
        lane: &mut Lane,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Finished<Buffer>>,
    ) -> usize {
        if !self.stalled.is_empty() {
            self.issue_stalled(lane);
        }
        self.geometry.size = self.file.size.get();
        // What waits already is to go first, so nothing new is taken into a lane that is full.
        let taken = batch.len().min(self.room()).min(lane.room().saturating_sub(self.stalled.len()));
        let early = self.file.direct.is_some();
        for (at, request) in batch.drain(..taken).enumerate() {
            finished.extend(self.start(lane, request));
            if early && (at + 1) % HANDOVER == 0 {
                lane.submit();
            }
        }
        taken
    }

    fn reap(&mut self, lane: &mut Lane, finished: &mut Vec<Finished<Buffer>>) -> usize {
        let before = finished.len();
        while let Some(completion) = lane.next(self.owner) {
            finished.extend(self.complete(lane, completion));
        }
        if !self.stalled.is_empty() {
            self.issue_stalled(lane);
        }
        finished.len() - before
    }

    fn cancel(&mut self, lane: &mut Lane, tags: &[Tag], finished: &mut Vec<Finished<Buffer>>) {
        let chosen = |running: &Running| tags.binary_search(&running.tag).is_ok();
        // What waits for room is in nobody's hands.
        let (running, free) = (&mut self.running, &mut self.free);
        self.stalled.retain(|index| {
            let place = &mut running[*index as usize];
            let Some(ended) = place.take_if(|running| chosen(running)) else { return true };
            free.push(*index);
            finished.push(ended.end(Outcome::Aborted));
            false
        });
        if self.stalled.is_empty() {
            self.retry_at = None;
        }
        for running in self.running.iter_mut().flatten().filter(|running| chosen(running)) {
            running.cancelled = true;
        }
        let running = &self.running;
        lane.cancel_picked(self.owner, |cookie| {
            let running = running.get(cookie as usize).and_then(Option::as_ref);
            running.is_some_and(|running| running.cancelled && running.can_be_given_up())
        });
    }

    fn outstanding(&self) -> u32 {
        (self.running.len() - self.free.len()) as u32
    }

    fn deadline(&self) -> Option<Instant> {
        // While one of ours is in flight its completion wakes the worker.
        if self.stalled.len() == self.outstanding() as usize { self.retry_at } else { None }
    }

    fn close(&mut self, lane: &mut Lane) {
        debug_assert_eq!(self.outstanding(), 0, "a channel is drained before it is closed");
        let file = std::mem::replace(&mut self.ring, RingFile::Plain(Arc::clone(&self.file.fd)));
        lane.unregister_file(file);
        lane.remove_owner(self.owner);
        for pool in [self.bounce.take(), self.zeroes.take()].into_iter().flatten() {
            pool.close(&mut lane.buffers);
        }
    }
}
