//! The verbs of the admin socket that all interfaces have. Each has its own file, and is registered in [`verbs`].

mod config;
mod controller;
mod disk;
mod disk_set;
mod disks;
mod limit_group;
mod log;
mod move_queue;
pub mod resize;
mod resume;
pub(crate) mod stat;
mod takeover;
mod version;
mod worker;

use std::sync::Arc;

use mqblk_admin::{Params, VerbError, Verbs, found};
use mqblk_core::settings::{SettingError, Settings};
use serde_json::{Map, Value};

use crate::change::ChangeError;
use crate::key_values::{self, is_key};
use crate::state::DaemonState;

/// Verbs that change nothing a successor has to know: answered during a takeover.
const READING: &[&str] = &[
    "stat",
    "disks",
    "version",
    "log",
    "config.diff",
    "disk.list",
    "controller.list",
    "queue.list",
    "worker.list",
    "limit-group.list",
    "lun.list",
    "takeover",
];

/// Returns all verbs: those below, and those of the interfaces.
pub fn verbs(state: &Arc<DaemonState>) -> Verbs {
    let mut verbs = vec![stat::verb(state), disks::verb(state), version::verb(), resize::verb(state)];
    verbs.push(resume::verb(state));
    verbs.extend(disk::verbs(state));
    verbs.extend(controller::verbs(state));
    verbs.extend(worker::verbs(state));
    verbs.extend(log::verb(state));
    verbs.extend(config::verbs(state));
    verbs.extend(disk_set::verbs(state));
    verbs.extend(move_queue::verbs(state));
    verbs.extend(limit_group::verbs(state));
    verbs.extend(state.interfaces().iter().flat_map(|interface| Arc::clone(interface).verbs()));
    verbs.push(takeover::verb(state));
    let verbs = verbs.into_iter().map(|verb| {
        let state = Arc::clone(state);
        match READING.contains(&verb.name()) {
            true => verb,
            false => verb.guarded(move || state.begin_change().map_err(VerbError::Failed)),
        }
    });
    Verbs::new(verbs.collect())
}

/// Takes `settings`: the keys of a disk or LUN, as an object or as `KEY=VALUE,...`.
///
/// # Errors
/// If it has another form.
pub fn take_settings(params: &Params) -> Result<Settings, VerbError> {
    let settings = match params.value("settings") {
        Some(Value::String(text)) => key_values::parse("settings", text),
        Some(Value::Object(object)) => from_object(object),
        _ => Ok(Settings::new("settings")),
    };
    settings.map_err(|error| setting_error(error, params))
}

/// Converts an object to settings: texts, numbers and booleans, as in the configuration file.
fn from_object(object: &Map<String, Value>) -> Result<Settings, SettingError> {
    let mut settings = Settings::new("settings");
    for (key, value) in object {
        if !is_key(key) {
            let found = found(&Value::String(key.clone()));
            return Err(settings.error("syntax", found, "a key of letters, digits, - and _"));
        }
        let text = match value {
            Value::String(text) if text.is_empty() => {
                return Err(settings.error(
                    key,
                    "an empty value",
                    "a number, a boolean or a string with something in it",
                ));
            }
            Value::String(text) => text.clone(),
            Value::Number(number) if !number.is_f64() => number.to_string(),
            Value::Bool(switch) => switch.to_string(),
            other => return Err(settings.error(key, found(other), "a whole number, a boolean or a string")),
        };
        settings.insert(key, &text)?;
    }
    Ok(settings)
}

/// Converts the result of a verb.
///
/// # Errors
/// If it cannot be JSON.
pub fn response(result: impl serde::Serialize) -> Result<Value, VerbError> {
    serde_json::to_value(result).map_err(|error| VerbError::Failed(error.to_string()))
}

/// Converts the error of a change.
pub fn change_error(error: ChangeError, params: &Params) -> VerbError {
    match error {
        ChangeError::Setting(error) => setting_error(error, params),
        ChangeError::Failed(why) => VerbError::Failed(why),
    }
}

/// Converts the error of a setting to that of a parameter, or of a member of `settings`.
pub fn setting_error(error: SettingError, params: &Params) -> VerbError {
    let SettingError { key, found, expected, .. } = error;
    let is_own_param = params.value("settings").is_none() || params.value(&key).is_some();
    VerbError::params(
        if is_own_param { format!("params.{key}") } else { format!("params.settings.{key}") },
        found,
        expected,
    )
}
