//! `--print-config`: formats the configuration as TOML for `--config`.

use std::fmt::Write as _;

use mqblk_vhost_user_server::is_passed;

use crate::config::ServeConfig;
use crate::pair::{Section, string};
use crate::process::{DRAIN_TIMEOUT_S, HANG_WARNING_S, MetricsAddress, PIN, STATE, STRICT, WORKERS};
use crate::sandbox_keys::{SANDBOX, SANDBOX_ALLOW, SANDBOX_RBD};
use crate::sockets::{ADMIN, ADMIN_KEYS, METRICS, METRICS_MODE};
use crate::user::{GROUP, USER};

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
    if config.sandbox.rbd {
        line(SANDBOX_RBD.name, &string("on"));
    }
    if let Some(user) = &config.user {
        line(USER.name, &string(user.name()));
        line(GROUP.name, &string(user.group()));
    }
    for (key, value) in config.interfaces.iter().flat_map(|interface| &interface.process_pairs) {
        line(key, value);
    }
    let mut sections: Vec<_> = config.interfaces.iter().flat_map(|interface| &interface.sections).collect();
    sections.sort_by_key(|(position, _)| *position);
    let groups = config.storages.limit_groups().sections();
    for Section { heading, pairs } in groups.iter().chain(sections.iter().flat_map(|(_, sections)| sections)) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "\n[[{heading}]]");
        for (key, value) in pairs {
            let _ = writeln!(text, "{key} = {value}");
        }
    }
    text
}
