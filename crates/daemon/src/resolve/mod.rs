//! Resolves raw keys and values to a configuration: fills in defaults, and checks each value against the others and
//! against the host. Creates nothing; the storage is opened separately. Each guest interface takes its own keys.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::QueuePlacement;

use crate::config::ServeConfig;
use crate::config_error::ConfigError;
use crate::contract::SavedContracts;
use crate::cpus::Cpus;
use crate::file::RawConfig;
use crate::interface::{DiskTable, InterfaceKeys, Interfaces, ListPosition, ResolveContext};
use crate::key_values::{RawTable, finish};
use crate::limits::LimitGroups;
use crate::names::UniqueNames;
use crate::out::Admission;
use crate::process::{self, AdminConfig, MetricsConfig};
use crate::sandbox_keys::SandboxConfig;
use crate::saved_changes::{SECTION, SavedChanges};
use crate::sockets::{ADMIN, PlannedSocket};
use crate::state_file::SavedState;
use crate::storage_backends::{ConfiguredStorages, StorageBackends};
use crate::user::UserConfig;

/// A configuration whose storage is not open yet.
pub struct ClosedConfig {
    workers: u16,
    pin: Option<Vec<u16>>,
    hang_warning: Option<Duration>,
    admin: Option<AdminConfig>,
    metrics: Option<MetricsConfig>,
    drain_timeout: Duration,
    sandbox: SandboxConfig,
    user: Option<UserConfig>,
    state: Option<SavedState>,
    saved: SavedChanges,
    contracts: SavedContracts,
    placement: QueuePlacement,
    table: Interfaces,
    limit_groups: LimitGroups,
    interfaces: Vec<Box<dyn InterfaceKeys>>,
    strict: bool,
    /// True if a disk that cannot be served is an error, regardless of `strict`.
    opens_all: bool,
}

impl ClosedConfig {
    /// Returns the sandbox.
    pub fn sandbox(&self) -> &SandboxConfig {
        &self.sandbox
    }

    /// Returns the user that the process becomes.
    pub fn user(&self) -> Option<&UserConfig> {
        self.user.as_ref()
    }

    /// Returns the admin socket.
    pub fn admin(&self) -> Option<&AdminConfig> {
        self.admin.as_ref()
    }

    /// Returns the sockets of all devices.
    pub fn sockets(&self) -> Vec<PlannedSocket> {
        self.interfaces.iter().flat_map(|interface| interface.sockets()).collect()
    }

    /// Makes [`open`](Self::open) fail if a disk cannot be served.
    #[must_use]
    pub fn open_all(self) -> ClosedConfig {
        ClosedConfig { opens_all: true, ..self }
    }

    /// Opens the storage of each disk and LUN. Those that the host refuses are out, and the others are served.
    ///
    /// # Errors
    /// If a key is unknown or wrong, or nothing can be served and nobody could see that.
    pub fn open(self, storages: Arc<dyn StorageBackends>) -> Result<ServeConfig, ConfigError> {
        let ClosedConfig {
            workers,
            pin,
            hang_warning,
            admin,
            metrics,
            drain_timeout,
            sandbox,
            user,
            state,
            saved,
            contracts,
            mut placement,
            table,
            limit_groups,
            strict,
            opens_all,
            ..
        } = self;
        let storages: Arc<dyn StorageBackends> =
            Arc::new(ConfiguredStorages::new(storages, limit_groups, contracts.raw_images()));
        let mut admission = Admission { strict: strict || opens_all, ..Admission::default() };
        let open = |keys: Box<dyn InterfaceKeys>| keys.open(storages.as_ref(), &mut admission);
        let interfaces: Vec<_> = self.interfaces.into_iter().map(open).collect::<Result<_, _>>()?;
        let serves = interfaces.iter().any(|interface| interface.queues > 0 || interface.expects_more);
        if let (Some(error), false, None) = (admission.first, serves, &admin) {
            return Err(error);
        }
        placement.remove(&admission.freed_queues);
        let broker = None;
        Ok(ServeConfig {
            workers,
            pin,
            hang_warning,
            admin,
            metrics,
            drain_timeout,
            sandbox,
            user,
            state,
            saved,
            contracts,
            placement,
            storages,
            broker,
            log: None,
            given: RawConfig::new("serve"),
            source: None,
            predecessor: None,
            end: None,
            stop: Arc::default(),
            table,
            interfaces,
            strict,
            out: admission.out,
        })
    }
}

/// Resolves `raw` to a configuration. `kinds` are the names of the storage backends.
///
/// # Errors
/// Returns the first invalid value.
pub fn resolve(
    raw: RawConfig,
    interfaces: Interfaces,
    cpus: &Cpus,
    kinds: &[&'static str],
) -> Result<ClosedConfig, ConfigError> {
    resolve_handed(raw, interfaces, cpus, kinds, None)
}

/// As [`resolve`], for guests of another daemon that hands them over. `handed` are the devices as these were given
/// them.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_handed(
    mut raw: RawConfig,
    interfaces: Interfaces,
    cpus: &Cpus,
    kinds: &[&'static str],
    handed: Option<&SavedContracts>,
) -> Result<ClosedConfig, ConfigError> {
    // With an admin socket disks can be added later.
    if raw.is_empty(interfaces) && raw.process.peek(&ADMIN).is_none() {
        return Err(nothing_to_serve(&raw.process, interfaces).into());
    }
    let limit_groups = LimitGroups::take(raw.limit_groups.drain(..))?;
    let mut names = UniqueNames::default();
    let state = process::take_state(&mut raw.process)?;
    let saved = state.as_ref().map(|state| state.section(SECTION)).transpose()?.unwrap_or_default();
    let contracts = state.as_ref().map(SavedContracts::read).unwrap_or_default().or_handed(handed);
    let given = contracts.devices();
    let mut context = ResolveContext { cpus, kinds, names: &mut names, saved: state.as_ref(), given };
    let mut taken: Vec<Box<dyn InterfaceKeys>> = interfaces.0.iter().map(|interface| interface.keys()).collect();
    take_devices(&mut raw, interfaces, &mut taken, &mut context)?;
    for keys in &mut taken {
        keys.take_process(&mut raw.process, &mut context)?;
    }
    let expected: u64 = taken.iter().map(|keys| keys.expected_queues(cpus)).sum();
    let mut devices: Vec<_> = taken.iter_mut().flat_map(|keys| keys.queues()).collect();
    devices.sort_by_key(|queues| queues.position);
    let queues: u64 = devices.iter().map(|queues| u64::from(queues.count)).sum();
    let expected = match queues.max(expected) {
        // The queues of disks that are added later.
        0 => cpus.count.into(),
        expected => expected,
    };
    let (workers, pin) = process::take_workers(&mut raw.process, cpus, expected)?;
    let admin = process::take_admin(&mut raw.process, &names)?;
    let metrics = process::take_metrics(&mut raw.process, admin.as_ref(), &names)?;
    let drain_timeout = process::take_drain_timeout(&mut raw.process)?;
    let hang_warning = process::take_hang_warning(&mut raw.process)?;
    let sandbox = SandboxConfig::take(&mut raw.process)?;
    let user = UserConfig::take(&mut raw.process)?;
    if let Some(state) = &state {
        state.check_writers(user.as_ref().map(|user| user.ids().0))?;
    }
    let strict = raw.process.switch_or_default(&process::STRICT)?;
    finish(raw.process)?;
    let mut placement = QueuePlacement::new(workers);
    for mut queues in devices {
        if let Err(error) = queues.assign(&mut placement) {
            if !queues.is_added {
                return Err(error.into());
            }
            tracing::warn!("{error}; it was added at run time: its queue-map is ignored");
            queues.map.forget_request();
            queues.assign(&mut placement)?;
        }
    }
    Ok(ClosedConfig {
        workers,
        pin,
        hang_warning,
        admin,
        metrics,
        drain_timeout,
        sandbox,
        user,
        state,
        saved,
        contracts,
        placement,
        table: interfaces,
        limit_groups,
        interfaces: taken,
        strict,
        opens_all: false,
    })
}

/// Makes each interface take its tables, and its disks in the order given.
fn take_devices(
    raw: &mut RawConfig,
    interfaces: Interfaces,
    taken: &mut [Box<dyn InterfaceKeys>],
    context: &mut ResolveContext<'_>,
) -> Result<(), SettingError> {
    let mut tables: Vec<Vec<RawTable>> = taken.iter().map(|_| Vec::new()).collect();
    for table in raw.tables.drain(..) {
        tables[table.interface].push(table);
    }
    for (keys, tables) in taken.iter_mut().zip(tables) {
        keys.take_tables(tables, context)?;
    }
    for (index, mut settings) in raw.disks.drain(..).enumerate() {
        let interface = interfaces.take(&mut settings)?;
        let (owner, position) = (format!("disk #{}", index + 1), ListPosition::Disk(index));
        taken[interface].take_disk(DiskTable { settings, owner, position }, context)?;
    }
    Ok(())
}

fn nothing_to_serve(process: &Settings, interfaces: Interfaces) -> SettingError {
    let names: Vec<_> = ["disk"].into_iter().chain(interfaces.tables().map(|(_, table)| table.name)).collect();
    let list = |format: fn(&&str) -> String| names.iter().map(format).collect::<Vec<_>>().join(" or ");
    let serves: String = interfaces.serving_keys().map(|key| format!(", or --{key}")).collect();
    let expected = format!(
        "at least one {} KEY=VALUE,..., or a {} table in --config FILE{serves}, or --admin PATH to add disks later",
        list(|name| format!("--{name}")),
        list(|name| format!("[[{name}]]")),
    );
    process.error("disk", "none", expected)
}

#[cfg(test)]
pub mod tests;
