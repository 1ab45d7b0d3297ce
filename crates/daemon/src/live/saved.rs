//! Records changes at run time, and restores them.

use mqblk_core::settings::{SettingError, Settings};
use toml::Value;

use super::target::LiveTarget;
use crate::change::ChangeError;
use crate::limits::{LIMIT_GROUP, keys_of_limit};
use crate::live_keys::keys_set_with;
use crate::pair::Pair;
use crate::saved_changes::{ConfiguredValues, Keeping, SavedChanges, SavedSettings, SavedValue};
use crate::state::DaemonState;

/// Returns the value to record for a removed key; `None`: nothing is recorded.
fn removed(key: &str) -> Option<String> {
    let is_limit = keys_of_limit(key).is_some();
    (key == LIMIT_GROUP.name || (is_limit && !key.ends_with("-burst-s"))).then(|| "off".to_owned())
}

/// Records the present values of the given keys.
fn record(saved: &mut SavedSettings, given: &[String], current: &[Pair], configured: &ConfiguredValues) {
    for key in given.iter().flat_map(|key| keys_set_with(key)) {
        let current = current.iter().find(|(other, _)| *other == key).map(|(_, value)| match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        let configured = configured.get(key).cloned();
        match current.or_else(|| removed(key)) {
            Some(value) if configured.as_ref() != Some(&value) => {
                saved.insert(key.to_owned(), SavedValue { value, configured });
            }
            _ => _ = saved.remove(key),
        }
    }
}

fn forget(saved: &mut SavedSettings, given: &[String]) {
    for key in given.iter().flat_map(|key| keys_set_with(key)) {
        saved.remove(key);
    }
}

/// Drops values whose key has another value in the configuration than at the time of the record.
fn drop_edited(subject: &str, saved: &mut SavedSettings, configured: &ConfiguredValues) {
    saved.retain(|key, value| {
        let is_same = value.configured.as_ref() == configured.get(key);
        if !is_same {
            let kept = &value.value;
            tracing::info!("{subject}: {key}: the configuration was edited: {kept:?} of the state file is forgotten");
        }
        is_same
    });
}

fn to_settings(saved: &SavedSettings) -> Result<Settings, SettingError> {
    let mut settings = Settings::new("the state file");
    saved.iter().try_for_each(|(key, value)| settings.insert(key, &value.value))?;
    Ok(settings)
}

/// Applies saved settings. Drops those from `saved` that cannot be used any more.
fn restore(subject: &str, saved: &mut SavedSettings, mut apply: impl FnMut(Settings) -> Result<(), ChangeError>) {
    while !saved.is_empty() {
        match to_settings(saved).map_err(ChangeError::from).and_then(&mut apply) {
            Ok(()) => return,
            Err(ChangeError::Setting(error)) => {
                tracing::warn!(
                    "{error}; the state file does not fit the configuration, which has priority: this is forgotten"
                );
                if saved.remove(&error.key).is_none() {
                    saved.clear();
                }
            }
            Err(ChangeError::Failed(why)) => {
                tracing::error!("{subject}: {why}; the state file keeps what could not be set");
                return;
            }
        }
    }
}

impl DaemonState {
    /// Applies the saved changes of an earlier daemon.
    pub(crate) fn restore_live(&self) {
        // First: queue maps name them.
        self.restore_workers();
        let SavedChanges { mut limit_groups, settings, .. } = self.saved().clone();
        for (name, settings) in &mut limit_groups {
            let subject = format!("limit-group {name:?}");
            drop_edited(&subject, settings, &self.configured_group(name));
            restore(&subject, settings, |settings| self.set_limit_group(name, settings, Keeping::Nothing));
        }
        limit_groups.retain(|_, settings| !settings.is_empty());
        self.saved().limit_groups = limit_groups;
        settings.keys().for_each(|id| self.restore_device(id));
        self.write_saved();
    }

    /// Applies the saved settings of a disk, LUN or controller, which the caller holds exclusively.
    /// [`write_saved`](Self::write_saved) writes the remaining ones. Those of a device that is out stay.
    pub(crate) fn restore_device(&self, id: &str) {
        let kept = self.saved().settings.get(id).cloned();
        let (Some(mut settings), Some(target)) = (kept, self.live_any(id)) else { return };
        let subject = target.subject();
        drop_edited(&subject, &mut settings, &self.configured_settings(id));
        restore(&subject, &mut settings, |settings| self.set_live_alone(&target, settings, Keeping::Nothing));
        let mut saved = self.saved();
        match settings.is_empty() {
            true => _ = saved.settings.remove(id),
            false => _ = saved.settings.insert(id.to_owned(), settings),
        }
    }

    /// Records the changes of a disk, LUN or controller, or forgets them.
    pub(super) fn keep_live(&self, target: &LiveTarget, given: &[String], keeping: Keeping) {
        // Queried before the lock.
        let (configured, current) = (self.configured_settings(&target.id), target.current());
        self.keep(keeping, |saved| {
            let settings = saved.settings.entry(target.id.clone()).or_default();
            match keeping {
                Keeping::Record => record(settings, given, &current, &configured),
                _ => forget(settings, given),
            }
            saved.settings.retain(|_, settings| !settings.is_empty());
        });
    }

    /// Records the limits of a group, or forgets them.
    pub(super) fn keep_group(&self, name: &str, given: &[String], current: &[Pair], keeping: Keeping) {
        let configured = self.configured_group(name);
        self.keep(keeping, |saved| {
            let settings = saved.limit_groups.entry(name.to_owned()).or_default();
            match keeping {
                Keeping::Record => record(settings, given, current, &configured),
                _ => forget(settings, given),
            }
            saved.limit_groups.retain(|_, settings| !settings.is_empty());
        });
    }

    fn keep(&self, keeping: Keeping, change: impl FnOnce(&mut SavedChanges)) {
        if keeping != Keeping::Nothing {
            change(&mut self.saved());
            self.write_saved();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::{number, string};

    fn given(keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| (*key).to_owned()).collect()
    }

    fn values(pairs: &[(&str, &str)]) -> ConfiguredValues {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn kept(saved: &SavedSettings) -> Vec<(&str, &str)> {
        saved.iter().map(|(key, value)| (key.as_str(), value.value.as_str())).collect()
    }

    #[test]
    fn a_limit_is_kept_with_its_burst() {
        let mut saved = SavedSettings::new();
        let burst =
            [("iops", number(5000)), ("iops-max", number(9000)), ("iops-burst-s", number(2)), ("depth", number(3))];
        record(&mut saved, &given(&["iops-max"]), &burst, &values(&[("iops", "5000")]));
        assert_eq!(kept(&saved), [("iops-burst-s", "2"), ("iops-max", "9000")], "iops is as configured");
        record(&mut saved, &given(&["iops"]), &[], &values(&[("iops", "5000")]));
        assert_eq!(kept(&saved), [("iops", "off"), ("iops-max", "off")]);
        assert_eq!(saved["iops"].configured.as_deref(), Some("5000"));
        record(&mut saved, &given(&["depth", LIMIT_GROUP.name]), &burst[3..], &values(&[]));
        assert_eq!(kept(&saved), [("depth", "3"), ("iops", "off"), ("iops-max", "off"), ("limit-group", "off")]);
        forget(&mut saved, &given(&["iops-burst-s", "limit-group"]));
        assert_eq!(kept(&saved), [("depth", "3")]);
    }

    #[test]
    fn a_value_is_forgotten_when_the_configuration_was_edited() {
        let mut saved = SavedSettings::new();
        let current = [("poll", string("off")), ("merge", string("on"))];
        record(&mut saved, &given(&["poll_queue", "merge"]), &current, &values(&[("merge", "off")]));
        assert_eq!(kept(&saved), [("merge", "on"), ("poll", "off")]);
        drop_edited("disk", &mut saved, &values(&[("merge", "off")]));
        assert_eq!(saved.len(), 2);
        drop_edited("disk", &mut saved, &values(&[("merge", "auto"), ("poll", "busy")]));
        assert!(saved.is_empty());
    }

    #[test]
    fn what_does_not_fit_any_more_is_dropped_key_by_key() {
        let mut saved = SavedSettings::new();
        let current = [("depth", number(3)), ("queue-map", string("0:7"))];
        record(&mut saved, &given(&["depth", "queue-map"]), &current, &values(&[]));
        let mut applied = Vec::new();
        restore("disk", &mut saved, |settings| {
            applied.push(settings.pairs().map(|(key, _)| key.to_owned()).collect::<Vec<_>>());
            match settings.peek("queue-map") {
                Some(map) => Err(settings.error("queue-map", map, "another").into()),
                None => Ok(()),
            }
        });
        assert_eq!(applied, [given(&["depth", "queue-map"]), given(&["depth"])]);
        assert_eq!(kept(&saved), [("depth", "3")]);
        restore("disk", &mut saved, |_| Err(ChangeError::Failed("busy".to_owned())));
        assert_eq!(kept(&saved), [("depth", "3")], "it is tried again at the next start");
    }
}
