//! The properties of a device that its guest was given and relies on for as long as it runs, which is longer than the
//! daemon.
//!
//! A guest reads block sizes, features and names once, when its driver starts. A daemon that starts later derives them
//! again from the configuration and the host, and both may have changed: fewer CPUs, storage without discard, a
//! reflinked file, an image under another name. So the daemon records a [`DeviceContract`] when a frontend starts a
//! device's queues ([`KeptContracts`]), and the next daemon gives the guest the same properties.
//!
//! A record is forgotten when the frontend disconnects from a running daemon, and with the host's boot. Its fields are
//! exactly what guests see: [`DiskContract::new`] destructures `Geometry` and `Limits` without `..`, so that a new
//! property cannot be left out.

mod disk;
mod kept;
mod raw_images;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_core::{BlockSize, ByteLen, DiscardLimits, Geometry, Limits};
use mqblk_engine::AnyDisk;
use serde::{Deserialize, Serialize};

use crate::names::canonical_path;
use crate::queues::QUEUE_MAP;
use crate::queues::{QUEUE_SIZE, QUEUES};
use disk::GivenDisk;
pub use kept::{ContractRecorder, KeptContracts, SavedContracts};
pub use raw_images::RawImages;

/// The name of the section of the state file. No interface has this word.
pub const SECTION: &str = "guests";

/// Settings of storage backends that guests rely on: they decide how the image's bytes are addressed.
const STORAGE_KEYS: [&str; 2] = ["block-size", "format"];
/// The values of the key `block-size`. Other sizes are a device's own.
const BLOCK_SIZES: [&str; 2] = ["512", "4096"];

/// The disk address of an interface with one disk per device.
pub const ONLY_DISK: &str = "";

/// All devices as guests were given them, by [`device_key`].
pub type Contracts = BTreeMap<String, DeviceContract>;

/// The empty record.
pub static NO_CONTRACTS: Contracts = Contracts::new();

/// Returns the key of a device: its socket, by which its guest's VMM finds it even if its disk is renamed.
pub fn device_key(socket: &Path) -> String {
    canonical_path(socket).to_string_lossy().into_owned()
}

/// A device as a guest was given it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DeviceContract {
    /// The word of the interface.
    pub interface: String,
    /// Number of request queues.
    pub queues: u16,
    /// Maximum ring size in entries.
    pub queue_size: u16,
    /// Its disks by address; the address is empty for an interface with one disk per device.
    pub disks: BTreeMap<String, DiskContract>,
}

/// A disk or logical unit as a guest was given it. Without its size, which may change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DiskContract {
    /// The storage backend.
    storage: String,
    /// Those of its settings that are in [`STORAGE_KEYS`], resolved.
    settings: BTreeMap<String, String>,
    /// Texts that guests read, by key: `serial` and others.
    texts: BTreeMap<String, String>,
    /// Bytes of a logical and of a physical block.
    block: u32,
    physical_block: u32,
    /// Offset of the first physical block, in logical blocks.
    alignment_offset: u8,
    /// Preferred sizes of I/O in bytes; 0 if unknown.
    min_io: u64,
    opt_io: u64,
    read_only: bool,
    /// `None`: discard was not offered.
    discard: Option<GivenDiscard>,
    /// Largest range in bytes; `None`: write zeroes was not offered.
    write_zeroes: Option<u64>,
    /// The image, if its bytes are the guest's own.
    raw_image: Option<RawImage>,
}

/// Identifies a raw image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RawImage {
    path: String,
    /// The result of [`Disk::raw_identity`](mqblk_core::Disk::raw_identity).
    identity: String,
}

/// The limits of discard, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct GivenDiscard {
    granularity: u64,
    max_len: u64,
}

impl DiskContract {
    /// Describes what guests see of an open disk of this backend. `resolved` are the backend's settings, `texts` the
    /// other texts that guests read.
    pub fn new(
        storage: &str,
        resolved: &[(&'static str, String)],
        disk: &AnyDisk,
        texts: &[(&str, &str)],
    ) -> DiskContract {
        let Geometry { size: _, logical_block, physical_block, alignment_offset, min_io, opt_io, read_only } =
            disk.geometry();
        let Limits {
            discard,
            write_zeroes,
            // The engine splits requests: guests are not bound by it.
            max_transfer: _,
            max_segments: _,
            // Not seen by guests.
            volatile_cache: _,
            cost_per_request: _,
            pins_memory: _,
        } = disk.limits();
        let kept = resolved.iter().filter(|(key, _)| STORAGE_KEYS.contains(key));
        DiskContract {
            storage: storage.to_owned(),
            settings: kept.map(|(key, value)| ((*key).to_owned(), value.clone())).collect(),
            texts: texts.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            block: logical_block.bytes(),
            physical_block: physical_block.bytes(),
            alignment_offset,
            min_io: min_io.0,
            opt_io: opt_io.0,
            read_only,
            discard: discard.map(|DiscardLimits { granularity, max_len }| GivenDiscard {
                granularity: granularity.0,
                max_len: max_len.0,
            }),
            write_zeroes: write_zeroes.map(|len| len.0),
            raw_image: disk.raw_identity().and_then(|identity| {
                let (_, path) = resolved.iter().find(|(key, _)| *key == "path")?;
                Some(RawImage { path: device_key(Path::new(path)), identity })
            }),
        }
    }

    /// Sets those settings of the storage, before it is opened, that the guest relies on.
    pub fn apply_settings(&self, settings: &mut Settings, storage: &str) {
        if self.storage != storage {
            return;
        }
        for key in STORAGE_KEYS {
            let Some(value) = self.settings.get(key) else { continue };
            if key == "block-size" && !BLOCK_SIZES.contains(&value.as_str()) {
                continue;
            }
            replace(settings, key, value);
        }
    }

    /// Returns the text of `key` that the guest has read. `found`: its value without the guest.
    pub fn keep_text(&self, subject: &str, key: &str, found: String) -> String {
        match self.texts.get(key) {
            Some(given) if *given != found => {
                tracing::info!("{subject}: {key}: the guest has {given:?}, found {found:?}; the guest's is kept");
                given.clone()
            }
            _ => found,
        }
    }

    /// Returns the disk as the guest was given it. Logs what cannot be kept.
    pub fn keep(&self, subject: &str, disk: Arc<AnyDisk>) -> Arc<AnyDisk> {
        let (geometry, limits) = (self.geometry(subject, disk.geometry()), self.limits(subject, disk.limits()));
        match (geometry, limits) == (disk.geometry(), disk.limits()) {
            true => disk,
            false => Arc::new(GivenDisk::new(disk, geometry, limits)),
        }
    }

    fn geometry(&self, subject: &str, found: Geometry) -> Geometry {
        let block = |bytes| BlockSize::new(bytes).filter(|given| *given >= found.logical_block);
        let logical_block = block(self.block).unwrap_or_else(|| {
            let (given, least) = (self.block, found.logical_block.bytes());
            tracing::warn!(
                "{subject}: block-size: the guest has {given}, found {least}, which this storage cannot divide; requests of the guest will fail"
            );
            found.logical_block
        });
        if self.read_only != found.read_only {
            let word = |read_only| if read_only { "on" } else { "off" };
            let effect = if found.read_only { "its writes fail" } else { "it cannot write before it starts again" };
            tracing::warn!(
                "{subject}: readonly: the guest has {}, found {}; {effect}",
                word(self.read_only),
                word(found.read_only)
            );
        }
        Geometry {
            size: found.size,
            logical_block,
            physical_block: BlockSize::new(self.physical_block).unwrap_or(found.physical_block).max(logical_block),
            alignment_offset: self.alignment_offset,
            min_io: ByteLen(self.min_io),
            opt_io: ByteLen(self.opt_io),
            read_only: self.read_only,
        }
    }

    fn limits(&self, subject: &str, found: Limits) -> Limits {
        if self.discard.is_some() && found.discard.is_none() {
            tracing::info!(
                "{subject}: discard: the guest has it, and this storage does not; the guest's discards do nothing"
            );
        }
        if self.write_zeroes.is_some() && found.write_zeroes.is_none() && !self.read_only {
            tracing::warn!(
                "{subject}: write zeroes: the guest has it, and this storage does not; the guest has to write zeroes as data"
            );
        }
        let discard = self.discard.map(|GivenDiscard { granularity, max_len }| DiscardLimits {
            granularity: ByteLen(granularity),
            max_len: ByteLen(max_len),
        });
        Limits { discard, write_zeroes: self.write_zeroes.map(ByteLen), ..found }
    }
}

impl DeviceContract {
    /// Sets the keys of a device's queues that its guest relies on, before they are taken: the least number of queues,
    /// and the size of its rings.
    pub fn apply_queues(&self, settings: &mut Settings) {
        let given: Option<u16> = settings.peek(&QUEUES).and_then(|text| text.parse().ok());
        let has_map = settings.peek(&QUEUE_MAP).is_some();
        match given {
            Some(queues) if queues >= self.queues => {}
            // The map would not fit more queues.
            Some(queues) if has_map => {
                let subject = settings.subject();
                tracing::warn!(
                    "{subject}: queues: the guest has {}, found {queues} with a queue-map; it cannot use the others",
                    self.queues
                );
            }
            None if has_map => {}
            _ => replace(settings, &QUEUES, &self.queues.to_string()),
        }
        replace(settings, &QUEUE_SIZE, &self.queue_size.to_string());
    }
}

/// Sets `key`, and logs a different value of the configuration.
fn replace(settings: &mut Settings, key: impl AsRef<str>, value: &str) {
    let key = key.as_ref();
    let subject = settings.subject().to_owned();
    if let Some(found) = settings.peek(key).filter(|found| *found != value) {
        tracing::warn!(
            "{subject}: {key}: the guest has {value}, found {found} in the configuration; the guest's is kept until its VMM has \
             disconnected and the daemon starts again"
        );
    }
    settings.replace(key, value);
}

#[cfg(test)]
mod tests;
