//! `lun.add`, `lun.remove`, `lun.resize` and `lun.list`: LUNs at run time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mqblk_admin::model::{Lun, LunChange, LunList};
use mqblk_admin::{Param, ParamKind, Params, Verb, VerbError, found};
use mqblk_engine::Engine;
use serde_json::{Map, Value};

use super::config::{LunConfig, LunUnit, TargetLun};
use super::luns::{LunEntry, LunSelector, Luns, Removal};
use super::{lun_keys, stat};
use crate::admin::resize::{SHRINK, SIZE, take_resize};
use crate::admin::{change_error, response, setting_error, take_settings};
use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::report::settings_json;
use crate::storage::StorageLimits;

/// Longest wait of `lun.remove` before it responds that the removal continues. Clients wait longer for a response.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Highest LUN of a target.
const MAX_LUN: u16 = 16_383;

const CONTROLLER: Param = Param { name: "controller", kind: ParamKind::Text, about: "The id of its controller" };
const ID: Param = Param { name: "id", kind: ParamKind::Text, about: "Its id; or controller, target and lun" };
const TARGET: Param = Param { name: "target", kind: ParamKind::Number, about: "Its target, 0 to 255" };
const LUN: Param = Param { name: "lun", kind: ParamKind::Number, about: "Its LUN, 0 to 16383 [0]" };

const ADD: &[Param] = &[
    Param { name: "settings", kind: ParamKind::Settings, about: "The keys of --lun, as an object or as KEY=VALUE,..." },
    CONTROLLER,
    Param { name: "target", kind: ParamKind::Number, about: "Its target, 0 to 255 [the first that has no LUN]" },
    LUN,
];
const REMOVE: &[Param] = &[ID, CONTROLLER, TARGET, LUN];
const RESIZE: &[Param] = &[ID, CONTROLLER, TARGET, LUN, SIZE, SHRINK];
const LIST: &[Param] =
    &[Param { name: "controller", kind: ParamKind::Text, about: "Only those of the controller of this id [all]" }];

pub(super) fn verbs(luns: &Arc<Luns>, engine: &Arc<Engine>) -> Vec<Verb> {
    let with = || Arc::clone(luns);
    let (adding, removing, resizing, listing) = (with(), with(), with(), with());
    let engine = Arc::clone(engine);
    vec![
        Verb::new("lun.add", "Adds a LUN to a controller and notifies its guest", ADD, move |params| {
            add(&adding, params)
        }),
        Verb::new(
            "lun.remove",
            "Removes a LUN when its requests have ended, and notifies its guest",
            REMOVE,
            move |params| remove(&removing, &engine, params),
        ),
        Verb::new("lun.resize", "Resizes a LUN and notifies its guests", RESIZE, move |params| {
            resize(&resizing, params)
        }),
        Verb::new("lun.list", "The LUNs and their settings", LIST, move |params| list(&listing, params)),
    ]
}

fn add(luns: &Arc<Luns>, params: &Params) -> Result<Value, VerbError> {
    let mut settings = take_settings(params)?;
    let own_params = [
        ("controller", params.text("controller").map(str::to_owned)),
        ("target", params.number("target").map(|number| number.to_string())),
        ("lun", params.number("lun").map(|number| number.to_string())),
    ];
    for (key, value) in own_params {
        if let Some(value) = value {
            settings.insert(key, &value).map_err(|error| setting_error(error, params))?;
        }
    }
    let lun = luns.add(settings, ChangeSource::RunTime).map_err(|error| change_error(error, params))?;
    luns.forget_earlier(&lun.id);
    response(LunChange { lun: lun_model(luns, &lun) })
}

fn remove(luns: &Arc<Luns>, engine: &Engine, params: &Params) -> Result<Value, VerbError> {
    let removed = remove_lun(luns, engine, &take_selector(params)?, ChangeSource::RunTime);
    let removed = removed.map_err(|error| change_error(error, params))?;
    let lun = Lun { state: "removed".to_owned(), ..lun_model(luns, &removed) };
    response(LunChange { lun })
}

/// Removes a LUN, and waits for at most [`REMOVAL_TIMEOUT`].
///
/// # Errors
/// If there is no such LUN, its storage could not be flushed, or the removal takes longer, in which case it continues.
pub(super) fn remove_lun(
    luns: &Arc<Luns>,
    engine: &Engine,
    which: &LunSelector,
    source: ChangeSource,
) -> Result<LunEntry, ChangeError> {
    match luns.remove(which, REMOVAL_TIMEOUT, source)? {
        Removal::Done(lun) => Ok(lun),
        Removal::Pending(lun, progress) => {
            let reason = if progress.flushing.load(Ordering::Relaxed) {
                "is still being flushed".to_owned()
            } else {
                format!("has not completed {}", pending_requests(engine, &lun))
            };
            Err(ChangeError::Failed(format!(
                "lun {:?}: guests no longer see it, but its storage {reason}; the removal continues, and lun.list shows the state \
                 removing until it is done",
                lun.id,
            )))
        }
    }
}

fn resize(luns: &Arc<Luns>, params: &Params) -> Result<Value, VerbError> {
    let request = take_resize(params)?;
    let (lun, _) = luns.resize(&take_selector(params)?, request).map_err(|error| change_error(error, params))?;
    response(LunChange { lun: lun_model(luns, &lun) })
}

fn list(luns: &Arc<Luns>, params: &Params) -> Result<Value, VerbError> {
    let wanted = match params.text("controller") {
        None => None,
        Some(id) => Some(luns.controller(id).map_err(|error| setting_error(error, params))?.number()),
    };
    let all = luns.list();
    let all = all.iter().filter(|lun| wanted.is_none_or(|wanted| lun.controller.number() == wanted));
    response(LunList { luns: all.map(|lun| lun_model(luns, lun)).collect() })
}

/// Describes the number of requests that a removal waits for, as far as it is known.
fn pending_requests(engine: &Engine, lun: &LunEntry) -> String {
    let workers = engine.stats().ok();
    let queues = workers.and_then(|workers| lun.controller.stats(&workers));
    match queues.map(|queues| stat::in_flight(lun, &queues)) {
        Some(1) => "a request".to_owned(),
        Some(count @ 2..) => format!("{count} requests"),
        Some(0) | None => "all requests".to_owned(),
    }
}

/// Takes `id`, or `controller`, `target` and `lun`.
fn take_selector(params: &Params) -> Result<LunSelector, VerbError> {
    let (id, controller, target, lun) =
        (params.text("id"), params.text("controller"), params.number("target"), params.number("lun"));
    if let Some(id) = id {
        return match (controller, target, lun) {
            (None, None, None) => Ok(LunSelector::Id(id.to_owned())),
            _ => {
                Err(VerbError::params("params.id", format!("{}, and a place too", found(&id.into())), "one of the two"))
            }
        };
    }
    let Some(controller) = controller else {
        return Err(VerbError::params("params.id", "nothing", "the id of a LUN, or its controller and target"));
    };
    let missing = || VerbError::params("params.target", "nothing", "the target of the LUN");
    let target = in_range("target", target.ok_or_else(missing)?, u8::MAX.into())? as u8;
    let lun = in_range("lun", lun.unwrap_or(0), MAX_LUN)?;
    Ok(LunSelector::Address(controller.to_owned(), TargetLun { target, lun }))
}

fn in_range(name: &str, number: u64, max: u16) -> Result<u16, VerbError> {
    let expected = || format!("a whole number from 0 to {max}");
    let valid = u16::try_from(number).ok().filter(|number| *number <= max);
    valid.ok_or_else(|| VerbError::params(format!("params.{name}"), format!("the number {number}"), expected()))
}

/// Returns a LUN in the form of the admin socket.
fn lun_model(luns: &Luns, lun: &LunEntry) -> Lun {
    let geometry = lun.unit.as_ref().map(|unit| unit.disk().geometry());
    Lun {
        id: lun.id.clone(),
        controller: lun.controller.id().to_owned(),
        target: lun.address.target.into(),
        lun: lun.address.lun.into(),
        state: lun.state.word().to_owned(),
        unit: lun.unit.as_ref().map(|unit| unit.name().to_owned()),
        storage: lun.unit.as_ref().map(|unit| unit.config().storage.kind.clone()),
        size_bytes: geometry.map(|geometry| geometry.size.0),
        block_bytes: geometry.map(|geometry| geometry.logical_block.bytes()),
        read_only: geometry.map(|geometry| geometry.read_only),
        origin: lun.origin.word().to_owned(),
        survives_restart: luns.survives_restart(lun),
        settings: settings(lun).unwrap_or_default(),
    }
}

/// Returns a LUN's settings as in the configuration file, with the current values of those of its storage backend.
fn settings(lun: &LunEntry) -> Option<Map<String, Value>> {
    let unit = lun.unit.as_ref()?;
    let unit = if unit.name() == lun.id {
        let mut own = unit.config().clone();
        own.storage.resolved_settings = unit.disk().resolved();
        own.storage.plug = unit.plug();
        let limits = unit.health().limits();
        own.storage.limits = StorageLimits { own: limits.own(), group: limits.group() };
        LunUnit::Own(Box::new(own))
    } else {
        LunUnit::Shared(unit.name().to_owned())
    };
    let config = LunConfig { id: lun.id.clone(), address: lun.address, unit, origin: lun.origin, mapped: true };
    Some(settings_json(lun_keys::lun_pairs(&config)))
}
