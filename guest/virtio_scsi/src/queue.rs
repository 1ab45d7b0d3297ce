//! The three kinds of virtqueues of a controller, as one type for the transport.

use std::marker::PhantomData;
use std::sync::Arc;

use mqblk_core::{
    ArmResult, Call, DiskSlot, FinishedRequest, GuestQueue, Intake, LonePull, Op, PublishResult, PullEnd,
};
use mqblk_memory::{Buffer, BufferPool, DirtyLog, GuestMemory, MemoryShare};
use mqblk_ring::virtqueue::{DeviceRing, MappedRing, RingLog, RingState};
use mqblk_virtio::{GuestContext, VirtioQueue};

use crate::commands::{RequestQueue, saturating_u32};
use crate::control::ControlQueue;
use crate::events::EventQueue;
use crate::request_chain::ResponseBuffer;
use crate::task_management::TaskManagement;

/// A ring with its memory and call.
pub(crate) struct QueueRing {
    pub(crate) device: DeviceRing,
    pub(crate) share: MemoryShare,
    pub(crate) call: Option<Box<dyn Call>>,
}

/// What a request queue needs to complete a command.
#[derive(Debug)]
pub struct ScsiToken(pub(crate) TokenKind);

#[derive(Debug)]
pub(crate) enum TokenKind {
    Transfer(TransferState),
    Command(CommandState),
}

/// State of a READ or WRITE that transfers the whole of its buffer, which has the place of its response too: what most commands are. The rest is
/// [known](CommandState::of_transfer) from the buffer.
#[derive(Debug)]
pub(crate) struct TransferState {
    /// The driver's identifier of the command.
    pub(crate) id: u64,
    /// The chain's used length if it succeeds.
    pub(crate) written: u32,
    pub(crate) head: u16,
    pub(crate) unit: DiskSlot,
    /// Task management functions that match it, one bit each.
    pub(crate) abort_marks: u16,
    pub(crate) target: u8,
}

/// State of any command.
#[derive(Debug)]
pub(crate) struct CommandState {
    /// The driver's identifier of the command.
    pub(crate) id: u64,
    pub(crate) response: ResponseBuffer,
    /// Length of the command's data buffers.
    pub(crate) data_len: u32,
    /// Bytes transferred if it succeeds.
    pub(crate) transferred: u32,
    pub(crate) head: u16,
    pub(crate) unit: DiskSlot,
    /// Task management functions that match it, one bit each.
    pub(crate) abort_marks: u16,
    pub(crate) target: u8,
    /// The command has a data-in buffer.
    pub(crate) has_data_in: bool,
    /// The queue has further state of it: see [`MultiStepCommands`](crate::multi_step::MultiStepCommands).
    pub(crate) is_multi_step: bool,
    /// Operation of the disk request.
    pub(crate) op: Op,
}

impl ScsiToken {
    /// Returns true if a task management function applies to the command.
    pub(crate) fn matches(&self, tmf: &TaskManagement) -> bool {
        match &self.0 {
            TokenKind::Transfer(TransferState { id, unit, target, .. }) => tmf.matches(*target, *unit, *id),
            TokenKind::Command(command) => command.matches(tmf),
        }
    }

    /// Marks the command as matched by the task management function in this place.
    pub(crate) fn mark(&mut self, at: usize) {
        let (TokenKind::Transfer(TransferState { abort_marks, .. })
        | TokenKind::Command(CommandState { abort_marks, .. })) = &mut self.0;
        *abort_marks |= 1 << at;
    }
}

impl CommandState {
    /// Returns the state of a command that has transferred nothing, with the lengths of its data-in and data-out buffers.
    #[inline]
    pub(crate) fn new(
        head: u16,
        (target, unit): (u8, DiskSlot),
        response: ResponseBuffer,
        (data_in, data_out): (u64, u64),
    ) -> CommandState {
        CommandState {
            id: 0,
            response,
            data_len: saturating_u32(data_in + data_out),
            transferred: 0,
            is_multi_step: false,
            head,
            unit,
            abort_marks: 0,
            target,
            has_data_in: data_in > 0,
            op: Op::Flush,
        }
    }

    /// Returns the state of a transfer with this buffer, which is released with its response.
    pub(crate) fn of_transfer(pool: &BufferPool, transfer: TransferState, buffer: Buffer) -> CommandState {
        let TransferState { id, head, unit, abort_marks, target, .. } = transfer;
        let is_read = pool.is_writable(&buffer);
        let len = pool.len(&buffer).0;
        let lengths = if is_read { (len, 0) } else { (0, len) };
        let response = ResponseBuffer::beside_data(pool, buffer);
        CommandState {
            id,
            abort_marks,
            transferred: saturating_u32(len),
            op: if is_read { Op::Read } else { Op::Write { fua: false } },
            ..CommandState::new(head, (target, unit), response, lengths)
        }
    }

    /// Returns true if a task management function applies to the command.
    pub(crate) fn matches(&self, tmf: &TaskManagement) -> bool {
        tmf.matches(self.target, self.unit, self.id)
    }

    /// Returns the token of the command's disk request.
    #[inline]
    pub(crate) fn token(self) -> ScsiToken {
        ScsiToken(TokenKind::Command(self))
    }
}

pub(crate) enum QueueKind {
    Control(Box<ControlQueue>),
    Event(Box<EventQueue>),
    Request(Box<RequestQueue>),
}

/// One virtqueue of a [`VirtioScsi`](crate::VirtioScsi).
pub struct ScsiQueue<C> {
    kind: QueueKind,
    _context: PhantomData<fn(C)>,
}

impl<C> ScsiQueue<C> {
    pub(crate) fn new(kind: QueueKind) -> ScsiQueue<C> {
        ScsiQueue { kind, _context: PhantomData }
    }

    #[inline]
    fn ring(&self) -> &QueueRing {
        match &self.kind {
            QueueKind::Control(queue) => &queue.ring,
            QueueKind::Event(queue) => &queue.ring,
            QueueKind::Request(queue) => &queue.ring,
        }
    }

    #[inline]
    fn ring_mut(&mut self) -> &mut QueueRing {
        match &mut self.kind {
            QueueKind::Control(queue) => &mut queue.ring,
            QueueKind::Event(queue) => &mut queue.ring,
            QueueKind::Request(queue) => &mut queue.ring,
        }
    }
}

impl<C: GuestContext> GuestQueue for ScsiQueue<C> {
    type Token = ScsiToken;
    type Position = RingState;
    type Context = C;

    const SERVES_LONE: bool = true;

    fn depth(&self) -> u16 {
        self.ring().device.size()
    }

    fn enter(&mut self, context: &mut C) -> Result<(), String> {
        self.ring_mut().share.enter(context)
    }

    fn leave(&mut self, context: &mut C) {
        if let QueueKind::Request(queue) = &mut self.kind {
            queue.multi_step.release_memory(context.pool());
        }
        self.ring_mut().share.leave(context);
    }

    fn close(&mut self) {
        match &mut self.kind {
            QueueKind::Request(queue) => queue.close(),
            QueueKind::Control(_) => {}
            QueueKind::Event(queue) => queue.close(),
        }
    }

    #[inline(always)] // the engine calls it in one place
    fn pull_lone<I: Intake<ScsiToken, Buffer>>(&mut self, context: &mut C, into: &mut I) -> LonePull {
        match &mut self.kind {
            QueueKind::Request(queue) => queue.pull_lone(context.pool(), into),
            QueueKind::Control(_) | QueueKind::Event(_) => LonePull::Other,
        }
    }

    #[inline(always)] // as above
    fn pull<I: Intake<ScsiToken, Buffer>>(&mut self, context: &mut C, into: &mut I) -> PullEnd {
        match &mut self.kind {
            QueueKind::Request(queue) => queue.pull(context.pool(), into),
            QueueKind::Control(queue) => queue.pull(context.pool(), into),
            // An event that waited for a buffer: the queue must be published for it.
            QueueKind::Event(queue) => queue.deliver(context.pool(), || into.completed_locally(true)),
        }
    }

    #[inline(always)] // the engine calls it in two places
    fn finish<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        context: &mut C,
        done: FinishedRequest<ScsiToken, Buffer>,
        into: &mut I,
    ) {
        if let QueueKind::Request(queue) = &mut self.kind {
            queue.finish(context.pool(), done, into);
        }
    }

    fn woken<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        context: &mut C,
        into: &mut I,
        running: bool,
    ) -> Result<(), &'static str> {
        match &mut self.kind {
            QueueKind::Request(queue) => queue.woken(context.pool(), into, running),
            QueueKind::Control(queue) => {
                queue.complete_done(context.pool());
                Ok(())
            }
            QueueKind::Event(queue) if running => match queue.deliver(context.pool(), || {}) {
                PullEnd::Broken(why) => Err(why),
                _ => Ok(()),
            },
            QueueKind::Event(_) => Ok(()),
        }
    }

    fn blocked(&self) -> usize {
        match &self.kind {
            QueueKind::Request(queue) => queue.blocked(),
            QueueKind::Control(queue) => queue.blocked(),
            QueueKind::Event(_) => 0,
        }
    }

    #[inline]
    fn publish(&mut self) -> PublishResult {
        let notify = self.ring_mut().device.publish();
        if let QueueKind::Request(queue) = &mut self.kind {
            queue.published();
        }
        notify
    }

    fn notify(&mut self) {
        if let Some(call) = &self.ring().call {
            call.call();
        }
    }

    fn arm(&mut self) -> ArmResult {
        match &mut self.kind {
            QueueKind::Event(queue) => queue.arm(),
            _ => self.ring_mut().device.arm(),
        }
    }

    fn disarm(&mut self) {
        self.ring_mut().device.disarm();
    }

    fn position(&self) -> RingState {
        self.ring().device.state()
    }
}

impl<C: GuestContext> VirtioQueue<C> for ScsiQueue<C> {
    fn set_call(&mut self, call: Option<Box<dyn Call>>) {
        self.ring_mut().call = call;
    }

    fn relocate(&mut self, context: &mut C, ring: MappedRing, memory: Arc<GuestMemory>) -> Result<(), String> {
        let own = self.ring_mut();
        own.share.relocate(context, memory)?;
        own.device.relocate(ring);
        Ok(())
    }

    fn abandon(&mut self, context: &mut C, token: ScsiToken, buffer: Option<Buffer>) {
        if let QueueKind::Request(queue) = &mut self.kind {
            match (token.0, buffer) {
                (TokenKind::Command(command), buffer) => queue.forget(context.pool(), command, buffer),
                (TokenKind::Transfer(_), Some(buffer)) => context.pool().release(buffer),
                (TokenKind::Transfer(_), None) => {}
            }
        }
    }

    fn set_log(&mut self, context: &mut C, ring: Option<RingLog>, log: Option<Arc<DirtyLog>>) {
        let own = self.ring_mut();
        own.share.set_log(context, log);
        own.device.set_log(ring);
    }
}
