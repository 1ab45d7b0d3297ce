//! Requests past the library: reads and writes of clusters that have a place go from the worker's ring to the file, without a thread and
//! without a copy.
//!
//! The disk's threads learn where clusters are from what the library answers after their own requests ([`map`]). A worker looks there. What it
//! finds goes on while nobody has the image alone ([`gate`]): whoever does forgets the clusters that it changes. What a worker does not find,
//! and everything that changes tables, goes to the threads ([`channel`]).
//!
//! Only data changes this way: a write goes to a cluster of the image's own with one user, so that no table says anything else afterwards.

pub(super) mod channel;
pub(super) mod gate;
pub(super) mod map;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mqblk_core::ImageOpener;

use crate::file::HostFile;
use gate::Gate;
use map::{ClusterMap, MAX_FILES};

/// What workers need to go past the library.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) map: ClusterMap,
    pub(super) gate: Gate,
    /// The image's own data file, and those beneath, with the paths that the library knows them by.
    files: Vec<(PathBuf, HostFile)>,
}

impl Direct {
    /// Returns it for an image whose data is in these files, its own first. `None` if a file cannot be used without waiting for its file
    /// system.
    pub(super) fn new(
        files: &[(PathBuf, &File)],
        (size, cluster_bits): (u64, u32),
        read_only: bool,
        opener: &Arc<dyn ImageOpener>,
    ) -> std::io::Result<Option<Direct>> {
        let mut opened = Vec::new();
        for (index, (path, file)) in files.iter().enumerate() {
            let Some(opened_file) = HostFile::new(path, file, read_only || index > 0, opener)? else { return Ok(None) };
            opened.push((path.clone(), opened_file));
        }
        // More are possible with data files beneath: what is in those stays unknown.
        opened.truncate(MAX_FILES);
        let (map, gate) = (ClusterMap::new(size, cluster_bits), Gate::default());
        Ok(Some(Direct { map, gate, files: opened }))
    }

    /// Returns the index of the file that the library knows by this path.
    pub(super) fn file(&self, path: &Path) -> Option<usize> {
        self.files.iter().position(|(known, _)| known == path)
    }
}

#[cfg(test)]
mod tests;
