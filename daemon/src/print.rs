//! `--print-config`: formats the configuration as TOML for `--config`.

use std::fmt::Write as _;

use mqblk_engine::{DiskLimits, PlugOptions};
use mqblk_vhost_user_server::is_passed;
use toml::Value;

use crate::config::{MetricsAddress, ServeConfig, StorageConfig};
use crate::limits::{LIMIT_GROUP, limit_pairs};
use crate::sockets::ADMIN_KEYS;

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
    line("workers", &config.workers);
    if let Some(pin) = &config.pin {
        let cpus: Vec<String> = pin.iter().map(u16::to_string).collect();
        line("pin", &format!("[{}]", cpus.join(", ")));
    }
    line("hang-warning-s", &config.hang_warning.map_or(0, |time| time.as_secs()));
    if let Some(admin) = &config.admin {
        line("admin", &string(&admin.socket.to_string_lossy()));
        if !is_passed(&admin.socket) {
            ADMIN_KEYS.pairs(&admin.permissions).iter().for_each(|(key, value)| line(key, value));
        }
    }
    if let Some(metrics) = &config.metrics {
        line("metrics", &string(&metrics.address.to_string()));
        if let MetricsAddress::Unix(_) = metrics.address {
            line("metrics-mode", &string(&metrics.mode.to_string()));
        }
    }
    line("drain-timeout-s", &config.drain_timeout.as_secs());
    if let Some(state) = &config.state {
        line("state", &string(&state.path().to_string_lossy()));
    }
    line("strict", &string(if config.strict { "on" } else { "off" }));
    line("sandbox", &string(config.sandbox.mode.word()));
    if let Some(allow) = config.sandbox.allow_text() {
        line("sandbox-allow", &string(&allow));
    }
    if let Some(user) = &config.user {
        line("user", &string(user.name()));
        line("group", &string(user.group()));
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
    let mut pairs = vec![("storage", string(&storage.kind))];
    pairs.extend(storage.resolved_settings.iter().map(|(key, value)| (*key, number_or_text(value))));
    pairs
}

/// Returns the keys of a storage that all backends have, with their values. Of limits those that are set.
pub fn storage_pairs(storage: &StorageConfig) -> Vec<Pair> {
    let mut pairs = plug_pairs(&storage.plug);
    pairs.extend([
        ("watch-size", string(if storage.watch_size { "on" } else { "off" })),
        ("on-error", string(&storage.errors.on_error.to_string())),
        ("on-enospc", string(storage.errors.on_enospc.word())),
        ("cache", string(storage.cache.word())),
        ("serial", string(&storage.serial)),
    ]);
    pairs.extend(limit_pairs(&storage.limits.own));
    pairs.extend(storage.limits.group.iter().map(|group| (LIMIT_GROUP, string(group.name()))));
    pairs
}

/// Returns the keys of merging and `depth` with their values.
pub fn plug_pairs(plug: &PlugOptions) -> Vec<Pair> {
    vec![
        ("merge", string(plug.merge.word())),
        ("merge-bytes", number_or_text(&plug.merge_bytes.to_string())),
        ("merge-segments", Value::Integer(plug.merge_segments.into())),
        ("depth", Value::Integer(plug.depth.into())),
    ]
}

/// Returns the limits that a disk has now, as [`storage_pairs`] those of its configuration.
pub fn current_limit_pairs(limits: &DiskLimits) -> Vec<Pair> {
    let mut pairs = limit_pairs(&limits.own());
    pairs.extend(limits.group().iter().map(|group| (LIMIT_GROUP, string(group.name()))));
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
