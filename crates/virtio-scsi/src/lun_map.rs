//! Map from LUNs to logical units. Control threads change it; each queue reads a copy.

use std::fmt;
use std::sync::Arc;

use mqblk_core::DiskSlot;
use mqblk_scsi::{Nexus, TransferRules};
use serde::{Deserialize, Serialize};

/// Address of a logical unit on its controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LunAddress {
    /// Target number.
    pub target: u8,
    /// Logical unit number, below 16384.
    pub lun: u16,
}

impl fmt::Display for LunAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

/// The address already has a logical unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("target and lun: found {0}, where a unit is already, expected a free address")]
pub struct LunInUse(pub LunAddress);

/// Decoded `lun` field. Source: virtio 1.3 section 5.6.6.1, "Device Operation: Request Queues".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LunField {
    /// A valid LUN.
    Lun(LunAddress),
    /// A LUN of this target that no logical unit can have.
    InvalidLun(u8),
    /// No target.
    NoTarget,
}

impl LunField {
    /// Decodes the 8 bytes of a `lun` field: 1, target, single-level LUN, zeroes.
    #[inline]
    pub(crate) fn decode(field: [u8; 8]) -> LunField {
        let word = u64::from_le_bytes(field);
        let [first, target, high, low, ..] = field;
        if first != 1 {
            return LunField::NoTarget;
        }
        match high {
            // A second level, which is not supported.
            _ if word >> 32 != 0 => LunField::InvalidLun(target),
            // Peripheral device addressing on bus 0 (SAM-5 section 4.7.7.2).
            0 => LunField::Lun(LunAddress { target, lun: low.into() }),
            // Flat space addressing (section 4.7.7.3).
            0x40..=0x7f => LunField::Lun(LunAddress { target, lun: u16::from_be_bytes([high & 0x3f, low]) }),
            _ => LunField::InvalidLun(target),
        }
    }
}

impl LunAddress {
    /// Encodes the 8 bytes of a `lun` field, as drivers write it.
    pub fn encode(self) -> [u8; 8] {
        let [high, low] = self.lun.to_be_bytes();
        [1, self.target, high | 0x40, low, 0, 0, 0, 0]
    }
}

/// A logical unit at its address.
#[derive(Clone, Debug)]
pub(crate) struct MappedUnit {
    /// Its address.
    pub address: LunAddress,
    /// Engine slot of its disk.
    pub slot: DiskSlot,
    /// This controller's nexus.
    pub nexus: Arc<Nexus>,
}

/// Logical units of one target.
#[derive(Clone, Debug, Default)]
pub(crate) struct TargetUnits {
    /// Their LUNs, in ascending order.
    pub luns: Vec<u16>,
    units: Vec<MappedUnit>,
}

impl TargetUnits {
    /// Returns the logical unit at a LUN.
    #[inline]
    pub(crate) fn unit(&self, lun: u16) -> Option<&MappedUnit> {
        match self.luns.as_slice() {
            [only] if *only == lun => self.units.first(),
            luns => self.units.get(luns.binary_search(&lun).ok()?),
        }
    }
}

/// All logical units of a controller.
#[derive(Clone, Debug, Default)]
pub(crate) struct LunMap {
    /// Number of changes: a copy with an older number must be refreshed.
    pub generation: u64,
    /// By target number; shorter than 256 if high targets have no logical unit.
    targets: Vec<TargetUnits>,
}

impl LunMap {
    /// Returns a target that has logical units.
    #[inline]
    pub(crate) fn target(&self, target: u8) -> Option<&TargetUnits> {
        self.targets.get(usize::from(target)).filter(|target| !target.luns.is_empty())
    }

    /// Returns target, slot and transfer rules of the logical unit of a `lun` field, as a little-endian number.
    #[inline]
    pub(crate) fn transfer_rules(&self, field: u64) -> Option<(u8, DiskSlot, TransferRules)> {
        let LunField::Lun(LunAddress { target, lun }) = LunField::decode(field.to_le_bytes()) else { return None };
        let unit = self.target(target)?.unit(lun)?;
        Some((target, unit.slot, unit.nexus.transfer_rules()))
    }

    /// Returns all logical units, ordered by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &MappedUnit> {
        self.targets.iter().flat_map(|target| &target.units)
    }

    /// Adds a logical unit.
    ///
    /// # Errors
    /// If its address has one.
    pub(crate) fn insert(&mut self, unit: MappedUnit) -> Result<(), LunInUse> {
        let at = usize::from(unit.address.target);
        if self.targets.len() <= at {
            self.targets.resize_with(at + 1, TargetUnits::default);
        }
        let target = &mut self.targets[at];
        let Err(position) = target.luns.binary_search(&unit.address.lun) else { return Err(LunInUse(unit.address)) };
        target.luns.insert(position, unit.address.lun);
        target.units.insert(position, unit);
        self.generation += 1;
        Ok(())
    }

    /// Removes the logical unit at an address.
    pub(crate) fn remove(&mut self, address: LunAddress) -> Option<MappedUnit> {
        let target = self.targets.get_mut(usize::from(address.target))?;
        let position = target.luns.binary_search(&address.lun).ok()?;
        target.luns.remove(position);
        self.generation += 1;
        Some(target.units.remove(position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lun_fields_decode() {
        let address = |target, lun| LunField::Lun(LunAddress { target, lun });
        for (field, want) in [
            ([1, 0, 0, 0, 0, 0, 0, 0], address(0, 0)),
            ([1, 9, 0, 255, 0, 0, 0, 0], address(9, 255)),
            ([1, 255, 0x40, 3, 0, 0, 0, 0], address(255, 3)),
            ([1, 3, 0x7f, 0xff, 0, 0, 0, 0], address(3, 16383)),
            // Another bus, another method, a second level.
            ([1, 3, 1, 0, 0, 0, 0, 0], LunField::InvalidLun(3)),
            ([1, 3, 0x80, 0, 0, 0, 0, 0], LunField::InvalidLun(3)),
            ([1, 3, 0xc1, 1, 0, 0, 0, 0], LunField::InvalidLun(3)),
            ([1, 3, 0, 0, 0, 0, 0, 1], LunField::InvalidLun(3)),
            ([0; 8], LunField::NoTarget),
            ([0xc1, 1, 0, 0, 0, 0, 0, 0], LunField::NoTarget),
        ] {
            assert_eq!(LunField::decode(field), want, "{field:x?}");
        }
        for lun in [0, 1, 255, 256, 16383] {
            assert_eq!(LunField::decode(LunAddress { target: 7, lun }.encode()), address(7, lun));
        }
    }
}
