//! virtio-scsi wire format. Source: virtio 1.3 section 5.6; offsets checked with Linux's `virtio_scsi.h`.

/// Feature bits. Source: virtio 1.3 section 5.6.3.
pub(crate) mod feature {
    pub(crate) const HOTPLUG: u64 = 1 << 1;
    pub(crate) const CHANGE: u64 = 1 << 2;
    /// Features that this driver supports. Without INOUT a command transfers data in one direction.
    pub(crate) const ALL: u64 = HOTPLUG | CHANGE;
}

/// Index of the first request queue, after the control and the event queue.
pub(crate) const FIRST_REQUEST_QUEUE: u16 = 2;
/// The control queue.
pub(crate) const CONTROL_QUEUE: u16 = 0;
/// The event queue.
pub(crate) const EVENT_QUEUE: u16 = 1;

/// Bytes of the configuration space.
pub(crate) const CONFIG_BYTES: usize = 36;
/// Offset of `sense_size` and, behind it, `cdb_size` in the configuration space: the fields that a driver may write.
pub(crate) const CONFIG_SENSE_SIZE: u32 = 20;
/// Bytes of sense data: the value after a device reset.
pub(crate) const SENSE_BYTES: usize = 96;
/// Bytes of the command descriptor block in a request: the value after a device reset.
pub(crate) const CDB_BYTES: usize = 32;

/// Bytes of a command's header: LUN, tag, attributes, command descriptor block.
pub(crate) const HEADER_BYTES: u32 = 19 + CDB_BYTES as u32;
/// Bytes of a command's response before its sense data.
pub(crate) const RESPONSE_HEAD_BYTES: u32 = 12;
/// Bytes of a command's response.
pub(crate) const RESPONSE_BYTES: u32 = RESPONSE_HEAD_BYTES + SENSE_BYTES as u32;
/// A response byte that the device has not written, if responses are poisoned.
pub(crate) const POISON: u8 = 0xff;
/// Bytes of a task management request.
pub(crate) const TMF_BYTES: u32 = 24;
/// Bytes from one task management request to the next.
pub(crate) const TMF_STRIDE: u32 = 32;
/// Bytes of an event that this driver knows.
pub(crate) const EVENT_BYTES: u32 = 16;

/// Address of a logical unit: target and LUN. Source: virtio 1.3 section 5.6.6.1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LunAddress {
    /// Target.
    pub target: u8,
    /// Logical unit number, at most [`LunAddress::MAX_LUN`].
    pub lun: u16,
}

impl LunAddress {
    /// The highest logical unit number that fits the field.
    pub const MAX_LUN: u16 = 0x3fff;

    /// Encodes the `lun` field with flat space addressing, as Linux does.
    pub(crate) const fn to_bytes(self) -> [u8; 8] {
        let [high, low] = self.lun.to_be_bytes();
        [1, self.target, 0x40 | (high & 0x3f), low, 0, 0, 0, 0]
    }

    /// Decodes a `lun` field. `None` if it is not a single-level address.
    pub(crate) const fn from_bytes(bytes: [u8; 8]) -> Option<LunAddress> {
        match bytes {
            [1, target, high, low, 0, 0, 0, 0] if high < 0x80 => {
                Some(LunAddress { target, lun: u16::from_be_bytes([high & 0x3f, low]) })
            }
            _ => None,
        }
    }
}

impl std::fmt::Display for LunAddress {
    /// `target:lun`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

/// Response code of a command that the device has not executed. Source: virtio 1.3 section 5.6.6.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandResponse {
    /// More data than the buffers hold.
    Overrun,
    /// Aborted by task management.
    Aborted,
    /// The target or logical unit does not exist.
    BadTarget,
    /// Aborted by a reset.
    Reset,
    /// The command can be retried.
    Busy,
    /// The transport failed.
    TransportFailure,
    /// The target failed.
    TargetFailure,
    /// The nexus failed.
    NexusFailure,
    /// Another failure.
    Failure,
    /// A code that the specification does not define for commands.
    Unknown(u8),
}

impl CommandResponse {
    pub(crate) const fn from_byte(byte: u8) -> CommandResponse {
        match byte {
            1 => CommandResponse::Overrun,
            2 => CommandResponse::Aborted,
            3 => CommandResponse::BadTarget,
            4 => CommandResponse::Reset,
            5 => CommandResponse::Busy,
            6 => CommandResponse::TransportFailure,
            7 => CommandResponse::TargetFailure,
            8 => CommandResponse::NexusFailure,
            9 => CommandResponse::Failure,
            other => CommandResponse::Unknown(other),
        }
    }
}

/// A task management function. Source: virtio 1.3 section 5.6.6.2; SAM-5 chapter 7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum TaskManagementFunction {
    /// Aborts one command.
    AbortTask = 0,
    /// Aborts this initiator's commands of the logical unit.
    AbortTaskSet = 1,
    /// Clears the auto contingent allegiance.
    ClearAca = 2,
    /// Aborts all initiators' commands of the logical unit.
    ClearTaskSet = 3,
    /// Resets the nexus: all logical units of the target.
    NexusReset = 4,
    /// Resets the logical unit.
    LogicalUnitReset = 5,
    /// Queries the presence of the command.
    QueryTask = 6,
    /// Queries the presence of any command of this initiator.
    QueryTaskSet = 7,
}

/// Response to a task management function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskManagementResponse {
    /// Executed. For a query: there is no such command.
    Complete,
    /// For a query: there is such a command.
    Succeeded,
    /// The device does not support the function.
    Rejected,
    /// The logical unit does not exist.
    IncorrectLun,
    /// Another response code.
    Other(CommandResponse),
    /// The device has not written a response.
    NotWritten,
}

impl TaskManagementResponse {
    pub(crate) const fn from_byte(byte: u8) -> TaskManagementResponse {
        match byte {
            0 => TaskManagementResponse::Complete,
            10 => TaskManagementResponse::Succeeded,
            11 => TaskManagementResponse::Rejected,
            12 => TaskManagementResponse::IncorrectLun,
            POISON => TaskManagementResponse::NotWritten,
            other => TaskManagementResponse::Other(CommandResponse::from_byte(other)),
        }
    }
}

/// Kind of an event. Source: virtio 1.3 section 5.6.6.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScsiEventKind {
    /// No event: others were lost.
    NoEvent,
    /// The logical unit was reset. With LUN 0, possibly the whole target.
    Reset,
    /// The logical unit was added: a rescan is needed.
    Rescan,
    /// The logical unit was removed.
    Removed,
    /// Asynchronous notification.
    Asynchronous {
        /// The mask of events.
        mask: u32,
    },
    /// A parameter has changed. The codes are those of a unit attention; 2A/09 is the capacity.
    ParameterChange {
        /// Additional sense code.
        asc: u8,
        /// Additional sense code qualifier.
        ascq: u8,
    },
    /// An event that the specification does not define.
    Unknown {
        /// The event field, without bit 31.
        event: u32,
        /// The reason field.
        reason: u32,
    },
}

/// An event of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScsiEvent {
    /// Its kind.
    pub kind: ScsiEventKind,
    /// The logical unit. `None` if the event has no or no valid address.
    pub address: Option<LunAddress>,
    /// Earlier events were lost: a full rescan is needed.
    pub missed: bool,
}

impl ScsiEvent {
    pub(crate) fn from_bytes(bytes: [u8; EVENT_BYTES as usize]) -> ScsiEvent {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        const MISSED: u32 = 1 << 31;
        let (event, reason) = (word(0) & !MISSED, word(12));
        let kind = match (event, reason) {
            (0, _) => ScsiEventKind::NoEvent,
            (1, 0) => ScsiEventKind::Reset,
            (1, 1) => ScsiEventKind::Rescan,
            (1, 2) => ScsiEventKind::Removed,
            (2, mask) => ScsiEventKind::Asynchronous { mask },
            (3, codes) => ScsiEventKind::ParameterChange { asc: codes as u8, ascq: (codes >> 8) as u8 },
            (event, reason) => ScsiEventKind::Unknown { event, reason },
        };
        let address = LunAddress::from_bytes(std::array::from_fn(|index| bytes[4 + index])).filter(|_| event != 0);
        ScsiEvent { kind, address, missed: word(0) & MISSED != 0 }
    }
}

/// The configuration space. Source: virtio 1.3 section 5.6.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScsiConfig {
    /// Request queues.
    pub num_queues: u32,
    /// Largest number of data segments of a command.
    pub seg_max: u32,
    /// Largest number of 512-byte sectors of a command, a hint. 0: unknown.
    pub max_sectors: u32,
    /// Largest number of commands in flight for a logical unit. 0: unknown.
    pub cmd_per_lun: u32,
    /// Bytes of an event.
    pub event_info_size: u32,
    /// Bytes of sense data.
    pub sense_size: u32,
    /// Bytes of a command descriptor block.
    pub cdb_size: u32,
    /// Highest channel.
    pub max_channel: u16,
    /// Highest target.
    pub max_target: u16,
    /// Highest logical unit number.
    pub max_lun: u32,
}

impl ScsiConfig {
    pub(crate) fn from_bytes(bytes: &[u8; CONFIG_BYTES]) -> ScsiConfig {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        ScsiConfig {
            num_queues: word(0),
            seg_max: word(4),
            max_sectors: word(8),
            cmd_per_lun: word(12),
            event_info_size: word(16),
            sense_size: word(20),
            cdb_size: word(24),
            max_channel: half(28),
            max_target: half(30),
            max_lun: word(32),
        }
    }

    /// Returns QEMU's values with `num_queues` queues, for a server that leaves the configuration space to the VMM.
    pub(crate) fn vmm_default(num_queues: u32) -> ScsiConfig {
        ScsiConfig {
            num_queues,
            seg_max: 126,
            max_sectors: 0xffff,
            cmd_per_lun: 128,
            event_info_size: EVENT_BYTES,
            sense_size: SENSE_BYTES as u32,
            cdb_size: CDB_BYTES as u32,
            max_channel: 0,
            max_target: 255,
            max_lun: LunAddress::MAX_LUN.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lun_addresses_are_flat() {
        let at = LunAddress { target: 7, lun: 0x1234 };
        assert_eq!(at.to_bytes(), [1, 7, 0x52, 0x34, 0, 0, 0, 0]);
        for (bytes, expected) in [
            ([1, 7, 0x52, 0x34, 0, 0, 0, 0], Some(at)),
            ([1, 7, 0, 3, 0, 0, 0, 0], Some(LunAddress { target: 7, lun: 3 })),
            ([0xc1, 1, 0, 0, 0, 0, 0, 0], None),
            ([1, 7, 0x80, 0, 0, 0, 0, 0], None),
            ([1, 7, 0, 3, 1, 0, 0, 0], None),
        ] {
            assert_eq!(LunAddress::from_bytes(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn events_are_parsed() {
        let event = |event: u32, reason: u32| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&event.to_le_bytes());
            bytes[4..12].copy_from_slice(&LunAddress { target: 2, lun: 5 }.to_bytes());
            bytes[12..].copy_from_slice(&reason.to_le_bytes());
            ScsiEvent::from_bytes(bytes)
        };
        let address = Some(LunAddress { target: 2, lun: 5 });
        assert_eq!(event(1, 1), ScsiEvent { kind: ScsiEventKind::Rescan, address, missed: false });
        assert_eq!(event(1 | 1 << 31, 2), ScsiEvent { kind: ScsiEventKind::Removed, address, missed: true });
        assert_eq!(event(1 << 31, 0), ScsiEvent { kind: ScsiEventKind::NoEvent, address: None, missed: true });
        assert_eq!(event(3, 0x092a).kind, ScsiEventKind::ParameterChange { asc: 0x2a, ascq: 9 });
        assert_eq!(event(2, 4).kind, ScsiEventKind::Asynchronous { mask: 4 });
        assert_eq!(event(1, 9).kind, ScsiEventKind::Unknown { event: 1, reason: 9 });
        assert_eq!(event(77, 9).kind, ScsiEventKind::Unknown { event: 77, reason: 9 });
    }
}
