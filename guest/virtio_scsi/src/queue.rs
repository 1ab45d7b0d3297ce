//! The three kinds of virtqueues of a controller, as one type for the transport.

use std::marker::PhantomData;

use mqblk_core::{Armed, Call, Completed, DiskSlot, GuestQueue, Intake, Notify, Op, Pulled};
use mqblk_memory::{Buffer, LeaseId};
use mqblk_ring::split::{DeviceRing, RingLog, SplitRing, SplitState};
use mqblk_virtio::{GuestLane, VirtioQueue};

use crate::commands::RequestQueue;
use crate::control::ControlQueue;
use crate::element::Answer;
use crate::events::EventQueue;
use crate::sequences::Several;

/// A ring with its memory lease and call.
pub struct Ring {
    pub(crate) device: DeviceRing,
    pub(crate) lease: LeaseId,
    pub(crate) call: Option<Box<dyn Call>>,
}

/// State of a command in flight.
#[derive(Debug)]
pub struct ScsiToken {
    /// The driver's identifier of the command.
    pub(crate) id: u64,
    pub(crate) answer: Answer,
    /// Length of the command's data buffers.
    pub(crate) expected: u32,
    /// Bytes transferred if it succeeds.
    pub(crate) transferred: u32,
    /// State of a multi-step command.
    pub(crate) several: Option<Box<Several>>,
    pub(crate) head: u16,
    pub(crate) unit: DiskSlot,
    /// Task management functions that match it, one bit each.
    pub(crate) marks: u16,
    pub(crate) target: u8,
    /// The command has a data-in buffer.
    pub(crate) data_in: bool,
    /// Operation of the disk request.
    pub(crate) op: Op,
}

pub(crate) enum Kind {
    Control(Box<ControlQueue>),
    Event(Box<EventQueue>),
    Request(Box<RequestQueue>),
}

/// One virtqueue of a [`VirtioScsi`](crate::VirtioScsi).
pub struct ScsiQueue<C> {
    kind: Kind,
    _context: PhantomData<fn(C)>,
}

impl<C> ScsiQueue<C> {
    pub(crate) fn new(kind: Kind) -> ScsiQueue<C> {
        ScsiQueue { kind, _context: PhantomData }
    }

    #[inline]
    fn ring(&self) -> &Ring {
        match &self.kind {
            Kind::Control(queue) => &queue.ring,
            Kind::Event(queue) => &queue.ring,
            Kind::Request(queue) => &queue.ring,
        }
    }

    #[inline]
    fn ring_mut(&mut self) -> &mut Ring {
        match &mut self.kind {
            Kind::Control(queue) => &mut queue.ring,
            Kind::Event(queue) => &mut queue.ring,
            Kind::Request(queue) => &mut queue.ring,
        }
    }
}

impl<C: GuestLane> GuestQueue for ScsiQueue<C> {
    type Token = ScsiToken;
    type Position = SplitState;
    type Lane = C;

    fn depth(&self) -> u16 {
        self.ring().device.size()
    }

    #[inline]
    fn pull<I: Intake<ScsiToken, Buffer>>(&mut self, context: &mut C, into: &mut I) -> Pulled {
        match &mut self.kind {
            Kind::Request(queue) => queue.pull(context.pool(), into),
            Kind::Control(queue) => queue.pull(context.pool(), into),
            // An event that waited for a buffer: the queue must be published for it.
            Kind::Event(queue) => queue.deliver(context.pool(), || into.answered(true)),
        }
    }

    #[inline]
    fn finish<I: Intake<ScsiToken, Buffer>>(
        &mut self,
        context: &mut C,
        done: Completed<ScsiToken, Buffer>,
        into: &mut I,
    ) {
        if let Kind::Request(queue) = &mut self.kind {
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
            Kind::Request(queue) => queue.woken(context.pool(), into, running),
            Kind::Control(queue) => {
                queue.answer_done(context.pool());
                Ok(())
            }
            Kind::Event(queue) if running => match queue.deliver(context.pool(), || {}) {
                Pulled::Broken(why) => Err(why),
                _ => Ok(()),
            },
            Kind::Event(_) => Ok(()),
        }
    }

    fn held(&self) -> usize {
        match &self.kind {
            Kind::Request(queue) => queue.held(),
            Kind::Control(queue) => queue.held(),
            Kind::Event(_) => 0,
        }
    }

    #[inline]
    fn publish(&mut self) -> Notify {
        let notify = self.ring_mut().device.publish();
        if let Kind::Request(queue) = &mut self.kind {
            queue.published();
        }
        notify
    }

    fn notify(&mut self) {
        if let Some(call) = &self.ring().call {
            call.call();
        }
    }

    fn arm(&mut self) -> Armed {
        match &mut self.kind {
            Kind::Event(queue) => queue.arm(),
            _ => self.ring_mut().device.arm(),
        }
    }

    fn disarm(&mut self) {
        self.ring_mut().device.disarm();
    }

    fn position(&self) -> SplitState {
        self.ring().device.state()
    }
}

impl<C: GuestLane> VirtioQueue<C> for ScsiQueue<C> {
    fn set_call(&mut self, call: Option<Box<dyn Call>>) {
        self.ring_mut().call = call;
    }

    fn lease(&self) -> LeaseId {
        self.ring().lease
    }

    fn relocate(&mut self, ring: SplitRing, lease: LeaseId) -> LeaseId {
        let own = self.ring_mut();
        own.device.relocate(ring);
        std::mem::replace(&mut own.lease, lease)
    }

    fn forget(&mut self, context: &mut C, token: ScsiToken, buffer: Option<Buffer>) {
        if let Kind::Request(queue) = &mut self.kind {
            queue.forget(context.pool(), token, buffer);
        }
    }

    fn set_log(&mut self, log: Option<RingLog>) {
        self.ring_mut().device.set_log(log);
    }

    fn close(&mut self, context: &mut C) {
        match &mut self.kind {
            Kind::Request(queue) => queue.close(context.pool()),
            Kind::Control(_) => {}
            Kind::Event(queue) => queue.close(),
        }
    }
}
