//! Opening a file as a disk: the user's settings against the host's properties.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::thread::spawn;
use mqblk_core::{BlockSize, ByteLen, Geometry, ImageAccess, ImageOpenError, ImageOpener};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::format;
use super::host::{self, BlockDeviceInfo, DirectIo};
use super::lock::{self, ImageLock, LockError};
use super::open_file::{Alignment, FileKind, OpenFile};
use super::retry::{errno, retry_while_busy};
use super::small_blocks::SmallBlocks;
use crate::admission::{self, DiskSize};
use crate::keys::{BLOCK_SIZE, DISCARD, LOCK, PATH, READONLY};
use crate::lock_mode::LockMode;

/// Alignment for direct I/O if the kernel does not report it and no device is visible: no storage requires more.
const DEFAULT_ALIGNMENT: Alignment = Alignment { memory: 4096, offset: 4096 };

static DIRECT: Key = Key::switch("direct").default("on").about(
    "go past the host's page cache",
    "With O_DIRECT. Where the file system refuses, a warning is logged and the cache is used.",
);
static FORMAT: Key = Key::words("format", &["auto", "raw"]).default("auto").about(
    "raw: serve the file with any content; auto: refuse an image of another format",
    "Give `raw` where guests are not trusted: [storage/file.md](storage/file.md#what-a-file-is).",
);
static AIO: Key = Key::words("aio", &["auto", "io_uring", "threads"]).default("auto").about(
    "io_uring, threads, or auto: threads where the file system cannot be asked without waiting (FUSE, NFS)",
    "By the worker's io_uring, or by 16 threads of the disk's own. io_uring gives requests to such files (FUSE, NFS, SMB, overlayfs) to a few \
     kernel threads that all disks of the worker share; when the file's server hangs, they all wait.",
);
/// Identity of the image when it was last served as raw. Set by the daemon, not by users.
static SERVED_RAW: Key = Key::text("served-raw", "", "");

/// The keys of `storage=file`.
pub(crate) const KEYS: &[&Key] = &[&PATH, &FORMAT, &DIRECT, &AIO, &READONLY, &BLOCK_SIZE, &LOCK, &DISCARD];

/// The settings of a file disk, as given.
struct FileSettings {
    path: PathBuf,
    direct: bool,
    read_only: bool,
    block: Option<BlockSize>,
    unmap: bool,
    lock: LockMode,
    /// True with `format=raw`: the file's first bytes are not checked.
    raw: bool,
    /// Identity of the image when it was last served as raw.
    served_raw: Option<String>,
    /// `aio`: true for threads; `None`: chosen by the file system.
    threads: Option<bool>,
}

pub(super) fn open(
    settings: &mut Settings,
    opener: &Arc<dyn ImageOpener>,
) -> Result<(OpenFile, Arc<ImageLock>), SettingError> {
    let Some(path) = settings.text(&PATH) else {
        return Err(settings.error(&PATH, "nothing", "a regular file or a block device"));
    };
    let mut config = FileSettings {
        path: PathBuf::from(path),
        direct: settings.switch_or_default(&DIRECT)?,
        read_only: settings.switch_or_default(&READONLY)?,
        block: admission::block_size(settings)?,
        unmap: settings.word(&DISCARD)? != Some("ignore"),
        lock: LockMode::from_settings(settings)?,
        raw: settings.word(&FORMAT)? == Some("raw"),
        // Not a users' key, so errors do not list it.
        served_raw: settings.peek(&SERVED_RAW).is_some().then(|| settings.text(&SERVED_RAW)).flatten(),
        threads: match settings.word(&AIO)? {
            None | Some("auto") => None,
            Some(word) => Some(word == "threads"),
        },
    };
    let (mut file, mut kind, mut direct) = open_file(settings, &config, opener.as_ref())?;
    let device = device_of(&file, kind);
    if direct && ends_within_unit(&config, &file, kind, device) {
        tracing::warn!(
            "{}: {}: its size is not a multiple of {} bytes, the unit of its direct I/O; going on with direct=off, through the host's page cache",
            settings.subject(),
            config.path.display(),
            alignment(&file, device).offset
        );
        config.direct = false;
        drop(file);
        (file, kind, direct) = open_file(settings, &config, opener.as_ref())?;
    }
    let served_raw = config.served_raw.is_some() && config.served_raw == raw_identity(&file, kind);
    if !config.raw && !served_raw {
        refuse_other_formats(settings, &config, &file, kind)?;
    }
    if config.lock == LockMode::Exclusive {
        lock_while_open(settings, &config, &file)?;
    }
    let direct = direct.then(|| alignment(&file, device));
    let unit = unit(kind, direct, device);
    let block = block_size(settings, &config, (&file, kind), unit, device)?;
    let size = size(settings, &config, &file, kind, block)?;
    let small_blocks = (block.bytes() < unit).then(|| SmallBlocks::new(unit));
    let physical = small_blocks.as_ref().and_then(|_| BlockSize::new(unit)).unwrap_or(block);
    let geometry = geometry(size, (block, physical), config.read_only, kind, device.unwrap_or_default());
    let discard = if config.unmap && !config.read_only { discard_granularity(&file, kind, size, device) } else { None };
    let threads_discard = discard.is_some() && device.is_some_and(|device| device.write_zeroes_max_bytes == 0);
    let threads_discard = threads_discard && kind == FileKind::BlockDevice;
    if discard.is_none() && config.unmap && !config.read_only {
        tracing::info!("{}: the storage cannot discard, and guests are not offered it", config.path.display());
    }
    let uses_threads = config.threads.unwrap_or(kind == FileKind::Regular && !host::has_nowait(&file));
    let FileSettings { path, unmap, lock, read_only, .. } = config;
    if uses_threads {
        tracing::info!("{}: requests go through threads of the disk's own (aio=threads)", path.display());
    }
    let size = Arc::new(DiskSize::new(size));
    let fd = Arc::new(file.into());
    let lock = ImageLock::new(lock, (&path, &fd), read_only, kind == FileKind::BlockDevice, opener);
    let locked = lock.mode == LockMode::Exclusive;
    let open = OpenFile {
        path,
        fd,
        geometry,
        size,
        kind,
        direct,
        uses_threads,
        unmap,
        discard,
        threads_discard,
        small_blocks,
        locked,
    };
    Ok((open, lock))
}

/// Returns the identity of the image at its path: the file or device, and its size. An image not made by the guest (by
/// `qemu-img convert` onto the same file) has another size.
pub(super) fn raw_identity(file: &impl AsFd, kind: FileKind) -> Option<String> {
    let (stat, size) = (rustix::fs::fstat(file).ok()?, host::size(file, kind).ok()?);
    let number = if kind == FileKind::BlockDevice { stat.st_rdev } else { stat.st_ino };
    Some(format!("{number}:{}", size.0))
}

fn describe(path: &Path, reason: impl std::fmt::Display) -> String {
    format!("{path:?} ({reason})")
}

/// Opens the file, for direct I/O if configured and possible.
fn open_file(
    settings: &Settings,
    config: &FileSettings,
    opener: &dyn ImageOpener,
) -> Result<(File, FileKind, bool), SettingError> {
    let FileSettings { path, read_only, .. } = config;
    let not_a_disk = |found: &str| settings.refused("path", describe(path, found), "a regular file or a block device");
    let missing = |error: io::Error| {
        let expected = match Errno::from_io_error(&error) {
            Some(Errno::MFILE) => "a higher limit of open files (ulimit -n, LimitNOFILE=)",
            _ => "an existing regular file or block device that this user may open",
        };
        settings.refused("path", describe(path, error), expected)
    };
    let attempt = |direct: bool| {
        // Refused while the block device is mounted or otherwise claimed.
        let exclusive = !read_only && config.lock.claims_on_open();
        let access = ImageAccess { write: !read_only, direct, exclusive };
        retry_while_busy(path, || opener.open(path, access), |error| errno(error) == Some(Errno::BUSY))
    };
    let refused = |error: ImageOpenError| match errno(&error) {
        Some(Errno::BUSY) => settings.refused(
            "path",
            describe(path, "mounted, or claimed by another user of the device"),
            "a block device that is not in use; unmount it, or open it with readonly=on",
        ),
        Some(Errno::ROFS | Errno::ACCESS | Errno::PERM) if !read_only => settings.refused(
            "path",
            describe(path, &error),
            "a file that this user may write; readonly=on serves it without writing",
        ),
        _ => match error {
            ImageOpenError::NotAnImage(found) => not_a_disk(&found),
            error => missing(error.into()),
        },
    };
    let plain = || {
        let file = attempt(false).map_err(refused)?;
        let kind = host::file_kind(&file).map_err(missing)?.map_err(not_a_disk)?;
        Ok((file, kind))
    };
    if !config.direct {
        return plain().map(|(file, kind)| (file, kind, false));
    }
    let why = match attempt(true) {
        Ok(file) => {
            let kind = host::file_kind(&file).map_err(missing)?.map_err(not_a_disk)?;
            if kind != FileKind::InMemory && host::direct_io(&file) != DirectIo::Unsupported {
                return Ok((file, kind, true));
            }
            "its files have no direct I/O".to_owned()
        }
        Err(error) if errno(&error) == Some(Errno::INVAL) => error.to_string(),
        Err(error) => return Err(refused(error)),
    };
    let (file, kind) = plain()?;
    if kind != FileKind::InMemory {
        tracing::warn!(
            "{}: {}: the file system refuses direct I/O ({why}); going on with direct=off, through the host's page cache",
            settings.subject(),
            path.display()
        );
    }
    Ok((file, kind, false))
}

/// Longest time to read a file's first and last block. If it takes longer, the device hangs, and a restarted daemon
/// must serve its other disks.
const DETECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the result of `read` of a file, if the storage responds in time.
fn read_in_time<T: Send + 'static>(
    settings: &Settings,
    config: &FileSettings,
    file: &File,
    read: impl Fn(&File) -> T + Clone + Send + 'static,
) -> Option<T> {
    let (sender, found) = channel();
    let of_thread = read.clone();
    let detection = file.try_clone().and_then(|file| {
        spawn("image-format", move || {
            // Nobody may be waiting any more.
            let _ = sender.send(of_thread(&file));
        })
    });
    if detection.is_err() {
        return Some(read(file));
    }
    let found = found.recv_timeout(DETECT_TIMEOUT).ok();
    if found.is_none() {
        tracing::warn!(
            "{}: {}: the storage has not read a block for {} s: whether it is an image of another format, or one with a partition table, is not \
             known (format=raw, block-size= say it)",
            settings.subject(),
            config.path.display(),
            DETECT_TIMEOUT.as_secs()
        );
    }
    found
}

/// Refuses a file that is an image of another format: a guest with access to its bytes would destroy it.
///
/// A guest that encrypts its whole disk writes a LUKS header. On a block device a LUKS header is most likely the
/// guest's, and only logged.
fn refuse_other_formats(
    settings: &Settings,
    config: &FileSettings,
    file: &File,
    kind: FileKind,
) -> Result<(), SettingError> {
    let size = host::size(file, kind).unwrap_or(ByteLen::ZERO);
    let found = read_in_time(settings, config, file, move |file| format::detect(file, size)).flatten();
    let Some(format) = found else { return Ok(()) };
    if format.is_of_guests && kind == FileKind::BlockDevice {
        tracing::info!(
            "{}: {} begins as a {} device, and is served as it is",
            settings.subject(),
            config.path.display(),
            format.name
        );
        return Ok(());
    }
    // The format's backend, if there is one.
    let own = if cfg!(feature = "qcow2") && format.name == "qcow2" { "storage=qcow2 serves it; " } else { "" };
    let expected = format!(
        "a raw image: {own}format=raw serves its bytes as they are, which suits what a guest has written itself; else convert it (`qemu-img convert -f \
         {0} -O raw`), or export it (`qemu-nbd --persistent --format={0} --socket=SOCKET`) and serve path=nbd+unix:///?socket=SOCKET",
        format.name
    );
    Err(settings.refused("path", describe(&config.path, format!("an image of the format {}", format.name)), expected))
}

/// Locks the file for as long as it is open.
fn lock_while_open(settings: &Settings, config: &FileSettings, file: &File) -> Result<(), SettingError> {
    let FileSettings { path, read_only, .. } = config;
    match lock::lock(path, file, *read_only) {
        Ok(()) => Ok(()),
        Err(LockError::InUse) => {
            let expected = format!(
                "a file that nobody else {}; stop the other process (`fuser -v {}` names it){}",
                if *read_only { "writes" } else { "uses" },
                path.display(),
                if *read_only { "" } else { ", or open it with readonly=on in all of them" },
            );
            Err(settings.refused("path", describe(path, "in use by another process"), expected))
        }
        Err(LockError::Unsupported(error)) => {
            tracing::warn!(
                "{}: {}: the file system has no locks ({error}); nothing keeps a second writer out",
                settings.subject(),
                path.display()
            );
            Ok(())
        }
    }
}

fn alignment(file: &File, device: Option<BlockDeviceInfo>) -> Alignment {
    match (host::direct_io(file), device) {
        (DirectIo::Supported(alignment), _) => alignment,
        (_, Some(BlockDeviceInfo { logical_block, .. })) if logical_block.is_power_of_two() => {
            Alignment { memory: logical_block, offset: logical_block }
        }
        _ => DEFAULT_ALIGNMENT,
    }
}

/// Returns the storage's unit of reads and writes, in bytes; 0 if it is not known to exceed a byte.
fn unit(kind: FileKind, direct: Option<Alignment>, device: Option<BlockDeviceInfo>) -> u32 {
    // A block device zeroes and discards whole blocks, cached or not.
    let of_device = device.filter(|_| kind == FileKind::BlockDevice).map_or(0, |device| device.logical_block);
    direct.map_or(0, |direct| direct.offset).max(of_device)
}

/// Returns the logical block size: the configured one, else 512 for an image made with it, else the storage's own.
fn block_size(
    settings: &Settings,
    config: &FileSettings,
    (file, kind): (&File, FileKind),
    unit: u32,
    device: Option<BlockDeviceInfo>,
) -> Result<BlockSize, SettingError> {
    if let Some(block) = config.block {
        return Ok(block);
    }
    let own = unit.max(device.map_or(0, |device| device.logical_block)).max(BlockSize::B512.bytes());
    if own > BlockSize::B512.bytes() {
        let size = host::size(file, kind).unwrap_or(ByteLen::ZERO);
        let is_regular = kind == FileKind::Regular;
        let is_odd = size.is_aligned(BlockSize::B512) && !size.0.is_multiple_of(own.into());
        let find = move |file: &File| format::has_table_of_512(file, size);
        if (is_regular && is_odd) || read_in_time(settings, config, file, find) == Some(true) {
            return Ok(BlockSize::B512);
        }
    }
    BlockSize::new(own).ok_or_else(|| {
        let found = describe(&config.path, format!("logical blocks of {own} bytes"));
        settings.refused("path", found, "storage with logical blocks of at most 65536 bytes")
    })
}

/// Returns true if a write of the last unit of its direct I/O would extend a file, and blocks of 512 bytes are
/// possible.
fn ends_within_unit(config: &FileSettings, file: &File, kind: FileKind, device: Option<BlockDeviceInfo>) -> bool {
    let unit = u64::from(alignment(file, device).offset);
    let size = host::size(file, kind).unwrap_or(ByteLen::ZERO);
    let may_have_512 = config.block.is_none_or(|block| block == BlockSize::B512) && size.is_aligned(BlockSize::B512);
    kind == FileKind::Regular && may_have_512 && !size.0.is_multiple_of(unit)
}

/// Returns the device of a file: itself, or the one below its file system.
fn device_of(file: &File, kind: FileKind) -> Option<BlockDeviceInfo> {
    let number = file.metadata().map(|data| match kind {
        FileKind::BlockDevice => data.rdev(),
        _ => data.dev(),
    });
    number.ok().and_then(host::block_device_info)
}

fn size(
    settings: &Settings,
    config: &FileSettings,
    file: &File,
    kind: FileKind,
    block: BlockSize,
) -> Result<ByteLen, SettingError> {
    let unknown = |error| settings.refused("path", describe(&config.path, error), "storage that tells its size");
    let size = host::size(file, kind).map_err(unknown)?;
    if size != ByteLen::ZERO && size.is_aligned(block) {
        return Ok(size);
    }
    let found = format!("{} bytes in {:?}", size.0, config.path);
    let whole_sectors = size != ByteLen::ZERO && size.is_aligned(BlockSize::B512);
    let smaller = kind != FileKind::BlockDevice && block != BlockSize::B512 && whole_sectors;
    let alternative = if smaller { " (block-size=512 direct=off takes any multiple of 512)" } else { "" };
    Err(settings.refused("path", found, format!("a multiple of block-size {} above 0{alternative}", block.bytes())))
}

fn geometry(
    size: ByteLen,
    (block, least_physical): (BlockSize, BlockSize),
    read_only: bool,
    kind: FileKind,
    device: BlockDeviceInfo,
) -> Geometry {
    let physical = BlockSize::new(device.physical_block).unwrap_or(block).max(least_physical);
    // A file system aligns a file's blocks; only a device's own offsets are the disk's.
    let shift = if kind == FileKind::BlockDevice { device.alignment_offset } else { 0 };
    Geometry {
        size,
        logical_block: block,
        physical_block: physical,
        alignment_offset: u8::try_from(shift / block.bytes()).unwrap_or(0),
        min_io: ByteLen(u64::from(device.min_io)),
        opt_io: ByteLen(u64::from(device.opt_io)),
        read_only,
    }
}

/// Returns the granularity of discards in bytes; `None` when the storage cannot discard.
fn discard_granularity(file: &File, kind: FileKind, size: ByteLen, device: Option<BlockDeviceInfo>) -> Option<ByteLen> {
    if kind == FileKind::BlockDevice {
        let device = device?;
        let able = device.discard_max_bytes > 0;
        return able.then_some(ByteLen(u64::from(device.discard_granularity.max(device.logical_block))));
    }
    // Probed past the end, where nothing is stored.
    let unit = rustix::fs::fstat(file).map_or(4096, |stat| u64::try_from(stat.st_blksize).unwrap_or(4096));
    let probe = rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, size.0, unit);
    probe.is_ok().then_some(ByteLen(unit))
}

#[cfg(test)]
mod tests;
