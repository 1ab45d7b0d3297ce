//! The limits for clients.

use std::time::Duration;

/// The limits for clients.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Most clients at once. One more replaces a client of the other user or host with most clients. Otherwise it
    /// replaces the longest idle client, if that has been idle for [`settled`](Self::settled); else it is refused.
    pub clients: usize,
    /// Longest request, in bytes.
    pub request_bytes: usize,
    /// Longest time from the connection to the end of the request.
    pub request: Duration,
    /// Longest time for reading a response.
    pub response: Duration,
    /// Longest time from the end of the response until the client closes.
    pub linger: Duration,
    /// Idle time after which another client of the same user or host replaces a client.
    pub settled: Duration,
    /// Time for which a sample is reused: scrapes within it disturb workers once.
    pub sample_age: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        ServerLimits {
            clients: 16,
            request_bytes: 8 << 10,
            request: Duration::from_secs(5),
            response: Duration::from_secs(10),
            linger: Duration::from_secs(1),
            settled: Duration::from_millis(200),
            sample_age: Duration::from_millis(100),
        }
    }
}
