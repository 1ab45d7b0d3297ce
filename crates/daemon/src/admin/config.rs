//! `config.diff` and `config.apply`: compare the daemon's configuration with a file, and apply the differences.

use std::path::Path;
use std::sync::Arc;

use mqblk_admin::model::{ConfigDifference, ConfigDifferences};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError};
use serde_json::Value;

use super::conversion::{response, setting_error};
use crate::state::{AppliedChange, DaemonState};

const PARAMS: &[Param] = &[Param {
    name: "file",
    kind: ParamKind::Text,
    about: "The absolute path of a configuration file [the one that the daemon was started with]",
}];

/// Returns the verbs, if the daemon can read a configuration again.
pub(super) fn verbs(state: &Arc<DaemonState>) -> Vec<Verb> {
    if !state.reads_config() {
        return Vec::new();
    }
    let (diff, apply) = (Arc::clone(state), Arc::clone(state));
    vec![
        Verb::new("config.diff", "Shows the differences between a file and the daemon", PARAMS, move |params| {
            call(&diff, params, false)
        }),
        Verb::new(
            "config.apply",
            "Applies the differences of a configuration file, as far as they can change now",
            PARAMS,
            move |params| call(&apply, params, true),
        ),
    ]
}

fn call(state: &DaemonState, params: &Params, apply: bool) -> Result<Value, VerbError> {
    let changes = state.apply_config(params.text("file").map(Path::new), apply);
    let changes = changes.map_err(|error| setting_error(error, params))?;
    let differences = changes.into_iter().map(|AppliedChange { change, result }| ConfigDifference {
        what: change.to_string(),
        can_apply: change.can_apply(),
        applied: result == Some(Ok(())),
        error: result.and_then(Result::err),
    });
    let differences = ConfigDifferences { changes: differences.collect() };
    response(differences)
}
