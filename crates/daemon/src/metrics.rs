//! The metrics endpoint of the daemon: its socket, and the samples that its thread takes.

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mqblk_metrics::{Detail, MetricsListener, ProcessSample, Server, ServerLimits, TextFormat, encode};
use mqblk_vhost_user_server::{ListenSocket, SocketAccess, SocketError, adopt_handed};
use rustix::time::{ClockId, clock_gettime};

use crate::admin::stat::sample;
use crate::clock::monotonic_ns;
use crate::interface::StatDetail;
use crate::process::{MetricsAddress, MetricsConfig};
use crate::state::DaemonState;
use crate::takeover::Predecessor;

/// Errors of the metrics endpoint's start.
#[derive(Debug, thiserror::Error)]
pub enum MetricsStartError {
    /// The host refuses to listen at the address.
    #[error("found {address}: {source}, expected an address of this host and a free port")]
    Address {
        /// The address.
        address: MetricsAddress,
        /// The cause.
        source: io::Error,
    },
    /// The Unix socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The thread cannot be started.
    #[error("{0}")]
    Thread(#[source] io::Error),
}

/// The listening socket.
pub(crate) struct MetricsSocket {
    listener: MetricsListener,
    /// The Unix socket, whose file is removed on drop.
    file: Option<ListenSocket>,
    /// The address of the configuration.
    address: String,
    /// True if the file is taken over from another process, which has made it.
    takes_file: bool,
}

impl MetricsSocket {
    /// Listens at the address of the configuration.
    ///
    /// # Errors
    /// If the host refuses.
    pub(crate) fn bind(config: &MetricsConfig) -> Result<MetricsSocket, MetricsStartError> {
        let error = |source| MetricsStartError::Address { address: config.address.clone(), source };
        let (listener, file, address) = match &config.address {
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).map_err(error)?;
                // The kernel may have chosen the port.
                let bound = MetricsAddress::Tcp(listener.local_addr().map_err(error)?);
                (MetricsListener::Tcp(listener), None, bound)
            }
            MetricsAddress::Unix(path) => {
                let socket = ListenSocket::bind(path, &SocketAccess::with_mode(config.mode.bits()))?;
                let listener = socket.listener().try_clone().map_err(error)?;
                (MetricsListener::Unix(listener), Some(socket), config.address.clone())
            }
        };
        tracing::info!(%address, "metrics");
        Ok(MetricsSocket { listener, file, address: config.address.to_string(), takes_file: false })
    }

    /// Takes over the listener of the previous process if it has one at this address. Listens there otherwise.
    ///
    /// # Errors
    /// If the host refuses.
    pub(crate) fn take_or_bind(
        config: &MetricsConfig,
        predecessor: Option<&Predecessor>,
    ) -> Result<MetricsSocket, MetricsStartError> {
        let address = config.address.to_string();
        let Some((handed, takes_file)) = predecessor.and_then(|one| one.take_metrics(&address)) else {
            return MetricsSocket::bind(config);
        };
        let (listener, file) = match (handed, &config.address) {
            (MetricsListener::Unix(listener), MetricsAddress::Unix(path)) => {
                let os = |source| SocketError::Os { path: path.clone(), source };
                let listens = listener.try_clone().map_err(os)?;
                adopt_handed(path.clone(), listener).map_err(os)?;
                let socket = ListenSocket::bind(path, &SocketAccess::with_mode(config.mode.bits()))?;
                (MetricsListener::Unix(listens), Some(socket))
            }
            (MetricsListener::Tcp(listener), MetricsAddress::Tcp(expected)) => {
                let error = |source| MetricsStartError::Address { address: config.address.clone(), source };
                let listens =
                    rustix::net::sockopt::socket_acceptconn(&listener).map_err(|errno| error(errno.into()))?;
                let found = listener.local_addr().map_err(error)?;
                // Port 0 matches any port.
                let is_there = found.ip() == expected.ip() && [0, found.port()].contains(&expected.port());
                if !listens || !is_there {
                    return Err(error(io::Error::other(format!(
                        "the daemon before has handed over a socket of {found}"
                    ))));
                }
                (MetricsListener::Tcp(listener), None)
            }
            (listener, _) => (listener, None),
        };
        Ok(MetricsSocket { listener, file, address, takes_file })
    }

    /// Returns its address, a duplicate of its listener, and true if its file belongs to this process: for the next
    /// process.
    pub(crate) fn handed(&self) -> io::Result<(String, OwnedFd, bool)> {
        let listener = match &self.listener {
            MetricsListener::Tcp(listener) => listener.try_clone()?.into(),
            MetricsListener::Unix(listener) => listener.try_clone()?.into(),
        };
        Ok((self.address.clone(), listener, self.takes_file || self.file.as_ref().is_some_and(ListenSocket::owns_file)))
    }
}

/// The endpoint, served until this is dropped.
pub(crate) struct MetricsEndpoint {
    server: Server,
    /// Dropped after the server.
    file: Option<ListenSocket>,
}

impl MetricsEndpoint {
    /// Ends the server, and leaves the socket to another process.
    pub(crate) fn leave(self) {
        drop(self.server);
        std::mem::forget(self.file);
    }

    /// Starts to serve the statistics of the daemon.
    ///
    /// # Errors
    /// If the host has no thread.
    pub(crate) fn start(socket: MetricsSocket, state: &Arc<DaemonState>) -> Result<MetricsEndpoint, MetricsStartError> {
        let MetricsSocket { listener, file, takes_file, .. } = socket;
        if takes_file {
            file.iter().for_each(ListenSocket::own_file);
        }
        let (state, start_time_s) = (Arc::downgrade(state), start_time_s(state));
        let text = move |format, detail| {
            // Dropped when the daemon stops.
            let state = state.upgrade().ok_or("the daemon is stopping")?;
            read(&state, start_time_s, format, detail)
        };
        let server =
            Server::start(listener, Box::new(text), ServerLimits::default()).map_err(MetricsStartError::Thread)?;
        Ok(MetricsEndpoint { server, file })
    }
}

fn read(state: &DaemonState, start_time_s: f64, format: TextFormat, detail: Detail) -> Result<String, String> {
    let with = StatDetail { queues: detail.queues, latency: true };
    let stat = sample(state, with).map_err(|error| error.to_string())?;
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let cpu_ns = cpu.tv_sec.unsigned_abs() * 1_000_000_000 + cpu.tv_nsec.unsigned_abs();
    encode(stat, ProcessSample { start_time_s, cpu_ns }, format, detail)
}

/// Returns the start of the daemon in seconds since 1970, by the host's present clock. The same in all samples.
fn start_time_s(state: &DaemonState) -> f64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since_epoch.saturating_sub(Duration::from_nanos(monotonic_ns().saturating_sub(state.started_ns()))).as_secs_f64()
}
