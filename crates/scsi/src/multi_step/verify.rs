//! VERIFY and WRITE AND VERIFY: the medium is read, and compared with the data sent if BYTCHK requests it.

use mqblk_core::{ByteLen, ByteOffset, Op};

use super::step::{ChunkCursor, StepContext};
use crate::command::{CommandCompletion, NextStep};
use crate::sense::Sense;

/// The data to compare with the medium (BYTCHK).
#[derive(Debug)]
pub(crate) enum VerifyMode {
    /// None: reading the medium is enough.
    Readable,
    /// The data-out buffer, block by block.
    Blocks,
    /// This block, with each block of the medium.
    SameBlock(Vec<u8>),
}

#[derive(Debug)]
pub(crate) struct Verify {
    walk: ChunkCursor,
    mode: VerifyMode,
    first_lba: u64,
    block: usize,
    transferred: u64,
    /// Writes the data-out buffer first.
    write: Option<(ByteOffset, ByteLen)>,
    reading: bool,
    copy: Vec<u8>,
}

impl Verify {
    pub(crate) fn new(
        range: (ByteOffset, ByteLen),
        lba: u64,
        block: u32,
        mode: VerifyMode,
        transferred: u64,
    ) -> Verify {
        Verify {
            walk: ChunkCursor::new(range.0, range.1),
            mode,
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

    pub(super) fn next(&mut self, context: &mut StepContext<'_>) -> NextStep {
        if let Some((start, len)) = self.write.take() {
            // FUA: the data is verified on the medium.
            return NextStep::Disk { op: Op::Write { fua: true }, start, len };
        }
        if std::mem::replace(&mut self.reading, true) {
            if let Err(sense) = self.compare(context) {
                return NextStep::Complete(CommandCompletion::check_condition(sense));
            }
            self.walk.advance();
        }
        match self.walk.chunk() {
            Some((start, len)) => NextStep::Read { start, len: ByteLen(len as u64) },
            None => NextStep::Complete(CommandCompletion::good(self.transferred)),
        }
    }

    /// Compares the data read. INFORMATION is the LBA of the first block that differs.
    fn compare(&mut self, context: &StepContext<'_>) -> Result<(), Sense> {
        let Some((_, len)) = self.walk.chunk() else { return Ok(()) };
        let found = &context.scratch[..len];
        let differs = match &self.mode {
            VerifyMode::Readable => None,
            VerifyMode::Blocks => {
                self.copy.resize(len, 0);
                if !context.data_out.copy(self.walk.done(), &mut self.copy) {
                    return Err(Sense::DATA_PHASE_ERROR);
                }
                found.chunks(self.block).zip(self.copy.chunks(self.block)).position(|(found, sent)| found != sent)
            }
            VerifyMode::SameBlock(sent) => found.chunks(self.block).position(|found| found != sent),
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
