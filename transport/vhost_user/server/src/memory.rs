//! The guest's memory table as vhost-user tells it.

use std::fs::File;
use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, MemoryError, Region, UserAddress};
use vhost::vhost_user::message::VhostUserMemoryRegion;

/// Memory slots that we take. QEMU has at most 509 (KVM's limit less three); libblkio and cloud-hypervisor use a few.
pub(crate) const MAX_SLOTS: usize = 512;

fn region(told: &VhostUserMemoryRegion, file: &File) -> Result<Region, MemoryError> {
    let (guest, user) = (GuestAddress(told.guest_phys_addr), UserAddress(told.user_addr));
    Region::of_file(file, told.mmap_offset, told.memory_size, guest, user)
}

/// A whole new table.
pub(crate) fn table(told: &[VhostUserMemoryRegion], files: &[File]) -> Result<GuestMemory, MemoryError> {
    let regions: Result<Vec<_>, _> =
        told.iter().zip(files).map(|(one, file)| region(one, file).map(Arc::new)).collect();
    GuestMemory::new(regions?)
}

/// `table` and one more region.
pub(crate) fn with(table: &GuestMemory, told: &VhostUserMemoryRegion, file: &File) -> Result<GuestMemory, MemoryError> {
    table.with(region(told, file)?)
}

/// `table` without a region: matched by guest address, user address and size.
pub(crate) fn without(table: &GuestMemory, told: &VhostUserMemoryRegion) -> Result<GuestMemory, MemoryError> {
    table.without(GuestAddress(told.guest_phys_addr), UserAddress(told.user_addr), told.memory_size)
}
