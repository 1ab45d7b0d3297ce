//! The LUNs of all controllers, including those added and removed at run time.
//!
//! The table is locked for short times only. Slow steps (opening storage, waiting for commands) run without the lock,
//! while the LUN's entry reserves its address and names.

mod controllers;
mod lun;
mod migration;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mqblk_core::lock::{RankedGuard, RankedMutex, assert_may_wait};
use mqblk_core::settings::{SettingError, Settings};
use mqblk_core::thread::spawn;
use mqblk_core::{ByteLen, DiskSlot, Resize, SizeUsers};

use super::config::{LunConfig, LunOrigin, LunUnit, WORD};
use super::controller::{Controller, LunError, ServedUnit};
use super::lun_keys::{LunKeys, UsedAddresses, find_controller};
use super::state::{AddedLun, SavedLuns};
use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::contract::device_key;
use crate::interface::HostContext;
use crate::out::OutDisk;
use crate::resize::{self, GuestNotice, ResizeOutcome};
pub(super) use lun::{LunEntry, LunSelector, LunState, Removal, RemovalProgress};

/// Interval of the checks while a stop waits for a removal.
const REMOVAL_CHECK: Duration = Duration::from_millis(1);

/// All controllers and their LUNs.
pub(super) struct Luns {
    controllers: RankedMutex<Vec<Arc<Controller>>>,
    /// The number of the next controller: lists sort by it.
    next_number: AtomicUsize,
    host: HostContext,
    table: RankedMutex<Vec<LunEntry>>,
    changed: Condvar,
    removals: RankedMutex<Vec<JoinHandle<()>>>,
    /// The LUNs for the next daemon.
    saved: RankedMutex<SavedLuns>,
}

impl Luns {
    /// Returns the controllers, in the order of their addition.
    pub(super) fn controllers(&self) -> Vec<Arc<Controller>> {
        self.controllers.lock().clone()
    }

    /// Returns the controller `id`.
    ///
    /// # Errors
    /// If there is none.
    pub(super) fn controller(&self, id: &str) -> Result<Arc<Controller>, SettingError> {
        let mut named = Settings::new("lun");
        named.insert("controller", id)?;
        self.find_controller(&mut named)
    }

    /// Takes `controller`, and returns the controller of that id, unless it is being removed.
    fn find_controller(&self, settings: &mut Settings) -> Result<Arc<Controller>, SettingError> {
        let mut controllers = self.controllers();
        controllers.retain(|controller| !controller.is_removing());
        let ids: Vec<&str> = controllers.iter().map(|controller| controller.id()).collect();
        let at = find_controller(settings, &ids)?;
        Ok(controllers.swap_remove(at))
    }

    /// Returns the ready LUNs of the controller `id`, sorted by address.
    fn ready_luns(&self, id: &str) -> Vec<LunEntry> {
        let own = |lun: &LunEntry| lun.is_ready() && lun.controller.id() == id;
        self.list().into_iter().filter(own).collect()
    }

    /// Returns all LUNs, sorted by controller and address.
    pub(super) fn list(&self) -> Vec<LunEntry> {
        let mut luns = self.table().clone();
        luns.sort_by_key(|lun| (lun.controller.number(), lun.address));
        luns
    }

    /// Returns all logical units, without duplicates.
    pub(super) fn units(&self) -> Vec<Arc<ServedUnit>> {
        let mut units: Vec<Arc<ServedUnit>> = self.table().iter().filter_map(|lun| lun.unit.clone()).collect();
        units.sort_by_key(Arc::as_ptr);
        units.dedup_by(|one, other| Arc::ptr_eq(one, other));
        units
    }

    /// Adds the LUN of `settings`. Undoes all of it on an error.
    ///
    /// # Errors
    /// If a value is invalid or already claimed, or the storage cannot be opened.
    pub(super) fn add(&self, settings: Settings, source: ChangeSource) -> Result<LunEntry, ChangeError> {
        let added_settings = settings.clone();
        let (keys, pending, shared) = self.begin_add(settings, source)?;
        let name = keys.id().to_owned();
        let failed = |error: LunError| ChangeError::Failed(format!("lun {name:?}: {error}"));
        // The guest of a LUN that was out may still run.
        let (recorded, device) = (self.host.contracts.saved(), device_key(&pending.controller.endpoint().socket));
        let given = recorded.devices().get(&device).and_then(|given| given.disks.get(&keys.address().to_string()));
        let LunConfig { id, address, unit, .. } = keys.open(self.host.storages.as_ref(), given)?;
        let unit = match (unit, shared) {
            (LunUnit::Own(config), _) => Arc::new(ServedUnit::new(&id, *config).map_err(failed)?),
            (LunUnit::Shared(_), Some(unit)) => unit,
            (LunUnit::Shared(_), None) => return Err(failed(LunError::NoUnit)),
        };
        unit.with_resize_lock(|| {
            let controller = Arc::clone(&pending.controller);
            controller.map(address, pending.slot, &unit).map_err(failed)?;
            let added = AddedLun::new(controller.id(), &id, (address.target, address.lun), &added_settings);
            let added_settings = added.settings.clone();
            // Recorded before the LUN is ready, so that its removal is recorded later.
            if source == ChangeSource::RunTime {
                self.save(|state| state.add(added));
            }
            let lun = pending.commit(&unit, added_settings);
            tracing::info!(lun = id, controller = controller.id(), address = %address, "LUN added");
            Ok(lun)
        })
    }

    /// Checks the settings, and reserves the LUN's address and names by a table entry.
    fn begin_add(
        &self,
        mut settings: Settings,
        source: ChangeSource,
    ) -> Result<(LunKeys, PendingLun<'_>, Option<Arc<ServedUnit>>), ChangeError> {
        // Locked until the entry is in the table: of two concurrent additions of one id the later one sees the other.
        let claimed = self.host.names.lock();
        let mut table = self.table();
        let controller = self.find_controller(&mut settings)?;
        let mut names = claimed.clone();
        for lun in &*table {
            let owner = format!("lun {:?}", lun.id);
            let of_unit = lun.unit.iter().flat_map(|unit| unit.claims());
            lun.claims.iter().cloned().chain(of_unit).for_each(|claim| names.insert(&claim, &owner));
        }
        let own = || table.iter().filter(|lun| lun.is_of(&controller));
        let mut addresses: UsedAddresses = own().map(|lun| (lun.address, lun.id.clone())).collect();
        let seen = (controller.id(), controller.endpoint().socket.as_path());
        let keys = LunKeys::take(settings, seen, &self.host.storages.kinds(), &mut addresses, &mut names)?;
        let shared = keys.shared_unit().map(|unit| find_shared_unit(&table, &controller, &keys, unit)).transpose()?;
        let taken: HashSet<DiskSlot> = own().map(|lun| lun.slot).collect();
        let Some(slot) = (0..=u16::MAX).map(DiskSlot).find(|slot| !taken.contains(slot)) else {
            return Err(ChangeError::Failed(format!(
                "controller {:?}: it has as many LUNs as it can",
                controller.id()
            )));
        };
        table.push(LunEntry {
            id: keys.id().to_owned(),
            controller: Arc::clone(&controller),
            address: keys.address(),
            slot,
            state: LunState::Adding,
            unit: shared.clone(),
            claims: keys.claims().to_vec(),
            origin: source.into(),
            added_settings: None,
        });
        let pending = PendingLun { luns: self, controller, slot, committed: false };
        Ok((keys, pending, shared))
    }

    /// Removes a LUN. Waits for at most `timeouts`; after that the removal continues in the background.
    ///
    /// # Errors
    /// If there is no such LUN, it is still being added, or its storage could not be flushed after the removal.
    pub(super) fn remove(
        self: &Arc<Luns>,
        which: &LunSelector,
        timeouts: Duration,
        source: ChangeSource,
    ) -> Result<Removal, ChangeError> {
        let deadline = Instant::now() + timeouts;
        let mut table = self.table();
        let at = self.find(&table, which)?;
        let lun = table[at].clone();
        let progress = match &lun.state {
            LunState::Adding => {
                return Err(ChangeError::Failed(format!("lun {:?}: it is still being added; try again", lun.id)));
            }
            LunState::Removing(progress) => Arc::clone(progress),
            LunState::Ready => {
                let progress = Arc::new(RemovalProgress::default());
                let (luns, thread_lun, thread_progress) = (Arc::clone(self), lun.clone(), Arc::clone(&progress));
                let (begin, begins) = channel::<()>();
                let thread = spawn("lun-removal", move || {
                    // Ends when the removal is recorded, so that a later addition is recorded after it.
                    let _ = begins.recv();
                    luns.finish_removal(thread_lun, &thread_progress);
                });
                let thread = thread.map_err(|error| ChangeError::Failed(format!("lun {:?}: {error}", lun.id)))?;
                table[at].state = LunState::Removing(Arc::clone(&progress));
                {
                    let mut removals = self.removals.lock();
                    removals.retain(|thread| !thread.is_finished());
                    removals.push(thread);
                }
                drop(table);
                // Recorded now: the LUN stays removed even if the daemon is killed.
                if source == ChangeSource::RunTime {
                    self.save(|state| match lun.origin {
                        LunOrigin::Configuration => state.remove_configured(lun.controller.id(), &lun.id),
                        LunOrigin::RunTime => drop(state.remove_added(&lun.id)),
                    });
                }
                drop(begin);
                table = self.table();
                progress
            }
        };
        loop {
            if let Some(result) = progress.done.get() {
                return match result {
                    Ok(()) => Ok(Removal::Done(lun)),
                    Err(why) => Err(ChangeError::Failed(why.clone())),
                };
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Removal::Pending(lun, progress));
            }
            table = table.wait_timeout(&self.changed, left);
        }
    }

    /// Records that the next daemon does not serve a LUN that is out.
    pub(super) fn give_up(&self, lun: &OutDisk) {
        self.save(|state| match lun.origin {
            ChangeSource::Configuration => {
                let controller = lun.settings.peek("controller").unwrap_or_default();
                state.remove_configured(controller, &lun.id);
            }
            ChangeSource::RunTime => drop(state.remove_added(&lun.id)),
        });
    }

    /// Forgets the settings of an earlier LUN of this id.
    pub(super) fn forget_earlier(&self, id: &str) {
        self.host.kept.forget(id);
        self.host.out.remove(id);
    }

    /// Records a change in the state file, if there is one.
    fn save(&self, change: impl FnOnce(&mut SavedLuns)) {
        if let Some(state) = &self.host.state {
            let mut saved = self.saved.lock();
            change(&mut saved);
            state.set(WORD, &*saved);
        }
    }

    /// Returns true if the next daemon will also serve a LUN.
    pub(super) fn survives_restart(&self, lun: &LunEntry) -> bool {
        let saved = || self.host.state.as_ref().is_some_and(|state| state.is_written());
        lun.origin == LunOrigin::Configuration || saved()
    }

    /// Removes a LUN whose state is `Removing`. Takes as long as its storage.
    fn finish_removal(&self, lun: LunEntry, progress: &RemovalProgress) {
        assert_may_wait("storage");
        lun.controller.unmap(lun.address);
        progress.flushing.store(true, Ordering::Relaxed);
        let flushed = lun.unit.as_ref().map_or(Ok(()), |unit| unit.disk().sync());
        self.table().retain(|other| !other.is_of(&lun.controller) || other.slot != lun.slot);
        let id = lun.id.clone();
        self.host.kept.forget(&id);
        // Closes the storage before the removal is reported as done.
        drop(lun);
        let result =
            flushed.map_err(|error| format!("lun {id:?}: it is gone, but written data may be lost: flush: {error}"));
        match &result {
            Ok(()) => tracing::info!(lun = id, "LUN removed"),
            Err(error) => tracing::error!("{error}"),
        }
        // Only set here, once.
        let _ = progress.done.set(result);
        let _held = self.table();
        self.changed.notify_all();
    }

    /// Resizes the logical unit of a LUN; without a size, adopts the current size of its storage. Notifies the guests
    /// of all its LUNs.
    ///
    /// # Errors
    /// If there is no such LUN, or its storage cannot have that size.
    pub(super) fn resize(
        &self,
        which: &LunSelector,
        request: Resize,
    ) -> Result<(LunEntry, ResizeOutcome), ChangeError> {
        let table = self.table();
        let lun = table[self.find(&table, which)?].clone();
        drop(table);
        let failed = |reason: &dyn std::fmt::Display| ChangeError::Failed(format!("lun {:?}: {reason}", lun.id));
        let Some(unit) = lun.unit.clone().filter(|_| lun.is_ready()) else {
            return Err(failed(&format!("its state is {}", lun.state.word())));
        };
        unit.with_resize_lock(|| {
            let ready = |table: &[LunEntry]| -> Vec<LunEntry> {
                table.iter().filter(|lun| lun.is_ready() && lun.maps(&unit)).cloned().collect()
            };
            let paths = ready(&self.table());
            let result = request.carry_out(unit.disk().as_ref(), &mut Users { unit: &unit, paths: &paths });
            let resized = result.map_err(|error| resize::resize_error(&format!("lun {:?}", lun.id), request, error))?;
            if !resized.is_change() {
                return Ok((lun.clone(), ResizeOutcome { resized, guest: GuestNotice::Unchanged }));
            }
            for path in &paths {
                path.controller.resized(path.address);
                path.controller.record(path.address, &unit);
            }
            let connected = paths.iter().any(|path| path.controller.is_connected());
            let guest = if connected { GuestNotice::Notified } else { GuestNotice::NoGuest };
            tracing::info!(lun = lun.id, before = %resized.before, size = %resized.size, guest = guest.word(), "LUN resized");
            Ok((lun.clone(), ResizeOutcome { resized, guest }))
        })
    }

    /// Waits for all removals, until `deadline` at most.
    pub(super) fn wait_for_removals(&self, deadline: Instant) {
        let removing = || {
            let luns = self.list().into_iter().filter(|lun| matches!(lun.state, LunState::Removing(_)));
            luns.map(|lun| lun.id).collect::<Vec<_>>()
        };
        for lun in removing() {
            tracing::info!(lun, "waiting for the LUN's storage");
        }
        let removals = std::mem::take(&mut *self.removals.lock());
        for thread in removals {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(REMOVAL_CHECK);
            }
            if thread.is_finished() && thread.join().is_err() {
                tracing::error!("a thread that removed a LUN had panicked");
            }
        }
        for lun in removing() {
            tracing::error!(
                lun,
                "the LUN's storage did not answer in time (drain-timeout-s): written data may be lost"
            );
        }
    }

    fn find(&self, table: &[LunEntry], which: &LunSelector) -> Result<usize, SettingError> {
        const LISTED: usize = 16;
        let error_settings = Settings::new("lun");
        match which {
            LunSelector::Id(id) => table.iter().position(|lun| lun.id == *id).ok_or_else(|| {
                let ids: Vec<&str> = table.iter().map(|lun| lun.id.as_str()).collect();
                let expected = match ids.len() {
                    0 => "the id of a LUN, of which there is none".to_owned(),
                    1..=LISTED => format!("the id of a LUN: {}", ids.join(", ")),
                    many => format!("the id of one of the {many} LUNs that lun.list lists"),
                };
                error_settings.error("id", format!("{id:?}"), expected)
            }),
            LunSelector::Address(id, address) => {
                let controller = self.controller(id)?;
                let found = table.iter().position(|lun| lun.is_of(&controller) && lun.address == *address);
                found.ok_or_else(|| {
                    let found = format!("target {} lun {}, where no LUN is", address.target, address.lun);
                    error_settings.error("target", found, format!("the place of a LUN of controller {id:?}"))
                })
            }
        }
    }

    fn table(&self) -> RankedGuard<'_, Vec<LunEntry>> {
        self.table.lock()
    }
}

/// The users of a logical unit's size.
struct Users<'a> {
    unit: &'a ServedUnit,
    paths: &'a [LunEntry],
}

impl SizeUsers for Users<'_> {
    fn set_size(&mut self, size: ByteLen) {
        self.unit.set_size(size);
    }

    fn refresh(&mut self) {
        self.paths.iter().for_each(|path| path.controller.refresh(path.slot));
    }
}

/// The table entry of a LUN that is being added. Dropping it without [`PendingLun::commit`] removes the entry.
struct PendingLun<'a> {
    luns: &'a Luns,
    controller: Arc<Controller>,
    slot: DiskSlot,
    committed: bool,
}

impl PendingLun<'_> {
    /// Marks the LUN as ready.
    fn commit(mut self, unit: &Arc<ServedUnit>, added_settings: BTreeMap<String, String>) -> LunEntry {
        self.committed = true;
        let mut table = self.luns.table();
        let at = table.iter().position(|lun| lun.is_of(&self.controller) && lun.slot == self.slot);
        // Always found: only this object removes the entry.
        let lun = &mut table[at.unwrap_or_default()];
        lun.state = LunState::Ready;
        lun.unit = Some(Arc::clone(unit));
        lun.claims = vec![("id", lun.id.clone())];
        lun.added_settings = Some(added_settings);
        lun.clone()
    }
}

impl Drop for PendingLun<'_> {
    fn drop(&mut self) {
        if !self.committed {
            self.luns.table().retain(|lun| !lun.is_of(&self.controller) || lun.slot != self.slot);
        }
    }
}

/// Returns the logical unit `name`, to share with a new LUN of a controller.
fn find_shared_unit(
    table: &[LunEntry],
    controller: &Controller,
    keys: &LunKeys,
    name: &str,
) -> Result<Arc<ServedUnit>, SettingError> {
    let ready = table.iter().filter(|lun| lun.is_ready()).filter_map(|lun| lun.unit.as_ref());
    let Some(unit) = ready.into_iter().find(|unit| unit.name() == name) else {
        let found = match table.iter().find(|lun| lun.id == name) {
            Some(LunEntry { state: LunState::Ready, unit: Some(unit), .. }) => {
                format!(", which itself shares the unit of {:?}", unit.name())
            }
            Some(lun) => format!(", whose state is {}", lun.state.word()),
            None => String::new(),
        };
        return Err(keys.no_such_unit(name, &found));
    };
    let target = keys.address().target;
    let twice = table.iter().find(|lun| lun.is_of(controller) && lun.address.target == target && lun.maps(unit));
    match twice {
        Some(other) => Err(keys.unit_twice(name, &other.id)),
        None => Ok(Arc::clone(unit)),
    }
}

#[cfg(test)]
mod tests;
