//! Settings that change while guests use their object: a disk, a LUN, a controller's queues, or a group of limits.
//!
//! [`LIVE`] is the table of them. All keys of a change are checked before the first is applied. `target` is such an
//! object, `queues` are the keys of queues, `storage` those of a disk's requests; `saved` records changes in the state
//! file.

pub(crate) mod queues;
mod saved;
mod storage;
mod target;
mod workers;

pub use queues::MovedQueue;
pub use target::LiveTarget;

use mqblk_core::settings::{SettingError, Settings};

use crate::change::ChangeError;
use crate::exclusive::VerbScope;
use crate::key_values::finish;
use crate::limits::{limit_pairs, take_limits};
use crate::pair::Pair;
use crate::saved_changes::Keeping;
use crate::state::DaemonState;
use target::{Apply, describe};

/// Settings that are changed together.
struct LiveSetting {
    /// Takes the given keys, checks them against the present values, and returns the change. `None`: none was given.
    prepare: fn(&DaemonState, &LiveTarget, &mut Settings) -> Result<Option<Apply>, ChangeError>,
    /// Returns the keys with the present values.
    current: fn(&LiveTarget) -> Vec<Pair>,
}

/// All of them. Queues move last: that may fail half-way.
const LIVE: &[LiveSetting] = &[
    LiveSetting { prepare: storage::prepare_limits, current: storage::current_limits },
    LiveSetting { prepare: storage::prepare_plug, current: storage::current_plug },
    LiveSetting { prepare: queues::prepare_polling, current: queues::current_polling },
    LiveSetting { prepare: queues::prepare_map, current: queues::current_map },
];

impl LiveTarget {
    /// Returns the keys that can be changed, with their present values.
    pub fn current(&self) -> Vec<Pair> {
        LIVE.iter().flat_map(|live| (live.current)(self)).collect()
    }
}

impl DaemonState {
    /// Returns the disk or LUN of this id.
    ///
    /// # Errors
    /// An error of the key `id` if there is none.
    pub fn live_disk(&self, id: &str) -> Result<LiveTarget, SettingError> {
        let found = self.devices().into_iter().find_map(|device| {
            let export = device.exports().into_iter().find(|export| export.id == id)?;
            Some(LiveTarget { id: id.to_owned(), device, export: Some(export) })
        });
        found.ok_or_else(|| self.no_such("id", id))
    }

    /// Returns the controller of this id.
    ///
    /// # Errors
    /// An error of the key `id` if there is none.
    pub fn live_controller(&self, id: &str) -> Result<LiveTarget, SettingError> {
        let device = self.controllers().into_iter().find(|device| device.id() == id);
        let device = device.ok_or_else(|| self.no_such_controller("id", id))?;
        Ok(LiveTarget { id: id.to_owned(), device, export: None })
    }

    /// Returns the disk, LUN or controller of this id.
    pub(crate) fn live_any(&self, id: &str) -> Option<LiveTarget> {
        self.live_disk(id).or_else(|_| self.live_controller(id)).ok()
    }

    /// Changes settings. Everything is checked before anything is changed.
    ///
    /// # Errors
    /// If a value is invalid, cannot be changed, or a worker does not respond or refuses a queue. Changes before that
    /// stay.
    pub fn set_live(&self, target: &LiveTarget, settings: Settings, keeping: Keeping) -> Result<(), ChangeError> {
        let _alone = self.change_alone(VerbScope::Target(target.id.clone()), "disk.set")?;
        self.set_live_alone(target, settings, keeping)
    }

    /// As [`set_live`](Self::set_live), for a device that the caller holds exclusively.
    pub(crate) fn set_live_alone(
        &self,
        target: &LiveTarget,
        mut settings: Settings,
        keeping: Keeping,
    ) -> Result<(), ChangeError> {
        settings.set_subject(target.subject());
        let given: Vec<String> = settings.keys_left().map(str::to_owned).collect();
        let prepared: Result<Vec<_>, _> = LIVE.iter().map(|live| (live.prepare)(self, target, &mut settings)).collect();
        let prepared = prepared?;
        target.check_left(settings)?;
        let applied = prepared.into_iter().flatten().try_for_each(|apply| apply(self));
        // Also after an error, as earlier changes stay.
        self.keep_live(target, &given, keeping);
        applied
    }

    /// Changes the limits of a group.
    ///
    /// # Errors
    /// If there is no such group, a value is invalid, or a worker does not respond.
    pub fn set_limit_group(&self, name: &str, mut settings: Settings, keeping: Keeping) -> Result<(), ChangeError> {
        let _alone = self.change_alone(VerbScope::LimitGroup(name.to_owned()), "limit-group.set")?;
        settings.set_subject(format!("limit-group {name:?}"));
        let given: Vec<String> = settings.keys_left().map(str::to_owned).collect();
        let group = self.limit_groups().find(&settings, "name", name)?;
        let before = group.limits();
        let limits = take_limits(&mut settings, before)?;
        finish(settings)?;
        if limits != before {
            group.set(limits);
        }
        tracing::info!(group = name, limits = %describe(&limit_pairs(&limits)), "limits set");
        self.keep_group(name, &given, &limit_pairs(&limits), keeping);
        self.engine().disks_changed().map_err(|gone| ChangeError::Failed(gone.to_string()))
    }
}
