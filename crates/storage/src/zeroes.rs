//! Zeroes for guest memory.

use mqblk_memory::Buffer;
use mqblk_uring::UringContext;

const ZEROES: [u8; 4096] = [0; 4096];

/// Zeroes a part of a buffer. Returns false if its memory was lost.
pub(crate) fn fill(context: &UringContext, buffer: &Buffer, at: u64, len: u64) -> bool {
    (0..len).step_by(ZEROES.len()).all(|done| {
        let run = (len - done).min(ZEROES.len() as u64) as usize;
        context.buffers.copy_in(buffer, at + done, &ZEROES[..run])
    })
}
