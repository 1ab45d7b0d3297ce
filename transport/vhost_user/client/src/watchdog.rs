//! A bound on waiting for an answer on the socket.
//!
//! The message library retries a read for ever, a read time-out included. What does end its wait is the socket's end, so a
//! thread shuts the socket down when an answer is overdue.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

enum Event {
    Started,
    Answered,
}

#[derive(Debug)]
pub(crate) struct Watchdog {
    events: Mutex<Option<Sender<Event>>>,
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

    /// Runs `exchange` with its time bounded.
    pub(crate) fn guard<T>(&self, exchange: impl FnOnce() -> T) -> T {
        self.tell(Event::Started);
        let answer = exchange();
        self.tell(Event::Answered);
        answer
    }

    /// Whether an answer was overdue, and the connection is lost for it.
    pub(crate) fn expired(&self) -> bool {
        self.expired.load(Ordering::Acquire)
    }

    fn tell(&self, event: Event) {
        let events = self.events.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // A thread that has ended has shut the socket down: nothing is left to guard.
        let _ = events.as_ref().map(|events| events.send(event));
    }
}

fn watch(events: &Receiver<Event>, socket: &UnixStream, limit: Duration, expired: &AtomicBool) {
    while let Ok(event) = events.recv() {
        if matches!(event, Event::Answered) {
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
