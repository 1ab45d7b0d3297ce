//! The end of a broker before its daemon.

use std::io;

/// Reasons for a broker to end before its daemon.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// It was not started by a daemon.
    #[error("broker: standard input: found no socket of a daemon, expected a start by mqblk serve --sandbox on")]
    NotStarted,
    /// There is no `/proc`.
    #[error("broker: found no /proc, which it needs to open images")]
    NoProc,
    /// The rules for files were refused.
    #[error("broker: landlock: {0}")]
    Files(#[from] landlock::RulesetError),
    /// The system call filter was refused.
    #[error("broker: system call filter: {0}")]
    Calls(#[from] seccompiler::Error),
    /// The host refused something else.
    #[error("broker: {0}")]
    Os(#[from] io::Error),
}
