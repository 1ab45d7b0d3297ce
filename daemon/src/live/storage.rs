//! The keys of a disk's requests: limits, merging and depth.

use std::collections::BTreeMap;

use mqblk_core::settings::Settings;
use mqblk_engine::PlugOptions;

use super::{Apply, LiveTarget, describe};
use crate::limits::{LIMIT_GROUP, is_limit_key, keys_of_limit, take_limits};
use crate::print::{Pair, current_limit_pairs, plug_pairs};
use crate::resize::ChangeError;
use crate::resolve::take_plug;
use crate::state::DaemonState;

/// The keys of merging and depth.
const PLUG_KEYS: [&str; 4] = ["merge", "merge-bytes", "merge-segments", "depth"];

/// Returns true if a key is one of those here.
pub(super) fn is_key(key: &str) -> bool {
    is_limit_key(key) || key == LIMIT_GROUP || PLUG_KEYS.contains(&key)
}

/// Returns the value of a key that is not configured.
pub(super) fn default_value(key: &str, keys: &BTreeMap<String, Option<String>>) -> Option<String> {
    if let Some([rate, max, burst_s]) = keys_of_limit(key) {
        let is_set = |key: &str| keys.get(key).is_some_and(Option::is_some);
        return match key {
            _ if key == rate || key == max => Some("off".to_owned()),
            // Of a burst without a length.
            _ => (key == burst_s && is_set(max)).then(|| "1".to_owned()),
        };
    }
    if key == LIMIT_GROUP {
        return Some("off".to_owned());
    }
    let pair = plug_pairs(&PlugOptions::default()).into_iter().find(|(other, _)| *other == key);
    pair.map(|(_, value)| value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

fn not_open(settings: &Settings) -> ChangeError {
    ChangeError::Failed(format!("{}: its storage is still being opened", settings.subject()))
}

pub(super) fn prepare_limits(
    state: &DaemonState,
    target: &LiveTarget,
    settings: &mut Settings,
) -> Result<Option<Apply>, ChangeError> {
    let Some(export) = &target.export else { return Ok(None) };
    let health = export.health().ok_or_else(|| not_open(settings))?;
    let before = health.limits().own();
    let given = settings.keys_left().any(|key| is_limit_key(key) || key == LIMIT_GROUP);
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
    let health = target.export.as_ref().and_then(|export| export.health());
    health.map(|health| current_limit_pairs(health.limits())).unwrap_or_default()
}

pub(super) fn prepare_plug(
    _state: &DaemonState,
    target: &LiveTarget,
    settings: &mut Settings,
) -> Result<Option<Apply>, ChangeError> {
    let Some(export) = &target.export else { return Ok(None) };
    let (health, before) = export.health().zip(export.plug()).ok_or_else(|| not_open(settings))?;
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
