//! A configuration that is read again while the daemon serves: what has changed is applied if it can be, and nothing else is touched.
//!
//! [`plan`] compares two configurations as they were given and is pure. Disks are compared by id. A disk with other settings, controllers and
//! their LUNs, and what belongs to the process stay as they are, and are reported.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use mqblk_core::settings::{SettingError, Settings};

use crate::file::RawConfig;
use crate::interface::Interfaces;
use crate::resolve::{take_id, take_storage_kind};
use crate::state_file::absolute_setting;

/// Where the configuration comes from.
pub trait ConfigSource: Send + Sync {
    /// Returns the file of the start, if there was one.
    fn file(&self) -> Option<PathBuf>;

    /// Reads the configuration again, from `file` instead of the one of the start if it is given.
    ///
    /// # Errors
    /// If the file cannot be read.
    fn read(&self, file: Option<&Path>) -> Result<RawConfig, SettingError>;
}

/// A difference between two configurations.
#[derive(Clone, Debug)]
pub enum ConfigChange {
    /// A disk that only the new one has.
    AddDisk {
        /// Its id.
        id: String,
        /// Its keys.
        settings: Settings,
    },
    /// A disk that only the old one has.
    RemoveDisk {
        /// Its id.
        id: String,
    },
    /// What cannot be changed while the daemon serves.
    Unchangeable {
        /// What it belongs to.
        subject: String,
        /// What is different, and what to do.
        why: String,
    },
}

impl fmt::Display for ConfigChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigChange::AddDisk { id, .. } => write!(f, "disk {id:?}: add"),
            ConfigChange::RemoveDisk { id } => write!(f, "disk {id:?}: remove"),
            ConfigChange::Unchangeable { subject, why } => write!(f, "{subject}: {why}"),
        }
    }
}

impl ConfigChange {
    /// Returns true if it can be applied while the daemon serves.
    pub fn can_apply(&self) -> bool {
        !matches!(self, ConfigChange::Unchangeable { .. })
    }
}

/// Keys with their values, paths in absolute form.
type Keys = BTreeMap<String, String>;

fn keys_of(settings: &Settings) -> Keys {
    settings.pairs().map(|(key, value)| (key.to_owned(), absolute_setting(key, value))).collect()
}

/// Returns what is different in `new`, removals first. `kinds` are the names of the storage backends.
///
/// # Errors
/// If a disk of one of them has no valid id, or two have the same.
pub fn plan(
    old: &RawConfig,
    new: &RawConfig,
    interfaces: Interfaces,
    kinds: &[&'static str],
) -> Result<Vec<ConfigChange>, SettingError> {
    let (before, after) = (disks_by_id(old, kinds)?, disks_by_id(new, kinds)?);
    let mut changes = Vec::new();
    let removed = before.iter().filter(|(id, _)| !after.iter().any(|(other, _)| other == id));
    changes.extend(removed.map(|(id, _)| ConfigChange::RemoveDisk { id: id.clone() }));
    for (id, settings) in &after {
        match before.iter().find(|(other, _)| other == id) {
            None => changes.push(ConfigChange::AddDisk { id: id.clone(), settings: (*settings).clone() }),
            Some((_, was)) => {
                let different = different_keys(&keys_of(was), &keys_of(settings));
                if !different.is_empty() {
                    let what = "apply when the disk is removed and added again, or at a restart";
                    let why = format!("other values of {}, which {what}", different.join(", "));
                    changes.push(ConfigChange::Unchangeable { subject: format!("disk {id:?}"), why });
                }
            }
        }
    }
    let different = different_keys(&keys_of(&old.process), &keys_of(&new.process));
    if !different.is_empty() {
        let why = format!("other values of {}, which apply at a restart", different.join(", "));
        changes.push(ConfigChange::Unchangeable { subject: "serve".to_owned(), why });
    }
    let groups = |raw: &RawConfig| raw.limit_groups.iter().map(keys_of).collect::<Vec<_>>();
    if groups(old) != groups(new) {
        let why = "different tables, which apply at a restart; `mqblk limit-group` changes limits".to_owned();
        changes.push(ConfigChange::Unchangeable { subject: "[[limit-group]]".to_owned(), why });
    }
    for name in
        interfaces.tables().flat_map(|(_, outer)| [outer].into_iter().chain(outer.inner)).map(|table| table.name)
    {
        let of = |raw: &RawConfig| -> Vec<(Option<usize>, Keys)> {
            let own = raw.tables.iter().filter(|table| table.name == name);
            own.map(|table| (table.parent, keys_of(&table.settings))).collect()
        };
        if of(old) != of(new) {
            let why = "different tables, which apply at a restart; `mqblk disk` and `mqblk lun` change LUNs".to_owned();
            changes.push(ConfigChange::Unchangeable { subject: format!("[[{name}]]"), why });
        }
    }
    Ok(changes)
}

/// Returns the ids of the disks of a configuration, in its order.
fn disks_by_id<'a>(raw: &'a RawConfig, kinds: &[&'static str]) -> Result<Vec<(String, &'a Settings)>, SettingError> {
    let mut disks: Vec<(String, &Settings)> = Vec::new();
    for settings in &raw.disks {
        let mut own = settings.clone();
        let kind = take_storage_kind(&mut own, kinds)?;
        let id = take_id(&mut own, "path", kind)?;
        if disks.iter().any(|(other, _)| *other == id) {
            return Err(settings.error("id", format!("{id:?} twice"), "a name of its own for each disk"));
        }
        disks.push((id, settings));
    }
    Ok(disks)
}

fn different_keys(old: &Keys, new: &Keys) -> Vec<String> {
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).filter(|key| old.get(*key) != new.get(*key)).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.into_iter().cloned().collect()
}

/// Records a change in the configuration that the daemon has.
pub(crate) fn record(current: &mut RawConfig, change: &ConfigChange, kinds: &[&'static str]) {
    match change {
        ConfigChange::AddDisk { settings, .. } => current.disks.push(settings.clone()),
        ConfigChange::RemoveDisk { id } => {
            let at = disks_by_id(current, kinds).ok().and_then(|disks| disks.iter().position(|(other, _)| other == id));
            if let Some(at) = at {
                current.disks.remove(at);
            }
        }
        ConfigChange::Unchangeable { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::parse;
    use crate::interfaces::INTERFACES;

    const KINDS: &[&str] = &["file", "ram"];

    fn raw(text: &str) -> RawConfig {
        parse("c.toml", text, INTERFACES).unwrap()
    }

    fn planned(old: &str, new: &str) -> Vec<String> {
        plan(&raw(old), &raw(new), INTERFACES, KINDS).unwrap().iter().map(ToString::to_string).collect()
    }

    const TWO: &str = "workers = 2\n[[disk]]\npath = \"/a.img\"\nsocket = \"/a\"\n[[disk]]\nid = \"b\"\nstorage = \"ram\"\nsize = \"1M\"\n\
         socket = \"/b\"\n[[controller]]\nid = \"c\"\nsocket = \"/c\"\n[[controller.lun]]\npath = \"/l\"\n";

    #[test]
    fn an_equal_configuration_changes_nothing() {
        assert_eq!(planned(TWO, TWO), Vec::<String>::new());
        let reordered = "[[disk]]\nid = \"b\"\nsize = \"1M\"\nsocket = \"/b\"\nstorage = \"ram\"\n[[disk]]\nsocket = \"/a\"\npath = \"/a.img\"\n\
             [[controller]]\nsocket = \"/c\"\nid = \"c\"\n[[controller.lun]]\npath = \"/l\"\n";
        assert_eq!(planned(TWO, &format!("workers = 2\n{reordered}")), Vec::<String>::new());
    }

    #[test]
    fn disks_come_and_go() {
        let new = TWO.replace("\"/a.img\"", "\"/d.img\"");
        assert_eq!(planned(TWO, &new), ["disk \"a\": remove", "disk \"d\": add"]);
        let mut current = raw(TWO);
        for change in plan(&raw(TWO), &raw(&new), INTERFACES, KINDS).unwrap() {
            record(&mut current, &change, KINDS);
        }
        assert!(plan(&current, &raw(&new), INTERFACES, KINDS).unwrap().is_empty(), "it is applied");
    }

    #[test]
    fn what_cannot_change_is_told() {
        let new =
            TWO.replace("workers = 2", "workers = 3").replace("socket = \"/b\"", "socket = \"/x\"\npoll = \"off\"");
        let new = new.replace("path = \"/l\"", "path = \"/m\"");
        assert_eq!(
            planned(TWO, &new),
            [
                "disk \"b\": other values of poll, socket, which apply when the disk is removed and added again, or at a restart",
                "serve: other values of workers, which apply at a restart",
                "[[lun]]: different tables, which apply at a restart; `mqblk disk` and `mqblk lun` change LUNs",
            ]
        );
    }

    #[test]
    fn two_disks_of_one_id_are_refused() {
        let twice = format!("{TWO}[[disk]]\npath = \"/x/a.img\"\nsocket = \"/y\"\n");
        let error = plan(&raw(TWO), &raw(&twice), INTERFACES, KINDS).unwrap_err();
        assert!(error.to_string().contains("id: found \"a\" twice"), "{error}");
    }
}
