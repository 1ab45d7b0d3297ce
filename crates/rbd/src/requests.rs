//! Requests that the library executes.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_uring::RemoteIo;

use crate::image::Image;
use crate::library::{Completion, ImageHandle, Rbd, ZEROES_ALLOCATED};

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill its memory from `at` bytes into the image on.
    Read {
        /// Offset in bytes.
        at: u64,
    },
    /// Store its memory from `at` bytes into the image on.
    Write {
        /// Offset in bytes.
        at: u64,
        /// True if a flush follows.
        durable: bool,
    },
    /// Make completed writes durable.
    Flush,
    /// Forget a range.
    Discard {
        /// Offset in bytes.
        at: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Zero a range.
    WriteZeroes {
        /// Offset in bytes.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// True if space is allocated for it (`RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`).
        allocated: bool,
        /// True if a flush follows.
        durable: bool,
    },
}

impl Operation {
    /// Returns true if a flush follows. `cached`: the library completes writes that are still in this process.
    fn is_flushed(self, cached: bool) -> bool {
        match self {
            Operation::Read { .. } | Operation::Flush => false,
            Operation::Write { durable, .. } | Operation::WriteZeroes { durable, .. } => durable || cached,
            Operation::Discard { .. } => cached,
        }
    }
}

/// A channel's table of requests that the library has. Requests are identified by their index; they allocate nothing
/// here.
#[derive(Debug)]
pub struct Requests {
    image: Image,
    table: Arc<[Slot]>,
}

/// The argument of the library's callback.
#[derive(Debug, Default)]
struct Slot(Mutex<Option<InFlight>>);

/// A request that the library has. It keeps its callback's data open and in place, however the channel ends.
#[derive(Debug)]
struct InFlight {
    io: RemoteIo,
    /// True if a flush follows a successful operation.
    flushes: bool,
    image: Image,
    table: Arc<[Slot]>,
}

impl Requests {
    /// Makes a table of `capacity` requests.
    pub fn new(image: &Image, capacity: usize) -> Requests {
        Requests { image: image.clone(), table: (0..capacity).map(|_| Slot::default()).collect() }
    }

    /// Hands a request to the library. It is completed with the bytes transferred, 0, or a negative errno, by a thread
    /// of the library, or by this one if the library refuses it. Does not wait for the cluster.
    ///
    /// # Panics
    /// When `index` is not below the capacity, or the request of this index is not completed.
    pub fn submit(&self, index: usize, operation: Operation, io: RemoteIo) {
        let slot = &self.table[index];
        // The list does not move with the `RemoteIo`: it has its own memory.
        let iovecs = io.iovecs();
        let (iovecs, count) = (iovecs.as_ptr(), iovecs.len());
        let (image, flushes) = (self.image.clone(), operation.is_flushed(self.image.write_cache().is_some()));
        let in_flight = InFlight { io, flushes, image, table: Arc::clone(&self.table) };
        {
            let mut slot = slot.lock();
            // Checked first: dropping an earlier request would complete it while the library has its memory.
            assert!(slot.is_none(), "request {index} is with the library");
            *slot = Some(in_flight);
        }
        let (rbd, image) = self.image.raw();
        start(rbd, slot, |completion| {
            // SAFETY: the image is open. The iovecs and their memory stay until the `RemoteIo` in the slot is
            // completed, which the callback of this completion does.
            unsafe { call(rbd, image, operation, (iovecs, count), completion) }
        });
    }
}

impl Slot {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<InFlight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complete(&self, result: isize) {
        let in_flight = self.lock().take();
        if let Some(InFlight { io, image, table, .. }) = in_flight {
            io.complete(i32::try_from(result).unwrap_or(if result < 0 { -libc::EIO } else { i32::MAX }));
            // Closing the image, if this was its last user, is left to the thread that receives its events.
            drop(image);
            // The slot may end with this.
            drop(table);
        }
    }
}

/// Makes a completion whose callback receives the slot, and starts an operation with it.
fn start(rbd: &Rbd, slot: &Slot, operation: impl FnOnce(Completion) -> c_int) {
    let mut completion = std::ptr::null_mut();
    let argument = std::ptr::from_ref(slot).cast_mut().cast::<c_void>();
    // SAFETY: the slot lives until its request has been taken out of it, which the callback does last.
    let made = unsafe { (rbd.rbd_aio_create_completion)(argument, completed, &raw mut completion) };
    if made < 0 {
        slot.complete(made as isize);
        return;
    }
    let started = operation(completion);
    if started < 0 {
        // SAFETY: an operation that is refused does not call back.
        unsafe { (rbd.rbd_aio_release)(completion) };
        slot.complete(started as isize);
    }
}

/// Calls the library.
///
/// # Safety
/// The image is open; the iovecs stay in place and their memory mapped until the completion's callback is called.
unsafe fn call(
    rbd: &Rbd,
    image: ImageHandle,
    operation: Operation,
    (iovecs, count): (*const libc::iovec, usize),
    completion: Completion,
) -> c_int {
    let count = c_int::try_from(count).unwrap_or(c_int::MAX);
    // SAFETY: as the caller promises.
    unsafe {
        match operation {
            Operation::Read { at } => (rbd.rbd_aio_readv)(image, iovecs, count, at, completion),
            Operation::Write { at, .. } => (rbd.rbd_aio_writev)(image, iovecs, count, at, completion),
            Operation::Flush => (rbd.rbd_aio_flush)(image, completion),
            Operation::Discard { at, len } => (rbd.rbd_aio_discard)(image, at, len, completion),
            Operation::WriteZeroes { at, len, allocated, .. } => {
                let flags = if allocated { ZEROES_ALLOCATED } else { 0 };
                (rbd.rbd_aio_write_zeroes)(image, at, len as usize, completion, flags, 0)
            }
        }
    }
}

/// Completes a request, or starts the flush that follows it. Called by a thread of the library, for one request after
/// the other.
unsafe extern "C" fn completed(completion: Completion, argument: *mut c_void) {
    // SAFETY: the argument is a slot with a request, which keeps its table.
    let slot = unsafe { &*argument.cast::<Slot>() };
    let Some((image, flushes)) = slot.lock().as_mut().map(|request| {
        let flushes = std::mem::take(&mut request.flushes);
        (request.image.clone(), flushes)
    }) else {
        return;
    };
    let (rbd, handle) = image.raw();
    // SAFETY: the completion is complete, and released once.
    let result = unsafe {
        let result = (rbd.rbd_aio_get_return_value)(completion);
        (rbd.rbd_aio_release)(completion);
        result
    };
    if flushes && result >= 0 {
        // SAFETY: the image is open, kept by the request.
        start(rbd, slot, |completion| unsafe { (rbd.rbd_aio_flush)(handle, completion) });
    } else {
        slot.complete(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_changes_an_image_with_a_write_cache_is_flushed() {
        let (at, len) = (0, 512);
        for durable in [false, true] {
            let changes = [
                (Operation::Write { at, durable }, durable),
                (Operation::WriteZeroes { at, len, allocated: false, durable }, durable),
                (Operation::Discard { at, len }, false),
            ];
            for (change, flushed) in changes {
                assert_eq!((change.is_flushed(false), change.is_flushed(true)), (flushed, true), "{change:?}");
            }
        }
        for other in [Operation::Read { at }, Operation::Flush] {
            assert!(!other.is_flushed(true), "{other:?}");
        }
    }
}
