//! `storage=rbd`: an image of a Ceph cluster, by librbd.
//!
//! | contract | how it is kept |
//! |---|---|
//! | no method of a channel blocks on storage | the library's calls only queue (`rbd_non_blocking_aio`); its threads complete by the worker's port |
//! | back-pressure | a channel takes at most 1024 requests, and no more than the worker's in-flight table has room for |
//! | cancellation | the library has none: requests end by themselves, during an outage of the cluster not before its end |
//! | flush | `rbd_aio_flush`; a durable write is a write with a flush after it |
//! | a completed write has left the process | no write cache of the library (`rbd_cache`); if pool or image enforce one, a flush after each write |
//! | one writer | the image's exclusive lock, taken at the opening and kept (`attendant.rs`) |
//!
//! All workers use one handle of the image, because the lock belongs to a handle, and each image has its own
//! connection, because the cluster blocklists connections. The image's own thread opens and closes it and follows its
//! size (`attendant.rs`).

mod attendant;
mod channel;
mod encryption;
pub mod location;
mod open;
mod state;

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::lock::lock;
use mqblk_core::settings::{Key, Settings};
use mqblk_core::thread_role::{self, ThreadRole};
use mqblk_core::{
    ByteLen, ConnectionStats, DiscardLimits, Disk, DiskChannel, DiskError, DiskObserver, Geometry, ImageOpener, Limits,
    OpenImage,
};
use mqblk_rbd::{Image, RbdError};
use mqblk_uring::UringContext;

use crate::admission;
use crate::keys::{BLOCK_SIZE, DISCARD, LOCK, READONLY};
use crate::lock_mode::LockMode;
use attendant::{OpenError, OpenedImage};
use channel::RbdChannel;
use encryption::EncryptionSettings;
use open::RbdSettings;
use state::RbdState;

static PATH: Key = Key::text("path", "rbd:POOL/IMAGE", "`rbd:POOL[/NAMESPACE]/IMAGE[@SNAP][:conf=FILE][:id=USER]`")
    .otherwise("the keys that follow")
    .about("an image of a Ceph cluster", "[storage/rbd.md](storage/rbd.md).");

/// The keys of `storage=rbd`.
pub(crate) const KEYS: &[&Key] = &[
    &PATH,
    &open::POOL,
    &open::NAMESPACE,
    &open::IMAGE,
    &open::SNAP,
    &open::CONF,
    &open::USER,
    &READONLY,
    &BLOCK_SIZE,
    &LOCK,
    &DISCARD,
    &encryption::ENCRYPTION,
    &encryption::KEY_FILE,
];

/// Smaller discards are ignored by the library (`rbd_discard_granularity_bytes`).
const DISCARD_GRANULARITY: ByteLen = ByteLen(64 << 10);
/// Largest range of one discard, in objects of 4 MiB: 256, each of which is a request to the cluster.
const MAX_DISCARD: ByteLen = ByteLen(1 << 30);
/// Largest range of zeroes: bounds the writes of one request if they must be allocated.
const MAX_ZEROES: ByteLen = ByteLen(256 << 20);
/// Most memory segments of one request.
const MAX_SEGMENTS: u32 = 1024;
/// Longest wait of the process's end for an image to close: an unreachable cluster would delay it without a limit.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens an image. Blocks until the cluster answers.
///
/// # Errors
/// When a setting does not fit, Ceph's libraries are missing, the cluster does not answer or refuses, or another client
/// has the image's lock.
pub fn open(settings: &mut Settings, opener: &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    if let Some(word) = settings.text(&PATH) {
        let expected = "rbd:POOL[/NAMESPACE]/IMAGE[@SNAP][:conf=FILE][:id=USER]";
        let keys = location::parse(&word).map_err(|why| settings.error(&PATH, why, expected))?;
        keys.iter().try_for_each(|(key, value)| settings.insert(key, value))?;
    }
    let given = RbdSettings::take(settings)?;
    let encryption = given.encryption.as_ref().map(|encryption| encryption.load(settings, &**opener)).transpose()?;
    attendant::check_network().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => open::no_network(settings).into(),
        _ => DiskError::Os { what: open::place(&given.options), source: error },
    })?;
    // Here and not on the image's thread, which may not map code.
    mqblk_rbd::load().map_err(|error| open::not_loaded(settings, &error))?;
    let opened = attendant::open(&given.options, encryption, given.lock).map_err(|error| match error {
        OpenError::Library(error) => open::refused(settings, &given, &error).into(),
        OpenError::Locked(error) => error,
        OpenError::Thread(source) => DiskError::Os { what: open::place(&given.options), source },
    })?;
    let OpenedImage { image, stat, state, closed } = opened;
    check_size(ByteLen(stat.size), &given, &state.place)
        .map_err(|(found, expected)| DiskError::from(settings.refused(&open::IMAGE, found, expected)))?;
    let plain = admission::plain_geometry(ByteLen(stat.size), given.block, given.options.read_only);
    let physical_block = given
        .encryption
        .as_ref()
        .map_or(plain.physical_block, |encryption| plain.physical_block.max(encryption.sector()));
    let geometry = Geometry { opt_io: ByteLen(stat.object_size), physical_block, ..plain };
    let locks = stat.exclusive_lock && !geometry.read_only;
    Ok(Arc::new(RbdDisk {
        given,
        geometry,
        locks,
        state,
        image: Mutex::new(Some(image)),
        users: Mutex::new(0),
        closed: Mutex::new(closed),
        resizing: Mutex::new(()),
    }))
}

/// Loads Ceph's libraries and starts the thread that starts those of images, so that images can be opened when this
/// process may neither map code nor have sockets of the network.
///
/// # Errors
/// When the libraries are missing, or the host refuses a thread.
pub fn allow_later() -> io::Result<()> {
    mqblk_rbd::load().map_err(io::Error::other)?;
    attendant::check_network()
}

/// Returns the found and the expected value for an invalid size.
fn check_size(size: ByteLen, given: &RbdSettings, place: &str) -> Result<(), (String, String)> {
    if size != ByteLen::ZERO && size.is_aligned(given.block) {
        return Ok(());
    }
    let expected = format!("a multiple of block-size {} above 0", given.block.bytes());
    Err((format!("{} bytes in {place}", size.0), expected))
}

struct RbdDisk {
    given: RbdSettings,
    /// The size in it is unused: see `state`.
    geometry: Geometry,
    /// True if the image has an exclusive lock, and is written.
    locks: bool,
    state: Arc<RbdState>,
    /// `None` once closed. Never locked over a call that waits for the cluster: workers lock it.
    image: Mutex<Option<Image>>,
    /// Users of the lock, with `shared-migration`.
    users: Mutex<usize>,
    /// Disconnected when the image is closed.
    closed: Mutex<Receiver<()>>,
    /// Serialises resizes.
    resizing: Mutex<()>,
}

impl RbdDisk {
    fn image(&self) -> Result<Image, DiskError> {
        lock(&self.image).clone().ok_or_else(|| DiskError::Os {
            what: self.state.place.clone(),
            source: io::Error::new(io::ErrorKind::NotConnected, "the image is closed"),
        })
    }

    fn os(&self, error: RbdError) -> DiskError {
        self.state.check_errno(error.errno());
        DiskError::Os { what: format!("{}: {}", self.state.place, error.what), source: error.source }
    }

    fn check_size(&self, size: ByteLen) -> Result<(), DiskError> {
        let checked = check_size(size, &self.given, &self.state.place);
        checked.map_err(|(found, expected)| DiskError::Size { found, expected })
    }
}

/// Closes the image: a process that ends after an error must not leave its lock behind. A worker does not wait for it.
impl Drop for RbdDisk {
    fn drop(&mut self) {
        if thread_role::current() != Some(ThreadRole::Worker) {
            self.close();
        }
    }
}

impl Disk<UringContext> for RbdDisk {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.state.size.get(), ..self.geometry }
    }

    fn limits(&self) -> Limits {
        let writable = !self.geometry.read_only;
        let discard = DiscardLimits { granularity: DISCARD_GRANULARITY, max_len: MAX_DISCARD };
        Limits {
            max_transfer: admission::MAX_TRANSFER,
            max_segments: MAX_SEGMENTS,
            discard: (writable && self.given.unmap).then_some(discard),
            write_zeroes: writable.then_some(MAX_ZEROES),
            volatile_cache: true,
            cost_per_request: true,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        let options = &self.given.options;
        let mut all = vec![("pool", options.pool.clone()), ("image", options.image.clone())];
        all.extend(options.snapshot.iter().map(|snapshot| ("snap", snapshot.clone())));
        if !options.namespace.is_empty() {
            all.push(("namespace", options.namespace.clone()));
        }
        all.extend(options.conf.iter().map(|conf| ("conf", conf.display().to_string())));
        all.push(("user", options.user.clone().unwrap_or_else(|| "admin".to_owned())));
        all.push(("readonly", admission::on_off(options.read_only)));
        all.push(("block-size", self.given.block.bytes().to_string()));
        all.push(("discard", if self.given.unmap { "unmap" } else { "ignore" }.to_owned()));
        all.push(("lock", self.given.lock.name().to_owned()));
        all.extend(self.given.encryption.iter().flat_map(EncryptionSettings::resolved));
        all
    }

    fn sync(&self) -> io::Result<()> {
        // Without users all writes were flushed before the lock was released, and a flush would take the lock again.
        let handed_over = self.locks && self.given.lock == LockMode::SharedMigration && *lock(&self.users) == 0;
        if self.geometry.read_only || handed_over {
            return Ok(());
        }
        let image = self.image().map_err(io::Error::other)?;
        image.flush().map_err(|error| {
            self.state.check_errno(error.errno());
            error.source
        })
    }

    fn found_size(&self) -> Result<ByteLen, DiskError> {
        // The cluster's last report: a query could wait for it.
        Ok(self.state.found.get())
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        let _one = lock(&self.resizing);
        let image = self.image()?;
        if let Some(size) = size {
            admission::check_resize(&self.geometry, size)?;
            let before = self.state.size.get();
            // Smaller first: no request is started beyond the new end.
            self.state.size.set(before.min(size));
            if let Err(error) = image.resize(size.0) {
                self.state.size.set(before);
                return Err(self.os(error));
            }
        }
        let found = ByteLen(image.size().map_err(|error| self.os(error))?);
        self.check_size(found)?;
        self.state.found.set(found);
        self.state.size.set(found);
        Ok(found)
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        // The lock belongs to this client of the cluster: without it nothing fences requests in flight.
        match self.geometry.read_only || self.given.lock == LockMode::SharedMigration {
            true => Ok(Vec::new()),
            false => Err("belongs to this client of the cluster (lock=shared-migration passes it on)".to_owned()),
        }
    }

    fn activate(&self, _: Duration) -> Result<(), DiskError> {
        if self.given.lock != LockMode::SharedMigration || !self.locks {
            return Ok(());
        }
        let mut users = lock(&self.users);
        if *users == 0 {
            attendant::acquire_lock(&self.image()?, &self.state.place, &self.state.permitted_user)?;
        }
        *users += 1;
        Ok(())
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        if self.given.lock != LockMode::SharedMigration || !self.locks {
            return Ok(());
        }
        let mut users = lock(&self.users);
        *users = users.saturating_sub(1);
        match (*users, self.image()) {
            (0, Ok(image)) => image.flush().and_then(|()| image.release_lock()).map_err(|error| self.os(error)),
            // A closed image has no lock.
            _ => Ok(()),
        }
    }

    fn close(&self) {
        drop(lock(&self.image).take());
        // Disconnected at once if the image's thread has closed it.
        if lock(&self.closed).recv_timeout(CLOSE_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "{}: not closed within {} s: the cluster keeps its lock until it has lost this client",
                self.state.place,
                CLOSE_TIMEOUT.as_secs()
            );
        }
    }

    fn observe(&self, observer: Arc<dyn DiskObserver>) {
        self.state.observers.set(observer);
    }

    fn connections(&self) -> Option<ConnectionStats> {
        Some(self.state.observers.stats())
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let image = self.image()?;
        Ok(Box::new(RbdChannel::new(&image, &self.state, self.geometry, self.given.unmap, context)))
    }
}

#[cfg(test)]
mod tests;
