//! A worker's io_uring and buffer pool, and the one place where a worker waits.

use std::io;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, squeue, types};
use mqblk_memory::BufferPool;

use crate::completion::{ClientId, CompletionQueue, IGNORED, IoCompletion, PORT};
use crate::inflight::InFlight;
use crate::maker::{NewRing, RingUse, make};
use crate::remote::PortReceiver;
use crate::tables::{Tables, with_memlock};

/// The sizes of a context's tables.
#[derive(Clone, Copy, Debug)]
pub struct UringOptions {
    /// Submission queue entries: how many operations one system call can submit.
    pub submissions: u32,
    /// Most operations in flight; the completion queue has as many entries. As many may wait in kernel threads
    /// (io-wq), which all files of the ring share: with the kernel's limit of four for each CPU a few requests to
    /// hanging storage would block all flushes of the other disks.
    pub in_flight: u32,
    /// Registered files.
    pub files: u32,
    /// Registered buffers, of at most 1 GiB each.
    pub buffers: u32,
}

impl Default for UringOptions {
    fn default() -> Self {
        UringOptions { submissions: 256, in_flight: 4096, files: 1024, buffers: 1024 }
    }
}

/// Longest wait of [`UringContext::turn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// None; and no system call when nothing is to be submitted or pending in the kernel.
    No,
    /// Until a completion arrives.
    Completion,
    /// Until a completion arrives or this time has passed.
    AtMost(Duration),
}

/// A worker's I/O context, lent to its queues and channels: one io_uring and one buffer pool, both used by one thread
/// only.
pub struct UringContext {
    /// The worker's buffers.
    pub buffers: BufferPool,
    pub(crate) ring: IoUring<squeue::Entry, cqueue::Entry>,
    pub(crate) in_flight: InFlight,
    pub(crate) tables: Tables,
    pub(crate) scratch: Vec<libc::iovec>,
    /// Receives completions and wakeups from other threads.
    pub(crate) port: PortReceiver,
    /// Operations in flight whose owner has ended.
    orphans: usize,
    /// True if the next turn must poll the port again or release what orphans leave.
    chores: bool,
    queues: Vec<CompletionQueue>,
    /// Completions in all completion queues.
    unread: usize,
    /// Entries pushed since the last system call.
    unsubmitted: usize,
    /// True if the next turn has work independent of the kernel's completions: chores, operations to submit or that
    /// were submitted meanwhile, completions that had no place in the queue, leases to release.
    pub(crate) due: bool,
    deferred: bool,
}

/// Memlock limit used by a ring, in KiB: measured on Linux 6.18, rounded up.
const MEMLOCK_KIB: u32 = 128;

/// Longest wait of a dropped context for operations in flight.
const DROP_TIMEOUT: Duration = if cfg!(test) { Duration::from_secs(2) } else { Duration::from_secs(10) };

/// Receives the completions of operations whose owner has ended: the first client of each context.
const ORPHANS: ClientId = ClientId(0);

impl mqblk_core::IoContext for UringContext {
    type Buffer = mqblk_memory::Buffer;
}

impl UringContext {
    /// Sets up a context. Must be called on the thread that will use it.
    ///
    /// # Errors
    /// When the kernel has no io_uring or refuses its memory.
    pub fn new(options: UringOptions) -> io::Result<UringContext> {
        let UringOptions { submissions, in_flight, .. } = options;
        let NewRing { ring, is_deferred: deferred } = make(RingUse::Io { submissions, in_flight }).map_err(refused)?;
        let files = options.files.min(file_limit());
        let free_files = match ring.submitter().register_files_sparse(files) {
            Ok(()) => (0..files).rev().collect(),
            Err(_) => Vec::new(),
        };
        let buffers = match ring.submitter().register_buffers_sparse(options.buffers) {
            Ok(()) => vec![false; options.buffers as usize],
            Err(_) => Vec::new(),
        };
        let mut context = UringContext {
            buffers: BufferPool::new(),
            ring,
            in_flight: InFlight::new(options.in_flight),
            tables: Tables { free_files, buffers, ..Tables::default() },
            scratch: Vec::with_capacity(64),
            port: PortReceiver::new()?,
            orphans: 0,
            chores: false,
            queues: Vec::new(),
            unread: 0,
            unsubmitted: 0,
            due: false,
            deferred,
        };
        let orphans = context.add_client();
        debug_assert_eq!(orphans, ORPHANS);
        Ok(context)
    }

    /// Adds a client with a completion queue of its own.
    pub fn add_client(&mut self) -> ClientId {
        let index = self.queues.iter().position(|mailbox| !mailbox.used).unwrap_or_else(|| {
            self.queues.push(CompletionQueue::new());
            self.queues.len() - 1
        });
        self.queues[index].used = true;
        ClientId(index as u32)
    }

    /// Removes a client. Its operations in flight (a receive that waits for a peer) are cancelled, and their buffers
    /// are released when they have ended.
    pub fn remove_client(&mut self, owner: ClientId) {
        for index in self.in_flight.pick(owner, |_| true) {
            self.in_flight.slot(index).owner = ORPHANS;
            self.orphans += 1;
            (self.chores, self.due) = (true, true);
            let entry = io_uring::opcode::AsyncCancel::new(u64::from(index)).build().user_data(IGNORED);
            self.push_raw(entry);
        }
        let mailbox = &mut self.queues[owner.0 as usize];
        mailbox.used = false;
        mailbox.generation = mailbox.generation.wrapping_add(1);
        while let Some(message) = mailbox.completions.pop_front() {
            self.unread -= 1;
            for buffer in [message.buffer, message.header].into_iter().flatten() {
                self.buffers.release(buffer);
            }
        }
    }

    /// Closes the registered files. Without it the kernel closes them some time after the ring, and whoever waited for
    /// this process to end cannot remove a block device that it had claimed.
    fn close_files(&mut self) {
        self.turn(Wait::No);
        // The kernel waits for operations on them, and a hung one would hold the end of this process.
        if self.in_flight.busy() == 0 {
            // Fails if no table was registered.
            let _ = self.ring.submitter().unregister_files();
        }
    }

    fn do_chores(&mut self) {
        if self.port.lapsed {
            self.poll_port();
        }
        while let Some(message) = self.next(ORPHANS) {
            self.orphans -= usize::from(!message.more);
            for buffer in [message.buffer, message.header].into_iter().flatten() {
                self.buffers.release(buffer);
            }
        }
        self.chores = self.orphans > 0;
    }

    pub(crate) fn client_generation(&self, client: ClientId) -> u32 {
        self.queues[client.0 as usize].generation
    }

    /// Takes the next completion from a client's queue.
    #[inline]
    pub fn next(&mut self, owner: ClientId) -> Option<IoCompletion> {
        let message = self.queues[owner.0 as usize].completions.pop_front()?;
        self.unread -= 1;
        Some(message)
    }

    /// Returns true if a client has completions to take.
    #[inline]
    pub fn has_completions(&self, owner: ClientId) -> bool {
        !self.queues[owner.0 as usize].completions.is_empty()
    }

    /// Returns true if any client has completions to take.
    #[inline]
    pub fn has_unread(&self) -> bool {
        self.unread > 0
    }

    /// Returns the number of completions still to be taken by all clients but this one.
    #[inline]
    pub fn unread_besides(&self, owner: ClientId) -> usize {
        self.unread - self.queues[owner.0 as usize].completions.len()
    }

    /// Returns the number of operations that can still be submitted.
    #[inline]
    pub fn room(&self) -> usize {
        self.in_flight.room()
    }

    /// Returns the most operations in flight.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.in_flight.capacity()
    }

    /// Returns the number of operations in flight.
    pub fn busy(&self) -> usize {
        self.in_flight.busy()
    }

    #[inline]
    pub(crate) fn push(&mut self, entry: squeue::Entry, slot: u32) {
        self.push_raw(entry.user_data(u64::from(slot)));
    }

    #[inline]
    pub(crate) fn push_raw(&mut self, entry: squeue::Entry) {
        // SAFETY: the entry's pointers lie in memory that the in-flight slot owns until the completion.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            // The queue is full: submit it. An error leaves the entries queued; EBUSY asks for completions to be taken
            // first, which frees entries of the completion queue.
            let _ = self.ring.submit();
            self.sort_completions();
        }
        self.unsubmitted += 1;
        self.due = true;
    }

    /// Submits the pushed operations now and takes no completions, so that storage starts while more is being pushed.
    /// Most operations can wait for [`turn`](Self::turn).
    #[inline]
    pub fn submit(&mut self) {
        // An error leaves the entries queued for the next call.
        if self.unsubmitted > 0 && self.ring.submit().is_ok() {
            self.unsubmitted = 0;
        }
    }

    /// Submits the pushed operations, waits, and sorts completions into their clients' queues. Returns how many
    /// arrived. At most one system call, none when there is nothing to do.
    ///
    /// Does not wait while a queue holds completions: no more may be coming.
    #[inline]
    pub fn turn(&mut self, wait: Wait) -> usize {
        if wait == Wait::No && self.has_nothing_to_do() { 0 } else { self.busy_turn(wait) }
    }

    /// Returns true if nothing is to be submitted or done, and no completion is queued or pending in the kernel.
    #[inline]
    fn has_nothing_to_do(&mut self) -> bool {
        if self.due {
            return false;
        }
        // A deferred ring receives completions only in system calls, so its completion queue overflows only there.
        // After those of this context a turn is due.
        if self.deferred { !self.ring.submission().taskrun() } else { self.ring.completion().is_empty() }
    }

    #[inline(never)]
    fn busy_turn(&mut self, wait: Wait) -> usize {
        if self.chores {
            self.do_chores();
        }
        let wait = if self.unread > 0 { Wait::No } else { wait };
        let pending = self.deferred && self.needs_enter();
        let outcome = match wait {
            Wait::No if self.unsubmitted == 0 && !pending => Ok(0),
            Wait::No => self.enter_without_waiting(),
            Wait::Completion => self.ring.submit_and_wait(1),
            Wait::AtMost(time) => {
                let time = types::Timespec::from(time);
                self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&time))
            }
        };
        // After ETIME, EINTR, EBUSY and EAGAIN the completions are taken and the next turn tries again.
        if outcome.is_ok() || self.ring.submission().is_empty() {
            self.unsubmitted = 0;
        }
        if !self.tables.leaving.is_empty() {
            self.sweep_leases();
        }
        let count = self.sort_completions();
        let overflown = self.deferred && self.ring.submission().cq_overflow();
        self.due = self.chores || self.unsubmitted > 0 || !self.tables.leaving.is_empty() || overflown;
        count
    }

    /// Returns true if the kernel holds completions that only a system call delivers.
    #[inline]
    fn needs_enter(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.taskrun() || queue.cq_overflow()
    }

    fn enter_without_waiting(&mut self) -> io::Result<usize> {
        const GETEVENTS: u32 = 1;
        let count = self.ring.submission().len() as u32;
        // SAFETY: no argument block is passed; entries were pushed under the contract of `push_raw`.
        unsafe { self.ring.submitter().enter::<libc::sigset_t>(count, 0, GETEVENTS, None) }
    }

    fn sort_completions(&mut self) -> usize {
        let mut count = 0;
        for entry in self.ring.completion() {
            if entry.user_data() >= PORT {
                if entry.user_data() != IGNORED {
                    let more = cqueue::more(entry.flags());
                    count += self.port.receive(more, &mut self.in_flight, &mut self.queues);
                    self.chores |= !more;
                }
                continue;
            }
            let index = entry.user_data() as u32;
            let more = cqueue::more(entry.flags());
            let slot = self.in_flight.slot(index);
            let (owner, cookie) = (slot.owner, slot.cookie);
            let buffer = if more { None } else { slot.buffer.take() };
            let header = if more { None } else { self.in_flight.release(index) };
            let message = IoCompletion { cookie, result: entry.result(), buffer, header, more };
            self.queues[owner.0 as usize].completions.push_back(message);
            count += 1;
        }
        self.unread += count;
        count
    }
}

impl Drop for UringContext {
    fn drop(&mut self) {
        let entry = io_uring::opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(IGNORED);
        if self.in_flight.busy() > 0 {
            self.push_raw(entry);
        }
        let deadline = Instant::now() + DROP_TIMEOUT;
        while self.in_flight.holds_buffers() && Instant::now() < deadline {
            self.turn(Wait::AtMost(Duration::from_millis(100)));
        }
        if self.in_flight.holds_buffers() {
            tracing::error!(
                in_flight = self.in_flight.busy(),
                "storage does not answer: its buffers are kept for ever"
            );
            std::mem::forget(std::mem::take(&mut self.buffers));
            std::mem::forget(std::mem::take(&mut self.in_flight));
        } else {
            self.close_files();
        }
    }
}

/// Returns the most files that may be registered: the process' descriptor limit.
fn file_limit() -> u32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::from(u32::MAX));
    u32::try_from(limit).unwrap_or(u32::MAX)
}

/// Adds a remedy to the error of a ring that the kernel refused.
fn refused(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::ENOSYS) => io::Error::new(
            error.kind(),
            format!(
                "io_uring: {error}: expected a host that allows it (sysctl kernel.io_uring_disabled=0, and no seccomp filter in its way)"
            ),
        ),
        _ => with_memlock(error, &format!("{MEMLOCK_KIB} KiB for each worker of this user")),
    }
}

#[cfg(test)]
mod tests;
