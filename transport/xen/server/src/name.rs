//! What a device is called.

use std::fmt;

use mqblk_memory::DomainId;
use mqblk_xen::vbd;

/// A device: where it is in xenstore. As text `TYPE-DOMAIN-NUMBER`, as Linux calls it under `/sys/bus/xen-backend`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    /// The type of its backend.
    pub type_name: String,
    /// The domain that has its frontend.
    pub front: DomainId,
    /// Its number.
    pub devid: u32,
}

impl DeviceName {
    /// What the guest calls it, as far as that is known.
    pub fn vdev(&self) -> String {
        vbd::vdev_name(self.devid).unwrap_or_else(|| self.devid.to_string())
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.type_name, self.front.0, self.devid)
    }
}
