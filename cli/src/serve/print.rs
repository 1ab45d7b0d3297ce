//! `--print-config`: formats the configuration as TOML for `--config`.

use std::fmt::Write as _;

use toml::Value;

use mqblk_blkif::PoolScope;
use mqblk_xen::vbd;

use super::config::{
    ControllerConfig, DiskConfig, DiskEndpoint, LunConfig, LunOrigin, LunUnit, ServeConfig, StorageConfig, UnitConfig,
    VhostUserEndpoint, XenAttachment, XenEndpoint,
};
use super::interfaces::Interface;
use super::queue_map;

/// Formats the whole configuration. Parsing the text gives the same configuration.
pub fn to_toml<D>(config: &ServeConfig<D>) -> String {
    let mut text = format!("workers = {}\n", config.workers);
    if let Some(pin) = &config.pin {
        let cpus: Vec<String> = pin.iter().map(u16::to_string).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "pin = [{}]", cpus.join(", "));
    }
    let hang_warning = config.hang_warning.map_or(0, |time| time.as_secs());
    let _ = writeln!(text, "hang-warning-s = {hang_warning}");
    if let Some(admin) = &config.admin {
        let path = Value::String(admin.socket.to_string_lossy().into_owned());
        let _ = writeln!(text, "admin = {path}\nadmin-mode = \"{}\"", admin.mode);
    }
    let _ = writeln!(text, "drain-timeout-s = {}", config.drain_timeout.as_secs());
    if let Some(state) = &config.state {
        let _ = writeln!(text, "state = {}", string(&state.path.to_string_lossy()));
    }
    if let Some(xen) = &config.xen {
        let _ = writeln!(text, "xen = {}", string(&xen.host.to_string()));
        if xen.watch {
            let _ = writeln!(text, "xen-watch = {}", string(&xen.type_name));
        }
        let state = xen.state.as_ref().map_or("off".into(), |path| path.to_string_lossy());
        let _ = writeln!(text, "xen-state = {}", string(&state));
        if let Some(pages) = xen.mapped_pages {
            let _ = writeln!(text, "xen-mapped-pages = {}", number_or_text(&pages.to_string()));
        }
    }
    for disk in &config.disks {
        table(&mut text, "disk", disk_pairs(disk));
    }
    for controller in &config.controllers {
        table(&mut text, "controller", controller_pairs(controller));
        // LUNs added at run time are in the state file.
        for lun in controller.luns.iter().filter(|lun| lun.mapped && lun.origin == LunOrigin::Configuration) {
            table(&mut text, "controller.lun", lun_pairs(lun));
        }
    }
    text
}

/// A key and its value.
pub type Pair = (&'static str, Value);

fn table(text: &mut String, heading: &str, pairs: Vec<Pair>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "\n[[{heading}]]");
    for (key, value) in pairs {
        let _ = writeln!(text, "{key} = {value}");
    }
}

/// Returns a disk's keys with their values.
pub fn disk_pairs<D>(disk: &DiskConfig<D>) -> Vec<Pair> {
    let mut pairs = vec![("id", string(&disk.id))];
    pairs.extend(backend_pairs(&disk.storage));
    match &disk.endpoint {
        DiskEndpoint::VhostUser(endpoint) => pairs.extend(vhost_user_pairs(endpoint)),
        DiskEndpoint::Xen(endpoint) => {
            pairs.push(("interface", string(Interface::Xen.word())));
            pairs.extend(xen_pairs(endpoint));
        }
    }
    pairs.extend(storage_pairs(&disk.storage));
    pairs
}

/// Returns a controller's own keys with their values.
pub fn controller_pairs<D>(controller: &ControllerConfig<D>) -> Vec<Pair> {
    let mut pairs = vec![("id", string(&controller.id))];
    pairs.extend(vhost_user_pairs(&controller.endpoint));
    pairs.push(("cmd-per-lun", Value::Integer(controller.cmd_per_lun.into())));
    pairs.extend(controller.incoming_luns.iter().map(|folder| ("incoming-luns", string(&folder.to_string_lossy()))));
    pairs
}

/// Returns a LUN's keys with their values.
pub fn lun_pairs<D>(lun: &LunConfig<D>) -> Vec<Pair> {
    let mut pairs = vec![
        ("id", string(&lun.id)),
        ("target", Value::Integer(lun.address.target.into())),
        ("lun", Value::Integer(lun.address.lun.into())),
    ];
    match &lun.unit {
        LunUnit::Own(unit) => pairs.extend(unit_pairs(unit)),
        LunUnit::Shared(unit) => pairs.push(("unit", string(unit))),
    }
    pairs
}

fn unit_pairs<D>(unit: &UnitConfig<D>) -> Vec<Pair> {
    let mut pairs = backend_pairs(&unit.storage);
    pairs.extend(storage_pairs(&unit.storage));
    pairs.extend([
        ("unit-name", string(&unit.unit_name)),
        ("vendor", string(&unit.vendor)),
        ("product", string(&unit.product)),
    ]);
    pairs.extend(unit.reservations.iter().map(|path| ("reservations", string(&path.to_string_lossy()))));
    pairs
}

fn backend_pairs<D>(storage: &StorageConfig<D>) -> Vec<Pair> {
    let mut pairs = vec![("storage", string(&storage.kind))];
    pairs.extend(storage.resolved_settings.iter().map(|(key, value)| (*key, number_or_text(value))));
    pairs
}

fn vhost_user_pairs(endpoint: &VhostUserEndpoint) -> Vec<Pair> {
    vec![
        ("socket", string(&endpoint.socket.to_string_lossy())),
        ("socket-mode", string(&endpoint.socket_mode.to_string())),
        ("queues", Value::Integer(endpoint.queues.into())),
        ("queue-size", Value::Integer(endpoint.queue_size.into())),
        ("queue-map", string(&queue_map::display(&endpoint.queue_map))),
        ("poll", string(&endpoint.poll.to_string())),
        ("coalesce-us", Value::Integer(endpoint.coalesce.delay.as_micros() as i64)),
        ("coalesce-max", Value::Integer(endpoint.coalesce.answers.into())),
        ("fixed-buffers", string(endpoint.fixed_buffers.word())),
    ]
}

fn xen_pairs(endpoint: &XenEndpoint) -> Vec<Pair> {
    let mut pairs = Vec::new();
    if let Some(XenAttachment { domid, devid }) = endpoint.attachment {
        let name = vbd::vdev_name(devid).unwrap_or_else(|| devid.to_string());
        pairs.extend([("domid", Value::Integer(domid.into())), ("vdev", string(&name))]);
    }
    let journal = if endpoint.journal { "on" } else { "off" };
    pairs.extend([
        ("queues", Value::Integer(endpoint.queues.into())),
        ("ring-order", Value::Integer(endpoint.ring_order.into())),
        ("indirect-segments", Value::Integer(endpoint.indirect_segments.into())),
        ("grants", string(endpoint.grants.word())),
        ("persistent-grants", Value::Integer(endpoint.persistent_grants.into())),
        ("persistent-idle", Value::Integer(endpoint.persistent_idle.as_secs() as i64)),
        ("journal", string(journal)),
    ]);
    if endpoint.grants_pool != PoolScope::PerRing {
        pairs.push(("grants-pool", string(endpoint.grants_pool.word())));
    }
    pairs.extend([
        ("queue-map", string(&queue_map::display(&endpoint.queue_map))),
        ("poll", string(&endpoint.poll.to_string())),
        ("coalesce-us", Value::Integer(endpoint.coalesce.delay.as_micros() as i64)),
        ("coalesce-max", Value::Integer(endpoint.coalesce.answers.into())),
    ]);
    pairs
}

fn storage_pairs<D>(storage: &StorageConfig<D>) -> Vec<Pair> {
    vec![
        ("merge", string(storage.plug.merge.word())),
        ("merge-bytes", number_or_text(&storage.plug.merge_bytes.to_string())),
        ("merge-segments", Value::Integer(storage.plug.merge_segments.into())),
        ("depth", Value::Integer(storage.plug.depth.into())),
        ("watch-size", string(if storage.watch_size { "on" } else { "off" })),
        ("on-error", string(&storage.errors.on_error.to_string())),
        ("on-enospc", string(storage.errors.on_enospc.word())),
        ("cache", string(storage.cache.word())),
        ("serial", string(&storage.serial)),
    ]
}

fn string(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// Returns a number if the text is its canonical form, else the text: both parse back to the same text.
fn number_or_text(text: &str) -> Value {
    match text.parse::<i64>() {
        Ok(number) if number.to_string() == text => Value::Integer(number),
        _ => Value::String(text.to_owned()),
    }
}
