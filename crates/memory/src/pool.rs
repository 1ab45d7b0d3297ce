//! Buffers with leases: the memory of requests in flight.
//!
//! A pool belongs to one worker. It takes leases on guest memory tables and hands out [`Buffer`]s whose segments lie in
//! them; while a buffer lives its table stays mapped. All counters are worker-local: taking and releasing a buffer
//! costs two plain counter updates.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use mqblk_core::{ByteLen, ByteOffset};

use crate::dirty::DirtyLog;
use crate::fixed_buffers::FixedBufferUse;
use crate::guest::GuestMemory;
use crate::mapping::Mapping;
use crate::region::GuestAddress;
use crate::shared::keep_copy;
use crate::sigbus;

mod fault;
mod guest_access;
mod lease;
mod logging;
mod merge;
mod release;
mod slice;
mod status;
mod transfer;

pub use fault::BufferFault;
pub use lease::{FixedBuffers, LeaseId};
use lease::{Lease, NOT_FIXED, RegionCache};
pub use transfer::LeaseAccess;

/// Handle of a buffer: 4 bytes, moved and never copied. Must be released to the pool that made it; another one refuses
/// it.
#[derive(Debug)]
#[must_use = "a buffer that is not released keeps its memory mapped for ever"]
pub struct Buffer(NonZeroU32);

impl Buffer {
    /// Returns the handle of entry `index` of the pool with this tag.
    #[inline]
    fn new(tag: NonZeroU32, index: u32) -> Buffer {
        Buffer(tag | index)
    }
}

/// Bits of a handle that are the buffer's index. The bits above are its pool's tag, not 0: 63 pools are
/// distinguishable.
const INDEX_BITS: u32 = 26;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

/// The most buffers of a pool: more than a process has memory for.
const MAX_BUFFERS: usize = INDEX_MASK as usize;

/// Number of pools so far.
static POOLS: AtomicU32 = AtomicU32::new(0);

/// Number of leases so far, of all pools: a lease is never taken for one of another pool.
static LEASES: AtomicU32 = AtomicU32::new(0);

/// Returns the tag of a new pool, shifted above the index.
fn new_tag() -> NonZeroU32 {
    const TAGS: u32 = (1 << (u32::BITS - INDEX_BITS)) - 1;
    let tag = POOLS.fetch_add(1, Ordering::Relaxed) % TAGS + 1;
    NonZeroU32::new(tag << INDEX_BITS).expect("it is between 1 and 63")
}

/// An I/O context whose buffers are segments of guest memory.
pub trait PooledContext: mqblk_core::IoContext<Buffer = Buffer> + 'static {
    /// Returns the worker's buffers.
    fn pool(&mut self) -> &mut BufferPool;

    /// Takes a lease on a memory table, which [`retire`](Self::retire) ends. A context may return the same lease for
    /// the same table; it is retired as often. A context without fixed buffers registers nothing.
    ///
    /// # Errors
    /// Only with [`FixedBufferUse::On`], when the kernel refuses the registration.
    fn adopt(&mut self, memory: Arc<GuestMemory>, _fixed: FixedBufferUse) -> io::Result<LeaseId> {
        Ok(self.pool().acquire_lease(memory, vec![]))
    }

    /// Retires a lease. Its memory stays mapped, and registered, until its last buffer is released.
    fn retire(&mut self, lease: LeaseId) {
        self.pool().retire_lease(lease);
    }

    /// Keeps `file` open until [`let_close`](Self::let_close) was called as often. When the process is killed, the file
    /// stays open, and a lock on it held, until the kernel has completed this context's operations. Does nothing in a
    /// context without such operations.
    fn keep_open(&mut self, _file: &Arc<OwnedFd>) {}

    /// Undoes one [`keep_open`](Self::keep_open).
    fn let_close(&mut self, _file: &Arc<OwnedFd>) {}
}

/// A segment of a buffer: host memory, and the io_uring fixed buffer that contains it, if any.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    address: u64,
    len: u32,
    fixed: u32,
}

impl Segment {
    /// Returns the host address, for system calls only.
    #[inline]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns true if it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the index of the registered buffer that contains all of it.
    #[inline]
    pub fn fixed(&self) -> Option<u16> {
        (self.fixed != NOT_FIXED).then_some(self.fixed as u16)
    }
}

/// Longest segment: lengths have 32 bits.
const MAX_SEGMENT_LEN: u64 = 1 << 31;

const INLINE_SEGMENTS: usize = 2;
/// Capacity of a new segment list; it grows with the longest request.
const SPILL_CAPACITY: usize = 8;
const NO_SPILL: u32 = u32::MAX;
/// The end of the list of free entries.
const NO_ENTRY: u32 = u32::MAX;
/// Used instead of a lease index while an entry is free. No lease has this index: that many do not fit into memory.
const FREE: u32 = i32::MAX as u32;

/// State of a buffer. One cache line for the common request of one or two segments.
#[repr(align(64))]
#[derive(Debug)]
struct BufferEntry {
    /// Bytes of all segments. While the entry is free: the next free entry.
    total: u64,
    /// Host address of the status. Not used if `status_len` is 0.
    status: u64,
    inline: [Segment; INLINE_SEGMENTS],
    /// The lease's index; or [`FREE`], or [`MERGED`](merge::MERGED).
    lease: u32,
    segments: u16,
    /// Length of the status; 0 if there is none.
    status_len: u8,
    /// The device writes to the segments.
    writable: bool,
    /// Index of the list that holds the segments if there are more than [`INLINE_SEGMENTS`].
    spill: u32,
    /// First member of a merged buffer, or the next member after this one: index + 1, 0 at the end.
    next: u32,
}

const _: () = assert!(size_of::<BufferEntry>() == 64, "one cache line");

const EMPTY_SEGMENT: Segment = Segment { address: 0, len: 0, fixed: NOT_FIXED };

/// Reserves capacity as `Vec::reserve` does, but moves only the elements. The allocator would also copy the unused
/// capacity, and allocate its pages.
fn grow_capacity<T>(list: &mut Vec<T>, wanted: usize) {
    if list.capacity() < wanted {
        let mut larger = Vec::with_capacity(wanted.max(2 * list.capacity()));
        larger.append(list);
        *list = larger;
    }
}

/// A worker's buffers and leases.
#[derive(Debug)]
pub struct BufferPool {
    /// The bits above the index in its buffers' handles.
    tag: NonZeroU32,
    entries: Vec<BufferEntry>,
    /// The entry that was freed last; [`NO_ENTRY`] if none is free. A list through the entries: taking and freeing one
    /// never allocates.
    first_free: u32,
    /// Buffers that queues and bounce pools have reserved.
    reserved: usize,
    spills: Vec<Vec<Segment>>,
    free_spills: Vec<u32>,
    leases: Vec<Option<Lease>>,
    /// Losses of memory in this process when the leases were last checked.
    losses: usize,
}

impl Default for BufferPool {
    fn default() -> Self {
        Self::new()
    }
}

impl BufferPool {
    /// Returns an empty pool.
    pub fn new() -> Self {
        BufferPool {
            tag: new_tag(),
            entries: Vec::new(),
            first_free: NO_ENTRY,
            reserved: 0,
            spills: Vec::new(),
            free_spills: Vec::new(),
            leases: Vec::new(),
            losses: 0,
        }
    }

    /// Returns the index of a buffer's entry.
    ///
    /// # Panics
    /// When the buffer is another pool's.
    #[inline]
    fn index(&self, buffer: &Buffer) -> usize {
        let index = buffer.0.get() ^ self.tag.get();
        assert!(index <= INDEX_MASK, "a buffer is used with the pool that made it");
        index as usize
    }

    /// As [`index`](Self::index), unchecked in release builds: the buffer is checked before its segments are used and
    /// when it is released.
    #[inline]
    fn unchecked_index(&self, buffer: &Buffer) -> usize {
        debug_assert_eq!(self.index(buffer), (buffer.0.get() & INDEX_MASK) as usize);
        (buffer.0.get() & INDEX_MASK) as usize
    }

    /// Returns the handle of entry `index`.
    #[inline]
    fn handle(&self, index: u32) -> Buffer {
        Buffer::new(self.tag, index)
    }

    /// Reserves capacity for `more` further buffers. This only reserves address space: memory is allocated when the
    /// number of used buffers first reaches it, so deep idle queues cost little. Undone by
    /// [`unreserve`](Self::unreserve).
    pub fn reserve(&mut self, more: usize) {
        self.reserved += more;
        self.grow_lists(self.reserved);
    }

    /// Ends a reservation. The capacity is kept for the next one.
    pub fn unreserve(&mut self, less: usize) {
        self.reserved = self.reserved.saturating_sub(less);
    }

    fn grow_lists(&mut self, entries: usize) {
        grow_capacity(&mut self.entries, entries);
        grow_capacity(&mut self.spills, entries);
        grow_capacity(&mut self.free_spills, entries);
    }

    #[cold]
    fn add_entries(&mut self, entries: usize) {
        let entries = entries.min(MAX_BUFFERS);
        self.grow_lists(entries);
        for _ in self.entries.len()..entries {
            let next = std::mem::replace(&mut self.first_free, self.entries.len() as u32);
            self.entries.push(BufferEntry {
                total: next.into(),
                status: 0,
                inline: [EMPTY_SEGMENT; INLINE_SEGMENTS],
                lease: FREE,
                segments: 0,
                status_len: 0,
                writable: false,
                spill: NO_SPILL,
                next: 0,
            });
        }
        // Every buffer may spill at once.
        for _ in self.spills.len()..entries {
            self.free_spills.push(self.spills.len() as u32);
            self.spills.push(Vec::with_capacity(SPILL_CAPACITY));
        }
    }

    /// Acquires a lease on a memory table. `fixed` names the registered buffers of its regions, in the order of the
    /// regions.
    pub fn acquire_lease(&mut self, memory: Arc<GuestMemory>, fixed: Vec<Option<FixedBuffers>>) -> LeaseId {
        let generation = LEASES.fetch_add(1, Ordering::Relaxed);
        let lease = Lease {
            cached_region: RegionCache::default(),
            other_region: RegionCache::default(),
            buffers: 0,
            retired: false,
            lost: memory.loss().is_some(),
            generation,
            fixed,
            log: None,
            log_group: generation,
            memory,
        };
        let free = self.leases.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.leases.push(None);
            self.leases.len() - 1
        });
        self.leases[index] = Some(lease);
        LeaseId { index: index as u32, generation }
    }

    /// Retires a lease. Its memory stays mapped until its last buffer is released. Returns true if that is already the
    /// case.
    pub fn retire_lease(&mut self, id: LeaseId) -> bool {
        let Some(slot) = self.leases.get_mut(id.index as usize) else { return true };
        let Some(lease) = slot.as_mut().filter(|lease| lease.generation == id.generation) else { return true };
        lease.retired = true;
        let released = lease.buffers == 0;
        if released {
            *slot = None;
        }
        released
    }

    /// Returns true if an access has found memory of the lease lost (its file truncated, or a hardware error): data
    /// read from it before this call may be zeroes, and no access to it is made any more. Its queue ends.
    #[inline]
    pub fn is_lease_lost(&mut self, id: LeaseId) -> bool {
        sigbus::losses() != 0 && self.examine_lease(id)
    }

    /// Returns true if memory of any lease may be lost: check with [`is_lease_lost`](Self::is_lease_lost).
    #[inline]
    pub fn may_be_lost(&self) -> bool {
        sigbus::losses() != 0
    }

    #[cold]
    fn examine_lease(&mut self, id: LeaseId) -> bool {
        self.examine_losses();
        let lease = self.leases.get(id.index as usize).and_then(Option::as_ref);
        // A lease that has ended has no memory.
        lease.is_none_or(|lease| lease.lost || lease.generation != id.generation)
    }

    #[cold]
    fn examine_losses(&mut self) {
        let losses = sigbus::losses();
        if losses == self.losses {
            return;
        }
        self.losses = losses;
        for lease in self.leases.iter_mut().flatten().filter(|lease| lease.memory.loss().is_some()) {
            lease.lost = true;
            lease.forget_regions();
        }
    }

    /// Returns true if no memory of a buffer's leases is lost.
    #[inline]
    fn is_intact(&self, buffer: &Buffer) -> bool {
        sigbus::losses() == 0 || self.has_intact_leases(self.index(buffer))
    }

    #[cold]
    fn has_intact_leases(&self, index: usize) -> bool {
        let lease_intact = |index: usize| {
            let lease = self.leases.get(self.entries[index].lease as usize).and_then(Option::as_ref);
            lease.is_none_or(|lease| lease.memory.loss().is_none())
        };
        // The leases of a merged buffer are those of its members.
        let mut members =
            std::iter::successors(Some(index), |at| self.entries[*at].next.checked_sub(1).map(|at| at as usize));
        members.all(lease_intact)
    }

    /// Returns true if the last buffer of a retired lease was released.
    pub fn is_lease_released(&self, id: LeaseId) -> bool {
        let slot = self.leases.get(id.index as usize).and_then(Option::as_ref);
        slot.is_none_or(|lease| lease.generation != id.generation)
    }

    /// Returns the number of live buffers in a lease.
    pub fn buffers_in_use(&self, id: LeaseId) -> u32 {
        let slot = self.leases.get(id.index as usize).and_then(Option::as_ref);
        slot.filter(|lease| lease.generation == id.generation).map_or(0, |lease| lease.buffers)
    }

    #[inline]
    fn lease(&mut self, id: u32) -> &mut Lease {
        self.leases[id as usize].as_mut().expect("a live buffer or queue holds its lease")
    }

    /// Returns the region that contains `address`, and the offset of `address` in it.
    #[inline]
    fn locate(&mut self, lease: u32, address: u64) -> Option<(&RegionCache, u64)> {
        self.lease(lease).locate(address)
    }

    /// Returns the host address of `len` bytes at `address`. `None` unless they are mapped contiguously.
    #[inline]
    fn host_address(&mut self, lease: u32, address: u64, len: u64) -> Option<u64> {
        let (region, at) = self.locate(lease, address)?;
        (len <= region.len - at).then_some(region.host_start + at)
    }

    /// Takes a buffer without segments in this lease.
    ///
    /// # Panics
    /// When the lease has ended, or is another pool's: a queue keeps its lease while it pulls.
    #[inline]
    pub fn take(&mut self, lease: LeaseId) -> Buffer {
        let LeaseId { index, generation } = lease;
        let lease = self.lease(index);
        assert!(lease.generation == generation, "a buffer is taken in a lease that has not ended");
        lease.buffers += 1;
        self.take_entry(index)
    }

    /// Takes the index of a free entry.
    #[inline]
    fn free_index(&mut self) -> u32 {
        if self.first_free == NO_ENTRY {
            self.add_entries(self.entries.len() + self.entries.len().clamp(64, 4096));
        }
        let index = self.first_free;
        assert!(
            index != NO_ENTRY,
            "the pool has just grown; 2^26 requests take 4 GiB of entries before it no longer can"
        );
        self.first_free = self.entries[index as usize].total as u32;
        index
    }

    #[inline]
    fn take_entry(&mut self, lease: u32) -> Buffer {
        let index = self.free_index();
        let entry = &mut self.entries[index as usize];
        (entry.total, entry.segments, entry.status_len) = (0, 0, 0);
        (entry.lease, entry.writable, entry.spill) = (lease, false, NO_SPILL);
        self.handle(index)
    }

    /// Appends `len` bytes of guest memory at `address`. They may span regions; at most `max_segments` segments in
    /// total.
    ///
    /// # Errors
    /// [`BufferFault`]. The buffer may then contain a
    /// part of it.
    #[inline]
    pub fn push(
        &mut self,
        buffer: &Buffer,
        address: GuestAddress,
        len: u32,
        max_segments: u16,
    ) -> Result<(), BufferFault> {
        let index = self.unchecked_index(buffer);
        let lease = self.entries[index].lease;
        let (mut address, mut left) = (address.0, u64::from(len));
        while left > 0 {
            let (region, at) = self.locate(lease, address).ok_or(BufferFault::Unmapped)?;
            let run = left.min(region.len - at).min(MAX_SEGMENT_LEN);
            let segment = Segment { address: region.host_start + at, len: run as u32, fixed: region.fixed(at, run) };
            self.append(index, segment, max_segments)?;
            left -= run;
            if left > 0 {
                address = address.checked_add(run).ok_or(BufferFault::Unmapped)?;
            }
        }
        Ok(())
    }

    #[inline]
    fn append(&mut self, index: usize, segment: Segment, max_segments: u16) -> Result<(), BufferFault> {
        let entry = &mut self.entries[index];
        let count = entry.segments;
        if count >= max_segments {
            return Err(BufferFault::TooManySegments);
        }
        entry.segments = count + 1;
        entry.total += u64::from(segment.len);
        match entry.inline.get_mut(usize::from(count)) {
            // Field by field: a single move would be assembled on the stack first and stall on store forwarding.
            Some(place) => {
                place.address = segment.address;
                place.len = segment.len;
                place.fixed = segment.fixed;
            }
            None => self.append_spilled(index, segment),
        }
        Ok(())
    }

    /// The third segment moves all of them into a list. Lists keep their capacity, so a warm pool does not allocate.
    fn append_spilled(&mut self, index: usize, segment: Segment) {
        let entry = &mut self.entries[index];
        if entry.spill == NO_SPILL {
            entry.spill = self.free_spills.pop().expect("there are as many lists as buffers");
            let list = &mut self.spills[entry.spill as usize];
            list.clear();
            list.extend_from_slice(&entry.inline);
        }
        self.spills[entry.spill as usize].push(segment);
    }

    /// Returns the total length of the segments.
    #[inline]
    pub fn len(&self, buffer: &Buffer) -> ByteLen {
        ByteLen(self.entries[self.unchecked_index(buffer)].total)
    }

    /// Truncates a buffer to its first `len` bytes. A shorter one is unchanged. Nothing may be pushed to it afterwards.
    pub fn truncate(&mut self, buffer: &Buffer, len: ByteLen) {
        let index = self.index(buffer);
        let entry = &mut self.entries[index];
        let count = usize::from(entry.segments);
        let list = match entry.spill {
            NO_SPILL => &mut entry.inline[..count],
            spill => &mut self.spills[spill as usize][..count],
        };
        let mut left = len.0;
        let mut kept = 0;
        for segment in list {
            if left == 0 {
                break;
            }
            segment.len = u64::from(segment.len).min(left) as u32;
            left -= u64::from(segment.len);
            kept += 1;
        }
        entry.segments = kept;
        entry.total = len.0 - left;
        if entry.spill != NO_SPILL {
            self.spills[entry.spill as usize].truncate(usize::from(kept));
        }
    }

    /// Returns the segments, in order.
    #[inline]
    pub fn segments(&self, buffer: &Buffer) -> &[Segment] {
        let entry = &self.entries[self.index(buffer)];
        if entry.spill == NO_SPILL {
            &entry.inline[..entry.segments as usize]
        } else {
            &self.spills[entry.spill as usize]
        }
    }

    /// Returns true if every segment starts and ends at a multiple of `align` bytes (a power of two).
    #[inline]
    pub fn is_aligned(&self, buffer: &Buffer, align: u32) -> bool {
        let mask = u64::from(align) - 1;
        self.segments(buffer).iter().all(|segment| (segment.address | u64::from(segment.len)) & mask == 0)
    }

    /// Calls `each` with the host address and length of each part of a segment, from `at` bytes into the buffer, for
    /// `len` bytes. Returns false if the buffer is shorter, or if its memory was lost.
    fn for_each_run(&self, buffer: &Buffer, at: u64, len: u64, mut each: impl FnMut(*mut u8, usize)) -> bool {
        if at.checked_add(len).is_none_or(|end| end > self.len(buffer).0) {
            return false;
        }
        let (mut skip, mut left) = (at, len);
        for segment in self.segments(buffer) {
            let size = u64::from(segment.len);
            if skip >= size {
                skip -= size;
                continue;
            }
            let run = (size - skip).min(left);
            if run == 0 {
                break;
            }
            each(std::ptr::with_exposed_provenance_mut::<u8>((segment.address + skip) as usize), run as usize);
            (skip, left) = (0, left - run);
        }
        self.is_intact(buffer)
    }

    /// Copies from `at` bytes into the buffer to private memory. Returns false if the buffer is shorter (nothing is
    /// copied then), or if its memory was lost.
    #[must_use]
    pub fn copy_out(&self, buffer: &Buffer, at: u64, bytes: &mut [u8]) -> bool {
        let mut done = 0;
        self.for_each_run(buffer, at, bytes.len() as u64, |place, run| {
            // SAFETY: the lease keeps `run` bytes at `place` mapped; `bytes` is private and has space for all runs.
            unsafe { place.copy_to_nonoverlapping(bytes[done..done + run].as_mut_ptr(), run) };
            keep_copy(bytes.as_mut_ptr());
            done += run;
        })
    }

    /// Copies private memory to `at` bytes into the buffer. Returns false if the buffer is shorter (nothing is copied
    /// then), or if its memory was lost.
    #[must_use]
    pub fn copy_in(&self, buffer: &Buffer, at: u64, bytes: &[u8]) -> bool {
        debug_assert!(self.will_be_logged(buffer));
        let mut done = 0;
        self.for_each_run(buffer, at, bytes.len() as u64, |place, run| {
            // SAFETY: as in `copy_out`, the other way.
            unsafe { place.copy_from_nonoverlapping(bytes[done..done + run].as_ptr(), run) };
            done += run;
        })
    }

    /// Fills the whole buffer from `memory` at `from`. Returns false if `memory` is shorter (nothing is copied then),
    /// or if the buffer's memory was lost.
    #[must_use]
    pub fn fill_from(&self, buffer: &Buffer, memory: &Mapping, from: ByteOffset) -> bool {
        debug_assert!(self.will_be_logged(buffer));
        self.with_mapping(buffer, memory, from, |guest, host, run| {
            // SAFETY: both sides are mapped for `run` bytes. They may be written concurrently by the guest; bytes have
            // no invalid values. `copy` allows the overlap of a guest region with itself.
            unsafe { guest.copy_from(host, run) }
        })
    }

    /// Stores the whole buffer into `memory` at `to`. Returns false if `memory` is shorter or the buffer's memory was
    /// lost (nothing is copied then), or if it is lost meanwhile.
    #[must_use]
    pub fn store_to(&self, buffer: &Buffer, memory: &Mapping, to: ByteOffset) -> bool {
        self.is_accessible(buffer)
            && self.with_mapping(buffer, memory, to, |guest, host, run| {
                // SAFETY: as in `fill_from`, the other way.
                unsafe { guest.copy_to(host, run) }
            })
    }

    /// Reads a byte of each page of the buffer. Returns false if memory of it is lost, before any zeroes are copied.
    fn is_accessible(&self, buffer: &Buffer) -> bool {
        let page = rustix::param::page_size();
        self.for_each_run(buffer, 0, self.len(buffer).0, |place, run| {
            for at in (0..run).step_by(page).chain([run - 1]) {
                // SAFETY: the lease keeps `run` bytes (at least 1) at `place` mapped.
                let _ = unsafe { place.add(at).read_volatile() };
            }
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
        self.for_each_run(buffer, 0, len.0, |guest, run| {
            copy(guest, memory.address(place).as_ptr(), run);
            place += run;
        })
    }

    /// Copies the first `len` bytes of one buffer to another. Returns false (nothing copied) if either is shorter.
    #[must_use]
    pub fn copy(&self, from: &Buffer, to: &Buffer, len: ByteLen) -> bool {
        self.copy_range(from, 0, to, 0, len)
    }

    /// Copies `len` bytes from offset `from_at` of one buffer to offset `to_at` of another. Returns false if either is
    /// shorter (nothing is copied then), or if memory of either was lost.
    #[must_use]
    pub fn copy_range(&self, from: &Buffer, from_at: u64, to: &Buffer, to_at: u64, len: ByteLen) -> bool {
        debug_assert!(self.will_be_logged(to));
        let fits = |at: u64, buffer| mqblk_core::units::in_range(ByteOffset(at), len, self.len(buffer));
        if !fits(from_at, from) || !fits(to_at, to) {
            return false;
        }
        let mut at = to_at;
        self.for_each_run(from, from_at, len.0, |source, run| {
            let mut done = 0;
            self.for_each_run(to, at, run as u64, |target, part| {
                // SAFETY: both leases keep their sides mapped; `copy_to` allows overlap.
                unsafe { source.add(done).copy_to(target, part) };
                done += part;
            });
            at += run as u64;
        }) && self.is_intact(to)
    }
}

#[cfg(test)]
mod tests;
