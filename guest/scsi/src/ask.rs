//! Context of a command that is being started.

use mqblk_core::{ByteLen, ByteOffset, Op};

use crate::cdb::Cdb;
use crate::nexus::Nexus;
use crate::reservation::{Access, Refusal};
use crate::sense::Sense;
use crate::step::{DataOut, Ending, Step, Work};
use crate::unit::LogicalUnit;

/// Context of a command that is being started.
pub(crate) struct Ask<'a> {
    pub(crate) nexus: &'a Nexus,
    pub(crate) unit: &'a LogicalUnit,
    pub(crate) cdb: Cdb,
    pub(crate) data_in: u64,
    pub(crate) data_out: &'a dyn DataOut,
    pub(crate) work: &'a mut Work,
}

/// Reason why a command does not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// CHECK CONDITION with this sense data.
    Check(Sense),
    /// The data exceeds the initiator's buffers.
    Overrun,
    /// Another nexus holds a reservation.
    Conflict,
}

impl From<Sense> for Refused {
    fn from(sense: Sense) -> Refused {
        Refused::Check(sense)
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Refused {
        match refusal {
            Refusal::Conflict => Refused::Conflict,
            Refusal::Check(sense) => Refused::Check(sense),
            Refusal::Overrun => Refused::Overrun,
        }
    }
}

/// Result of a command handler.
pub(crate) type Begun = Result<Step, Refused>;

impl Ask<'_> {
    /// Completes the command with the data-in bytes, cut to the allocation length.
    pub(crate) fn reply(&mut self, allocation: u32) -> Begun {
        reply(self.work, allocation, self.data_in)
    }

    /// Checks that no reservation of another nexus forbids this class of command.
    pub(crate) fn permitted(&self, access: Access) -> Result<(), Refused> {
        if self.nexus.allows(access) { Ok(()) } else { Err(Refused::Conflict) }
    }

    /// Completes the command without data.
    pub(crate) fn good(&self) -> Begun {
        Ok(Step::End(Ending::good(0)))
    }

    /// Makes completed writes durable; `transferred` is what the command itself transferred.
    pub(crate) fn flush(transferred: u64) -> Step {
        Step::Disk { op: Op::Flush, start: ByteOffset(0), len: ByteLen::ZERO, transferred }
    }

    /// Returns a private copy of the first `len` bytes of the parameter list.
    pub(crate) fn parameters(&self, len: usize) -> Result<Vec<u8>, Refused> {
        let mut bytes = vec![0; len];
        if self.data_out.copy(0, &mut bytes) { Ok(bytes) } else { Err(Refused::Overrun) }
    }

    /// Checks that the data-out buffer holds `len` bytes.
    pub(crate) fn offered(&self, len: ByteLen) -> Result<(), Refused> {
        if len.0 > self.data_out.len() { Err(Refused::Overrun) } else { Ok(()) }
    }

    /// Checks that the bits of `mask` in byte `at` are zero: the logical unit lacks the feature.
    pub(crate) fn zero(&self, at: usize, mask: u8) -> Result<(), Refused> {
        let found = self.cdb.u8(at) & mask;
        if found == 0 {
            return Ok(());
        }
        // The most significant bit of the field, not the first one that is set.
        let bit = 7 - mask.leading_zeros() as u8;
        Err(Sense::in_command(at as u16, (mask != 0xff).then_some(bit)).into())
    }

    /// Returns `count` blocks from `lba` on as bytes.
    pub(crate) fn range(&self, lba: u64, count: u64) -> Result<(ByteOffset, ByteLen), Refused> {
        self.unit.range(lba, count).ok_or(Refused::Check(Sense::OUT_OF_RANGE))
    }
}

/// See [`CommandContext::end_with_data_in`].
pub(crate) fn reply(buffers: &mut Work, allocation: u32, data_in_len: u64) -> Begun {
    buffers.reply.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
    let len = buffers.reply.len() as u64;
    if len > data_in_len {
        buffers.reply.clear();
        return Err(Refused::Overrun);
    }
    Ok(Step::End(Ending::good(len)))
}
