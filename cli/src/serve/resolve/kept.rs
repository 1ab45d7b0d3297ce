//! What a state file changes of the configuration's LUNs.
//!
//! The configuration wins: what is kept of run-time changes and does not go together with it is left out, with a warning, and the daemon
//! starts. A LUN that guests use must not be missing because another one cannot be had.

use std::path::PathBuf;

use mqblk_core::settings::{SettingError, Settings};

use super::lun::{LunKeys, check_shared};
use super::names::{Names, Places};
use super::{ConfigError, ControllerKeys, Storages};
use crate::serve::config::{LunConfig, LunOrigin, LunUnit, StateConfig};
use crate::serve::state::{Added, State};

/// `state`: the file, with what lies in it.
pub fn take_state(settings: &mut Settings) -> Result<Option<StateConfig>, SettingError> {
    let Some(path) = settings.text("state").map(PathBuf::from) else { return Ok(None) };
    let kept = State::read(&path)?;
    Ok(Some(StateConfig { path, kept }))
}

/// A LUN to be opened: where it is from, and whether guests find it.
pub struct Chosen {
    keys: LunKeys,
    origin: LunOrigin,
    mapped: bool,
}

/// The LUNs of each controller: the configuration's without those that were removed, and those that were added. A LUN that others share
/// the unit of is opened all the same. What the configuration has not any more is dropped from `kept`.
pub fn choose(
    configured: Vec<Vec<LunKeys>>,
    kept: Option<&mut State>,
    controllers: &[ControllerKeys],
    kinds: &[&'static str],
    names: &mut Names,
) -> Vec<Vec<Chosen>> {
    let origin = LunOrigin::Configuration;
    let chosen = configured
        .into_iter()
        .map(|luns| luns.into_iter().map(|keys| Chosen { keys, origin, mapped: true }).collect::<Vec<_>>());
    let mut chosen: Vec<Vec<Chosen>> = chosen.collect();
    let Some(kept) = kept else { return chosen };
    let ids: Vec<&str> = controllers.iter().map(|controller| controller.seen_by_luns().0).collect();
    kept.removed.retain(|lun| {
        let at = ids.iter().position(|id| *id == lun.controller);
        at.is_some_and(|at| chosen[at].iter().any(|other| other.keys.id() == lun.id))
    });
    // Nobody needs the storage of a LUN that is gone, unless others share its unit.
    let shared = chosen.iter().flatten().map(|lun| lun.keys.shared());
    let shared = shared.chain(kept.added.iter().filter(|lun| !lun.gone).map(Added::shared));
    let needed: Vec<String> = shared.flatten().map(str::to_owned).collect();
    for (luns, id) in chosen.iter_mut().zip(&ids) {
        luns.iter_mut().for_each(|lun| lun.mapped = !kept.has_removed(id, lun.keys.id()));
        let gone = luns.extract_if(.., |lun| !lun.mapped && !needed.iter().any(|id| id == lun.keys.id()));
        gone.for_each(|lun| lun.keys.claims().iter().for_each(|claim| names.release(claim)));
    }
    kept.added.retain(|lun| match add(lun, &mut chosen, controllers, &ids, kinds, names) {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!("{error}; the configuration goes before the state file, which forgets this LUN");
            false
        }
    });
    chosen
}

fn add(
    lun: &Added,
    chosen: &mut [Vec<Chosen>],
    controllers: &[ControllerKeys],
    ids: &[&str],
    kinds: &[&'static str],
    names: &mut Names,
) -> Result<(), SettingError> {
    let given = lun.given()?;
    let Some(at) = ids.iter().position(|id| *id == lun.controller) else {
        let expected = "a controller of the configuration";
        return Err(given.error("controller", format!("{:?}", lun.controller), expected));
    };
    // Where one was removed another may be.
    let taken = chosen[at].iter().filter(|other| other.mapped && !lun.gone);
    let mut places: Places = taken.map(|other| (other.keys.place(), other.keys.id().to_owned())).collect();
    let mut claimed = names.clone();
    let keys = LunKeys::take(given, controllers[at].seen_by_luns(), kinds, &mut places, &mut claimed)?;
    let all = chosen.iter().enumerate().flat_map(|(at, luns)| luns.iter().map(move |lun| (at, &lun.keys)));
    check_shared(&all.chain([(at, &keys)]).collect::<Vec<_>>())?;
    *names = claimed;
    chosen[at].push(Chosen { keys, origin: LunOrigin::RunTime, mapped: !lun.gone });
    Ok(())
}

/// Opens the LUNs. One that was added and cannot be opened now is left out, and stays in the state file.
pub fn open<S: Storages>(
    chosen: Vec<Vec<Chosen>>,
    storages: &mut S,
) -> Result<Vec<Vec<LunConfig<S::Disk>>>, ConfigError> {
    let mut opened = Vec::new();
    for luns in chosen {
        let mut these = Vec::new();
        for Chosen { keys, origin, mapped } in luns {
            let config = match keys.open(storages) {
                Ok(config) => LunConfig { origin, mapped, ..config },
                Err(error) if origin == LunOrigin::RunTime => {
                    tracing::error!("not served: {error}; the state file keeps it for the next start");
                    continue;
                }
                Err(error) => return Err(error),
            };
            these.push(config);
        }
        opened.push(these);
    }
    let units: Vec<String> = opened
        .iter()
        .flatten()
        .filter(|lun| matches!(lun.unit, LunUnit::Own(_)))
        .map(|lun: &LunConfig<S::Disk>| lun.id.clone())
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
