//! Guest memory tables from vhost-user messages.

use std::fs::File;
use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, MemoryError, Region, SharedFileRules, UserAddress};
use vhost::vhost_user::message::VhostUserMemoryRegion;

/// Maximum number of memory slots (GET_MAX_MEM_SLOTS).
/// QEMU has at most 509 (KVM's limit less three); libblkio and cloud-hypervisor use a few.
pub(crate) const MAX_SLOTS: usize = 512;

fn map_region(description: &VhostUserMemoryRegion, file: &File, rules: SharedFileRules) -> Result<Region, MemoryError> {
    let (guest, user) = (GuestAddress(description.guest_phys_addr), UserAddress(description.user_addr));
    rules.check(file).map_err(|source| MemoryError::Map { guest: guest.0, len: description.memory_size, source })?;
    Region::from_file(file, description.mmap_offset, description.memory_size, guest, user)
}

/// Maps a new table (SET_MEM_TABLE).
pub(crate) fn new_table(
    descriptions: &[VhostUserMemoryRegion],
    files: &[File],
    rules: SharedFileRules,
) -> Result<GuestMemory, MemoryError> {
    let regions: Result<Vec<_>, _> =
        descriptions.iter().zip(files).map(|(one, file)| map_region(one, file, rules).map(Arc::new)).collect();
    GuestMemory::new(regions?)
}

/// Returns `table` with one more region (ADD_MEM_REG).
pub(crate) fn with_region(
    table: &GuestMemory,
    description: &VhostUserMemoryRegion,
    file: &File,
    rules: SharedFileRules,
) -> Result<GuestMemory, MemoryError> {
    table.with_region(map_region(description, file, rules)?)
}

/// Returns `table` without a region (REM_MEM_REG), matched by guest address, user address and size.
pub(crate) fn without_region(
    table: &GuestMemory,
    description: &VhostUserMemoryRegion,
) -> Result<GuestMemory, MemoryError> {
    table.without_region(
        GuestAddress(description.guest_phys_addr),
        UserAddress(description.user_addr),
        description.memory_size,
    )
}
