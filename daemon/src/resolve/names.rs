//! Values that must be unique: ids, sockets, files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use mqblk_core::settings::{SettingError, Settings};

const ID_BYTES: usize = 64;

/// A unique value: a key, and its value in canonical form.
pub type Claim = (&'static str, String);

/// Returns the claim of a file.
pub fn file_claim(key: &'static str, path: &Path) -> Claim {
    (key, canonical_path(path).to_string_lossy().into_owned())
}

/// The claims, each with its owner.
#[derive(Clone, Debug, Default)]
pub struct UniqueNames(HashMap<Claim, String>);

impl UniqueNames {
    /// Adds a claim of `owner` without a check.
    pub fn insert(&mut self, claim: &Claim, owner: &str) {
        self.0.insert(claim.clone(), owner.to_owned());
    }

    /// Removes a claim.
    pub fn release(&mut self, claim: &Claim) {
        self.0.remove(claim);
    }

    /// Returns the owner of a claim, if there is one.
    pub fn owner(&self, claim: &Claim) -> Option<&str> {
        self.0.get(claim).map(String::as_str)
    }

    /// Claims `value` of `key` for `owner`.
    ///
    /// # Errors
    /// If another owner has claimed it.
    pub fn claim(
        &mut self,
        settings: &Settings,
        key: &'static str,
        value: &str,
        owner: String,
    ) -> Result<Claim, SettingError> {
        self.claim_as(settings, (key, value.to_owned()), value, owner)
    }

    /// Claims a file for `owner`, in any spelling of its path.
    ///
    /// # Errors
    /// If another owner has claimed it.
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
        let (what, hint) = match key {
            "id" => ("a name", " for each disk, controller and LUN; give one with id="),
            "socket" => ("a path", ""),
            "reservations" => ("a file", ""),
            _ => ("one", ""),
        };
        if let Some(other) = self.0.get(&claim) {
            let found = format!("{shown:?}, the {key} of {other}");
            return Err(settings.error(key, found, format!("{what} of its own{hint}")));
        }
        self.insert(&claim, &owner);
        Ok(claim)
    }
}

/// Checks an id. `also`: characters that are valid besides letters, digits, dots, dashes and underscores.
pub fn check_id(settings: &Settings, id: &str, source: &str, also: &str) -> Result<(), SettingError> {
    let valid = (1..=ID_BYTES).contains(&id.len())
        && id.starts_with(|char: char| char.is_ascii_alphanumeric())
        && id.chars().all(|char| char.is_ascii_alphanumeric() || "._-".contains(char) || also.contains(char));
    if valid {
        return Ok(());
    }
    let colons = if also.is_empty() { "" } else { "colons, " };
    let expected =
        format!("1 to {ID_BYTES} letters, digits, {colons}dots, dashes and underscores, with a letter or digit first");
    Err(settings.error("id", format!("{id:?}{source}"), expected))
}

/// Takes the id. Defaults to the file name of the path in `key`, or to `fallback`.
pub fn take_id(settings: &mut Settings, key: &str, fallback: &str) -> Result<String, SettingError> {
    let from_path = settings.peek(key).map(|path| {
        Path::new(path).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_else(|| path.to_owned())
    });
    let (id, source) = match (settings.text("id"), from_path) {
        (Some(id), _) => (id, String::new()),
        (None, Some(name)) => (name, format!(" (from the {key}; give one with id=)")),
        (None, None) => (fallback.to_owned(), String::new()),
    };
    check_id(settings, &id, &source, "")?;
    Ok(id)
}

/// Sets the subject of errors to `name`, prefixed by the configuration file if they come from one.
pub fn rename_subject(settings: &mut Settings, name: String) {
    let file = settings.subject().rsplit_once(": ").map(|(file, _)| format!("{file}: ")).unwrap_or_default();
    settings.set_subject(file + &name);
}

/// Returns the canonical path of a file that may not exist yet.
pub fn canonical_path(path: &Path) -> PathBuf {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    match (folder.canonicalize(), path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}
