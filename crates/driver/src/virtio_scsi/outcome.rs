//! Outcomes of commands, from response, status, residual and sense data. Sources: virtio 1.3 section 5.6.6.1; SAM-5
//! section 5.3; SPC-4 section 4.5.

use super::wire::{CommandResponse, POISON, SENSE_BYTES};

/// The part of sense data that an initiator acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// Sense key.
    pub key: u8,
    /// Additional sense code.
    pub asc: u8,
    /// Additional sense code qualifier.
    pub ascq: u8,
    /// The error belongs to an earlier command.
    pub deferred: bool,
    /// The INFORMATION field, if valid.
    pub information: Option<u64>,
}

impl Sense {
    /// The sense key of a unit attention.
    pub const UNIT_ATTENTION: u8 = 6;
    /// The sense key of a command that the device has aborted. It can be retried.
    pub(super) const ABORTED_COMMAND: u8 = 0xb;

    /// Parses sense data in fixed or descriptor format. `None` if it is neither, or truncated before the codes.
    pub fn parse(bytes: &[u8]) -> Option<Sense> {
        let byte = |at: usize| bytes.get(at).copied();
        let format = byte(0)? & 0x7f;
        match format {
            0x70 | 0x71 => {
                let information = match (byte(0)? & 0x80, bytes.get(3..7)) {
                    (0x80, Some(&[a, b, c, d])) => Some(u32::from_be_bytes([a, b, c, d]).into()),
                    _ => None,
                };
                // The codes may be missing in short sense data. They are 0 then.
                let (asc, ascq) = (byte(12).unwrap_or(0), byte(13).unwrap_or(0));
                Some(Sense { key: byte(2)? & 0xf, asc, ascq, deferred: format == 0x71, information })
            }
            0x72 | 0x73 => {
                let (key, asc, ascq) = (byte(1)? & 0xf, byte(2)?, byte(3)?);
                let information = descriptor(bytes, 0x00).filter(|found| found.len() >= 12).map(|found| {
                    // Type, length, VALID, reserved, then the field.
                    u64::from_be_bytes(std::array::from_fn(|at| found[4 + at]))
                });
                Some(Sense { key, asc, ascq, deferred: format == 0x73, information })
            }
            _ => None,
        }
    }
}

/// Returns the first descriptor of `kind` in descriptor-format sense data.
fn descriptor(bytes: &[u8], kind: u8) -> Option<&[u8]> {
    let mut rest = bytes.get(8..)?;
    while let [found, len, ..] = *rest {
        let end = usize::from(len) + 2;
        if found == kind {
            return rest.get(..end);
        }
        rest = rest.get(end..)?;
    }
    None
}

/// Outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    /// GOOD, and all data was transferred.
    Good,
    /// GOOD, and not all data was transferred: normal for an INQUIRY, an error for a read.
    Underrun {
        /// Bytes that were not transferred.
        residual: u32,
    },
    /// CHECK CONDITION.
    CheckCondition(Sense),
    /// Another status: 08 busy, 18 reservation conflict, 28 task set full, 40 task aborted, ...
    Status(u8),
    /// The command was not executed.
    Response(CommandResponse),
    /// The response is inconsistent or violates the specification.
    Malformed(&'static str),
    /// The device has not written a response (detected only if responses are poisoned).
    NotWritten,
}

impl CommandOutcome {
    /// Returns true if the command succeeded completely.
    #[inline]
    pub fn is_good(self) -> bool {
        self == CommandOutcome::Good
    }
}

/// The fixed part of a response.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResponseHead {
    pub(crate) sense_len: u32,
    pub(crate) residual: u32,
    pub(crate) status: u8,
    pub(crate) response: u8,
}

impl ResponseHead {
    #[inline]
    pub(crate) fn from_words(words: [u32; 3]) -> ResponseHead {
        let [sense_len, residual, last] = words.map(u32::from_le);
        ResponseHead { sense_len, residual, status: (last >> 16) as u8, response: (last >> 24) as u8 }
    }

    /// Returns the outcome of a command with `len` bytes of data. `sense` reads the sense data into a slice of its
    /// length.
    #[inline]
    pub(crate) fn outcome(self, len: u32, sense: impl FnOnce(&mut [u8])) -> CommandOutcome {
        // Fast path: nearly every response is GOOD without a residual.
        if self.status == 0 && self.response == 0 && self.residual == 0 && self.sense_len as usize <= SENSE_BYTES {
            return CommandOutcome::Good;
        }
        self.outcome_not_good(len, sense)
    }

    #[cold]
    fn outcome_not_good(self, len: u32, sense: impl FnOnce(&mut [u8])) -> CommandOutcome {
        if self.response == POISON {
            return CommandOutcome::NotWritten;
        }
        if self.sense_len as usize > SENSE_BYTES {
            return CommandOutcome::Malformed("more sense data than there is room for");
        }
        if self.response != 0 {
            return CommandOutcome::Response(CommandResponse::from_byte(self.response));
        }
        if self.residual > len {
            return CommandOutcome::Malformed("a residual that is larger than the data");
        }
        match self.status {
            0x00 => CommandOutcome::Underrun { residual: self.residual },
            0x02 => {
                let mut bytes = [0; SENSE_BYTES];
                let bytes = &mut bytes[..self.sense_len as usize];
                sense(bytes);
                match Sense::parse(bytes) {
                    Some(sense) => CommandOutcome::CheckCondition(sense),
                    None if bytes.is_empty() => CommandOutcome::Malformed("CHECK CONDITION without sense data"),
                    None => CommandOutcome::Malformed("sense data of no known format"),
                }
            }
            other => CommandOutcome::Status(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: ResponseHead = ResponseHead { sense_len: 0, residual: 0, status: 0, response: 0 };

    #[test]
    fn responses_have_their_outcomes() {
        let fixed = [0xf0, 0, 3, 0, 0, 1, 0, 10, 0, 0, 0, 0, 0x11, 0x04, 0, 0, 0, 0];
        let sense = Sense { key: 3, asc: 0x11, ascq: 4, deferred: false, information: Some(256) };
        for (head, expected) in [
            (GOOD, CommandOutcome::Good),
            (ResponseHead { residual: 7, ..GOOD }, CommandOutcome::Underrun { residual: 7 }),
            (
                ResponseHead { residual: 101, ..GOOD },
                CommandOutcome::Malformed("a residual that is larger than the data"),
            ),
            (
                ResponseHead { sense_len: 97, ..GOOD },
                CommandOutcome::Malformed("more sense data than there is room for"),
            ),
            (ResponseHead { sense_len: 18, status: 2, residual: 100, ..GOOD }, CommandOutcome::CheckCondition(sense)),
            (ResponseHead { status: 2, ..GOOD }, CommandOutcome::Malformed("CHECK CONDITION without sense data")),
            (
                ResponseHead { status: 2, sense_len: 2, ..GOOD },
                CommandOutcome::Malformed("sense data of no known format"),
            ),
            (ResponseHead { status: 0x28, ..GOOD }, CommandOutcome::Status(0x28)),
            (ResponseHead { response: 3, ..GOOD }, CommandOutcome::Response(CommandResponse::BadTarget)),
            (
                ResponseHead { response: 3, residual: 1000, ..GOOD },
                CommandOutcome::Response(CommandResponse::BadTarget),
            ),
            (ResponseHead { response: 77, ..GOOD }, CommandOutcome::Response(CommandResponse::Unknown(77))),
            (ResponseHead { response: POISON, ..GOOD }, CommandOutcome::NotWritten),
        ] {
            let outcome = head.outcome(100, |bytes| {
                let len = bytes.len();
                bytes.copy_from_slice(&fixed[..len]);
            });
            assert_eq!(outcome, expected, "{head:?}");
        }
    }

    #[test]
    fn both_formats_of_sense_data_are_parsed() {
        let mut bytes = vec![0x72, 6, 0x29, 1, 0, 0, 0, 16];
        assert_eq!(Sense::parse(&bytes).map(|s| (s.key, s.asc, s.ascq, s.information)), Some((6, 0x29, 1, None)));
        bytes.extend([0x02, 2, 0, 0]);
        bytes.extend([0x00, 10, 0x80, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(Sense::parse(&bytes).and_then(|s| s.information), Some(258));
        // A truncated descriptor is ignored.
        bytes.truncate(20);
        assert_eq!(Sense::parse(&bytes).map(|s| s.information), Some(None));
        assert!(Sense::parse(&[0x73, 6, 0x29, 1]).is_some_and(|s| s.deferred));
        assert_eq!(Sense::parse(&[0x70, 0, 6]).map(|s| (s.key, s.asc, s.information)), Some((6, 0, None)));
        for bad in [&[][..], &[0x70], &[0x72, 6, 1], &[0, 1, 2, 3]] {
            assert_eq!(Sense::parse(bad), None, "{bad:?}");
        }
    }
}
