//! Errors of the sandbox.

use std::io;

use crate::broker::BrokerStartError;
use crate::config_error::ConfigError;

/// Reasons why the sandbox cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A system call filter was refused.
    #[error("sandbox: system call filter: {0} (--sandbox=off serves without one)")]
    Calls(#[from] seccompiler::Error),
    /// The rules for files were refused.
    #[error("sandbox: landlock: {0} (--sandbox=off serves without it)")]
    Files(#[from] landlock::RulesetError),
    /// The broker cannot be started or restricted.
    #[error(transparent)]
    Broker(#[from] BrokerStartError),
    /// A folder that is used while the daemon serves cannot be opened.
    #[error("sandbox: {path:?}: {source}, expected a folder that exists")]
    Path {
        /// The path.
        path: std::path::PathBuf,
        /// The reason.
        source: landlock::PathFdError,
    },
    /// A capability cannot be given up, or a thread cannot be started.
    #[error("sandbox: {0}")]
    Os(#[from] io::Error),
}

impl From<SandboxError> for ConfigError {
    fn from(error: SandboxError) -> ConfigError {
        ConfigError::Process(Box::new(error))
    }
}
