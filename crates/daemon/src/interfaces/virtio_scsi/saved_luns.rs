//! Applies the state file to the configuration's LUNs.
//!
//! The configuration has priority: saved changes that conflict with it are dropped with a warning, and the daemon
//! starts. A LUN that cannot be served must not prevent the others from being served.

use mqblk_core::settings::SettingError;

use super::config::{LunConfig, LunOrigin, LunUnit};
use super::controller_keys::ControllerKeys;
use super::lun_keys::{LunKeys, UsedAddresses, check_shared};
use super::state::{AddedLun, SavedLuns};
use crate::config_error::ConfigError;
use crate::contract::{DeviceContract, DiskContract};
use crate::names::UniqueNames;
use crate::out::Admission;
use crate::storage_backends::{StorageBackends, open_by_origin};

/// A LUN to open, with its origin and its visibility to guests.
pub(super) struct LunToOpen {
    keys: LunKeys,
    origin: LunOrigin,
    mapped: bool,
}

/// Returns the LUNs of each controller: those of the configuration that were not removed, and those that were added. A
/// removed LUN is included while others share its logical unit. Drops entries from `saved` that no longer match the
/// configuration.
pub(super) fn apply_saved(
    configured: Vec<Vec<LunKeys>>,
    saved: Option<&mut SavedLuns>,
    controllers: &[ControllerKeys],
    kinds: &[&'static str],
    names: &mut UniqueNames,
) -> Vec<Vec<LunToOpen>> {
    let origin = LunOrigin::Configuration;
    let chosen = configured
        .into_iter()
        .map(|luns| luns.into_iter().map(|keys| LunToOpen { keys, origin, mapped: true }).collect::<Vec<_>>());
    let mut chosen: Vec<Vec<LunToOpen>> = chosen.collect();
    let Some(saved) = saved else { return chosen };
    let ids: Vec<&str> = controllers.iter().map(|controller| controller.lun_defaults().0).collect();
    saved.removed.retain(|lun| {
        let index = ids.iter().position(|id| *id == lun.controller);
        index.is_some_and(|index| chosen[index].iter().any(|other| other.keys.id() == lun.id))
    });
    // The storage of a removed LUN is needed only if others share its logical unit.
    let shared = chosen.iter().flatten().map(|lun| lun.keys.shared_unit());
    let shared = shared.chain(saved.added.iter().filter(|lun| !lun.gone).map(AddedLun::shared_unit));
    let needed: Vec<String> = shared.flatten().map(str::to_owned).collect();
    for (luns, id) in chosen.iter_mut().zip(&ids) {
        luns.iter_mut().for_each(|lun| lun.mapped = !saved.has_removed(id, lun.keys.id()));
        let unneeded = luns.extract_if(.., |lun| !lun.mapped && !needed.iter().any(|id| id == lun.keys.id()));
        unneeded.for_each(|lun| lun.keys.claims().iter().for_each(|claim| names.release(claim)));
    }
    saved.added.retain(|lun| match add_saved(lun, &mut chosen, controllers, &ids, kinds, names) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!("{error}; the configuration has priority: the LUN is dropped from the state file");
            false
        }
    });
    chosen
}

fn add_saved(
    lun: &AddedLun,
    chosen: &mut [Vec<LunToOpen>],
    controllers: &[ControllerKeys],
    ids: &[&str],
    kinds: &[&'static str],
    names: &mut UniqueNames,
) -> Result<(), SettingError> {
    let settings = lun.to_settings()?;
    let Some(index) = ids.iter().position(|id| *id == lun.controller) else {
        let expected = "a controller of the configuration";
        return Err(settings.error("controller", format!("{:?}", lun.controller), expected));
    };
    // The address of a removed LUN is free.
    let in_use = chosen[index].iter().filter(|other| other.mapped && !lun.gone);
    let mut addresses: UsedAddresses = in_use.map(|other| (other.keys.address(), other.keys.id().to_owned())).collect();
    let mut claimed = names.clone();
    let keys = LunKeys::take(settings, controllers[index].lun_defaults(), kinds, &mut addresses, &mut claimed)?;
    let all = chosen.iter().enumerate().flat_map(|(index, luns)| luns.iter().map(move |lun| (index, &lun.keys)));
    check_shared(&all.chain([(index, &keys)]).collect::<Vec<_>>())?;
    *names = claimed;
    chosen[index].push(LunToOpen { keys, origin: LunOrigin::RunTime, mapped: !lun.gone });
    Ok(())
}

/// Returns the unit of a LUN as a guest was given it, through the LUN itself or through one that shares the unit.
/// `given`: of each controller.
fn given_unit<'a>(
    lun: &LunToOpen,
    controller: usize,
    chosen: &[Vec<LunToOpen>],
    given: &'a [Option<DeviceContract>],
) -> Option<&'a DiskContract> {
    let find = |controller: usize, lun: &LunToOpen| {
        given.get(controller)?.as_ref()?.disks.get(&lun.keys.address().to_string())
    };
    let all = chosen.iter().enumerate().flat_map(|(at, luns)| luns.iter().map(move |lun| (at, lun)));
    let mut sharing = all.filter(|(_, other)| other.keys.shared_unit() == Some(lun.keys.id()));
    find(controller, lun).or_else(|| sharing.find_map(|(at, other)| find(at, other)))
}

/// Opens the LUNs as their guests were given them (`given`: of each controller). Reports LUNs that cannot be served now
/// to `admission`.
///
/// # Errors
/// If a LUN cannot be served, and all must be.
pub(super) fn open(
    chosen: Vec<Vec<LunToOpen>>,
    given: &[Option<DeviceContract>],
    storages: &dyn StorageBackends,
    admission: &mut Admission,
) -> Result<Vec<Vec<LunConfig>>, ConfigError> {
    let of_lun = |at: usize, lun: &LunToOpen| given_unit(lun, at, &chosen, given);
    let of_luns = |(at, luns): (usize, &Vec<LunToOpen>)| luns.iter().map(|lun| of_lun(at, lun)).collect::<Vec<_>>();
    let given_units: Vec<_> = chosen.iter().enumerate().flat_map(of_luns).collect();
    let mut all: Vec<Vec<(LunConfig, LunKeys)>> = chosen.iter().map(|_| Vec::new()).collect();
    let listed = chosen.into_iter().enumerate().flat_map(|(at, luns)| luns.into_iter().map(move |lun| (at, lun)));
    let listed = listed.zip(given_units).map(|((at, lun), given)| (at, lun, given));
    let open = |(at, lun, given): (usize, LunToOpen, Option<&DiskContract>), storages: &dyn StorageBackends| {
        (lun.keys.open(storages, given), at, lun)
    };
    for (opened, at, lun) in open_by_origin(listed.collect(), |(_, lun, _)| lun.origin.source(), storages, open) {
        let LunToOpen { keys, origin, mapped } = lun;
        if let Some(config) = admission.admit(opened, origin.source(), |why| keys.out(origin.source(), why))? {
            all[at].push((LunConfig { origin, mapped, ..config }, keys));
        }
    }
    let own = all.iter().flatten().filter(|(lun, _)| matches!(lun.unit, LunUnit::Own(_)));
    let units: Vec<String> = own.map(|(lun, _)| lun.id.clone()).collect();
    let mut served = Vec::new();
    for luns in all {
        let mut of_controller = Vec::new();
        for (lun, keys) in luns {
            let source = lun.origin.source();
            let unit = match &lun.unit {
                LunUnit::Shared(unit) if !units.contains(unit) => Err(keys.unit_is_out(unit).into()),
                _ => Ok(lun),
            };
            of_controller.extend(admission.admit(unit, source, |why| keys.out(source, why))?);
        }
        served.push(of_controller);
    }
    Ok(served)
}
