//! Slices of buffers: the data of a part of a long request.

use super::*;

impl BufferPool {
    /// Returns a buffer of the `len` bytes from `at` bytes into `buffer`, without a status byte. It holds the lease
    /// too. The owner of `buffer` keeps that handle until the slice is released.
    ///
    /// # Panics
    /// When `buffer` is shorter, or merged: nothing in it would hold the leases of the members.
    pub fn slice(&mut self, buffer: &Buffer, at: u64, len: ByteLen) -> Buffer {
        let entry = &self.entries[self.index(buffer)];
        assert!(at.checked_add(len.0).is_some_and(|end| end <= entry.total), "a slice lies in its buffer");
        assert!(!self.is_merged(buffer), "merged buffers are not sliced");
        let (lease, writable, spill) = (entry.lease, entry.writable, entry.spill);
        let (inline, count) = (entry.inline, usize::from(entry.segments));
        self.lease(lease).buffers += 1;
        let slice = self.take_entry(lease);
        let index = self.index(&slice);
        self.entries[index].writable = writable;
        if spill == NO_SPILL {
            self.append_range(self.index(&slice), &inline[..count], at, len.0);
        } else {
            let segments = std::mem::take(&mut self.spills[spill as usize]);
            self.append_range(self.index(&slice), &segments, at, len.0);
            self.spills[spill as usize] = segments;
        }
        slice
    }

    /// Appends the parts of `segments` that hold the `len` bytes from `at` on.
    fn append_range(&mut self, index: usize, segments: &[Segment], at: u64, len: u64) {
        let (mut skip, mut left) = (at, len);
        for segment in segments {
            let size = u64::from(segment.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let run = (size - skip).min(left);
            if run == 0 {
                return;
            }
            let part = Segment { address: segment.address + skip, len: run as u32, fixed: segment.fixed };
            self.append(index, part, u16::MAX).expect("as many segments as the buffer at most");
            (skip, left) = (0, left - run);
        }
    }
}

#[cfg(test)]
mod tests;
