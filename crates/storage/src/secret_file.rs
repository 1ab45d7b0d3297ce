//! Files with secrets.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Bits of a file's mode for others than owner and group.
const OF_OTHERS: u32 = 0o007;

/// Warns of a secret that every user of the host may use.
pub(crate) fn warn_if_public(path: &Path, metadata: &Metadata) {
    if metadata.mode() & OF_OTHERS != 0 {
        let mode = metadata.mode() & 0o7777;
        tracing::warn!("{}: mode {mode:04o}: every user of the host may use this key (chmod o= FILE)", path.display());
    }
}
