//! `disk.set`: changes settings of a disk or LUN while guests use it. `controller.set`: those of a controller's queues.

use std::sync::Arc;

use mqblk_admin::model::DiskSettings;
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use mqblk_core::settings::SettingError;
use serde_json::Value;

use super::conversion::{change_error, response, take_settings};
use crate::live::LiveTarget;
use crate::report::settings_json;
use crate::saved_changes::Keeping;
use crate::state::DaemonState;

const DISK: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or LUN" },
    Param {
        name: "settings",
        kind: ParamKind::Settings,
        about: "The keys to change, as an object or as KEY=VALUE,...: those that can be changed while guests work",
    },
];

const CONTROLLER: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the controller" },
    Param {
        name: "settings",
        kind: ParamKind::Settings,
        about: "The keys of queues to change, as an object or as KEY=VALUE,...",
    },
];

pub(super) fn verbs(state: &Arc<DaemonState>) -> [Verb; 2] {
    let (of_disk, of_controller) = (Arc::clone(state), Arc::clone(state));
    [
        Verb::new("disk.set", "Changes settings of a disk or LUN while guests use it", DISK, move |params| {
            set(&of_disk, params, DaemonState::live_disk)
        }),
        Verb::new(
            "controller.set",
            "Changes how a controller's queues are served while guests use it",
            CONTROLLER,
            move |params| set(&of_controller, params, DaemonState::live_controller),
        ),
    ]
}

/// Finds the disk, LUN or controller of an id.
type Find = fn(&DaemonState, &str) -> Result<LiveTarget, SettingError>;

fn set(state: &DaemonState, params: &Params, find: Find) -> Result<Value, VerbError> {
    let id = params.text("id").unwrap_or_default();
    let target = find(state, id).map_err(|error| no_such_id(id, error))?;
    let settings = take_settings(params)?;
    state.set_live(&target, settings, Keeping::Record).map_err(|error| change_error(error, params))?;
    let survives_restart = state.keeps_changes();
    response(DiskSettings { id: id.to_owned(), settings: settings_json(target.current()), survives_restart })
}

/// Converts the error of an unknown id.
pub(super) fn no_such_id(id: &str, error: SettingError) -> VerbError {
    let found_id = if id.is_empty() { "nothing".to_owned() } else { found(&id.into()) };
    VerbError::params("params.id", found_id, error.expected)
}
