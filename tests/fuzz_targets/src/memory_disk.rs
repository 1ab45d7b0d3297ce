//! Fuzzed disks in memory.

use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_engine::AnyDisk;

/// Opens a disk of this many bytes, all zero, in blocks of `block` bytes.
pub(crate) fn open_memory_disk(bytes: usize, block: usize, read_only: bool) -> Arc<AnyDisk> {
    let mut settings = Settings::new("disk");
    let (bytes, block) = (bytes.to_string(), block.to_string());
    let read_only = if read_only { "on" } else { "off" };
    for (key, value) in [("size", &*bytes), ("block-size", &*block), ("readonly", read_only)] {
        settings.insert(key, value).expect("given once");
    }
    mqblk_storage::open("ram", &mut settings).expect("a disk in memory")
}
