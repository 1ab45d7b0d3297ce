//! `--print-config`: the configuration as TOML that `--config` reads back.

use std::fmt::Write as _;

use toml::Value;

use super::config::{DiskConfig, ServeConfig};
use super::queue_map;

/// The whole configuration. Reading it back gives the same configuration.
pub fn to_toml<D>(config: &ServeConfig<D>) -> String {
    let mut text = format!("workers = {}\n", config.workers);
    if let Some(pin) = &config.pin {
        let cpus: Vec<String> = pin.iter().map(u16::to_string).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "pin = [{}]", cpus.join(", "));
    }
    if let Some(admin) = &config.admin {
        let path = Value::String(admin.socket.to_string_lossy().into_owned());
        let _ = writeln!(text, "admin = {path}\nadmin-mode = \"{}\"", admin.mode);
    }
    for disk in &config.disks {
        text.push_str("\n[[disk]]\n");
        for (key, value) in pairs(disk) {
            let _ = writeln!(text, "{key} = {value}");
        }
    }
    text
}

/// A disk's keys with their values.
pub fn pairs<D>(disk: &DiskConfig<D>) -> Vec<(&'static str, Value)> {
    let text = |text: &str| Value::String(text.to_owned());
    let mut pairs = vec![("id", text(&disk.id)), ("storage", text(&disk.storage))];
    pairs.extend(disk.storage_settings.iter().map(|(key, value)| (*key, number_or_text(value))));
    pairs.extend([
        ("socket", text(&disk.socket.to_string_lossy())),
        ("socket-mode", text(&disk.socket_mode.to_string())),
        ("queues", Value::Integer(disk.queues.into())),
        ("queue-size", Value::Integer(disk.queue_size.into())),
        ("queue-map", text(&queue_map::display(&disk.queue_map))),
        ("poll", text(&disk.poll.to_string())),
        ("merge", text(disk.plug.merge.word())),
        ("merge-bytes", number_or_text(&disk.plug.merge_bytes.to_string())),
        ("merge-segments", Value::Integer(disk.plug.merge_segments.into())),
        ("plug-us", Value::Integer(disk.plug.hold.as_micros() as i64)),
        ("coalesce-us", Value::Integer(disk.coalesce.delay.as_micros() as i64)),
        ("coalesce-max", Value::Integer(disk.coalesce.answers.into())),
        ("cache", text(disk.cache.word())),
        ("fixed-buffers", text(disk.fixed_buffers.word())),
        ("serial", text(&disk.serial)),
    ]);
    pairs
}

/// A number where the text is exactly how the number is written, so that both read back as the same text.
fn number_or_text(text: &str) -> Value {
    match text.parse::<i64>() {
        Ok(number) if number.to_string() == text => Value::Integer(number),
        _ => Value::String(text.to_owned()),
    }
}
