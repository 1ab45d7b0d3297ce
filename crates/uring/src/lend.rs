//! Lends requests to other threads and libraries.

use io_uring::{opcode, types};
use mqblk_memory::Buffer;

use crate::completion::{ClientId, PORT, Refused};
use crate::context::UringContext;
use crate::pieces::fill_pieces;
use crate::remote::{RemoteIo, RemoteWaker};

impl UringContext {
    /// Lends a request to another thread or a library: `buffer` is owned by the in-flight table until the [`RemoteIo`]
    /// is completed, and then returned in a completion of `client` with `cookie`, as from an operation of the ring.
    ///
    /// # Errors [`Refused`] when the in-flight table is full.
    pub fn submit_remote(
        &mut self,
        client: ClientId,
        cookie: u64,
        buffer: Option<Buffer>,
    ) -> Result<RemoteIo, Refused> {
        self.poll_port();
        let Some(slot) = self.in_flight.take(client, cookie) else { return Err(Refused(buffer)) };
        self.scratch.clear();
        let (mut len, mut logged) = (0, true);
        if let Some(buffer) = &buffer {
            fill_pieces(&mut self.scratch, self.buffers.segments(buffer), 0);
            (len, logged) = (self.buffers.len(buffer).0, self.buffers.will_be_logged(buffer));
        }
        self.in_flight.slot(slot).buffer = buffer;
        Ok(self.port.lend(slot, &self.scratch, len, logged))
    }

    /// Returns a handle for any thread to wake this worker for `client`: by a completion with `cookie` and `more`, one
    /// for all wakeups that the worker has not seen yet.
    pub fn remote_waker(&mut self, client: ClientId, cookie: u64) -> RemoteWaker {
        self.poll_port();
        self.port.waker(client, self.client_generation(client), cookie)
    }

    /// Makes the ring poll the port, unless it already does.
    pub(crate) fn poll_port(&mut self) {
        if let Some(fd) = self.port.begin_poll() {
            // The counter is never read, so that a renewed poll reports what was signalled meanwhile.
            let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build().user_data(PORT);
            self.push_raw(entry);
        }
    }
}
