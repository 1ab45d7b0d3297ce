//! The state file: changes at run time, for the next daemon. Each guest interface has a section of its own.
//!
//! Each change replaces the whole file atomically: a new file is written, fsynced and renamed, and the directory is
//! fsynced. After a kill the file has the content from before or after the change.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex, assert_may_wait};
use mqblk_core::settings::{SettingError, Settings};
use rustix::fs::{FlockOperation, OFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The value of the `format` member.
const FORMAT: &str = "mqblk-state";
const VERSION: u64 = 2;
/// The version whose whole document is the present section of virtio-scsi.
const LUNS_VERSION: u64 = 1;
const LUNS_SECTION: &str = "virtio-scsi";
/// Maximum size of a state file. Thousands of disks need a tenth of it.
const MAX_BYTES: u64 = 16 << 20;
/// Settings that name a file. Stored as absolute paths, independent of the daemon's working directory.
const PATH_KEYS: [&str; 6] = ["path", "socket", "reservations", "base", "overlay", "incoming-luns"];

/// The content of a state file: a section for each interface, by its word.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedState {
    path: PathBuf,
    /// The owner and the mode of the file that it was read from.
    writers: Option<(u32, u32)>,
    sections: BTreeMap<String, Value>,
}

/// The JSON document of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateDocument {
    format: String,
    version: u64,
    interfaces: BTreeMap<String, Value>,
}

fn invalid(path: &Path, why: &dyn std::fmt::Display) -> SettingError {
    let expected = "a state file that mqblk has written, or no file there, to begin with the configuration alone";
    Settings::new("serve").error("state", format!("{path:?}: {why}"), expected)
}

impl SavedState {
    /// Reads the file at `path`. Without a file the state is empty.
    ///
    /// # Errors
    /// If the file cannot be read, or was not written by a daemon.
    pub fn read(path: &Path) -> Result<SavedState, SettingError> {
        let invalid = |why: &dyn std::fmt::Display| invalid(path, why);
        let file = match crate::file_use::open_for_reading(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(SavedState { path: path.to_owned(), ..SavedState::default() });
            }
            opened => opened.map_err(|error| invalid(&error))?,
        };
        let found = file.metadata().map_err(|error| invalid(&error))?;
        let text = match found {
            _ if !found.is_file() => return Err(invalid(&"no regular file")),
            _ if found.len() > MAX_BYTES => return Err(invalid(&format!("{} bytes", found.len()))),
            _ => io::read_to_string(file.take(MAX_BYTES)).map_err(|error| invalid(&error))?,
        };
        let writers = Some((found.uid(), found.mode()));
        let saved = |sections| SavedState { path: path.to_owned(), writers, sections };
        let mut value: Value = serde_json::from_str(&text).map_err(|error| invalid(&error))?;
        match (value["format"].as_str(), value["version"].as_u64()) {
            (Some(FORMAT), Some(VERSION)) => {
                let document: StateDocument = serde_json::from_value(value).map_err(|error| invalid(&error))?;
                Ok(saved(document.interfaces))
            }
            (Some(FORMAT), Some(LUNS_VERSION)) => {
                if let Some(members) = value.as_object_mut() {
                    members.retain(|member, _| member != "format" && member != "version");
                }
                Ok(saved(BTreeMap::from([(LUNS_SECTION.to_owned(), value)])))
            }
            (Some(FORMAT), version) => {
                Err(invalid(&format!("version {version:?} of the format, not {LUNS_VERSION} or {VERSION}")))
            }
            _ => Err(invalid(&format!("no \"format\": \"{FORMAT}\""))),
        }
    }

    /// Checks that nobody could write the file except root and this process' user. `user` is its later user.
    ///
    /// # Errors
    /// Names those who could: they would control the content.
    pub fn check_writers(&self, user: Option<u32>) -> Result<(), SettingError> {
        const OTHERS_WRITE: u32 = 0o022;
        let Some((owner, mode)) = self.writers else { return Ok(()) };
        let own = [Some(0), Some(rustix::process::geteuid().as_raw()), user];
        let expected = "one that only root or the daemon's user can write (chown, chmod go-w), or no file there";
        let error =
            |found: String| Settings::new("serve").error("state", format!("{:?}: {found}", self.path), expected);
        match own.contains(&Some(owner)) {
            false => Err(error(format!("a file of user {owner}"))),
            true if mode & OTHERS_WRITE != 0 => {
                Err(error(format!("a file that others can write (mode {:o})", mode & 0o7777)))
            }
            true => Ok(()),
        }
    }

    /// Returns the path of its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the section of an interface.
    ///
    /// # Errors
    /// If the section has another form.
    pub fn section<T: DeserializeOwned + Default>(&self, interface: &str) -> Result<T, SettingError> {
        match self.sections.get(interface) {
            Some(section) => T::deserialize(section).map_err(|error| invalid(&self.path, &error)),
            None => Ok(T::default()),
        }
    }
}

/// The state file, locked against other daemons.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    inner: RankedMutex<OpenState>,
    /// True if the file has the content of the state.
    is_written: AtomicBool,
    lock: File,
}

#[derive(Debug)]
struct OpenState {
    saved: SavedState,
    /// True while another process has the file, which it will hand over.
    is_held: bool,
}

impl StateFile {
    /// Locks the file of a state and writes the state to it.
    ///
    /// # Errors
    /// If another daemon has locked it, or it cannot be written.
    pub fn open(saved: SavedState) -> io::Result<StateFile> {
        let mut options = OpenOptions::new();
        // Follows no symbolic link that somebody else has put there.
        options.create(true).truncate(false).write(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let lock = options.open(with_suffix(&saved.path, ".lock"))?;
        try_lock(&lock)?;
        let file = StateFile::new(saved, lock, false);
        file.write(&file.state())?;
        Ok(file)
    }

    /// Takes over the lock of a process that has the file and hands over later. Writes nothing before
    /// [`begin`](Self::begin).
    ///
    /// # Errors
    /// If it is a lock of another file, or not held.
    pub fn open_handed(saved: SavedState, lock: File) -> io::Result<StateFile> {
        let expected = std::fs::symlink_metadata(with_suffix(&saved.path, ".lock"))?;
        let found = lock.metadata()?;
        if (found.dev(), found.ino()) != (expected.dev(), expected.ino()) {
            return Err(io::Error::other(
                "found another file as its lock, from the daemon before, expected that beside it",
            ));
        }
        // No effect if it is held already: the lock belongs to the open file.
        try_lock(&lock)?;
        Ok(StateFile::new(saved, lock, true))
    }

    fn new(saved: SavedState, lock: File, is_held: bool) -> StateFile {
        let path = saved.path.clone();
        let inner = RankedMutex::new(LockRank::StateFile, OpenState { saved, is_held });
        StateFile { path, inner, is_written: AtomicBool::new(is_held), lock }
    }

    /// Writes the state: the other process no longer does.
    pub fn begin(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.is_held)
            && let Err(error) = self.write(&state)
        {
            log_failure(&self.path, &error);
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the locked file.
    pub fn lock(&self) -> &File {
        &self.lock
    }

    fn state(&self) -> RankedGuard<'_, OpenState> {
        self.inner.lock()
    }

    /// Replaces the section of an interface, and writes the file. [`is_written`](Self::is_written) returns the success.
    pub fn set(&self, interface: &str, section: &impl Serialize) {
        let mut state = self.state();
        let written = serde_json::to_value(section).map_err(io::Error::from).and_then(|section| {
            state.saved.sections.insert(interface.to_owned(), section);
            self.write(&state)
        });
        if let Err(error) = written {
            log_failure(&self.path, &error);
        }
    }

    /// Returns true if the file is up to date: the next daemon finds the current state.
    pub fn is_written(&self) -> bool {
        // Without the lock: a file system that hangs must not hold up readers.
        self.is_written.load(Ordering::SeqCst)
    }

    fn write(&self, state: &OpenState) -> io::Result<()> {
        if state.is_held {
            return Ok(());
        }
        self.is_written.store(false, Ordering::SeqCst);
        assert_may_wait("the state file");
        state.write()?;
        self.is_written.store(true, Ordering::SeqCst);
        Ok(())
    }
}

fn try_lock(lock: &File) -> io::Result<()> {
    rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive).map_err(|error| match error {
        rustix::io::Errno::WOULDBLOCK => {
            io::Error::new(io::ErrorKind::ResourceBusy, "another daemon uses it; give each a file of its own")
        }
        error => error.into(),
    })
}

fn log_failure(path: &Path, error: &io::Error) {
    let path = path.display();
    tracing::error!(%path, "the state file cannot be written, so a restart loses changes at run time: {error}");
}

impl OpenState {
    fn write(&self) -> io::Result<()> {
        let SavedState { path, sections, .. } = &self.saved;
        let document = StateDocument { format: FORMAT.to_owned(), version: VERSION, interfaces: sections.clone() };
        let mut text = serde_json::to_vec_pretty(&document)?;
        text.push(b'\n');
        let new = with_suffix(path, ".new");
        match std::fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        File::open(folder)?.sync_all()
    }
}

/// Returns `path` with a suffix: an auxiliary file next to it.
fn with_suffix(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Returns settings for a state file, except those of `own`. Paths of files become absolute.
pub fn saved_settings(settings: &Settings, own: &[&str]) -> BTreeMap<String, String> {
    let others = settings.pairs().filter(|(key, _)| !own.contains(key));
    others.map(|(key, value)| (key.to_owned(), absolute_setting(key, value))).collect()
}

/// Returns the value of a setting. The path of a file becomes absolute, independent of the working directory; addresses
/// of servers stay as they are.
pub fn absolute_setting(key: &str, value: &str) -> String {
    let is_path = PATH_KEYS.contains(&key) && mqblk_storage::backend_of_path(value) == Ok(None);
    let absolute = || std::path::absolute(value).ok()?.to_str().map(str::to_owned);
    is_path.then(absolute).flatten().unwrap_or_else(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_written_state_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let empty = SavedState::read(&path).unwrap();
        assert!(empty.section::<Vec<u32>>("a").unwrap().is_empty());
        let file = StateFile::open(empty.clone()).unwrap();
        let busy = StateFile::open(empty).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        file.set("a", &[1, 2]);
        file.set("b", &"text");
        file.set("a", &[3]);
        assert!(file.is_written());
        let read = SavedState::read(&path).unwrap();
        assert_eq!(read.section::<Vec<u32>>("a").unwrap(), [3]);
        assert_eq!(read.section::<String>("b").unwrap(), "text");
        assert!(read.section::<Vec<u32>>("b").unwrap_err().to_string().contains("invalid type: string"));
        // An incomplete new file, left by a killed daemon, is ignored.
        std::fs::write(with_suffix(&path, ".new"), "{\"form").unwrap();
        assert_eq!(SavedState::read(&path).unwrap(), read);
        drop(file);
        assert!(StateFile::open(read).unwrap().is_written());
    }

    #[test]
    fn a_file_that_others_can_write_is_not_believed() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        SavedState::read(&path).unwrap().check_writers(None).unwrap();
        drop(StateFile::open(SavedState::read(&path).unwrap()).unwrap());
        let check = |user| SavedState::read(&path).unwrap().check_writers(user).map_err(|error| error.to_string());
        assert_eq!(check(None), Ok(()));
        for mode in [0o620, 0o602, 0o666] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let why = check(None).unwrap_err();
            assert!(
                why.contains(&format!("a file that others can write (mode {mode:o}), expected one that only root")),
                "{why}"
            );
        }
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert_eq!(check(None), Ok(()));
        if rustix::process::geteuid().is_root() {
            chown(&path, Some(54321), None).unwrap();
            assert_eq!(check(Some(54321)), Ok(()));
            for user in [None, Some(1)] {
                let why = check(user).unwrap_err();
                assert!(why.contains("a file of user 54321, expected one that"), "{why}");
            }
        }
    }

    #[test]
    fn the_lock_that_another_daemon_hands_over_is_that_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let file = StateFile::open(SavedState::read(&path).unwrap()).unwrap();
        let saved = || SavedState::read(&path).unwrap();
        let null = File::options().write(true).open("/dev/null").unwrap();
        let why = StateFile::open_handed(saved(), null).unwrap_err().to_string();
        assert!(why.starts_with("found another file as its lock"), "{why}");
        // The right file, opened again: its lock is not the other daemon's.
        let opened_again = File::options().write(true).open(with_suffix(&path, ".lock")).unwrap();
        assert_eq!(StateFile::open_handed(saved(), opened_again).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        StateFile::open_handed(saved(), file.lock().try_clone().unwrap()).unwrap();
    }

    #[test]
    fn a_file_of_version_1_has_luns() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        std::fs::write(&path, r#"{"format":"mqblk-state","version":1,"added":[1],"removed":[]}"#).unwrap();
        let luns: Value = SavedState::read(&path).unwrap().section(LUNS_SECTION).unwrap();
        assert_eq!(luns, json!({ "added": [1], "removed": [] }));
    }

    #[test]
    fn relative_paths_are_stored_absolute() {
        let settings = crate::key_values::parse("disk", "path=a.img,socket=/run/a,id=a.img,size=1M").unwrap();
        let saved = saved_settings(&settings, &["id"]);
        let absolute = std::path::absolute("a.img").unwrap().display().to_string();
        assert_eq!(
            saved.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect::<Vec<_>>(),
            [("path", absolute.as_str()), ("size", "1M"), ("socket", "/run/a")]
        );
        for address in ["nbd://host/export", "nbd+unix:///export?socket=/run/nbd", "rbd:pool/image@snap:conf=/etc/x"] {
            assert_eq!(absolute_setting("path", address), address);
        }
        let odd = std::path::absolute("nbd:x").unwrap().display().to_string();
        assert_eq!(absolute_setting("path", "./nbd:x"), odd);
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
            ("{\"format\":\"mqblk-state\",\"version\":3}", "version Some(3) of the format, not 1 or 2"),
            ("{\"format\":\"mqblk-state\",\"version\":2}", "missing field `interfaces`"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = SavedState::read(&path).unwrap_err();
            assert_eq!((error.subject.as_str(), error.key.as_str()), ("serve", "state"));
            assert!(error.found.contains(want), "{text:?}: {error}");
        }
        assert!(SavedState::read(folder.path()).unwrap_err().to_string().contains("no regular file"));
    }
}
