//! Logical blocks that are smaller than the storage's unit of reads and writes: 512 bytes on 4Kn devices, btrfs, or a
//! reflinked file of XFS.
//!
//! With direct I/O a write of a part of a *unit* (the storage's smallest transfer) is a read of the unit, a change of
//! it in memory, and a write of it. Requests of all workers are in flight at once. No other write of the unit may come
//! between its read and its write, or it would be undone. [`SmallBlocks`] keeps them apart. A write of whole units
//! shares them with others, as guests may have them overlap; a write of a part has its unit alone. If a unit is taken,
//! the request retries when something has completed, or a millisecond later. While a unit is held, only the storage is
//! waited for.
//!
//! A crash leaves the old or the new unit, with its neighbours' blocks in either case: the storage writes units
//! atomically. A request of a killed daemon is replayed after all I/O of that daemon has ended.
//!
//! Alternative: a second descriptor without O_DIRECT, which leaves this to the page cache. Rejected: a direct write
//! beside a buffered one of the same folio fails to invalidate it, and the kernel reports that as an error of the next
//! `fdatasync`. They would have to be kept apart too, by folio.

use std::sync::atomic::{AtomicU32, Ordering};

use mqblk_core::{ByteLen, ByteOffset};

/// Slots, each for the units whose number modulo this is the slot's: 4 KiB of memory. A write of more units holds all
/// slots.
const SLOTS: u64 = 1024;
/// The value of a slot whose unit is held alone. Lower values count shared holds.
const ALONE: u32 = u32::MAX;

/// The units of a file with smaller logical blocks.
#[derive(Debug)]
pub(super) struct SmallBlocks {
    /// Bytes of a unit, a power of two.
    unit: u64,
    slots: Box<[AtomicU32]>,
}

/// Units held by a write. Released by [`SmallBlocks::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldUnits {
    first: u64,
    count: u64,
    alone: bool,
}

/// The next operation of a transfer that goes through the daemon's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// Offset in the file.
    pub(super) at: ByteOffset,
    /// Bytes read or written there.
    pub(super) len: ByteLen,
    /// Bytes of these before the request's.
    pub(super) skip: u64,
    /// Bytes of the request.
    pub(super) part: ByteLen,
}

impl Slice {
    /// Returns true if some of its bytes are not the request's.
    pub(super) fn is_partial(&self) -> bool {
        self.part != self.len
    }
}

impl SmallBlocks {
    pub(super) fn new(unit: u32) -> SmallBlocks {
        SmallBlocks { unit: unit.into(), slots: (0..SLOTS).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Returns the length of a unit.
    pub(super) fn unit(&self) -> ByteLen {
        ByteLen(self.unit)
    }

    /// Returns true if the range consists of whole units.
    #[inline]
    pub(super) fn is_whole(&self, at: ByteOffset, len: ByteLen) -> bool {
        (at.0 | len.0) & (self.unit - 1) == 0
    }

    /// Returns the whole units of a range, if there are any.
    pub(super) fn inner(&self, at: ByteOffset, len: ByteLen) -> Option<(ByteOffset, ByteLen)> {
        let start = at.0.next_multiple_of(self.unit);
        let end = (at.0 + len.0) & !(self.unit - 1);
        (start < end).then(|| (ByteOffset(start), ByteLen(end - start)))
    }

    /// Returns the first operation of a read of this range, of at most `most` bytes: it reads whole units.
    pub(super) fn read_slice(&self, at: ByteOffset, len: ByteLen, most: ByteLen) -> Slice {
        let start = at.0 & !(self.unit - 1);
        let covered = ((at.0 + len.0).next_multiple_of(self.unit) - start).min(most.0 & !(self.unit - 1));
        let skip = at.0 - start;
        Slice { at: ByteOffset(start), len: ByteLen(covered), skip, part: ByteLen(len.0.min(covered - skip)) }
    }

    /// Returns the first operation of a write of this range, of at most `most` bytes: whole units, or a part of one.
    pub(super) fn write_slice(&self, at: ByteOffset, len: ByteLen, most: ByteLen) -> Slice {
        let skip = at.0 & (self.unit - 1);
        let whole = len.0.min(most.0) & !(self.unit - 1);
        if skip == 0 && whole > 0 {
            return Slice { at, len: ByteLen(whole), skip, part: ByteLen(whole) };
        }
        let part = len.0.min(self.unit - skip);
        Slice { at: ByteOffset(at.0 - skip), len: ByteLen(self.unit), skip, part: ByteLen(part) }
    }

    /// Holds the units of a range, shared or alone. `None`: another hold excludes it.
    pub(super) fn hold(&self, at: ByteOffset, len: ByteLen, alone: bool) -> Option<HeldUnits> {
        let (first, end) = (at.0 / self.unit, (at.0 + len.0).div_ceil(self.unit));
        let count = (end - first).min(SLOTS);
        for unit in first..first + count {
            let taken = self.slot(unit).fetch_update(Ordering::Acquire, Ordering::Relaxed, |users| match users {
                0 if alone => Some(ALONE),
                users if alone || users >= ALONE - 1 => None,
                users => Some(users + 1),
            });
            if taken.is_err() {
                self.release(HeldUnits { first, count: unit - first, alone });
                return None;
            }
        }
        Some(HeldUnits { first, count, alone })
    }

    /// Releases units.
    pub(super) fn release(&self, held: HeldUnits) {
        for unit in held.first..held.first + held.count {
            match held.alone {
                true => self.slot(unit).store(0, Ordering::Release),
                false => _ = self.slot(unit).fetch_sub(1, Ordering::Release),
            }
        }
    }

    fn slot(&self, unit: u64) -> &AtomicU32 {
        &self.slots[(unit % SLOTS) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(at: u64, len: u64, skip: u64, part: u64) -> Slice {
        Slice { at: ByteOffset(at), len: ByteLen(len), skip, part: ByteLen(part) }
    }

    #[test]
    fn a_range_is_cut_at_units() {
        let blocks = SmallBlocks::new(4096);
        let most = ByteLen(16384);
        for (at, len, read, write) in [
            (512, 512, slice(0, 4096, 512, 512), slice(0, 4096, 512, 512)),
            (512, 8192, slice(0, 12288, 512, 8192), slice(0, 4096, 512, 3584)),
            (4096, 8704, slice(4096, 12288, 0, 8704), slice(4096, 8192, 0, 8192)),
            (4096, 512, slice(4096, 4096, 0, 512), slice(4096, 4096, 0, 512)),
            (512, 65536, slice(0, 16384, 512, 15872), slice(0, 4096, 512, 3584)),
            (8192, 65536, slice(8192, 16384, 0, 16384), slice(8192, 16384, 0, 16384)),
        ] {
            assert_eq!(blocks.read_slice(ByteOffset(at), ByteLen(len), most), read, "read of {len} at {at}");
            assert_eq!(blocks.write_slice(ByteOffset(at), ByteLen(len), most), write, "write of {len} at {at}");
        }
        assert_eq!(blocks.inner(ByteOffset(512), ByteLen(4096)), None);
        assert_eq!(blocks.inner(ByteOffset(512), ByteLen(8192)), Some((ByteOffset(4096), ByteLen(4096))));
        assert!(blocks.is_whole(ByteOffset(4096), ByteLen(8192)) && !blocks.is_whole(ByteOffset(4096), ByteLen(512)));
    }

    #[test]
    fn a_part_of_a_unit_has_it_alone() {
        let blocks = SmallBlocks::new(4096);
        let hold = |at: u64, len: u64, alone| blocks.hold(ByteOffset(at), ByteLen(len), alone);
        let (one, other) = (hold(0, 8192, false).unwrap(), hold(4096, 8192, false).unwrap());
        assert_eq!(hold(4096, 4096, true), None);
        blocks.release(one);
        assert_eq!(hold(4096, 4096, true), None, "the other still has it");
        blocks.release(other);
        let alone = hold(4096, 4096, true).unwrap();
        assert_eq!((hold(0, 8192, false), hold(4096, 4096, true)), (None, None));
        let beside = hold(0, 4096, true).expect("what was taken before the refusal was given back");
        blocks.release(alone);
        blocks.release(beside);
        let all = hold(0, 64 << 20, false).unwrap();
        assert_eq!(hold(999 << 30, 4096, true), None, "a long range holds all slots");
        blocks.release(all);
        assert!(blocks.slots.iter().all(|slot| slot.load(Ordering::Relaxed) == 0));
    }
}
