//! An object whose settings can be changed, and a change.

use std::sync::Arc;

use mqblk_core::settings::{SettingError, Settings};

use crate::change::ChangeError;
use crate::interface::{Export, ServedDevice};
use crate::key_values::finish;
use crate::live_keys::{is_live_key, is_queue_key};
use crate::pair::Pair;
use crate::state::DaemonState;

/// An object whose settings can be changed: a disk, a LUN, or a controller.
pub struct LiveTarget {
    pub(super) id: String,
    pub(super) device: Arc<dyn ServedDevice>,
    /// Its storage; `None` for a controller.
    pub(super) export: Option<Export>,
}

impl LiveTarget {
    /// Returns the device whose queues are its own; `None` for a LUN, whose queues are its controller's.
    pub(super) fn queues(&self) -> Option<&dyn ServedDevice> {
        (!self.is_lun()).then_some(self.device.as_ref())
    }

    pub(super) fn is_lun(&self) -> bool {
        self.export.is_some() && self.device.id() != self.id
    }

    /// Returns its name for messages.
    pub(super) fn subject(&self) -> String {
        let noun = match &self.export {
            None => "controller",
            Some(_) if self.is_lun() => "lun",
            Some(_) => "disk",
        };
        format!("{noun} {:?}", self.id)
    }

    /// Returns the ids of its LUNs, or of its disk.
    pub fn luns(&self) -> Vec<String> {
        self.device.exports().iter().map(|export| export.id.clone()).collect()
    }

    /// Fails if a key is left, with the reason why it cannot be changed.
    pub(super) fn check_left(&self, settings: Settings) -> Result<(), SettingError> {
        let Some(key) = settings.keys_left().next().map(str::to_owned) else { return Ok(()) };
        let value = format!("{:?}", settings.peek(&key).unwrap_or_default());
        let expected = if self.is_lun() && is_queue_key(&key) {
            let id = self.device.id();
            format!("a key of a LUN; {key} is one of its controller: mqblk controller set {id} {key}=...")
        } else if self.export.is_none() && is_live_key(&key) && !is_queue_key(&key) {
            format!("a key of a controller; {key} is one of its LUNs: mqblk disk set LUN {key}=...")
        } else if is_queue_key(&key) {
            format!("another key: {}", crate::interface::FIXED_QUEUES)
        } else if self.fixed_keys().contains(&key) {
            let noun = if self.export.is_none() { "controller" } else { "disk" };
            format!(
                "a key that can be changed while it is served; {key} cannot: remove the {noun} and add it with the new value"
            )
        } else {
            return finish(settings);
        };
        Err(settings.error(&key, value, expected))
    }

    /// Returns the keys of its configuration that cannot be changed.
    fn fixed_keys(&self) -> Vec<String> {
        let about = self.device.describe();
        let own = ["id", "storage", "interface", "controller", "target", "lun", "unit", "unit-name", "serial", "cache"];
        let more = ["path", "size", "on-error", "on-enospc", "readonly", "block-size", "direct", "reservations"];
        let pairs = about.settings.into_iter().map(|(key, _)| key);
        pairs.chain(own).chain(more).map(str::to_owned).collect()
    }
}

/// Applies a checked change.
pub(super) type Apply = Box<dyn FnOnce(&DaemonState) -> Result<(), ChangeError>>;

/// Formats settings for the log.
pub(crate) fn describe(pairs: &[Pair]) -> String {
    let pairs: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if pairs.is_empty() { "off".to_owned() } else { pairs.join(",") }
}
