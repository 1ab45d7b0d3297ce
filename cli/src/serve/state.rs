//! The state file: LUNs that came and went while the daemon ran, for the daemon after this one.
//!
//! It is replaced as a whole at each change: written beside it, made durable, renamed, and the folder made durable too. So whenever the
//! daemon is killed, the file is the one of before or the one of after.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use mqblk_core::settings::{SettingError, Settings};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

/// What a state file begins with.
const FORMAT: &str = "mqblk-state";
const VERSION: u32 = 1;
/// A state with thousands of LUNs is a tenth of it.
const MAX_BYTES: u64 = 16 << 20;
/// Settings that name a file: kept so that the folder that a daemon is started in does not matter.
const PATHS: [&str; 2] = ["path", "reservations"];

/// What is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// LUNs that were added, in that order.
    pub added: Vec<Added>,
    /// LUNs of the configuration that were removed.
    pub removed: Vec<Removed>,
}

/// A LUN that was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Added {
    /// Its controller's id.
    pub controller: String,
    /// Its id.
    pub id: String,
    /// Its place.
    pub target: u8,
    /// The same.
    pub lun: u16,
    /// What it was added with, besides those.
    pub settings: BTreeMap<String, String>,
    /// It was removed again, but others share its unit.
    #[serde(default)]
    pub gone: bool,
}

/// A LUN of the configuration that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Removed {
    /// Its controller's id.
    pub controller: String,
    /// Its id.
    pub id: String,
}

/// The file's shape.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    format: String,
    version: u32,
    added: Vec<Added>,
    removed: Vec<Removed>,
}

impl Added {
    /// A LUN that was added with `given`.
    pub fn new(controller: &str, id: &str, (target, lun): (u8, u16), given: &Settings) -> Added {
        let own = ["controller", "id", "target", "lun"];
        let settings = given.pairs().filter(|(key, _)| !own.contains(key)).map(|(key, value)| {
            let absolute = || std::path::absolute(value).ok()?.to_str().map(str::to_owned);
            let kept = PATHS.contains(&key).then(absolute).flatten();
            (key.to_owned(), kept.unwrap_or_else(|| value.to_owned()))
        });
        let settings = settings.collect();
        Added { controller: controller.to_owned(), id: id.to_owned(), target, lun, settings, gone: false }
    }

    /// As they would be in the configuration, under its controller.
    ///
    /// # Errors
    /// When somebody wrote a key twice that has its own place.
    pub fn given(&self) -> Result<Settings, SettingError> {
        let mut given = Settings::new(format!("lun {:?} of the state file", self.id));
        let own = [("id", self.id.clone()), ("target", self.target.to_string()), ("lun", self.lun.to_string())];
        for (key, value) in &own {
            given.insert(key, value)?;
        }
        for (key, value) in &self.settings {
            given.insert(key, value)?;
        }
        Ok(given)
    }

    /// The unit that it shares.
    pub fn shared(&self) -> Option<&str> {
        self.settings.get("unit").map(String::as_str)
    }
}

impl State {
    /// Reads what lies at `path`; no file is no state.
    ///
    /// # Errors
    /// When it cannot be read, or is not what a daemon has written.
    pub fn read(path: &Path) -> Result<State, SettingError> {
        let wrong = |why: &dyn std::fmt::Display| {
            let expected =
                "a state file that mqblk has written, or no file there, to begin with the configuration alone";
            Settings::new("serve").error("state", format!("{path:?}: {why}"), expected)
        };
        let text = match path.metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(State::default()),
            Err(error) => return Err(wrong(&error)),
            Ok(file) if !file.is_file() => return Err(wrong(&"no regular file")),
            Ok(file) if file.len() > MAX_BYTES => return Err(wrong(&format!("{} bytes", file.len()))),
            Ok(_) => std::fs::read_to_string(path).map_err(|error| wrong(&error))?,
        };
        let value: serde_json::Value = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
        match (value["format"].as_str(), value["version"].as_u64()) {
            (Some(FORMAT), Some(version)) if version == u64::from(VERSION) => {}
            (Some(FORMAT), version) => return Err(wrong(&format!("version {version:?} of the format, not {VERSION}"))),
            _ => return Err(wrong(&format!("no \"format\": \"{FORMAT}\""))),
        }
        let Written { added, removed, .. } = serde_json::from_value(value).map_err(|error| wrong(&error))?;
        Ok(State { added, removed })
    }

    /// A LUN is there.
    pub fn add(&mut self, lun: Added) {
        self.added.retain(|other| other.id != lun.id);
        self.added.push(lun);
    }

    /// A LUN that was added is gone. Whether there was one.
    pub fn remove_added(&mut self, id: &str) -> bool {
        let found = self.added.iter_mut().find(|lun| lun.id == id && !lun.gone);
        let was_there = found.map(|lun| lun.gone = true).is_some();
        let shared: Vec<String> =
            self.added.iter().filter(|lun| !lun.gone).filter_map(|lun| lun.shared().map(str::to_owned)).collect();
        self.added.retain(|lun| !lun.gone || shared.contains(&lun.id));
        was_there
    }

    /// A LUN of the configuration is gone.
    pub fn remove_configured(&mut self, controller: &str, id: &str) {
        if !self.has_removed(controller, id) {
            self.removed.push(Removed { controller: controller.to_owned(), id: id.to_owned() });
        }
    }

    /// Whether a LUN of the configuration was removed.
    pub fn has_removed(&self, controller: &str, id: &str) -> bool {
        self.removed.iter().any(|lun| lun.controller == controller && lun.id == id)
    }
}

/// The file, which no other daemon uses meanwhile.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    state: State,
    /// What lies in the file is what is in `state`.
    is_written: bool,
    _lock: File,
}

impl StateFile {
    /// Takes the file at `path` over, which holds `state` from now on.
    ///
    /// # Errors
    /// When another daemon has it, or it cannot be written.
    pub fn take(path: &Path, state: State) -> io::Result<StateFile> {
        let lock =
            OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(beside(path, ".lock"))?;
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

    /// Changes what is kept. Whether it is kept durably is [`is_written`](Self::is_written).
    pub fn change<R>(&mut self, change: impl FnOnce(&mut State) -> R) -> R {
        let changed = change(&mut self.state);
        if let Err(error) = self.write() {
            tracing::error!(path = %self.path.display(), "the state file cannot be written, so a restart loses changes of LUNs: {error}");
        }
        changed
    }

    /// Whether a daemon after this one will find what is kept.
    pub fn is_written(&self) -> bool {
        self.is_written
    }

    fn write(&mut self) -> io::Result<()> {
        self.is_written = false;
        let State { added, removed } = self.state.clone();
        let written = Written { format: FORMAT.to_owned(), version: VERSION, added, removed };
        let mut text = serde_json::to_vec_pretty(&written)?;
        text.push(b'\n');
        let new = beside(&self.path, ".new");
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
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

/// A file of ours next to `path`.
fn beside(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(id: &str, words: &str) -> Added {
        let given = crate::serve::key_values::parse("lun", &format!("controller=c,id={id},{words}")).unwrap();
        Added::new("c", id, (3, 0), &given)
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        assert_eq!(State::read(&path).unwrap(), State::default());
        let mut file = StateFile::take(&path, State::default()).unwrap();
        let busy = StateFile::take(&path, State::default()).unwrap_err();
        assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy);
        file.change(|state| state.add(added("a", "path=/srv/a,,b.img,cache=writethrough")));
        file.change(|state| state.add(added("b", "unit=a,target=9")));
        file.change(|state| state.remove_configured("c", "c:0:0"));
        file.change(|state| state.remove_configured("c", "c:0:0"));
        assert!(file.is_written());
        let read = State::read(&path).unwrap();
        assert_eq!(read, file.state);
        assert!(read.has_removed("c", "c:0:0") && !read.has_removed("d", "c:0:0"));
        let mut given = read.added[0].given().unwrap();
        assert_eq!(given.text("path").as_deref(), Some("/srv/a,b.img"));
        assert_eq!((given.text("target").as_deref(), given.text("controller")), (Some("3"), None));
        // What a daemon that was killed had begun does not matter.
        std::fs::write(beside(&path, ".new"), "{\"form").unwrap();
        assert_eq!(State::read(&path).unwrap(), read);
        drop(file);
        assert!(StateFile::take(&path, read).unwrap().is_written());
    }

    #[test]
    fn a_relative_path_is_kept_whole() {
        let kept = added("a", "path=a.img");
        assert_eq!(kept.settings["path"], std::path::absolute("a.img").unwrap().display().to_string());
    }

    #[test]
    fn a_unit_stays_while_it_is_shared() {
        let mut state = State::default();
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
    fn a_file_of_somebody_else_is_refused() {
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
            let error = State::read(&path).unwrap_err();
            assert_eq!((error.subject.as_str(), error.key.as_str()), ("serve", "state"));
            assert!(error.found.contains(want), "{text:?}: {error}");
        }
        assert!(State::read(folder.path()).unwrap_err().to_string().contains("no regular file"));
    }
}
