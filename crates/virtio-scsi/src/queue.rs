//! The three kinds of virtqueues of a controller, as one type for the transport.

use std::marker::PhantomData;
use std::sync::Arc;

use mqblk_core::{ArmResult, Call, FinishedRequest, GuestQueue, Intake, PublishResult, PullEnd};
use mqblk_memory::{Buffer, DirtyLog, GuestMemory};
use mqblk_ring::virtqueue::{MappedRing, RingLog, RingState};
use mqblk_virtio::{GuestContext, VirtioQueue};

use crate::control::ControlQueue;
use crate::events::EventQueue;
use crate::queue_ring::QueueRing;
use crate::request_queue::RequestQueue;
use crate::token::{ScsiToken, TokenKind};

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
    fn pull<I: Intake<ScsiToken, Buffer>>(&mut self, context: &mut C, into: &mut I) -> PullEnd {
        match &mut self.kind {
            QueueKind::Request(queue) => queue.pull(context.pool(), into),
            QueueKind::Control(queue) => queue.pull(context.pool(), into),
            // An event that waited for a buffer: the queue must be published for it.
            QueueKind::Event(queue) => queue.deliver(context.pool(), || into.completed_locally()),
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

    fn abandon(&mut self, context: &mut C, token: ScsiToken, buffer: Option<Buffer>) {
        if let QueueKind::Request(queue) = &mut self.kind {
            match (token.0, buffer) {
                (TokenKind::Command(command), buffer) => queue.forget(context.pool(), command, buffer),
                (TokenKind::Transfer(_), Some(buffer)) => context.pool().release(buffer),
                (TokenKind::Transfer(_), None) => {}
            }
        }
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

    fn set_log(&mut self, context: &mut C, ring: Option<RingLog>, log: Option<Arc<DirtyLog>>) {
        let own = self.ring_mut();
        own.share.set_log(context, log);
        own.device.set_log(ring);
    }
}
