//! The printed configuration of controllers and LUNs.

use toml::Value;

use super::config::{ControllerConfig, LunConfig, LunOrigin, LunUnit, UnitConfig};
use super::luns::IncomingLimits;
use crate::print::{Pair, Section, backend_pairs, storage_pairs, string};

/// Returns the tables of a controller and its LUNs. LUNs added at run time are in the state file.
pub(super) fn sections(controller: &ControllerConfig) -> Vec<Section> {
    let mut sections = vec![Section { heading: "controller", pairs: controller_pairs(controller) }];
    let luns = controller.luns.iter().filter(|lun| lun.mapped && lun.origin == LunOrigin::Configuration);
    sections.extend(luns.map(|lun| Section { heading: "controller.lun", pairs: lun_pairs(lun) }));
    sections
}

/// Returns a controller's own keys with their values.
pub(super) fn controller_pairs(controller: &ControllerConfig) -> Vec<Pair> {
    let mut pairs = vec![("id", string(&controller.id))];
    pairs.extend(controller.endpoint.pairs());
    pairs.push(("cmd-per-lun", Value::Integer(controller.cmd_per_lun.into())));
    if let Some(IncomingLimits { folder, luns, limit_group }) = &controller.incoming_luns {
        pairs.push(("incoming-luns", string(&folder.to_string_lossy())));
        pairs.push(("incoming-luns-max", Value::Integer((*luns).into())));
        pairs.extend(limit_group.iter().map(|group| ("incoming-limit-group", string(group))));
    }
    pairs
}

/// Returns a LUN's keys with their values.
pub(super) fn lun_pairs(lun: &LunConfig) -> Vec<Pair> {
    let mut pairs = vec![
        ("id", string(&lun.id)),
        ("target", Value::Integer(lun.address.target.into())),
        ("lun", Value::Integer(lun.address.lun.into())),
    ];
    match &lun.unit {
        LunUnit::Own(unit) => pairs.extend(unit_pairs(unit)),
        LunUnit::Shared(unit) => pairs.push(("unit", string(unit))),
    }
    pairs
}

fn unit_pairs(unit: &UnitConfig) -> Vec<Pair> {
    let mut pairs = backend_pairs(&unit.storage);
    pairs.extend(storage_pairs(&unit.storage));
    pairs.extend([
        ("unit-name", string(&unit.unit_name)),
        ("vendor", string(&unit.vendor)),
        ("product", string(&unit.product)),
    ]);
    pairs.extend(unit.reservations.iter().map(|path| ("reservations", string(&path.to_string_lossy()))));
    pairs
}
