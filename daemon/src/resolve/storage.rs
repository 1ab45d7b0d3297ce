//! The keys of the storage of a disk or logical unit, common to all guest interfaces.

use mqblk_core::ByteLen;
use mqblk_core::disk::DiskError;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{ErrorPolicy, IoLimits, MergeMode, OnError, OnNoSpace, PlugOptions};

use super::{ConfigError, take_u16, with_similar_key};
use crate::config::{CacheMode, StorageConfig, StorageLimits};
use crate::contract::DiskContract;
use crate::limits::take_limits;
use crate::storage_backends::StorageBackends;

/// Bounds of `merge-bytes`: a page, and the maximum length of a request.
const MIN_MERGE_BYTES: ByteLen = ByteLen(4 << 10);
const MAX_MERGE_BYTES: ByteLen = ByteLen(64 << 20);
/// Maximum number of segments that the kernel accepts in an operation (UIO_MAXIOV).
const MAX_MERGE_SEGMENTS: u16 = 1024;
const DEFAULT_STORAGE: &str = "file";

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
        let serial = match take_printable(settings, "serial", serial_bytes)? {
            Some(serial) => serial,
            None => id.chars().take(serial_bytes).collect(),
        };
        let cache = settings.choice("cache", CacheMode::WORDS)?.map_or(CacheMode::Writeback, CacheMode::from_word);
        let watch_size = settings.switch("watch-size")?.unwrap_or(true);
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

    /// Opens the storage, which takes its own keys, as a guest was given it before (`given`). Fails if a key is left then.
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
        settings.finish()?;
        let StorageKeys { mut serial, cache, plug, watch_size, errors, kind, .. } = self;
        if let Some(given) = given {
            serial = given.keep_text(&subject, "serial", serial);
            disk = given.keep(&subject, disk);
        }
        let kind = kind.to_owned();
        Ok(StorageConfig { serial, cache, plug, watch_size, errors, limits, kind, resolved_settings, disk })
    }
}

/// Takes the name of the storage backend. Without one the scheme of `path` chooses it.
pub fn take_storage_kind(settings: &mut Settings, kinds: &[&'static str]) -> Result<&'static str, SettingError> {
    let name = match settings.text("storage") {
        Some(name) => name,
        None => match settings.peek("path").map_or(Ok(None), mqblk_storage::backend_of_path) {
            Ok(of_path) => of_path.unwrap_or(DEFAULT_STORAGE).to_owned(),
            Err((found, expected)) => return Err(settings.error("path", found, expected)),
        },
    };
    match kinds.iter().find(|backend| **backend == name) {
        Some(backend) => Ok(backend),
        None => Err(settings.error("storage", format!("{name:?}"), format!("one of {}", kinds.join(", ")))),
    }
}

/// Takes a text that guests read: 1 to `most` bytes of printable ASCII.
pub fn take_printable(settings: &mut Settings, key: &'static str, most: usize) -> Result<Option<String>, SettingError> {
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
    let on_error = match settings.text("on-error") {
        None => OnError::default(),
        Some(text) => {
            OnError::parse(&text).ok_or_else(|| settings.error("on-error", format!("{text:?}"), OnError::EXPECTED))?
        }
    };
    let on_enospc = settings.choice("on-enospc", OnNoSpace::WORDS)?.map_or(OnNoSpace::default(), OnNoSpace::from_word);
    Ok(ErrorPolicy { on_error, on_enospc })
}

/// Takes the keys of merging and `depth`. What is not given stays as it is in `current`.
///
/// # Errors
/// Returns the first invalid value.
pub fn take_plug(settings: &mut Settings, current: PlugOptions) -> Result<PlugOptions, SettingError> {
    let mut plug = current;
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
    if let Some(depth) = take_u16(settings, "depth", 0, u16::MAX)? {
        plug.depth = depth.into();
    }
    Ok(plug)
}
