//! Guest memory tables from vhost-user messages.

use std::fs::File;
use std::sync::Arc;

use mqblk_core::{ByteLen, GuestMemoryCharge, TenantBudget};
use mqblk_memory::{GuestAddress, GuestMemory, MemoryError, Region, SharedFileRules, UserAddress};
use vhost::vhost_user::message::VhostUserMemoryRegion;

/// Maximum number of memory slots (GET_MAX_MEM_SLOTS).
/// QEMU has at most 509 (KVM's limit less three); libblkio and cloud-hypervisor use a few.
pub(crate) const MAX_SLOTS: usize = 512;

/// Rules for files that a frontend shares, and their limits.
#[derive(Clone, Debug, Default)]
pub struct SharePolicy {
    /// Rules for the files.
    pub files: SharedFileRules,
    /// Limits of mappings and bytes.
    pub budget: Arc<TenantBudget>,
}

/// A memory table, its charge, and the files behind it.
pub(crate) struct ChargedMemory {
    pub(crate) table: GuestMemory,
    pub(crate) charge: GuestMemoryCharge,
    pub(crate) files: Vec<SharedFile>,
}

/// A slot of a memory table and its shared file, from which another process maps it.
#[derive(Clone)]
pub(crate) struct SharedFile {
    pub(crate) slot: VhostUserMemoryRegion,
    pub(crate) file: Arc<File>,
}

impl SharePolicy {
    /// Maps a region of a file that a frontend shares.
    ///
    /// # Errors
    /// When the rules or the budget refuse it, or it cannot be mapped.
    pub(crate) fn map(
        &self,
        file: &File,
        offset: u64,
        len: u64,
        (guest, user): (GuestAddress, UserAddress),
    ) -> Result<Region, MemoryError> {
        self.files.check(file).map_err(|source| MemoryError::Map { guest: guest.0, len, source })?;
        let charge = self.budget.charge_mapping(ByteLen(len))?;
        Region::from_file(file, offset, len, guest, user).map(|region| region.with_charge(charge))
    }

    fn map_slot(&self, slot: &VhostUserMemoryRegion, file: &File) -> Result<Region, MemoryError> {
        let at = (GuestAddress(slot.guest_phys_addr), UserAddress(slot.user_addr));
        self.map(file, slot.mmap_offset, slot.memory_size, at)
    }

    /// Maps a new table (SET_MEM_TABLE).
    ///
    /// # Errors
    /// As [`map`](Self::map), or when regions overlap.
    pub(crate) fn new_table(&self, files: Vec<SharedFile>) -> Result<ChargedMemory, MemoryError> {
        let bytes = files.iter().fold(0, |sum: u64, shared| sum.saturating_add(shared.slot.memory_size));
        let charge = self.budget.charge_guest_memory(ByteLen(bytes))?;
        let regions: Result<Vec<_>, _> =
            files.iter().map(|shared| self.map_slot(&shared.slot, &shared.file).map(Arc::new)).collect();
        Ok(ChargedMemory { table: GuestMemory::new(regions?)?, charge, files })
    }

    /// Returns `table` with one more region (ADD_MEM_REG).
    ///
    /// # Errors
    /// As [`new_table`](Self::new_table).
    pub(crate) fn with_region(
        &self,
        table: &GuestMemory,
        files: &[SharedFile],
        added: SharedFile,
    ) -> Result<ChargedMemory, MemoryError> {
        let bytes = table.bytes().saturating_add(added.slot.memory_size);
        let charge = self.budget.charge_guest_memory(ByteLen(bytes))?;
        let table = table.with_region(self.map_slot(&added.slot, &added.file)?)?;
        Ok(ChargedMemory { table, charge, files: files.iter().cloned().chain([added]).collect() })
    }

    /// Returns `table` without a region (REM_MEM_REG), matched by guest address, user address and size.
    ///
    /// # Errors
    /// When there is no such region.
    pub(crate) fn without_region(
        &self,
        table: &GuestMemory,
        files: &[SharedFile],
        slot: &VhostUserMemoryRegion,
    ) -> Result<ChargedMemory, MemoryError> {
        let (guest, user) = (GuestAddress(slot.guest_phys_addr), UserAddress(slot.user_addr));
        let table = table.without_region(guest, user, slot.memory_size)?;
        let key = |slot: &VhostUserMemoryRegion| (slot.guest_phys_addr, slot.user_addr, slot.memory_size);
        let files = files.iter().filter(|shared| key(&shared.slot) != key(slot)).cloned().collect();
        Ok(ChargedMemory { charge: self.budget.charge_guest_memory(ByteLen(table.bytes()))?, table, files })
    }
}
