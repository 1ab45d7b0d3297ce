//! The LUNs that were added and removed at run time: the interface's section of the state file.

use std::collections::BTreeMap;

use mqblk_core::settings::{SettingError, Settings};
use serde::{Deserialize, Serialize};

use crate::change::ChangeSource;
use crate::state_file::saved_settings;

/// The section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedLuns {
    /// LUNs that were added, in the order of their addition.
    pub added: Vec<AddedLun>,
    /// LUNs of the configuration that were removed.
    pub removed: Vec<RemovedLun>,
    /// Controllers that were added, in the order of their addition.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub controllers: Vec<AddedController>,
    /// The ids of controllers of the configuration that were removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed_controllers: Vec<String>,
}

/// A controller that was added at run time. Its LUNs are among those that were added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AddedController {
    pub id: String,
    /// The other settings that it was added with.
    pub settings: BTreeMap<String, String>,
}

impl AddedController {
    /// Returns the record of a controller that was added with `settings`.
    pub(super) fn new(id: &str, settings: &Settings) -> AddedController {
        AddedController { id: id.to_owned(), settings: saved_settings(settings, &["id"]) }
    }

    /// Returns its settings, as in a `[[controller]]` table of the configuration.
    ///
    /// # Errors
    /// If an edited file also has `id` among the other settings.
    pub(super) fn to_settings(&self) -> Result<Settings, SettingError> {
        let mut settings = Settings::new(format!("controller {:?} of the state file", self.id));
        settings.insert("id", &self.id)?;
        self.settings.iter().try_for_each(|(key, value)| settings.insert(key, value))?;
        Ok(settings)
    }
}

/// A LUN that was added at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AddedLun {
    /// Its controller's id.
    pub controller: String,
    pub id: String,
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
    pub id: String,
}

impl AddedLun {
    /// Returns the record of a LUN that was added with `settings`.
    pub(super) fn new(controller: &str, id: &str, (target, lun): (u8, u16), settings: &Settings) -> AddedLun {
        let settings = saved_settings(settings, &["controller", "id", "target", "lun"]);
        AddedLun { controller: controller.to_owned(), id: id.to_owned(), target, lun, settings, gone: false }
    }

    /// Returns its settings, as in a `[[controller.lun]]` table of the configuration.
    ///
    /// # Errors
    /// If an edited file also has `id`, `target` or `lun` among the other settings.
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
    /// Records that a LUN was added.
    pub(super) fn add(&mut self, lun: AddedLun) {
        match self.added.iter_mut().find(|other| other.id == lun.id) {
            // It was out, or returns.
            Some(other) => *other = lun,
            None => self.added.push(lun),
        }
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

    /// Records that a controller was added.
    pub(super) fn add_controller(&mut self, controller: AddedController) {
        self.controllers.retain(|other| other.id != controller.id);
        self.controllers.push(controller);
    }

    /// Records that a controller was removed, with its LUNs.
    pub(super) fn remove_controller(&mut self, id: &str, origin: ChangeSource) {
        self.added.retain(|lun| lun.controller != id);
        self.removed.retain(|lun| lun.controller != id);
        self.controllers.retain(|controller| controller.id != id);
        if origin == ChangeSource::Configuration && !self.removed_controllers.iter().any(|removed| removed == id) {
            self.removed_controllers.push(id.to_owned());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn added(id: &str, words: &str) -> AddedLun {
        let settings = crate::key_values::parse("lun", &format!("controller=c,id={id},{words}")).unwrap();
        AddedLun::new("c", id, (3, 0), &settings)
    }

    #[test]
    fn a_section_is_read_back() {
        let mut state = SavedLuns::default();
        state.add(added("a", "path=/srv/a,,b.img,cache=writethrough"));
        state.add(added("b", "unit=a,target=9"));
        state.remove_configured("c", "c:0:0");
        state.remove_configured("c", "c:0:0");
        let read: SavedLuns = serde_json::from_value(serde_json::to_value(&state).unwrap()).unwrap();
        assert_eq!(read, state);
        assert!(read.has_removed("c", "c:0:0") && !read.has_removed("d", "c:0:0") && read.removed.len() == 1);
        let settings = read.added[0].to_settings().unwrap();
        assert_eq!(settings.peek("path"), Some("/srv/a,b.img"));
        assert_eq!((settings.peek("target"), settings.peek("controller")), (Some("3"), None));
    }

    #[test]
    fn a_section_of_another_form_is_refused() {
        for (text, want) in [
            ("{}", "missing field `added`"),
            ("{\"added\":[{}],\"removed\":[]}", "missing field `controller`"),
            ("{\"added\":[],\"removed\":[],\"moved\":[]}", "unknown field `moved`"),
        ] {
            let error = serde_json::from_str::<SavedLuns>(text).unwrap_err();
            assert!(error.to_string().contains(want), "{text}: {error}");
        }
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
}
