//! What may be there only once: ids, sockets, the places of a controller's LUNs.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use mqblk_core::settings::{SettingError, Settings};

use crate::serve::config::LunPlace;

const ID_BYTES: usize = 64;

/// What somebody has alone: the value of a key, in one form of all the ways to write it.
pub type Claim = (&'static str, String);

/// The claim of a file.
pub fn file_claim(key: &'static str, path: &Path) -> Claim {
    (key, same_place(path).to_string_lossy().into_owned())
}

/// What was claimed so far, and by whom.
#[derive(Clone, Debug, Default)]
pub struct Names(HashMap<Claim, String>);

impl Names {
    /// Notes what `owner` has already.
    pub fn hold(&mut self, claim: &Claim, owner: &str) {
        self.0.insert(claim.clone(), owner.to_owned());
    }

    /// Nobody has it any more.
    pub fn release(&mut self, claim: &Claim) {
        self.0.remove(claim);
    }

    /// Claims `value` of `key` for `owner`.
    ///
    /// # Errors
    /// When somebody has it.
    pub fn claim(
        &mut self,
        settings: &Settings,
        key: &'static str,
        value: &str,
        owner: String,
    ) -> Result<Claim, SettingError> {
        self.claim_as(settings, (key, value.to_owned()), value, owner)
    }

    /// Claims a file for `owner`, however its path is written.
    ///
    /// # Errors
    /// When somebody has it.
    pub fn claim_file(
        &mut self,
        settings: &Settings,
        key: &'static str,
        path: &Path,
        owner: String,
    ) -> Result<Claim, SettingError> {
        self.claim_as(settings, file_claim(key, path), &path.display().to_string(), owner)
    }

    fn claim_as(
        &mut self,
        settings: &Settings,
        claim: Claim,
        shown: &str,
        owner: String,
    ) -> Result<Claim, SettingError> {
        let key = claim.0;
        let (what, way_out) = match key {
            "id" => ("a name", " for each disk, controller and LUN; give one with id="),
            "socket" => ("a path", ""),
            "reservations" => ("a file", ""),
            _ => ("one", ""),
        };
        if let Some(first) = self.0.get(&claim) {
            let found = format!("{shown:?}, the {key} of {first}");
            return Err(settings.error(key, found, format!("{what} of its own{way_out}")));
        }
        self.hold(&claim, &owner);
        Ok(claim)
    }
}

/// The places of a controller's LUNs, with their ids.
pub type Places = BTreeMap<LunPlace, String>;

/// The lowest target that has no LUN.
pub fn free_target(places: &Places) -> Option<u8> {
    (0..=u8::MAX).find(|target| !places.keys().any(|place| place.target == *target))
}

/// Judges an id; `also` are the characters that it may have besides letters, digits, dots, dashes and underscores.
pub fn judge_id(settings: &Settings, id: &str, whence: &str, also: &str) -> Result<(), SettingError> {
    let good = (1..=ID_BYTES).contains(&id.len())
        && id.starts_with(|char: char| char.is_ascii_alphanumeric())
        && id.chars().all(|char| char.is_ascii_alphanumeric() || "._-".contains(char) || also.contains(char));
    if good {
        return Ok(());
    }
    let colons = if also.is_empty() { "" } else { "colons, " };
    let expected =
        format!("1 to {ID_BYTES} letters, digits, {colons}dots, dashes and underscores, with a letter or digit first");
    Err(settings.error("id", format!("{id:?}{whence}"), expected))
}

/// The id given, or the name of the file at the path of `key`, or `fallback`.
pub fn take_id(settings: &mut Settings, key: &str, fallback: &str) -> Result<String, SettingError> {
    let from_path = settings.peek(key).map(|path| {
        Path::new(path).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_else(|| path.to_owned())
    });
    let (id, whence) = match (settings.text("id"), from_path) {
        (Some(id), _) => (id, String::new()),
        (None, Some(name)) => (name, format!(" (from the {key}; give one with id=)")),
        (None, None) => (fallback.to_owned(), String::new()),
    };
    judge_id(settings, &id, &whence, "")?;
    Ok(id)
}

/// Has errors call the settings `name`, as the user does; the file they came from stays in front.
pub fn call(settings: &mut Settings, name: String) {
    let file = settings.subject().rsplit_once(": ").map(|(file, _)| format!("{file}: ")).unwrap_or_default();
    settings.set_subject(file + &name);
}

/// One name for all the paths of a file that may not exist yet.
pub fn same_place(path: &Path) -> PathBuf {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}
