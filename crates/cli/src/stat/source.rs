//! Samples of a running daemon.

use std::path::PathBuf;

use mqblk_admin::model::Stat;
use mqblk_admin::{Client, ClientError, StatQuery};

/// The connection to a daemon. Reconnects after an error.
pub(crate) struct StatSource {
    socket: PathBuf,
    query: StatQuery,
    client: Option<Client>,
}

impl StatSource {
    /// Samples of all queues, with the buckets of their latencies: the percentiles of an interval need them. `disk`:
    /// only the disk, controller or LUN of this id.
    pub(crate) fn new(socket: PathBuf, disk: Option<String>) -> StatSource {
        StatSource { socket, query: StatQuery { queues: true, latency: true, disk }, client: None }
    }

    /// Takes a sample.
    ///
    /// # Errors
    /// When the daemon cannot be reached, or refuses.
    pub(crate) fn read(&mut self) -> Result<Stat, ClientError> {
        let mut client = match self.client.take() {
            Some(client) => client,
            None => Client::connect(&self.socket)?,
        };
        let stat = client.stat(&self.query)?;
        self.client = Some(client);
        Ok(stat)
    }
}
