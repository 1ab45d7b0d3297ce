//! Guest interfaces. An interface is a folder here and a line in [`TABLE`]: its options, its targets, the servers that
//! are started for it, and the driver that loads it. Outside the folder only [`InterfaceOptions`], the command line and
//! the defaults of experiments name it.

mod definition;
mod queue_set;
mod vhost_user;
mod virtio_blk;
mod virtio_scsi;
mod xen;

use crate::BenchError;

pub(crate) use definition::{Interface, InterfaceDefinition, InterfaceOptions};
pub(crate) use virtio_scsi::VirtioScsi;
pub(crate) use xen::XenOptions;

/// All guest interfaces. The first is the default of `--interface`.
pub(crate) static TABLE: [InterfaceDefinition; 3] = [virtio_blk::DEFINITION, virtio_scsi::DEFINITION, xen::DEFINITION];

/// Returns the keys of a disk that the benchmark sets, of all interfaces.
pub(crate) fn address_keys() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|one| one.address_keys).copied()
}

/// Returns the options that name running targets: `--socket, --vdev`.
pub(crate) fn running_options() -> String {
    let mut names: Vec<&str> = TABLE.iter().filter_map(|one| one.running.split(' ').next()).collect();
    names.dedup();
    names.join(", ")
}

/// Checks that no option of another interface than `definition` was given.
///
/// # Errors
/// [`BenchError::Usage`].
pub(crate) fn check_others(definition: &InterfaceDefinition, options: &InterfaceOptions<'_>) -> Result<(), BenchError> {
    for other in TABLE.iter().filter(|one| one.name != definition.name) {
        if let Some(option) = (other.of)(options).given().first() {
            let expected = format!("--interface {} with it", other.name);
            return Err(BenchError::option(option, definition.name, expected));
        }
    }
    Ok(())
}
