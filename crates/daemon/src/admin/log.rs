//! `log`: the level of the log, which can be changed.

use std::sync::Arc;

use mqblk_admin::{Param, ParamKind, Verb};
use serde_json::json;

use super::conversion::setting_error;
use crate::state::DaemonState;

const PARAMS: &[Param] = &[Param {
    name: "level",
    kind: ParamKind::Text,
    about: "off, error, warn, info, debug or trace, or TARGET=LEVEL,... [leave it as it is]",
}];

/// Returns the verb, if the level can be changed.
pub(super) fn verb(state: &Arc<DaemonState>) -> Option<Verb> {
    state.log()?;
    let state = Arc::clone(state);
    Some(Verb::new("log", "The level of the log; changes it", PARAMS, move |params| {
        // Checked above.
        let Some(log) = state.log() else { return Ok(json!({})) };
        let before = log.get();
        if let Some(level) = params.text("level") {
            log.set(level).map_err(|error| setting_error(error, params))?;
            tracing::info!(before, level, "the level of the log is changed");
        }
        Ok(json!({ "level": log.get(), "before": before }))
    }))
}
