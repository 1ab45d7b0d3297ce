//! A bound on the wait for a reply.
//!
//! The `vhost` crate retries a read without a limit, even after a read timeout. Only the end of the socket ends its
//! wait, so a thread shuts the socket down when a reply is overdue.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

enum ExchangeEvent {
    Started,
    Replied,
}

#[derive(Debug)]
pub(crate) struct Watchdog {
    events: Mutex<Option<Sender<ExchangeEvent>>>,
    expired: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(crate) fn new(socket: UnixStream, limit: Duration) -> std::io::Result<Watchdog> {
        let (sender, receiver) = channel();
        let expired = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&expired);
        let thread = std::thread::Builder::new()
            .name("vhost-watchdog".into())
            .spawn(move || watch(&receiver, &socket, limit, &flag))?;
        Ok(Watchdog { events: Mutex::new(Some(sender)), expired, thread: Some(thread) })
    }

    /// Runs `exchange` with a bound on its time.
    pub(crate) fn guard<T>(&self, exchange: impl FnOnce() -> T) -> T {
        self.send(ExchangeEvent::Started);
        let result = exchange();
        self.send(ExchangeEvent::Replied);
        result
    }

    /// Returns true if a reply was overdue and the socket has been shut down.
    pub(crate) fn expired(&self) -> bool {
        self.expired.load(Ordering::Acquire)
    }

    fn send(&self, event: ExchangeEvent) {
        let events = self.events.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // If the thread has ended it has shut the socket down.
        let _ = events.as_ref().map(|events| events.send(event));
    }
}

fn watch(events: &Receiver<ExchangeEvent>, socket: &UnixStream, limit: Duration, expired: &AtomicBool) {
    while let Ok(event) = events.recv() {
        if matches!(event, ExchangeEvent::Replied) {
            continue;
        }
        match events.recv_timeout(limit) {
            Ok(_) => {}
            Err(RecvTimeoutError::Timeout) => {
                expired.store(true, Ordering::Release);
                let _ = socket.shutdown(Shutdown::Both);
                return;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.events.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
