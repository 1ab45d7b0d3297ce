//! A queue of lines: the connection's thread submits one request and waits for its completion.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use mqblk_core::{
    ArmResult, ByteLen, ByteOffset, DiskSlot, FinishedRequest, GuestQueue, Intake, Op, PublishResult, PullEnd,
};
use mqblk_engine::{EventFd, UringContext};
use mqblk_memory::{Buffer, GuestAddress, GuestMemory, MemoryShare};

/// Most requests of a queue.
const DEPTH: u16 = 16;

/// A request: offset, length, and the data of a write.
pub(super) struct LineRequest {
    pub op: Op,
    pub offset: u64,
    pub len: u32,
    pub data: Vec<u8>,
}

/// The completion of a request: the data of a read, or the error.
pub(super) type LineCompletion = Result<Vec<u8>, String>;

#[derive(Default)]
struct Shared {
    waiting: VecDeque<LineRequest>,
    completed: VecDeque<LineCompletion>,
    closed: bool,
}

/// The connection's side of a queue.
#[derive(Clone)]
pub(super) struct LineRing {
    shared: Arc<(Mutex<Shared>, Condvar)>,
    kick: EventFd,
}

impl LineRing {
    pub(super) fn new() -> std::io::Result<LineRing> {
        Ok(LineRing { shared: Arc::default(), kick: EventFd::new()? })
    }

    pub(super) fn kick(&self) -> &EventFd {
        &self.kick
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits a request and waits for its completion. Returns `None` if the queue is closed.
    pub(super) fn call(&self, request: LineRequest) -> Option<LineCompletion> {
        let mut shared = self.lock();
        if shared.closed {
            return None;
        }
        shared.waiting.push_back(request);
        self.kick.signal();
        loop {
            if let Some(completion) = shared.completed.pop_front() {
                return Some(completion);
            }
            if shared.closed {
                return None;
            }
            shared = self.shared.1.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends all waits.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.shared.1.notify_all();
    }
}

/// The engine's side of a queue.
pub(super) struct LineQueue {
    ring: LineRing,
    share: MemoryShare,
    finished: Vec<LineCompletion>,
}

impl LineQueue {
    /// Creates the queue of `ring`, whose data goes through `memory`.
    pub(super) fn new(ring: LineRing, memory: Arc<GuestMemory>) -> LineQueue {
        LineQueue { ring, share: MemoryShare::new(memory, DEPTH.into()), finished: Vec::new() }
    }
}

/// A request in flight: its operation and its length.
pub(super) type LineToken = (Op, u32);

impl GuestQueue for LineQueue {
    type Token = LineToken;
    type Position = ();
    type Context = UringContext;

    fn depth(&self) -> u16 {
        DEPTH
    }

    fn enter(&mut self, context: &mut UringContext) -> Result<(), String> {
        self.share.enter(context)
    }

    fn leave(&mut self, context: &mut UringContext) {
        self.share.leave(context);
    }

    fn pull<I: Intake<LineToken, Buffer>>(&mut self, context: &mut UringContext, into: &mut I) -> PullEnd {
        let mut taken = 0;
        while into.room() > 0 {
            let Some(LineRequest { op, offset, len, data }) = self.ring.lock().waiting.pop_front() else {
                return PullEnd::Empty { taken };
            };
            taken += 1;
            if op == Op::Flush {
                into.admit((op, 0), DiskSlot::FIRST, op, ByteOffset(0), ByteLen::ZERO, None);
                continue;
            }
            let buffer = context.buffers.take(self.share.lease());
            if let Err(fault) = context.buffers.push(&buffer, GuestAddress(0), len, 8) {
                context.buffers.release(buffer);
                self.finished.push(Err(format!("{fault:?}")));
                into.malformed(fault.why());
                continue;
            }
            assert!(context.buffers.copy_in(&buffer, 0, &data), "the buffer is longer");
            into.admit((op, len), DiskSlot::FIRST, op, ByteOffset(offset), ByteLen(len.into()), Some(buffer));
        }
        PullEnd::MoreWaiting { taken }
    }

    fn finish<I: Intake<LineToken, Buffer>>(
        &mut self,
        context: &mut UringContext,
        done: FinishedRequest<LineToken, Buffer>,
        _: &mut I,
    ) {
        let ((op, len), outcome) = (done.token, done.outcome);
        let mut data = vec![0; if op == Op::Read { len as usize } else { 0 }];
        if let Some(buffer) = done.buffer {
            assert!(context.buffers.copy_out(&buffer, 0, &mut data), "the buffer is longer");
            context.buffers.release(buffer);
        }
        let completion = if outcome.is_done() { Ok(data) } else { Err(format!("{outcome:?}")) };
        self.finished.push(completion);
    }

    fn abandon(&mut self, context: &mut UringContext, _: LineToken, buffer: Option<Buffer>) {
        buffer.into_iter().for_each(|buffer| context.buffers.release(buffer));
    }

    fn publish(&mut self) -> PublishResult {
        if self.finished.is_empty() {
            return PublishResult::Nothing;
        }
        self.ring.lock().completed.extend(self.finished.drain(..));
        PublishResult::Wanted
    }

    fn notify(&mut self) {
        self.ring.shared.1.notify_all();
    }

    fn arm(&mut self) -> ArmResult {
        if self.ring.lock().waiting.is_empty() { ArmResult::Sleepable } else { ArmResult::WorkWaiting }
    }

    fn disarm(&mut self) {}

    fn position(&self) {}
}
