//! The sandbox: rights that a process gives up before it serves the first guest.
//!
//! These are capabilities, `execve`, sockets of networks, tracing and all other system calls that the daemon does not
//! make (`calls`), and files that the configuration does not name (`files`). Another process, the
//! [broker](crate::broker), opens images. Workers and threads that make blocking calls to storage give up more at their
//! start: opening files, sockets, threads.

mod calls;
mod error;
mod files;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use mqblk_core::thread_role::{self, ThreadRole};

use crate::broker::Broker;
use crate::capabilities::{self, KEPT_CAPABILITIES, OTHER_USERS_FILES};
use crate::config::ServeConfig;
use crate::file_use::FileUse;
use crate::sandbox_keys::{SandboxConfig, SandboxMode};
use calls::CallFilters;
pub use error::SandboxError;
pub(crate) use files::file_uses;

/// True if threads that connect may use TCP sockets, because a disk of the configuration is behind one. Set before the
/// first of them is started.
static USES_TCP: AtomicBool = AtomicBool::new(false);

/// Sets the restrictions of threads by their role, before the first of them is started.
///
/// # Errors
/// If a filter cannot be compiled.
pub fn prepare(config: &SandboxConfig) -> Result<(), SandboxError> {
    if config.mode == SandboxMode::Off {
        return Ok(());
    }
    let mode = config.mode;
    let filters = CallFilters::compile(mode)?;
    thread_role::set_restrictions(move |role| {
        if role == ThreadRole::Network {
            rustix::thread::set_no_new_privs(true)?;
            if mode == SandboxMode::On {
                files::restrict_to_reading().map_err(io::Error::other)?;
            }
        }
        capabilities::drop_for(role)?;
        filters.apply_to(role, USES_TCP.load(Ordering::Acquire)).map_err(io::Error::other)
    });
    Ok(())
}

/// Restricts the calling thread and all threads that it starts from now on. `config` is open and not yet served;
/// threads that were started to open it have restricted themselves ([`prepare`]).
///
/// # Errors
/// If the kernel refuses a part of it, or a path to allow does not exist. A kernel without landlock is no error: a
/// warning reports that files are not restricted.
pub fn enter(config: &ServeConfig) -> Result<(), SandboxError> {
    let mode = config.sandbox.mode;
    if mode == SandboxMode::Off {
        return Ok(());
    }
    let filters = CallFilters::compile(mode)?;
    // The library reads it from /proc at the first query, and caches it.
    rustix::param::page_size();
    rustix::thread::set_no_new_privs(true).map_err(io::Error::from)?;
    if config.sandbox.rbd {
        let refused = |error: io::Error| io::Error::new(error.kind(), format!("sandbox-rbd=on: {error}"));
        mqblk_storage::rbd::allow_later().map_err(refused)?;
    }
    let uses = file_uses(config);
    let images = config.broker.as_ref().map(|broker| seal(broker, &uses)).transpose()?;
    drop_capabilities(mode, &uses)?;
    let ports = config.broker.as_ref().map(|broker| broker.seal_tcp()).unwrap_or_default();
    let uses_tcp = !ports.is_empty();
    USES_TCP.store(uses_tcp, Ordering::Release);
    let files = match mode {
        SandboxMode::On => files::restrict(&uses, &ports)?,
        _ => "not restricted (sandbox=log)",
    };
    // From here on no other thread may set up a ring.
    mqblk_engine::make_rings_on_a_thread()?;
    filters.apply_to_process(uses_tcp)?;
    if let Some(broker) = &config.broker {
        broker.watch()?;
    }
    // It gets the restrictions of the process, not those of a worker.
    thread_role::start_connectors_separately()?;
    let images = images.as_deref().unwrap_or("not restricted");
    tracing::info!(mode = mode.word(), files, images, "sandbox: system calls and capabilities are restricted");
    Ok(())
}

/// Gives the broker the last rules, and makes it give up all other rights. Returns the extent of its restrictions, in
/// words.
fn seal(broker: &Broker, uses: &[FileUse]) -> Result<String, SandboxError> {
    for file in uses {
        match file {
            FileUse::Images(folder) => broker.allow(folder, "incoming-luns")?,
            FileUse::Config(path) => broker.allow_config(path)?,
            _ => {}
        }
    }
    Ok(broker.seal()?)
}

/// Gives up the capabilities that the daemon does not need for these files.
fn drop_capabilities(mode: SandboxMode, uses: &[FileUse]) -> io::Result<()> {
    capabilities::use_only(KEPT_CAPABILITIES)?;
    let needed = match files::inaccessible(uses) {
        _ if mode == SandboxMode::Log => OTHER_USERS_FILES,
        Some(path) if rustix::thread::capabilities(None)?.permitted.contains(OTHER_USERS_FILES) => {
            tracing::warn!(
                "sandbox: CAP_DAC_OVERRIDE stays, because {} is of another user; give it to the daemon's",
                path.display()
            );
            OTHER_USERS_FILES
        }
        _ => rustix::thread::CapabilitySet::empty(),
    };
    capabilities::keep_and_use(KEPT_CAPABILITIES | needed)
}

#[cfg(test)]
mod tests;
