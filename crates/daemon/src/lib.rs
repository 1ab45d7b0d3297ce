//! The daemon: resolves a configuration, serves disks over guest interfaces, and answers on the admin socket.
//!
//! `interface` has the traits between the daemon and the guest interfaces; `interfaces` has the table of them and a
//! folder for each. `file`, `key_values` and `resolve` read the configuration, `daemon` runs it, the verbs of `admin`
//! use `state`. Interfaces whose devices have one disk each share `disk_list`, the virtio interfaces share
//! `vhost_user`. `limits` are the rate limits of disks, `live` the settings that change while guests use them.
#![forbid(unsafe_code)]

pub mod activation;
pub mod admin;
pub mod broker;
mod capabilities;
pub mod change;
mod changes;
mod clock;
pub mod config;
pub mod config_error;
pub mod contract;
pub mod cpus;
mod daemon;
pub mod disk_list;
mod exclusive;
pub mod file;
pub mod file_use;
mod flush;
pub mod interface;
pub mod interfaces;
mod kernel_rules;
pub mod key_values;
pub mod keys;
pub mod limits;
mod listeners;
pub mod live;
mod live_keys;
mod log_level;
mod metrics;
pub mod names;
mod new_disk;
pub mod out;
pub mod pair;
pub mod print;
pub mod process;
pub mod queues;
pub mod reload;
pub mod report;
pub mod resize;
pub mod resolve;
mod retries;
mod rights;
pub mod sandbox;
pub mod sandbox_keys;
pub mod saved_changes;
pub mod service_notifier;
mod service_reports;
pub mod sockets;
mod state;
pub mod state_file;
mod stop_bound;
pub mod storage;
pub mod storage_backends;
mod takeover;
pub mod test_keys;
pub mod user;
pub mod vhost_user;
mod watch;

pub use daemon::{Daemon, StartError};
pub use log_level::LogLevel;
pub use state::DaemonState;
pub use takeover::{Predecessor, TakeoverError};

use config::ServeConfig;
use config_error::ConfigError;
use cpus::Cpus;
use file::RawConfig;
use interface::Interfaces;
use process::{MetricsAddress, MetricsConfig};

/// The purpose of opening a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be served.
    Serve,
    /// To print it, with the properties of all disks.
    Print,
    /// To list the disks that cannot be served, also while a daemon has its sockets.
    Check,
}

/// Resolves a configuration for this host and opens its storage, after all checks that are possible before anything is
/// created.
///
/// `predecessor`: the daemon whose sockets and images it takes over.
///
/// # Errors
/// Names the first value that cannot be used.
pub fn configure(
    raw: RawConfig,
    interfaces: Interfaces,
    predecessor: Option<Predecessor>,
    purpose: Purpose,
) -> Result<ServeConfig, ConfigError> {
    let given = raw.clone();
    let contracts = predecessor.as_ref().map(Predecessor::contracts);
    let (cpus, kinds) = (Cpus::of_this_host(), storage_backends::kinds());
    let closed = resolve::resolve_handed(raw, interfaces, &cpus, &kinds, contracts)?;
    let closed = if purpose == Purpose::Print { closed.open_all() } else { closed };
    activation::check_all_are_used()?;
    if let Some(predecessor) = &predecessor {
        predecessor.check_user(closed.user().map(|user| user.ids().0))?;
    }
    let handed = predecessor.as_ref().map(Predecessor::images);
    let config = ServeConfig { given, predecessor, ..rights::open(closed, handed)? };
    if purpose == Purpose::Check {
        return Ok(config);
    }
    if let Some(admin) = &config.admin {
        mqblk_vhost_user_server::probe_socket(&admin.socket).map_err(ConfigError::Admin)?;
    }
    if let Some(MetricsConfig { address: MetricsAddress::Unix(path), .. }) = &config.metrics
        && config.predecessor.is_none()
    {
        mqblk_vhost_user_server::probe_socket(path).map_err(ConfigError::Metrics)?;
    }
    for interface in &config.interfaces {
        (interface.check)()?;
    }
    Ok(config)
}
