//! virtio-scsi over vhost-user: controllers with LUNs, which also change at run time.
//!
//! `controller_keys` and `lun_keys` take the keys, and `saved_controllers` and `saved_luns` apply the state file
//! (`state`) to them. `controller` serves, `luns` has all LUNs at run time. `verbs` are those of the admin socket,
//! `stat` the statistics.

mod config;
mod controller;
mod controller_keys;
mod identify;
mod lun_keys;
mod luns;
mod migration_gate;
mod print;
mod saved_controllers;
mod saved_luns;
mod stat;
mod state;
mod tables;
#[cfg(test)]
mod tests;
mod verbs;

use std::sync::Arc;
use std::time::Instant;

use mqblk_admin::Verb;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{AnyDisk, Engine};

use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::file_use::FileUse;
use crate::interface::{
    Check, ConfigTable, ConfiguredInterface, DiskTable, GuestInterface, HostContext, InterfaceKeys, IsTaken,
    ListPosition, ResolveContext, ServedDevice, ServedInterface, StartFailure, UnassignedQueues,
};
use crate::key_values::RawTable;
use crate::out::{Admission, OutDisk};
use crate::sockets::PlannedSocket;
use crate::storage_backends::StorageBackends;
use config::{ControllerConfig, LunOrigin, WORD};
use controller::Controller;
use controller_keys::ControllerKeys;
use lun_keys::RawLun;
use luns::{LunSelector, Luns};
use saved_controllers::not_served;
use saved_luns::LunToOpen;
use state::SavedLuns;
use tables::{CONTROLLER_TABLE, LUN_TABLE};

/// virtio-scsi.
#[derive(Debug)]
pub struct VirtioScsiInterface;

impl GuestInterface for VirtioScsiInterface {
    fn word(&self) -> &'static str {
        WORD
    }

    fn tables(&self) -> &'static [ConfigTable] {
        &[CONTROLLER_TABLE]
    }

    fn identify(&self, tables: &[RawTable]) -> Result<Vec<Settings>, SettingError> {
        identify::identify(tables)
    }

    fn keys(&self) -> Box<dyn InterfaceKeys> {
        Box::new(ScsiKeys::default())
    }
}

/// The keys of all controllers and LUNs.
#[derive(Default)]
struct ScsiKeys {
    controllers: Vec<ControllerKeys>,
    raw_luns: Vec<RawLun>,
    /// The LUNs of each controller, once all are known.
    luns: Vec<Vec<LunToOpen>>,
    saved: Option<SavedLuns>,
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

    fn take_process(&mut self, _process: &mut Settings, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.saved = context.saved.map(|saved| saved.section(WORD)).transpose()?;
        let mut raw = std::mem::take(&mut self.raw_luns);
        if let Some(saved) = &mut self.saved {
            saved_controllers::apply(saved, &mut self.controllers, &mut raw, context);
        }
        let (kinds, names) = (context.kinds, &mut *context.names);
        let luns = lun_keys::take_all(raw, &self.controllers, kinds, names)?;
        self.luns = saved_luns::apply_saved(luns, self.saved.as_mut(), &self.controllers, kinds, names);
        Ok(())
    }

    fn queues(&mut self) -> Vec<UnassignedQueues<'_>> {
        self.controllers.iter_mut().enumerate().map(|(index, keys)| keys.queues(index)).collect()
    }

    fn sockets(&self) -> Vec<PlannedSocket> {
        let configured = self.controllers.iter().filter(|keys| keys.origin() == ChangeSource::Configuration);
        configured.map(ControllerKeys::planned_socket).collect()
    }

    fn open(
        mut self: Box<Self>,
        storages: &dyn StorageBackends,
        admission: &mut Admission,
    ) -> Result<ConfiguredInterface, ConfigError> {
        let saved = self.saved.take();
        Ok(configured(self.open_controllers(storages, admission)?, saved))
    }
}

impl ScsiKeys {
    fn open_controllers(
        self,
        storages: &dyn StorageBackends,
        admission: &mut Admission,
    ) -> Result<Vec<ControllerConfig>, ConfigError> {
        let given: Vec<_> = self.controllers.iter().map(|controller| controller.given().cloned()).collect();
        let luns = saved_luns::open(self.luns, &given, storages, admission)?;
        let controllers = self.controllers.into_iter().zip(luns);
        let mut configs = Vec::new();
        for (keys, luns) in controllers {
            let origin = keys.origin();
            match keys.finish(luns) {
                Ok(config) => configs.push(config),
                Err(error) if origin == ChangeSource::RunTime => not_served(&error),
                Err(error) => return Err(error),
            }
        }
        Ok(configs)
    }
}

/// Returns the controllers of the configuration alone.
fn own(controllers: &[ControllerConfig]) -> impl Iterator<Item = &ControllerConfig> {
    controllers.iter().filter(|controller| controller.origin == ChangeSource::Configuration)
}

/// Returns the interface with all controllers and LUNs of the configuration, and those added at run time before.
fn configured(controllers: Vec<ControllerConfig>, saved: Option<SavedLuns>) -> ConfiguredInterface {
    let section = |(index, controller)| (ListPosition::Controller(index), print::sections(controller));
    ConfiguredInterface {
        sections: own(&controllers).enumerate().map(section).collect(),
        ids: controllers.iter().map(|controller| ("controller", controller.id.clone())).collect(),
        queues: controllers.iter().map(|controller| usize::from(controller.endpoint.queues)).sum(),
        files: files(&controllers),
        check: check(&controllers),
        ..ConfiguredInterface::new(move |host| start(&controllers, saved, host))
    }
}

/// Returns the check of the files of reservations, and of the sockets of the configuration.
fn check(controllers: &[ControllerConfig]) -> Check {
    let luns = controllers.iter().flat_map(|controller| &controller.luns);
    let reservations: Vec<_> = luns.filter_map(|lun| Some((lun.id.clone(), lun.reservations()?.to_owned()))).collect();
    let sockets = own(controllers);
    let sockets: Vec<Check> =
        sockets.map(|controller| controller.endpoint.check(format!("controller {:?}", controller.id))).collect();
    Box::new(move || {
        for (id, path) in &reservations {
            controller::open_reservations(path).map_err(|why| {
                let expected = "a file that reservations were kept in, or a new one";
                ConfigError::Invalid(format!("lun {id:?}: reservations: found {why}, expected {expected}"))
            })?;
        }
        sockets.iter().try_for_each(|check| check())
    })
}

/// Returns the files that are opened by path.
fn files(controllers: &[ControllerConfig]) -> Vec<FileUse> {
    let sockets = own(controllers).flat_map(|controller| {
        let incoming = controller.incoming_luns.iter().map(|incoming| FileUse::Images(incoming.folder.clone()));
        controller.endpoint.files().into_iter().chain(incoming)
    });
    let luns = controllers.iter().flat_map(|controller| &controller.luns);
    let configured = luns.filter(|lun| lun.origin == LunOrigin::Configuration);
    let luns = configured.filter_map(|lun| lun.reservations().map(|path| FileUse::Replaced(path.to_owned())));
    sockets.chain(luns).collect()
}

fn start(
    controllers: &[ControllerConfig],
    saved: Option<SavedLuns>,
    host: &HostContext,
) -> Result<Arc<dyn ServedInterface>, StartFailure> {
    let luns = Luns::start(controllers, host, saved.unwrap_or_default())?;
    // Now, not as the last step: a VMM may bring a guest as soon as it can connect.
    luns.set_migratable(true);
    Ok(Arc::new(ServedControllers { luns, engine: Arc::clone(&host.engine) }))
}

/// All controllers, served.
struct ServedControllers {
    luns: Arc<Luns>,
    engine: Arc<Engine>,
}

impl ServedInterface for ServedControllers {
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)> {
        let device = |controller: Arc<Controller>| {
            let position = ListPosition::Controller(controller.number());
            (position, Arc::new(stat::ServedController::new(Arc::clone(&self.luns), controller)) as _)
        };
        self.luns.controllers().into_iter().map(device).collect()
    }

    fn adds(&self, settings: &Settings) -> bool {
        settings.peek("controller").is_some()
    }

    fn add_disk(&self, settings: Settings, is_taken: IsTaken<'_>, source: ChangeSource) -> Result<String, ChangeError> {
        // A controller with one LUN cannot be added like this.
        if !self.adds(&settings) {
            let expected = "controller=ID: a disk becomes a LUN of a controller, which `mqblk controller add` makes";
            return Err(ChangeError::Setting(settings.error("controller", "nothing", expected)));
        }
        if let Some(id) = settings.peek("id").filter(|id| is_taken(id)) {
            return Err(ChangeError::Setting(settings.error(
                "id",
                format!("{id:?}, the id of another disk"),
                "a name of its own",
            )));
        }
        Ok(self.luns.add(settings, source)?.id)
    }

    fn remove_disk(&self, id: &str, force: bool, source: ChangeSource) -> Option<Result<(), ChangeError>> {
        let lun = self.luns.list().into_iter().find(|lun| lun.id == id)?;
        if !force && lun.controller.is_connected() {
            let why = "a guest is connected, which would lose the LUN: detach it there, or say so (--force)";
            return Some(Err(ChangeError::Failed(format!("lun {id:?}: {why}"))));
        }
        Some(verbs::remove_lun(&self.luns, &self.engine, &LunSelector::Id(id.to_owned()), source).map(|_| ()))
    }

    fn give_up(&self, disk: &OutDisk) {
        if disk.interface == WORD {
            self.luns.give_up(disk);
        }
    }

    fn add_controller(
        &self,
        settings: &Settings,
        is_taken: IsTaken<'_>,
        source: ChangeSource,
    ) -> Option<Result<String, ChangeError>> {
        Some(self.luns.add_controller(settings, is_taken, source))
    }

    fn remove_controller(&self, id: &str, force: bool, source: ChangeSource) -> Option<Result<(), ChangeError>> {
        self.luns.remove_controller(id, force, source)
    }

    fn verbs(self: Arc<Self>) -> Vec<Verb> {
        verbs::verbs(&self.luns, &self.engine)
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
