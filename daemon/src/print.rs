//! `--print-config`: formats the configuration as TOML for `--config`.

use std::fmt::Write as _;

use mqblk_engine::DiskLimits;
use mqblk_vhost_user_server::is_passed;
use toml::Value;

use crate::config::{MetricsAddress, ServeConfig, StorageConfig};
use crate::limits::{LIMIT_GROUP, limit_pairs};
use crate::resolve::STORAGE;
use crate::resolve::process::{DRAIN_TIMEOUT_S, HANG_WARNING_S, PIN, STATE, STRICT, WORKERS};
use crate::sandbox::{SANDBOX, SANDBOX_ALLOW};
use crate::sockets::{ADMIN, ADMIN_KEYS, METRICS, METRICS_MODE};
use crate::user::{GROUP, USER};

/// A key and its value.
pub type Pair = (&'static str, Value);

/// A table of the file: a heading such as `disk` or `controller.lun`, and its keys with their values.
#[derive(Clone, Debug)]
pub struct Section {
    /// The heading.
    pub heading: &'static str,
    /// The keys.
    pub pairs: Vec<Pair>,
}

/// Formats the whole configuration. Parsing the text gives the same configuration.
pub fn to_toml(config: &ServeConfig) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{key} = {value}");
    };
    line(WORKERS.name, &config.workers);
    if let Some(pin) = &config.pin {
        let cpus: Vec<String> = pin.iter().map(u16::to_string).collect();
        line(PIN.name, &format!("[{}]", cpus.join(", ")));
    }
    line(HANG_WARNING_S.name, &config.hang_warning.map_or(0, |time| time.as_secs()));
    if let Some(admin) = &config.admin {
        line(ADMIN.name, &string(&admin.socket.to_string_lossy()));
        if !is_passed(&admin.socket) {
            ADMIN_KEYS.pairs(&admin.permissions).iter().for_each(|(key, value)| line(key, value));
        }
    }
    if let Some(metrics) = &config.metrics {
        line(METRICS.name, &string(&metrics.address.to_string()));
        if let MetricsAddress::Unix(_) = metrics.address {
            line(METRICS_MODE.name, &string(&metrics.mode.to_string()));
        }
    }
    line(DRAIN_TIMEOUT_S.name, &config.drain_timeout.as_secs());
    if let Some(state) = &config.state {
        line(STATE.name, &string(&state.path().to_string_lossy()));
    }
    line(STRICT.name, &string(if config.strict { "on" } else { "off" }));
    line(SANDBOX.name, &string(config.sandbox.mode.word()));
    if let Some(allow) = config.sandbox.allow_text() {
        line(SANDBOX_ALLOW.name, &string(&allow));
    }
    if let Some(user) = &config.user {
        line(USER.name, &string(user.name()));
        line(GROUP.name, &string(user.group()));
    }
    for (key, value) in config.interfaces.iter().flat_map(|interface| interface.process_pairs()) {
        line(key, &value);
    }
    let mut sections: Vec<_> = config.interfaces.iter().flat_map(|interface| interface.sections()).collect();
    sections.sort_by_key(|(position, _)| *position);
    let groups = config.storages.limit_groups().sections();
    for Section { heading, pairs } in groups.into_iter().chain(sections.into_iter().flat_map(|(_, sections)| sections))
    {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\n[[{heading}]]");
        for (key, value) in pairs {
            let _ = writeln!(text, "{key} = {value}");
        }
    }
    text
}

/// Returns `storage` and the keys of its backend, with their values.
pub fn backend_pairs(storage: &StorageConfig) -> Vec<Pair> {
    let mut pairs = vec![(STORAGE.name, string(&storage.kind))];
    pairs.extend(storage.resolved_settings.iter().map(|(key, value)| (*key, number_or_text(value))));
    pairs
}

/// Returns the limits that a disk has now, as [`storage_pairs`](crate::resolve::storage_pairs) those of its configuration.
pub fn current_limit_pairs(limits: &DiskLimits) -> Vec<Pair> {
    let mut pairs = limit_pairs(&limits.own());
    pairs.extend(limits.group().iter().map(|group| (LIMIT_GROUP.name, string(group.name()))));
    pairs
}

/// Returns a text as a value.
pub fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// Returns a number as a value.
pub fn number(number: impl Into<i64>) -> Value {
    Value::Integer(number.into())
}

/// Returns a number if the text is its canonical form, else the text: both parse back to the same text.
pub fn number_or_text(text: &str) -> Value {
    match text.parse::<i64>() {
        Ok(number) if number.to_string() == text => Value::Integer(number),
        _ => Value::String(text.to_owned()),
    }
}
