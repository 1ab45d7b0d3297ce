//! How a control thread talks to a worker: a bounded box of letters and an eventfd that the worker's ring watches.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use mqblk_uring::EventFd;

use crate::engine::WorkerGone;
use crate::worker::Worker;

/// Something to do on a worker's thread.
pub(crate) type Letter = Box<dyn FnOnce(&mut Worker) + Send>;

/// Letters that may wait: senders block past it, which only control threads do.
const ROOM: usize = 64;

/// The control side.
#[derive(Clone)]
pub(crate) struct Mailbox {
    sender: SyncSender<Letter>,
    bell: EventFd,
}

impl Mailbox {
    /// A mailbox, its worker's end, and the bell.
    pub(crate) fn new() -> std::io::Result<(Mailbox, Receiver<Letter>, EventFd)> {
        let (sender, receiver) = sync_channel(ROOM);
        let bell = EventFd::new()?;
        Ok((Mailbox { sender, bell: bell.clone() }, receiver, bell))
    }

    /// Sends a letter.
    pub(crate) fn send(&self, letter: Letter) -> Result<(), WorkerGone> {
        self.sender.send(letter).map_err(|_| WorkerGone)?;
        self.bell.signal();
        Ok(())
    }

    /// Has `ask` done on the worker and waits for its answer.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Result<R, WorkerGone> {
        let (answer, wait) = sync_channel(1);
        self.send(Box::new(move |worker| {
            // The asker may have gone away; nobody else wants the answer.
            let _ = answer.send(ask(worker));
        }))?;
        wait.recv().map_err(|_| WorkerGone)
    }
}
