//! How task management reaches the request queues. An order names commands; every request queue that is served takes it up on its
//! own worker, ends those of its commands that are meant, and reports when they are answered, visibly for the driver. With the
//! last report the order is done, and whoever gave it is woken.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::{DiskSlot, Wake};

/// Which commands are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The one with this identifier, of the unit.
    Task {
        /// The unit.
        unit: DiskSlot,
        /// What the driver called the command.
        id: u64,
    },
    /// All of a unit's.
    Unit(DiskSlot),
    /// All of a target's.
    Target(u8),
}

/// What is done with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// They are ended, with this response.
    End(u8),
    /// It is only asked whether there are any.
    Query,
}

/// An order.
pub struct Order {
    /// Which commands.
    pub scope: Scope,
    /// What for.
    pub action: Action,
    /// There was such a command.
    matched: AtomicBool,
    /// Queues that have not reported, and one for whoever gives the order.
    pending: AtomicUsize,
    waker: Arc<dyn Wake>,
}

impl Order {
    /// Whether it means this command.
    pub fn means(&self, target: u8, unit: DiskSlot, id: u64) -> bool {
        match self.scope {
            Scope::Task { unit: of, id: named } => of == unit && named == id,
            Scope::Unit(of) => of == unit,
            Scope::Target(of) => of == target,
        }
    }

    /// Notes that there was such a command.
    pub fn note_match(&self) {
        self.matched.store(true, Ordering::Relaxed);
    }

    /// Whether there was such a command. Meaningful when it is done.
    pub fn has_matched(&self) -> bool {
        self.matched.load(Ordering::Relaxed)
    }

    /// All queues have reported.
    pub fn is_done(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    /// A queue has no such command any more, and its answers are visible.
    pub fn report(&self) {
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.waker.wake();
        }
    }
}

/// A request queue's box for orders.
pub struct Post {
    orders: Mutex<Vec<Arc<Order>>>,
    waker: Arc<dyn Wake>,
}

impl Post {
    /// Those that came since the last time, at most `most`.
    pub fn take(&self, most: usize) -> Vec<Arc<Order>> {
        let mut orders = lock(&self.orders);
        let count = orders.len().min(most);
        orders.drain(..count).collect()
    }
}

/// The boxes of all request queues that are served.
#[derive(Default)]
pub struct Posts(Mutex<Vec<Arc<Post>>>);

impl Posts {
    /// A queue begins to be served.
    pub fn open(&self, waker: Arc<dyn Wake>) -> Arc<Post> {
        let post = Arc::new(Post { orders: Mutex::default(), waker });
        lock(&self.0).push(Arc::clone(&post));
        post
    }

    /// It ends: it has no commands, so that orders need not wait for it.
    pub fn close(&self, post: &Arc<Post>) {
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, post));
        for order in post.take(usize::MAX) {
            order.report();
        }
    }

    /// Has all of them looked at.
    pub fn wake(&self) {
        lock(&self.0).iter().for_each(|post| post.waker.wake());
    }

    /// Gives an order to all of them. `waker` rings when it is done, perhaps before this returns.
    pub fn give(&self, scope: Scope, action: Action, waker: Arc<dyn Wake>) -> Arc<Order> {
        let (matched, pending) = (AtomicBool::new(false), AtomicUsize::new(1));
        let order = Arc::new(Order { scope, action, matched, pending, waker });
        for post in &*lock(&self.0) {
            order.pending.fetch_add(1, Ordering::Relaxed);
            lock(&post.orders).push(Arc::clone(&order));
            post.waker.wake();
        }
        order.report();
        order
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes the thread that made it.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(&self) {
        self.0.unpark();
    }
}

impl Posts {
    /// Gives an order and waits until it is done. For control threads.
    pub fn give_and_wait(&self, scope: Scope, action: Action) {
        let order = self.give(scope, action, Arc::new(Unpark(std::thread::current())));
        while !order.is_done() {
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
    fn an_order_is_done_with_the_last_report_or_the_end_of_the_queue() {
        let posts = Posts::default();
        let given = Arc::new(Counting::default());
        let alone = posts.give(Scope::Target(1), Action::Query, Arc::clone(&given) as Arc<dyn Wake>);
        assert!(alone.is_done(), "nobody to wait for");
        assert_eq!(given.0.load(Ordering::Relaxed), 1);

        let queue = Arc::new(Counting::default());
        let (one, other) = (posts.open(Arc::clone(&queue) as _), posts.open(Arc::clone(&queue) as _));
        let order = posts.give(Scope::Unit(DiskSlot(3)), Action::End(2), Arc::clone(&given) as _);
        assert_eq!((order.is_done(), queue.0.load(Ordering::Relaxed)), (false, 2));
        let taken = one.take(16);
        assert!(Arc::ptr_eq(&taken[0], &order) && one.take(16).is_empty());
        order.report();
        assert!(!order.is_done());
        posts.close(&other);
        assert!(order.is_done());
        assert_eq!(given.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn orders_mean_what_they_name() {
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
