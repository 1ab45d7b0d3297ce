//! A configuration that is read again while the daemon serves: changes are applied as far as possible, and the rest
//! stays as it is.
//!
//! [`plan`] is pure and compares two configurations as given. Disks, controllers and LUNs are compared by id, groups of
//! limits by name. Settings of the process, and keys that cannot change while guests use them, stay as they are and are
//! reported.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::PollPolicy;

use crate::file::RawConfig;
use crate::interface::Interfaces;
use crate::key_values::RawTable;
use crate::live_keys::{configured_value, is_live_key, keys_set_with};
use crate::names::take_id;
use crate::queues::MAX_QUEUES;
use crate::state_file::absolute_setting;
use crate::storage::take_storage_kind;

/// An object of a configuration, by which differences are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConfigItem {
    /// A `[[disk]]`.
    Disk,
    /// A `[[limit-group]]`.
    LimitGroup,
    /// A table of an interface: the interface's index, and the table's name.
    Table(usize, &'static str),
    /// A table inside one of an interface.
    InnerTable(usize, &'static str),
}

impl ConfigItem {
    fn noun(self) -> &'static str {
        match self {
            ConfigItem::Disk => "disk",
            ConfigItem::LimitGroup => "limit-group",
            ConfigItem::Table(_, name) | ConfigItem::InnerTable(_, name) => name,
        }
    }

    /// The key that names it.
    fn name_key(self) -> &'static str {
        if self == ConfigItem::LimitGroup { "name" } else { "id" }
    }
}

/// A difference between two configurations.
#[derive(Clone, Debug)]
pub enum ConfigChange {
    /// An object of the new configuration only.
    Add {
        /// The type of object.
        item: ConfigItem,
        /// Its id.
        id: String,
        /// Its keys.
        settings: Settings,
    },
    /// An object of the old configuration only.
    Remove {
        /// The type of object.
        item: ConfigItem,
        /// Its id.
        id: String,
    },
    /// Other values of keys that can change while guests use the object.
    Set {
        /// The type of object.
        item: ConfigItem,
        /// Its id, or the group's name.
        id: String,
        /// The keys with their new values; `None` for keys that the new configuration does not have.
        keys: BTreeMap<String, Option<String>>,
    },
    /// Another number of workers.
    Workers(u16),
    /// A difference that cannot be applied while the daemon serves.
    Unchangeable {
        /// The object.
        subject: String,
        /// The difference, and the remedy.
        why: String,
    },
}

impl fmt::Display for ConfigChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigChange::Add { item, id, .. } => write!(f, "{} {id:?}: add", item.noun()),
            ConfigChange::Remove { item, id } => write!(f, "{} {id:?}: remove", item.noun()),
            ConfigChange::Set { item, id, keys } => {
                let shown =
                    keys.iter().map(|(key, value)| format!("{key}={}", value.as_deref().unwrap_or("(default)")));
                write!(f, "{} {id:?}: set {}", item.noun(), shown.collect::<Vec<_>>().join(","))
            }
            ConfigChange::Workers(count) => write!(f, "serve: set workers={count}"),
            ConfigChange::Unchangeable { subject, why } => write!(f, "{subject}: {why}"),
        }
    }
}

impl ConfigChange {
    /// Returns true if it can be applied while the daemon serves.
    pub fn can_apply(&self) -> bool {
        !matches!(self, ConfigChange::Unchangeable { .. })
    }

    /// Returns the settings of a [`Set`](Self::Set) change. Keys that are no longer configured get their default.
    ///
    /// # Errors
    /// Never: keys are unique.
    pub(crate) fn live_settings(&self) -> Result<Settings, SettingError> {
        let mut settings = Settings::new("the configuration");
        if let ConfigChange::Set { keys, .. } = self {
            for (key, value) in keys {
                if let Some(value) = value.clone().or_else(|| configured_value(key, keys)) {
                    settings.insert(key, &value)?;
                }
            }
        }
        Ok(settings)
    }
}

/// Keys with their values, paths in absolute form.
pub(crate) type Keys = BTreeMap<String, String>;

/// Returns the keys with their values, paths in absolute form.
pub(crate) fn keys_of(settings: &Settings) -> Keys {
    settings.pairs().map(|(key, value)| (key.to_owned(), absolute_setting(key, value))).collect()
}

/// An object that a configuration describes.
struct Described {
    item: ConfigItem,
    id: String,
    /// The id of the outer table; `None` for outer tables.
    parent: Option<String>,
    settings: Settings,
}

impl Described {
    /// Returns its type and id, which are unique together.
    fn name(&self) -> (ConfigItem, &str) {
        (self.item, &self.id)
    }
}

fn by_name(all: &[Described]) -> HashMap<(ConfigItem, &str), &Described> {
    all.iter().map(|one| (one.name(), one)).collect()
}

/// Returns the differences of `new`, removals first. `kinds` are the names of the storage backends.
///
/// # Errors
/// If a disk or table of one of them has no valid id, or two have the same.
pub fn plan(
    old: &RawConfig,
    new: &RawConfig,
    interfaces: Interfaces,
    kinds: &[&'static str],
) -> Result<Vec<ConfigChange>, SettingError> {
    let (before, after) = (describe(old, interfaces, kinds)?, describe(new, interfaces, kinds)?);
    let (by_name_before, by_name_after) = (by_name(&before), by_name(&after));
    let outer = after.iter().filter(|one| matches!(one.item, ConfigItem::Table(..)));
    let outer: HashSet<&str> = outer.map(|one| one.id.as_str()).collect();
    let (mut changes, mut others) = (Vec::new(), Vec::new());
    for one in before.iter().filter(|one| !by_name_after.contains_key(&one.name())) {
        // Removing its outer table removes it.
        if one.parent.as_ref().is_none_or(|parent| outer.contains(parent.as_str())) {
            changes.push(removal(one));
        }
    }
    for one in &after {
        match by_name_before.get(&one.name()) {
            None => others.push(addition(one)),
            Some(was) => others.extend(differences(was, one)),
        }
    }
    changes.extend(others);
    let mut different = different_keys(&keys_of(&old.process), &keys_of(&new.process));
    // `pin` has a CPU for each worker, so the number of workers changes with another key.
    let is_pinned = [old, new].iter().any(|raw| raw.process.peek("pin").is_some());
    let count = new.process.peek("workers").and_then(|count| count.parse().ok()).filter(|_| !is_pinned);
    if let Some(count) = count.filter(|count| (1..=MAX_QUEUES).contains(count))
        && different.iter().any(|key| key == "workers")
    {
        different.retain(|key| key != "workers");
        changes.push(ConfigChange::Workers(count));
    }
    if !different.is_empty() {
        let why = format!("other values of {}, which apply at a restart", different.join(", "));
        changes.push(ConfigChange::Unchangeable { subject: "serve".to_owned(), why });
    }
    Ok(changes)
}

fn fixed(one: &Described, why: String) -> ConfigChange {
    ConfigChange::Unchangeable { subject: format!("{} {:?}", one.item.noun(), one.id), why }
}

fn removal(one: &Described) -> ConfigChange {
    match one.item {
        ConfigItem::LimitGroup => fixed(one, "it is gone, which applies at a restart".to_owned()),
        item => ConfigChange::Remove { item, id: one.id.clone() },
    }
}

fn addition(one: &Described) -> ConfigChange {
    match one.item {
        ConfigItem::LimitGroup => fixed(one, "it is new, which applies at a restart".to_owned()),
        item => ConfigChange::Add { item, id: one.id.clone(), settings: one.settings.clone() },
    }
}

/// Returns the differences of one object.
fn differences(was: &Described, is: &Described) -> Vec<ConfigChange> {
    let (old, new) = (keys_of(&was.settings), keys_of(&is.settings));
    let can_change = |key: &String| is_live_key(key) && (key != crate::queues::QUEUE_MAP.name || new.contains_key(key));
    let (live, others): (Vec<String>, Vec<String>) = different_keys(&old, &new).into_iter().partition(can_change);
    let mut changes = Vec::new();
    if !live.is_empty() {
        let keys = live.iter().flat_map(|key| keys_set_with(key)).map(|key| (key.to_owned(), new.get(key).cloned()));
        changes.push(ConfigChange::Set { item: is.item, id: is.id.clone(), keys: keys.collect() });
    }
    if !others.is_empty() {
        let noun = is.item.noun();
        let what = format!("apply when the {noun} is removed and added again, or at a restart");
        changes.push(fixed(is, format!("other values of {}, which {what}", others.join(", "))));
    }
    changes
}

/// Returns settings with `poll` in place of its other form.
fn with_poll(settings: &Settings) -> Result<Settings, SettingError> {
    let Some(switch) = settings.peek("poll_queue").filter(|_| settings.peek("poll").is_none()) else {
        return Ok(settings.clone());
    };
    let poll = if matches!(switch, "false" | "off") { PollPolicy::Off } else { PollPolicy::default() };
    let mut plain = Settings::new(settings.subject());
    settings.pairs().filter(|(key, _)| *key != "poll_queue").try_for_each(|(key, value)| plain.insert(key, value))?;
    plain.insert("poll", &poll.to_string())?;
    Ok(plain)
}

/// Returns all objects of a configuration.
fn describe(raw: &RawConfig, interfaces: Interfaces, kinds: &[&'static str]) -> Result<Vec<Described>, SettingError> {
    let mut all: Vec<Described> = Vec::new();
    for settings in &raw.limit_groups {
        let id = settings.peek("name").unwrap_or_default().to_owned();
        all.push(Described { item: ConfigItem::LimitGroup, id, parent: None, settings: settings.clone() });
    }
    for settings in &raw.disks {
        let mut own = settings.clone();
        let kind = take_storage_kind(&mut own, kinds)?;
        let id = take_id(&mut own, "path", kind)?;
        all.push(Described { item: ConfigItem::Disk, id, parent: None, settings: settings.clone() });
    }
    for (at, outer) in interfaces.tables() {
        let tables: Vec<RawTable> = raw.tables.iter().filter(|table| table.interface == at).cloned().collect();
        let identified = interfaces.0[at].identify(&tables)?;
        for (table, settings) in tables.iter().zip(identified) {
            let is_outer = table.name == outer.name;
            let item =
                if is_outer { ConfigItem::Table(at, table.name) } else { ConfigItem::InnerTable(at, table.name) };
            let id = settings.peek("id").unwrap_or_default().to_owned();
            let parent = if is_outer { None } else { settings.peek(outer.name).map(str::to_owned) };
            all.push(Described { item, id, parent, settings });
        }
    }
    for one in &mut all {
        one.settings = with_poll(&one.settings)?;
    }
    // Outer tables before those inside them.
    all.sort_by_key(|one| matches!(one.item, ConfigItem::InnerTable(..)));
    let mut names = HashSet::new();
    for one in &all {
        if !names.insert(one.name()) {
            let expected = format!("a name of its own for each {}", one.item.noun());
            return Err(one.settings.error(one.item.name_key(), format!("{:?} twice", one.id), expected));
        }
    }
    Ok(all)
}

/// Returns the disks and table objects of a configuration, each with its id.
///
/// # Errors
/// If one has no valid id, or two have the same.
pub(crate) fn identified(
    raw: &RawConfig,
    interfaces: Interfaces,
    kinds: &[&'static str],
) -> Result<Vec<(String, Settings)>, SettingError> {
    let all = describe(raw, interfaces, kinds)?.into_iter().filter(|one| one.item != ConfigItem::LimitGroup);
    Ok(all.map(|one| (one.id, one.settings)).collect())
}

fn different_keys(old: &Keys, new: &Keys) -> Vec<String> {
    let mut keys: Vec<&String> = old.keys().chain(new.keys()).filter(|key| old.get(*key) != new.get(*key)).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.into_iter().cloned().collect()
}

/// Records changes in the daemon's configuration, all in one pass.
///
/// # Errors
/// Never: the configuration was compared before.
pub(crate) fn record(
    current: &mut RawConfig,
    changes: &[&ConfigChange],
    interfaces: Interfaces,
    kinds: &[&'static str],
) -> Result<(), SettingError> {
    let mut all = describe(current, interfaces, kinds)?;
    let removed = changes.iter().filter_map(|change| match change {
        ConfigChange::Remove { item, id } => Some((*item, id.as_str())),
        _ => None,
    });
    let removed: HashSet<(ConfigItem, &str)> = removed.collect();
    let outer = removed.iter().filter(|(item, _)| matches!(item, ConfigItem::Table(..))).map(|(_, id)| *id);
    let outer: HashSet<&str> = outer.collect();
    all.retain(|one| {
        let goes_with_outer = one.parent.as_ref().is_some_and(|parent| outer.contains(parent.as_str()));
        !removed.contains(&one.name()) && !goes_with_outer
    });
    let set = changes.iter().filter_map(|change| match change {
        ConfigChange::Set { item, id, keys } => Some(((*item, id.as_str()), keys)),
        _ => None,
    });
    let set: HashMap<(ConfigItem, &str), &BTreeMap<String, Option<String>>> = set.collect();
    for one in &mut all {
        if let Some(keys) = set.get(&one.name()) {
            one.settings = with_keys(&one.settings, keys)?;
        }
    }
    for change in changes {
        match change {
            ConfigChange::Add { item, id, settings } => {
                all.push(Described { item: *item, id: id.clone(), parent: None, settings: settings.clone() });
            }
            ConfigChange::Workers(count) => {
                let workers = BTreeMap::from([("workers".to_owned(), Some(count.to_string()))]);
                current.process = with_keys(&current.process, &workers)?;
            }
            _ => {}
        }
    }
    (current.disks, current.limit_groups, current.tables) = (Vec::new(), Vec::new(), Vec::new());
    for Described { item, settings, .. } in all {
        match item {
            ConfigItem::Disk => current.disks.push(settings),
            ConfigItem::LimitGroup => current.limit_groups.push(settings),
            // Inner tables name the outer one by a key.
            ConfigItem::Table(interface, name) | ConfigItem::InnerTable(interface, name) => {
                current.tables.push(RawTable { interface, name, parent: None, settings });
            }
        }
    }
    Ok(())
}

/// Returns settings with new values of some keys, and without keys that have none.
fn with_keys(settings: &Settings, keys: &BTreeMap<String, Option<String>>) -> Result<Settings, SettingError> {
    let mut changed = Settings::new(settings.subject());
    settings
        .pairs()
        .filter(|(key, _)| !keys.contains_key(*key))
        .try_for_each(|(key, value)| changed.insert(key, value))?;
    let given = keys.iter().filter_map(|(key, value)| Some((key, value.as_ref()?)));
    given.into_iter().try_for_each(|(key, value)| changed.insert(key, value))?;
    Ok(changed)
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
            record(&mut current, &[&change], INTERFACES, KINDS).unwrap();
        }
        assert!(plan(&current, &raw(&new), INTERFACES, KINDS).unwrap().is_empty(), "it is applied");
    }

    #[test]
    fn what_cannot_change_is_told() {
        let new =
            TWO.replace("workers = 2", "admin = true").replace("socket = \"/b\"", "socket = \"/x\"\npoll = \"off\"");
        let new = new.replace("path = \"/l\"", "path = \"/m\"\ndepth = 3");
        let changes = [
            "disk \"b\": set poll=off",
            "disk \"b\": other values of socket, which apply when the disk is removed and added again, or at a restart",
            "lun \"c:0:0\": set depth=3",
            "lun \"c:0:0\": other values of path, which apply when the lun is removed and added again, or at a restart",
            "serve: other values of admin, workers, which apply at a restart",
        ];
        assert_eq!(planned(TWO, &new), changes);
        let mut current = raw(TWO);
        for change in plan(&raw(TWO), &raw(&new), INTERFACES, KINDS).unwrap() {
            record(&mut current, &[&change], INTERFACES, KINDS).unwrap();
        }
        let left: Vec<String> =
            plan(&current, &raw(&new), INTERFACES, KINDS).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(left, [changes[1], changes[3], changes[4]]);
    }

    #[test]
    fn controllers_and_luns_come_and_go() {
        let new = TWO.replace("[[controller.lun]]\npath = \"/l\"\n", "")
            + "[[controller.lun]]\ntarget = 4\npath = \"/m\"\n[[controller]]\nsocket = \"/run/d.sock\"\n[[controller.lun]]\npath = \"/n\"\n";
        let changes = ["lun \"c:0:0\": remove", "controller \"d\": add", "lun \"c:4:0\": add", "lun \"d:0:0\": add"];
        assert_eq!(planned(TWO, &new), changes);
        let mut current = raw(TWO);
        for change in plan(&raw(TWO), &raw(&new), INTERFACES, KINDS).unwrap() {
            record(&mut current, &[&change], INTERFACES, KINDS).unwrap();
        }
        assert!(plan(&current, &raw(&new), INTERFACES, KINDS).unwrap().is_empty(), "it is applied");
        // Removing it removes its LUNs.
        let back = plan(&current, &raw(TWO), INTERFACES, KINDS).unwrap();
        let shown: Vec<String> = back.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["controller \"d\": remove", "lun \"c:4:0\": remove", "lun \"c:0:0\": add"]);
        record(&mut current, &back.iter().collect::<Vec<_>>(), INTERFACES, KINDS).unwrap();
        assert!(plan(&current, &raw(TWO), INTERFACES, KINDS).unwrap().is_empty());
    }

    #[test]
    fn what_is_not_configured_any_more_gets_its_default() {
        let with = TWO.replace(
            "socket = \"/b\"",
            "socket = \"/b\"\npoll = \"busy\"\niops = 9\niops-max = 20\nqueue-map = \"0:0\"",
        ) + "[[limit-group]]\nname = \"g\"\niops = 5\n";
        let changes = plan(&raw(&with), &raw(TWO), INTERFACES, KINDS).unwrap();
        let ConfigChange::Set { id, .. } = &changes[1] else { panic!("{changes:?}") };
        let settings = changes[1].live_settings().unwrap();
        let pairs: Vec<_> = settings.pairs().collect();
        assert_eq!((id.as_str(), pairs), ("b", vec![("iops", "off"), ("iops-max", "off"), ("poll", "adaptive")]));
        let told: Vec<String> = changes.iter().map(ToString::to_string).collect();
        assert_eq!(told[0], "limit-group \"g\": it is gone, which applies at a restart");
        assert!(told[2].starts_with("disk \"b\": other values of queue-map, which apply"), "{told:?}");
        let other = with.replace("iops = 5\n", "bandwidth = \"1M\"\n");
        let change = &plan(&raw(&with), &raw(&other), INTERFACES, KINDS).unwrap()[0];
        assert!(change.to_string().starts_with("limit-group \"g\": set bandwidth=1M,"), "{change}");
        let settings = change.live_settings().unwrap();
        assert_eq!((settings.peek("iops"), settings.peek("bandwidth")), (Some("off"), Some("1M")));
    }

    #[test]
    fn two_disks_of_one_id_are_refused() {
        let twice = format!("{TWO}[[disk]]\npath = \"/x/a.img\"\nsocket = \"/y\"\n");
        let error = plan(&raw(TWO), &raw(&twice), INTERFACES, KINDS).unwrap_err();
        assert!(error.to_string().contains("id: found \"a\" twice"), "{error}");
    }
}
