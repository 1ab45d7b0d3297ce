//! The tables of controllers and LUNs in a configuration.

use super::{controller_keys, lun_keys};
use crate::interface::ConfigTable;
use crate::{queues, vhost_user};

/// The tables of LUNs, inside those of controllers.
pub(super) const LUN_TABLE: ConfigTable = ConfigTable {
    name: "lun",
    value_name: "KEY=VALUE,...",
    about: "A LUN of a controller; may be repeated",
    keys: &[lun_keys::KEYS],
    has_storage: true,
    inner: &[],
};
pub(super) const CONTROLLER_TABLE: ConfigTable = ConfigTable {
    name: "controller",
    value_name: "KEY=VALUE,...",
    about: "A virtio-scsi controller to serve, with the LUNs of --lun; may be repeated",
    keys: &[controller_keys::KEYS, vhost_user::KEYS, queues::KEYS],
    has_storage: false,
    inner: &[LUN_TABLE],
};
