//! Roles of threads. A thread that serves guests gives up rights that it does not need, by a function that the program
//! sets.
//!
//! The crates that start such threads call [`enter`] first; the daemon defines its effect ([`set_restrictions`]).
//! Without restrictions nothing happens.

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::lock::lock;
use crate::thread::spawn;

/// The role of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ThreadRole {
    /// Serves queues. Others open files for it.
    Worker,
    /// Makes blocking calls to storage that is open.
    Storage,
    /// Connects to storage elsewhere, or to xenstore for a worker.
    Connector,
    /// Runs connections of the network, which a library makes on threads that it starts from this one.
    Network,
    /// Answers scrapers of metrics on a socket that listens already.
    Metrics,
    /// Sets up the rings of all others.
    RingMaker,
}

thread_local! {
    static CURRENT: Cell<Option<ThreadRole>> = const { Cell::new(None) };
}

/// Restricts the calling thread to what its role needs.
type Restrict = Box<dyn Fn(ThreadRole) -> io::Result<()> + Send + Sync>;

static RESTRICT: OnceLock<Restrict> = OnceLock::new();
static CONNECTORS: OnceLock<Mutex<Sender<ThreadStart>>> = OnceLock::new();
static NETWORK: Mutex<Option<Sender<ThreadStart>>> = Mutex::new(None);

/// The pause before a thread that the host refused is started again.
const RETRY: Duration = Duration::from_secs(1);

/// Sets the effect of [`enter`], once in a process. Returns false, and changes nothing, if it was set before.
pub fn set_restrictions(restrict: impl Fn(ThreadRole) -> io::Result<()> + Send + Sync + 'static) -> bool {
    RESTRICT.set(Box::new(restrict)).is_ok()
}

/// Restricts the calling thread to what `role` needs, permanently. Threads that it starts have its restrictions too.
///
/// # Errors
/// When the kernel refuses. The thread must not serve then.
pub fn enter(role: ThreadRole) -> io::Result<()> {
    CURRENT.set(Some(role));
    RESTRICT.get().map_or(Ok(()), |restrict| restrict(role))
}

/// Returns the role that the calling thread has [entered](enter); `None`: a control thread, which may block.
pub fn current() -> Option<ThreadRole> {
    CURRENT.get()
}

struct ThreadStart {
    name: String,
    work: Box<dyn FnOnce() + Send>,
}

/// Starts a thread that starts the threads of [`spawn_connector`] from now on. Workers call it, but with restrictions
/// they may not start threads, and threads that connect must not inherit their restrictions. Called before the first
/// worker is restricted.
///
/// # Errors
/// When the host refuses a thread.
pub fn start_connectors_separately() -> io::Result<()> {
    let (sender, starts) = channel();
    if CONNECTORS.set(Mutex::new(sender)).is_ok() {
        spawn("connectors", move || start_connectors(&starts))?;
    }
    Ok(())
}

fn start_connectors(starts: &Receiver<ThreadStart>) {
    for ThreadStart { name, work } in starts {
        start_thread(&name, move || run_connector(work));
    }
}

/// Starts a thread, as soon as the host has one.
fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    let work = std::sync::Arc::new(Mutex::new(Some(work)));
    loop {
        let of_thread = std::sync::Arc::clone(&work);
        let run = move || {
            let work = lock(&of_thread).take();
            if let Some(work) = work {
                work();
            }
        };
        match spawn(name, run) {
            Ok(_) => break,
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

fn run_connector(work: impl FnOnce()) {
    if enter(ThreadRole::Connector).is_ok() {
        work();
    }
}

/// Runs `work` on a thread of its own with the role [`ThreadRole::Connector`]. Never blocks.
///
/// # Errors
/// When the host refuses a thread. With [`start_connectors_separately`] the thread is started when the host has one;
/// attempts are made every second.
pub fn spawn_connector(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let start = ThreadStart { name: name.to_owned(), work: Box::new(work) };
    let start = match CONNECTORS.get() {
        Some(sender) => match lock(sender).send(start) {
            Ok(()) => return Ok(()),
            Err(refused) => refused.0,
        },
        None => start,
    };
    spawn(start.name, move || run_connector(start.work)).map(drop)
}

/// Runs `work` on a thread of its own with the role [`ThreadRole::Network`], which the threads that it starts have too.
/// All such threads are started by one that the first call starts: in a process that restricts itself they can connect
/// only if that call came before.
///
/// # Errors
/// When the host refuses a thread, or the role's restrictions.
pub fn spawn_network(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let mut starter = lock(&NETWORK);
    let starts = match &*starter {
        Some(starts) => starts,
        None => starter.insert(start_network_threads()?),
    };
    let start = ThreadStart { name: name.to_owned(), work: Box::new(work) };
    starts.send(start).map_err(|_| io::Error::other("the thread that starts threads for the network has ended"))
}

fn start_network_threads() -> io::Result<Sender<ThreadStart>> {
    let (sender, starts) = channel::<ThreadStart>();
    let (entering, entered) = channel();
    spawn("network", move || {
        let result = enter(ThreadRole::Network);
        let may_start = result.is_ok();
        let _ = entering.send(result);
        if may_start {
            for ThreadStart { name, work } in starts {
                start_thread(&name, work);
            }
        }
    })?;
    entered.recv().map_err(io::Error::other)??;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, because the setting belongs to the process: the role reaches the function, its error reaches the
    /// caller, connectors are started by the thread for them, and the first function stays.
    #[test]
    fn roles_are_restricted_by_the_function_that_was_set_first() {
        assert_eq!(current(), None);
        assert!(enter(ThreadRole::Worker).is_ok(), "no restrictions yet");
        assert_eq!(current(), Some(ThreadRole::Worker));
        let name = || std::thread::current().name().map(str::to_owned);
        let run = || {
            let (sender, result) = channel();
            spawn_connector("connector", move || sender.send(name()).unwrap()).unwrap();
            result.recv().unwrap()
        };
        assert_eq!(run().as_deref(), Some("connector"));

        let (seen, roles) = channel();
        let seen = Mutex::new(seen);
        assert!(set_restrictions(move |role| {
            let starter = std::thread::current().name().map(str::to_owned);
            seen.lock().unwrap().send((role, starter)).unwrap();
            if role == ThreadRole::Storage { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) }
        }));
        assert!(!set_restrictions(|_| panic!("not the first")));
        enter(ThreadRole::Worker).unwrap();
        assert_eq!(roles.recv().unwrap().0, ThreadRole::Worker);
        assert_eq!(enter(ThreadRole::Storage).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(roles.recv().unwrap().0, ThreadRole::Storage);

        start_connectors_separately().unwrap();
        assert_eq!(run().as_deref(), Some("connector"));
        assert_eq!(roles.recv().unwrap(), (ThreadRole::Connector, Some("connector".to_owned())));

        for thread in ["first", "second"] {
            let (sender, result) = channel();
            spawn_network(thread, move || sender.send(name()).unwrap()).unwrap();
            assert_eq!(result.recv().unwrap().as_deref(), Some(thread));
        }
        assert_eq!(roles.recv().unwrap(), (ThreadRole::Network, Some("network".to_owned())));
        assert!(roles.try_recv().is_err(), "the threads have the role of the one that starts them");
    }
}
