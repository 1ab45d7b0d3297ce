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

/// How far beyond a request is learnt where clusters are.
const LEARN_AHEAD: u64 = 1 << 20;

/// What workers need to go past the library.
#[derive(Debug)]
pub(super) struct Direct {
    map: ClusterMap,
    pub(super) gate: Gate,
    cluster: u64,
    /// The image's own data file, and those beneath, with the paths that the library knows them by.
    files: Vec<(PathBuf, HostFile)>,
    /// A length that the first of them has at least.
    file_len: AtomicU64,
}

/// Where clusters are, as the library says, before workers may go there.
#[derive(Debug, Default)]
pub(super) struct FoundClusters {
    /// In order.
    places: Vec<(u64, Place)>,
    /// The clusters that were written, of which nothing from before is true.
    own: Range<u64>,
}

impl FoundClusters {
    /// Without the places of other clusters, as the tables that say so may not be in the file.
    pub(super) fn own(mut self) -> FoundClusters {
        self.places.retain(|(cluster, _)| self.own.contains(cluster));
        self
    }

    /// Without places that workers may write.
    pub(super) fn readable(mut self) -> FoundClusters {
        self.places.retain(|(_, place)| !matches!(place, Place::Data { writable: true, .. }));
        self
    }
}

impl Direct {
    /// Returns it for an image whose data is in these files, its own first. `None` if a file cannot be used without waiting for its file
    /// system.
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

    /// Looks up where the clusters of a range are, and some more behind it, for [`enter`](Self::enter). Called by who shares the image, after a
    /// request. `written`: it may have given clusters of the range another place.
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
            // A part of a cluster is one only at the end of the disk.
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

    /// Lets workers go to what was found. Called while the image is still shared, when the tables that say so are in the file: a write of a
    /// worker completes without any.
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

    /// Returns the place of a mapping, if workers can go there.
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

    /// Returns true if workers may go to the cluster at this place. A write must not make the file longer: the library knows how long it is,
    /// and relies on that where it zeroes or discards.
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

    /// Forgets where the clusters of a range are. Called by who has the image alone, before it changes that.
    pub(super) fn forget(&self, start: u64, end: u64) {
        self.file_len.store(0, Ordering::Relaxed);
        self.map.forget(start / self.cluster..end.div_ceil(self.cluster));
    }
}

#[cfg(test)]
mod tests;
