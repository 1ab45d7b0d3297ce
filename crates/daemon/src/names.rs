//! Values that must be unique: ids, sockets, files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use mqblk_core::settings::{Key, SettingError, Settings};

/// The name of a disk, controller or LUN.
pub static ID: Key = Key::text("id", "NAME", "up to 64 letters, digits, `.`, `_`, `-`")
    .otherwise("from the file's or socket's name, else the kind of storage")
    .about("unique name in logs and metrics", "Of a LUN: CONTROLLER:TARGET:LUN by default.");

const ID_BYTES: usize = 64;

/// A unique value: a key, and its value in canonical form.
pub type Claim = (&'static str, String);

/// Returns the claim of a file.
pub fn file_claim(key: &'static str, path: &Path) -> Claim {
    (key, canonical_path(path).to_string_lossy().into_owned())
}

/// The claims, each with its owner.
#[derive(Clone, Debug, Default)]
pub struct UniqueNames {
    owners: HashMap<Claim, String>,
    /// The claims of the running [attempt](Self::attempt).
    attempted: Option<Vec<Claim>>,
}

impl UniqueNames {
    /// Adds a claim of `owner` without a check.
    pub fn insert(&mut self, claim: &Claim, owner: &str) {
        self.owners.insert(claim.clone(), owner.to_owned());
    }

    /// Removes a claim.
    pub fn release(&mut self, claim: &Claim) {
        self.owners.remove(claim);
    }

    /// Returns the owner of a claim, if there is one.
    pub fn owner(&self, claim: &Claim) -> Option<&str> {
        self.owners.get(claim).map(String::as_str)
    }

    /// Does `work`, and releases its claims if it fails. The cost does not depend on the number of other claims.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn attempt<T, E>(&mut self, work: impl FnOnce(&mut UniqueNames) -> Result<T, E>) -> Result<T, E> {
        let outer = self.attempted.replace(Vec::new());
        let result = work(self);
        let claimed = std::mem::replace(&mut self.attempted, outer).unwrap_or_default();
        match result.is_ok() {
            true => self.attempted.iter_mut().for_each(|outer| outer.extend_from_slice(&claimed)),
            false => claimed.iter().for_each(|claim| self.release(claim)),
        }
        result
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
        if let Some(other) = self.owners.get(&claim) {
            return Err(claimed_error(settings, claim.0, shown, other));
        }
        self.insert(&claim, &owner);
        self.attempted.iter_mut().for_each(|attempted| attempted.push(claim.clone()));
        Ok(claim)
    }
}

/// Returns the error that `owner` has this value of `key` already.
pub fn claimed_error(settings: &Settings, key: &'static str, shown: &str, owner: &str) -> SettingError {
    let (what, hint) = match key {
        "id" => ("a name", " for each disk, controller and LUN; give one with id="),
        "socket" => ("a path", ""),
        "reservations" => ("a file", ""),
        _ => ("one", ""),
    };
    settings.error(key, format!("{shown:?}, the {key} of {owner}"), format!("{what} of its own{hint}"))
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
    Err(settings.error(&ID, format!("{id:?}{source}"), expected))
}

/// Takes the id. Defaults to the file name of the path in `key`, or to `fallback`.
pub fn take_id(settings: &mut Settings, key: &str, fallback: &str) -> Result<String, SettingError> {
    let from_path = settings.peek(key).map(|path| {
        Path::new(path).file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_else(|| path.to_owned())
    });
    let (id, source) = match (settings.text(&ID), from_path) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_attempt_leaves_the_claims_as_they_were() {
        let (mut names, settings) = (UniqueNames::default(), Settings::new("disk"));
        let id = |id: &str| ("id", id.to_owned());
        names.insert(&id("a"), "disk \"a\"");
        let claim = |names: &mut UniqueNames, id: &str| names.claim(&settings, "id", id, format!("disk {id:?}"));
        let failed: Result<(), SettingError> = names.attempt(|names| {
            claim(names, "b")?;
            names.attempt(|inner| claim(inner, "c"))?;
            claim(names, "a").map(drop)
        });
        let text = failed.unwrap_err().to_string();
        assert!(text.contains("found \"a\", the id of disk \"a\", expected a name of its own"), "{text}");
        let owners = ["a", "b", "c"].map(|name| names.owner(&id(name)).is_some());
        assert_eq!(owners, [true, false, false]);
        names.attempt(|names| claim(names, "b")).unwrap();
        claim(&mut names, "d").unwrap();
        let failed: Result<(), ()> = names.attempt(|_| Err(()));
        assert!(failed.is_err() && names.owner(&id("b")).is_some() && names.owner(&id("d")).is_some());
    }
}
