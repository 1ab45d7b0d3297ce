//! The disks that were added and removed at run time: the interface's section of the state file.
//!
//! The configuration has priority: entries that do not fit it are dropped with a warning, and the daemon starts. A disk
//! that cannot be served must not prevent the others from being served.

use std::collections::{BTreeMap, HashSet};

use mqblk_core::settings::{SettingError, Settings};
use serde::{Deserialize, Serialize};

use super::config::{BlkEndpoint, DiskToOpen};
use crate::change::ChangeSource;
use crate::disk_list::DiskKeys;
use crate::interface::{DiskTable, ListPosition, ResolveContext};
use crate::state_file::saved_settings;

/// The section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedDisks {
    /// Disks that were added, in the order of their addition.
    pub added: Vec<AddedDisk>,
    /// The ids of disks of the configuration that were removed.
    pub removed: Vec<String>,
}

/// A disk that was added at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AddedDisk {
    pub id: String,
    /// The other settings that it was added with.
    pub settings: BTreeMap<String, String>,
}

impl AddedDisk {
    /// Returns the record of a disk that was added with `settings`.
    pub(super) fn new(id: &str, settings: &Settings) -> AddedDisk {
        AddedDisk { id: id.to_owned(), settings: saved_settings(settings, &["id"]) }
    }

    /// Returns its settings, as in a `[[disk]]` table of the configuration.
    fn to_settings(&self) -> Result<Settings, SettingError> {
        let mut settings = Settings::new(format!("disk {:?} of the state file", self.id));
        settings.insert("id", &self.id)?;
        self.settings.iter().try_for_each(|(key, value)| settings.insert(key, value))?;
        Ok(settings)
    }
}

impl SavedDisks {
    /// Records that a disk was added.
    pub(super) fn add(&mut self, disk: AddedDisk) {
        match self.added.iter_mut().find(|other| other.id == disk.id) {
            // It was out.
            Some(other) => *other = disk,
            None => self.added.push(disk),
        }
    }

    /// Records that a disk was removed.
    pub(super) fn remove(&mut self, id: &str, origin: ChangeSource) {
        match origin {
            ChangeSource::RunTime => self.added.retain(|disk| disk.id != id),
            ChangeSource::Configuration if self.removed.iter().any(|removed| removed == id) => {}
            ChangeSource::Configuration => self.removed.push(id.to_owned()),
        }
    }
}

/// Removes the disks that were removed, and adds those that were added. Drops entries of `saved` that do not fit the
/// configuration.
pub(super) fn apply(saved: &mut SavedDisks, disks: &mut Vec<DiskToOpen>, context: &mut ResolveContext<'_>) {
    let ids: HashSet<String> = disks.iter().map(|disk| disk.keys.id().to_owned()).collect();
    saved.removed.retain(|id| ids.contains(id));
    let removed: HashSet<&str> = saved.removed.iter().map(String::as_str).collect();
    for removed in disks.extract_if(.., |disk| removed.contains(disk.keys.id())) {
        removed.keys.claims().iter().for_each(|claim| context.names.release(claim));
    }
    let mut number = 0;
    saved.added.retain(|disk| match take(disk, number, context) {
        Ok(keys) => {
            number += 1;
            disks.push(DiskToOpen { keys, origin: ChangeSource::RunTime });
            true
        }
        Err(error) => {
            tracing::warn!("{error}; the configuration has priority: the disk is dropped from the state file");
            false
        }
    });
}

fn take(
    disk: &AddedDisk,
    number: usize,
    context: &mut ResolveContext<'_>,
) -> Result<DiskKeys<BlkEndpoint>, SettingError> {
    let (settings, position) = (disk.to_settings()?, ListPosition::Added(number));
    let owner = settings.subject().to_owned();
    let (cpus, kinds, given) = (context.cpus, context.kinds, context.given);
    context.names.attempt(|names| {
        let mut attempt = ResolveContext { cpus, kinds, names, saved: None, given };
        DiskKeys::take(DiskTable { settings, owner, position }, &mut attempt)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cpus::Cpus;
    use crate::names::UniqueNames;

    fn disk(id: &str) -> AddedDisk {
        let settings =
            crate::key_values::parse("disk", &format!("storage=null,size=1M,socket=/run/{id}.sock")).unwrap();
        AddedDisk::new(id, &settings)
    }

    /// Returns the ids that are served for a configuration with disks `a` and `b`.
    fn applied(saved: &mut SavedDisks) -> Vec<String> {
        let cpus = Cpus { count: 1, pinnable: BTreeSet::new() };
        let mut names = UniqueNames::default();
        let given = &crate::contract::NO_CONTRACTS;
        let mut context = ResolveContext { cpus: &cpus, kinds: &["null"], names: &mut names, saved: None, given };
        let mut disks = Vec::new();
        for id in ["a", "b"] {
            let table = DiskTable {
                settings: disk(id).to_settings().unwrap(),
                owner: id.to_owned(),
                position: ListPosition::Disk(0),
            };
            let keys = DiskKeys::take(table, &mut context).unwrap();
            disks.push(DiskToOpen { keys, origin: ChangeSource::Configuration });
        }
        apply(saved, &mut disks, &mut context);
        disks.iter().map(|disk| disk.keys.id().to_owned()).collect()
    }

    #[test]
    fn changes_are_applied_to_a_configuration() {
        let mut saved = SavedDisks::default();
        assert_eq!(applied(&mut saved), ["a", "b"]);
        saved.add(disk("c"));
        saved.remove("a", ChangeSource::Configuration);
        saved.remove("a", ChangeSource::Configuration);
        assert_eq!((applied(&mut saved), saved.removed.len()), (vec!["b".to_owned(), "c".to_owned()], 1));
        // A removed disk may return as another one.
        saved.add(disk("a"));
        assert_eq!(applied(&mut saved), ["b", "c", "a"]);
        saved.remove("c", ChangeSource::RunTime);
        assert_eq!(applied(&mut saved), ["b", "a"]);
        let json = serde_json::to_value(&saved).unwrap();
        assert_eq!(serde_json::from_value::<SavedDisks>(json).unwrap(), saved);
    }

    #[test]
    fn the_configuration_has_priority() {
        let mut saved = SavedDisks::default();
        saved.add(disk("b"));
        saved.add(AddedDisk { settings: disk("a").settings, id: "other".to_owned() });
        saved.add(disk("c"));
        saved.remove("gone", ChangeSource::Configuration);
        assert_eq!(applied(&mut saved), ["a", "b", "c"], "its id, or its socket, is another disk's");
        assert_eq!((saved.added, saved.removed), (vec![disk("c")], Vec::new()));
    }
}
