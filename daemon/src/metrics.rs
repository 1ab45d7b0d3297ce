//! The metrics endpoint of the daemon: its socket, and the samples that its thread takes.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mqblk_metrics::{Detail, MetricsListener, ProcessSample, Server, ServerLimits, TextFormat, encode};
use mqblk_vhost_user_server::{ListenSocket, SocketAccess, SocketError};
use rustix::time::{ClockId, clock_gettime};

use crate::admin::stat::sample;
use crate::config::{MetricsAddress, MetricsConfig};
use crate::interface::StatDetail;
use crate::state::{DaemonState, monotonic_ns};

/// Why metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum MetricsStartError {
    /// The address cannot be listened at.
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

/// The socket. Listens already.
pub(crate) struct MetricsSocket {
    listener: MetricsListener,
    /// The Unix socket, whose file is removed on drop.
    file: Option<ListenSocket>,
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
                // The port may have been left to the kernel.
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
        Ok(MetricsSocket { listener, file })
    }
}

/// The endpoint, served until this is dropped.
pub(crate) struct MetricsEndpoint {
    _server: Server,
    /// Dropped after the server.
    _file: Option<ListenSocket>,
}

impl MetricsEndpoint {
    /// Starts to serve the statistics of the daemon.
    ///
    /// # Errors
    /// If the host has no thread.
    pub(crate) fn start(socket: MetricsSocket, state: &Arc<DaemonState>) -> Result<MetricsEndpoint, MetricsStartError> {
        let MetricsSocket { listener, file } = socket;
        let (state, start_time_s) = (Arc::downgrade(state), start_time_s(state));
        let text = move |format, detail| {
            // Gone when the daemon stops.
            let state = state.upgrade().ok_or("the daemon is stopping")?;
            read(&state, start_time_s, format, detail)
        };
        let server =
            Server::start(listener, Box::new(text), ServerLimits::default()).map_err(MetricsStartError::Thread)?;
        Ok(MetricsEndpoint { _server: server, _file: file })
    }
}

fn read(state: &DaemonState, start_time_s: f64, format: TextFormat, detail: Detail) -> Result<String, String> {
    let with = StatDetail { queues: detail.queues, latency: true };
    let stat = sample(state, with).map_err(|error| error.to_string())?;
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let cpu_ns = cpu.tv_sec.unsigned_abs() * 1_000_000_000 + cpu.tv_nsec.unsigned_abs();
    encode(stat, ProcessSample { start_time_s, cpu_ns }, format, detail)
}

/// Returns when the daemon was started, in seconds since 1970: as the clock of the host says now, in all samples the same.
fn start_time_s(state: &DaemonState) -> f64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since_epoch.saturating_sub(Duration::from_nanos(monotonic_ns().saturating_sub(state.started_ns()))).as_secs_f64()
}
