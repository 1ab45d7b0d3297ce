//! How a command fails: status and sense data. Source: SPC-4 section 4.5, SAM-5 section 5.3.

/// Status byte of a command. Source: SAM-5 section 5.3.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// All of it happened.
    Good = 0x00,
    /// Sense data says what did not.
    CheckCondition = 0x02,
    /// COMPARE AND WRITE and its kin found what was asked for (not used by block commands of this crate but for PRE-FETCH).
    ConditionMet = 0x04,
    /// Try again.
    Busy = 0x08,
    /// Another nexus holds a reservation.
    ReservationConflict = 0x18,
    /// The unit takes no more commands for now.
    TaskSetFull = 0x28,
    /// The command was ended by another nexus (control mode page, TAS = 1).
    TaskAborted = 0x40,
}

/// Sense key. Source: SPC-4 section 4.5.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SenseKey {
    /// Nothing to say.
    NoSense = 0x0,
    /// Not accessible now.
    NotReady = 0x2,
    /// The medium failed.
    MediumError = 0x3,
    /// Not a failure of the medium.
    HardwareError = 0x4,
    /// The command or its parameters cannot be executed.
    IllegalRequest = 0x5,
    /// Something happened since the last command.
    UnitAttention = 0x6,
    /// Writes are not allowed.
    DataProtect = 0x7,
    /// Ended on the device's side.
    AbortedCommand = 0xb,
    /// The comparison failed.
    Miscompare = 0xe,
}

/// Where in the command or its parameters the mistake is. Source: SPC-4 section 4.5.2.4.2, "Field pointer".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FieldPointer {
    /// In the command descriptor block (else in the parameter list).
    pub in_command: bool,
    /// First byte of the field.
    pub byte: u16,
    /// Most significant bit of the field, when it is not a whole byte.
    pub bit: Option<u8>,
}

/// Sense data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sense {
    /// What kind of failure.
    pub key: SenseKey,
    /// Additional sense code.
    pub asc: u8,
    /// And its qualifier.
    pub ascq: u8,
    /// Which field was wrong, for [`SenseKey::IllegalRequest`].
    pub field: Option<FieldPointer>,
    /// The INFORMATION field: an LBA, or an offset for a miscompare.
    pub information: Option<u64>,
}

impl Sense {
    /// Sense data without field pointer and information.
    pub const fn new(key: SenseKey, asc: u8, ascq: u8) -> Sense {
        Sense { key, asc, ascq, field: None, information: None }
    }
}
