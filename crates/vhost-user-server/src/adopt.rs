//! Takes over a device of another process.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, Sender, SyncSender, sync_channel};
use std::time::Duration;

use crate::hand_over::{AdoptError, HandedConnection, POSITIONS_ALONE, StandbyMessage};
use crate::server::{Server, Standby};

/// Longest time of a control thread for a message. It maps the guest's memory, or starts the queues.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);

impl Server {
    /// Prepares to serve the connection of another process, in standby: maps the guest's memory, and starts no queue.
    ///
    /// # Errors
    /// When the connection is not possible for this device.
    pub fn adopt(&self, connection: HandedConnection) -> Result<(), AdoptError> {
        let mut standby = self.standby.lock();
        let Some(standby) = &mut *standby else { return Err(AdoptError::Configuration(not_in_standby())) };
        if let Standby::Empty = standby {
            if connection.state.is_none() && connection.waiting.is_none() {
                return Ok(());
            }
            let thread = self.control.start_standby();
            *standby = Standby::Thread(thread.map_err(|error| AdoptError::Configuration(error.to_string()))?);
        }
        match standby {
            Standby::Thread(thread) => {
                let told = tell(thread, |reply| StandbyMessage::Adopt(connection, reply));
                told.unwrap_or_else(|why| Err(AdoptError::Configuration(why)))
            }
            Standby::Empty => Ok(()),
        }
    }

    /// Ends the standby: starts the queues of the connection, if there is one, at these positions, and serves. The
    /// socket's file belongs to the other process until [`own_file`](Self::own_file): that process may have to serve
    /// the device again.
    ///
    /// # Errors
    /// When the positions do not match the connection, or a queue cannot start. Then the frontend must connect again.
    pub fn serve(&self, positions: Option<String>) -> Result<(), String> {
        match self.standby.lock().take() {
            None => Err(not_in_standby()),
            Some(Standby::Thread(thread)) => {
                tell(&thread, |reply| StandbyMessage::Serve(positions, reply)).and_then(|served| served)
            }
            Some(Standby::Empty) => {
                self.shared.stands_by.store(false, Ordering::SeqCst);
                self.control.end_standby();
                positions.map_or(Ok(()), |_| Err(POSITIONS_ALONE.to_owned()))
            }
        }
    }

    /// Takes over the file of the socket, which is removed at the end.
    pub fn own_file(&self) {
        self.file.own();
    }
}

fn not_in_standby() -> String {
    "found it in service, expected it in standby".to_owned()
}

/// Sends a message to a control thread in standby, and waits for its reply.
fn tell<R>(
    thread: &Sender<StandbyMessage>,
    message: impl FnOnce(SyncSender<R>) -> StandbyMessage,
) -> Result<R, String> {
    let (reply, replied) = sync_channel(1);
    let gone = || "its control thread has ended".to_owned();
    thread.send(message(reply)).map_err(|_| gone())?;
    match replied.recv_timeout(REPLY_TIMEOUT) {
        Ok(result) => Ok(result),
        Err(RecvTimeoutError::Disconnected) => Err(gone()),
        Err(RecvTimeoutError::Timeout) => {
            Err(format!("its control thread has not answered within {} s", REPLY_TIMEOUT.as_secs()))
        }
    }
}
