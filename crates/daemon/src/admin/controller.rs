//! `controller.add`, `controller.remove` and `controller.list`: devices that have LUNs, at run time. `disk_set` has
//! `controller.set`.

use std::sync::Arc;

use mqblk_admin::model::{ControllerList, DiskAdded, DiskRemoved, ListedController};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError};
use serde_json::Value;

use super::conversion::{change_error, response, take_settings};
use super::disk::frontend_info;
use crate::change::ChangeSource;
use crate::interface::ServedDevice;
use crate::report::settings_json;
use crate::state::DaemonState;

const ADD: &[Param] = &[Param {
    name: "settings",
    kind: ParamKind::Settings,
    about: "The keys of --controller, as an object or as KEY=VALUE,...",
}];

const REMOVE: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the controller" },
    Param {
        name: "force",
        kind: ParamKind::Boolean,
        about: "Also while a guest is connected, which loses its LUNs [false]",
    },
];

pub(super) fn verbs(state: &Arc<DaemonState>) -> [Verb; 3] {
    let (listing, adding, removing) = (Arc::clone(state), Arc::clone(state), Arc::clone(state));
    [
        Verb::new("controller.list", "The controllers, and who uses them", &[], move |_| response(list(&listing))),
        Verb::new("controller.add", "Serves one more controller, without LUNs", ADD, move |params| {
            add(&adding, params)
        }),
        Verb::new(
            "controller.remove",
            "Takes a controller and its LUNs away, when their requests have ended, and closes their storage",
            REMOVE,
            move |params| remove(&removing, params),
        ),
    ]
}

fn add(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let id = state.add_controller(&take_settings(params)?, ChangeSource::RunTime);
    let id = id.map_err(|error| change_error(error, params))?;
    response(DiskAdded { id, survives_restart: state.keeps_changes() })
}

fn remove(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let Some(id) = params.text("id") else {
        return Err(VerbError::params("params.id", "nothing", "the id of a controller"));
    };
    let removed = state.remove_controller(id, params.is_set("force"), ChangeSource::RunTime);
    removed.map_err(|error| change_error(error, params))?;
    response(DiskRemoved { id: id.to_owned() })
}

fn list(state: &DaemonState) -> ControllerList {
    let controllers = state.controllers();
    ControllerList { controllers: controllers.iter().map(|device| listed(device.as_ref())).collect() }
}

fn listed(device: &dyn ServedDevice) -> ListedController {
    let about = device.describe();
    ListedController {
        id: about.id,
        interface: about.interface.to_owned(),
        luns: device.exports().iter().map(|export| export.id.clone()).collect(),
        frontend: device.frontend().map(frontend_info),
        settings: settings_json(about.settings),
    }
}
