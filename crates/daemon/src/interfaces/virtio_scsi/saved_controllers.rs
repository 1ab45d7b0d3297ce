//! Applies the state file to the configuration's controllers: removals and additions.
//!
//! The configuration has priority, as for LUNs.

use mqblk_core::settings::SettingError;

use super::controller_keys::ControllerKeys;
use super::lun_keys::RawLun;
use super::state::{AddedController, SavedLuns};
use crate::interface::ResolveContext;

/// Removes the controllers that were removed, with their LUNs, and adds those that were added. Drops entries of `saved`
/// that do not fit the configuration.
pub(super) fn apply(
    saved: &mut SavedLuns,
    controllers: &mut Vec<ControllerKeys>,
    luns: &mut Vec<RawLun>,
    context: &mut ResolveContext<'_>,
) {
    saved.removed_controllers.retain(|id| {
        let Some(at) = controllers.iter().position(|controller| controller.id() == id) else { return false };
        let own = |lun: &RawLun| lun.controller == Some(at) || lun.settings.peek("controller") == Some(id);
        if luns.iter().any(|lun| !own(lun) && shares_a_unit_of(lun, id, &luns[..], &own)) {
            tracing::warn!(
                "controller {id:?}: a LUN of another controller shares a unit of it now: it is served again"
            );
            return false;
        }
        luns.retain(|lun| !own(lun));
        for lun in luns.iter_mut() {
            lun.controller = lun.controller.map(|number| if number > at { number - 1 } else { number });
        }
        let removed = controllers.remove(at);
        removed.claims().iter().for_each(|claim| context.names.release(claim));
        true
    });
    saved.controllers.retain(|controller| match take(controller, context) {
        Ok(keys) => {
            controllers.push(keys);
            true
        }
        Err(error) => {
            tracing::warn!("{error}; the configuration has priority: the controller is dropped from the state file");
            false
        }
    });
}

/// Returns true if a LUN shares the unit of one of the controller `id`, whose LUNs are `own`.
fn shares_a_unit_of(lun: &RawLun, id: &str, luns: &[RawLun], own: &dyn Fn(&RawLun) -> bool) -> bool {
    let Some(unit) = lun.settings.peek("unit") else { return false };
    let named = luns.iter().filter(|lun| own(lun)).any(|lun| lun.settings.peek("id") == Some(unit));
    named || unit.strip_prefix(id).is_some_and(|rest| rest.starts_with(':'))
}

fn take(controller: &AddedController, context: &mut ResolveContext<'_>) -> Result<ControllerKeys, SettingError> {
    let settings = controller.to_settings()?;
    let owner = settings.subject().to_owned();
    let (cpus, kinds, given) = (context.cpus, context.kinds, context.given);
    context.names.attempt(|names| {
        let mut attempt = ResolveContext { cpus, kinds, names, saved: None, given };
        Ok(ControllerKeys::take(settings, &mut attempt, owner)?.added())
    })
}

/// Logs the reason why a controller of the state file is not served.
pub(super) fn not_served(error: &dyn std::error::Error) {
    tracing::error!("not served: {error}; the state file keeps it for the next start");
}
