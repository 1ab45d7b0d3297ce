//! `resume`: resumes a stopped disk.

use std::sync::Arc;

use mqblk_admin::model::Resumed;
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use mqblk_engine::{DiskHealth, Resume};

use super::DaemonState;

const PARAMS: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or LUN" },
    Param {
        name: "report",
        kind: ParamKind::Boolean,
        about: "Answer the parked requests with their errors, in place of doing them [false]",
    },
];

pub fn verb(source: &Arc<DaemonState>) -> Verb {
    let source = Arc::clone(source);
    Verb::new("resume", "Has a stopped disk do its parked requests and go on", PARAMS, move |params| {
        let resumed = resume(&source, params)?;
        serde_json::to_value(resumed).map_err(|error| VerbError::Failed(error.to_string()))
    })
}

fn resume(source: &DaemonState, params: &Params) -> Result<Resumed, VerbError> {
    let expected = |source: &DaemonState| format!("one of {}", ids(source).join(", "));
    let Some(id) = params.text("id") else {
        return Err(VerbError::params("params.id", "nothing", expected(source)));
    };
    let Some(health) = find(source, id) else {
        return Err(VerbError::params("params.id", found(&id.into()), expected(source)));
    };
    let report = params.is_set("report");
    let how = if report { Resume::Report } else { Resume::Replay };
    match source.engine.resume(&health, how) {
        Ok(Some(parked)) => Ok(Resumed { id: id.to_owned(), parked, report }),
        Ok(None) => Err(VerbError::Failed(format!("{id:?} is not stopped"))),
        Err(gone) => Err(VerbError::Failed(gone.to_string())),
    }
}

fn find(source: &DaemonState, id: &str) -> Option<Arc<DiskHealth>> {
    let disk = source.disks.iter().find(|disk| disk.info.id == id).map(|disk| Arc::clone(&disk.info.health));
    let device = || {
        source
            .unconfigured_devices()
            .into_iter()
            .find(|device| device.id == id)
            .map(|device| Arc::clone(&device.health))
    };
    let lun = || source.luns.list().into_iter().find(|lun| lun.id == id)?.unit.map(|unit| Arc::clone(unit.health()));
    disk.or_else(device).or_else(lun)
}

/// Returns the ids of everything that can be stopped.
fn ids(source: &DaemonState) -> Vec<String> {
    let disks = source.disks.iter().map(|disk| disk.info.id.clone());
    let luns = source.luns.list().into_iter().map(|lun| lun.id);
    disks.chain(source.unconfigured_devices().iter().map(|device| device.id.clone())).chain(luns).collect()
}
