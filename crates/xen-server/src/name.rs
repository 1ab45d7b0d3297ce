//! Names of devices.

use std::fmt;

use mqblk_memory::DomainId;
use mqblk_xen::vbd;

/// Identifies a device in xenstore. Displayed as `TYPE-DOMAIN-NUMBER`, as under Linux's `/sys/bus/xen-backend`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    /// Type of the backend.
    pub type_name: String,
    /// Domain of the frontend.
    pub frontend_id: DomainId,
    /// Device number.
    pub devid: u32,
}

impl DeviceName {
    /// Returns the guest's device name, or the number if it has no name.
    pub fn vdev(&self) -> String {
        vbd::vdev_name(self.devid).unwrap_or_else(|| self.devid.to_string())
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.type_name, self.frontend_id.0, self.devid)
    }
}
