//! The sandbox: what a process that serves guests gives up before it serves the first one.
//!
//! Capabilities, `execve`, sockets of networks, tracing and all other system calls that the daemon does not make (`calls`), files that the
//! configuration does not name (`files`). Workers and threads that make blocking calls to storage give up more when they start: opening
//! files, sockets, threads.

mod calls;
mod capabilities;
mod config;
mod files;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use mqblk_core::thread_role;

use crate::config::ServeConfig;
use calls::CallFilters;
pub use config::{SandboxConfig, SandboxMode};
pub use files::FileUse;

/// Why the sandbox cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A system call filter was refused.
    #[error("sandbox: system call filter: {0} (--sandbox=off serves without one)")]
    Calls(#[from] seccompiler::Error),
    /// The rules for files were refused.
    #[error("sandbox: landlock: {0} (--sandbox=off serves without it)")]
    Files(#[from] landlock::RulesetError),
    /// A path that is to be allowed cannot be opened.
    #[error("sandbox: {path:?}: {source}, expected a path that exists (sandbox-allow)")]
    Path {
        /// The path.
        path: std::path::PathBuf,
        /// Why not.
        source: landlock::PathFdError,
    },
    /// A capability cannot be given up, or a thread not be started.
    #[error("sandbox: {0}")]
    Os(#[from] io::Error),
}

/// True once opening files is restricted.
static RESTRICTS_FILES: AtomicBool = AtomicBool::new(false);

/// Returns what to add to the error of a file that was refused: nothing without the sandbox.
pub fn hint(error: &str) -> &'static str {
    let refused = error.contains(&io::Error::from(rustix::io::Errno::ACCESS).to_string());
    if refused && RESTRICTS_FILES.load(Ordering::Relaxed) {
        "; the sandbox opens only files that the configuration named at the start, and those at and beneath sandbox-allow"
    } else {
        ""
    }
}

/// Sets what threads give up by their role, before the first of them is started.
///
/// # Errors
/// If a filter cannot be compiled.
pub fn prepare(config: &SandboxConfig) -> Result<(), SandboxError> {
    if config.mode == SandboxMode::Off {
        return Ok(());
    }
    let filters = CallFilters::compile(config.mode)?;
    thread_role::set_restrictions(move |role| {
        capabilities::drop_for(role)?;
        filters.apply_to(role).map_err(io::Error::other)
    });
    Ok(())
}

/// Restricts the calling thread and all threads that it starts from now on. `config` is open and not yet served; threads that were started to
/// open it have restricted themselves ([`prepare`]).
///
/// # Errors
/// If the kernel refuses a part of it, or a path that is to be allowed is not there. A kernel without landlock is no error: a warning says
/// that files are not restricted.
pub fn enter(config: &ServeConfig) -> Result<(), SandboxError> {
    let SandboxConfig { mode, allow } = &config.sandbox;
    if *mode == SandboxMode::Off {
        return Ok(());
    }
    let filters = CallFilters::compile(*mode)?;
    // The library reads it in /proc when it is asked first, and remembers it.
    rustix::param::page_size();
    rustix::thread::set_no_new_privs(true).map_err(io::Error::from)?;
    let files = match mode {
        SandboxMode::On => files::restrict(&files::uses(config), allow)?,
        _ => "not restricted (sandbox=log)",
    };
    RESTRICTS_FILES.store(*mode == SandboxMode::On, Ordering::Relaxed);
    capabilities::drop_unneeded()?;
    filters.apply_to_process()?;
    // Has the restrictions of the process, not those of a worker.
    thread_role::start_connectors_separately()?;
    tracing::info!(mode = mode.word(), files, "sandbox: system calls and capabilities are restricted");
    Ok(())
}

#[cfg(test)]
mod tests;
