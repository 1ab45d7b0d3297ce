//! Requests that bypass the library: reads and writes of allocated clusters go from the worker's ring to the file,
//! without a thread or a copy.
//!
//! The disk's threads learn the locations of clusters from the library after their own requests ([`map`]). A worker
//! looks them up there. Its requests proceed unless a thread has exclusive access ([`gate`]), which forgets the
//! clusters that it changes. Clusters without an entry, and all changes of tables, go to the threads ([`channel`]).
//!
//! Only data changes this way: a write goes to the image's own cluster with one user, so no table changes.

pub(super) mod channel;
pub(super) mod gate;
mod map;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use imago::file::File as ImageFile;
use imago::{FormatAccess, Mapping, Storage as _};

use crate::file::HostFile;
use gate::Gate;
use map::{ClusterMap, Place};

/// Distance beyond a request in which the locations of clusters are looked up.
const LEARN_AHEAD: u64 = 1 << 20;

/// A worker's data to bypass the library.
#[derive(Debug)]
pub(super) struct Direct {
    map: ClusterMap,
    pub(super) gate: Gate,
    cluster: u64,
    /// The image's own data file, and those beneath, with the library's paths.
    files: Vec<(PathBuf, HostFile)>,
    /// A lower bound of the first one's length.
    file_len: AtomicU64,
}

/// Locations of clusters from the library, before workers may use them.
#[derive(Debug, Default)]
pub(super) struct FoundClusters {
    /// In order.
    places: Vec<(u64, Place)>,
    /// The written clusters: earlier locations are invalid.
    own: Range<u64>,
}

impl FoundClusters {
    /// Returns it without the locations of other clusters, whose tables may not be in the file.
    pub(super) fn own(mut self) -> FoundClusters {
        self.places.retain(|(cluster, _)| self.own.contains(cluster));
        self
    }

    /// Returns it without locations that workers may write.
    pub(super) fn readable(mut self) -> FoundClusters {
        self.places.retain(|(_, place)| !matches!(place, Place::Data { writable: true, .. }));
        self
    }
}

impl Direct {
    /// Returns it for an image with its data in these files, its own first. `None` if a file cannot be used without
    /// waiting for its file system.
    pub(super) fn new(
        files: &[(PathBuf, &File)],
        (size, cluster_bits): (u64, u32),
        read_only: bool,
    ) -> io::Result<Option<Direct>> {
        let mut opened = Vec::with_capacity(files.len());
        for (index, (path, file)) in files.iter().enumerate() {
            let Some(host_file) = HostFile::new(path, file, read_only || index > 0)? else { return Ok(None) };
            opened.push((path.clone(), host_file));
        }
        let (map, gate) = (ClusterMap::new(size, cluster_bits), Gate::default());
        Ok(Some(Direct { map, gate, cluster: 1 << cluster_bits, files: opened, file_len: AtomicU64::new(0) }))
    }

    /// Looks up the locations of a range's clusters, and some beyond it, for [`enter`](Self::enter). Called with the
    /// image shared, after a request. `written`: it may have moved clusters of the range.
    pub(super) fn look_up(&self, format: &FormatAccess<ImageFile>, at: u64, len: u64, written: bool) -> FoundClusters {
        let mut found = FoundClusters::default();
        let is_known = |place| !written || matches!(place, Place::Data { writable: true, .. });
        if self.map.find(at, len).is_some_and(is_known) {
            return found;
        }
        let (cluster, size) = (self.cluster, format.size());
        let own = at / cluster..(at + len).div_ceil(cluster);
        if written {
            found.own = own.clone();
        }
        let end = (own.end * cluster).max(at + LEARN_AHEAD).min(size);
        let mut next = own.start;
        while next * cluster < end {
            let start = next * cluster;
            let Ok((mapping, run)) = format.get_mapping(start, end - start) else { break };
            let place = self.place(&mapping);
            // A part of a cluster counts only at the end of the disk.
            let whole = if start + run >= size { run.div_ceil(cluster) } else { run / cluster };
            for number in 0..whole.max(1) {
                let place = place.filter(|_| whole > 0).map(|place| place.skip(number * cluster));
                if let Some(place) = place.filter(|place| self.may_go(*place)) {
                    found.places.push((next + number, place));
                }
            }
            next += whole.max(1);
        }
        found
    }

    /// Lets workers use the found locations. Called while the image is still shared and their tables are in the file: a
    /// worker's write completes without tables.
    pub(super) fn enter(&self, found: FoundClusters) {
        let mut entered = found.places.iter().map(|(cluster, _)| *cluster).peekable();
        for cluster in found.own {
            while entered.next_if(|entered| *entered < cluster).is_some() {}
            if entered.peek() != Some(&cluster) {
                self.map.mark_written(cluster);
            }
        }
        found.places.iter().for_each(|(cluster, place)| self.map.learn(*cluster, *place));
    }

    /// Returns the location of a mapping, if workers can use it.
    fn place(&self, mapping: &Mapping<'_, ImageFile>) -> Option<Place> {
        match *mapping {
            Mapping::Raw { offset: at, writable: true, .. } => Some(Place::Data { file: 0, at, writable: true }),
            Mapping::Raw { storage, offset: at, .. } => {
                let path = storage.get_filename()?;
                let file = self.files.iter().position(|(known, _)| *known == path)?;
                Some(Place::Data { file, at, writable: false })
            }
            Mapping::Zero { .. } => Some(Place::Zero),
            _ => None,
        }
    }

    /// Returns true if workers may use the cluster at this location. A write must not extend the file: the library
    /// relies on its known length when it zeroes or discards.
    fn may_go(&self, place: Place) -> bool {
        let Place::Data { at, writable: true, .. } = place else { return true };
        let end = at + self.cluster;
        if end > self.file_len.load(Ordering::Relaxed) {
            let len = self.files.first().and_then(|(_, file)| file.len().ok());
            self.file_len.store(len.map_or(0, |len| len.0), Ordering::Relaxed);
        }
        end <= self.file_len.load(Ordering::Relaxed)
    }

    /// Releases the locks of all files.
    pub(super) fn unlock(&self) {
        self.files.iter().for_each(|(_, file)| file.unlock());
    }

    /// Forgets the locations of a range's clusters. Called with exclusive access, before a change of them.
    pub(super) fn forget(&self, start: u64, end: u64) {
        self.file_len.store(0, Ordering::Relaxed);
        self.map.forget(start / self.cluster..end.div_ceil(self.cluster));
    }
}

#[cfg(test)]
mod tests;
