//! The library's handles of an image, its size, and its events.

use std::ffi::CString;
use std::io;
use std::sync::Mutex;
use std::sync::mpsc::Sender;

use crate::error::{FailedStep, RbdError, check};
use crate::library::{Cluster, ImageHandle, Libraries, Pool};

/// An event of an open image, from any thread.
#[derive(Debug)]
pub enum ImageEvent {
    /// The image's header has changed: its size or its snapshots.
    Updated,
    /// It has no users: a thread that may block must close it.
    Unused(UnusedImage),
}

/// The argument of the watch's callback: a sender.
pub(crate) type WatchArgument = Mutex<Sender<ImageEvent>>;

/// The library's handles, each created once in this order, and ended once in reverse.
pub(crate) struct Handles {
    pub(crate) libraries: &'static Libraries,
    pub(crate) cluster: Cluster,
    pub(crate) pool: Pool,
    pub(crate) image: ImageHandle,
    /// The watch's handle and the callback's argument, which it owns.
    pub(crate) watch: Option<(u64, *mut WatchArgument)>,
}

// SAFETY: librbd and librados may be called from all threads with the same handles (librbd.h, librados.h); `watch` is
// used by drop only.
unsafe impl Send for Handles {}
// SAFETY: as above.
unsafe impl Sync for Handles {}

impl std::fmt::Debug for Handles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handles").finish_non_exhaustive()
    }
}

/// Closes the handles. Blocks until all requests have ended and the cluster has answered.
impl Drop for Handles {
    fn drop(&mut self) {
        let Libraries { rados, rbd } = self.libraries;
        if let Some((watch, argument)) = self.watch.take() {
            // SAFETY: the image is open. Afterwards the callback is not called any more.
            if unsafe { (rbd.rbd_update_unwatch)(self.image, watch) } >= 0 {
                // SAFETY: it was made by `Box::into_raw` and is not used any more.
                drop(unsafe { Box::from_raw(argument) });
            }
        }
        // SAFETY: each handle that is not null is open, and not used after this.
        unsafe {
            if !self.image.is_null() {
                (rbd.rbd_close)(self.image);
            }
            if !self.pool.is_null() {
                (rados.rados_ioctx_destroy)(self.pool);
            }
            (rados.rados_shutdown)(self.cluster);
        }
    }
}

/// An image without users. Dropping it closes it, which blocks.
#[derive(Debug)]
pub struct UnusedImage(#[expect(dead_code, reason = "dropped")] pub(crate) Handles);

impl UnusedImage {
    /// Closes it: completed writes are flushed, and the lock is released. Blocks until the cluster has answered.
    pub fn close(self) {}
}

/// Returns the size of an open image in bytes, of its decrypted data with an encryption.
pub(crate) fn size_of_image(handles: &Handles) -> Result<u64, RbdError> {
    let mut size = 0;
    // SAFETY: the image is open.
    let result = unsafe { (handles.libraries.rbd.rbd_get_size)(handles.image, &raw mut size) };
    check(result, FailedStep::Call, || "size of the image".to_owned())?;
    Ok(size)
}

pub(crate) fn c_string(text: &str) -> Result<CString, RbdError> {
    CString::new(text).map_err(|_| RbdError {
        step: FailedStep::Configuration,
        what: format!("{text:?}"),
        source: io::Error::new(io::ErrorKind::InvalidInput, "a name has no NUL"),
    })
}
