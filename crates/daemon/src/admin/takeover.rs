//! `takeover`: another process takes over all devices of this one.

use std::sync::Arc;

use mqblk_admin::{Param, ParamKind, Verb};
use serde_json::json;

use crate::state::DaemonState;
use crate::takeover;

const PARAMS: &[Param] = &[
    Param { name: "protocol", kind: ParamKind::Number, about: "The version of the takeover that the successor has" },
    Param { name: "version", kind: ParamKind::Text, about: "The version of the successor, for messages" },
];

pub(super) fn verb(state: &Arc<DaemonState>) -> Verb {
    let state = Arc::clone(state);
    let about = "Hands all devices and their connections over to the caller, which is mqblk serve --takeover";
    Verb::with_caller(takeover::VERB, about, PARAMS, move |params, caller| {
        let version = params.text("version").unwrap_or("of an unknown version");
        takeover::start(&state, params.number("protocol"), version, caller)?;
        Ok(json!({ "version": env!("CARGO_PKG_VERSION"), "pid": std::process::id() }))
    })
}
