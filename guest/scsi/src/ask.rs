//! A command in the hands of its handler.

use mqblk_core::{ByteLen, ByteOffset, Op};

use crate::cdb::Cdb;
use crate::nexus::Nexus;
use crate::reservation::{Access, Refusal};
use crate::sense::Sense;
use crate::step::{DataOut, Ending, Step, Work};
use crate::unit::LogicalUnit;

/// A command in the hands of its handler.
pub(crate) struct Ask<'a> {
    pub(crate) nexus: &'a Nexus,
    pub(crate) unit: &'a LogicalUnit,
    pub(crate) cdb: Cdb,
    pub(crate) data_in: u64,
    pub(crate) data_out: &'a dyn DataOut,
    pub(crate) work: &'a mut Work,
}

/// Why a command does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// With this sense data.
    Check(Sense),
    /// It wants more data than its buffers hold.
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

/// What a handler gives.
pub(crate) type Begun = Result<Step, Refused>;

impl Ask<'_> {
    /// Ends with what is in the reply, cut to the allocation length.
    pub(crate) fn reply(&mut self, allocation: u32) -> Begun {
        reply(self.work, allocation, self.data_in)
    }

    /// That no reservation of another nexus forbids it.
    pub(crate) fn permitted(&self, access: Access) -> Result<(), Refused> {
        if self.nexus.allows(access) { Ok(()) } else { Err(Refused::Conflict) }
    }

    /// Ends without data.
    pub(crate) fn good(&self) -> Begun {
        Ok(Step::End(Ending::good(0)))
    }

    /// Makes what was written before durable; `transferred` is what the command itself transferred.
    pub(crate) fn flush(transferred: u64) -> Step {
        Step::Disk { op: Op::Flush, start: ByteOffset(0), len: ByteLen::ZERO, transferred }
    }

    /// A private copy of the first `len` bytes of a parameter list.
    pub(crate) fn parameters(&self, len: usize) -> Result<Vec<u8>, Refused> {
        let mut bytes = vec![0; len];
        if self.data_out.copy(0, &mut bytes) { Ok(bytes) } else { Err(Refused::Overrun) }
    }

    /// That the data-out buffer holds `len` bytes.
    pub(crate) fn offered(&self, len: ByteLen) -> Result<(), Refused> {
        if len.0 > self.data_out.len() { Err(Refused::Overrun) } else { Ok(()) }
    }

    /// That the bits of `mask` in byte `at` are zero: a feature that this unit lacks.
    pub(crate) fn zero(&self, at: usize, mask: u8) -> Result<(), Refused> {
        let found = self.cdb.u8(at) & mask;
        if found == 0 {
            return Ok(());
        }
        // The field's most significant bit, not the first one that is set.
        let bit = 7 - mask.leading_zeros() as u8;
        Err(Sense::in_command(at as u16, (mask != 0xff).then_some(bit)).into())
    }

    /// `count` blocks from `lba` on, as bytes.
    pub(crate) fn range(&self, lba: u64, count: u64) -> Result<(ByteOffset, ByteLen), Refused> {
        self.unit.range(lba, count).ok_or(Refused::Check(Sense::OUT_OF_RANGE))
    }
}

/// See [`Ask::reply`].
pub(crate) fn reply(work: &mut Work, allocation: u32, data_in: u64) -> Begun {
    work.reply.truncate(usize::try_from(allocation).unwrap_or(usize::MAX));
    let len = work.reply.len() as u64;
    if len > data_in {
        work.reply.clear();
        return Err(Refused::Overrun);
    }
    Ok(Step::End(Ending::good(len)))
}
