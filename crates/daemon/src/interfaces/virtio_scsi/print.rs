//! The printed configuration of controllers and LUNs.

use super::config::{ControllerConfig, LunOrigin};
use super::controller_keys::controller_pairs;
use super::lun_keys::lun_pairs;
use crate::pair::Section;

/// Returns the tables of a controller and its LUNs. LUNs added at run time are in the state file.
pub(super) fn sections(controller: &ControllerConfig) -> Vec<Section> {
    let mut sections = vec![Section { heading: "controller", pairs: controller_pairs(controller) }];
    let luns = controller.luns.iter().filter(|lun| lun.mapped && lun.origin == LunOrigin::Configuration);
    sections.extend(luns.map(|lun| Section { heading: "controller.lun", pairs: lun_pairs(lun) }));
    sections
}
