//! The limits for clients.

use std::time::Duration;

/// The limits for clients.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Most clients at once. One more takes the place of one of whoever has most of them: another user, or another host. Else of the one that
    /// has been idle for longest, if that is for [`settled`](Self::settled); else it is refused.
    pub clients: usize,
    /// Longest request, in bytes.
    pub request_bytes: usize,
    /// Longest time from the connection to the end of the request.
    pub request: Duration,
    /// Longest time for reading a response.
    pub response: Duration,
    /// Longest time from the end of the response until the client closes.
    pub linger: Duration,
    /// How long a client is idle before another one of the same user or host takes its place.
    pub settled: Duration,
    /// For how long a sample is used: scrapes within it disturb workers once.
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
