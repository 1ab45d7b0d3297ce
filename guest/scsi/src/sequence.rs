//! Commands of several steps: VERIFY with data, WRITE AND VERIFY, COMPARE AND WRITE, ORWRITE, WRITE SAME with a pattern,
//! PERSISTENT RESERVE OUT that waits for its state to be kept.

use std::sync::Arc;

use mqblk_core::{Outcome, Wake};

use crate::step::{DataOut, Next, Work};

/// A command of several steps, between two of them.
#[derive(Debug)]
pub struct Sequence {}

impl Sequence {
    /// Bytes of scratch memory that a driver lends.
    pub const SCRATCH: usize = 64 << 10;

    /// The next step. `before`: how the step before ended; `None` at the first one and after [`Next::Wait`].
    pub fn next<D: DataOut + ?Sized>(
        &mut self,
        _before: Option<Outcome>,
        _scratch: &mut [u8],
        _data_out: &D,
        _waker: &Arc<dyn Wake>,
        _work: &mut Work,
    ) -> Next {
        Next::Wait
    }
}
