//! A file system in user space whose files are disks: what a daemon asks of the kernel comes here and is noted in a log.
//!
//! `RWF_DSYNC` arrives as a flag of the write, `fdatasync` as a request of its own. Needs root and /dev/fuse.

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

/// Constant answers may be kept for as long.
const FOREVER: Duration = Duration::from_secs(3600);
/// The first volume's inode: 1 is the folder.
const FIRST: u64 = 2;
const O_DSYNC: i32 = 0o10000;
const ENOTCONN: i32 = 107;
const PUNCH_HOLE: i32 = 2;
const ZERO_RANGE: i32 = 0x10;

/// How the mounted folders' names begin.
const PREFIX: &str = "mqblk-power-";

/// A mounted folder of disks; unmounted when dropped.
#[derive(Debug)]
pub struct PowerMount {
    // Before its folder is removed.
    session: Option<BackgroundSession>,
    folder: TempDir,
    gate: Arc<Gate>,
}

struct Disks {
    volumes: Arc<Volumes>,
    gate: Arc<Gate>,
    /// Direct transfers go on when whoever asked for them has gone, as those of a block device do.
    outlives: bool,
}

struct Volumes {
    log: Arc<PowerLog>,
    disks: Vec<(String, Mutex<Vec<u8>>)>,
    /// Writes to this one are marks.
    marks: usize,
}

/// Holds reads and writes back.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
}

#[derive(Default)]
struct GateState {
    shut: bool,
    held: Vec<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something now, or when what is held is let go.
    fn pass(&self, work: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        if state.shut {
            return state.held.push(Box::new(work));
        }
        drop(state);
        work();
    }
}

impl PowerMount {
    /// Mounts disks of these names and sizes, all zeroes. The last of them is for marks: each write to it is noted as the text up
    /// to its first line end, and kept nowhere.
    ///
    /// # Errors
    /// When the system refuses: it needs root and /dev/fuse.
    pub fn new(log: &Arc<PowerLog>, disks: &[(&str, usize)]) -> Result<PowerMount> {
        PowerMount::mount(log, disks, false)
    }

    /// The same, of disks whose direct transfers go on when the process that asked for them was killed, as those of a block device
    /// do, and can be [held](Self::hold).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn that_outlives(log: &Arc<PowerLog>, disks: &[(&str, usize)]) -> Result<PowerMount> {
        PowerMount::mount(log, disks, true)
    }

    fn mount(log: &Arc<PowerLog>, disks: &[(&str, usize)], outlives: bool) -> Result<PowerMount> {
        remove_dead_mounts();
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        let all = disks.iter().map(|(name, size)| ((*name).to_owned(), Mutex::new(vec![0; *size]))).collect();
        let volumes = Arc::new(Volumes { log: Arc::clone(log), disks: all, marks: disks.len() - 1 });
        let gate = Arc::<Gate>::default();
        let disks = Disks { volumes, gate: Arc::clone(&gate), outlives };
        let mut config = Config::default();
        config.n_threads = Some(2);
        let session = Session::new(disks, folder.path(), &config).context("mounting needs root and /dev/fuse")?;
        Ok(PowerMount { session: Some(session.spawn()?), folder, gate })
    }

    /// The file of a disk.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Reads and writes that come from here on are held back, without effect.
    pub fn hold(&self) {
        self.gate.lock().shut = true;
    }

    /// Those that come from here on are not; what is held stays so.
    pub fn let_others_pass(&self) {
        self.gate.lock().shut = false;
    }

    /// Reads and writes that are held.
    pub fn held(&self) -> usize {
        self.gate.lock().held.len()
    }

    /// They take effect, and end.
    pub fn let_go(&self) {
        let held = std::mem::take(&mut self.gate.lock().held);
        held.into_iter().for_each(|work| work());
    }

    /// Where it is mounted.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// Unmounts what test runs that were killed have left mounted.
fn remove_dead_mounts() {
    let base = std::env::temp_dir();
    for entry in std::fs::read_dir(&base).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        // The kernel's answer for a file system in user space whose process has ended; that of another run answers well.
        let folder = entry.path();
        let dead = std::fs::metadata(&folder).is_err_and(|error| error.raw_os_error() == Some(ENOTCONN));
        if dead && Command::new("umount").arg("--lazy").arg(&folder).status().is_ok_and(|status| status.success()) {
            // An empty folder of a dead run hurts nobody.
            let _ = std::fs::remove_dir(&folder);
        }
    }
}

impl Drop for PowerMount {
    fn drop(&mut self) {
        self.let_others_pass();
        self.let_go();
        // What stays mounted in spite of this is unmounted by the next run.
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
        // In the log in the order in which the bytes change.
        let id = self.log.write(index, offset, data, durable);
        drop(bytes);
        self.log.answer(id);
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
        self.gate.pass(move || volumes.read(inode, offset as usize, size as usize, reply));
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
        self.gate.pass(move || volumes.write(inode, offset, data, durable, reply));
    }

    fn fsync(&self, _: &Request, inode: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let Some(index) = self.volumes.index(inode) else { return reply.error(Errno::ENOENT) };
        let id = self.volumes.log.flush(index);
        self.volumes.log.answer(id);
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
        self.volumes.log.answer(id);
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Closing a file descriptor promises nothing.
        reply.ok();
    }
}
