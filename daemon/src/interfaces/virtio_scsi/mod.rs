//! virtio-scsi over vhost-user: controllers with LUNs, which also change at run time.
//!
//! `controller_keys` and `lun_keys` take the keys, `saved_luns` applies the state file (`state`) to them, `controller` serves, `luns` has
//! all LUNs at run time, `verbs` are those of the admin socket, `stat` their statistics.

mod config;
mod controller;
mod controller_keys;
mod lun_keys;
mod luns;
mod print;
mod saved_luns;
mod stat;
mod state;
#[cfg(test)]
mod tests;
mod verbs;

use std::sync::Arc;
use std::time::Instant;

use mqblk_admin::Verb;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{AnyDisk, Engine};

use crate::file::RawTable;
use crate::interface::{
    ConfigTable, ConfiguredInterface, DeviceKeys, DiskTable, GuestInterface, HostContext, InterfaceKeys, ListPosition,
    ProcessKey, ResolveContext, ServedDevice, ServedInterface, StartFailure,
};
use crate::print::{Pair, Section};
use crate::resolve::ConfigError;
use crate::sandbox::FileUse;
use crate::storage_backends::StorageBackends;
use config::{ControllerConfig, LunUnit, StateConfig};
use controller_keys::ControllerKeys;
use luns::Luns;
use saved_luns::LunToOpen;

/// The word of the interface.
const WORD: &str = "virtio-scsi";
/// The tables of LUNs, inside those of controllers.
const LUN_TABLE: ConfigTable = ConfigTable {
    name: "lun",
    value_name: "controller=ID,KEY=VALUE,...",
    about: "A LUN of a controller; may be repeated",
    help: include_str!("lun_help.txt"),
    inner: &[],
};
const CONTROLLER_TABLE: ConfigTable = ConfigTable {
    name: "controller",
    value_name: "KEY=VALUE,...",
    about: "A virtio-scsi controller to serve, with the LUNs of --lun; may be repeated",
    help: include_str!("controller_help.txt"),
    inner: &[LUN_TABLE],
};
const STATE_KEY: ProcessKey = ProcessKey {
    key: "state",
    value_name: "FILE",
    value_if_omitted: None,
    about: "Keep LUNs that are added and removed while the daemon runs in this file, for the next start [default: they are lost]",
    more: "Made when it is not there. What does not go together with the configuration is left out, with a warning.",
    heading: None,
    serves: false,
};

/// virtio-scsi.
#[derive(Debug)]
pub struct VirtioScsiInterface;

impl GuestInterface for VirtioScsiInterface {
    fn word(&self) -> &'static str {
        WORD
    }

    fn process_keys(&self) -> &'static [ProcessKey] {
        &[STATE_KEY]
    }

    fn tables(&self) -> &'static [ConfigTable] {
        &[CONTROLLER_TABLE]
    }

    fn keys(&self) -> Box<dyn InterfaceKeys> {
        Box::new(ScsiKeys::default())
    }
}

/// The keys of a LUN, not yet checked.
struct RawLun {
    /// The index of its controller; `None`: the key `controller` names it.
    controller: Option<usize>,
    settings: Settings,
}

/// The keys of all controllers and LUNs.
#[derive(Default)]
struct ScsiKeys {
    controllers: Vec<ControllerKeys>,
    raw_luns: Vec<RawLun>,
    /// The LUNs of each controller, once all are known.
    luns: Vec<Vec<LunToOpen>>,
    state: Option<StateConfig>,
}

impl InterfaceKeys for ScsiKeys {
    fn take_tables(&mut self, tables: Vec<RawTable>, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        for RawTable { name, parent, settings, .. } in tables {
            if name == LUN_TABLE.name {
                self.raw_luns.push(RawLun { controller: parent, settings });
            } else {
                let owner = format!("controller #{}", self.controllers.len() + 1);
                self.controllers.push(ControllerKeys::take(settings, context, owner)?);
            }
        }
        Ok(())
    }

    /// A disk is a controller with one LUN.
    fn take_disk(&mut self, disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        let (keys, settings) = ControllerKeys::of_disk(disk.settings, context, disk.owner)?;
        self.raw_luns.push(RawLun { controller: Some(self.controllers.len()), settings });
        self.controllers.push(keys);
        Ok(())
    }

    fn take_process(&mut self, process: &mut Settings, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.state = saved_luns::take_state(process)?;
        let raw = std::mem::take(&mut self.raw_luns);
        let (kinds, names) = (context.kinds, &mut *context.names);
        let luns = lun_keys::take_all(raw, &self.controllers, kinds, names)?;
        let saved = self.state.as_mut().map(|state| &mut state.saved);
        self.luns = saved_luns::apply_saved(luns, saved, &self.controllers, kinds, names);
        Ok(())
    }

    fn devices(&mut self) -> Vec<(ListPosition, &mut dyn DeviceKeys)> {
        let controllers = self.controllers.iter_mut().enumerate();
        controllers.map(|(index, keys)| (ListPosition::Controller(index), keys as _)).collect()
    }

    fn open(self: Box<Self>, storages: &dyn StorageBackends) -> Result<Box<dyn ConfiguredInterface>, ConfigError> {
        Ok(Box::new(self.into_config(storages)?))
    }
}

impl ScsiKeys {
    fn into_config(self, storages: &dyn StorageBackends) -> Result<ScsiConfig, ConfigError> {
        let luns = saved_luns::open(self.luns, storages)?;
        let controllers = self.controllers.into_iter().zip(luns);
        let controllers = controllers.map(|(keys, luns)| keys.finish(luns)).collect::<Result<_, _>>()?;
        Ok(ScsiConfig { controllers, state: self.state })
    }
}

/// All controllers and LUNs of the configuration.
struct ScsiConfig {
    controllers: Vec<ControllerConfig>,
    state: Option<StateConfig>,
}

impl ConfiguredInterface for ScsiConfig {
    fn process_pairs(&self) -> Vec<Pair> {
        self.state.iter().map(|state| (STATE_KEY.key, crate::print::string(&state.path.to_string_lossy()))).collect()
    }

    fn sections(&self) -> Vec<(ListPosition, Vec<Section>)> {
        let controllers = self.controllers.iter().enumerate();
        controllers.map(|(index, controller)| (ListPosition::Controller(index), print::sections(controller))).collect()
    }

    fn ids(&self) -> Vec<(&'static str, String)> {
        self.controllers.iter().map(|controller| ("controller", controller.id.clone())).collect()
    }

    fn queues(&self) -> usize {
        self.controllers.iter().map(|controller| usize::from(controller.endpoint.queues)).sum()
    }

    fn check(&self) -> Result<(), ConfigError> {
        for lun in self.controllers.iter().flat_map(|controller| &controller.luns) {
            if let LunUnit::Own(unit) = &lun.unit
                && let Some(path) = &unit.reservations
            {
                controller::open_reservations(path).map_err(|why| {
                    let expected = "a file that reservations were kept in, or a new one";
                    ConfigError::Invalid(format!("lun {:?}: reservations: found {why}, expected {expected}", lun.id))
                })?;
            }
        }
        self.controllers
            .iter()
            .try_for_each(|controller| controller.endpoint.check(format!("controller {:?}", controller.id)))
    }

    fn files(&self) -> Vec<FileUse> {
        let state = self.state.iter().map(|state| FileUse::Replaced(state.path.clone()));
        let controllers = self.controllers.iter().flat_map(|controller| {
            let incoming = controller.incoming_luns.iter().map(|folder| FileUse::Images(folder.clone()));
            controller.endpoint.files().into_iter().chain(incoming)
        });
        let luns = self.controllers.iter().flat_map(|controller| &controller.luns).flat_map(|lun| match &lun.unit {
            LunUnit::Own(unit) => unit.reservations.clone().map(FileUse::Replaced),
            LunUnit::Shared(_) => None,
        });
        state.chain(controllers).chain(luns).collect()
    }

    fn start(self: Box<Self>, host: &HostContext) -> Result<Arc<dyn ServedInterface>, StartFailure> {
        let luns = Arc::new(Luns::start(&self.controllers, host, self.state)?);
        Ok(Arc::new(ServedControllers { luns, engine: Arc::clone(&host.engine) }))
    }
}

/// All controllers, served.
struct ServedControllers {
    luns: Arc<Luns>,
    engine: Arc<Engine>,
}

impl ServedInterface for ServedControllers {
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)> {
        let controllers = 0..self.luns.controllers().len();
        let device = |index| Arc::new(stat::ServedController::new(Arc::clone(&self.luns), index)) as _;
        controllers.map(|index| (ListPosition::Controller(index), device(index))).collect()
    }

    fn verbs(self: Arc<Self>) -> Vec<Verb> {
        verbs::verbs(&self.luns, &self.engine)
    }

    fn publish(&self) -> Result<(), StartFailure> {
        self.luns.set_migratable(true);
        Ok(())
    }

    fn begin_stop(&self) {
        self.luns.set_migratable(false);
        self.luns.controllers().iter().for_each(|controller| controller.begin_stop());
    }

    fn stop(&self, deadline: Instant) {
        self.luns.controllers().iter().for_each(|controller| controller.stop());
        // The admin socket is closed: no further removal can start.
        self.luns.wait_for_removals(deadline);
    }

    fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        let units = self.luns.units();
        units.iter().map(|unit| (format!("lun {:?}", unit.name()), Arc::clone(unit.disk()))).collect()
    }
}
