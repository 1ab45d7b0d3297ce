//! Conversion of the parameters, results and errors of verbs.

use mqblk_admin::{Params, VerbError, found};
use mqblk_core::settings::{SettingError, Settings};
use serde_json::{Map, Value};

use crate::change::ChangeError;
use crate::key_values::{self, is_key};

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
