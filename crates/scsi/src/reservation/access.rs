//! Access that a reservation leaves to other nexuses.

/// Type of a persistent reservation. Source: SPC-4 section 6.15.3.4, table "PERSISTENT RESERVATION TYPE field".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationType {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 3,
    /// Only registered nexuses write; one of them holds the reservation.
    WriteExclusiveRegistrantsOnly = 5,
    /// Only registered nexuses read and write; one of them holds the reservation.
    ExclusiveAccessRegistrantsOnly = 6,
    /// Only registered nexuses write; all of them hold the reservation.
    WriteExclusiveAllRegistrants = 7,
    /// Only registered nexuses read and write; all of them hold the reservation.
    ExclusiveAccessAllRegistrants = 8,
}

impl ReservationType {
    /// All types.
    pub const ALL: [ReservationType; 6] = [
        ReservationType::WriteExclusive,
        ReservationType::ExclusiveAccess,
        ReservationType::WriteExclusiveRegistrantsOnly,
        ReservationType::ExclusiveAccessRegistrantsOnly,
        ReservationType::WriteExclusiveAllRegistrants,
        ReservationType::ExclusiveAccessAllRegistrants,
    ];

    /// Decodes the TYPE field.
    pub fn from_code(code: u8) -> Option<ReservationType> {
        ReservationType::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns true if every registered nexus holds it.
    pub fn is_all_registrants(self) -> bool {
        matches!(self, ReservationType::WriteExclusiveAllRegistrants | ReservationType::ExclusiveAccessAllRegistrants)
    }

    /// Returns true if a nexus needs only a registration to have the holder's rights.
    pub fn admits_registrants(self) -> bool {
        !matches!(self, ReservationType::WriteExclusive | ReservationType::ExclusiveAccess)
    }

    fn is_write_exclusive(self) -> bool {
        matches!(
            self,
            ReservationType::WriteExclusive
                | ReservationType::WriteExclusiveRegistrantsOnly
                | ReservationType::WriteExclusiveAllRegistrants
        )
    }
}

/// Class of a command under a reservation. Source: SPC-4 section 5.12.1 ("SPC commands that are allowed in the
/// presence of various reservations"), SBC-3 section 4.17 (the same for block commands), SPC-2 section 5.5.1 and
/// annex B for RESERVE(6) and (10):
///
/// | class | commands | RESERVE of another | Write Exclusive | Exclusive Access |
/// |---|---|---|---|---|
/// | `Always` | INQUIRY, REPORT LUNS, REQUEST SENSE, LOG SENSE, READ CAPACITY, PREVENT ALLOW MEDIUM REMOVAL with PREVENT 0, START STOP UNIT with START 1 and POWER CONDITION 0 | allowed | allowed | allowed |
/// | `Status` | TEST UNIT READY, REPORT TARGET PORT GROUPS | conflict | allowed | allowed |
/// | `Read` | READ, VERIFY, PRE-FETCH, GET LBA STATUS, READ DEFECT DATA, MODE SENSE, REPORT SUPPORTED OPERATION CODES, REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS, READ BUFFER, RECEIVE DIAGNOSTIC RESULTS | conflict | allowed | conflict |
/// | `Write` | WRITE, WRITE AND VERIFY, WRITE SAME, COMPARE AND WRITE, ORWRITE, UNMAP, SYNCHRONIZE CACHE, FORMAT UNIT, MODE SELECT, LOG SELECT, SEND DIAGNOSTIC, WRITE BUFFER, START STOP UNIT and PREVENT ALLOW MEDIUM REMOVAL otherwise | conflict | conflict | conflict |
///
/// The holder of a reservation may send all commands, and so may any registered nexus under the registrants-only and
/// all-registrants types. RESERVE, RELEASE, PERSISTENT RESERVE IN and OUT check reservations themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AccessClass {
    /// Allowed under any reservation.
    Always,
    /// Reports if the logical unit is ready.
    Status,
    /// Reads the medium, or parameters that the holder may be changing.
    Read,
    /// Changes the medium or the logical unit.
    Write,
}

/// Classes of commands that one nexus may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AccessRights(pub u8);

impl AccessRights {
    pub(super) const ALL: AccessRights =
        AccessRights::of(&[AccessClass::Always, AccessClass::Status, AccessClass::Read, AccessClass::Write]);
    /// While another nexus holds a RESERVE(6) or (10).
    pub(super) const RESERVED: AccessRights = AccessRights::of(&[AccessClass::Always]);

    const fn of(classes: &[AccessClass]) -> AccessRights {
        let (mut bits, mut index) = (0, 0);
        while index < classes.len() {
            bits |= 1 << classes[index] as u8;
            index += 1;
        }
        AccessRights(bits)
    }

    /// Returns the rights of a nexus under another one's persistent reservation, from which a registration does not
    /// exempt it.
    pub(super) fn under_reservation(kind: ReservationType) -> AccessRights {
        const WRITE_EXCLUSIVE: AccessRights =
            AccessRights::of(&[AccessClass::Always, AccessClass::Status, AccessClass::Read]);
        const EXCLUSIVE_ACCESS: AccessRights = AccessRights::of(&[AccessClass::Always, AccessClass::Status]);
        if kind.is_write_exclusive() { WRITE_EXCLUSIVE } else { EXCLUSIVE_ACCESS }
    }

    pub(super) const fn allows(self, class: AccessClass) -> bool {
        self.0 & (1 << class as u8) != 0
    }
}
