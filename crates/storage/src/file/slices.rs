//! Transfers through the daemon's own memory: bounce slots, slots of zeroes, and units that change in part.

use mqblk_core::{ByteLen, Errno, Op};
use mqblk_memory::Buffer;
use mqblk_uring::{FileTransfer, Refused, UringContext};

use super::channel::{FileChannel, Stalled};
use super::inflight::{CANCELED, InflightRequest, OpStage, SliceState, SliceStep};
use super::small_blocks::{Slice, SmallBlocks};

impl FileChannel {
    /// Returns the file's units if direct I/O needs whole ones.
    fn direct_units(&self) -> Option<&SmallBlocks> {
        self.file.small_blocks.as_ref().filter(|_| self.file.direct.is_some())
    }

    /// Returns the next slice of a request, and its first step.
    fn next_slice(&self, request: &InflightRequest, slot_len: ByteLen) -> (Slice, SliceStep) {
        let (at, left) = (request.at(), request.left());
        let Some(blocks) = self.direct_units() else {
            let len = left.min(slot_len);
            return (Slice { at, len, skip: 0, part: len }, SliceStep::Transfer);
        };
        if request.op == Op::Read {
            return (blocks.read_slice(at, left, slot_len), SliceStep::Transfer);
        }
        let slice = blocks.write_slice(at, left, slot_len);
        (slice, if slice.is_partial() { SliceStep::ReadUnit } else { SliceStep::Transfer })
    }

    /// Issues the next slice of a request that goes through a bounce slot or a slot of zeroes.
    pub(super) fn issue_slice(&mut self, context: &mut UringContext, index: u32) -> Result<(), Stalled> {
        let Some(request) = self.inflight[index as usize].as_ref() else { return Ok(()) };
        if request.slice.unit.is_some() {
            return self.issue_unit(context, index);
        }
        let pool = if request.stage == OpStage::Bounce { &self.bounce } else { &self.zeroes };
        let Some(slot_len) = pool.as_ref().map(|pool| pool.slot_len()) else { return Err(Stalled) };
        let (slice, step) = self.next_slice(request, slot_len);
        let is_write = request.op != Op::Read;
        if is_write && !self.hold_units(index, slice.at, slice.len, step == SliceStep::ReadUnit) {
            return Err(Stalled);
        }
        let issued = self.issue_new_slice(context, index, slice, step);
        if issued.is_err() {
            self.release_units(index);
        }
        issued
    }

    fn issue_new_slice(
        &mut self,
        context: &mut UringContext,
        index: u32,
        slice: Slice,
        step: SliceStep,
    ) -> Result<(), Stalled> {
        let Some(request) = self.inflight[index as usize].as_mut() else { return Ok(()) };
        request.slice = SliceState { step, slice: Some(slice), unit: None };
        let pool = if request.uses_bounce() { &mut self.bounce } else { &mut self.zeroes };
        let Some(pool) = pool else { return Err(Stalled) };
        let Some((memory, slot)) = pool.take(&mut context.buffers, slice.len) else { return Err(Stalled) };
        let fua = request.op == Op::Write { fua: true };
        if let (Op::Write { .. }, Some(buffer), SliceStep::Transfer) = (request.op, &request.buffer, step) {
            request.faulted = !context.buffers.copy_range(buffer, request.done, &memory, 0, slice.len);
        }
        request.in_thread = !self.accessed.contains(slice.at, slice.len) || self.inline.needs_thread(slice.len);
        let in_thread = request.in_thread;
        let transfer = FileTransfer { file: &self.ring, at: slice.at, skip: 0, in_thread };
        // A write whose data was lost is replaced by a read, after which the request fails.
        let reads = request.op == Op::Read || request.faulted || step == SliceStep::ReadUnit;
        let issued = match reads {
            true => context.read(self.client, index.into(), transfer, memory),
            false => context.write(self.client, index.into(), transfer, memory, fua),
        };
        match issued {
            Ok(()) => {
                request.slot = Some(slot);
                Ok(())
            }
            Err(Refused(memory)) => {
                if let Some(memory) = memory {
                    pool.release(&mut context.buffers, memory, slot);
                }
                Err(Stalled)
            }
        }
    }

    /// Issues the write of a changed unit.
    fn issue_unit(&mut self, context: &mut UringContext, index: u32) -> Result<(), Stalled> {
        let Some(request) = self.inflight[index as usize].as_mut() else { return Ok(()) };
        let (Some((memory, slot)), Some(slice)) = (request.slice.unit.take(), request.slice.slice) else {
            return Ok(());
        };
        let fua = request.op == Op::Write { fua: true };
        let transfer = FileTransfer { file: &self.ring, at: slice.at, skip: 0, in_thread: false };
        request.slice.step = SliceStep::WriteUnit;
        match context.write(self.client, index.into(), transfer, memory, fua) {
            Ok(()) => {
                request.slot = Some(slot);
                Ok(())
            }
            Err(Refused(memory)) => {
                request.slice.unit = memory.map(|memory| (memory, slot));
                Err(Stalled)
            }
        }
    }

    /// Processes the completion of a slice. Returns the number of the request's bytes moved, or a negative errno.
    /// `None`: the unit is being written.
    pub(super) fn complete_slice(
        &mut self,
        context: &mut UringContext,
        index: u32,
        (memory, slot, mut result): (Buffer, u32, i32),
    ) -> Option<i32> {
        let is_changed = self.change_unit(context, index, &memory, result);
        let request = self.inflight[index as usize].as_mut()?;
        let slice = request.slice.slice?;
        let step = request.slice.step;
        let is_whole = u64::try_from(result).is_ok_and(|bytes| bytes == slice.len.0);
        if is_changed == Some(true) {
            request.slice.unit = Some((memory, slot));
            if self.issue_unit(context, index).is_err() {
                // First in the queue: earlier ones may wait for its unit.
                self.stall_first(index);
            }
            return None;
        }
        if is_changed == Some(false) {
            request.faulted = true;
        } else if step == SliceStep::ReadUnit && result >= 0 {
            result = if request.cancelled { -CANCELED } else { 0 };
        } else if step == SliceStep::WriteUnit && result >= 0 {
            result = if is_whole { slice.part.0 as i32 } else { 0 };
        } else if let Ok(bytes) = u64::try_from(result) {
            let moved = bytes.saturating_sub(slice.skip).min(slice.part.0);
            if let (Op::Read, Some(buffer)) = (request.op, &request.buffer) {
                let copied = context.buffers.copy_range(&memory, slice.skip, buffer, request.done, ByteLen(moved));
                request.faulted = !copied;
            }
            result = moved as i32;
        }
        let request = self.inflight[index as usize].as_mut()?;
        if request.faulted {
            result = -Errno::FAULT.0;
        }
        let pool = if request.uses_bounce() { &mut self.bounce } else { &mut self.zeroes };
        if let Some(pool) = pool {
            pool.release(&mut context.buffers, memory, slot);
        }
        request.slice = SliceState::default();
        Some(result)
    }

    /// Puts the request's part into its unit, if the unit was read whole and must be written. Returns false if guest
    /// memory was lost.
    fn change_unit(&mut self, context: &mut UringContext, index: u32, memory: &Buffer, result: i32) -> Option<bool> {
        let request = self.inflight[index as usize].as_ref()?;
        let slice = request.slice.slice?;
        let is_whole = u64::try_from(result).is_ok_and(|bytes| bytes == slice.len.0);
        if request.slice.step != SliceStep::ReadUnit || !is_whole || request.cancelled {
            return None;
        }
        let (from, at) = match (&request.buffer, &self.zero_unit) {
            (Some(buffer), _) => (buffer, request.done),
            (None, Some((zeroes, _))) => (zeroes, 0),
            (None, None) => return Some(false),
        };
        Some(context.buffers.copy_range(from, at, memory, slice.skip, slice.part))
    }

    /// Releases the resources of a cancelled request without an operation in the kernel.
    pub(super) fn drop_unit(&mut self, context: &mut UringContext, index: u32) {
        let Some(request) = self.inflight[index as usize].as_mut() else { return };
        if let (Some((memory, slot)), Some(pool)) = (request.slice.unit.take(), &mut self.bounce) {
            pool.release(&mut context.buffers, memory, slot);
        }
        self.release_units(index);
    }
}

impl InflightRequest {
    /// Returns true if its slice is in a bounce slot. Slots of zeroes are never written.
    pub(super) fn uses_bounce(&self) -> bool {
        self.stage == OpStage::Bounce || self.slice.step != SliceStep::Transfer
    }
}
