//! A request queue. Source: virtio 1.3 section 5.6.6.1, "Device Operation: Request Queues".

use std::sync::Arc;

use mqblk_core::{Completed, DiskSlot, Intake, Outcome, Pulled, Wake};
use mqblk_memory::{Buffer, BufferPool};
use mqblk_ring::split::Broken;
use mqblk_scsi::{Command, DataOut, Ending, Sense, Status, Step, Work, target};
use mqblk_virtio::batch::Batch;
use mqblk_virtio::chain::ChainStart;
use virtio_bindings::virtio_scsi as b;

use crate::config::{ANSWER_BYTES, COMMAND_BYTES, Sizes};
use crate::device::VirtioScsi;
use crate::element::{Answer, Element};
use crate::orders::{Action, Order, Post};
use crate::queue::{Ring, ScsiToken};
use crate::sequences::Sequences;
use crate::units::{Address, Unit, Units};

/// Number of task management functions that a queue processes at a time: the bits of a token's abort marks. Further
/// ones wait.
const ORDERS: usize = u16::BITS as usize;

/// A task management function that this queue processes.
struct Active {
    order: Arc<Order>,
    /// Commands that it matches and that have not completed.
    left: usize,
}

/// A request queue.
pub struct RequestQueue {
    pub(crate) ring: Ring,
    pub(crate) device: Arc<VirtioScsi>,
    pub(crate) waker: Arc<dyn Wake>,
    batch: Batch,
    /// Copy of the LUN map.
    units: Arc<Units>,
    sizes: Sizes,
    /// Private copy of the request that is being validated.
    header: Box<[u8]>,
    pub(crate) work: Work,
    pub(crate) sequences: Sequences,
    post: Arc<Post>,
    orders: [Option<Active>; ORDERS],
    /// Number of those in use.
    active: usize,
}

/// Limits a count of bytes to 32 bits, the size of response fields.
fn clamp(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Encodes the fixed part of a response; `last` are status and response. Source: virtio 1.3 section 5.6.6.1, `struct
/// virtio_scsi_req_cmd`: sense_len, residual, status_qualifier (always 0), status, response.
#[inline]
fn answer_head(sense: u32, residual: u32, last: [u8; 2]) -> [u8; ANSWER_BYTES] {
    let ([s0, s1, s2, s3], [r0, r1, r2, r3], [status, response]) = (sense.to_le_bytes(), residual.to_le_bytes(), last);
    [s0, s1, s2, s3, r0, r1, r2, r3, 0, 0, status, response]
}

/// Data-out buffer of a command.
pub struct OutData<'a> {
    pub pool: &'a BufferPool,
    pub buffer: &'a Buffer,
    pub len: u64,
}

impl DataOut for OutData<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn copy(&self, at: u64, into: &mut [u8]) -> bool {
        at.checked_add(into.len() as u64).is_some_and(|end| end <= self.len)
            && self.pool.copy_out(self.buffer, at, into)
    }
}

impl RequestQueue {
    pub(crate) fn new(device: Arc<VirtioScsi>, ring: Ring, waker: Arc<dyn Wake>) -> RequestQueue {
        let sizes = device.sizes();
        RequestQueue {
            ring,
            waker: Arc::clone(&waker),
            batch: Batch::default(),
            units: device.units(),
            header: vec![0; COMMAND_BYTES + sizes.cdb as usize].into(),
            sizes,
            work: Work::default(),
            sequences: Sequences::default(),
            post: device.posts.open(waker),
            orders: [const { None }; ORDERS],
            active: 0,
            device,
        }
    }

    /// Closes the queue; nothing is in flight.
    pub(crate) fn close(&mut self, pool: &mut BufferPool) {
        self.published();
        self.device.posts.close(&self.post);
        self.sequences.close(pool);
    }

    pub(crate) fn held(&self) -> usize {
        self.sequences.held()
    }

    #[inline]
    pub(crate) fn pull<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) -> Pulled {
        match self.try_pull(pool, into) {
            Ok(true) => Pulled::MoreWaiting,
            Ok(false) => Pulled::Dry,
            Err(broken) => Pulled::Broken(broken.0),
        }
    }

    /// Pulls one batch. Returns true if more requests are waiting.
    #[inline]
    fn try_pull<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) -> Result<bool, Broken> {
        if !self.device.is_current(&self.units) {
            self.units = self.device.units();
        }
        let (count, more) = self.batch.fetch(&mut self.ring.device, pool, self.ring.lease, into.room())?;
        for at in 0..count {
            let start = self.batch.starts[at];
            self.take_one(pool, &start, into)?;
        }
        Ok(more)
    }

    /// Parses one chain, and begins or completes its command.
    #[inline]
    fn take_one<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        start: &ChainStart,
        into: &mut I,
    ) -> Result<(), Broken> {
        let lease = self.ring.lease;
        let mut element = Element::new(pool.take(lease));
        let most = ANSWER_BYTES as u32 + self.sizes.sense;
        if let Err(broken) = element.read(&self.ring.device, pool, lease, start, &mut self.header, most) {
            element.release(pool);
            return Err(broken);
        }
        if element.answer.room < ANSWER_BYTES as u32 {
            // No space for a response: the chain is returned with nothing written.
            element.release(pool);
            self.ring.device.put_used(start.head, 0);
            into.answered(false);
            return Ok(());
        }
        if element.fault || element.header_len < self.header.len() || (element.data_in > 0 && element.data_out > 0) {
            self.refuse(pool, start.head, element, b::VIRTIO_SCSI_S_FAILURE);
            into.answered(false);
            return Ok(());
        }
        self.begin(pool, start.head, element, into);
        Ok(())
    }

    #[inline]
    fn begin<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        head: u16,
        element: Element,
        into: &mut I,
    ) {
        let (fixed, cdb) =
            self.header.split_first_chunk::<COMMAND_BYTES>().expect("a header has space for its fixed part");
        let [lun @ .., i0, i1, i2, i3, i4, i5, i6, i7, _task_attribute, _priority, _crn] = *fixed;
        let (number, lun) = match Address::of_field(lun) {
            Address::Place(place) => (place.target, Some(place.lun)),
            Address::NoLun(target) => (target, None),
            Address::Nowhere => return self.lost(pool, head, element, into),
        };
        let Some(target) = self.units.target(number) else { return self.lost(pool, head, element, into) };
        let unit = lun.and_then(|lun| target.unit(lun));
        let id = u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]);
        let Element { data, data_out, data_in, answer: response, .. } = element;
        let command = Command { cdb, data_in };
        let out = OutData { pool, buffer: &data, len: data_out };
        let nexus = unit.map(|unit| &*unit.nexus);
        let step = target::begin(nexus, &target.luns, &command, &out, &mut self.work);
        let slot = unit.map_or(DiskSlot(u16::MAX), |unit| unit.slot);
        let mut token = ScsiToken {
            id,
            answer: response,
            expected: clamp(data_in + data_out),
            transferred: 0,
            several: None,
            head,
            unit: slot,
            marks: 0,
            target: number,
            data_in: data_in > 0,
            op: mqblk_core::Op::Flush,
        };
        match step {
            Step::Disk { op, start, len, transferred } => {
                (token.op, token.transferred) = (op, clamp(transferred));
                if op.has_data() {
                    if pool.len(&data) != len {
                        pool.truncate(&data, len);
                    }
                    into.admit(token, slot, op, start, len, Some(data));
                } else {
                    pool.release(data);
                    into.admit(token, slot, op, start, len, None);
                }
            }
            Step::End(ending) => {
                let replied = token.data_in && !self.work.reply.is_empty();
                let _ = replied && pool.copy_in(&data, 0, &self.work.reply);
                pool.release(data);
                self.answer(pool, token, b::VIRTIO_SCSI_S_OK, &ending);
                // A command that the logical unit fails is still well formed.
                into.answered(true);
            }
            Step::Ranges { op, transferred } => {
                (token.op, token.transferred) = (op, clamp(transferred));
                pool.release(data);
                into.admit_parts(token, slot, op, &self.work.ranges);
            }
            Step::Overrun => {
                pool.release(data);
                self.answer(pool, token, b::VIRTIO_SCSI_S_OVERRUN, &Ending::good(data_in + data_out));
                into.answered(false);
            }
            Step::Sequence(command) => self.begin_sequence(pool, token, command, (data, data_out), into),
        }
    }

    /// Fails a command for a target that does not exist.
    #[cold]
    fn lost<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, head: u16, element: Element, into: &mut I) {
        self.refuse(pool, head, element, b::VIRTIO_SCSI_S_BAD_TARGET);
        // A driver probes every target when it scans.
        into.answered(true);
    }

    /// Completes a command that reaches no logical unit.
    #[cold]
    fn refuse(&mut self, pool: &mut BufferPool, head: u16, element: Element, response: u32) {
        pool.release(element.data);
        let residual = clamp(element.data_in.saturating_add(element.data_out));
        element.answer.write(pool, self.ring.lease, &answer_head(0, residual, [0, response as u8]));
        self.ring.device.put_used(head, ANSWER_BYTES as u32);
    }

    /// Completes a disk request of a command.
    #[inline]
    pub(crate) fn finish<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        pool: &mut BufferPool,
        done: Completed<ScsiToken, Buffer>,
        into: &mut I,
    ) {
        let Completed { token, outcome, buffer } = done;
        if token.several.is_some() {
            return self.step_ended(pool, token, outcome, buffer, into);
        }
        if let Some(buffer) = buffer {
            pool.release(buffer);
        }
        match outcome {
            Outcome::Done(_) => {
                let transferred = token.transferred;
                self.answer_plain(pool, token, transferred, [Status::Good as u8, b::VIRTIO_SCSI_S_OK as u8]);
            }
            Outcome::Aborted => self.abort(pool, token),
            failure => {
                let ending = Ending::of(token.op, failure, token.transferred.into());
                self.answer(pool, token, b::VIRTIO_SCSI_S_OK, &ending);
            }
        }
    }

    /// Completes an aborted command with the response code of the first task management function that matched it.
    #[cold]
    pub(crate) fn abort(&mut self, pool: &mut BufferPool, token: ScsiToken) {
        let by = self.orders.iter().enumerate().find_map(|(at, active)| match active {
            Some(Active { order: tmf, .. }) if token.marks & 1 << at != 0 => match tmf.action {
                Action::End(response) => Some(response.into()),
                Action::Query => None,
            },
            _ => None,
        });
        // Otherwise its disk was detached.
        self.answer(pool, token, by.unwrap_or(b::VIRTIO_SCSI_S_BAD_TARGET), &Ending::good(0));
    }

    /// Writes a command's response; it is visible after the next publish.
    pub(crate) fn answer(&mut self, pool: &mut BufferPool, token: ScsiToken, response: u32, ending: &Ending) {
        let transferred = clamp(ending.transferred);
        match &ending.sense {
            None => self.answer_plain(pool, token, transferred, [ending.status as u8, response as u8]),
            Some(sense) => {
                let ScsiToken { answer: response_buffer, expected, head, unit, marks, .. } = token;
                let written = response_buffer.room;
                let residual = expected.saturating_sub(transferred);
                self.answer_sense(pool, response_buffer, unit, residual, response, (ending, sense));
                self.answered(head, written.saturating_add(if token.data_in { transferred } else { 0 }), marks);
            }
        }
    }

    /// Writes a response without sense data; `last` are status and response.
    #[inline]
    fn answer_plain(&mut self, pool: &mut BufferPool, token: ScsiToken, transferred: u32, last: [u8; 2]) {
        let ScsiToken { answer: response, expected, head, marks, data_in, .. } = token;
        // Bytes before the data count as written too: the used length counts the chain's bytes in order.
        let written = response.room.saturating_add(if data_in { transferred } else { 0 });
        response.write(pool, self.ring.lease, &answer_head(0, expected.saturating_sub(transferred), last));
        self.answered(head, written, marks);
    }

    #[inline]
    fn answered(&mut self, head: u16, written: u32, marks: u16) {
        self.ring.device.put_used(head, written);
        if marks != 0 {
            self.settle(marks);
        }
    }

    #[cold]
    fn answer_sense(
        &self,
        pool: &mut BufferPool,
        buffer: Answer,
        unit: DiskSlot,
        residual: u32,
        response: u32,
        (ending, sense): (&Ending, &Sense),
    ) {
        let unit = self.units.iter().find(|other| other.slot == unit);
        let descriptor = unit.is_some_and(|Unit { nexus, .. }| nexus.unit().descriptor_sense());
        let mut bytes = [0; ANSWER_BYTES + Sense::MAX_LEN];
        let len = sense.encode(descriptor, &mut bytes[ANSWER_BYTES..]);
        let len = len.min(buffer.room as usize - ANSWER_BYTES);
        let last = [ending.status as u8, response as u8];
        bytes[..ANSWER_BYTES].copy_from_slice(&answer_head(len as u32, residual, last));
        buffer.write(pool, self.ring.lease, &bytes[..ANSWER_BYTES + len]);
    }

    /// Accounts for the completion of a command that task management functions matched.
    #[cold]
    fn settle(&mut self, marks: u16) {
        for (at, active) in self.orders.iter_mut().enumerate() {
            if let Some(active) = active
                && marks & 1 << at != 0
            {
                active.left -= 1;
            }
        }
    }

    /// All responses so far are visible: reports task management functions with no commands left.
    #[inline]
    pub(crate) fn published(&mut self) {
        self.sequences.published();
        if self.active > 0 {
            self.report();
        }
    }

    #[cold]
    fn report(&mut self) {
        let full = self.active == ORDERS;
        for slot in &mut self.orders {
            if let Some(finished) = slot.take_if(|active| active.left == 0) {
                self.active -= 1;
                finished.order.report();
            }
        }
        if full && self.active < ORDERS {
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
        let tmfs = self.post.take(ORDERS - self.active);
        if !tmfs.is_empty() {
            if running {
                self.take_all(pool, into).map_err(|broken| broken.0)?;
            }
            for tmf in tmfs {
                self.take_up(pool, tmf, into);
            }
        }
        self.resume_held(pool, into);
        Ok(())
    }

    /// Pulls all requests from the ring: a command that was there before a task management function is subject to it.
    fn take_all<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) -> Result<(), Broken> {
        // A driver cannot have more outstanding than the ring's size, so this ends even if the driver adds more.
        let mut left = usize::from(self.ring.device.size());
        while left > 0 && self.try_pull(pool, into)? && into.room() > 0 {
            left = left.saturating_sub(mqblk_virtio::batch::BATCH);
        }
        Ok(())
    }

    /// Marks the commands that a task management function matches, and aborts them if requested.
    fn take_up<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, tmf: Arc<Order>, into: &mut I) {
        let free =
            self.orders.iter().position(Option::is_none).expect("no more functions are taken than there are slots");
        let matches = |token: &ScsiToken| tmf.means(token.target, token.unit, token.id);
        let mut remaining = 0;
        if tmf.action == Action::Query {
            into.cancel(&mut |token| {
                remaining += usize::from(matches(token));
                false
            });
            remaining += self.sequences.held_tokens().filter(|token| matches(token)).count();
            if remaining > 0 {
                tmf.note_match();
            }
            remaining = 0;
        } else {
            into.cancel(&mut |token| {
                let matched = matches(token);
                if matched {
                    remaining += 1;
                    token.marks |= 1 << free;
                }
                matched
            });
        }
        self.orders[free] = Some(Active { order: Arc::clone(&tmf), left: remaining });
        self.active += 1;
        if tmf.action != Action::Query {
            self.abort_held(pool, free, |token| tmf.means(token.target, token.unit, token.id));
        }
    }

    /// Aborts blocked commands.
    fn abort_held(&mut self, pool: &mut BufferPool, at: usize, matches: impl Fn(&ScsiToken) -> bool) {
        for mut token in self.sequences.take_held(pool, matches) {
            token.marks |= 1 << at;
            if let Some(active) = &mut self.orders[at] {
                active.left += 1;
            }
            self.abort(pool, token);
        }
    }
}
