//! Which logical unit is where. Changed by control threads, read by queues: each keeps a copy of the map of now.

use std::fmt;
use std::sync::Arc;

use mqblk_core::DiskSlot;
use mqblk_scsi::Nexus;
use serde::{Deserialize, Serialize};

/// Where a unit is on its controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Target number.
    pub target: u8,
    /// Logical unit number, below 16384.
    pub lun: u16,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

/// There is a unit at that place already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("target and lun: found {0}, where a unit is already, expected a free place")]
pub struct PlaceTaken(pub Place);

/// A place as a driver names it. Source: virtio 1.3 section 5.6.6.1, "Device Operation: Request Queues".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Address {
    /// A place where a unit may be.
    Place(Place),
    /// A LUN that no unit can have, of this target.
    NoLun(u8),
    /// Nothing that names a target.
    Nowhere,
}

impl Address {
    /// Reads the 8 bytes of a `lun` field: 1, target, single-level LUN, zeroes.
    #[inline]
    pub fn of_field(field: [u8; 8]) -> Address {
        let word = u64::from_le_bytes(field);
        let [first, target, high, low, ..] = field;
        if first != 1 {
            return Address::Nowhere;
        }
        match high {
            // A second level, which no unit has.
            _ if word >> 32 != 0 => Address::NoLun(target),
            // Peripheral device addressing on bus 0 (SAM-5 section 4.7.7.2).
            0 => Address::Place(Place { target, lun: low.into() }),
            // Flat space addressing (section 4.7.7.3).
            0x40..=0x7f => Address::Place(Place { target, lun: u16::from_be_bytes([high & 0x3f, low]) }),
            _ => Address::NoLun(target),
        }
    }
}

impl Place {
    /// The 8 bytes of a `lun` field, as drivers write it.
    pub fn to_field(self) -> [u8; 8] {
        let [high, low] = self.lun.to_be_bytes();
        [1, self.target, high | 0x40, low, 0, 0, 0, 0]
    }
}

/// A unit at its place.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Where.
    pub place: Place,
    /// The engine's name for its disk.
    pub slot: DiskSlot,
    /// This controller's way to it.
    pub nexus: Arc<Nexus>,
}

/// The units of one target.
#[derive(Clone, Debug, Default)]
pub struct Target {
    /// Their LUNs, rising.
    pub luns: Vec<u16>,
    units: Vec<Unit>,
}

impl Target {
    /// The unit at a LUN.
    #[inline]
    pub fn unit(&self, lun: u16) -> Option<&Unit> {
        match self.luns.as_slice() {
            [only] if *only == lun => self.units.first(),
            luns => self.units.get(luns.binary_search(&lun).ok()?),
        }
    }
}

/// All units of a controller.
#[derive(Clone, Debug, Default)]
pub struct Units {
    /// Changes so far: a copy with an older number is to be renewed.
    pub generation: u64,
    /// By target number; shorter than 256 where no unit is.
    targets: Vec<Target>,
}

impl Units {
    /// A target that has units.
    #[inline]
    pub fn target(&self, target: u8) -> Option<&Target> {
        self.targets.get(usize::from(target)).filter(|target| !target.luns.is_empty())
    }

    /// All of them, by place.
    pub fn iter(&self) -> impl Iterator<Item = &Unit> {
        self.targets.iter().flat_map(|target| &target.units)
    }

    /// Puts a unit where none is.
    ///
    /// # Errors
    /// When one is.
    pub fn insert(&mut self, unit: Unit) -> Result<(), PlaceTaken> {
        let at = usize::from(unit.place.target);
        if self.targets.len() <= at {
            self.targets.resize_with(at + 1, Target::default);
        }
        let target = &mut self.targets[at];
        let Err(position) = target.luns.binary_search(&unit.place.lun) else { return Err(PlaceTaken(unit.place)) };
        target.luns.insert(position, unit.place.lun);
        target.units.insert(position, unit);
        self.generation += 1;
        Ok(())
    }

    /// Takes the unit at a place away.
    pub fn remove(&mut self, place: Place) -> Option<Unit> {
        let target = self.targets.get_mut(usize::from(place.target))?;
        let position = target.luns.binary_search(&place.lun).ok()?;
        target.luns.remove(position);
        self.generation += 1;
        Some(target.units.remove(position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_name_places() {
        let place = |target, lun| Address::Place(Place { target, lun });
        for (field, want) in [
            ([1, 0, 0, 0, 0, 0, 0, 0], place(0, 0)),
            ([1, 9, 0, 255, 0, 0, 0, 0], place(9, 255)),
            ([1, 255, 0x40, 3, 0, 0, 0, 0], place(255, 3)),
            ([1, 3, 0x7f, 0xff, 0, 0, 0, 0], place(3, 16383)),
            // Another bus, another method, a second level.
            ([1, 3, 1, 0, 0, 0, 0, 0], Address::NoLun(3)),
            ([1, 3, 0x80, 0, 0, 0, 0, 0], Address::NoLun(3)),
            ([1, 3, 0xc1, 1, 0, 0, 0, 0], Address::NoLun(3)),
            ([1, 3, 0, 0, 0, 0, 0, 1], Address::NoLun(3)),
            ([0; 8], Address::Nowhere),
            ([0xc1, 1, 0, 0, 0, 0, 0, 0], Address::Nowhere),
        ] {
            assert_eq!(Address::of_field(field), want, "{field:x?}");
        }
        for lun in [0, 1, 255, 256, 16383] {
            assert_eq!(Address::of_field(Place { target: 7, lun }.to_field()), place(7, lun));
        }
    }
}
