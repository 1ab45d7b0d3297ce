//! A request queue. Source: virtio 1.3 section 5.6.6.1, "Device Operation: Request Queues".
//!
//! `transfer` admits the usual READ and WRITE commands, `multi_step` has the commands of several steps, and
//! `multi_step_state` their state.

mod multi_step;
mod multi_step_state;
mod transfer;

use std::sync::Arc;

use mqblk_core::{DiskSlot, FinishedRequest, Intake, Outcome, PullEnd, Wake};
use mqblk_memory::{Buffer, BufferPool};
use mqblk_ring::virtqueue::{ChainBatch, ChainHead, DeviceRing, MAX_BATCH, VirtqueueError};
use mqblk_scsi::{Command, CommandAction, CommandBuffers, CommandCompletion, DataOut, Sense, Status, target};
use virtio_bindings::virtio_scsi as b;

use crate::config::{DriverSizes, REQUEST_BYTES, RESPONSE_BYTES};
use crate::device::VirtioScsi;
use crate::lun_map::{LunField, LunMap, MappedUnit};
use crate::queue_ring::QueueRing;
use crate::request_chain::{BOTH_WAYS, RequestChain, ResponseBuffer};
use crate::task_management::{TaskManagement, TmfAction, TmfMailbox};
use crate::token::{CommandState, ScsiToken, TokenKind, saturating_u32};
use multi_step_state::MultiStepCommands;
use transfer::admit_transfers;

/// Number of task management functions that a queue processes at a time: the bits of a token's abort marks. Further
/// ones wait.
const MAX_ACTIVE_TMFS: usize = u16::BITS as usize;

/// A task management function that this queue processes.
struct ActiveTmf {
    tmf: Arc<TaskManagement>,
    /// Commands that it matches and that have not completed.
    remaining: usize,
}

/// A request queue.
pub(crate) struct RequestQueue {
    pub(crate) ring: QueueRing,
    pub(crate) device: Arc<VirtioScsi>,
    pub(crate) waker: Arc<dyn Wake>,
    pub(crate) batch: ChainBatch,
    /// Copy of the LUN map.
    pub(crate) lun_map: Arc<LunMap>,
    pub(crate) sizes: DriverSizes,
    /// Private copy of the request that is being validated.
    header: Box<[u8]>,
    pub(crate) buffers: CommandBuffers,
    pub(crate) multi_step: MultiStepCommands,
    tmf_mailbox: Arc<TmfMailbox>,
    active_tmfs: [Option<ActiveTmf>; MAX_ACTIVE_TMFS],
    /// Number of active functions.
    active_tmf_count: usize,
}

/// Encodes the fixed part of a response; `last` are status and response. Source: virtio 1.3 section 5.6.6.1, `struct
/// virtio_scsi_req_cmd`: sense_len, residual, status_qualifier (always 0), status, response.
#[inline]
fn encode_response_header(sense: u32, residual: u32, last: [u8; 2]) -> [u8; RESPONSE_BYTES] {
    let ([s0, s1, s2, s3], [r0, r1, r2, r3], [status, response]) = (sense.to_le_bytes(), residual.to_le_bytes(), last);
    [s0, s1, s2, s3, r0, r1, r2, r3, 0, 0, status, response]
}

/// Splits a request's header into its `lun` field, its id and its CDB. Source: virtio 1.3 section 5.6.6.1, `struct
/// virtio_scsi_req_cmd`.
#[inline]
fn split_header(header: &[u8]) -> ([u8; 8], u64, &[u8]) {
    let (fixed, cdb) = header.split_first_chunk::<REQUEST_BYTES>().expect("a header has space for its fixed part");
    let [lun @ .., i0, i1, i2, i3, i4, i5, i6, i7, _task_attribute, _priority, _crn] = *fixed;
    (lun, u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]), cdb)
}

/// Data-out buffer of a command.
pub(crate) struct DataOutBuffer<'a> {
    pub pool: &'a BufferPool,
    pub buffer: &'a Buffer,
    pub len: u64,
}

impl DataOut for DataOutBuffer<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn copy(&self, at: u64, into: &mut [u8]) -> bool {
        at.checked_add(into.len() as u64).is_some_and(|end| end <= self.len)
            && self.pool.copy_out(self.buffer, at, into)
    }
}

impl RequestQueue {
    pub(crate) fn new(device: Arc<VirtioScsi>, ring: QueueRing, waker: Arc<dyn Wake>) -> RequestQueue {
        let sizes = device.sizes();
        RequestQueue {
            ring,
            waker: Arc::clone(&waker),
            batch: ChainBatch::default(),
            lun_map: device.lun_map(),
            header: vec![0; REQUEST_BYTES + sizes.cdb as usize].into(),
            sizes,
            buffers: CommandBuffers::default(),
            multi_step: MultiStepCommands::default(),
            tmf_mailbox: device.tmf_mailboxes.open(waker),
            active_tmfs: [const { None }; MAX_ACTIVE_TMFS],
            active_tmf_count: 0,
            device,
        }
    }

    /// Closes the queue; nothing is in flight.
    pub(crate) fn close(&mut self) {
        self.published();
        self.device.tmf_mailboxes.close(&self.tmf_mailbox);
    }

    pub(crate) fn blocked(&self) -> usize {
        self.multi_step.blocked_count()
    }

    /// Returns the most bytes of a response, if commands of the usual layout are admitted in one step.
    #[inline]
    pub(crate) fn usual_response(&self) -> Option<u8> {
        let most = u8::try_from(RESPONSE_BYTES as u32 + self.sizes.sense).ok()?;
        (self.sizes.cdb == DriverSizes::DEFAULT.cdb).then_some(most)
    }

    #[inline(always)] // the engine calls it in one place
    pub(crate) fn pull<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) -> PullEnd {
        match self.try_pull(pool, into) {
            Ok((taken, more)) => PullEnd::of(taken, more),
            Err(broken) => PullEnd::Broken(broken.0),
        }
    }

    /// Pulls one batch. Returns the number of taken requests, and true if more are waiting.
    #[inline]
    fn try_pull<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        into: &mut I,
    ) -> Result<(usize, bool), VirtqueueError> {
        if !self.device.is_map_current(&self.lun_map) {
            self.lun_map = self.device.lun_map();
        }
        let (count, more) = self.batch.fetch(&mut self.ring.device, pool, self.ring.share.lease(), into.room())?;
        let most = RESPONSE_BYTES as u32 + self.sizes.sense;
        let mut at = 0;
        while at < count {
            if let Some(most) = self.usual_response() {
                let (heads, map) = (&self.batch.heads[at..count], &*self.lun_map);
                let access = pool.access(self.ring.share.lease());
                at += match &self.ring.device {
                    DeviceRing::Split(ring) => admit_transfers(ring, heads, access, map, most, into),
                    DeviceRing::Packed(ring) => admit_transfers(ring, heads, access, map, most, into),
                };
            }
            if at < count {
                let start = self.batch.heads[at];
                self.process_any_chain(pool, &start, most, into)?;
                at += 1;
            }
        }
        Ok((count, more))
    }

    /// Parses one chain of any layout, and begins or completes its command.
    #[inline(never)]
    fn process_any_chain<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        start: &ChainHead,
        most: u32,
        into: &mut I,
    ) -> Result<(), VirtqueueError> {
        let lease = self.ring.share.lease();
        let mut element = RequestChain::new(pool.take(lease));
        if let Err(broken) = element.read(&self.ring.device, pool, lease, start, &mut self.header, most) {
            element.release(pool);
            return Err(broken);
        }
        if element.response.capacity < RESPONSE_BYTES as u32 {
            // No space for a response: the chain is returned with nothing written.
            element.release(pool);
            self.ring.device.put_used(start.index, 0);
            into.malformed("no space for a response");
            return Ok(());
        }
        let both_ways = (element.data_in > 0 && element.data_out > 0).then_some(BOTH_WAYS);
        let no_header = (element.header_len < self.header.len()).then_some("no whole header");
        if let Some(why) = element.fault.or(no_header).or(both_ways) {
            self.fail_request(pool, start.index, element, b::VIRTIO_SCSI_S_FAILURE);
            into.malformed(why);
            return Ok(());
        }
        self.begin(pool, start.index, element, into);
        Ok(())
    }

    #[inline(never)]
    fn begin<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        head: u16,
        element: RequestChain,
        into: &mut I,
    ) {
        let (lun, id, cdb) = split_header(&self.header);
        let (number, lun) = match LunField::decode(lun) {
            LunField::Lun(place) => (place.target, Some(place.lun)),
            LunField::InvalidLun(target) => (target, None),
            LunField::NoTarget => return self.fail_bad_target(pool, head, element, into),
        };
        let Some(target) = self.lun_map.target(number) else { return self.fail_bad_target(pool, head, element, into) };
        let unit = lun.and_then(|lun| target.unit(lun));
        let RequestChain { data, data_out, data_in, response, .. } = element;
        let command = Command { cdb, data_in_len: data_in };
        let out = DataOutBuffer { pool, buffer: &data, len: data_out };
        let nexus = unit.map(|unit| &*unit.nexus);
        let step = target::begin(nexus, &target.luns, &command, &out, &mut self.buffers);
        let slot = unit.map_or(DiskSlot(u16::MAX), |unit| unit.slot);
        let mut token = CommandState { id, ..CommandState::new(head, (number, slot), response, (data_in, data_out)) };
        match step {
            CommandAction::Disk { op, start, len, transferred } => {
                (token.op, token.transferred) = (op, saturating_u32(transferred));
                if op.has_data() {
                    if pool.len(&data) != len {
                        pool.truncate(&data, len);
                    }
                    into.admit(token.token(), slot, op, start, len, Some(data));
                } else {
                    pool.release(data);
                    into.admit(token.token(), slot, op, start, len, None);
                }
            }
            CommandAction::Complete(ending) => {
                let replied = token.has_data_in && !self.buffers.data_in.is_empty();
                let _ = replied && pool.copy_in(&data, 0, &self.buffers.data_in);
                pool.release(data);
                self.complete(pool, token, b::VIRTIO_SCSI_S_OK, &ending);
                // A command that the logical unit fails is still well formed.
                into.completed_locally();
            }
            CommandAction::Ranges { op, transferred } => {
                (token.op, token.transferred) = (op, saturating_u32(transferred));
                pool.release(data);
                into.admit_parts(token.token(), slot, op, &self.buffers.ranges);
            }
            CommandAction::Overrun => {
                pool.release(data);
                // Nothing is transferred, and there is no residual: only the response is written.
                let token = CommandState { has_data_in: false, ..token };
                self.complete(pool, token, b::VIRTIO_SCSI_S_OVERRUN, &CommandCompletion::good(data_in + data_out));
                into.malformed("less data than the command transfers");
            }
            CommandAction::MultiStep(command) => self.begin_multi_step(pool, token, command, (data, data_out), into),
        }
    }

    /// Fails a command for a target that does not exist.
    fn fail_bad_target<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        head: u16,
        element: RequestChain,
        into: &mut I,
    ) {
        self.fail_request(pool, head, element, b::VIRTIO_SCSI_S_BAD_TARGET);
        // A driver probes every target when it scans.
        into.completed_locally();
    }

    /// Completes a command that reaches no logical unit.
    fn fail_request(&mut self, pool: &mut BufferPool, head: u16, element: RequestChain, response: u32) {
        pool.release(element.data);
        let residual = saturating_u32(element.data_in.saturating_add(element.data_out));
        element.response.write(
            pool,
            self.ring.share.lease(),
            &encode_response_header(0, residual, [0, response as u8]),
        );
        self.ring.device.put_used(head, RESPONSE_BYTES as u32);
    }

    /// Completes a disk request of a command.
    #[inline(always)] // the engine calls it in one place
    pub(crate) fn finish<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        done: FinishedRequest<ScsiToken, Buffer>,
        into: &mut I,
    ) {
        let FinishedRequest { token, outcome, buffer } = done;
        match token.0 {
            TokenKind::Transfer(transfer) => {
                // It was admitted with one.
                let Some(buffer) = buffer else { return };
                if outcome.is_done() && transfer.abort_marks == 0 {
                    // Source: as `encode_response_header`.
                    let last = u32::from_le_bytes([0, 0, Status::Good as u8, b::VIRTIO_SCSI_S_OK as u8]);
                    pool.release_with_status(buffer, [0, 0, last].map(u32::to_le));
                    self.ring.device.put_used(transfer.head, transfer.written);
                } else {
                    let command = CommandState::of_transfer(pool, transfer, buffer);
                    self.finish_command(pool, command, outcome, None, into);
                }
            }
            TokenKind::Command(command) => self.finish_command(pool, command, outcome, buffer, into),
        }
    }

    /// Completes the disk request of any command.
    #[inline(never)]
    fn finish_command<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        token: CommandState,
        outcome: Outcome,
        buffer: Option<Buffer>,
        into: &mut I,
    ) {
        if token.is_multi_step {
            return self.step_ended(pool, token, outcome, buffer, into);
        }
        if let Some(buffer) = buffer {
            pool.release(buffer);
        }
        match outcome {
            Outcome::Done(_) => {
                let transferred = token.transferred;
                self.complete_without_sense(pool, token, transferred, [Status::Good as u8, b::VIRTIO_SCSI_S_OK as u8]);
            }
            Outcome::Aborted => self.abort(pool, token),
            failure => {
                let ending = CommandCompletion::from_outcome(token.op, failure, token.transferred.into());
                self.complete(pool, token, b::VIRTIO_SCSI_S_OK, &ending);
            }
        }
    }

    /// Completes an aborted command with the response code of the first task management function that matched it.
    pub(crate) fn abort(&mut self, pool: &mut BufferPool, token: CommandState) {
        let by = self.active_tmfs.iter().enumerate().find_map(|(at, active)| match active {
            Some(ActiveTmf { tmf, .. }) if token.abort_marks & 1 << at != 0 => match tmf.action {
                TmfAction::Abort(response) => Some(response.into()),
                TmfAction::Query => None,
            },
            _ => None,
        });
        // Otherwise its disk was detached.
        self.complete(pool, token, by.unwrap_or(b::VIRTIO_SCSI_S_BAD_TARGET), &CommandCompletion::good(0));
    }

    /// Writes a command's response; it is visible after the next publish.
    pub(crate) fn complete(
        &mut self,
        pool: &mut BufferPool,
        token: CommandState,
        response: u32,
        ending: &CommandCompletion,
    ) {
        let transferred = saturating_u32(ending.transferred);
        match &ending.sense {
            None => self.complete_without_sense(pool, token, transferred, [ending.status as u8, response as u8]),
            Some(sense) => {
                let CommandState {
                    response: response_buffer, data_len: expected, head, unit, abort_marks: marks, ..
                } = token;
                let written = response_buffer.capacity;
                let residual = expected.saturating_sub(transferred);
                self.write_sense_response(pool, response_buffer, unit, residual, response, (ending, sense));
                self.put_used(head, written.saturating_add(if token.has_data_in { transferred } else { 0 }), marks);
            }
        }
    }

    /// Writes a response without sense data; `last` are status and response.
    #[inline]
    fn complete_without_sense(&mut self, pool: &mut BufferPool, token: CommandState, transferred: u32, last: [u8; 2]) {
        let CommandState { response, data_len: expected, head, abort_marks: marks, has_data_in: data_in, .. } = token;
        let written = response.capacity.saturating_add(if data_in { transferred } else { 0 });
        let [status, code] = last;
        // Source: as `encode_response_header`.
        let words = [0, expected.saturating_sub(transferred), u32::from_le_bytes([0, 0, status, code])].map(u32::to_le);
        response.write_fixed(pool, self.ring.share.lease(), words);
        self.put_used(head, written, marks);
    }

    #[inline]
    fn put_used(&mut self, head: u16, written: u32, marks: u16) {
        self.ring.device.put_used(head, written);
        if marks != 0 {
            self.count_completed(marks);
        }
    }

    fn write_sense_response(
        &self,
        pool: &mut BufferPool,
        buffer: ResponseBuffer,
        unit: DiskSlot,
        residual: u32,
        response: u32,
        (ending, sense): (&CommandCompletion, &Sense),
    ) {
        let unit = self.lun_map.iter().find(|other| other.slot == unit);
        let descriptor = unit.is_some_and(|MappedUnit { nexus, .. }| nexus.unit().descriptor_sense());
        let mut bytes = [0; RESPONSE_BYTES + Sense::MAX_LEN];
        let len = sense.encode(descriptor, &mut bytes[RESPONSE_BYTES..]);
        let len = len.min(buffer.capacity as usize - RESPONSE_BYTES);
        let last = [ending.status as u8, response as u8];
        bytes[..RESPONSE_BYTES].copy_from_slice(&encode_response_header(len as u32, residual, last));
        buffer.write(pool, self.ring.share.lease(), &bytes[..RESPONSE_BYTES + len]);
    }

    /// Accounts for the completion of a command that task management functions matched.
    fn count_completed(&mut self, marks: u16) {
        for (at, active) in self.active_tmfs.iter_mut().enumerate() {
            if let Some(active) = active
                && marks & 1 << at != 0
            {
                active.remaining -= 1;
            }
        }
    }

    /// Called when all responses so far are visible: reports task management functions without commands left.
    #[inline]
    pub(crate) fn published(&mut self) {
        self.multi_step.published();
        if self.active_tmf_count > 0 {
            self.report_finished_tmfs();
        }
    }

    fn report_finished_tmfs(&mut self) {
        let full = self.active_tmf_count == MAX_ACTIVE_TMFS;
        for slot in &mut self.active_tmfs {
            if let Some(finished) = slot.take_if(|active| active.remaining == 0) {
                self.active_tmf_count -= 1;
                finished.tmf.queue_done();
            }
        }
        if full && self.active_tmf_count < MAX_ACTIVE_TMFS {
            // Others may wait for a free slot.
            self.waker.wake();
        }
    }

    /// Handles a wakeup: task management, a range lock that was granted, a state that was saved.
    pub(crate) fn woken<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        into: &mut I,
        running: bool,
    ) -> Result<(), &'static str> {
        let tmfs = self.tmf_mailbox.take(MAX_ACTIVE_TMFS - self.active_tmf_count);
        if !tmfs.is_empty() {
            if running {
                self.pull_all(pool, into).map_err(|broken| broken.0)?;
            }
            for tmf in tmfs {
                self.process_tmf(pool, tmf, into);
            }
        }
        self.retry_blocked(pool, into);
        Ok(())
    }

    /// Pulls all requests from the ring: a command that precedes a task management function is subject to it.
    fn pull_all<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        into: &mut I,
    ) -> Result<(), VirtqueueError> {
        // A driver cannot have more outstanding than the ring's size, so this ends even if the driver adds requests.
        let mut left = usize::from(self.ring.device.size());
        while left > 0 && self.try_pull(pool, into)?.1 && into.room() > 0 {
            left = left.saturating_sub(MAX_BATCH);
        }
        Ok(())
    }

    /// Marks the commands that a task management function matches, and aborts them if requested.
    fn process_tmf<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        tmf: Arc<TaskManagement>,
        into: &mut I,
    ) {
        let free = self
            .active_tmfs
            .iter()
            .position(Option::is_none)
            .expect("no more functions are taken than there are slots");
        let mut remaining = 0;
        if tmf.action == TmfAction::Query {
            into.cancel(&mut |token| {
                remaining += usize::from(token.matches(&tmf));
                false
            });
            remaining += self.multi_step.blocked_tokens().filter(|command| command.matches(&tmf)).count();
            if remaining > 0 {
                tmf.record_match();
            }
            remaining = 0;
        } else {
            into.cancel(&mut |token| {
                let matched = token.matches(&tmf);
                if matched {
                    remaining += 1;
                    token.mark(free);
                }
                matched
            });
        }
        self.active_tmfs[free] = Some(ActiveTmf { tmf: Arc::clone(&tmf), remaining });
        self.active_tmf_count += 1;
        if tmf.action != TmfAction::Query {
            self.abort_blocked(pool, free, |command| command.matches(&tmf));
        }
    }

    /// Aborts blocked commands.
    fn abort_blocked(&mut self, pool: &mut BufferPool, at: usize, matches: impl Fn(&CommandState) -> bool) {
        for mut token in self.multi_step.take_blocked(pool, matches) {
            token.abort_marks |= 1 << at;
            if let Some(active) = &mut self.active_tmfs[at] {
                active.remaining += 1;
            }
            self.abort(pool, token);
        }
    }
}
