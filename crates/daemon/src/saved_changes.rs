//! Changes at run time other than added and removed disks: the daemon's own section of the state file.
//!
//! A value is saved with the one that the configuration had. Another one at the next start means that the configuration
//! was edited: it has priority, and the saved value is forgotten.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex};
use serde::{Deserialize, Serialize};

use crate::change::ChangeSource;
use crate::state_file::StateFile;

/// The name of the section. No interface has this word.
pub const SECTION: &str = "daemon";

/// The section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedChanges {
    /// Settings of disks, LUNs and controllers, by id.
    #[serde(default)]
    pub settings: BTreeMap<String, SavedSettings>,
    /// Limits of groups, by name.
    #[serde(default)]
    pub limit_groups: BTreeMap<String, SavedSettings>,
    /// The number of workers, if it was changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<SavedWorkers>,
}

/// The changes, and the state file with them, if there is one.
#[derive(Debug)]
pub struct KeptChanges {
    changes: RankedMutex<SavedChanges>,
    /// Locked during a write, so that the newest changes are written last.
    writing: RankedMutex<()>,
    file: Option<Arc<StateFile>>,
}

impl KeptChanges {
    /// Creates it with the changes saved by an earlier daemon.
    pub fn new(changes: SavedChanges, file: Option<Arc<StateFile>>) -> KeptChanges {
        let changes = RankedMutex::new(LockRank::KeptChanges, changes);
        KeptChanges { changes, writing: RankedMutex::new(LockRank::SavedSection, ()), file }
    }

    /// Returns the changes. [`write`](Self::write) writes them.
    pub fn lock(&self) -> RankedGuard<'_, SavedChanges> {
        self.changes.lock()
    }

    /// Writes them to the state file, if there is one.
    pub fn write(&self) {
        if let Some(file) = &self.file {
            let _one = self.writing.lock();
            let changes = self.lock().clone();
            file.set(SECTION, &changes);
        }
    }

    /// Forgets all settings of a disk, LUN or controller: it is removed or replaced.
    pub fn forget(&self, id: &str) {
        if self.lock().settings.remove(id).is_some() {
            self.write();
        }
    }
}

/// Settings with the values that they got at run time.
pub type SavedSettings = BTreeMap<String, SavedValue>;

/// A value that a setting got at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedValue {
    /// The value.
    pub value: String,
    /// The configuration's value at that time, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured: Option<String>,
}

/// The values of a configuration.
pub type ConfiguredValues = BTreeMap<String, String>;

/// The number of workers, as changed at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedWorkers {
    /// Their number.
    pub count: u16,
    /// The configuration's value at that time, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured: Option<String>,
    /// The CPU that each is pinned to.
    pub cpus: Vec<Option<u16>>,
}

/// The record of a change in the state file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// The change is recorded: it was made at run time.
    Record,
    /// The records of these keys are forgotten: they have the configuration's values again.
    Forget,
    /// The record stays: the change comes from there.
    Nothing,
}

impl From<ChangeSource> for Keeping {
    fn from(source: ChangeSource) -> Keeping {
        match source {
            ChangeSource::Configuration => Keeping::Forget,
            ChangeSource::RunTime => Keeping::Record,
        }
    }
}
