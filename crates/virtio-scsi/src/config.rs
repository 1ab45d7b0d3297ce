//! The configuration space and the feature bits of the device. Source: virtio 1.3 sections 5.6.3 and 5.6.4.

/// Feature bits of virtio-scsi. Source: virtio 1.3 section 5.6.3.
pub mod features {
    use virtio_bindings::virtio_scsi as b;
    /// Hotplug and hot remove of logical units.
    pub const HOTPLUG: u64 = 1 << b::VIRTIO_SCSI_F_HOTPLUG;
    /// Changes of logical unit parameters (capacity).
    pub const CHANGE: u64 = 1 << b::VIRTIO_SCSI_F_CHANGE;
}

/// Length of the configuration structure. Source: virtio 1.3 section 5.6.4, `struct virtio_scsi_config`.
pub(crate) const CONFIG_BYTES: usize = 36;
/// Offsets of the two fields that a driver may write.
const SENSE_SIZE_AT: usize = 20;
const CDB_SIZE_AT: usize = 24;

/// Highest target number.
pub(crate) const MAX_TARGET: u16 = 255;
/// Highest LUN: flat space addressing has 14 bits.
pub(crate) const MAX_LUN: u32 = 16383;

/// Length of an event.
pub(crate) const EVENT_BYTES: usize = 16;
/// Length of the fixed part of a request, before its CDB: lun, id, task attribute, priority, crn.
pub(crate) const REQUEST_BYTES: usize = 19;
/// Length of the fixed part of a response, before its sense data.
pub(crate) const RESPONSE_BYTES: usize = 12;

/// Sizes that a driver may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriverSizes {
    /// Length of the sense data in a response.
    pub sense: u32,
    /// Length of the CDB in a request.
    pub cdb: u32,
}

impl DriverSizes {
    /// Sizes after a reset.
    pub(crate) const DEFAULT: DriverSizes = DriverSizes { sense: 96, cdb: 32 };
    /// The longest CDB that SPC-4 section 4.2.3 allows.
    pub(crate) const MAX_CDB: u32 = 260;
    /// Sense data is at most 252 bytes (SPC-4 section 4.5.1).
    pub(crate) const MAX_SENSE: u32 = 252;
}

/// Content of the configuration space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConfigSpace {
    /// Request queues.
    pub queues: u16,
    /// Maximum number of data segments of one command.
    pub seg_max: u32,
    /// Hint: maximum transfer length, in sectors of 512 bytes.
    pub max_sectors: u32,
    /// Hint: maximum number of commands queued to one logical unit.
    pub cmd_per_lun: u32,
    /// Current sizes.
    pub sizes: DriverSizes,
}

impl ConfigSpace {
    /// Encodes the configuration space, little-endian. Source: virtio 1.3 section 5.6.4.
    pub(crate) fn bytes(&self) -> [u8; CONFIG_BYTES] {
        let mut all = [0; CONFIG_BYTES];
        let mut put = |at: usize, value: &[u8]| all[at..at + value.len()].copy_from_slice(value);
        put(0, &u32::from(self.queues).to_le_bytes());
        put(4, &self.seg_max.to_le_bytes());
        put(8, &self.max_sectors.to_le_bytes());
        put(12, &self.cmd_per_lun.to_le_bytes());
        put(16, &(EVENT_BYTES as u32).to_le_bytes());
        put(SENSE_SIZE_AT, &self.sizes.sense.to_le_bytes());
        put(CDB_SIZE_AT, &self.sizes.cdb.to_le_bytes());
        // One channel, number 0.
        put(30, &MAX_TARGET.to_le_bytes());
        put(32, &MAX_LUN.to_le_bytes());
        all
    }

    /// Returns the sizes after a driver's write of `bytes` at `offset`.
    ///
    /// # Errors
    /// If it changes another byte, or the new size is invalid.
    pub(crate) fn apply_write(&self, offset: u32, bytes: &[u8]) -> Result<DriverSizes, String> {
        let mut all = self.bytes();
        let before = all;
        let at = offset as usize;
        let target = at.checked_add(bytes.len()).and_then(|end| all.get_mut(at..end));
        let Some(target) = target else {
            return Err(format!(
                "configuration bytes {at} and on: found a write beyond the {CONFIG_BYTES} that there are"
            ));
        };
        target.copy_from_slice(bytes);
        let changed = all.iter().zip(&before).position(|(new, old)| new != old).filter(|at| !(20..28).contains(at));
        if let Some(byte) = changed {
            return Err(format!("configuration byte {byte}: found a write, expected one to bytes 20 to 27 only"));
        }
        let word = |at: usize| u32::from_le_bytes([all[at], all[at + 1], all[at + 2], all[at + 3]]);
        self.validate_sizes(DriverSizes { sense: word(SENSE_SIZE_AT), cdb: word(CDB_SIZE_AT) })
    }

    /// Validates sizes that a driver chose.
    ///
    /// # Errors
    /// If a size is out of range.
    pub(crate) fn validate_sizes(&self, sizes: DriverSizes) -> Result<DriverSizes, String> {
        if sizes.sense > DriverSizes::MAX_SENSE {
            return Err(format!("sense_size: found {}, expected at most {}", sizes.sense, DriverSizes::MAX_SENSE));
        }
        if !(16..=DriverSizes::MAX_CDB).contains(&sizes.cdb) {
            return Err(format!("cdb_size: found {}, expected 16 to {}", sizes.cdb, DriverSizes::MAX_CDB));
        }
        Ok(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: ConfigSpace =
        ConfigSpace { queues: 4, seg_max: 126, max_sectors: 2048, cmd_per_lun: 128, sizes: DriverSizes::DEFAULT };

    #[test]
    fn every_field_is_where_the_specification_puts_it() {
        let words: Vec<u32> =
            SPACE.bytes().chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        // max_channel and max_target share a word.
        assert_eq!(words, [4, 126, 2048, 128, 16, 96, 32, 255 << 16, 16383]);
    }

    #[test]
    fn a_driver_writes_sizes_and_nothing_else() {
        assert_eq!(SPACE.apply_write(20, &64_u32.to_le_bytes()), Ok(DriverSizes { sense: 64, cdb: 32 }));
        assert_eq!(SPACE.apply_write(24, &16_u32.to_le_bytes()), Ok(DriverSizes { sense: 96, cdb: 16 }));
        // Bytes that do not change may be written.
        assert_eq!(SPACE.apply_write(0, &SPACE.bytes()), Ok(DriverSizes::DEFAULT));
        for (offset, bytes, want) in [
            (0, [5, 0, 0, 0], "configuration byte 0: found a write, expected one to bytes 20 to 27 only"),
            (28, [1, 0, 0, 0], "configuration byte 28: found a write, expected one to bytes 20 to 27 only"),
            (34, [0; 4], "configuration bytes 34 and on: found a write beyond the 36 that there are"),
            (u32::MAX, [0; 4], "configuration bytes 4294967295 and on: found a write beyond the 36 that there are"),
            (20, [253, 0, 0, 0], "sense_size: found 253, expected at most 252"),
            (24, [15, 0, 0, 0], "cdb_size: found 15, expected 16 to 260"),
            (24, [5, 1, 0, 0], "cdb_size: found 261, expected 16 to 260"),
        ] {
            assert_eq!(SPACE.apply_write(offset, &bytes), Err(want.to_owned()));
        }
    }
}
