//! The succession of two devices with one disk: the next one waits for a device that is about to release it.

use mqblk_memory::DomainId;
use mqblk_xen::store::{Xenstore, XenstoreError};
use mqblk_xen::vbd::{self, keys};

use crate::name::DeviceName;
use crate::observe::read_online;

/// Key in a domain's directory: the virtual machine, whose domains at both ends of a migration have the same.
const VM_KEY: &str = "vm";

/// Returns true if the device `holder` of a disk is about to release it to `next`: it is being removed, its domain is
/// gone, or both are of one virtual machine, which migrates within this host. Source: `same_vm` in libxl's hotplug
/// script `block`.
pub(crate) fn is_succeeded(
    store: &mut Xenstore,
    own: DomainId,
    holder: &DeviceName,
    next: &DeviceName,
) -> Result<bool, XenstoreError> {
    let backend = vbd::backend_path(own, &holder.type_name, holder.frontend_id, holder.devid);
    let exists = store.read(&format!("{backend}/{}", keys::STATE))?.is_some();
    if !exists || !read_online(|path| store.read(path), &backend)? {
        return Ok(true);
    }
    if holder.frontend_id == next.frontend_id {
        return Ok(false);
    }
    // A driver domain may not read these directories: there a disk has one domain.
    let mut read = |path: &str| match store.read(path) {
        Err(error) if error.is_lost() => Err(error),
        other => Ok(other.ok()),
    };
    let [holder, next] = [holder, next].map(|device| vbd::domain_path(device.frontend_id));
    if read(&holder)? == Some(None) {
        return Ok(true);
    }
    let vm = read(&format!("{holder}/{VM_KEY}"))?.flatten();
    Ok(vm.is_some() && vm == read(&format!("{next}/{VM_KEY}"))?.flatten())
}
