//! A FUSE file system whose files are disks: it records the writes and flushes of a daemon in a log.
//!
//! `RWF_DSYNC` arrives as a flag of the write, `fdatasync` as a request. Needs root and /dev/fuse.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, Session, WriteFlags,
};
use tempfile::TempDir;

use super::log::{PowerLog, SECTOR};

/// Validity of replies that never change.
const FOREVER: Duration = Duration::from_secs(3600);
/// Inode of the first volume: 1 is the directory.
const FIRST: u64 = 2;
const O_DSYNC: i32 = 0o10000;
const ENOTCONN: i32 = 107;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 0x10;

/// Prefix of the mount points' names.
const PREFIX: &str = "mqblk-power-";

/// A mounted directory of disks; unmounted when dropped.
#[derive(Debug)]
pub struct PowerMount {
    // Dropped before the directory is removed.
    session: Option<BackgroundSession>,
    folder: TempDir,
    gate: Arc<IoGate>,
}

struct Disks {
    volumes: Arc<Volumes>,
    gate: Arc<IoGate>,
    /// True: direct I/O continues after the death of the process that requested it, like that of a block device.
    outlives: bool,
}

struct Volumes {
    log: Arc<PowerLog>,
    disks: Vec<(String, Mutex<Vec<u8>>)>,
    /// Writes to this volume are recorded as marks.
    marks: usize,
}

/// Holds reads and writes back.
#[derive(Default)]
struct IoGate {
    state: Mutex<GateState>,
}

#[derive(Default)]
struct GateState {
    shut: bool,
    held: Vec<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for IoGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}

impl IoGate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` now, or when held requests are released.
    fn run_or_hold(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        if state.shut {
            return state.held.push(Box::new(work));
        }
        drop(state);
        work();
    }
}

impl PowerMount {
    /// Mounts disks of these names and sizes, all zeroes. The last one is for marks: each write to it is recorded as
    /// the text up to its first line end, and not stored.
    ///
    /// # Errors
    /// When the system refuses: it needs root and /dev/fuse.
    pub fn new(log: &Arc<PowerLog>, disks: &[(&str, usize)]) -> Result<PowerMount> {
        PowerMount::mount(log, disks, false)
    }

    /// Mounts disks whose direct I/O continues after the process that requested it was killed, like that of a block
    /// device, and can be [held](Self::hold).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_surviving_io(log: &Arc<PowerLog>, disks: &[(&str, usize)]) -> Result<PowerMount> {
        PowerMount::mount(log, disks, true)
    }

    fn mount(log: &Arc<PowerLog>, disks: &[(&str, usize)], outlives: bool) -> Result<PowerMount> {
        remove_dead_mounts();
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        let all = disks.iter().map(|(name, size)| ((*name).to_owned(), Mutex::new(vec![0; *size]))).collect();
        let volumes = Arc::new(Volumes { log: Arc::clone(log), disks: all, marks: disks.len() - 1 });
        let gate = Arc::<IoGate>::default();
        let disks = Disks { volumes, gate: Arc::clone(&gate), outlives };
        let mut config = Config::default();
        config.n_threads = Some(2);
        let session = Session::new(disks, folder.path(), &config).context("mounting needs root and /dev/fuse")?;
        Ok(PowerMount { session: Some(session.spawn()?), folder, gate })
    }

    /// Returns the file of a disk.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Holds reads and writes that arrive from now on, without effect.
    pub fn hold(&self) {
        self.gate.lock().shut = true;
    }

    /// Executes reads and writes that arrive from now on. Held ones stay held.
    pub fn stop_holding(&self) {
        self.gate.lock().shut = false;
    }

    /// Returns the number of held reads and writes.
    pub fn held(&self) -> usize {
        self.gate.lock().held.len()
    }

    /// Executes and completes the held reads and writes.
    pub fn release_held(&self) {
        let held = std::mem::take(&mut self.gate.lock().held);
        held.into_iter().for_each(|work| work());
    }

    /// Returns the mount point.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// Unmounts the mounts that killed test runs have left.
fn remove_dead_mounts() {
    let base = std::env::temp_dir();
    for entry in std::fs::read_dir(&base).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // ENOTCONN: the process of the FUSE file system has ended. Mounts of running tests return no error.
        let folder = entry.path();
        let dead = std::fs::metadata(&folder).is_err_and(|error| error.raw_os_error() == Some(ENOTCONN));
        if dead && Command::new("umount").arg("--lazy").arg(&folder).status().is_ok_and(|status| status.success()) {
            // A leftover empty directory does no harm.
            let _ = std::fs::remove_dir(&folder);
        }
    }
}

impl Drop for PowerMount {
    fn drop(&mut self) {
        self.stop_holding();
        self.release_held();
        // The next run unmounts it if this fails.
        let _ = self.session.take().map(BackgroundSession::umount_and_join);
    }
}

impl Volumes {
    fn index(&self, inode: INodeNo) -> Option<usize> {
        let index = inode.0.checked_sub(FIRST)? as usize;
        (index < self.disks.len()).then_some(index)
    }

    fn bytes(&self, index: usize) -> MutexGuard<'_, Vec<u8>> {
        self.disks[index].1.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self, inode: INodeNo) -> Option<FileAttr> {
        let (size, kind, perm) = match self.index(inode) {
            Some(index) => (self.bytes(index).len() as u64, FileType::RegularFile, 0o600),
            None if inode == INodeNo::ROOT => (0, FileType::Directory, 0o700),
            None => return None,
        };
        Some(FileAttr {
            ino: inode,
            size,
            blocks: size / SECTOR as u64,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn read(&self, inode: INodeNo, offset: usize, size: usize, reply: ReplyData) {
        let Some(index) = self.index(inode) else { return reply.error(Errno::ENOENT) };
        let bytes = self.bytes(index);
        let from = offset.min(bytes.len());
        let to = (from + size).min(bytes.len());
        reply.data(&bytes[from..to]);
    }

    fn write(&self, inode: INodeNo, offset: u64, data: Vec<u8>, durable: bool, reply: ReplyWrite) {
        let Some(index) = self.index(inode) else { return reply.error(Errno::ENOENT) };
        let written = data.len() as u32;
        if index == self.marks {
            let line = data.split(|byte| *byte == b'\n').next().unwrap_or_default();
            self.log.mark(String::from_utf8_lossy(line).trim_end());
            return reply.written(written);
        }
        let mut bytes = self.bytes(index);
        let Some(target) = bytes.get_mut(offset as usize..offset as usize + data.len()) else {
            return reply.error(Errno::EINVAL);
        };
        target.copy_from_slice(&data);
        // Recorded in the order in which the bytes change.
        let id = self.log.write(index, offset, data, durable);
        drop(bytes);
        self.log.complete(id);
        reply.written(written);
    }
}

impl Filesystem for Disks {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        if self.outlives && config.add_capabilities(InitFlags::FUSE_ASYNC_DIO).is_err() {
            return Err(std::io::Error::other("the kernel has no asynchronous direct transfers"));
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.volumes.disks.iter().position(|(known, _)| known.as_str() == name);
        match found.and_then(|index| self.volumes.attributes(INodeNo(FIRST + index as u64))) {
            Some(attributes) => reply.entry(&FOREVER, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.volumes.attributes(inode) {
            Some(attributes) => reply.attr(&FOREVER, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let volumes = Arc::clone(&self.volumes);
        self.gate.run_or_hold(move || volumes.read(inode, offset as usize, size as usize, reply));
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (volumes, data) = (Arc::clone(&self.volumes), data.to_vec());
        let durable = flags.0 & O_DSYNC != 0;
        self.gate.run_or_hold(move || volumes.write(inode, offset, data, durable, reply));
    }

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let Some(index) = self.volumes.index(inode) else { return reply.error(Errno::ENOENT) };
        let id = self.volumes.log.flush(index);
        self.volumes.log.complete(id);
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        inode: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(index) = self.volumes.index(inode) else { return reply.error(Errno::ENOENT) };
        if mode & (PUNCH_HOLE | ZERO_RANGE) == 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let mut bytes = self.volumes.bytes(index);
        let Some(target) = bytes.get_mut(offset as usize..(offset + length) as usize) else {
            return reply.error(Errno::EINVAL);
        };
        target.fill(0);
        let id = self.volumes.log.zeroes(index, offset, length, false);
        drop(bytes);
        self.volumes.log.complete(id);
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // close() guarantees nothing.
        reply.ok();
    }
}
