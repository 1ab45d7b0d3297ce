//! From what was given to what will be done: takes each key, fills in defaults, and checks each value against the others and
//! against the host. Nothing is created here.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mqblk_core::disk::DiskError;
use mqblk_core::settings::{SettingError, Settings};

use super::config::{AdminConfig, CacheMode, DiskConfig, ServeConfig, SocketMode};
use super::cpus::{self, Cpus};
use super::file::Given;
use super::queue_map;
use mqblk_core::ByteLen;
use mqblk_engine::{Coalesce, FixedBufferUse, MergeMode, PlugOptions, PollPolicy};
use mqblk_vhost_user_server::SocketError;

/// Most virtqueues of one disk, and most workers of one process.
const MAX_QUEUES: u16 = 256;
/// Longest identification string that virtio-blk carries (virtio 1.3 section 5.2.6, VIRTIO_BLK_T_GET_ID).
const SERIAL_BYTES: usize = 20;
/// Longest path of a Unix socket, without the terminating NUL (unix(7)).
const SOCKET_PATH_BYTES: usize = 107;
/// Bounds of `merge-bytes`: a page, and what a request may be long.
const MIN_MERGE_BYTES: ByteLen = ByteLen(4 << 10);
const MAX_MERGE_BYTES: ByteLen = ByteLen(64 << 20);
/// What the kernel takes in one operation (UIO_MAXIOV).
const MAX_MERGE_SEGMENTS: u16 = 1024;
/// Longest `plug-us` and `coalesce-us`: a hundredth of a second is an age already.
const MAX_HOLD_US: u64 = 10_000;
const DEFAULT_STORAGE: &str = "file";
const ID_BYTES: usize = 64;

/// A configuration that cannot be served. One line each.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value is wrong.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The storage cannot be opened.
    #[error("{subject}: {source}")]
    Disk {
        /// Which disk.
        subject: String,
        /// Why.
        source: DiskError,
    },
    /// The admin socket cannot be where it was asked for.
    #[error("serve: admin: {0}")]
    Admin(#[source] SocketError),
    /// A disk's socket cannot be where it was asked for.
    #[error("disk {id:?}: socket: {source}")]
    Socket {
        /// Which disk.
        id: String,
        /// Why.
        source: SocketError,
    },
}

/// An open disk and its storage's settings as they came to be.
pub type Opened<D> = (D, Vec<(&'static str, String)>);

/// The kinds of storage, and how one is opened. What [`resolve`] needs to know of storage.
pub trait Storages {
    /// What an open disk is.
    type Disk;
    /// The kinds' names.
    fn kinds(&self) -> Vec<&'static str>;
    /// Opens a disk, taking its own keys from `settings`.
    ///
    /// # Errors
    /// When a value is wrong or the host refuses.
    fn open(&mut self, kind: &str, settings: &mut Settings) -> Result<Opened<Self::Disk>, DiskError>;
}

/// Turns `given` into a configuration, opening the storage of each disk.
///
/// # Errors
/// At the first value that cannot be used.
pub fn resolve<S: Storages>(
    mut given: Given,
    cpus: &Cpus,
    storages: &mut S,
) -> Result<ServeConfig<S::Disk>, ConfigError> {
    if given.disks.is_empty() {
        let expected = "at least one --disk KEY=VALUE,..., or a [[disk]] table in --config FILE";
        return Err(given.process.error("disk", "none", expected).into());
    }
    let mut fronts = Vec::new();
    for settings in &mut given.disks {
        let front = Front::take(settings, cpus, &storages.kinds());
        fronts.push(front.map_err(|error| with_likely_slip(error, settings))?);
    }
    check_unique(&given.disks, &fronts)?;

    let total: u64 = fronts.iter().map(|front| u64::from(front.queues)).sum();
    let (workers, pin) = take_process(&mut given.process, cpus, total)?;
    let admin = take_admin(&mut given.process, &fronts)?;
    given.process.finish()?;

    let mut next_worker = 0;
    let mut maps = Vec::new();
    for (settings, front) in given.disks.iter().zip(&fronts) {
        maps.push(match &front.queue_map {
            Some(text) => queue_map::parse(settings, text, front.queues, workers)?,
            None => queue_map::round_robin(&mut next_worker, front.queues, workers),
        });
    }

    let mut disks = Vec::new();
    for ((mut settings, front), queue_map) in given.disks.into_iter().zip(fronts).zip(maps) {
        let (disk, storage_settings) = match storages.open(front.storage, &mut settings) {
            Ok(opened) => opened,
            Err(DiskError::Setting(error)) => return Err(with_likely_slip(error, &settings).into()),
            Err(source) => return Err(ConfigError::Disk { subject: settings.subject().to_owned(), source }),
        };
        settings.finish()?;
        disks.push(front.into_config(queue_map, disk, storage_settings));
    }
    Ok(ServeConfig { workers, pin, admin, disks })
}

/// When a key is missing, names one that was given and looks like it: a missing key is found before unknown ones are.
fn with_likely_slip(mut error: SettingError, settings: &Settings) -> SettingError {
    if error.found == "nothing" {
        let close = |key: &&str| strsim::damerau_levenshtein(key, &error.key) <= 2;
        if let Some(slip) = settings.keys_left().find(close) {
            error.found = format!("nothing, but a key {slip:?}");
        }
    }
    error
}

/// What the interface needs of one disk's settings, before the disks are looked at together.
struct Front {
    id: String,
    serial: String,
    socket: PathBuf,
    socket_mode: SocketMode,
    queues: u16,
    queue_size: u16,
    poll: PollPolicy,
    plug: PlugOptions,
    coalesce: Coalesce,
    queue_map: Option<String>,
    cache: CacheMode,
    fixed_buffers: FixedBufferUse,
    storage: &'static str,
}

impl Front {
    fn take(settings: &mut Settings, cpus: &Cpus, kinds: &[&'static str]) -> Result<Front, SettingError> {
        settings.alias("num_queues", "queues")?;
        settings.alias("queue_size", "queue-size")?;
        let storage = take_storage(settings, kinds)?;
        let id = take_id(settings, storage)?;
        // From here on errors name the disk as the user does; the file it came from stays in front.
        let file = settings.subject().rsplit_once(": ").map(|(file, _)| format!("{file}: ")).unwrap_or_default();
        settings.set_subject(format!("{file}disk \"{id}\""));
        Ok(Front {
            serial: take_serial(settings, &id)?,
            socket: take_socket(settings)?,
            socket_mode: take_socket_mode(settings, "socket-mode")?.unwrap_or(SocketMode::OWNER_ONLY),
            queues: take_u16(settings, "queues", 1, MAX_QUEUES)?.unwrap_or(cpus.count.min(MAX_QUEUES)),
            queue_size: take_queue_size(settings)?,
            poll: take_poll(settings)?,
            plug: take_plug(settings)?,
            coalesce: take_coalesce(settings)?,
            queue_map: settings.text("queue-map"),
            cache: settings.choice("cache", CacheMode::WORDS)?.map_or(CacheMode::Writeback, CacheMode::from_word),
            fixed_buffers: settings
                .choice("fixed-buffers", FixedBufferUse::WORDS)?
                .map_or(FixedBufferUse::Auto, FixedBufferUse::from_word),
            storage,
            id,
        })
    }

    fn into_config<D>(
        self,
        queue_map: Vec<u16>,
        disk: D,
        storage_settings: Vec<(&'static str, String)>,
    ) -> DiskConfig<D> {
        DiskConfig {
            id: self.id,
            serial: self.serial,
            socket: self.socket,
            socket_mode: self.socket_mode,
            queues: self.queues,
            queue_size: self.queue_size,
            poll: self.poll,
            plug: self.plug,
            coalesce: self.coalesce,
            queue_map,
            cache: self.cache,
            fixed_buffers: self.fixed_buffers,
            storage: self.storage.to_owned(),
            storage_settings,
            disk,
        }
    }
}

fn take_u16(settings: &mut Settings, key: &'static str, min: u16, max: u16) -> Result<Option<u16>, SettingError> {
    let number = settings.number(key, u64::from(min)..=u64::from(max))?;
    Ok(number.and_then(|number| u16::try_from(number).ok()))
}

fn take_storage(settings: &mut Settings, kinds: &[&'static str]) -> Result<&'static str, SettingError> {
    let given = settings.text("storage").unwrap_or_else(|| DEFAULT_STORAGE.to_owned());
    match kinds.iter().find(|kind| **kind == given) {
        Some(kind) => Ok(kind),
        None => Err(settings.error("storage", format!("{given:?}"), format!("one of {}", kinds.join(", ")))),
    }
}

/// The id given, or the name of the file at `path`, or the kind of storage.
fn take_id(settings: &mut Settings, storage: &str) -> Result<String, SettingError> {
    let from_path = settings.peek("path").map(|path| {
        Path::new(path).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_else(|| path.to_owned())
    });
    let (id, whence) = match (settings.text("id"), from_path) {
        (Some(id), _) => (id, ""),
        (None, Some(name)) => (name, " (from the path; give one with id=)"),
        (None, None) => (storage.to_owned(), ""),
    };
    let good = (1..=ID_BYTES).contains(&id.len())
        && id.starts_with(|char: char| char.is_ascii_alphanumeric())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if good {
        return Ok(id);
    }
    let expected =
        format!("1 to {ID_BYTES} letters, digits, dots, dashes and underscores, with a letter or digit first");
    Err(settings.error("id", format!("{id:?}{whence}"), expected))
}

/// The serial given, or as much of the id as fits.
fn take_serial(settings: &mut Settings, id: &str) -> Result<String, SettingError> {
    let Some(serial) = settings.text("serial") else {
        return Ok(id.chars().take(SERIAL_BYTES).collect());
    };
    let printable = serial.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    if printable && (1..=SERIAL_BYTES).contains(&serial.len()) {
        return Ok(serial);
    }
    let found = format!("{serial:?} ({} bytes)", serial.len());
    Err(settings.error("serial", found, format!("1 to {SERIAL_BYTES} bytes of printable ASCII")))
}

fn take_socket(settings: &mut Settings) -> Result<PathBuf, SettingError> {
    let Some(path) = settings.text("socket") else {
        return Err(settings.error("socket", "nothing", "the path of the vhost-user socket to make"));
    };
    socket_path(settings, "socket", path)
}

fn socket_path(settings: &Settings, key: &str, path: String) -> Result<PathBuf, SettingError> {
    if path.len() > SOCKET_PATH_BYTES || path.contains('\0') {
        let found = format!("a path of {} bytes", path.len());
        return Err(settings.error(key, found, format!("at most {SOCKET_PATH_BYTES} bytes, none of them NUL")));
    }
    Ok(PathBuf::from(path))
}

fn take_socket_mode(settings: &mut Settings, key: &'static str) -> Result<Option<SocketMode>, SettingError> {
    let Some(text) = settings.text(key) else { return Ok(None) };
    match SocketMode::parse(&text) {
        Some(mode) => Ok(Some(mode)),
        None => Err(settings.error(key, format!("{text:?}"), "octal permission bits from 0000 to 0777")),
    }
}

/// `admin` and `admin-mode`.
fn take_admin(settings: &mut Settings, fronts: &[Front]) -> Result<Option<AdminConfig>, SettingError> {
    let mode = take_socket_mode(settings, "admin-mode")?;
    let Some(path) = settings.text("admin") else {
        return match mode {
            Some(mode) => Err(settings.error("admin-mode", format!("\"{mode}\", but no admin"), "admin with it")),
            None => Ok(None),
        };
    };
    let socket = socket_path(settings, "admin", path)?;
    if let Some(disk) = fronts.iter().find(|front| same_place(&front.socket) == same_place(&socket)) {
        let found = format!("{:?}, the socket of disk {:?}", socket.display().to_string(), disk.id);
        return Err(settings.error("admin", found, "a path of its own"));
    }
    Ok(Some(AdminConfig { socket, mode: mode.unwrap_or(SocketMode::OWNER_ONLY) }))
}

fn take_queue_size(settings: &mut Settings) -> Result<u16, SettingError> {
    let Some(text) = settings.text("queue-size") else { return Ok(256) };
    match text.parse::<u16>() {
        Ok(size @ 2..=1024) if size.is_power_of_two() => Ok(size),
        _ => Err(settings.error("queue-size", format!("{text:?}"), "a power of two from 2 to 1024")),
    }
}

/// `poll`, or `poll_queue`, the switch of cloud-hypervisor's vhost_user_block.
fn take_poll(settings: &mut Settings) -> Result<PollPolicy, SettingError> {
    let switch = settings.switch("poll_queue")?;
    let Some(text) = settings.text("poll") else {
        return Ok(if switch == Some(false) { PollPolicy::Off } else { PollPolicy::default() });
    };
    if let Some(on) = switch {
        let found = format!("{text:?}, and poll_queue={on}");
        return Err(settings.error("poll", found, "one of the two"));
    }
    text.parse().map_err(|expected: String| settings.error("poll", format!("{text:?}"), expected))
}

fn take_plug(settings: &mut Settings) -> Result<PlugOptions, SettingError> {
    let mut plug = PlugOptions::default();
    if let Some(word) = settings.choice("merge", MergeMode::WORDS)? {
        plug.merge = MergeMode::from_word(word);
    }
    if let Some(bytes) = settings.size("merge-bytes")? {
        if !(MIN_MERGE_BYTES..=MAX_MERGE_BYTES).contains(&bytes) {
            let expected = format!("from {MIN_MERGE_BYTES} to {MAX_MERGE_BYTES}");
            return Err(settings.error("merge-bytes", bytes.to_string(), expected));
        }
        plug.merge_bytes = bytes;
    }
    if let Some(segments) = take_u16(settings, "merge-segments", 2, MAX_MERGE_SEGMENTS)? {
        plug.merge_segments = segments.into();
    }
    if let Some(us) = settings.number("plug-us", 0..=MAX_HOLD_US)? {
        plug.hold = Duration::from_micros(us);
    }
    Ok(plug)
}

fn take_coalesce(settings: &mut Settings) -> Result<Coalesce, SettingError> {
    let us = settings.number("coalesce-us", 0..=MAX_HOLD_US)?.unwrap_or(0);
    let answers = take_u16(settings, "coalesce-max", 0, u16::MAX)?;
    if us == 0 && answers.is_some_and(|answers| answers > 0) {
        let found = "a number of answers, but coalesce-us is 0";
        return Err(settings.error(
            "coalesce-max",
            found,
            "coalesce-us with it: the longest time that a call is put off",
        ));
    }
    Ok(Coalesce { delay: Duration::from_micros(us), answers: answers.unwrap_or(0).into() })
}

fn check_unique(disks: &[Settings], fronts: &[Front]) -> Result<(), SettingError> {
    let mut ids = HashMap::new();
    let mut sockets = HashMap::new();
    for (index, (settings, front)) in disks.iter().zip(fronts).enumerate() {
        if let Some(first) = ids.insert(&front.id, index) {
            let found = format!("{:?} for disks #{} and #{}", front.id, first + 1, index + 1);
            return Err(settings.error("id", found, "a name of its own for each disk; give one with id="));
        }
        if let Some(first) = sockets.insert(same_place(&front.socket), &front.id) {
            let found = format!("{:?}, the socket of disk {first:?}", front.socket.display().to_string());
            return Err(settings.error("socket", found, "a path of its own for each disk"));
        }
    }
    Ok(())
}

/// One name for all the paths of a file that may not exist yet.
fn same_place(path: &Path) -> PathBuf {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// `workers` and `pin`.
fn take_process(
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
    for piece in text.split(',') {
        let Some(cpu) = piece.parse::<u16>().ok().filter(|_| piece.bytes().all(|byte| byte.is_ascii_digit())) else {
            return Err(settings.error("pin", format!("{text:?}"), "CPU numbers separated by commas, such as 0,1"));
        };
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

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
