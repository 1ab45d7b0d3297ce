//! VERIFY and WRITE AND VERIFY: the medium is read, and compared with the data sent if BYTCHK requests it.

use mqblk_core::{ByteLen, ByteOffset, Op};

use super::{Lent, Walk};
use crate::sense::Sense;
use crate::step::{Ending, Next};

/// What the medium is compared with (BYTCHK).
#[derive(Debug)]
pub(crate) enum Check {
    /// Nothing: reading it is enough.
    Readable,
    /// The data-out buffer, block by block.
    Blocks,
    /// This block, with each block of the medium.
    Same(Vec<u8>),
}

#[derive(Debug)]
pub(crate) struct Verify {
    walk: Walk,
    check: Check,
    first_lba: u64,
    block: usize,
    transferred: u64,
    /// Writes the data-out buffer first.
    write: Option<(ByteOffset, ByteLen)>,
    reading: bool,
    copy: Vec<u8>,
}

impl Verify {
    pub(crate) fn new(range: (ByteOffset, ByteLen), lba: u64, block: u32, check: Check, transferred: u64) -> Verify {
        Verify {
            walk: Walk::new(range.0, range.1),
            check,
            first_lba: lba,
            block: block as usize,
            transferred,
            write: None,
            reading: false,
            copy: Vec::new(),
        }
    }

    /// Makes it a WRITE AND VERIFY.
    pub(crate) fn after_write(mut self, range: (ByteOffset, ByteLen)) -> Verify {
        self.write = Some(range);
        self
    }

    pub(super) fn next(&mut self, context: &mut Lent<'_>) -> Next {
        if let Some((start, len)) = self.write.take() {
            // FUA: the data is verified on the medium.
            return Next::Disk { op: Op::Write { fua: true }, start, len };
        }
        if std::mem::replace(&mut self.reading, true) {
            if let Err(sense) = self.compare(context) {
                return Next::End(Ending::check(sense));
            }
            self.walk.advance();
        }
        match self.walk.piece() {
            Some((start, len)) => Next::Read { start, len: ByteLen(len as u64) },
            None => Next::End(Ending::good(self.transferred)),
        }
    }

    /// Compares the data read. INFORMATION is the LBA of the first block that differs.
    fn compare(&mut self, context: &Lent<'_>) -> Result<(), Sense> {
        let Some((_, len)) = self.walk.piece() else { return Ok(()) };
        let found = &context.scratch[..len];
        let differs = match &self.check {
            Check::Readable => None,
            Check::Blocks => {
                self.copy.resize(len, 0);
                if !context.data_out.copy(self.walk.done(), &mut self.copy) {
                    return Err(Sense::DATA_GONE);
                }
                found.chunks(self.block).zip(self.copy.chunks(self.block)).position(|(found, sent)| found != sent)
            }
            Check::Same(sent) => found.chunks(self.block).position(|found| found != sent),
        };
        match differs {
            Some(block) => {
                let before = self.walk.done() / self.block as u64;
                Err(Sense::miscompare(self.first_lba + before + block as u64))
            }
            None => Ok(()),
        }
    }
}
