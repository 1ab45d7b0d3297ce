//! `disk.list`, `disk.add`, `disk.remove` and `disk.retry`: disks and LUNs at run time, of all interfaces that support
//! it.

use std::sync::Arc;

use mqblk_admin::model::{DiskAdded, DiskList, DiskRemoved, DiskRetried, FrontendInfo, ListedDisk, StillOut};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError};
use mqblk_vhost_user_server::Frontend;
use serde_json::Value;

use super::conversion::{change_error, response, take_settings};
use crate::change::ChangeSource;
use crate::interface::{Export, ServedDevice};
use crate::out::open_all;
use crate::report::{health, nanoseconds, out};
use crate::state::DaemonState;

const ADD: &[Param] = &[Param {
    name: "settings",
    kind: ParamKind::Settings,
    about: "The keys of --disk, or with controller=ID those of --lun, as an object or as KEY=VALUE,...",
}];

const REMOVE: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or LUN" },
    Param { name: "force", kind: ParamKind::Boolean, about: "Also while a guest is connected, which loses it [false]" },
];

const RETRY: &[Param] =
    &[Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or LUN; all that are out [all]" }];

pub(super) fn verbs(state: &Arc<DaemonState>) -> [Verb; 4] {
    let (listing, adding, removing) = (Arc::clone(state), Arc::clone(state), Arc::clone(state));
    let retrying = Arc::clone(state);
    [
        Verb::new("disk.retry", "Tries now to serve a disk or LUN that is out", RETRY, move |params| {
            retry(&retrying, params)
        }),
        Verb::new("disk.list", "The disks and LUNs, and who uses them", &[], move |_| response(list(&listing))),
        Verb::new("disk.add", "Serves one more disk, or adds a LUN to a controller", ADD, move |params| {
            add(&adding, params)
        }),
        Verb::new(
            "disk.remove",
            "Takes a disk or LUN away, when its requests have ended, and closes its storage",
            REMOVE,
            move |params| remove(&removing, params),
        ),
    ]
}

fn add(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let id =
        state.add_disk(take_settings(params)?, ChangeSource::RunTime).map_err(|error| change_error(error, params))?;
    let survives_restart = state.keeps_changes();
    response(DiskAdded { id, survives_restart })
}

fn remove(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let Some(id) = params.text("id") else {
        return Err(VerbError::params("params.id", "nothing", "the id of a disk or LUN"));
    };
    state
        .remove_disk(id, params.is_set("force"), ChangeSource::RunTime)
        .map_err(|error| change_error(error, params))?;
    response(DiskRemoved { id: id.to_owned() })
}

fn list(state: &DaemonState) -> DiskList {
    let devices = state.devices();
    let of_device = |device: &Arc<dyn ServedDevice>| {
        let exports = device.exports();
        exports.iter().map(|export| listed(device.as_ref(), export)).collect::<Vec<_>>()
    };
    DiskList { disks: devices.iter().flat_map(of_device).collect(), out: out(state.out()) }
}

fn retry(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let ids = match params.text("id") {
        Some(id) => vec![id.to_owned()],
        None => state.out().list().into_iter().map(|disk| disk.id).collect(),
    };
    let mut result = DiskRetried::default();
    for (tried, id) in open_all(ids, |id| (state.retry_disk(&id), id)) {
        match tried {
            Ok(()) => result.served.push(id),
            Err(error) if params.text("id").is_some() => return Err(change_error(error, params)),
            Err(error) => result.out.push(StillOut { id, why: error.to_string() }),
        }
    }
    response(result)
}

/// Converts a connected frontend.
pub(super) fn frontend_info(frontend: Frontend) -> FrontendInfo {
    FrontendInfo {
        pid: frontend.pid,
        connected_ns: nanoseconds(frontend.connected),
        features: frontend.features,
        queues: frontend.queues as u32,
    }
}

fn listed(device: &dyn ServedDevice, export: &Export) -> ListedDisk {
    let about = device.describe();
    let frontend = device.frontend().map(frontend_info);
    let geometry = export.geometry();
    ListedDisk {
        id: export.id.clone(),
        controller: about.storage.is_none().then(|| about.id.clone()),
        interface: about.interface.to_owned(),
        storage: export.storage.clone().or(about.storage),
        size_bytes: geometry.map(|geometry| geometry.size.0),
        block_bytes: geometry.map(|geometry| geometry.logical_block.bytes()),
        read_only: geometry.map(|geometry| geometry.read_only),
        health: export.health.as_deref().map(health),
        frontend,
    }
}
