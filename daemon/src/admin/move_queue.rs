//! `queue.move`: moves a queue to another worker. For tests only: it exists with `MQBLK_TEST_KEYS=1`.

use std::sync::Arc;
use std::time::Duration;

use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use serde_json::{Value, json};

use crate::state::DaemonState;

/// How long the queue's requests in flight may take.
const TIMEOUT: Duration = Duration::from_secs(1);

const PARAMS: &[Param] = &[
    Param { name: "id", kind: ParamKind::Text, about: "The id of the disk or controller" },
    Param { name: "queue", kind: ParamKind::Number, about: "The request queue" },
    Param { name: "worker", kind: ParamKind::Number, about: "The worker" },
];

/// Returns the verb.
pub(super) fn verb(state: &Arc<DaemonState>) -> Verb {
    let state = Arc::clone(state);
    Verb::new("queue.move", "Moves a queue to another worker", PARAMS, move |params| move_queue(&state, params))
}

fn move_queue(state: &DaemonState, params: &Params) -> Result<Value, VerbError> {
    let id = params.text("id").unwrap_or_default();
    let number = |name: &str| {
        let number = params.number(name).and_then(|number| u16::try_from(number).ok());
        number.ok_or_else(|| VerbError::params(format!("params.{name}"), "nothing", "a number"))
    };
    let devices = state.devices();
    let device = devices.iter().find(|device| device.id() == id);
    let device = device.ok_or_else(|| VerbError::params("params.id", found(&id.into()), "the id of a device"))?;
    let moved = device.move_queue(number("queue")?, number("worker")?.into(), TIMEOUT).map_err(VerbError::Failed)?;
    Ok(json!({ "moved": moved }))
}
