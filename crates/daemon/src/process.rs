//! The keys of the process: workers and their CPUs, admin socket, time-outs.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mqblk_core::settings::{EXPECTED_CPUS, Key, SettingError, Settings, parse_cpu_list};

use crate::cpus::{self, Cpus};
use crate::key_values::take_u16;
use crate::names::{UniqueNames, file_claim};
use crate::queues::MAX_QUEUES;
use crate::sockets::{
    ADMIN, ADMIN_KEYS, METRICS, METRICS_KEYS, METRICS_MODE, SocketMode, SocketPermissions, take_mode,
};
use crate::state_file::SavedState;

/// The admin socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminConfig {
    /// Its path. Differs from all disks' sockets.
    pub socket: PathBuf,
    /// Its permissions.
    pub permissions: SocketPermissions,
    /// True if its folder is made if missing.
    pub makes_folder: bool,
}

/// The metrics endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsConfig {
    /// The address that scrapers connect to.
    pub address: MetricsAddress,
    /// The permission bits of a Unix socket.
    pub mode: SocketMode,
}

/// An address that scrapers connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address and port of TCP.
    Tcp(SocketAddr),
    /// A Unix socket. Differs from all disks' sockets and the admin socket.
    Unix(PathBuf),
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Tcp(address) => write!(f, "{address}"),
            MetricsAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The number of threads that serve queues.
pub static WORKERS: Key = Key::number("workers", 1, MAX_QUEUES as u64)
    .otherwise("the number of CPUs that the process may use, or of all queues, whichever is smaller; with `pin` as many as it names")
    .about("worker threads", "`mqblk worker` adds and removes some while the daemon runs.");
/// The CPUs of workers.
pub static PIN: Key =
    Key::text("pin", "CPU,...", "CPUs that the process may use and ranges of them, one for each worker: `0-3,8`")
        .otherwise("not pinned")
        .about("the CPU of each worker, in order, such as 0-3,8", "In a file also an array.");
/// The age of a request that is logged: a day at most. The default is well before guests time a request out (Linux:
/// after 30 s).
pub static HANG_WARNING_S: Key = Key::number("hang-warning-s", 0, 86_400).placeholder("S").default("10").about(
    "log a warning of a request that the storage has not completed after S seconds; 0: never",
    "See [storage that hangs](#storage-that-hangs).",
);
/// Longest wait of a stop. The default is well below the 90 s after which systemd kills a service.
pub static DRAIN_TIMEOUT_S: Key = Key::number("drain-timeout-s", 1, 3600).placeholder("S").default("30").about(
    "longest wait of a stop for storage, in seconds",
    "Requests in flight after that are left to the next daemon ([restart.md](restart.md)). A VMM that stops a queue (GET_VRING_BASE) waits as long; \
     then its connection is ended.",
);
/// The state file.
pub static STATE: Key = Key::text("state", "FILE", "a path").about(
    "save changes at run time in this file for the next start: added and removed disks, settings",
    "With the properties that guests were given. Made if missing. See [changes over a restart](#changes-over-a-restart).",
);
/// Requires that all disks are served.
pub static STRICT: Key = Key::switch("strict").bare("on").default("off").about(
    "serve nothing if a disk cannot be served",
    "Without it the other disks are served, and this one is [out](#a-disk-that-cannot-be-served) and retried.",
);

/// Takes `admin` and the keys of its permissions. `names` has the sockets of all devices.
pub(crate) fn take_admin(settings: &mut Settings, names: &UniqueNames) -> Result<Option<AdminConfig>, SettingError> {
    let given = settings.text(&ADMIN).filter(|word| !matches!(word.as_str(), "off" | "false"));
    let Some(given) = given else {
        let Some(key) = ADMIN_KEYS.given_permission(settings) else { return Ok(None) };
        let found = format!("{:?}, but no {ADMIN}", settings.peek(key).unwrap_or_default());
        return Err(settings.error(key, found, "admin with it"));
    };
    let (path, makes_folder) = match given.as_str() {
        "on" | "true" => (mqblk_admin::default_socket(), !mqblk_admin::names_a_socket()),
        _ => (PathBuf::from(given), false),
    };
    let socket = ADMIN_KEYS.check_path(settings, path.to_string_lossy().into_owned())?;
    if let Some(owner) = names.owner(&file_claim("socket", &socket)) {
        let found = format!("{:?}, the socket of {owner}", socket.display().to_string());
        return Err(settings.error(&ADMIN, found, "a path of its own"));
    }
    let permissions = ADMIN_KEYS.take_permissions(settings)?;
    Ok(Some(AdminConfig { socket, permissions, makes_folder }))
}

/// Takes `state`, and reads the file.
pub(crate) fn take_state(settings: &mut Settings) -> Result<Option<SavedState>, SettingError> {
    settings.text(&STATE).map(|path| SavedState::read(Path::new(&path))).transpose()
}

/// The prefix of a path in `metrics`.
const UNIX: &str = "unix:";
/// The host that needs no name service.
const LOCALHOST: &str = "localhost:";

/// Takes `metrics` and `metrics-mode`. `names` has the sockets of all devices.
pub(crate) fn take_metrics(
    settings: &mut Settings,
    admin: Option<&AdminConfig>,
    names: &UniqueNames,
) -> Result<Option<MetricsConfig>, SettingError> {
    let mode = take_mode(settings, METRICS_KEYS.mode)?;
    let text = settings.text(&METRICS);
    let without = |found: &str| settings.error(&METRICS_MODE, found.to_owned(), "metrics=unix:PATH with it");
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
                return Err(settings.error(&METRICS, found, "a path of its own"));
            }
            MetricsAddress::Unix(path)
        }
        None => MetricsAddress::Tcp(parse_address(&text).ok_or_else(|| {
            let expected = "IP:PORT such as 127.0.0.1:9471 or [::1]:9471, localhost:PORT or unix:PATH";
            settings.error(&METRICS, format!("{text:?}"), expected)
        })?),
    };
    match (&address, mode) {
        (MetricsAddress::Tcp(_), Some(mode)) => Err(without(&format!("\"{mode}\", but metrics={address}"))),
        _ => Ok(Some(MetricsConfig { address, mode: mode.unwrap_or(SocketMode::OWNER_ONLY) })),
    }
}

/// Parses an address and a port. Resolves no name but that of this host.
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

/// Takes `drain-timeout-s`.
pub(crate) fn take_drain_timeout(settings: &mut Settings) -> Result<Duration, SettingError> {
    settings.number_or_default(&DRAIN_TIMEOUT_S).map(Duration::from_secs)
}

/// Takes `hang-warning-s`.
pub(crate) fn take_hang_warning(settings: &mut Settings) -> Result<Option<Duration>, SettingError> {
    let seconds = settings.number_or_default(&HANG_WARNING_S)?;
    Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
}

/// Takes `workers` and `pin`.
pub(crate) fn take_workers(
    settings: &mut Settings,
    cpus: &Cpus,
    total_queues: u64,
) -> Result<(u16, Option<Vec<u16>>), SettingError> {
    let workers = take_u16(settings, &WORKERS)?;
    let pin = match settings.text(&PIN) {
        Some(text) => Some(parse_pin(settings, &text, cpus)?),
        None => None,
    };
    let workers = match (workers, &pin) {
        (Some(workers), Some(pin)) if pin.len() != usize::from(workers) => {
            let found = format!("{} CPUs for {workers} workers", pin.len());
            return Err(settings.error(&PIN, found, "one CPU for each worker"));
        }
        (Some(workers), _) => workers,
        (None, Some(pin)) if pin.len() <= usize::from(MAX_QUEUES) => pin.len() as u16,
        (None, Some(pin)) => {
            return Err(settings.error(&PIN, format!("{} CPUs", pin.len()), format!("at most {MAX_QUEUES}")));
        }
        (None, None) => u64::from(cpus.count.min(MAX_QUEUES)).min(total_queues) as u16,
    };
    Ok((workers, pin))
}

fn parse_pin(settings: &Settings, text: &str, cpus: &Cpus) -> Result<Vec<u16>, SettingError> {
    let mut pin = Vec::new();
    for cpu in parse_cpu_list(text).ok_or_else(|| settings.error(&PIN, format!("{text:?}"), EXPECTED_CPUS))? {
        if !cpus.pinnable.contains(&cpu) {
            let expected =
                format!("CPUs of this host that this process may use: {}", cpus::display_list(&cpus.pinnable));
            return Err(settings.error(&PIN, format!("CPU {cpu}"), expected));
        }
        if pin.contains(&cpu) {
            return Err(settings.error(&PIN, format!("CPU {cpu} twice"), "a CPU of its own for each worker"));
        }
        pin.push(cpu);
    }
    Ok(pin)
}
