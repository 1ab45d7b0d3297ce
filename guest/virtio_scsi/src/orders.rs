//! Path of task management functions to the request queues. Each request queue that is running processes a function
//! on its own worker: it aborts the commands that match, and reports when their completions are visible to the
//! driver. The function is done with the last report, which wakes its sender.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::{DiskSlot, Wake};

/// Commands that a task management function applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The command with this identifier, of the logical unit.
    Task {
        /// The logical unit.
        unit: DiskSlot,
        /// The driver's identifier of the command.
        id: u64,
    },
    /// All commands of a logical unit.
    Unit(DiskSlot),
    /// All commands of a target.
    Target(u8),
}

/// What a task management function does with commands that match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Aborts them; they complete with this response code.
    End(u8),
    /// Queries whether there are any.
    Query,
}

/// A task management function.
pub struct Order {
    /// Commands that it applies to.
    pub scope: Scope,
    /// What it does with them.
    pub action: Action,
    /// A command matched.
    matched: AtomicBool,
    /// Number of queues that have not reported, plus one for the sender while it submits.
    pending: AtomicUsize,
    waker: Arc<dyn Wake>,
}

impl Order {
    /// Returns true if it applies to this command.
    pub fn means(&self, target: u8, unit: DiskSlot, id: u64) -> bool {
        match self.scope {
            Scope::Task { unit: of, id: named } => of == unit && named == id,
            Scope::Unit(of) => of == unit,
            Scope::Target(of) => of == target,
        }
    }

    /// Records that a command matched.
    pub fn note_match(&self) {
        self.matched.store(true, Ordering::Relaxed);
    }

    /// Returns true if a command matched. Final when the function is done.
    pub fn has_matched(&self) -> bool {
        self.matched.load(Ordering::Relaxed)
    }

    /// Returns true if all queues have reported.
    pub fn is_done(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// Reports that a queue has no matching command left and that its completions are visible.
    pub fn report(&self) {
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.waker.wake();
        }
    }
}

/// A request queue's mailbox for task management functions.
pub struct Post {
    orders: Mutex<Vec<Arc<Order>>>,
    waker: Arc<dyn Wake>,
}

impl Post {
    /// Removes and returns the functions received, at most `max`.
    pub fn take(&self, max: usize) -> Vec<Arc<Order>> {
        let mut orders = lock(&self.orders);
        let count = orders.len().min(max);
        orders.drain(..count).collect()
    }
}

/// Mailboxes of all request queues that are running.
#[derive(Default)]
pub struct Posts(Mutex<Vec<Arc<Post>>>);

impl Posts {
    /// Adds the mailbox of a queue that starts.
    pub fn open(&self, waker: Arc<dyn Wake>) -> Arc<Post> {
        let post = Arc::new(Post { orders: Mutex::default(), waker });
        lock(&self.0).push(Arc::clone(&post));
        post
    }

    /// Removes the mailbox of a queue that stops. The queue has no commands, so pending functions need not wait for
    /// it.
    pub fn close(&self, post: &Arc<Post>) {
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, post));
        for tmf in post.take(usize::MAX) {
            tmf.report();
        }
    }

    /// Wakes all request queues.
    pub fn wake(&self) {
        lock(&self.0).iter().for_each(|post| post.waker.wake());
    }

    /// Submits a function to all request queues. `waker` is woken when it is done, perhaps before this returns.
    pub fn give(&self, scope: Scope, action: Action, waker: Arc<dyn Wake>) -> Arc<Order> {
        let (matched, pending) = (AtomicBool::new(false), AtomicUsize::new(1));
        let tmf = Arc::new(Order { scope, action, matched, pending, waker });
        for post in &*lock(&self.0) {
            tmf.pending.fetch_add(1, Ordering::Relaxed);
            lock(&post.orders).push(Arc::clone(&tmf));
            post.waker.wake();
        }
        tmf.report();
        tmf
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waker of the thread that created it.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(&self) {
        self.0.unpark();
    }
}

impl Posts {
    /// Submits a function and waits until it is done. For control threads.
    pub fn give_and_wait(&self, scope: Scope, action: Action) {
        let tmf = self.give(scope, action, Arc::new(Unpark(std::thread::current())));
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
        let posts = Posts::default();
        let given = Arc::new(Counting::default());
        let alone = posts.give(Scope::Target(1), Action::Query, Arc::clone(&given) as Arc<dyn Wake>);
        assert!(alone.is_done(), "no queue to wait for");
        assert_eq!(given.0.load(Ordering::Relaxed), 1);

        let queue = Arc::new(Counting::default());
        let (one, other) = (posts.open(Arc::clone(&queue) as _), posts.open(Arc::clone(&queue) as _));
        let tmf = posts.give(Scope::Unit(DiskSlot(3)), Action::End(2), Arc::clone(&given) as _);
        assert_eq!((tmf.is_done(), queue.0.load(Ordering::Relaxed)), (false, 2));
        let taken = one.take(16);
        assert!(Arc::ptr_eq(&taken[0], &tmf) && one.take(16).is_empty());
        tmf.report();
        assert!(!tmf.is_done());
        posts.close(&other);
        assert!(tmf.is_done());
        assert_eq!(given.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn scopes_match_their_commands() {
        let posts = Posts::default();
        let silent = || Arc::new(Counting::default()) as Arc<dyn Wake>;
        let slot = DiskSlot(4);
        let task = posts.give(Scope::Task { unit: slot, id: 9 }, Action::Query, silent());
        assert!(task.means(0, slot, 9) && !task.means(0, slot, 8) && !task.means(0, DiskSlot(5), 9));
        let unit = posts.give(Scope::Unit(slot), Action::Query, silent());
        assert!(unit.means(0, slot, 8) && !unit.means(0, DiskSlot(5), 8));
        let target = posts.give(Scope::Target(2), Action::Query, silent());
        assert!(target.means(2, DiskSlot(9), 1) && !target.means(3, DiskSlot(9), 1));
    }
}
