//! Buffers with leases: the memory of requests in flight.
//!
//! A pool belongs to one worker. It adopts guest memory tables as leases and hands out [`Buffer`]s whose pieces lie in
//! them; while a buffer lives its table stays mapped. All bookkeeping is worker-local: taking and giving back a buffer
//! costs two plain counter updates.

use std::sync::Arc;

use mqblk_core::{ByteLen, ByteOffset};

use crate::dirty::DirtyLog;
use crate::guest::{GuestAddress, GuestMemory};
use crate::mapping::Mapping;

mod direct;
mod join;
mod logging;

/// A buffer's handle: 4 bytes, moved and never copied. Give it back to the pool that made it.
#[derive(Debug)]
#[must_use = "a buffer that is not released keeps its memory mapped for ever"]
pub struct Buffer(std::num::NonZeroU32);

impl Buffer {
    #[inline]
    fn index(&self) -> usize {
        self.0.get() as usize - 1
    }
}

/// A lane whose buffers are pieces of guest memory.
pub trait PooledLane: mqblk_core::Lane<Buffer = Buffer> + 'static {
    /// The worker's buffers.
    fn pool(&mut self) -> &mut BufferPool;
}

/// A worker's lease on a memory table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId {
    index: u32,
    /// Tells a lease from a later one in the same place.
    generation: u32,
}

/// A guest address that is not mapped, or a request that has more pieces than allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// A piece of a buffer: host memory, and the io_uring fixed buffer that it lies in, if any.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    address: u64,
    len: u32,
    fixed: u32,
}

const NOT_FIXED: u32 = u32::MAX;

impl Segment {
    /// Host address, for system calls only.
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The registered buffer that holds all of it.
    #[inline]
    pub fn fixed(&self) -> Option<u16> {
        (self.fixed != NOT_FIXED).then_some(self.fixed as u16)
    }
}

/// Which registered buffers cover a region: consecutive indices, each for `1 << FIXED_SHIFT` bytes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedBuffers {
    /// Index of the buffer that holds the region's start.
    pub first: u16,
}

impl FixedBuffers {
    /// The kernel registers at most 1 GiB as one buffer (io_uring_register(2)).
    pub const CHUNK: u64 = 1 << 30;
}

/// The region that the last translation hit.
#[derive(Clone, Copy, Debug, Default)]
struct Hot {
    guest: u64,
    len: u64,
    host: u64,
    /// Index of the first registered buffer of the region; [`NOT_FIXED`] without one.
    fixed_first: u32,
}

impl Hot {
    /// The registered buffer that holds all of the `len` bytes (at least 1) from `at` in the region.
    #[inline]
    fn fixed(&self, at: u64, len: u64) -> u32 {
        let chunk = at / FixedBuffers::CHUNK;
        match self.fixed_first {
            NOT_FIXED => NOT_FIXED,
            first if chunk == (at + len - 1) / FixedBuffers::CHUNK => first + chunk as u32,
            _ => NOT_FIXED,
        }
    }
}

#[derive(Debug)]
struct Lease {
    memory: Arc<GuestMemory>,
    hot: Hot,
    /// Buffers that live in it.
    uses: u32,
    /// No new buffers; forgotten when `uses` reaches 0.
    retired: bool,
    generation: u32,
    fixed: Vec<Option<FixedBuffers>>,
    /// What was written is marked here.
    log: Option<Arc<DirtyLog>>,
    /// The same for all leases on one guest's memory: the generation of the first.
    family: u32,
}

impl Lease {
    /// Makes the region that holds `address` the hot one.
    #[cold]
    fn change_region(&mut self, address: u64) -> Option<(&Hot, u64)> {
        let index = self.memory.find(GuestAddress(address))?;
        let region = &self.memory.regions()[index];
        let fixed = self.fixed.get(index).copied().flatten();
        self.hot = Hot {
            guest: region.guest().0,
            len: region.len(),
            host: region.host().as_ptr() as u64,
            fixed_first: fixed.map_or(NOT_FIXED, |fixed| fixed.first.into()),
        };
        Some((&self.hot, address - self.hot.guest))
    }
}

/// Longest piece: a length has 32 bits.
const MOST_RUN: u64 = 1 << 31;

const INLINE: usize = 2;
/// Room of a new list of pieces; it grows with the longest request.
const SPILL: usize = 8;
const NO_SPILL: u32 = u32::MAX;

/// One cache line for the common request of one or two pieces.
#[repr(align(64))]
#[derive(Debug)]
struct Entry {
    total: u64,
    /// Host address of the status byte; 0 when there is none.
    status: u64,
    inline: [Segment; INLINE],
    lease: u32,
    pieces: u16,
    live: bool,
    /// The pieces are written to, not read.
    writable: bool,
    /// Where more than [`INLINE`] pieces are.
    spill: u32,
    /// The first member of a joined buffer, or the member after this one: index + 1, 0 at the end.
    next: u32,
}

const _: () = assert!(size_of::<Entry>() == 64, "one cache line");

const EMPTY: Segment = Segment { address: 0, len: 0, fixed: NOT_FIXED };

/// Makes room as `Vec::reserve` does, but moves what is in the list only: the allocator would copy its empty room too, and so make it exist.
fn make_capacity<T>(list: &mut Vec<T>, wanted: usize) {
    if list.capacity() < wanted {
        let mut larger = Vec::with_capacity(wanted.max(2 * list.capacity()));
        larger.append(list);
        *list = larger;
    }
}

/// A worker's buffers and leases.
#[derive(Debug, Default)]
pub struct BufferPool {
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Buffers that queues and bounce pools announced.
    reserved: usize,
    spills: Vec<Vec<Segment>>,
    free_spills: Vec<u32>,
    leases: Vec<Option<Lease>>,
    adopted: u32,
}

impl BufferPool {
    /// An empty pool.
    pub fn new() -> Self {
        BufferPool::default()
    }

    /// Makes room for `more` further buffers. Only address space: a buffer's memory is made when so many are in use for the first time, so
    /// queues that are deep and idle cost little. Undone by [`unreserve`](Self::unreserve).
    pub fn reserve(&mut self, more: usize) {
        self.reserved += more;
        self.make_room(self.reserved);
    }

    /// Ends a reservation. The room stays for the next one.
    pub fn unreserve(&mut self, less: usize) {
        self.reserved = self.reserved.saturating_sub(less);
    }

    fn make_room(&mut self, entries: usize) {
        make_capacity(&mut self.entries, entries);
        make_capacity(&mut self.spills, entries);
        make_capacity(&mut self.free, entries);
        make_capacity(&mut self.free_spills, entries);
    }

    #[cold]
    fn grow_to(&mut self, entries: usize) {
        self.make_room(entries);
        for _ in self.entries.len()..entries {
            self.free.push(self.entries.len() as u32);
            self.entries.push(Entry {
                total: 0,
                status: 0,
                inline: [EMPTY; INLINE],
                lease: 0,
                pieces: 0,
                live: false,
                writable: false,
                spill: NO_SPILL,
                next: 0,
            });
        }
        // Every buffer may have many pieces at once.
        for _ in self.spills.len()..entries {
            self.free_spills.push(self.spills.len() as u32);
            self.spills.push(Vec::with_capacity(SPILL));
        }
    }

    /// Takes a lease on a memory table. `fixed` names the registered buffers of its regions, in the regions' order.
    pub fn adopt(&mut self, memory: Arc<GuestMemory>, fixed: Vec<Option<FixedBuffers>>) -> LeaseId {
        self.adopted = self.adopted.wrapping_add(1);
        let generation = self.adopted;
        let lease = Lease {
            memory,
            hot: Hot::default(),
            uses: 0,
            retired: false,
            generation,
            fixed,
            log: None,
            family: generation,
        };
        let free = self.leases.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.leases.push(None);
            self.leases.len() - 1
        });
        self.leases[index] = Some(lease);
        LeaseId { index: index as u32, generation }
    }

    /// Gives a lease back. Its memory stays mapped until its last buffer is released. Whether that is already so.
    pub fn retire(&mut self, id: LeaseId) -> bool {
        let Some(slot) = self.leases.get_mut(id.index as usize) else { return true };
        let Some(lease) = slot.as_mut().filter(|lease| lease.generation == id.generation) else { return true };
        lease.retired = true;
        let gone = lease.uses == 0;
        if gone {
            *slot = None;
        }
        gone
    }

    /// Whether a retired lease's last buffer was released.
    pub fn is_gone(&self, id: LeaseId) -> bool {
        let slot = self.leases.get(id.index as usize).and_then(Option::as_ref);
        slot.is_none_or(|lease| lease.generation != id.generation)
    }

    /// Buffers that live in a lease.
    pub fn uses(&self, id: LeaseId) -> u32 {
        let slot = self.leases.get(id.index as usize).and_then(Option::as_ref);
        slot.filter(|lease| lease.generation == id.generation).map_or(0, |lease| lease.uses)
    }

    #[inline]
    fn lease(&mut self, id: u32) -> &mut Lease {
        self.leases[id as usize].as_mut().expect("a live buffer or queue holds its lease")
    }

    /// The region that holds `address`, and where in it that is.
    #[inline]
    fn locate(&mut self, lease: u32, address: u64) -> Option<(&Hot, u64)> {
        let lease = self.lease(lease);
        let at = address.wrapping_sub(lease.hot.guest);
        if at < lease.hot.len { Some((&lease.hot, at)) } else { lease.change_region(address) }
    }

    /// Where `len` bytes at `address` are in this process. `None` unless they are mapped in one piece.
    #[inline]
    fn host(&mut self, lease: u32, address: u64, len: u64) -> Option<u64> {
        let (hot, at) = self.locate(lease, address)?;
        (len <= hot.len - at).then_some(hot.host + at)
    }

    /// A buffer without pieces in this lease.
    ///
    /// # Panics
    /// When the lease was retired: a queue holds its lease while it pulls.
    #[inline]
    pub fn take(&mut self, lease: LeaseId) -> Buffer {
        self.lease(lease.index).uses += 1;
        self.take_entry(lease.index)
    }

    #[inline]
    fn take_entry(&mut self, lease: u32) -> Buffer {
        if self.free.is_empty() {
            self.grow_to(self.entries.len() + self.entries.len().clamp(64, 4096));
        }
        let index = self.free.pop().expect("just grown");
        let entry = &mut self.entries[index as usize];
        (entry.total, entry.status, entry.pieces) = (0, 0, 0);
        (entry.lease, entry.live, entry.writable, entry.spill) = (lease, true, false, NO_SPILL);
        Buffer(std::num::NonZeroU32::new(index + 1).expect("index + 1 > 0"))
    }

    /// Ends a buffer, and the members of a joined one. Its lease may end with it.
    #[inline]
    pub fn release(&mut self, buffer: Buffer) {
        let index = buffer.index();
        let lease = self.free_entry(index) as usize;
        let Some(slot) = self.leases.get_mut(lease) else { return self.release_members(index) };
        let held = slot.as_mut().expect("a live buffer holds its lease");
        if held.log.is_some() {
            held.log_entry(&self.entries[index], &self.spills);
        }
        held.uses -= 1;
        if held.retired && held.uses == 0 {
            *slot = None;
        }
    }

    /// Makes an entry free. Returns its lease.
    #[inline]
    fn free_entry(&mut self, index: usize) -> u32 {
        let entry = &mut self.entries[index];
        assert!(entry.live, "a buffer is released once: handles cannot be copied");
        entry.live = false;
        if entry.spill != NO_SPILL {
            self.free_spills.push(entry.spill);
        }
        let lease = entry.lease;
        self.free.push(index as u32);
        lease
    }

    /// Appends `len` bytes of guest memory at `address`. They may span regions; at most `max_pieces` pieces in all.
    ///
    /// # Errors
    /// [`Fault`] when a byte of it is not mapped, or there are too many pieces. The buffer may then hold a part of it.
    #[inline]
    pub fn push(&mut self, buffer: &Buffer, address: GuestAddress, len: u32, max_pieces: u16) -> Result<(), Fault> {
        let index = buffer.index();
        let lease = self.entries[index].lease;
        let (mut address, mut left) = (address.0, u64::from(len));
        while left > 0 {
            let (hot, at) = self.locate(lease, address).ok_or(Fault)?;
            let run = left.min(hot.len - at).min(MOST_RUN);
            let piece = Segment { address: hot.host + at, len: run as u32, fixed: hot.fixed(at, run) };
            self.append(index, piece, max_pieces)?;
            left -= run;
            if left > 0 {
                address = address.checked_add(run).ok_or(Fault)?;
            }
        }
        Ok(())
    }

    #[inline]
    fn append(&mut self, index: usize, piece: Segment, max_pieces: u16) -> Result<(), Fault> {
        let entry = &mut self.entries[index];
        let count = entry.pieces;
        if count >= max_pieces {
            return Err(Fault);
        }
        entry.pieces = count + 1;
        entry.total += u64::from(piece.len);
        match entry.inline.get_mut(usize::from(count)) {
            // Field by field: as one move it would be put together on the stack first, and waited for.
            Some(place) => {
                place.address = piece.address;
                place.len = piece.len;
                place.fixed = piece.fixed;
            }
            None => self.append_spilled(index, piece),
        }
        Ok(())
    }

    /// The third piece moves all into a list; lists keep their capacity, so a warm pool does not allocate.
    fn append_spilled(&mut self, index: usize, piece: Segment) {
        let entry = &mut self.entries[index];
        if entry.spill == NO_SPILL {
            entry.spill = self.free_spills.pop().expect("there are as many lists as buffers");
            let list = &mut self.spills[entry.spill as usize];
            list.clear();
            list.extend_from_slice(&entry.inline);
        }
        self.spills[entry.spill as usize].push(piece);
    }

    /// Names the guest byte that takes the request's status.
    ///
    /// # Errors
    /// [`Fault`] when it is not mapped.
    #[inline]
    pub fn set_status(&mut self, buffer: &Buffer, address: GuestAddress) -> Result<(), Fault> {
        let lease = self.entries[buffer.index()].lease;
        let host = self.host(lease, address.0, 1).ok_or(Fault)?;
        self.entries[buffer.index()].status = host;
        Ok(())
    }

    /// Writes the status byte, if the buffer has one.
    #[inline]
    pub fn write_status(&self, buffer: &Buffer, status: u8) {
        let place = self.entries[buffer.index()].status;
        if place != 0 {
            // SAFETY: `set_status` translated it in the buffer's lease, which keeps it mapped.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(place as usize).write_volatile(status) };
        }
    }

    /// Bytes in all the pieces.
    #[inline]
    pub fn len(&self, buffer: &Buffer) -> ByteLen {
        ByteLen(self.entries[buffer.index()].total)
    }

    /// Cuts a buffer to its first `len` bytes. One that is shorter stays as it is. Nothing is pushed to it any more.
    pub fn truncate(&mut self, buffer: &Buffer, len: ByteLen) {
        let entry = &mut self.entries[buffer.index()];
        let pieces = usize::from(entry.pieces);
        let list = match entry.spill {
            NO_SPILL => &mut entry.inline[..pieces],
            spill => &mut self.spills[spill as usize][..pieces],
        };
        let mut left = len.0;
        let mut kept = 0;
        for piece in list {
            if left == 0 {
                break;
            }
            piece.len = u64::from(piece.len).min(left) as u32;
            left -= u64::from(piece.len);
            kept += 1;
        }
        entry.pieces = kept;
        entry.total = len.0 - left;
        if entry.spill != NO_SPILL {
            self.spills[entry.spill as usize].truncate(usize::from(kept));
        }
    }

    /// The pieces, in order.
    #[inline]
    pub fn segments(&self, buffer: &Buffer) -> &[Segment] {
        let entry = &self.entries[buffer.index()];
        if entry.spill == NO_SPILL {
            &entry.inline[..entry.pieces as usize]
        } else {
            &self.spills[entry.spill as usize]
        }
    }

    /// Whether every piece starts and ends at a multiple of `align` bytes (a power of two).
    #[inline]
    pub fn is_aligned(&self, buffer: &Buffer, align: u32) -> bool {
        let mask = u64::from(align) - 1;
        self.segments(buffer).iter().all(|piece| (piece.address | u64::from(piece.len)) & mask == 0)
    }

    /// Calls `each` with every piece's host address and length, from `at` bytes into the buffer, for `len` bytes.
    /// `false` when the buffer is shorter.
    fn for_range(&self, buffer: &Buffer, at: u64, len: u64, mut each: impl FnMut(*mut u8, usize)) -> bool {
        if at.checked_add(len).is_none_or(|end| end > self.len(buffer).0) {
            return false;
        }
        let (mut skip, mut left) = (at, len);
        for piece in self.segments(buffer) {
            let size = u64::from(piece.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let run = (size - skip).min(left);
            if run == 0 {
                break;
            }
            each(std::ptr::with_exposed_provenance_mut::<u8>((piece.address + skip) as usize), run as usize);
            (skip, left) = (0, left - run);
        }
        true
    }

    /// Copies from `at` bytes into the buffer to private memory. `false` (nothing copied) when the buffer is shorter.
    #[must_use]
    pub fn copy_out(&self, buffer: &Buffer, at: u64, bytes: &mut [u8]) -> bool {
        let mut done = 0;
        self.for_range(buffer, at, bytes.len() as u64, |place, run| {
            // SAFETY: the lease keeps `run` bytes at `place` mapped; `bytes` is private and has room for all runs.
            unsafe { place.copy_to_nonoverlapping(bytes[done..done + run].as_mut_ptr(), run) };
            done += run;
        })
    }

    /// Copies private memory to `at` bytes into the buffer. `false` (nothing copied) when the buffer is shorter.
    #[must_use]
    pub fn copy_in(&self, buffer: &Buffer, at: u64, bytes: &[u8]) -> bool {
        debug_assert!(self.will_be_logged(buffer));
        let mut done = 0;
        self.for_range(buffer, at, bytes.len() as u64, |place, run| {
            // SAFETY: as in `copy_out`, the other way.
            unsafe { place.copy_from_nonoverlapping(bytes[done..done + run].as_ptr(), run) };
            done += run;
        })
    }

    /// Fills the whole buffer from `memory` at `from`. `false` (nothing copied) when `memory` is shorter.
    #[must_use]
    pub fn fill_from(&self, buffer: &Buffer, memory: &Mapping, from: ByteOffset) -> bool {
        debug_assert!(self.will_be_logged(buffer));
        self.with_mapping(buffer, memory, from, |guest, host, run| {
            // SAFETY: both sides are mapped for `run` bytes. They may be written concurrently by the guest; bytes have no
            // invalid values. `copy` allows the overlap of a guest region with itself.
            unsafe { guest.copy_from(host, run) }
        })
    }

    /// Stores the whole buffer into `memory` at `to`. `false` (nothing copied) when `memory` is shorter.
    #[must_use]
    pub fn store_to(&self, buffer: &Buffer, memory: &Mapping, to: ByteOffset) -> bool {
        self.with_mapping(buffer, memory, to, |guest, host, run| {
            // SAFETY: as in `fill_from`, the other way.
            unsafe { guest.copy_to(host, run) }
        })
    }

    fn with_mapping(
        &self,
        buffer: &Buffer,
        memory: &Mapping,
        at: ByteOffset,
        copy: impl Fn(*mut u8, *mut u8, usize),
    ) -> bool {
        let len = self.len(buffer);
        if !mqblk_core::units::in_range(at, len, ByteLen(memory.len() as u64)) {
            return false;
        }
        let mut place = at.0 as usize;
        self.for_range(buffer, 0, len.0, |guest, run| {
            copy(guest, memory.address(place).as_ptr(), run);
            place += run;
        })
    }

    /// Copies the first `len` bytes of one buffer to another. `false` (nothing copied) when either is shorter.
    #[must_use]
    pub fn copy(&self, from: &Buffer, to: &Buffer, len: ByteLen) -> bool {
        self.copy_range(from, 0, to, 0, len)
    }

    /// Copies `len` bytes from `from_at` bytes into one buffer to `to_at` bytes into another. `false` (nothing copied) when
    /// either is shorter.
    #[must_use]
    pub fn copy_range(&self, from: &Buffer, from_at: u64, to: &Buffer, to_at: u64, len: ByteLen) -> bool {
        debug_assert!(self.will_be_logged(to));
        let fits = |at: u64, buffer| mqblk_core::units::in_range(ByteOffset(at), len, self.len(buffer));
        if !fits(from_at, from) || !fits(to_at, to) {
            return false;
        }
        let mut at = to_at;
        self.for_range(from, from_at, len.0, |source, run| {
            let mut done = 0;
            self.for_range(to, at, run as u64, |target, part| {
                // SAFETY: both leases keep their sides mapped; `copy_to` allows overlap.
                unsafe { source.add(done).copy_to(target, part) };
                done += part;
            });
            at += run as u64;
        })
    }
}

#[cfg(test)]
mod tests;
