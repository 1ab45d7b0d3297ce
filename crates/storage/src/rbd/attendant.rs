//! The thread of an image: it opens it, follows its size, and closes it.
//!
//! The library's threads are started from it and have its role
//! ([`ThreadRole::Network`](mqblk_core::thread_role::ThreadRole)): they may have network connections, unlike all other
//! threads of a daemon in the sandbox. Closing blocks; the last user of an image may be a worker or a callback of the
//! library.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use mqblk_core::thread_role::spawn_network;
use mqblk_core::{ByteLen, DiskError};
use mqblk_rbd::{Encryption, Image, ImageEvent, ImageOptions, ImageStat, RbdError};
use rustix::net::{AddressFamily, SocketType};

use super::open::{is_not_permitted, permitted_user, place};
use super::state::RbdState;
use crate::lock_mode::LockMode;

/// Longest wait for a user of the image that is about to end.
const BUSY_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Error of opening an image.
pub(super) enum OpenError {
    /// The host refuses a thread.
    Thread(io::Error),
    Library(RbdError),
    /// Another client has the lock.
    Locked(DiskError),
}

/// An open image.
pub(super) struct OpenedImage {
    pub(super) image: Image,
    pub(super) stat: ImageStat,
    pub(super) state: Arc<RbdState>,
    /// Disconnected when the image is closed.
    pub(super) closed: Receiver<()>,
}

/// Checks that the threads of images may have connections. A sandbox that refuses them also refuses loading the
/// library; otherwise the library would try to connect until its timeout.
pub(super) fn check_network() -> io::Result<()> {
    let (sender, result) = channel();
    spawn_network("rbd", move || {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None);
        let _ = sender.send(socket.map(drop));
    })?;
    Ok(result.recv().map_err(io::Error::other)??)
}

/// Opens an image on its own thread, which serves it until it is closed. Blocks.
pub(super) fn open(
    options: &ImageOptions,
    encryption: Option<Encryption>,
    lock: LockMode,
) -> Result<OpenedImage, OpenError> {
    let (sender, result) = channel();
    let options = options.clone();
    spawn_network("rbd", move || attend(&options, encryption, lock, &sender)).map_err(OpenError::Thread)?;
    let ended = |_| OpenError::Thread(io::Error::other("the thread of the image has ended"));
    result.recv().map_err(ended)?
}

fn attend(
    options: &ImageOptions,
    encryption: Option<Encryption>,
    lock: LockMode,
    result: &Sender<Result<OpenedImage, OpenError>>,
) {
    let (sender, events) = channel();
    let (closing, closed) = channel::<()>();
    let opened = Image::open(options, encryption.as_ref(), &sender).map_err(OpenError::Library);
    // The passphrase is not kept.
    drop(encryption);
    let weak = match opened.and_then(|image| begin(options, lock, image)) {
        Ok((image, stat)) => {
            let state = Arc::new(RbdState::new(place(options), permitted_user(options), ByteLen(stat.size)));
            let weak = (image.downgrade(), Arc::downgrade(&state));
            // The caller no longer waits: the image is returned as unused.
            let _ = result.send(Ok(OpenedImage { image, stat, state, closed }));
            weak
        }
        Err(error) => {
            let _ = result.send(Err(error));
            return;
        }
    };
    for event in events {
        match event {
            ImageEvent::Updated => {
                if let (Some(image), Some(state)) = (weak.0.upgrade(), weak.1.upgrade()) {
                    follow_size(&image, &state);
                }
            }
            ImageEvent::Unused(image) => {
                image.close();
                break;
            }
        }
    }
    drop(closing);
}

fn begin(options: &ImageOptions, lock: LockMode, image: Image) -> Result<(Image, ImageStat), OpenError> {
    if let Some(cache) = image.write_cache().filter(|_| !options.read_only) {
        tracing::warn!(
            "{}: its pool or itself has {cache} in the cluster (`rbd config image ls`): each write waits for a flush, as the cache would lose \
             completed writes with this process; `rbd config image rm` or `rbd config pool rm` removes it",
            place(options)
        );
    }
    let opened = image.stat().map_err(OpenError::Library).and_then(|stat| {
        if options.read_only || lock == LockMode::Off {
            return Ok(stat);
        }
        if !stat.exclusive_lock {
            tracing::warn!(
                "{}: the image lacks the feature exclusive-lock; nothing keeps a second writer out (rbd feature enable IMAGE \
                 exclusive-lock)",
                place(options)
            );
        } else if lock == LockMode::Exclusive {
            acquire_lock(&image, &place(options), &permitted_user(options)).map_err(OpenError::Locked)?;
        }
        Ok(stat)
    });
    match opened {
        Ok(stat) => Ok((image, stat)),
        Err(error) => {
            // Closed by its end here, as nobody receives its events.
            drop(image);
            Err(error)
        }
    }
}

/// Takes the exclusive lock and keeps it. Waits briefly for a user that is about to end. The library waits for a killed
/// one until the cluster has lost it (30 s, `osd_client_watch_timeout`); then it is blocklisted.
pub(super) fn acquire_lock(image: &Image, place: &str, permitted: &str) -> Result<(), DiskError> {
    let start = Instant::now();
    tracing::debug!("{place}: taking the exclusive lock");
    loop {
        let error = match image.acquire_lock() {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let busy = matches!(error.errno(), nix::libc::EROFS | nix::libc::EBUSY | nix::libc::EAGAIN);
        if busy && start.elapsed() < BUSY_TIMEOUT {
            std::thread::sleep(RETRY_INTERVAL);
            continue;
        }
        if !busy {
            let hint = if is_not_permitted(&error) { format!("; expected {permitted}") } else { String::new() };
            return Err(DiskError::Os { what: format!("{place}: {}{hint}", error.what), source: error.source });
        }
        let owner = image.lock_owner().ok().flatten().unwrap_or_else(|| "another client".to_owned());
        let what = format!(
            "{place}: {owner} has the exclusive lock and keeps it; stop that user of the image (`rbd lock ls` names it), or open it with \
             readonly=on"
        );
        return Err(DiskError::Os { what, source: error.source });
    }
}

/// Records the size of an image whose header has changed.
fn follow_size(image: &Image, state: &RbdState) {
    match image.size() {
        Ok(size) => state.set_found_size(ByteLen(size)),
        Err(error) => {
            state.check_errno(error.errno());
            tracing::warn!("{}: {error}", state.place);
        }
    }
}
