//! `limit-group.set` and `limit-group.list`: the limits that several disks share.

use std::sync::Arc;

use mqblk_admin::model::{LimitGroupChange, LimitGroupList, LimitGroupStat};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use mqblk_core::settings::Settings;
use mqblk_engine::LimitGroup;
use serde_json::Value;

use super::conversion::{change_error, response, take_settings};
use crate::limits::limit_pairs;
use crate::report::settings_json;
use crate::saved_changes::Keeping;
use crate::state::DaemonState;

const SET: &[Param] = &[
    Param { name: "name", kind: ParamKind::Text, about: "The name of the group" },
    Param {
        name: "settings",
        kind: ParamKind::Settings,
        about: "The keys of limits to change, as an object or as KEY=VALUE,...",
    },
];

pub(super) fn verbs(state: &Arc<DaemonState>) -> [Verb; 2] {
    let (setting, listing) = (Arc::clone(state), Arc::clone(state));
    [
        Verb::new("limit-group.set", "Changes the limits of a group of disks", SET, move |params| {
            set(&setting, params)
        }),
        Verb::new("limit-group.list", "The groups of disks that share limits", &[], move |_| list(&listing)),
    ]
}

fn set(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let name = params.text("name").unwrap_or_default();
    let found = if name.is_empty() { "nothing".to_owned() } else { found(&name.into()) };
    let group = state.limit_groups().find(&Settings::new("limit-group"), "name", name);
    let group = group.map_err(|error| VerbError::params("params.name", found, error.expected))?;
    let settings = take_settings(params)?;
    state.set_limit_group(name, settings, Keeping::Record).map_err(|error| change_error(error, params))?;
    response(LimitGroupChange { group: group_stat(state, group), survives_restart: state.keeps_changes() })
}

fn list(state: &DaemonState) -> Result<Value, VerbError> {
    let groups = state.limit_groups();
    response(LimitGroupList { groups: groups.iter().map(|group| group_stat(state, group)).collect() })
}

fn group_stat(state: &DaemonState, group: &Arc<LimitGroup>) -> LimitGroupStat {
    let exports = state.exports();
    let is_member = |health: &Arc<mqblk_engine::DiskHealth>| {
        health.limits().group().is_some_and(|of_disk| Arc::ptr_eq(&of_disk, group))
    };
    let members = exports.iter().filter(|export| export.health.as_ref().is_some_and(is_member));
    LimitGroupStat {
        name: group.name().to_owned(),
        limits: settings_json(limit_pairs(&group.limits())),
        disks: members.map(|export| export.id.clone()).collect(),
    }
}
