//! Lists of a buffer's pieces of memory.

/// The kernel accepts at most this many segments in one operation (UIO_MAXIOV).
pub(crate) const MAX_PIECES: usize = 1024;

/// Fills the iovec list of a buffer without its first `skip` bytes.
pub(crate) fn fill_pieces(pieces: &mut Vec<libc::iovec>, segments: &[mqblk_memory::Segment], skip: u64) {
    pieces.clear();
    append_range(pieces, segments, skip, u64::MAX);
}

/// Adds the iovecs of a buffer's bytes from `start` to `end`.
#[inline]
pub(crate) fn append_range(pieces: &mut Vec<libc::iovec>, segments: &[mqblk_memory::Segment], start: u64, end: u64) {
    let (mut skip, mut left) = (start, end - start);
    for segment in segments {
        let len = u64::from(segment.len());
        if skip >= len {
            skip -= len;
            continue;
        }
        let run = (len - skip).min(left);
        if run == 0 {
            break;
        }
        let base = std::ptr::with_exposed_provenance_mut((segment.address() + skip) as usize);
        pieces.push(libc::iovec { iov_base: base, iov_len: run as usize });
        (skip, left) = (0, left - run);
    }
}
