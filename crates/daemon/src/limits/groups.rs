//! The groups of the configuration that share limits: the tables `[[limit-group]]`.

use std::sync::Arc;

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_engine::{IoLimits, LimitGroup};

use super::keys::{LIMIT_GROUP, limit_pairs, take_limits};
use crate::key_values::finish;
use crate::names::check_id;
use crate::pair::{Pair, Section, string};

/// The name of a group.
pub static NAME: Key = Key::text("name", "NAME", "up to 64 letters, digits, `.`, `_`, `-`")
    .required()
    .about("the name that disks have as their limit-group", "");

/// All groups. Their limits can be changed at run time.
#[derive(Clone, Debug, Default)]
pub struct LimitGroups(Arc<[Arc<LimitGroup>]>);

impl LimitGroups {
    /// Takes the groups of a configuration.
    ///
    /// # Errors
    /// Returns the first invalid value.
    pub fn take(tables: impl IntoIterator<Item = Settings>) -> Result<LimitGroups, SettingError> {
        let mut groups: Vec<Arc<LimitGroup>> = Vec::new();
        for mut settings in tables {
            let Some(name) = settings.text(&NAME) else {
                return Err(settings.error(&NAME, "nothing", "the name that disks have as their limit-group"));
            };
            check_id(&settings, &name, "", "").map_err(|error| SettingError { key: NAME.name.to_owned(), ..error })?;
            if name == "off" {
                return Err(settings.error(&NAME, "\"off\"", "another name: limit-group=off is no group"));
            }
            if groups.iter().any(|group| group.name() == name) {
                return Err(settings.error(&NAME, format!("{name:?}, which another group has"), "a name of its own"));
            }
            settings.set_subject(format!("{LIMIT_GROUP} {name:?}"));
            let limits = take_limits(&mut settings, IoLimits::default())?;
            finish(settings)?;
            groups.push(Arc::new(LimitGroup::new(name, limits)));
        }
        Ok(LimitGroups(groups.into()))
    }

    /// Returns the groups, in the order of the configuration.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<LimitGroup>> {
        self.0.iter()
    }

    /// Returns the group of this name.
    ///
    /// # Errors
    /// If there is none: an error of `key`.
    pub fn find(&self, settings: &Settings, key: &str, name: &str) -> Result<&Arc<LimitGroup>, SettingError> {
        self.0.iter().find(|group| group.name() == name).ok_or_else(|| {
            let names: Vec<&str> = self.0.iter().map(|group| group.name()).collect();
            let expected = match names.as_slice() {
                [] => "a --limit-group or [[limit-group]], of which there is none".to_owned(),
                names => format!("one of {}", names.join(", ")),
            };
            settings.error(key, format!("{name:?}"), expected)
        })
    }

    /// Takes the key of a disk that names its group. `None`: it was not given; the inner `None`: no group.
    ///
    /// # Errors
    /// If there is no such group.
    pub fn take_group(&self, settings: &mut Settings) -> Result<Option<Option<Arc<LimitGroup>>>, SettingError> {
        match settings.text(&LIMIT_GROUP) {
            None => Ok(None),
            Some(name) if name == "off" => Ok(Some(None)),
            Some(name) => Ok(Some(Some(Arc::clone(self.find(settings, LIMIT_GROUP.name, &name)?)))),
        }
    }

    /// Returns the tables of the groups with their keys and values.
    pub fn sections(&self) -> Vec<Section> {
        self.iter().map(|group| Section { heading: LIMIT_GROUP.name, pairs: group_pairs(group) }).collect()
    }
}

fn group_pairs(group: &LimitGroup) -> Vec<Pair> {
    let mut pairs = vec![(NAME.name, string(group.name()))];
    pairs.extend(limit_pairs(&group.limits()));
    pairs
}
