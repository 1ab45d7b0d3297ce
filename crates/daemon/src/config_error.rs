//! The error of a configuration.

use std::error::Error;

use mqblk_core::disk::DiskError;
use mqblk_core::settings::SettingError;
use mqblk_vhost_user_server::SocketError;

/// Reasons why a configuration cannot be served. Each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value is invalid.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The storage cannot be opened.
    #[error("{subject}: {source}")]
    Disk {
        /// The disk.
        subject: String,
        /// The cause.
        source: Box<DiskError>,
    },
    /// The admin socket cannot be created at its path.
    #[error("serve: admin: {0}")]
    Admin(#[source] SocketError),
    /// The socket for metrics cannot be created at its path.
    #[error("serve: metrics: {0}")]
    Metrics(#[source] SocketError),
    /// The host refused something else: the broker, or the takeover from another daemon.
    #[error(transparent)]
    Host(Box<dyn Error + Send + Sync>),
    /// The process cannot get the user or the sandbox of the configuration.
    #[error(transparent)]
    Process(Box<dyn Error + Send + Sync>),
    /// Another value cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// A device's socket cannot be created at its path.
    #[error("{subject}: socket: {source}")]
    Socket {
        /// The disk or controller.
        subject: String,
        /// The cause.
        source: SocketError,
    },
}

impl ConfigError {
    /// Returns true if the host refused something, so that the same configuration may be served later. False: the
    /// configuration must be changed.
    #[must_use]
    pub fn is_from_host(&self) -> bool {
        match self {
            ConfigError::Disk { source, .. } => matches!(**source, DiskError::Os { .. }),
            ConfigError::Admin(_) | ConfigError::Metrics(_) | ConfigError::Socket { .. } | ConfigError::Host(_) => true,
            ConfigError::Setting(error) => error.from_host,
            ConfigError::Process(_) | ConfigError::Invalid(_) => false,
        }
    }
}
