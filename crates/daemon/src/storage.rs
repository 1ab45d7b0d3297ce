//! The storage of a disk or logical unit, and its keys that are common to all guest interfaces.

use std::sync::Arc;

use mqblk_core::ByteLen;
use mqblk_core::disk::DiskError;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_engine::{
    AnyDisk, DiskHealth, DiskLimits, ErrorPolicy, IoLimits, LimitGroup, MergeMode, OnError, OnNoSpace, PlugOptions,
};

use crate::config_error::ConfigError;
use crate::contract::DiskContract;
use crate::key_values::{finish, with_similar_key};
use crate::limits::{LIMIT_GROUP, limit_pairs, take_limits};
use crate::pair::{Pair, number, number_or_text, string};
use crate::storage_backends::StorageBackends;

/// Bounds of `merge-bytes`: a page, and the maximum length of a request.
const MIN_MERGE_BYTES: ByteLen = ByteLen(4 << 10);
const MAX_MERGE_BYTES: ByteLen = ByteLen(64 << 20);
const DEFAULT_STORAGE: &str = "file";

/// The storage backend.
pub static STORAGE: Key = Key::text("storage", "KIND", "`file`, `nbd`, `null`, `qcow2`, `ram`, `rbd`")
    .otherwise("by the scheme of `path`, else `file`")
    .about(
        "the kind of storage",
        "[The backends](storage/README.md). `null` is for measuring: it discards writes, and a read leaves the guest's memory as it is. `ram` is empty \
         at start and lost at exit.",
    );
/// The serial number. The interface limits its length.
pub static SERIAL: Key = Key::text("serial", "TEXT", "1 to 20 bytes of printable ASCII, of a LUN to 64")
    .otherwise("the first bytes of the id")
    .about("the serial number that the guest sees", "`/sys/block/vda/serial`.");
static CACHE: Key = Key::words("cache", CacheMode::WORDS).placeholder("MODE").default("writeback").about(
    "writeback: a write is durable after a flush; writethrough: before it is completed",
    "The guest may switch.",
);
static WATCH_SIZE: Key = Key::switch("watch-size")
    .default("on")
    .about("detect that the file or block device has grown, and notify the guest", "[resize.md](resize.md).");
static ON_ERROR: Key = Key::text("on-error", "POLICY", "`report`, `stop`, `retry:<seconds>` with 1 to 86400").default("report").about(
    "when the storage fails a request: report it to the guest; stop: keep it and all later ones until mqblk resume; or retry:SECONDS",
    "See [errors](#errors).",
);
static ON_ENOSPC: Key = Key::words("on-enospc", OnNoSpace::WORDS)
    .default("report")
    .about("when the storage has no space for a request: report, or stop", "`ENOSPC` and `EDQUOT`.");
static MERGE: Key = Key::words("merge", MergeMode::WORDS).default("auto").live().about(
    "merge requests with adjacent ranges: on, off, or auto (where a request costs the storage something: not null and ram)",
    "See [merging](#merging). A change does not affect requests that are merged already or are with the storage.",
);
static MERGE_BYTES: Key =
    Key::size("merge-bytes").default("1M").live().about("the longest merged request, 4K to 64M", "");
/// At most what the kernel accepts in an operation (UIO_MAXIOV).
static MERGE_SEGMENTS: Key =
    Key::number("merge-segments", 2, 1024).default("1024").live().about("most memory segments of a merged request", "");
static DEPTH: Key = Key::number("depth", 0, 65_535).default("0").live().about(
    "most requests of the disk that each worker has with the storage; 0: automatic",
    "Others wait. 0: as many as the storage takes, and fewer on a worker with several disks, so that a slow one leaves room for the others.",
);
/// The keys of merging and submitting requests.
pub const PLUG_KEYS: &[&Key] = &[&MERGE, &MERGE_BYTES, &MERGE_SEGMENTS, &DEPTH];
/// The keys of a storage that all backends have, besides those of merging and of limits.
pub const STORAGE_KEYS: &[&Key] = &[&SERIAL, &STORAGE, &CACHE, &WATCH_SIZE, &ON_ERROR, &ON_ENOSPC];

/// The storage of a disk or a logical unit, independent of the guest interface.
#[derive(Clone)]
pub struct StorageConfig {
    /// The serial number that guests read: printable ASCII, no longer than the interface allows.
    pub serial: String,
    /// The durability of writes.
    pub cache: CacheMode,
    /// The merging of adjacent requests before submission to the storage.
    pub plug: PlugOptions,
    /// True if the daemon detects by itself that the storage has grown.
    pub watch_size: bool,
    /// The handling of requests that the storage failed.
    pub errors: ErrorPolicy,
    /// The limits of its requests.
    pub limits: StorageLimits,
    /// The storage backend: a name in the registry.
    pub kind: String,
    /// The backend's own settings with all defaults filled in, for printing.
    pub resolved_settings: Vec<(&'static str, String)>,
    /// The open disk.
    pub disk: Arc<AnyDisk>,
}

/// The limits of a storage's requests.
#[derive(Clone, Debug, Default)]
pub struct StorageLimits {
    /// Its own.
    pub own: IoLimits,
    /// Its group, if any.
    pub group: Option<Arc<LimitGroup>>,
}

impl StorageConfig {
    /// Returns the properties that guests are given, with these texts besides its serial number.
    pub fn contract(&self, texts: &[(&str, &str)]) -> DiskContract {
        let serial = [("serial", self.serial.as_str())];
        DiskContract::new(&self.kind, &self.resolved_settings, &*self.disk, &[&serial, texts].concat())
    }

    /// Creates the state of the disk or logical unit `name` that all workers share: its error policy and its limits.
    pub fn new_health(&self, name: &str) -> Arc<DiskHealth> {
        let limits = DiskLimits::new(self.limits.own, self.limits.group.as_ref());
        Arc::new(DiskHealth::with_limits(name, self.errors, limits))
    }
}

/// The durability of writes. The guest may switch: virtio-blk's CONFIG_WCE, WCE of the SCSI caching mode page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// After the next flush.
    Writeback,
    /// Before it is completed.
    Writethrough,
}

impl CacheMode {
    /// The words of the configuration.
    pub const WORDS: &'static [&'static str] = &["writeback", "writethrough"];

    /// Returns the mode of one of [`CacheMode::WORDS`].
    pub fn from_word(word: &str) -> CacheMode {
        if word == "writethrough" { CacheMode::Writethrough } else { CacheMode::Writeback }
    }

    /// Returns the configuration's word for this mode.
    pub const fn word(self) -> &'static str {
        match self {
            CacheMode::Writeback => "writeback",
            CacheMode::Writethrough => "writethrough",
        }
    }
}

/// The keys of a storage that is not open yet.
#[derive(Clone, Debug)]
pub struct StorageKeys {
    serial: String,
    cache: CacheMode,
    plug: PlugOptions,
    watch_size: bool,
    errors: ErrorPolicy,
    limits: IoLimits,
    kind: &'static str,
}

impl StorageKeys {
    /// Takes the keys of the disk or logical unit `id`, whose serial number has at most `serial_bytes`.
    pub fn take(
        settings: &mut Settings,
        kind: &'static str,
        id: &str,
        serial_bytes: usize,
    ) -> Result<StorageKeys, SettingError> {
        let serial = match take_printable(settings, &SERIAL, serial_bytes)? {
            Some(serial) => serial,
            None => id.chars().take(serial_bytes).collect(),
        };
        let cache = settings.word(&CACHE)?.map_or(CacheMode::Writeback, CacheMode::from_word);
        let watch_size = settings.switch_or_default(&WATCH_SIZE)?;
        let errors = take_errors(settings)?;
        let limits = take_limits(settings, IoLimits::default())?;
        Ok(StorageKeys {
            serial,
            cache,
            plug: take_plug(settings, PlugOptions::default())?,
            watch_size,
            errors,
            limits,
            kind,
        })
    }

    /// Opens the storage, which takes its own keys. `given`: the disk as a guest was given it before. Fails if a key is
    /// left.
    pub fn open(
        self,
        mut settings: Settings,
        storages: &dyn StorageBackends,
        given: Option<&DiskContract>,
    ) -> Result<StorageConfig, ConfigError> {
        let subject = settings.subject().to_owned();
        given.iter().for_each(|given| given.apply_settings(&mut settings, self.kind));
        let group = storages.limit_groups().take_group(&mut settings)?.flatten();
        let limits = StorageLimits { own: self.limits, group };
        let (mut disk, resolved_settings) = match storages.open(self.kind, &mut settings) {
            Ok(opened) => opened,
            Err(DiskError::Setting(error)) => return Err(with_similar_key(error, &settings).into()),
            Err(source) => {
                return Err(ConfigError::Disk { subject: settings.subject().to_owned(), source: Box::new(source) });
            }
        };
        finish(settings)?;
        let StorageKeys { mut serial, cache, plug, watch_size, errors, kind, .. } = self;
        if let Some(given) = given {
            serial = given.keep_text(&subject, SERIAL.name, serial);
            disk = given.keep(&subject, disk);
        }
        let kind = kind.to_owned();
        Ok(StorageConfig { serial, cache, plug, watch_size, errors, limits, kind, resolved_settings, disk })
    }
}

/// Takes the name of the storage backend. Without one the scheme of `path` chooses it, or the `format`.
pub fn take_storage_kind(settings: &mut Settings, kinds: &[&'static str]) -> Result<&'static str, SettingError> {
    let name = match settings.text(&STORAGE) {
        Some(name) => name,
        None => match settings.peek("path").map_or(Ok(None), mqblk_storage::backend_of_path) {
            Ok(of_path) => {
                let of_format = || settings.peek("format").and_then(mqblk_storage::backend_of_format);
                of_path.or_else(of_format).unwrap_or(DEFAULT_STORAGE).to_owned()
            }
            Err((found, expected)) => return Err(settings.error("path", found, expected)),
        },
    };
    match kinds.iter().find(|backend| **backend == name) {
        Some(backend) => Ok(backend),
        None => Err(settings.error(&STORAGE, format!("{name:?}"), format!("one of {}", kinds.join(", ")))),
    }
}

/// Takes a text that guests read: 1 to `most` bytes of printable ASCII.
pub fn take_printable(settings: &mut Settings, key: &'static Key, most: usize) -> Result<Option<String>, SettingError> {
    let Some(text) = settings.text(key) else { return Ok(None) };
    if is_printable(&text) && (1..=most).contains(&text.len()) {
        return Ok(Some(text));
    }
    let found = format!("{text:?} ({} bytes)", text.len());
    Err(settings.error(key, found, format!("1 to {most} bytes of printable ASCII")))
}

/// Returns true if a text is printable ASCII.
pub fn is_printable(text: &str) -> bool {
    text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic())
}

fn take_errors(settings: &mut Settings) -> Result<ErrorPolicy, SettingError> {
    let on_error = match settings.text(&ON_ERROR) {
        None => OnError::default(),
        Some(text) => {
            OnError::parse(&text).ok_or_else(|| settings.error(&ON_ERROR, format!("{text:?}"), OnError::EXPECTED))?
        }
    };
    let on_enospc = settings.word(&ON_ENOSPC)?.map_or(OnNoSpace::default(), OnNoSpace::from_word);
    Ok(ErrorPolicy { on_error, on_enospc })
}

/// Takes the keys of merging and `depth`. Keys that are not given keep the value of `current`.
///
/// # Errors
/// Returns the first invalid value.
pub fn take_plug(settings: &mut Settings, current: PlugOptions) -> Result<PlugOptions, SettingError> {
    let mut plug = current;
    if let Some(word) = settings.word(&MERGE)? {
        plug.merge = MergeMode::from_word(word);
    }
    if let Some(bytes) = settings.size(&MERGE_BYTES)? {
        if !(MIN_MERGE_BYTES..=MAX_MERGE_BYTES).contains(&bytes) {
            let expected = format!("from {MIN_MERGE_BYTES} to {MAX_MERGE_BYTES}");
            return Err(settings.error(&MERGE_BYTES, bytes.to_string(), expected));
        }
        plug.merge_bytes = bytes;
    }
    if let Some(segments) = settings.number(&MERGE_SEGMENTS)? {
        plug.merge_segments = segments as u32;
    }
    if let Some(depth) = settings.number(&DEPTH)? {
        plug.depth = depth as u32;
    }
    Ok(plug)
}

/// Returns the keys of merging and `depth` with their values.
pub fn plug_pairs(plug: &PlugOptions) -> Vec<Pair> {
    vec![
        (MERGE.name, string(plug.merge.word())),
        (MERGE_BYTES.name, number_or_text(&plug.merge_bytes.to_string())),
        (MERGE_SEGMENTS.name, number(plug.merge_segments)),
        (DEPTH.name, number(plug.depth)),
    ]
}

/// Returns the keys of a storage that all backends have, with their values. Only limits that are set.
pub fn storage_pairs(storage: &StorageConfig) -> Vec<Pair> {
    let mut pairs = plug_pairs(&storage.plug);
    pairs.extend([
        (WATCH_SIZE.name, string(if storage.watch_size { "on" } else { "off" })),
        (ON_ERROR.name, string(&storage.errors.on_error.to_string())),
        (ON_ENOSPC.name, string(storage.errors.on_enospc.word())),
        (CACHE.name, string(storage.cache.word())),
        (SERIAL.name, string(&storage.serial)),
    ]);
    pairs.extend(limit_pairs(&storage.limits.own));
    pairs.extend(storage.limits.group.iter().map(|group| (LIMIT_GROUP.name, string(group.name()))));
    pairs
}

/// Returns `storage` and the keys of its backend, with their values.
pub fn backend_pairs(storage: &StorageConfig) -> Vec<Pair> {
    let mut pairs = vec![(STORAGE.name, string(&storage.kind))];
    pairs.extend(storage.resolved_settings.iter().map(|(key, value)| (*key, number_or_text(value))));
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for word in CacheMode::WORDS {
            assert_eq!(CacheMode::from_word(word).word(), *word);
        }
    }
}
