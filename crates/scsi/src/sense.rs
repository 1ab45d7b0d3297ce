//! Status and sense data. Source: SPC-4 section 4.5, SAM-5 section 5.3.

/// Status byte of a command. Source: SAM-5 section 5.3.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// The command succeeded.
    Good = 0x00,
    /// The command failed; sense data gives the reason.
    CheckCondition = 0x02,
    /// The requested condition is met (PRE-FETCH; no command of this crate returns it).
    ConditionMet = 0x04,
    /// The logical unit cannot accept the command now.
    Busy = 0x08,
    /// Another nexus holds a reservation.
    ReservationConflict = 0x18,
    /// The task set is full.
    TaskSetFull = 0x28,
    /// Another nexus aborted the command (control mode page, TAS = 1).
    TaskAborted = 0x40,
}

/// Sense key. Source: SPC-4 section 4.5.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SenseKey {
    /// No specific sense key.
    NoSense = 0x0,
    /// The logical unit is not accessible now.
    NotReady = 0x2,
    /// Unrecoverable error of the medium.
    MediumError = 0x3,
    /// Unrecoverable failure other than of the medium.
    HardwareError = 0x4,
    /// Illegal field in the CDB or the parameter list.
    IllegalRequest = 0x5,
    /// A unit attention condition was pending.
    UnitAttention = 0x6,
    /// The medium is write protected.
    DataProtect = 0x7,
    /// The device server aborted the command.
    AbortedCommand = 0xb,
    /// The data differs from the medium.
    Miscompare = 0xe,
}

/// Location of an invalid field. Source: SPC-4 section 4.5.2.4.2, "Field pointer".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FieldPointer {
    /// The field is in the CDB, otherwise in the parameter list.
    pub in_cdb: bool,
    /// First byte of the field.
    pub byte: u16,
    /// Most significant bit of the field, unless the field is whole bytes.
    pub bit: Option<u8>,
}

/// Sense data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sense {
    /// Sense key.
    pub key: SenseKey,
    /// Additional sense code.
    pub asc: u8,
    /// Additional sense code qualifier.
    pub ascq: u8,
    /// The invalid field, for [`SenseKey::IllegalRequest`].
    pub field: Option<FieldPointer>,
    /// INFORMATION field: an LBA, or the byte offset of a miscompare.
    pub information: Option<u64>,
}

impl Sense {
    /// Maximum number of bytes that [`encode`](Self::encode) writes.
    pub const MAX_LEN: usize = 28;

    /// NO ADDITIONAL SENSE INFORMATION.
    pub const NONE: Sense = Sense::new(SenseKey::NoSense, 0x00, 0x00);
    /// INVALID COMMAND OPERATION CODE.
    pub const INVALID_OPCODE: Sense = Sense::illegal_request(0x20, 0x00);
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
    pub const LBA_OUT_OF_RANGE: Sense = Sense::illegal_request(0x21, 0x00);
    /// PARAMETER LIST LENGTH ERROR.
    pub const PARAMETER_LIST_LENGTH: Sense = Sense::illegal_request(0x1a, 0x00);
    /// LOGICAL UNIT NOT SUPPORTED: the LUN has no logical unit.
    pub const LOGICAL_UNIT_NOT_SUPPORTED: Sense = Sense::illegal_request(0x25, 0x00);
    /// INTERNAL TARGET FAILURE.
    pub const INTERNAL_TARGET_FAILURE: Sense = Sense::new(SenseKey::HardwareError, 0x44, 0x00);
    /// DATA PHASE ERROR: the data-out buffer cannot be read any more.
    pub const DATA_PHASE_ERROR: Sense = Sense::new(SenseKey::AbortedCommand, 0x4b, 0x00);
    /// LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED: START STOP UNIT stopped it.
    pub const INITIALIZING_COMMAND_REQUIRED: Sense = Sense::new(SenseKey::NotReady, 0x04, 0x02);
    /// WRITE PROTECTED.
    pub const WRITE_PROTECTED: Sense = Sense::new(SenseKey::DataProtect, 0x27, 0x00);
    /// LOGICAL UNIT SOFTWARE WRITE PROTECTED: by the control mode page.
    pub const SOFTWARE_WRITE_PROTECTED: Sense = Sense::new(SenseKey::DataProtect, 0x27, 0x02);

    /// Returns sense data without field pointer and INFORMATION.
    pub const fn new(key: SenseKey, asc: u8, ascq: u8) -> Sense {
        Sense { key, asc, ascq, field: None, information: None }
    }

    const fn illegal_request(asc: u8, ascq: u8) -> Sense {
        Sense::new(SenseKey::IllegalRequest, asc, ascq)
    }

    /// Returns INVALID FIELD IN CDB for the field that starts in byte `byte`, at bit `bit` unless it is whole bytes.
    pub const fn invalid_cdb_field(byte: u16, bit: Option<u8>) -> Sense {
        Sense { field: Some(FieldPointer { in_cdb: true, byte, bit }), ..Sense::illegal_request(0x24, 0x00) }
    }

    /// Returns INVALID FIELD IN PARAMETER LIST for a field.
    pub const fn invalid_parameter_field(byte: u16, bit: Option<u8>) -> Sense {
        Sense { field: Some(FieldPointer { in_cdb: false, byte, bit }), ..Sense::illegal_request(0x26, 0x00) }
    }

    /// Returns the same sense data with a field pointer into the CDB.
    pub const fn with_cdb_field(mut self, byte: u16, bit: Option<u8>) -> Sense {
        self.field = Some(FieldPointer { in_cdb: true, byte, bit });
        self
    }

    /// Returns MISCOMPARE DURING VERIFY OPERATION with this INFORMATION.
    pub const fn miscompare(information: u64) -> Sense {
        Sense { information: Some(information), ..Sense::new(SenseKey::Miscompare, 0x1d, 0x00) }
    }

    /// Encodes the sense data, cut to `into`, in descriptor format or fixed format (18 bytes). Returns the number of
    /// bytes written. In fixed format an INFORMATION above 32 bits is not marked valid (SPC-4 section 4.5.3).
    pub fn encode(&self, descriptor: bool, into: &mut [u8]) -> usize {
        let mut bytes = [0; Sense::MAX_LEN];
        let len = if descriptor { self.encode_descriptors(&mut bytes) } else { self.encode_fixed(&mut bytes) };
        let len = len.min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        len
    }

    fn encode_fixed(&self, bytes: &mut [u8; Sense::MAX_LEN]) -> usize {
        bytes[0] = 0x70;
        bytes[2] = self.key as u8;
        if let Some(information) = self.information.and_then(|wide| u32::try_from(wide).ok()) {
            bytes[0] |= 0x80;
            bytes[3..7].copy_from_slice(&information.to_be_bytes());
        }
        bytes[7] = 10;
        bytes[12] = self.asc;
        bytes[13] = self.ascq;
        if let Some(field) = self.field {
            bytes[15..18].copy_from_slice(&field.encode());
        }
        18
    }

    fn encode_descriptors(&self, bytes: &mut [u8; Sense::MAX_LEN]) -> usize {
        bytes[..4].copy_from_slice(&[0x72, self.key as u8, self.asc, self.ascq]);
        let mut len = 8;
        if let Some(information) = self.information {
            bytes[len..len + 4].copy_from_slice(&[0x00, 0x0a, 0x80, 0]);
            bytes[len + 4..len + 12].copy_from_slice(&information.to_be_bytes());
            len += 12;
        }
        if let Some(field) = self.field {
            bytes[len..len + 2].copy_from_slice(&[0x02, 0x06]);
            bytes[len + 4..len + 7].copy_from_slice(&field.encode());
            len += 8;
        }
        bytes[7] = (len - 8) as u8;
        len
    }
}

impl FieldPointer {
    /// Encodes the three sense key specific bytes.
    fn encode(self) -> [u8; 3] {
        let bit = self.bit.map_or(0, |bit| 0x08 | (bit & 0x07));
        let [high, low] = self.byte.to_be_bytes();
        [0x80 | u8::from(self.in_cdb) << 6 | bit, high, low]
    }
}
