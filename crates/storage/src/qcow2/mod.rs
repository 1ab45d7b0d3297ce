//! `storage=qcow2`: an image of QEMU's format, version 2 or 3, by the library `imago`.
//!
//! The library's calls block, so the disk's own threads make them ([`blocking`](crate::blocking)). Reads and writes of
//! allocated clusters bypass it (`direct`). The choice of this library, and the protection of images from it:
//! docs/design/0017-qcow2.md.
//!
//! * `header` and `check` read an image before the library does, and refuse damaged or unsupported ones; `repair`
//!   repairs images that were not closed.
//! * `chain` opens all files, `access` restricts the files that an image may refer to, `create` makes overlays;
//!   `layers` are the files, and the image loaded from them; `passing` moves the image to another process.
//! * `image` executes requests, `tables` makes completed writes survive this process, `order` keeps foreign data out of
//!   clusters after a loss of power.

mod access;
mod chain;
mod check;
mod create;
mod direct;
mod header;
mod image;
mod layers;
mod order;
mod passing;
mod repair;
mod tables;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mqblk_core::lock::lock;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::{
    BlockSize, ByteLen, DiscardLimits, Disk, DiskChannel, DiskError, Geometry, ImageOpener, Limits, OpenImage,
};
use mqblk_uring::UringContext;

use crate::admission::{self, DiskSize};
use crate::blocking::BlockingThreads;
use crate::file::MAX_SEGMENTS;
use crate::keys::{BLOCK_SIZE, READONLY, THREADS};
use access::NamedFiles;
use chain::ChainOpener;
use direct::channel::Qcow2Channel;
use image::Image;

/// Longest range of a discard: bounds the time of exclusive access.
const MAX_DISCARD: ByteLen = ByteLen(1 << 30);
/// Longest range of zeroes: parts of it may have to be written.
const MAX_ZEROES: ByteLen = ByteLen(32 << 20);
static PATH: Key =
    Key::text("path", "PATH", "a path").alias("overlay").required().about("a qcow2 image in a regular file", "");
static FORMAT: Key =
    Key::words("format", &["qcow2"]).default("qcow2").about("the same as storage=qcow2, for a file at path", "");
static BASE: Key =
    Key::text("base", "PATH", "a path").about("make the image at path over this one, if there is none", "");
static BACKING: Key = Key::text("backing", "PATHS", "`allow`, `deny`, or absolute paths with colons between")
    .default("deny")
    .about("which files an image may name as its backing or data file: these, and what is beneath these folders", "");
static LOCK: Key = Key::words("lock", &["exclusive", "off"])
    .placeholder("MODE")
    .default("exclusive")
    .about("what keeps a second writer out: exclusive, or off", "");
static AIO: Key = Key::words("aio", &["auto", "threads"])
    .default("auto")
    .about("threads: all requests go through threads; auto: those to clusters that are allocated do without", "");

/// The keys of `storage=qcow2`.
pub(crate) const KEYS: &[&Key] = &[&PATH, &FORMAT, &BASE, &BACKING, &THREADS, &AIO, &READONLY, &BLOCK_SIZE, &LOCK];

/// Opens an image, after creating it if `base` is given and it does not exist.
///
/// # Errors
/// When a setting does not fit; when a file cannot be opened, is in use, or is not allowed; when the image is damaged
/// or has unsupported features.
pub fn open(settings: &mut Settings, opener: &Arc<dyn ImageOpener>) -> Result<Arc<dyn Disk<UringContext>>, DiskError> {
    Ok(Arc::new(open_disk(settings, opener)?))
}

fn open_disk(settings: &mut Settings, opener: &Arc<dyn ImageOpener>) -> Result<Qcow2Disk, DiskError> {
    let given = ImageSettings::take(settings)?;
    let mut named = given.named.clone();
    if let Some(base) = &given.base {
        named.add(Path::new(base));
        create::create_overlay(settings, opener, Path::new(base), &given.path)?;
    }
    let chain_opener = ChainOpener { settings, opener, named: &named, lock: given.lock };
    let files = chain_opener.open(&given.path, given.read_only)?;
    let size = ByteLen(files.header.size);
    if size == ByteLen::ZERO || !size.is_aligned(given.block) {
        let found = format!("{} bytes in {:?}", size.0, given.path);
        let expected = format!("a disk whose size is a multiple of block-size {} above 0", given.block.bytes());
        return Err(settings.refused(&PATH, found, expected).into());
    }
    let direct = if given.direct { files.direct()? } else { None };
    let image = Arc::new(Image::new(files, direct));
    image.load_first()?;
    let start = BlockingThreads::start(Box::new(Arc::clone(&image)), given.threads);
    let what = || format!("threads for {}", given.path.display());
    let threads = start.map_err(|source| DiskError::Os { what: what(), source })?;
    let size = Arc::new(DiskSize::new(size));
    Ok(Qcow2Disk { threads, image, given, size, resizing: Mutex::new(()) })
}

/// The settings, as given.
struct ImageSettings {
    path: PathBuf,
    base: Option<String>,
    named: NamedFiles,
    read_only: bool,
    block: BlockSize,
    lock: bool,
    direct: bool,
    threads: u32,
}

impl ImageSettings {
    fn take(settings: &mut Settings) -> Result<ImageSettings, SettingError> {
        settings.word(&FORMAT)?;
        let is_overlay = settings.peek("overlay").is_some();
        let base = settings.text(&BASE);
        let Some(path) = settings.given(&PATH)? else {
            return Err(settings.error(&PATH, "nothing", "a qcow2 image"));
        };
        if is_overlay && base.is_none() {
            return Err(settings.error(&BASE, "nothing", "the image beneath the overlay"));
        }
        let named = settings.text(&BACKING).unwrap_or_else(|| "deny".to_owned());
        let named = NamedFiles::parse(&named).map_err(|wrong| {
            let expected = "allow, deny, or absolute paths of files and folders with colons between";
            settings.error(&BACKING, format!("{wrong:?}"), expected)
        })?;
        Ok(ImageSettings {
            path: PathBuf::from(path),
            base,
            named,
            read_only: settings.switch_or_default(&READONLY)?,
            block: admission::block_size(settings)?.unwrap_or(BlockSize::B512),
            lock: settings.word(&LOCK)? != Some("off"),
            direct: settings.word(&AIO)? != Some("threads"),
            threads: settings.number_or_default(&THREADS)? as u32,
        })
    }
}

struct Qcow2Disk {
    /// Ended before the image is closed.
    threads: BlockingThreads,
    image: Arc<Image>,
    given: ImageSettings,
    size: Arc<DiskSize>,
    /// Serialises resizes.
    resizing: Mutex<()>,
}

impl Qcow2Disk {
    fn discards(&self) -> bool {
        !self.given.read_only && self.image.discards()
    }

    fn fixed_geometry(&self) -> Geometry {
        let plain = admission::plain_geometry(self.size.get(), self.given.block, self.given.read_only);
        // The host's page cache writes pages. A cluster is the unit of allocation.
        Geometry { physical_block: BlockSize::B4096, opt_io: ByteLen(self.image.cluster()), ..plain }
    }
}

impl Disk<UringContext> for Qcow2Disk {
    fn geometry(&self) -> Geometry {
        self.fixed_geometry()
    }

    fn limits(&self) -> Limits {
        let discard = DiscardLimits { granularity: ByteLen(self.image.cluster()), max_len: MAX_DISCARD };
        Limits {
            max_transfer: admission::MAX_TRANSFER,
            max_segments: MAX_SEGMENTS,
            discard: self.discards().then_some(discard),
            write_zeroes: (!self.given.read_only).then_some(MAX_ZEROES),
            volatile_cache: true,
            cost_per_request: true,
            pins_memory: false,
        }
    }

    fn resolved(&self) -> Vec<(&'static str, String)> {
        let given = &self.given;
        let mut all = vec![("path", given.path.display().to_string())];
        all.extend(given.base.clone().map(|base| ("base", base)));
        all.extend([
            ("backing", given.named.text()),
            ("readonly", admission::on_off(given.read_only)),
            ("block-size", given.block.bytes().to_string()),
            ("lock", if given.lock { "exclusive" } else { "off" }.to_owned()),
            ("aio", if self.image.direct().is_some() { "auto" } else { "threads" }.to_owned()),
            ("threads", given.threads.to_string()),
        ]);
        all
    }

    fn sync(&self) -> std::io::Result<()> {
        self.image.close()
    }

    fn resize(&self, size: Option<ByteLen>) -> Result<ByteLen, DiskError> {
        let _one = lock(&self.resizing);
        let Some(size) = size else {
            // No other process changes it: the image is locked.
            return Ok(self.size.get());
        };
        admission::check_resize(&self.fixed_geometry(), size)?;
        self.image.load()?;
        // Smaller first: no request is started beyond the new end.
        self.size.set(self.size.get().min(size));
        let resized = self.image.set_size(size);
        let what = || format!("size of {}", self.given.path.display());
        self.size.set(self.image.size().map_err(|source| DiskError::Os { what: what(), source })?);
        match resized {
            Ok(()) => Ok(size),
            Err(error) => {
                let expected = format!("a size that the image can have ({error})");
                Err(DiskError::Size { found: size.to_string(), expected })
            }
        }
    }

    fn hand_over(&self) -> Result<Vec<OpenImage>, String> {
        self.image.files.for_another().map_err(|error| format!("has no descriptor for another process: {error}"))
    }

    fn leave(&self) -> Result<(), String> {
        self.image.leave()
    }

    fn activate(&self, _: Duration) -> Result<(), DiskError> {
        self.image.activate()
    }

    fn deactivate(&self) -> Result<(), DiskError> {
        let what = || format!("flush of {} when its queues stopped", self.given.path.display());
        self.image.deactivate().map_err(|source| DiskError::Os { what: what(), source })
    }

    fn open_channel(&self, context: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
        let geometry = self.fixed_geometry();
        let threads = self.threads.open_channel(geometry, &self.size, self.discards(), context);
        let Some(direct) = self.image.direct() else { return Ok(threads) };
        let (image, direct, sized) = (Arc::clone(&self.image), Arc::clone(direct), (geometry, Arc::clone(&self.size)));
        Ok(Box::new(Qcow2Channel::new(image, direct, sized, threads, context)?))
    }
}

#[cfg(test)]
mod tests;
