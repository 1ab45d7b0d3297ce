//! The keys of a disk's requests: limits, merging and depth.

use mqblk_core::settings::Settings;

use super::target::{Apply, LiveTarget, describe};
use crate::change::ChangeError;
use crate::limits::current_limit_pairs;
use crate::limits::{LIMIT_GROUP, is_limit_key, take_limits};
use crate::pair::Pair;
use crate::state::DaemonState;
use crate::storage::{plug_pairs, take_plug};

fn not_open(settings: &Settings) -> ChangeError {
    ChangeError::Failed(format!("{}: its storage is still being opened", settings.subject()))
}

pub(super) fn prepare_limits(
    state: &DaemonState,
    target: &LiveTarget,
    settings: &mut Settings,
) -> Result<Option<Apply>, ChangeError> {
    let Some(export) = &target.export else { return Ok(None) };
    let health = export.health.clone().ok_or_else(|| not_open(settings))?;
    let before = health.limits().own();
    let given = settings.keys_left().any(|key| is_limit_key(key) || key == LIMIT_GROUP.name);
    let limits = take_limits(settings, before)?;
    let group = state.limit_groups().take_group(settings)?;
    if !given {
        return Ok(None);
    }
    Ok(Some(Box::new(move |state| {
        if limits != before {
            health.limits().set_own(limits);
        }
        if let Some(group) = &group {
            health.limits().set_group(group.as_ref());
        }
        tracing::info!(disk = health.name(), limits = %describe(&current_limit_pairs(health.limits())), "limits set");
        state.engine().disks_changed().map_err(|gone| ChangeError::Failed(gone.to_string()))
    })))
}

pub(super) fn current_limits(target: &LiveTarget) -> Vec<Pair> {
    let health = target.export.as_ref().and_then(|export| export.health.clone());
    health.map(|health| current_limit_pairs(health.limits())).unwrap_or_default()
}

pub(super) fn prepare_plug(
    _state: &DaemonState,
    target: &LiveTarget,
    settings: &mut Settings,
) -> Result<Option<Apply>, ChangeError> {
    let Some(export) = &target.export else { return Ok(None) };
    let (health, before) = export.health.clone().zip(export.plug()).ok_or_else(|| not_open(settings))?;
    let plug = take_plug(settings, before)?;
    if plug == before {
        return Ok(None);
    }
    Ok(Some(Box::new(move |state| {
        health.set_plug(plug);
        tracing::info!(disk = health.name(), plug = %describe(&plug_pairs(&plug)), "merging set");
        state.engine().disks_changed().map_err(|gone| ChangeError::Failed(gone.to_string()))
    })))
}

pub(super) fn current_plug(target: &LiveTarget) -> Vec<Pair> {
    target.export.as_ref().and_then(|export| export.plug()).map(|plug| plug_pairs(&plug)).unwrap_or_default()
}
