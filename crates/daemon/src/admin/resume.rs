//! `resume`: resumes a stopped disk.

use std::sync::Arc;

use mqblk_admin::model::Resumed;
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use mqblk_engine::Resume;

use super::conversion::response;
use crate::state::DaemonState;

const PARAMS: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or LUN" },
    Param {
        name: "report",
        kind: ParamKind::Boolean,
        about: "Complete the parked requests with their errors instead [false]",
    },
];

pub(super) fn verb(state: &Arc<DaemonState>) -> Verb {
    let state = Arc::clone(state);
    Verb::new("resume", "Resumes a stopped disk: submits its parked requests", PARAMS, move |params| {
        let resumed = resume(&state, params)?;
        response(resumed)
    })
}

fn resume(state: &DaemonState, params: &Params) -> Result<Resumed, VerbError> {
    let exports = state.exports();
    let expected =
        || format!("one of {}", exports.iter().map(|export| export.id.as_str()).collect::<Vec<_>>().join(", "));
    let Some(id) = params.text("id") else {
        return Err(VerbError::params("params.id", "nothing", expected()));
    };
    let health = exports.iter().find(|export| export.id == id).and_then(|export| export.health.clone());
    let Some(health) = health else {
        return Err(VerbError::params("params.id", found(&id.into()), expected()));
    };
    let report = params.is_set("report");
    let how = if report { Resume::Report } else { Resume::Replay };
    match state.engine().resume(&health, how) {
        Ok(Some(parked)) => Ok(Resumed { id: id.to_owned(), parked, report }),
        Ok(None) => Err(VerbError::Failed(format!("{id:?} is not stopped"))),
        Err(gone) => Err(VerbError::Failed(gone.to_string())),
    }
}
