//! An open image with its connection.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::config::{self, ImageConfig};
use crate::encryption::{self, Encryption};
use crate::error::{FailedStep, RbdError, check};
use crate::handles::{Handles, ImageEvent, UnusedImage, WatchArgument, c_string, size_of_image};
use crate::keyring;
use crate::library::{self, FEATURE_EXCLUSIVE_LOCK, ImageHandle, ImageInfo, Libraries};

/// The image to open, and its access.
#[derive(Clone, Debug, Default)]
pub struct ImageOptions {
    /// The cluster's configuration file; `None`: the library's (`CEPH_CONF`, `/etc/ceph/ceph.conf`).
    pub conf: Option<PathBuf>,
    /// The user without `client.`; `None`: `admin`.
    pub user: Option<String>,
    /// The pool.
    pub pool: String,
    /// The namespace in the pool; empty: none.
    pub namespace: String,
    /// The image's name.
    pub image: String,
    /// The snapshot to read.
    pub snapshot: Option<String>,
    /// True if nothing is written, not even the lock.
    pub read_only: bool,
}

/// Properties of an open image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageStat {
    /// Size in bytes.
    pub size: u64,
    /// Size of its objects, in bytes.
    pub object_size: u64,
    /// True if it has the feature `exclusive-lock`.
    pub exclusive_lock: bool,
}

/// An open image. Cheap to clone; all clones are one handle of the library, with or without the exclusive lock. Its
/// methods may be called from all threads, and block until the cluster answers.
#[derive(Clone, Debug)]
pub struct Image(pub(crate) Arc<OpenImage>);

/// A reference that does not keep the image open.
#[derive(Clone, Debug)]
pub struct WeakImage(Weak<OpenImage>);

#[derive(Debug)]
pub(crate) struct OpenImage {
    handles: Option<Handles>,
    /// The cache of writes, as option and value: each write is followed by a flush.
    write_cache: Option<String>,
    /// Bytes of the header of its encryption, beside its size.
    header: u64,
    events: Mutex<Sender<ImageEvent>>,
}

impl Drop for OpenImage {
    fn drop(&mut self) {
        if let Some(handles) = self.handles.take() {
            let events = self.events.get_mut().unwrap_or_else(PoisonError::into_inner);
            // Without a receiver it is returned with the error, and closed here.
            let _ = events.send(ImageEvent::Unused(UnusedImage(handles)));
        }
    }
}

/// Notifies the owner of a change of the image. Called by a thread of the library.
unsafe extern "C" fn updated(argument: *mut c_void) {
    // SAFETY: the argument lives until the watch has ended.
    let events = unsafe { &*argument.cast::<WatchArgument>() };
    let _ = events.lock().unwrap_or_else(PoisonError::into_inner).send(ImageEvent::Updated);
}

impl Image {
    /// Connects to the cluster and opens the image. Blocks at most for the cluster's connection timeout
    /// (`client_mount_timeout`; 30 s unless it is set). This call starts the threads of the library, which have the
    /// rights of the calling thread. With `encryption` guests see the decrypted image.
    ///
    /// # Errors
    /// With the step that failed.
    pub fn open(
        options: &ImageOptions,
        encryption: Option<&Encryption>,
        events: &Sender<ImageEvent>,
    ) -> Result<Image, RbdError> {
        let libraries = library::libraries()?;
        let mut handles = connect(libraries, options)?;
        find_pool(&mut handles, options)?;
        let (name, snapshot) = (c_string(&options.image)?, options.snapshot.as_deref().map(c_string).transpose()?);
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        let Libraries { rbd, .. } = libraries;
        let open = if options.read_only { rbd.rbd_open_read_only } else { rbd.rbd_open };
        // SAFETY: the pool is open, the names end with 0, and the handle has a place.
        let opened = unsafe { open(handles.pool, name.as_ptr(), &raw mut handles.image, snapshot) };
        if opened < 0 {
            handles.image = ptr::null_mut();
        }
        check(opened, FailedStep::Image, || "opening the image".to_owned())?;
        let ImageConfig { write_cache } = ImageConfig::check(&handles, options.read_only)?;
        let header = encryption.map_or(Ok(0), |encryption| encryption::load(&handles, encryption))?;
        let argument = Box::into_raw(Box::new(Mutex::new(events.clone())));
        let mut watch = 0;
        // SAFETY: the argument lives until `rbd_update_unwatch` has returned.
        let watched = unsafe { (rbd.rbd_update_watch)(handles.image, &raw mut watch, updated, argument.cast()) };
        if watched < 0 {
            // SAFETY: nobody else has it.
            drop(unsafe { Box::from_raw(argument) });
            check(watched, FailedStep::Image, || "watching the image".to_owned())?;
        }
        handles.watch = Some((watch, argument));
        Ok(Image(Arc::new(OpenImage {
            handles: Some(handles),
            write_cache,
            header,
            events: Mutex::new(events.clone()),
        })))
    }

    /// Returns the option of the pool or the image that gives the library a write cache in spite of the process's
    /// options, with its value. Each write is then followed by a flush.
    pub fn write_cache(&self) -> Option<&str> {
        self.0.write_cache.as_deref()
    }

    /// Returns a reference that does not keep the image open.
    pub fn downgrade(&self) -> WeakImage {
        WeakImage(Arc::downgrade(&self.0))
    }

    /// The functions and the handle.
    pub(crate) fn raw(&self) -> (&'static library::Rbd, ImageHandle) {
        let handles = self.0.handles.as_ref().expect("taken by drop only");
        (&handles.libraries.rbd, handles.image)
    }

    /// Returns size, object size and features.
    ///
    /// # Errors
    /// When the cluster does not report them.
    pub fn stat(&self) -> Result<ImageStat, RbdError> {
        let (rbd, image) = self.raw();
        let mut info = std::mem::MaybeUninit::<ImageInfo>::zeroed();
        // SAFETY: the image is open, and `info` has the size that is given.
        let result = unsafe { (rbd.rbd_stat)(image, info.as_mut_ptr(), size_of::<ImageInfo>()) };
        check(result, FailedStep::Call, || "properties of the image".to_owned())?;
        // SAFETY: integers, all initialised.
        let info = unsafe { info.assume_init() };
        let mut features = 0;
        // SAFETY: the image is open.
        let result = unsafe { (rbd.rbd_get_features)(image, &raw mut features) };
        check(result, FailedStep::Call, || "features of the image".to_owned())?;
        let exclusive_lock = features & FEATURE_EXCLUSIVE_LOCK != 0;
        Ok(ImageStat { size: info.size, object_size: info.obj_size, exclusive_lock })
    }

    /// Returns the size in bytes.
    ///
    /// # Errors
    /// When the cluster does not report it.
    pub fn size(&self) -> Result<u64, RbdError> {
        size_of_image(self.0.handles.as_ref().expect("taken by drop only"))
    }

    /// Resizes the image, in bytes. Data beyond a smaller size is lost.
    ///
    /// # Errors
    /// When the cluster refuses.
    pub fn resize(&self, size: u64) -> Result<(), RbdError> {
        let (rbd, image) = self.raw();
        let resize = |size| {
            // SAFETY: the image is open.
            let result = unsafe { (rbd.rbd_resize)(image, size) };
            check(result, FailedStep::Call, || "resizing the image".to_owned()).map(drop)
        };
        // The library reports the size of the decrypted data, and takes that of the image with its header.
        resize(size.saturating_add(self.0.header))?;
        if self.0.header == 0 || self.size()? == size {
            return Ok(());
        }
        // A library that takes the reported one: until now the image was too large.
        resize(size)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// When the cluster refuses.
    pub fn flush(&self) -> Result<(), RbdError> {
        let (rbd, image) = self.raw();
        // SAFETY: the image is open.
        let result = unsafe { (rbd.rbd_flush)(image) };
        check(result, FailedStep::Call, || "flush".to_owned()).map(drop)
    }

    /// Takes the exclusive lock and keeps it: other clients that ask for it are refused. Breaks the lock of a client
    /// that the cluster has lost, which is then blocklisted.
    ///
    /// # Errors
    /// EROFS or EBUSY when another client has it and keeps it.
    pub fn acquire_lock(&self) -> Result<(), RbdError> {
        let (rbd, image) = self.raw();
        // SAFETY: the image is open.
        let result = unsafe { (rbd.rbd_lock_acquire)(image, library::LOCK_EXCLUSIVE) };
        check(result, FailedStep::Call, || "taking the exclusive lock".to_owned()).map(drop)
    }

    /// Releases the exclusive lock, after all writes have ended.
    ///
    /// # Errors
    /// When the cluster refuses.
    pub fn release_lock(&self) -> Result<(), RbdError> {
        let (rbd, image) = self.raw();
        // SAFETY: the image is open.
        let result = unsafe { (rbd.rbd_lock_release)(image) };
        check(result, FailedStep::Call, || "releasing the exclusive lock".to_owned()).map(drop)
    }

    /// Returns true if this client has the exclusive lock.
    ///
    /// # Errors
    /// When the library does not report it.
    pub fn has_lock(&self) -> Result<bool, RbdError> {
        let (rbd, image) = self.raw();
        let mut owner = 0;
        // SAFETY: the image is open.
        let result = unsafe { (rbd.rbd_is_exclusive_lock_owner)(image, &raw mut owner) };
        check(result, FailedStep::Call, || "owner of the exclusive lock".to_owned())?;
        Ok(owner != 0)
    }

    /// Returns the owner of the exclusive lock, as named by the cluster; `None` if there is none.
    ///
    /// # Errors
    /// When the cluster does not report it.
    pub fn lock_owner(&self) -> Result<Option<String>, RbdError> {
        let (rbd, image) = self.raw();
        let mut mode: c_int = 0;
        let mut owners: [*mut c_char; 4] = [ptr::null_mut(); 4];
        let mut count = owners.len();
        // SAFETY: `owners` has places for `count` pointers.
        let result = unsafe { (rbd.rbd_lock_get_owners)(image, &raw mut mode, owners.as_mut_ptr(), &raw mut count) };
        if result == -libc::ENOENT {
            return Ok(None);
        }
        check(result, FailedStep::Call, || "owner of the exclusive lock".to_owned())?;
        // SAFETY: the first `count` are strings of the library until the cleanup.
        let owner = (count > 0 && !owners[0].is_null())
            .then(|| unsafe { CStr::from_ptr(owners[0]) }.to_string_lossy().into_owned());
        // SAFETY: as above, each is freed once.
        unsafe { (rbd.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        Ok(owner)
    }
}

impl WeakImage {
    /// Returns the image if it is open.
    pub fn upgrade(&self) -> Option<Image> {
        self.0.upgrade().map(Image)
    }
}

fn connect(libraries: &'static Libraries, options: &ImageOptions) -> Result<Handles, RbdError> {
    let Libraries { rados, .. } = libraries;
    let user = options.user.as_deref().map(c_string).transpose()?;
    let mut cluster = ptr::null_mut();
    // SAFETY: the name ends with 0 or is null, and the handle has a place.
    let made =
        unsafe { (rados.rados_create)(&raw mut cluster, user.as_ref().map_or(ptr::null(), |user| user.as_ptr())) };
    check(made, FailedStep::Connection, || "a client of the cluster".to_owned())?;
    let (pool, image) = (ptr::null_mut(), ptr::null_mut());
    let handles = Handles { libraries, cluster, pool, image, watch: None };
    let conf = options.conf.as_ref().map(|path| c_string(&path.to_string_lossy())).transpose()?;
    // SAFETY: as above.
    let read =
        unsafe { (rados.rados_conf_read_file)(cluster, conf.as_ref().map_or(ptr::null(), |path| path.as_ptr())) };
    check(read, FailedStep::Configuration, || "reading the cluster's configuration".to_owned())?;
    config::set_options(&handles)?;
    // SAFETY: the cluster is configured, and was not connected before.
    let connected = unsafe { (rados.rados_connect)(cluster) };
    if connected == -libc::ETIMEDOUT {
        check(connected, FailedStep::Connection, || "connecting to the cluster".to_owned())?;
    }
    check(connected, FailedStep::Authentication, || {
        format!("authentication with {}", keyring::describe(&handles, options.user.as_deref()))
    })?;
    Ok(handles)
}

fn find_pool(handles: &mut Handles, options: &ImageOptions) -> Result<(), RbdError> {
    let Libraries { rados, .. } = handles.libraries;
    let (pool, namespace) = (c_string(&options.pool)?, c_string(&options.namespace)?);
    // SAFETY: the cluster is connected, the name ends with 0, and the handle has a place.
    let found = unsafe { (rados.rados_ioctx_create)(handles.cluster, pool.as_ptr(), &raw mut handles.pool) };
    if found < 0 {
        handles.pool = ptr::null_mut();
    }
    check(found, FailedStep::Pool, || "opening the pool".to_owned())?;
    // SAFETY: the pool is open.
    unsafe { (rados.rados_ioctx_set_namespace)(handles.pool, namespace.as_ptr()) };
    Ok(())
}
