//! Requests executed by other threads or libraries, and their completions on the worker.
//!
//! A [`RemoteIo`] may be sent to any thread. While it exists its request has a slot in the worker's in-flight table,
//! like an operation of the ring, and the slot owns the buffer: the memory stays mapped until [`RemoteIo::complete`]. A
//! context that is dropped before waits, and if the completion does not come it keeps the buffers for ever.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use mqblk_core::ByteLen;
use mqblk_core::lock::lock;

use crate::completion::{ClientId, CompletionQueue, IoCompletion};
use crate::event::EventFd;
use crate::inflight::InFlight;
use crate::port::PendingEvents;

/// Pieces of a request's memory.
#[derive(Debug, Default)]
struct Pieces(Vec<Piece>);

/// `libc::iovec` with the traits that it lacks.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Piece(libc::iovec);

// SAFETY: the addresses are used only through a `RemoteIo`, whose slot keeps the memory mapped for all threads.
unsafe impl Send for Piece {}
// SAFETY: as above; the list itself is immutable while it is shared.
unsafe impl Sync for Piece {}

/// An event of another thread for the worker.
#[derive(Debug)]
enum RemoteEvent {
    /// The request in this slot is complete; its list of pieces comes back for reuse.
    Completed { slot: u32, result: i32, pieces: Pieces },
    /// A waker was used.
    Woken { client: ClientId, generation: u32, cookie: u64 },
}

/// The side of other threads.
#[derive(Debug)]
struct Port {
    pending: Mutex<PendingEvents<RemoteEvent>>,
    eventfd: EventFd,
}

impl Port {
    fn send(&self, add: impl FnOnce(&mut PendingEvents<RemoteEvent>) -> bool) {
        let signal = add(&mut lock(&self.pending));
        if signal {
            self.eventfd.signal();
        }
    }
}

/// The worker's side.
#[derive(Debug)]
pub(crate) struct PortReceiver {
    port: Arc<Port>,
    /// True if the ring polls the eventfd.
    polled: bool,
    /// True if the poll has ended and must be renewed.
    pub(crate) lapsed: bool,
    /// The batch that is being delivered; kept for its capacity.
    batch: Vec<RemoteEvent>,
    /// Lists that are not in use.
    spare: Vec<Pieces>,
}

impl PortReceiver {
    pub(crate) fn new() -> io::Result<PortReceiver> {
        let port = Arc::new(Port { pending: Mutex::default(), eventfd: EventFd::new()? });
        Ok(PortReceiver { port, polled: false, lapsed: false, batch: Vec::new(), spare: Vec::new() })
    }

    /// Returns the handle of the request in this slot, which has `len` bytes in these pieces.
    pub(crate) fn lend(&mut self, slot: u32, iovecs: &[libc::iovec], len: u64, logged: bool) -> RemoteIo {
        let mut pieces = self.spare.pop().unwrap_or_default();
        pieces.0.extend(iovecs.iter().copied().map(Piece));
        RemoteIo { port: Arc::clone(&self.port), slot, pieces, len, result: -libc::EIO, logged }
    }

    /// Returns a waker of this client.
    pub(crate) fn waker(&self, client: ClientId, generation: u32, cookie: u64) -> RemoteWaker {
        RemoteWaker { port: Arc::clone(&self.port), client, generation, cookie }
    }

    /// Returns the descriptor that the ring must poll; `None` if it does already.
    pub(crate) fn begin_poll(&mut self) -> Option<RawFd> {
        if self.polled {
            return None;
        }
        (self.polled, self.lapsed) = (true, false);
        Some(self.port.eventfd.as_fd().as_raw_fd())
    }

    /// Sorts what other threads have sent into the completion queues. `more`: the poll goes on. Returns the number of
    /// completions.
    pub(crate) fn receive(&mut self, more: bool, in_flight: &mut InFlight, queues: &mut [CompletionQueue]) -> usize {
        (self.polled, self.lapsed) = (more, !more);
        lock(&self.port.pending).take(&mut self.batch);
        let mut count = 0;
        for event in self.batch.drain(..) {
            let (client, message) = match event {
                RemoteEvent::Completed { slot: index, result, mut pieces } => {
                    pieces.0.clear();
                    self.spare.push(pieces);
                    let slot = in_flight.slot(index);
                    let (client, cookie, buffer) = (slot.owner, slot.cookie, slot.buffer.take());
                    in_flight.release(index);
                    (client, IoCompletion { cookie, result, buffer, header: None, more: false })
                }
                RemoteEvent::Woken { client, generation, cookie } => {
                    if !queues[client.0 as usize].is_of(generation) {
                        continue;
                    }
                    (client, IoCompletion { cookie, result: 0, buffer: None, header: None, more: true })
                }
            };
            queues[client.0 as usize].completions.push_back(message);
            count += 1;
        }
        count
    }
}

/// A request that another thread or a library executes. It is completed once: by [`complete`](Self::complete), or as
/// failed with EIO when it is dropped.
#[derive(Debug)]
#[must_use = "a request that is dropped fails"]
pub struct RemoteIo {
    port: Arc<Port>,
    slot: u32,
    pieces: Pieces,
    len: u64,
    /// Its result if it is dropped.
    result: i32,
    /// True if writes to the buffer are marked in the guest's dirty log when it is released.
    logged: bool,
}

impl RemoteIo {
    /// Returns the length of the buffer; 0 without one.
    pub fn len(&self) -> ByteLen {
        ByteLen(self.len)
    }

    /// Returns true if there is no buffer, or an empty one.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies from `at` bytes into the buffer to private memory. Returns false if the buffer is shorter (nothing is
    /// copied then), or if its memory was lost.
    #[must_use]
    pub fn copy_out(&self, at: u64, bytes: &mut [u8]) -> bool {
        let mut done = 0;
        self.for_each_run(at, bytes.len(), |place, run| {
            // SAFETY: the slot's buffer keeps `run` bytes at `place` mapped; `bytes` is private and has space for all
            // runs.
            unsafe { place.copy_to_nonoverlapping(bytes[done..done + run].as_mut_ptr(), run) };
            done += run;
        })
    }

    /// Copies private memory to `at` bytes into the buffer. Returns false if the buffer is shorter (nothing is copied
    /// then), or if its memory was lost.
    #[must_use]
    pub fn copy_in(&self, at: u64, bytes: &[u8]) -> bool {
        debug_assert!(self.logged, "a buffer that is read into is set writable");
        let mut done = 0;
        self.for_each_run(at, bytes.len(), |place, run| {
            // SAFETY: as in `copy_out`, the other way.
            unsafe { place.copy_from_nonoverlapping(bytes[done..done + run].as_ptr(), run) };
            done += run;
        })
    }

    /// Returns the buffer's memory, for a system call or a library that takes iovecs. It stays mapped, and the list in
    /// place, until the request is completed; the guest may change it at any time. Only a request that reads from the
    /// disk may write to it.
    pub fn iovecs(&self) -> &[libc::iovec] {
        let pieces = self.pieces.0.as_slice();
        // SAFETY: `Piece` is a transparent `iovec`.
        unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
    }

    /// Ends the request: `result` (bytes transferred, or a negative errno) and the buffer go to the worker. Nothing may
    /// use the [`iovecs`](Self::iovecs) afterwards.
    pub fn complete(mut self, result: i32) {
        self.result = result;
    }

    /// Calls `each` with the address and length of each piece of a range. Returns false if the buffer is shorter.
    fn for_each_run(&self, at: u64, len: usize, mut each: impl FnMut(*mut u8, usize)) -> bool {
        if at.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return false;
        }
        let (mut skip, mut left) = (at as usize, len);
        for Piece(piece) in &self.pieces.0 {
            if skip >= piece.iov_len {
                skip -= piece.iov_len;
                continue;
            }
            let run = (piece.iov_len - skip).min(left);
            if run == 0 {
                break;
            }
            each(piece.iov_base.cast::<u8>().wrapping_add(skip), run);
            (skip, left) = (0, left - run);
        }
        let is_lost = |piece: &Piece| mqblk_memory::is_address_lost(piece.0.iov_base as u64);
        !self.pieces.0.iter().any(is_lost)
    }
}

impl Drop for RemoteIo {
    fn drop(&mut self) {
        let pieces = std::mem::take(&mut self.pieces);
        let event = RemoteEvent::Completed { slot: self.slot, result: self.result, pieces };
        self.port.send(|pending| pending.push(event));
    }
}

/// Wakes a worker from any thread.
#[derive(Clone, Debug)]
pub struct RemoteWaker {
    port: Arc<Port>,
    client: ClientId,
    generation: u32,
    cookie: u64,
}

impl RemoteWaker {
    /// Makes the worker reap the channel that owns the client. Does nothing if the client is gone.
    pub fn wake(&self) {
        let RemoteWaker { client, generation, cookie, .. } = *self;
        let own = (client, generation, cookie);
        let same = |event: &RemoteEvent| match *event {
            RemoteEvent::Woken { client, generation, cookie } => (client, generation, cookie) == own,
            RemoteEvent::Completed { .. } => false,
        };
        self.port.send(|pending| pending.push_once(RemoteEvent::Woken { client, generation, cookie }, same));
    }
}

#[cfg(test)]
mod tests;
