//! Path of task management functions to the request queues. Each running request queue processes a function on its own
//! worker: it aborts matching commands, and reports when their completions are visible to the driver. The function is
//! done with the last report, which wakes its sender.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;
use mqblk_core::{DiskSlot, Wake};

/// The commands of a task management function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TmfScope {
    /// The command with this identifier, of the logical unit.
    Task {
        /// The logical unit.
        unit: DiskSlot,
        /// The driver's identifier of the command.
        id: u64,
    },
    /// All commands of a logical unit.
    LogicalUnit(DiskSlot),
    /// All commands of a target.
    Target(u8),
}

/// The action of a task management function on matching commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TmfAction {
    /// Aborts them; they complete with this response code.
    Abort(u8),
    /// Queries their existence.
    Query,
}

/// A task management function.
pub(crate) struct TaskManagement {
    /// Its commands.
    pub scope: TmfScope,
    /// Its action.
    pub action: TmfAction,
    /// True if a command matched.
    matched: AtomicBool,
    /// Number of queues that have not reported, plus one for the sender while it submits.
    pending: AtomicUsize,
    waker: Arc<dyn Wake>,
}

impl TaskManagement {
    /// Returns true if it applies to this command.
    pub(crate) fn matches(&self, target: u8, unit: DiskSlot, id: u64) -> bool {
        match self.scope {
            TmfScope::Task { unit: of, id: named } => of == unit && named == id,
            TmfScope::LogicalUnit(of) => of == unit,
            TmfScope::Target(of) => of == target,
        }
    }

    /// Records that a command matched.
    pub(crate) fn record_match(&self) {
        self.matched.store(true, Ordering::Relaxed);
    }

    /// Returns true if a command matched. Final when the function is done.
    pub(crate) fn has_matched(&self) -> bool {
        self.matched.load(Ordering::Relaxed)
    }

    /// Returns true if all queues have reported.
    pub(crate) fn is_done(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Reports that a queue has no matching command left and that its completions are visible.
    pub(crate) fn queue_done(&self) {
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.waker.wake();
        }
    }
}

/// A request queue's mailbox for task management functions.
pub(crate) struct TmfMailbox {
    functions: Mutex<Vec<Arc<TaskManagement>>>,
    waker: Arc<dyn Wake>,
}

impl TmfMailbox {
    /// Removes and returns the functions received, at most `max`.
    pub(crate) fn take(&self, max: usize) -> Vec<Arc<TaskManagement>> {
        let mut orders = lock(&self.functions);
        let count = orders.len().min(max);
        orders.drain(..count).collect()
    }
}

/// Mailboxes of all request queues that are running.
#[derive(Default)]
pub(crate) struct TmfMailboxes(Mutex<Vec<Arc<TmfMailbox>>>);

impl TmfMailboxes {
    /// Adds the mailbox of a queue that starts.
    pub(crate) fn open(&self, waker: Arc<dyn Wake>) -> Arc<TmfMailbox> {
        let post = Arc::new(TmfMailbox { functions: Mutex::default(), waker });
        lock(&self.0).push(Arc::clone(&post));
        post
    }

    /// Removes the mailbox of a queue that stops. The queue has no commands, so pending functions need not wait for
    /// it.
    pub(crate) fn close(&self, post: &Arc<TmfMailbox>) {
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, post));
        for tmf in post.take(usize::MAX) {
            tmf.queue_done();
        }
    }

    /// Wakes all request queues.
    pub(crate) fn wake_all(&self) {
        lock(&self.0).iter().for_each(|post| post.waker.wake());
    }

    /// Submits a function to all request queues. `waker` is woken when it is done, perhaps before this returns.
    pub(crate) fn submit(&self, scope: TmfScope, action: TmfAction, waker: Arc<dyn Wake>) -> Arc<TaskManagement> {
        let (matched, pending) = (AtomicBool::new(false), AtomicUsize::new(1));
        let tmf = Arc::new(TaskManagement { scope, action, matched, pending, waker });
        for post in &*lock(&self.0) {
            tmf.pending.fetch_add(1, Ordering::Relaxed);
            lock(&post.functions).push(Arc::clone(&tmf));
            post.waker.wake();
        }
        tmf.queue_done();
        tmf
    }
}

/// Waker of the thread that created it.
struct UnparkWaker(std::thread::Thread);

impl Wake for UnparkWaker {
    fn wake(&self) {
        self.0.unpark();
    }
}

impl TmfMailboxes {
    /// Submits a function and waits until it is done. For control threads.
    pub(crate) fn submit_and_wait(&self, scope: TmfScope, action: TmfAction) {
        let tmf = self.submit(scope, action, Arc::new(UnparkWaker(std::thread::current())));
        while !tmf.is_done() {
            std::thread::park();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Wake for Counting {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn done_with_the_last_report_or_the_end_of_the_queue() {
        let posts = TmfMailboxes::default();
        let given = Arc::new(Counting::default());
        let alone = posts.submit(TmfScope::Target(1), TmfAction::Query, Arc::clone(&given) as Arc<dyn Wake>);
        assert!(alone.is_done(), "no queue to wait for");
        assert_eq!(given.0.load(Ordering::Relaxed), 1);

        let queue = Arc::new(Counting::default());
        let (one, other) = (posts.open(Arc::clone(&queue) as _), posts.open(Arc::clone(&queue) as _));
        let tmf = posts.submit(TmfScope::LogicalUnit(DiskSlot(3)), TmfAction::Abort(2), Arc::clone(&given) as _);
        assert_eq!((tmf.is_done(), queue.0.load(Ordering::Relaxed)), (false, 2));
        let taken = one.take(16);
        assert!(Arc::ptr_eq(&taken[0], &tmf) && one.take(16).is_empty());
        tmf.queue_done();
        assert!(!tmf.is_done());
        posts.close(&other);
        assert!(tmf.is_done());
        assert_eq!(given.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn scopes_match_their_commands() {
        let posts = TmfMailboxes::default();
        let silent = || Arc::new(Counting::default()) as Arc<dyn Wake>;
        let slot = DiskSlot(4);
        let task = posts.submit(TmfScope::Task { unit: slot, id: 9 }, TmfAction::Query, silent());
        assert!(task.matches(0, slot, 9) && !task.matches(0, slot, 8) && !task.matches(0, DiskSlot(5), 9));
        let unit = posts.submit(TmfScope::LogicalUnit(slot), TmfAction::Query, silent());
        assert!(unit.matches(0, slot, 8) && !unit.matches(0, DiskSlot(5), 8));
        let target = posts.submit(TmfScope::Target(2), TmfAction::Query, silent());
        assert!(target.matches(2, DiskSlot(9), 1) && !target.matches(3, DiskSlot(9), 1));
    }
}
