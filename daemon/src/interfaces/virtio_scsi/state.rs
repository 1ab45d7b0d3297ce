//! The state file: LUNs that were added and removed at run time, for the next daemon.
//!
//! Each change replaces the whole file atomically: a new file is written, fsynced and renamed, and the directory is fsynced. After a kill
//! the file has the content from before or after the change.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use mqblk_core::settings::{SettingError, Settings};
use rustix::fs::{FlockOperation, OFlags};
use serde::{Deserialize, Serialize};

/// The value of the `format` member.
const FORMAT: &str = "mqblk-state";
const VERSION: u32 = 1;
/// Maximum size of a state file. Thousands of LUNs need a tenth of it.
const MAX_BYTES: u64 = 16 << 20;
/// Settings that name a file. Stored as absolute paths, independent of the daemon's working directory.
const PATH_KEYS: [&str; 4] = ["path", "reservations", "base", "overlay"];

/// The content of a state file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SavedLuns {
    /// LUNs that were added, in the order of their addition.
    pub added: Vec<AddedLun>,
    /// LUNs of the configuration that were removed.
    pub removed: Vec<RemovedLun>,
}

/// A LUN that was added at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AddedLun {
    /// Its controller's id.
    pub controller: String,
    /// Its id.
    pub id: String,
    /// Its target.
    pub target: u8,
    /// Its LUN of that target.
    pub lun: u16,
    /// The other settings that it was added with.
    pub settings: BTreeMap<String, String>,
    /// True if it was removed again, and other LUNs share its logical unit.
    #[serde(default)]
    pub gone: bool,
}

/// A LUN of the configuration that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RemovedLun {
    /// Its controller's id.
    pub controller: String,
    /// Its id.
    pub id: String,
}

/// The JSON document of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateDocument {
    format: String,
    version: u32,
    added: Vec<AddedLun>,
    removed: Vec<RemovedLun>,
}

impl AddedLun {
    /// Returns the record of a LUN that was added with `settings`.
    pub(super) fn new(controller: &str, id: &str, (target, lun): (u8, u16), settings: &Settings) -> AddedLun {
        let own = ["controller", "id", "target", "lun"];
        let others = settings.pairs().filter(|(key, _)| !own.contains(key)).map(|(key, value)| {
            let absolute = || std::path::absolute(value).ok()?.to_str().map(str::to_owned);
            let stored = PATH_KEYS.contains(&key).then(absolute).flatten();
            (key.to_owned(), stored.unwrap_or_else(|| value.to_owned()))
        });
        let settings = others.collect();
        AddedLun { controller: controller.to_owned(), id: id.to_owned(), target, lun, settings, gone: false }
    }

    /// Returns its settings, as in a `[[controller.lun]]` table of the configuration.
    ///
    /// # Errors
    /// If an edited file has `id`, `target` or `lun` among the other settings too.
    pub(super) fn to_settings(&self) -> Result<Settings, SettingError> {
        let mut settings = Settings::new(format!("lun {:?} of the state file", self.id));
        let own = [("id", self.id.clone()), ("target", self.target.to_string()), ("lun", self.lun.to_string())];
        for (key, value) in &own {
            settings.insert(key, value)?;
        }
        for (key, value) in &self.settings {
            settings.insert(key, value)?;
        }
        Ok(settings)
    }

    /// Returns the name of the logical unit that it shares, if any.
    pub(super) fn shared_unit(&self) -> Option<&str> {
        self.settings.get("unit").map(String::as_str)
    }
}

impl SavedLuns {
    /// Reads the file at `path`. Without a file the state is empty.
    ///
    /// # Errors
    /// If the file cannot be read, or was not written by a daemon.
    pub(super) fn read(path: &Path) -> Result<SavedLuns, SettingError> {
        let invalid = |why: &dyn std::fmt::Display| {
            let expected =
                "a state file that mqblk has written, or no file there, to begin with the configuration alone";
            Settings::new("serve").error("state", format!("{path:?}: {why}"), expected)
        };
        let text = match path.metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(SavedLuns::default()),
            Err(error) => return Err(invalid(&error)),
            Ok(file) if !file.is_file() => return Err(invalid(&"no regular file")),
            Ok(file) if file.len() > MAX_BYTES => return Err(invalid(&format!("{} bytes", file.len()))),
            Ok(_) => std::fs::read_to_string(path).map_err(|error| invalid(&error))?,
        };
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| invalid(&error))?;
        match (value["format"].as_str(), value["version"].as_u64()) {
            (Some(FORMAT), Some(version)) if version == u64::from(VERSION) => {}
            (Some(FORMAT), version) => {
                return Err(invalid(&format!("version {version:?} of the format, not {VERSION}")));
            }
            _ => return Err(invalid(&format!("no \"format\": \"{FORMAT}\""))),
        }
        let StateDocument { added, removed, .. } = serde_json::from_value(value).map_err(|error| invalid(&error))?;
        Ok(SavedLuns { added, removed })
    }

    /// Records that a LUN was added.
    pub(super) fn add(&mut self, lun: AddedLun) {
        self.added.retain(|other| other.id != lun.id);
        self.added.push(lun);
    }

    /// Records that a LUN added at run time was removed. Returns true if there was one.
    pub(super) fn remove_added(&mut self, id: &str) -> bool {
        let lun = self.added.iter_mut().find(|lun| lun.id == id && !lun.gone);
        let was_there = lun.map(|lun| lun.gone = true).is_some();
        let shared: Vec<String> =
            self.added.iter().filter(|lun| !lun.gone).filter_map(|lun| lun.shared_unit().map(str::to_owned)).collect();
        self.added.retain(|lun| !lun.gone || shared.contains(&lun.id));
        was_there
    }

    /// Records that a LUN of the configuration was removed.
    pub(super) fn remove_configured(&mut self, controller: &str, id: &str) {
        if !self.has_removed(controller, id) {
            self.removed.push(RemovedLun { controller: controller.to_owned(), id: id.to_owned() });
        }
    }

    /// Returns true if a LUN of the configuration was removed.
    pub(super) fn has_removed(&self, controller: &str, id: &str) -> bool {
        self.removed.iter().any(|lun| lun.controller == controller && lun.id == id)
    }
}

/// The state file, locked against other daemons.
#[derive(Debug)]
pub(super) struct StateFile {
    path: PathBuf,
    state: SavedLuns,
    /// True if the file has the content of `state`.
    is_written: bool,
    _lock: File,
}

impl StateFile {
    /// Locks the file at `path` and writes `state` to it.
    ///
    /// # Errors
    /// If another daemon has locked it, or it cannot be written.
    pub(super) fn open(path: &Path, state: SavedLuns) -> io::Result<StateFile> {
        let mut options = OpenOptions::new();
        // No symbolic link that somebody else has put there is followed.
        options.create(true).truncate(false).write(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let lock = options.open(with_suffix(path, ".lock"))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => {
                io::Error::new(io::ErrorKind::ResourceBusy, "another daemon uses it; give each a file of its own")
            }
            error => error.into(),
        })?;
        let mut file = StateFile { path: path.to_owned(), state, is_written: false, _lock: lock };
        file.write()?;
        Ok(file)
    }

    /// Changes the state and writes the file. [`is_written`](Self::is_written) says whether the write succeeded.
    pub(super) fn update<R>(&mut self, change: impl FnOnce(&mut SavedLuns) -> R) -> R {
        let changed = change(&mut self.state);
        if let Err(error) = self.write() {
            tracing::error!(path = %self.path.display(), "the state file cannot be written, so a restart loses changes of LUNs: {error}");
        }
        changed
    }

    /// Returns true if the file is up to date: the next daemon finds the current state.
    pub(super) fn is_written(&self) -> bool {
        self.is_written
    }

    fn write(&mut self) -> io::Result<()> {
        self.is_written = false;
        let SavedLuns { added, removed } = self.state.clone();
        let written = StateDocument { format: FORMAT.to_owned(), version: VERSION, added, removed };
        let mut text = serde_json::to_vec_pretty(&written)?;
        text.push(b'\n');
        let new = with_suffix(&self.path, ".new");
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&new, &self.path)?;
        let folder = match self.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        File::open(folder)?.sync_all()?;
        self.is_written = true;
        Ok(())
    }
}

/// Returns `path` with a suffix: an auxiliary file next to it.
fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(id: &str, words: &str) -> AddedLun {
        let settings = crate::key_values::parse("lun", &format!("controller=c,id={id},{words}")).unwrap();
        AddedLun::new("c", id, (3, 0), &settings)
    }

    #[test]
    fn a_written_state_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        assert_eq!(SavedLuns::read(&path).unwrap(), SavedLuns::default());
        let mut file = StateFile::open(&path, SavedLuns::default()).unwrap();
        let busy = StateFile::open(&path, SavedLuns::default()).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        file.update(|state| state.add(added("a", "path=/srv/a,,b.img,cache=writethrough")));
        file.update(|state| state.add(added("b", "unit=a,target=9")));
        file.update(|state| state.remove_configured("c", "c:0:0"));
        file.update(|state| state.remove_configured("c", "c:0:0"));
        assert!(file.is_written());
        let read = SavedLuns::read(&path).unwrap();
        assert_eq!(read, file.state);
        assert!(read.has_removed("c", "c:0:0") && !read.has_removed("d", "c:0:0"));
        let mut settings = read.added[0].to_settings().unwrap();
        assert_eq!(settings.text("path").as_deref(), Some("/srv/a,b.img"));
        assert_eq!((settings.text("target").as_deref(), settings.text("controller")), (Some("3"), None));
        // An incomplete new file, left by a killed daemon, is ignored.
        std::fs::write(with_suffix(&path, ".new"), "{\"form").unwrap();
        assert_eq!(SavedLuns::read(&path).unwrap(), read);
        drop(file);
        assert!(StateFile::open(&path, read).unwrap().is_written());
    }

    #[test]
    fn relative_paths_are_stored_absolute() {
        let record = added("a", "path=a.img");
        assert_eq!(record.settings["path"], std::path::absolute("a.img").unwrap().display().to_string());
    }

    #[test]
    fn a_removed_lun_is_kept_while_its_unit_is_shared() {
        let mut state = SavedLuns::default();
        state.add(added("a", "path=/a"));
        state.add(added("b", "unit=a"));
        assert!(state.remove_added("a") && !state.remove_added("a"));
        assert_eq!(
            state.added.iter().map(|lun| (lun.id.as_str(), lun.gone)).collect::<Vec<_>>(),
            [("a", true), ("b", false)]
        );
        assert!(state.remove_added("b") && state.added.is_empty());
    }

    #[test]
    fn foreign_and_damaged_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        for (text, want) in [
            ("", "EOF while parsing"),
            ("\0\0\0\0", "expected value at line 1 column 1"),
            ("workers = 2\n", "expected value at line 1 column 1"),
            ("{\"format\":\"mqblk-state\",\"version\":1,\"added\":[", "EOF while parsing"),
            ("[]", "no \"format\": \"mqblk-state\""),
            ("{\"format\":\"other\",\"version\":1}", "no \"format\": \"mqblk-state\""),
            ("{\"format\":\"mqblk-state\",\"version\":2}", "version Some(2) of the format, not 1"),
            ("{\"format\":\"mqblk-state\",\"version\":1}", "missing field `added`"),
            ("{\"format\":\"mqblk-state\",\"version\":1,\"added\":[{}],\"removed\":[]}", "missing field `controller`"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = SavedLuns::read(&path).unwrap_err();
            assert_eq!((error.subject.as_str(), error.key.as_str()), ("serve", "state"));
            assert!(error.found.contains(want), "{text:?}: {error}");
        }
        assert!(SavedLuns::read(folder.path()).unwrap_err().to_string().contains("no regular file"));
    }
}
