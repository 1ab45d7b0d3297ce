//! `disk.set`: changes settings of a disk or LUN while guests use it.

use std::sync::Arc;

use mqblk_admin::model::DiskSettings;
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use mqblk_core::settings::{SettingError, Settings};

use super::{change_error, settings_json, take_settings};
use crate::interface::Export;
use crate::limits::take_limits;
use crate::print::{Pair, current_limit_pairs};
use crate::resize::ChangeError;
use crate::state::DaemonState;

const PARAMS: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or LUN" },
    Param {
        name: "settings",
        kind: ParamKind::Settings,
        about: "The keys to change, as an object or as KEY=VALUE,...: those of limits, and limit-group",
    },
];

/// Settings that belong together and can be changed while guests use a disk.
struct LiveSetting {
    /// Takes the keys that were given, checks them against what the disk has now, and returns what changes it.
    prepare: fn(&DaemonState, &dyn Export, &mut Settings) -> Result<Apply, ChangeError>,
    /// Returns the keys with the values that the disk has now.
    current: fn(&dyn Export) -> Vec<Pair>,
}

/// Makes a change that was checked.
type Apply = Box<dyn FnOnce(&DaemonState) -> Result<(), ChangeError>>;

/// All of them.
const LIVE: &[LiveSetting] = &[LiveSetting { prepare: prepare_limits, current: current_limits }];

/// Returns the verb.
pub(super) fn verb(state: &Arc<DaemonState>) -> Verb {
    let state = Arc::clone(state);
    Verb::new("disk.set", "Changes settings of a disk or LUN while guests use it", PARAMS, move |params| {
        let set = set(&state, params)?;
        super::response(set)
    })
}

fn set(state: &DaemonState, params: &Params) -> Result<DiskSettings, VerbError> {
    let id = params.text("id").unwrap_or_default();
    let found_id = || if id.is_empty() { "nothing".to_owned() } else { found(&id.into()) };
    let export = state.export(id).map_err(|error| VerbError::params("params.id", found_id(), error.expected))?;
    let mut settings = take_settings(params)?;
    settings.set_subject(format!("disk {id:?}"));
    // Everything is checked before anything is changed.
    let prepared: Result<Vec<_>, _> =
        LIVE.iter().map(|live| (live.prepare)(state, export.as_ref(), &mut settings)).collect();
    let prepared = prepared.and_then(|prepared| settings.finish().map(|()| prepared).map_err(ChangeError::from));
    for apply in prepared.map_err(|error| change_error(error, params))? {
        apply(state).map_err(|error| change_error(error, params))?;
    }
    let current = LIVE.iter().flat_map(|live| (live.current)(export.as_ref()));
    Ok(DiskSettings { id: id.to_owned(), settings: settings_json(current) })
}

fn prepare_limits(state: &DaemonState, export: &dyn Export, settings: &mut Settings) -> Result<Apply, ChangeError> {
    let not_open = || ChangeError::Failed(format!("{}: its storage is still being opened", settings.subject()));
    let health = export.health().ok_or_else(not_open)?;
    let before = health.limits().own();
    let limits = take_limits(settings, before)?;
    let group = state.limit_groups().take_group(settings)?;
    Ok(Box::new(move |state| {
        if limits != before {
            health.limits().set_own(limits);
        }
        if let Some(group) = &group {
            health.limits().set_group(group.as_ref());
        }
        tracing::info!(disk = health.name(), limits = %describe(&current_limit_pairs(health.limits())), "limits set");
        state.engine().limits_changed().map_err(|gone| ChangeError::Failed(gone.to_string()))
    }))
}

fn current_limits(export: &dyn Export) -> Vec<Pair> {
    export.health().map(|health| current_limit_pairs(health.limits())).unwrap_or_default()
}

/// Formats settings for the log.
pub(super) fn describe(pairs: &[Pair]) -> String {
    let pairs: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if pairs.is_empty() { "off".to_owned() } else { pairs.join(",") }
}

impl DaemonState {
    /// Returns the disk or LUN of this id.
    ///
    /// # Errors
    /// An error of the key `id` if there is none.
    fn export(&self, id: &str) -> Result<Arc<dyn Export>, SettingError> {
        self.exports().into_iter().find(|export| export.id() == id).ok_or_else(|| self.no_such("id", id))
    }
}
