//! `resize`: resizes a disk, a LUN or a Xen device.

use std::sync::Arc;

use mqblk_admin::model::ResizeResult;
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError};
use mqblk_core::settings::{EXPECTED_SIZE, parse_size};
use mqblk_core::{ByteLen, Resize};
use serde_json::Value;

use super::conversion::{change_error, response};
use crate::state::DaemonState;

/// Shared with `lun.resize`.
pub const SIZE: Param = Param {
    name: "size",
    kind: ParamKind::Size,
    about: "The size in bytes, or with a unit: \"10G\" [the present size of its storage]",
};
/// Shared with `lun.resize`.
pub const SHRINK: Param = Param {
    name: "shrink",
    kind: ParamKind::Boolean,
    about: "It may become smaller; data beyond the new end is lost [false]",
};

const PARAMS: &[Param] =
    &[Param { name: "id", kind: ParamKind::Text, about: "The id of the disk, LUN or Xen device" }, SIZE, SHRINK];

/// Returns the verb.
pub fn verb(state: &Arc<DaemonState>) -> Verb {
    let state = Arc::clone(state);
    Verb::new("resize", "Resizes a disk or LUN and notifies its guests", PARAMS, move |params| {
        let Some(id) = params.text("id") else {
            return Err(VerbError::params("params.id", "nothing", "the id of a disk, a LUN or a Xen device"));
        };
        let changed = state.resize(id, take_resize(params)?).map_err(|error| change_error(error, params))?;
        let result = ResizeResult {
            id: id.to_owned(),
            before_bytes: changed.resized.before.0,
            size_bytes: changed.resized.size.0,
            guest: changed.guest.word().to_owned(),
        };
        response(result)
    })
}

/// Takes `size` and `shrink`.
///
/// # Errors
/// If `size` is not a size.
pub fn take_resize(params: &Params) -> Result<Resize, VerbError> {
    let size = match params.value("size") {
        Some(Value::String(text)) => {
            let size = parse_size(text).filter(|size| size.0 <= i64::MAX as u64);
            Some(size.ok_or_else(|| VerbError::params("params.size", format!("{text:?}"), EXPECTED_SIZE))?)
        }
        Some(value) => value.as_u64().map(ByteLen),
        None => None,
    };
    Ok(Resize { size, shrink: params.is_set("shrink") })
}
