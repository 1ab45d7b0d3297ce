//! Serves controllers: those of a configuration, and those added and removed while others are served.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar};

use mqblk_core::DiskSlot;
use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::settings::Settings;
use mqblk_engine::QueuePlacement;

use super::super::config::{ControllerConfig, LunOrigin, LunUnit, UnitConfig};
use super::super::controller::{Controller, ControllerError, InitialLun, LunError, ServedUnit};
use super::super::controller_keys::ControllerKeys;
use super::super::migration_gate::MigrationGate;
use super::super::saved_controllers::not_served;
use super::super::state::{AddedController, SavedLuns};
use super::Luns;
use super::lun::{LunEntry, LunState};
use super::migration::LunMigration;
use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::cpus::Cpus;
use crate::flush::flush_all;
use crate::interface::{HostContext, IsTaken, ResolveContext};
use crate::names::{Claim, claimed_error};
use crate::queues::workers_of;

impl Luns {
    /// Serves the controllers of a configuration.
    ///
    /// # Errors
    /// If the host refuses a resource. Everything is undone then.
    pub(crate) fn start(
        configs: &[ControllerConfig],
        host: &HostContext,
        saved: SavedLuns,
    ) -> Result<Arc<Luns>, ControllerError> {
        let added: HashMap<String, BTreeMap<String, String>> =
            saved.added.iter().map(|lun| (lun.id.clone(), lun.settings.clone())).collect();
        let mut units = HashMap::new();
        for (config, lun) in configs.iter().flat_map(|config| config.luns.iter().map(move |lun| (config, lun))) {
            if let LunUnit::Own(unit) = &lun.unit {
                let unit = ServedUnit::new(&lun.id, UnitConfig::clone(unit));
                let unit = unit.map_err(|error| ControllerError::lun(&config.id, lun.address, error))?;
                units.insert(lun.id.as_str(), Arc::new(unit));
            }
        }
        let luns = Arc::new(Luns {
            controllers: RankedMutex::new(LockRank::Controllers, Vec::new()),
            next_number: AtomicUsize::new(configs.len()),
            host: host.clone(),
            table: RankedMutex::new(LockRank::LunTable, Vec::new()),
            changed: Condvar::new(),
            removals: RankedMutex::leaf(Vec::new()),
            saved: RankedMutex::new(LockRank::SavedSection, saved),
        });
        for (number, config) in configs.iter().enumerate() {
            let (mut first, mut mapped) = (Vec::new(), Vec::new());
            for (slot, lun) in (0..).map(DiskSlot).zip(config.luns.iter().filter(|lun| lun.mapped)) {
                let unit = match &lun.unit {
                    LunUnit::Own(_) => units.get(lun.id.as_str()),
                    LunUnit::Shared(name) => units.get(name.as_str()),
                };
                let unit = unit.ok_or_else(|| ControllerError::lun(&config.id, lun.address, LunError::NoUnit))?;
                first.push(InitialLun { address: lun.address, slot, unit: Arc::clone(unit) });
                mapped.push((lun, slot, Arc::clone(unit)));
            }
            let controller = match luns.serve(config, number, &first) {
                Ok(controller) => Arc::new(controller),
                Err(error) if config.origin == ChangeSource::RunTime => {
                    not_served(&error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            for (lun, slot, unit) in mapped {
                luns.table().push(LunEntry {
                    id: lun.id.clone(),
                    controller: Arc::clone(&controller),
                    address: lun.address,
                    slot,
                    state: LunState::Ready,
                    unit: Some(unit),
                    claims: vec![("id", lun.id.clone())],
                    origin: lun.origin,
                    added_settings: added.get(&lun.id).filter(|_| lun.origin == LunOrigin::RunTime).cloned(),
                });
            }
            luns.controllers.lock().push(controller);
        }
        // Drops entries that did not fit the configuration.
        luns.save(|_| {});
        Ok(luns)
    }

    /// Serves a controller, whose LUNs do not migrate yet.
    fn serve(
        self: &Arc<Luns>,
        config: &ControllerConfig,
        number: usize,
        luns: &[InitialLun],
    ) -> Result<Controller, ControllerError> {
        let gate = Arc::new(MigrationGate::new());
        let migration = LunMigration::new(config, Arc::clone(&gate), Arc::downgrade(self));
        Controller::start(config, number, luns, &self.host, (gate, Arc::new(migration)))
    }

    /// Enables or disables the migration of guests. Waits for incoming migrations.
    pub(crate) fn set_migratable(&self, on: bool) {
        self.controllers().iter().for_each(|controller| controller.migration_gate().set(on));
    }

    /// Serves the controller of `settings`, without LUNs.
    ///
    /// # Errors
    /// If a value is invalid or already claimed, or its socket cannot be made.
    pub(crate) fn add_controller(
        self: &Arc<Luns>,
        settings: &Settings,
        is_taken: IsTaken<'_>,
        source: ChangeSource,
    ) -> Result<String, ChangeError> {
        let (mut keys, claims) = self.claim_controller(settings, is_taken, source)?;
        let id = keys.id().to_owned();
        let release = |error: ChangeError| {
            self.release(&claims);
            error
        };
        // On a copy: the real one counts the controller once it is served.
        let mut placement: QueuePlacement = self.host.placement.lock().clone();
        keys.queues(0).assign(&mut placement).map_err(|error| release(error.into()))?;
        let config = keys.finish(Vec::new()).map_err(|error| release(error.into()))?;
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let controller = self.serve(&config, number, &[]);
        let controller = controller.map_err(|error| release(ChangeError::Failed(error.to_string())))?;
        controller.migration_gate().set(true);
        self.host.placement.lock().place(&worker_map(&controller));
        // Recorded before the controller can be found, so that its removal is recorded later.
        if source == ChangeSource::RunTime {
            self.save(|state| state.add_controller(AddedController::new(&id, settings)));
        }
        self.host.kept.forget(&id);
        self.controllers.lock().push(Arc::new(controller));
        tracing::info!(controller = id, "controller added");
        Ok(id)
    }

    fn release(&self, claims: &[Claim]) {
        let mut names = self.host.names.lock();
        claims.iter().for_each(|claim| names.release(claim));
    }

    /// Checks the settings of a controller, and reserves its id and its socket.
    fn claim_controller(
        &self,
        settings: &Settings,
        is_taken: IsTaken<'_>,
        source: ChangeSource,
    ) -> Result<(ControllerKeys, Vec<Claim>), ChangeError> {
        // Queried now: it takes milliseconds, which would delay guests at the daemon's start.
        let cpus = Cpus::of_this_host();
        let kinds = self.host.storages.kinds();
        // The guest of a controller that was out may still run.
        let recorded = self.host.contracts.saved();
        let (keys, claims) = {
            let mut names = self.host.names.lock();
            let keys = names.attempt(|names| {
                let mut context =
                    ResolveContext { cpus: &cpus, kinds: &kinds, names, saved: None, given: recorded.devices() };
                ControllerKeys::take(settings.clone(), &mut context, settings.subject().to_owned())
            })?;
            let (claims, owner) = (keys.claims(), format!("controller {:?}", keys.id()));
            claims.iter().for_each(|claim| names.insert(claim, &owner));
            (keys, claims)
        };
        // After the id is claimed, and without a lock: of two concurrent additions the later one sees the other.
        if is_taken(keys.id()) {
            self.release(&claims);
            return Err(claimed_error(settings, "id", keys.id(), &format!("disk or LUN {:?}", keys.id())).into());
        }
        Ok((if source == ChangeSource::RunTime { keys.added() } else { keys }, claims))
    }

    /// Removes a controller with its LUNs: waits for its requests in flight, flushes and closes the storage that no
    /// other LUN uses, and removes its socket. `None`: there is no such controller.
    pub(crate) fn remove_controller(
        &self,
        id: &str,
        force: bool,
        source: ChangeSource,
    ) -> Option<Result<(), ChangeError>> {
        let controller = self.controllers().into_iter().find(|controller| controller.id() == id)?;
        if let Err(why) = self.begin_remove_controller(&controller, force, source) {
            return Some(Err(ChangeError::Failed(format!("controller {id:?}: {why}"))));
        }
        controller.begin_stop();
        controller.stop();
        controller.forget_guest();
        // Waits for a guest that arrives at this moment.
        controller.migration_gate().set(false);
        let own: Vec<LunEntry> = self.table().extract_if(.., |lun| lun.is_of(&controller)).collect();
        self.controllers.lock().retain(|other| !Arc::ptr_eq(other, &controller));
        self.host.placement.lock().remove(&worker_map(&controller));
        let claims = controller.claims().to_vec();
        drop(controller);
        own.iter().map(|lun| lun.id.as_str()).chain([id]).for_each(|id| self.host.kept.forget(id));
        let kept: HashSet<String> = self.units().iter().map(|unit| unit.name().to_owned()).collect();
        let units: Vec<_> =
            own.iter().filter_map(|lun| lun.unit.clone()).filter(|unit| !kept.contains(unit.name())).collect();
        drop(own);
        let disks = units.iter().map(|unit| (format!("lun {:?}", unit.name()), Arc::clone(unit.disk()))).collect();
        drop(units);
        let flushed = flush_all(disks, self.host.drain_timeout);
        // Only now: the next controller of its id may have the same images.
        self.release(&claims);
        Some(match flushed {
            Ok(()) => {
                tracing::info!(controller = id, "controller removed");
                Ok(())
            }
            Err(error) => {
                let why = format!("{error}; the controller is gone, but written data may be lost");
                tracing::error!(controller = id, "{why}");
                Err(ChangeError::Failed(why))
            }
        })
    }

    /// Marks a controller as being removed, unless that is refused.
    fn begin_remove_controller(
        &self,
        controller: &Controller,
        force: bool,
        source: ChangeSource,
    ) -> Result<(), String> {
        let mut names: HashSet<String> = {
            let saved = self.saved.lock();
            let added = saved.added.iter().filter(|lun| lun.controller == controller.id()).map(|lun| lun.id.clone());
            let removed =
                saved.removed.iter().filter(|lun| lun.controller == controller.id()).map(|lun| lun.id.clone());
            added.chain(removed).collect()
        };
        let table = self.table();
        if controller.is_removing() {
            return Err("it is being removed".to_owned());
        }
        if !force && controller.is_connected() {
            return Err(
                "a guest is connected, which would lose its LUNs: detach it there, or say so (--force)".to_owned()
            );
        }
        if let Some(lun) = table.iter().find(|lun| lun.is_of(controller) && !lun.is_ready()) {
            return Err(format!("LUN {:?} is {}; try again", lun.id, lun.state.word()));
        }
        names.extend(table.iter().filter(|lun| lun.is_of(controller)).map(|lun| lun.id.clone()));
        let shares = |lun: &&LunEntry| lun.unit.as_ref().is_some_and(|unit| names.contains(unit.name()));
        if let Some(other) = table.iter().filter(|lun| !lun.is_of(controller)).find(shares) {
            let of = other.controller.id();
            return Err(format!("LUN {:?} of controller {of:?} shares a unit of it: remove that one first", other.id));
        }
        controller.set_removing();
        drop(table);
        // Recorded now: it stays removed even if the daemon is killed.
        if source == ChangeSource::RunTime {
            self.save(|state| state.remove_controller(controller.id(), controller.origin()));
        }
        Ok(())
    }
}

/// Returns the worker of each request queue.
fn worker_map(controller: &Controller) -> Vec<u16> {
    workers_of(&controller.queue_settings())
}
