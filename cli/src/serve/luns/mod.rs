//! The LUNs of all controllers, which come and go while guests use them.
//!
//! The table is locked for moments only. Whatever waits (opening storage, ending a guest's commands) is done beside it, with the LUN's place
//! and names held in the table meanwhile, so that nobody else waits for it.

mod carried;
mod lun;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::{ByteLen, DiskSlot, Resize, SizeUsers};
use mqblk_engine::{AnyDisk, Engine};

use super::config::{ControllerConfig, LunConfig, LunOrigin, LunUnit, StateConfig, UnitConfig};
use super::controller::{Controller, ControllerError, FirstLun, LunError, Unit};
use super::resize::{self, Changed, GuestNotice};
use super::resolve::{LunKeys, Names, Places, Storages as _, find_controller};
use super::state::{Added, State, StateFile};
use super::storages::Registry;
use super::watch::Watched;
use carried::CarriedLuns;
pub use lun::{ChangeError, Going, Lun, LunState, Removal, Which};

/// All controllers and their LUNs.
pub struct Luns {
    controllers: Vec<Controller>,
    /// What disks and controllers have.
    names: Names,
    table: Mutex<Vec<Lun>>,
    changed: Condvar,
    removals: Mutex<Vec<JoinHandle<()>>>,
    /// What a daemon after this one is told of. Locked after the table.
    state: Option<Mutex<StateFile>>,
    /// Their part in the state that travels with a guest, of each controller.
    carried: Vec<Arc<CarriedLuns>>,
}

impl Luns {
    /// Serves the controllers of a configuration. `names` are what its disks and controllers have.
    ///
    /// # Errors
    /// When the host refuses a resource; then nothing is left behind.
    pub fn start(
        configs: &[ControllerConfig<Arc<AnyDisk>>],
        names: Names,
        (engine, drain_timeout): (&Arc<Engine>, Duration),
        state: Option<StateConfig>,
    ) -> Result<Luns, LunsError> {
        let kept = state.iter().flat_map(|state| &state.kept.added);
        let kept: HashMap<String, BTreeMap<String, String>> =
            kept.map(|lun| (lun.id.clone(), lun.settings.clone())).collect();
        let state = state.map(|StateConfig { path, kept }| {
            StateFile::take(&path, kept).map(Mutex::new).map_err(|source| LunsError::State { path, source })
        });
        let state = state.transpose()?;
        let mut units = HashMap::new();
        for (config, lun) in configs.iter().flat_map(|config| config.luns.iter().map(move |lun| (config, lun))) {
            if let LunUnit::Own(unit) = &lun.unit {
                let unit = Unit::new(&lun.id, UnitConfig::clone(unit));
                let unit = unit.map_err(|error| ControllerError::lun(&config.id, lun.place, error))?;
                units.insert(lun.id.as_str(), Arc::new(unit));
            }
        }
        let (mut controllers, mut carried) = (Vec::new(), Vec::new());
        let mut table = Vec::new();
        for (controller, config) in configs.iter().enumerate() {
            let mut first = Vec::new();
            for (slot, lun) in (0..).map(DiskSlot).zip(config.luns.iter().filter(|lun| lun.mapped)) {
                let unit = match &lun.unit {
                    LunUnit::Own(_) => units.get(lun.id.as_str()),
                    LunUnit::Shared(name) => units.get(name.as_str()),
                };
                let unit = unit.ok_or_else(|| ControllerError::lun(&config.id, lun.place, LunError::NoUnit))?;
                first.push(FirstLun { place: lun.place, slot, unit: Arc::clone(unit) });
                table.push(Lun {
                    id: lun.id.clone(),
                    controller,
                    place: lun.place,
                    slot,
                    state: LunState::Ready,
                    unit: Some(Arc::clone(unit)),
                    claims: vec![("id", lun.id.clone())],
                    origin: lun.origin,
                    given: kept.get(&lun.id).filter(|_| lun.origin == LunOrigin::RunTime).cloned(),
                });
            }
            let part = Arc::new(CarriedLuns::new(&config.id, config.incoming_luns.clone()));
            controllers.push(Controller::start(config, &first, (engine, drain_timeout), Arc::clone(&part) as _)?);
            carried.push(part);
        }
        let (changed, removals) = (Condvar::new(), Mutex::default());
        Ok(Luns { controllers, names, table: Mutex::new(table), changed, removals, state, carried })
    }

    /// From now on guests can be migrated, or no longer. Waits for those that are arriving.
    pub fn travel(self: &Arc<Luns>, on: bool) {
        let luns = if on { Arc::downgrade(self) } else { Weak::new() };
        self.carried.iter().for_each(|part| part.belong_to(Weak::clone(&luns)));
    }

    /// The LUNs of the controller `id` that guests use, by place.
    fn of(&self, id: &str) -> Vec<Lun> {
        let own = |lun: &Lun| lun.is_ready() && self.controllers[lun.controller].id() == id;
        self.list().into_iter().filter(own).collect()
    }

    /// The controllers, in the order of the configuration.
    pub fn controllers(&self) -> &[Controller] {
        &self.controllers
    }

    /// The place of the controller `id` among them.
    ///
    /// # Errors
    /// When there is none.
    pub fn controller(&self, id: &str) -> Result<usize, SettingError> {
        let mut named = Settings::new("lun");
        named.insert("controller", id)?;
        find_controller(&mut named, &self.ids())
    }

    fn ids(&self) -> Vec<&str> {
        self.controllers.iter().map(Controller::id).collect()
    }

    /// All LUNs, those of one controller by place.
    pub fn list(&self) -> Vec<Lun> {
        let mut luns = self.table().clone();
        luns.sort_by_key(|lun| (lun.controller, lun.place));
        luns
    }

    /// All units, each once.
    pub fn units(&self) -> Vec<Arc<Unit>> {
        let mut units: Vec<Arc<Unit>> = self.table().iter().filter_map(|lun| lun.unit.clone()).collect();
        units.sort_by_key(Arc::as_ptr);
        units.dedup_by(|one, other| Arc::ptr_eq(one, other));
        units
    }

    /// Adds the LUN that `settings` describe. When it fails nothing is left behind.
    ///
    /// # Errors
    /// When a value is wrong or somebody else's, or the storage cannot be opened.
    pub fn add(&self, settings: Settings) -> Result<Lun, ChangeError> {
        let given = settings.clone();
        let (keys, seat, shared) = self.take_seat(settings)?;
        let name = keys.id().to_owned();
        let failed = |error: LunError| ChangeError::Failed(format!("lun {name:?}: {error}"));
        let LunConfig { id, place, unit, .. } = keys.open(&mut Registry)?;
        let unit = match (unit, shared) {
            (LunUnit::Own(config), _) => Arc::new(Unit::new(&id, *config).map_err(failed)?),
            (LunUnit::Shared(_), Some(unit)) => unit,
            (LunUnit::Shared(_), None) => return Err(failed(LunError::NoUnit)),
        };
        unit.alone(|| {
            self.controllers[seat.controller].map(place, seat.slot, &unit).map_err(failed)?;
            let controller = self.controllers[seat.controller].id();
            let added = Added::new(controller, &id, (place.target, place.lun), &given);
            let lun = seat.keep(&unit, added.settings.clone());
            self.keep(|state| state.add(added));
            tracing::info!(lun = id, controller, place = %place, "LUN added");
            Ok(lun)
        })
    }

    /// Judges what is asked for, and holds its place and names.
    fn take_seat(&self, mut settings: Settings) -> Result<(LunKeys, Seat<'_>, Option<Arc<Unit>>), ChangeError> {
        let ids = self.ids();
        let controller = find_controller(&mut settings, &ids)?;
        let mut table = self.table();
        let mut names = self.names.clone();
        for lun in &*table {
            let owner = format!("lun {:?}", lun.id);
            let of_unit = lun.unit.iter().flat_map(|unit| unit.claims());
            lun.claims.iter().cloned().chain(of_unit).for_each(|claim| names.hold(&claim, &owner));
        }
        let own = || table.iter().filter(|lun| lun.controller == controller);
        let mut places: Places = own().map(|lun| (lun.place, lun.id.clone())).collect();
        let seen = (ids[controller], self.controllers[controller].front().socket.as_path());
        let keys = LunKeys::take(settings, seen, &Registry.kinds(), &mut places, &mut names)?;
        let shared = keys.shared().map(|unit| unit_to_share(&table, controller, &keys, unit)).transpose()?;
        let taken: HashSet<DiskSlot> = own().map(|lun| lun.slot).collect();
        let Some(slot) = (0..=u16::MAX).map(DiskSlot).find(|slot| !taken.contains(slot)) else {
            return Err(ChangeError::Failed(format!(
                "controller {:?}: it has as many LUNs as it can",
                ids[controller]
            )));
        };
        table.push(Lun {
            id: keys.id().to_owned(),
            controller,
            place: keys.place(),
            slot,
            state: LunState::Adding,
            unit: shared.clone(),
            claims: keys.claims().to_vec(),
            origin: LunOrigin::RunTime,
            given: None,
        });
        let seat = Seat { luns: self, controller, slot, kept: false };
        Ok((keys, seat, shared))
    }

    /// Takes a LUN away, waiting for at most `patience`; then it goes on by itself.
    ///
    /// # Errors
    /// When there is none, it is only coming, or its storage could not be flushed when it had gone.
    pub fn remove(self: &Arc<Luns>, which: &Which, patience: Duration) -> Result<Removal, ChangeError> {
        let until = Instant::now() + patience;
        let mut table = self.table();
        let at = self.find(&table, which)?;
        let lun = table[at].clone();
        let going = match &lun.state {
            LunState::Adding => {
                return Err(ChangeError::Failed(format!("lun {:?}: it is only being added; ask again", lun.id)));
            }
            LunState::Removing(going) => Arc::clone(going),
            LunState::Ready => {
                let going = Arc::new(Going::default());
                let (luns, leaving, told) = (Arc::clone(self), lun.clone(), Arc::clone(&going));
                let thread = std::thread::Builder::new().name("lun-removal".into());
                let thread = thread.spawn(move || luns.take_away(leaving, &told));
                let thread =
                    thread.map_err(|error| ChangeError::Failed(format!("lun {:?}: no thread: {error}", lun.id)))?;
                table[at].state = LunState::Removing(Arc::clone(&going));
                // From now on no guest finds it, whatever becomes of this daemon.
                self.keep(|state| match lun.origin {
                    LunOrigin::Configuration => {
                        state.remove_configured(self.controllers[lun.controller].id(), &lun.id);
                    }
                    LunOrigin::RunTime => drop(state.remove_added(&lun.id)),
                });
                let mut removals = lock(&self.removals);
                removals.retain(|thread| !thread.is_finished());
                removals.push(thread);
                going
            }
        };
        loop {
            if let Some(result) = going.done.get() {
                return match result {
                    Ok(()) => Ok(Removal::Done(lun)),
                    Err(why) => Err(ChangeError::Failed(why.clone())),
                };
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Removal::Waits(lun, going));
            }
            let waited = self.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Has a change outlive the daemon, where that is wanted.
    fn keep(&self, change: impl FnOnce(&mut State)) {
        if let Some(state) = &self.state {
            lock(state).change(change);
        }
    }

    /// Whether a daemon after this one has a LUN too.
    pub fn survives_restart(&self, lun: &Lun) -> bool {
        let kept = || self.state.as_ref().is_some_and(|state| lock(state).is_written());
        lun.origin == LunOrigin::Configuration || kept()
    }

    /// The disks whose storage is watched for another size, each once, by a LUN that leads to it.
    pub fn watched(&self) -> Vec<Watched> {
        let mut seen = HashSet::new();
        let ready = self.list().into_iter().filter(Lun::is_ready);
        let units = ready.filter_map(|lun| Some((lun.id, lun.unit?)));
        let units = units.filter(|(_, unit)| unit.config().backing.watch_size && seen.insert(Arc::as_ptr(unit)));
        units.map(|(id, unit)| (id, Arc::clone(unit.disk()))).collect()
    }

    /// Ends a LUN that is marked as going. Takes as long as its storage does.
    fn take_away(&self, lun: Lun, going: &Going) {
        self.controllers[lun.controller].unmap(lun.place);
        going.flushing.store(true, Ordering::Relaxed);
        let flushed = lun.unit.as_ref().map_or(Ok(()), |unit| unit.disk().sync());
        self.table().retain(|other| (other.controller, other.slot) != (lun.controller, lun.slot));
        let id = lun.id.clone();
        // The storage is closed before anybody hears that it is.
        drop(lun);
        let result = flushed
            .map_err(|error| format!("lun {id:?}: it is gone, but what was written may be lost: flush: {error}"));
        match &result {
            Ok(()) => tracing::info!(lun = id, "LUN removed"),
            Err(error) => tracing::error!("{error}"),
        }
        // Set once, here.
        let _ = going.done.set(result);
        let _held = self.table();
        self.changed.notify_all();
    }

    /// Gives the unit of a LUN another size, or without one looks what its storage's size is now. All its LUNs hear of it.
    ///
    /// # Errors
    /// When there is no such LUN, or its storage cannot have that size.
    pub fn resize(&self, which: &Which, asked: Resize) -> Result<(Lun, Changed), ChangeError> {
        let table = self.table();
        let lun = table[self.find(&table, which)?].clone();
        drop(table);
        let failed = |why: &dyn std::fmt::Display| ChangeError::Failed(format!("lun {:?}: {why}", lun.id));
        let Some(unit) = lun.unit.clone().filter(|_| lun.is_ready()) else {
            return Err(failed(&format!("its state is {}", lun.state.word())));
        };
        unit.alone(|| {
            let ready = |table: &[Lun]| -> Vec<Lun> {
                table.iter().filter(|lun| lun.is_ready() && lun.leads_to(&unit)).cloned().collect()
            };
            let paths = ready(&self.table());
            let done = asked.carry_out(unit.disk().as_ref(), &mut Users { luns: self, unit: &unit, paths: &paths });
            let resized = done.map_err(|error| resize::refused(&format!("lun {:?}", lun.id), asked, error))?;
            if !resized.is_change() {
                return Ok((lun.clone(), Changed { resized, guest: GuestNotice::Unchanged }));
            }
            paths.iter().for_each(|path| self.controllers[path.controller].resized(path.place));
            let connected = paths.iter().any(|path| self.controllers[path.controller].is_connected());
            let guest = if connected { GuestNotice::Notified } else { GuestNotice::NoGuest };
            tracing::info!(lun = lun.id, before = %resized.before, size = %resized.size, guest = guest.word(), "LUN resized");
            Ok((lun.clone(), Changed { resized, guest }))
        })
    }

    /// Waits for the LUNs that are going.
    pub fn settle(&self) {
        for lun in self.list().iter().filter(|lun| matches!(lun.state, LunState::Removing(_))) {
            tracing::info!(lun = lun.id, "waiting for the LUN's storage");
        }
        for thread in std::mem::take(&mut *lock(&self.removals)) {
            if thread.join().is_err() {
                tracing::error!("a thread that removed a LUN had panicked");
            }
        }
    }

    fn find(&self, table: &[Lun], which: &Which) -> Result<usize, SettingError> {
        const LISTED: usize = 16;
        let wrong = Settings::new("lun");
        match which {
            Which::Id(id) => table.iter().position(|lun| lun.id == *id).ok_or_else(|| {
                let ids: Vec<&str> = table.iter().map(|lun| lun.id.as_str()).collect();
                let expected = match ids.len() {
                    0 => "the id of a LUN, of which there is none".to_owned(),
                    1..=LISTED => format!("the id of a LUN: {}", ids.join(", ")),
                    many => format!("the id of one of the {many} LUNs that lun.list tells"),
                };
                wrong.error("id", format!("{id:?}"), expected)
            }),
            Which::Place(id, place) => {
                let controller = self.controller(id)?;
                let found = table.iter().position(|lun| lun.controller == controller && lun.place == *place);
                found.ok_or_else(|| {
                    let found = format!("target {} lun {}, where no LUN is", place.target, place.lun);
                    wrong.error("target", found, format!("the place of a LUN of controller {id:?}"))
                })
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Vec<Lun>> {
        lock(&self.table)
    }
}

/// What goes by a unit's size.
struct Users<'a> {
    luns: &'a Luns,
    unit: &'a Unit,
    paths: &'a [Lun],
}

impl SizeUsers for Users<'_> {
    fn set_size(&mut self, size: ByteLen) {
        self.unit.resized(size);
    }

    fn refresh(&mut self) {
        self.paths.iter().for_each(|path| self.luns.controllers[path.controller].refresh(path.slot));
    }
}

/// Why the controllers cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LunsError {
    /// One of them.
    #[error(transparent)]
    Controller(#[from] ControllerError),
    /// The state file cannot be had.
    #[error(
        "serve: state: found {path:?}: {source}, expected a file that this daemon alone can write, in an existing folder"
    )]
    State {
        /// Where it is to be.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// The place of a LUN that is being added: given up when this is dropped without having been kept.
struct Seat<'a> {
    luns: &'a Luns,
    controller: usize,
    slot: DiskSlot,
    kept: bool,
}

impl Seat<'_> {
    /// The LUN is there.
    fn keep(mut self, unit: &Arc<Unit>, given: BTreeMap<String, String>) -> Lun {
        self.kept = true;
        let mut table = self.luns.table();
        let at = table.iter().position(|lun| (lun.controller, lun.slot) == (self.controller, self.slot));
        // Only this seat takes it out.
        let lun = &mut table[at.unwrap_or_default()];
        lun.state = LunState::Ready;
        lun.unit = Some(Arc::clone(unit));
        lun.claims = vec![("id", lun.id.clone())];
        lun.given = Some(given);
        lun.clone()
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.luns.table().retain(|lun| (lun.controller, lun.slot) != (self.controller, self.slot));
        }
    }
}

/// The unit `name` for one more LUN of a controller.
fn unit_to_share(table: &[Lun], controller: usize, keys: &LunKeys, name: &str) -> Result<Arc<Unit>, SettingError> {
    let ready = table.iter().filter(|lun| lun.is_ready()).filter_map(|lun| lun.unit.as_ref());
    let Some(unit) = ready.into_iter().find(|unit| unit.name() == name) else {
        let found = match table.iter().find(|lun| lun.id == name) {
            Some(Lun { state: LunState::Ready, unit: Some(unit), .. }) => {
                format!(", which itself shares the unit of {:?}", unit.name())
            }
            Some(lun) => format!(", whose state is {}", lun.state.word()),
            None => String::new(),
        };
        return Err(keys.no_such_unit(name, &found));
    };
    let target = keys.place().target;
    let twice =
        table.iter().find(|lun| lun.controller == controller && lun.place.target == target && lun.leads_to(unit));
    match twice {
        Some(other) => Err(keys.unit_twice(name, &other.id)),
        None => Ok(Arc::clone(unit)),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
