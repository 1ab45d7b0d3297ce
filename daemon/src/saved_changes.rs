//! What was changed at run time besides disks: the daemon's own section of the state file.
//!
//! A value is kept with the one that the configuration had. When the configuration has another one at the next start, it was edited since:
//! it has priority, and the kept value is forgotten.

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
    /// The number of workers, if that was changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<SavedWorkers>,
}

/// What was changed, and the state file that keeps it if there is one.
#[derive(Debug)]
pub struct KeptChanges {
    changes: RankedMutex<SavedChanges>,
    /// Held while they are written: the newest are written last.
    writing: RankedMutex<()>,
    file: Option<Arc<StateFile>>,
}

impl KeptChanges {
    /// Creates it with what a daemon before this one has kept.
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

    /// Forgets all that was set of a disk, LUN or controller: it is gone, or another one.
    pub fn forget(&self, id: &str) {
        if self.lock().settings.remove(id).is_some() {
            self.write();
        }
    }
}

/// Settings with the values that they were given at run time.
pub type SavedSettings = BTreeMap<String, SavedValue>;

/// A value that a setting was given at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedValue {
    /// The value.
    pub value: String,
    /// What the configuration said then, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured: Option<String>,
}

/// The values of a configuration.
pub type ConfiguredValues = BTreeMap<String, String>;

/// The number of workers, as it was changed at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedWorkers {
    /// How many there are.
    pub count: u16,
    /// What the configuration said then, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured: Option<String>,
    /// The CPU that each is pinned to.
    pub cpus: Vec<Option<u16>>,
}

/// What becomes of a change in the state file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeping {
    /// It is recorded: it was made at run time.
    Record,
    /// What was recorded of these keys is forgotten: they are as in the configuration again.
    Forget,
    /// Nothing: it comes from there.
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
