//! A file system that can hang: a FUSE server with one file. While it hangs, it executes no read and no write, and
//! answers none.

use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyWrite, Request,
    WriteFlags,
};
use tempfile::TempDir;

/// Time for which the kernel may keep attributes.
const TTL: Duration = Duration::from_secs(3600);
const FILE: INodeNo = INodeNo(2);
const NAME: &str = "file";

/// The file, and its unanswered requests.
#[derive(Default)]
struct State {
    content: Vec<u8>,
    hangs: bool,
    reads: Vec<(ReplyData, u64, u32)>,
    writes: Vec<(ReplyWrite, u64, Vec<u8>)>,
    syncs: Vec<ReplyEmpty>,
}

impl State {
    /// Writes to the file. Returns the number of bytes.
    fn write(&mut self, at: u64, data: &[u8]) -> u32 {
        let from = (at as usize).min(self.content.len());
        let len = data.len().min(self.content.len() - from);
        self.content[from..from + len].copy_from_slice(&data[..len]);
        len as u32
    }

    /// Returns the part of the file at `at`.
    fn part(&self, at: u64, len: u32) -> &[u8] {
        let from = (at as usize).min(self.content.len());
        &self.content[from..(from + len as usize).min(self.content.len())]
    }
}

struct Server(Arc<Mutex<State>>);

impl Server {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let is_file = ino == FILE;
        let size = if is_file { self.lock().content.len() as u64 } else { 0 };
        FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_file { FileType::RegularFile } else { FileType::Directory },
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        }
    }
}

impl Filesystem for Server {
    /// Otherwise the direct I/O of a loop device waits for other requests.
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let added = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        added.map_err(|missing| io::Error::other(format!("the kernel has no {missing:?}")))
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some(NAME) => reply.entry(&TTL, &self.attributes(FILE), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attributes(ino));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        at: u64,
        len: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = self.lock();
        if state.hangs {
            state.reads.push((reply, at, len));
        } else {
            reply.data(state.part(at, len));
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        at: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.lock();
        if state.hangs {
            state.writes.push((reply, at, data.to_owned()));
        } else {
            reply.written(state.write(at, data));
        }
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = self.lock();
        if state.hangs {
            state.syncs.push(reply);
        } else {
            reply.ok();
        }
    }
}

/// A file that hangs. It recovers when this is dropped: waiting requests are executed then, the writes first.
pub struct Hanging<'a>(&'a HangingFile);

impl Hanging<'_> {
    /// Answers new requests from now on. Waiting requests go on waiting.
    pub fn answer_new(&self) {
        self.0.lock().hangs = false;
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        self.0.recover();
    }
}

/// A mounted file system with one file. It is unmounted when dropped.
pub struct HangingFile {
    state: Arc<Mutex<State>>,
    session: Option<BackgroundSession>,
    folder: TempDir,
}

impl HangingFile {
    /// Mounts it. The file has `len` bytes, all zero.
    ///
    /// # Panics
    /// When FUSE cannot be mounted: that needs root and `/dev/fuse`.
    pub fn mount(len: usize) -> HangingFile {
        let state = Arc::new(Mutex::new(State { content: vec![0; len], ..State::default() }));
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("hanging".to_owned())];
        let mounted = fuser::spawn_mount(Server(Arc::clone(&state)), folder.path(), &config);
        let session = Some(mounted.expect("FUSE can be mounted: this test needs root and /dev/fuse"));
        HangingFile { state, session, folder }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join(NAME)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the server answer nothing, at most until the result is dropped: a process that waits for an answer cannot
    /// be killed.
    pub fn hang(&self) -> Hanging<'_> {
        self.lock().hangs = true;
        Hanging(self)
    }

    /// Returns the number of unanswered requests.
    pub fn waiting(&self) -> usize {
        let state = self.lock();
        state.reads.len() + state.writes.len() + state.syncs.len()
    }

    /// Answers all waiting requests, and all new ones from now on.
    fn recover(&self) {
        let mut state = self.lock();
        state.hangs = false;
        let (reads, writes, syncs) =
            (std::mem::take(&mut state.reads), std::mem::take(&mut state.writes), std::mem::take(&mut state.syncs));
        writes.into_iter().for_each(|(reply, at, data)| reply.written(state.write(at, &data)));
        reads.into_iter().for_each(|(reply, at, len)| reply.data(state.part(at, len)));
        syncs.into_iter().for_each(ReplyEmpty::ok);
    }
}

impl Drop for HangingFile {
    fn drop(&mut self) {
        self.recover();
        if let Some(session) = self.session.take() {
            // A failed daemon may still have the file open.
            let _ = session.umount_and_join();
        }
    }
}
