//! The keys of the process: workers and their CPUs, admin socket, time-outs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mqblk_core::settings::{EXPECTED_CPUS, SettingError, Settings, parse_cpu_list};

use super::names::{UniqueNames, file_claim};
use super::take_u16;
use crate::config::{AdminConfig, MetricsAddress, MetricsConfig, SocketMode};
use crate::cpus::{self, Cpus};
use crate::queues::MAX_QUEUES;
use crate::sockets::{ADMIN_KEYS, METRICS_KEYS, take_mode};
use crate::state_file::SavedState;

/// Takes `admin` and the keys of its permissions. `names` has the sockets of all devices.
pub(super) fn take_admin(settings: &mut Settings, names: &UniqueNames) -> Result<Option<AdminConfig>, SettingError> {
    let given = settings.text("admin").filter(|word| !matches!(word.as_str(), "off" | "false"));
    let Some(given) = given else {
        let Some(key) = ADMIN_KEYS.given_permission(settings) else { return Ok(None) };
        let found = format!("{:?}, but no admin", settings.peek(key).unwrap_or_default());
        return Err(settings.error(key, found, "admin with it"));
    };
    let (path, makes_folder) = match given.as_str() {
        "on" | "true" => (mqblk_admin::default_socket(), !mqblk_admin::names_a_socket()),
        _ => (PathBuf::from(given), false),
    };
    let socket = ADMIN_KEYS.check_path(settings, path.to_string_lossy().into_owned())?;
    if let Some(owner) = names.owner(&file_claim("socket", &socket)) {
        let found = format!("{:?}, the socket of {owner}", socket.display().to_string());
        return Err(settings.error("admin", found, "a path of its own"));
    }
    let permissions = ADMIN_KEYS.take_permissions(settings)?;
    Ok(Some(AdminConfig { socket, permissions, makes_folder }))
}

/// Takes `state`, and reads the file.
pub(super) fn take_state(settings: &mut Settings) -> Result<Option<SavedState>, SettingError> {
    settings.text("state").map(|path| SavedState::read(Path::new(&path))).transpose()
}

/// The prefix of a path in `metrics`.
const UNIX: &str = "unix:";
/// The host that needs no name service.
const LOCALHOST: &str = "localhost:";

/// Takes `metrics` and `metrics-mode`. `names` has the sockets of all devices.
pub(super) fn take_metrics(
    settings: &mut Settings,
    admin: Option<&AdminConfig>,
    names: &UniqueNames,
) -> Result<Option<MetricsConfig>, SettingError> {
    let mode = take_mode(settings, METRICS_KEYS.mode)?;
    let text = settings.text("metrics");
    let without = |found: &str| settings.error("metrics-mode", found.to_owned(), "metrics=unix:PATH with it");
    let Some(text) = text else {
        return mode.map_or(Ok(None), |mode| Err(without(&format!("\"{mode}\", but no metrics"))));
    };
    let address = match text.strip_prefix(UNIX) {
        Some(path) => {
            let path = METRICS_KEYS.check_path(settings, path.to_owned())?;
            let claim = file_claim("socket", &path);
            let is_admin = admin.is_some_and(|admin| file_claim("socket", &admin.socket) == claim);
            let owner = names.owner(&claim).or(is_admin.then_some("the daemon for administration"));
            if let Some(owner) = owner {
                let found = format!("{:?}, the socket of {owner}", path.display().to_string());
                return Err(settings.error("metrics", found, "a path of its own"));
            }
            MetricsAddress::Unix(path)
        }
        None => MetricsAddress::Tcp(parse_address(&text).ok_or_else(|| {
            let expected = "IP:PORT such as 127.0.0.1:9471 or [::1]:9471, localhost:PORT or unix:PATH";
            settings.error("metrics", format!("{text:?}"), expected)
        })?),
    };
    match (&address, mode) {
        (MetricsAddress::Tcp(_), Some(mode)) => Err(without(&format!("\"{mode}\", but metrics={address}"))),
        _ => Ok(Some(MetricsConfig { address, mode: mode.unwrap_or(SocketMode::OWNER_ONLY) })),
    }
}

/// Parses an address and a port. Names are not resolved but for that of this host.
fn parse_address(text: &str) -> Option<SocketAddr> {
    match text.strip_prefix(LOCALHOST) {
        Some(port) => {
            let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
            let port = port.parse().ok().filter(|_| is_number)?;
            Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
        }
        None => text.parse().ok(),
    }
}

/// The default of `drain-timeout-s`: well below the 90 s after which systemd kills a service.
const DRAIN_SECONDS: u64 = 30;
const MAX_DRAIN_SECONDS: u64 = 3600;

/// Takes `drain-timeout-s`.
pub(super) fn take_drain_timeout(settings: &mut Settings) -> Result<Duration, SettingError> {
    let seconds = settings.number("drain-timeout-s", 1..=MAX_DRAIN_SECONDS)?;
    Ok(Duration::from_secs(seconds.unwrap_or(DRAIN_SECONDS)))
}

/// Maximum of `hang-warning-s`: a day.
const MAX_HANG_WARNING_S: u64 = 86_400;
/// The default of `hang-warning-s`: well before guests time a request out (Linux: after 30 s).
const HANG_WARNING_S: u64 = 10;

/// Takes `hang-warning-s`.
pub(super) fn take_hang_warning(settings: &mut Settings) -> Result<Option<Duration>, SettingError> {
    let seconds = settings.number("hang-warning-s", 0..=MAX_HANG_WARNING_S)?.unwrap_or(HANG_WARNING_S);
    Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
}

/// Takes `workers` and `pin`.
pub(super) fn take_workers(
    settings: &mut Settings,
    cpus: &Cpus,
    total_queues: u64,
) -> Result<(u16, Option<Vec<u16>>), SettingError> {
    let workers = take_u16(settings, "workers", 1, MAX_QUEUES)?;
    let pin = match settings.text("pin") {
        Some(text) => Some(parse_pin(settings, &text, cpus)?),
        None => None,
    };
    let workers = match (workers, &pin) {
        (Some(workers), Some(pin)) if pin.len() != usize::from(workers) => {
            let found = format!("{} CPUs for {workers} workers", pin.len());
            return Err(settings.error("pin", found, "one CPU for each worker"));
        }
        (Some(workers), _) => workers,
        (None, Some(pin)) if pin.len() <= usize::from(MAX_QUEUES) => pin.len() as u16,
        (None, Some(pin)) => {
            return Err(settings.error("pin", format!("{} CPUs", pin.len()), format!("at most {MAX_QUEUES}")));
        }
        (None, None) => u64::from(cpus.count.min(MAX_QUEUES)).min(total_queues) as u16,
    };
    Ok((workers, pin))
}

fn parse_pin(settings: &Settings, text: &str, cpus: &Cpus) -> Result<Vec<u16>, SettingError> {
    let mut pin = Vec::new();
    for cpu in parse_cpu_list(text).ok_or_else(|| settings.error("pin", format!("{text:?}"), EXPECTED_CPUS))? {
        if !cpus.pinnable.contains(&cpu) {
            let expected =
                format!("CPUs of this host that this process may use: {}", cpus::display_list(&cpus.pinnable));
            return Err(settings.error("pin", format!("CPU {cpu}"), expected));
        }
        if pin.contains(&cpu) {
            return Err(settings.error("pin", format!("CPU {cpu} twice"), "a CPU of its own for each worker"));
        }
        pin.push(cpu);
    }
    Ok(pin)
}
