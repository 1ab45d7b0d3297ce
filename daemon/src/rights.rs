//! The rights with which storage is opened, and those that are left after it.

use std::sync::Arc;

use crate::broker::Broker;
use crate::config::ServeConfig;
use crate::resolve::{ClosedConfig, ConfigError};
use crate::sandbox::{self, SandboxMode};
use crate::storage_backends::Registry;

/// Opens the storage of a configuration with the rights that the process was started with, and makes the process that of the user that the
/// configuration names.
///
/// In the sandbox a broker opens it, and keeps these rights. The process changes its user before, because the threads that some storage has
/// are not allowed to.
///
/// # Errors
/// If the storage cannot be opened, or the host refuses.
pub(crate) fn open(closed: ClosedConfig) -> Result<ServeConfig, ConfigError> {
    let user = closed.user().cloned();
    let become_user = || user.as_ref().map_or(Ok(()), |user| user.become_user());
    sandbox::prepare(closed.sandbox())?;
    let config = match closed.sandbox().mode {
        SandboxMode::On => {
            let broker = Broker::start()?;
            for path in &closed.sandbox().allow {
                broker.allow(path, "sandbox-allow")?;
            }
            become_user()?;
            let broker = Arc::new(broker);
            let config = closed.open(Arc::new(Registry::new(Arc::clone(&broker) as _)))?;
            ServeConfig { broker: Some(broker), ..config }
        }
        SandboxMode::Off | SandboxMode::Log => {
            let config = closed.open(Arc::new(Registry::of_this_process()))?;
            become_user()?;
            config
        }
    };
    if let Some(user) = &user {
        user.check(&sandbox::file_uses(&config))?;
    }
    Ok(config)
}
