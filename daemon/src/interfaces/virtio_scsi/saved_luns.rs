//! Applies the state file to the configuration's LUNs.
//!
//! The configuration has priority: saved changes that conflict with it are dropped with a warning, and the daemon starts. One LUN that
//! cannot be served must not prevent the others from being served.

use mqblk_core::settings::SettingError;

use super::config::{LunConfig, LunOrigin, LunUnit};
use super::controller_keys::ControllerKeys;
use super::lun_keys::{LunKeys, UsedAddresses, check_shared};
use super::state::{AddedLun, SavedLuns};
use crate::resolve::{ConfigError, UniqueNames};
use crate::storage_backends::StorageBackends;

/// A LUN to open, with its origin and whether guests see it.
pub(super) struct LunToOpen {
    keys: LunKeys,
    origin: LunOrigin,
    mapped: bool,
}

/// Returns the LUNs of each controller: those of the configuration that were not removed, and those that were added. A removed LUN is
/// included while others share its logical unit. Drops entries from `saved` that no longer match the configuration.
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

/// Opens the LUNs. One added at run time that cannot be opened is skipped, and stays in the state file.
pub(super) fn open(
    chosen: Vec<Vec<LunToOpen>>,
    storages: &dyn StorageBackends,
) -> Result<Vec<Vec<LunConfig>>, ConfigError> {
    let mut opened = Vec::new();
    for luns in chosen {
        let mut controller_luns = Vec::new();
        for LunToOpen { keys, origin, mapped } in luns {
            let config = match keys.open(storages) {
                Ok(config) => LunConfig { origin, mapped, ..config },
                Err(error) if origin == LunOrigin::RunTime => {
                    tracing::error!("not served: {error}; the state file keeps it for the next start");
                    continue;
                }
                Err(error) => return Err(error),
            };
            controller_luns.push(config);
        }
        opened.push(controller_luns);
    }
    let units: Vec<String> = opened
        .iter()
        .flatten()
        .filter(|lun| matches!(lun.unit, LunUnit::Own(_)))
        .map(|lun: &LunConfig| lun.id.clone())
        .collect();
    for luns in &mut opened {
        luns.retain(|lun| match &lun.unit {
            LunUnit::Shared(unit) if !units.contains(unit) => {
                tracing::error!(
                    lun = lun.id,
                    "not served: the LUN {unit:?}, whose unit it shares, is not; the state file keeps it"
                );
                false
            }
            _ => true,
        });
    }
    Ok(opened)
}
