//! Starting threads, and waiting for them.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crate::lock::RankedMutex;
use crate::mappings::MappingBudget;

/// Interval at which [`join_within`] checks for the thread's end.
const JOIN_CHECK: Duration = Duration::from_millis(1);

/// Starts a thread. Its name should have 15 bytes at most: the kernel cuts longer ones.
///
/// # Errors
/// When the host has no thread (`std::thread::spawn` would panic) or no mappings for one (it would end the process).
/// The error names the limits to raise.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let name = name.into();
    let work = with_mappings(work).map_err(|error| refused(&name, &error))?;
    Builder::new().name(name.clone()).spawn(work).map_err(|error| refused(&name, &error))
}

/// As [`spawn`], for a thread that ends before the scope does.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    let work = with_mappings(work).map_err(|error| refused(name, &error))?;
    Builder::new().name(name.to_owned()).spawn_scoped(scope, work).map_err(|error| refused(name, &error))
}

/// Returns the work of a thread that holds its mappings until the work ends.
fn with_mappings<T>(work: impl FnOnce() -> T) -> io::Result<impl FnOnce() -> T> {
    let held = MappingBudget::of_process().hold_thread()?;
    Ok(move || {
        let _held = held;
        work()
    })
}

/// As [`spawn`], for a thread that works on `value`: the caller must not lose it when the host has no thread.
///
/// # Errors
/// As [`spawn`], with the value.
pub fn spawn_with<T: Send + 'static>(
    name: impl Into<String>,
    value: T,
    work: impl FnOnce(T) + Send + 'static,
) -> Result<JoinHandle<()>, (io::Error, Option<T>)> {
    let slot = Arc::new(RankedMutex::leaf(Some(value)));
    let of_thread = Arc::clone(&slot);
    let spawned = spawn(name, move || {
        let taken = of_thread.lock().take();
        if let Some(value) = taken {
            work(value);
        }
    });
    spawned.map_err(|error| (error, slot.lock().take()))
}

/// Waits for a thread's end, for `timeout` at most. Returns its result as [`JoinHandle::join`] does; `None` if it still
/// runs; it is then detached.
pub fn join_within<T>(thread: JoinHandle<T>, timeout: Duration) -> Option<std::thread::Result<T>> {
    let deadline = Instant::now() + timeout;
    while !thread.is_finished() {
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(JOIN_CHECK);
    }
    Some(thread.join())
}

/// Returns the error for a thread that the host has refused.
pub fn refused(name: &str, error: &io::Error) -> io::Error {
    let text =
        format!("thread {name:?}: {error}: expected room for one more thread (ulimit -u, LimitNPROC=, TasksMax=)");
    io::Error::new(error.kind(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_waited_for_and_left_behind_when_it_does_not_end() {
        let ended = join_within(spawn("ends", || 7).unwrap(), Duration::from_secs(60));
        assert_eq!(ended.unwrap().unwrap(), 7);
        let panicked = join_within(spawn("panics", || assert_eq!(1, 2)).unwrap(), Duration::from_secs(60));
        assert!(panicked.unwrap().is_err());
        let (end, wait) = std::sync::mpsc::channel::<()>();
        assert!(join_within(spawn("stays", move || wait.recv()).unwrap(), Duration::ZERO).is_none());
        drop(end);
    }

    #[test]
    fn a_thread_has_its_name_and_a_refusal_says_what_to_raise() {
        let thread = spawn("connect", || std::thread::current().name().map(str::to_owned)).unwrap();
        assert_eq!(thread.join().unwrap().as_deref(), Some("connect"));
        let error = refused("vhost-a", &io::Error::from_raw_os_error(11));
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let text = error.to_string();
        assert!(text.starts_with("thread \"vhost-a\": Resource temporarily unavailable"), "{text}");
        assert!(text.ends_with("expected room for one more thread (ulimit -u, LimitNPROC=, TasksMax=)"), "{text}");
    }
}
