//! A guest's memory as files shared by its VMM, with a model of every byte, its drivers' ends of the rings, and the
//! disk's effects of their requests.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arbitrary::{Result, Unstructured};
use mqblk_memory::{GuestAddress, GuestMemory, Region, UserAddress, create_memfd};

use crate::vhost_user_session::Attached;
use crate::vhost_user_wire::wait_until;
use crate::virtio_blk_requests::{FLUSH, IN, IOERR, OK, OUT, UNSUPP};

pub(crate) const QUEUES: usize = 2;
/// Largest ring.
pub(crate) const RING: u16 = 32;
/// Sectors of the disk. A request's sector depends on its queue and its slot, so that requests in flight do not
/// overlap.
pub(crate) const SECTORS: u64 = 32;
pub(crate) const SECTOR: usize = 512;
/// Most outstanding requests of a queue.
const SLOTS: u16 = 8;
/// The guest's files: rings and headers, data, and one that only tables name.
pub(crate) const FILES: usize = 3;
pub(crate) const FILE_BYTES: u64 = 0x8000;
pub(crate) const FILE_NAME: &str = "mqblk-conversation";

const HEADERS: u64 = 0x4000;
const STATUS: u64 = 0x80;
const POISON: u8 = 0xee;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A byte of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) file: usize,
    pub(crate) at: u64,
}

/// A region of a memory table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableRegion {
    pub(crate) guest: u64,
    pub(crate) size: u64,
    pub(crate) user: u64,
    pub(crate) offset: u64,
    pub(crate) file: usize,
}

/// A valid memory table: sorted by guest address, without overlaps.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryTable(Vec<TableRegion>);

impl MemoryTable {
    /// Returns `None` if regions overlap.
    pub(crate) fn new(mut regions: Vec<TableRegion>) -> Option<MemoryTable> {
        regions.sort_by_key(|region| region.guest);
        let apart = regions.windows(2).all(|pair| pair[0].guest + pair[0].size <= pair[1].guest);
        apart.then_some(MemoryTable(regions))
    }

    pub(crate) fn regions(&self) -> &[TableRegion] {
        &self.0
    }

    pub(crate) fn guest_of(&self, user: u64) -> Option<u64> {
        let found = self.0.iter().find(|r| user.checked_sub(r.user).is_some_and(|at| at < r.size))?;
        Some(found.guest + (user - found.user))
    }

    /// Returns the place of `len` bytes, if they lie in one region.
    pub(crate) fn place(&self, guest: u64, len: u64) -> Option<Place> {
        let found = self.0.iter().find(|r| guest.checked_sub(r.guest).is_some_and(|at| at < r.size))?;
        let at = guest - found.guest;
        (len <= found.size - at).then_some(Place { file: found.file, at: found.offset + at })
    }

    /// Returns the places of `len` bytes, in pieces.
    fn pieces(&self, guest: u64, len: u64) -> Option<Vec<(Place, u64)>> {
        let (mut guest, mut left, mut found) = (guest, len, vec![]);
        while left > 0 {
            let place = self.place(guest, 1)?;
            let region = self.0.iter().find(|r| guest.checked_sub(r.guest).is_some_and(|at| at < r.size))?;
            let here = left.min(region.guest + region.size - guest);
            found.push((place, here));
            (guest, left) = (guest + here, left - here);
        }
        Some(found)
    }

    /// Returns the guest address of a byte of a file.
    fn address(&self, place: Place) -> Option<u64> {
        let inside =
            |r: &&TableRegion| r.file == place.file && place.at.checked_sub(r.offset).is_some_and(|at| at < r.size);
        self.0.iter().find(inside).map(|r| r.guest + (place.at - r.offset))
    }
}

/// The places of a ring's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingPlaces {
    pub(crate) desc: Place,
    pub(crate) avail: Place,
    pub(crate) used: Place,
}

impl RingPlaces {
    /// Finds a ring of `size` entries at these guest addresses. Returns `None` if a part is not in one region or not
    /// aligned.
    pub(crate) fn find(table: &MemoryTable, [desc, avail, used]: [u64; 3], size: u16) -> Option<RingPlaces> {
        let n = u64::from(size);
        let part = |guest, len, align| table.place(guest, len).filter(|place| place.at.is_multiple_of(align));
        let found = RingPlaces {
            desc: part(desc, 16 * n, 8)?,
            avail: part(avail, 6 + 2 * n, 2)?,
            used: part(used, 6 + 8 * n, 4)?,
        };
        (desc.is_multiple_of(16) && used.is_multiple_of(4)).then_some(found)
    }

    /// Returns the places of queue `queue` in one of two layouts.
    pub(crate) fn of_queue(queue: usize, layout: usize) -> RingPlaces {
        let base = queue as u64 * 0x2000 + layout as u64 * 0x1000;
        let [desc, avail, used] = [0, 0x400, 0x800].map(|at| Place { file: 0, at: base + at });
        RingPlaces { desc, avail, used }
    }
}

struct GuestFile {
    file: File,
    memory: GuestMemory,
    model: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u64,
    flags: u16,
}

/// The effects of a chain.
pub(crate) struct Executed {
    /// Bytes written, of the used element.
    pub(crate) used: u32,
    writes: Vec<(Place, Vec<u8>)>,
    /// Guest addresses and lengths that must be marked in a dirty log.
    pub(crate) dirty: Vec<(u64, u64)>,
    /// Those that may be marked.
    pub(crate) maybe_dirty: Vec<(u64, u64)>,
}

/// The driver of one queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    pub(crate) layout: usize,
    pub(crate) size: u16,
    pub(crate) avail: u16,
    /// Requests before this one are complete.
    pub(crate) completed: u16,
}

impl Driver {
    pub(crate) fn places(&self, queue: usize) -> RingPlaces {
        RingPlaces::of_queue(queue, self.layout)
    }

    /// Returns the largest number of outstanding requests.
    pub(crate) fn slots(&self) -> u16 {
        (self.size / 4).clamp(1, SLOTS)
    }

    pub(crate) fn room(&self) -> u16 {
        self.slots().saturating_sub(self.avail.wrapping_sub(self.completed))
    }
}

/// A request of a driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlkChoice {
    kind: u32,
    /// `None`: the slot's own.
    sector: Option<u64>,
    pattern: u8,
    /// True if the driver wants a call for it.
    call: bool,
}

impl BlkChoice {
    /// A read of the slot's own sector.
    pub(crate) const READ: BlkChoice = BlkChoice { kind: IN, sector: None, pattern: 0, call: true };

    pub(crate) fn any(u: &mut Unstructured<'_>) -> Result<BlkChoice> {
        let kind = match u.int_in_range(0..=9)? {
            0..=3 => IN,
            4..=7 => OUT,
            8 => FLUSH,
            _ => 77,
        };
        let sector = if u.ratio(1, 16)? { Some(SECTORS + u64::from(u.arbitrary::<u8>()?)) } else { None };
        Ok(BlkChoice { kind, sector, pattern: u.arbitrary()?, call: !u.ratio(1, 8)? })
    }
}

/// The guest.
pub(crate) struct Guest {
    files: Vec<GuestFile>,
    /// The expected content of the disk.
    pub(crate) disk: Vec<u8>,
    pub(crate) drivers: [Driver; QUEUES],
    /// Places that a device may change at any time: event suppression of rings that are or were attached.
    soft: Vec<(Place, u64)>,
}

impl Guest {
    pub(crate) fn new() -> Guest {
        let files = (0..FILES).map(|_| {
            let file = create_memfd(FILE_NAME, FILE_BYTES).expect("memory for a guest");
            let region = Region::from_file(&file, 0, FILE_BYTES, GuestAddress(0), UserAddress(0)).expect("mapped");
            let memory = GuestMemory::new(vec![Arc::new(region)]).expect("one region");
            GuestFile { file, memory, model: vec![0; FILE_BYTES as usize] }
        });
        let driver = Driver { layout: 0, size: RING, avail: 0, completed: 0 };
        let disk = vec![0; SECTORS as usize * SECTOR];
        Guest { files: files.collect(), disk, drivers: [driver; QUEUES], soft: vec![] }
    }

    pub(crate) fn file(&self, file: usize) -> &File {
        &self.files[file].file
    }

    /// Writes as the guest.
    fn put(&mut self, to: Place, bytes: &[u8]) {
        self.files[to.file].memory.write(GuestAddress(to.at), bytes).expect("mapped");
        self.expect(to, bytes);
    }

    /// Stores an index that the device reads, after all writes before.
    fn put_index(&mut self, to: Place, value: u16) {
        let cell = self.files[to.file].memory.shared_u16(GuestAddress(to.at)).expect("aligned");
        cell.store(value.to_le(), Ordering::Release);
        self.expect(to, &value.to_le_bytes());
    }

    /// Expects that the device writes these bytes.
    fn expect(&mut self, at: Place, bytes: &[u8]) {
        self.files[at.file].model[at.at as usize..at.at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn model(&self, at: Place, len: usize) -> &[u8] {
        &self.files[at.file].model[at.at as usize..at.at as usize + len]
    }

    fn model_u16(&self, at: Place) -> u16 {
        let bytes = self.model(at, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    fn found(&self, at: Place, bytes: &mut [u8]) {
        self.files[at.file].memory.read(GuestAddress(at.at), bytes).expect("mapped");
    }

    /// Returns the ring's indices in the model: available, used.
    pub(crate) fn indices(&self, ring: &RingPlaces) -> (u16, u16) {
        (self.model_u16(after(ring.avail, 2)), self.model_u16(after(ring.used, 2)))
    }

    /// Returns true if the driver requests a call when the used index moves from `old` to `new`.
    pub(crate) fn wants_call(&self, ring: &RingPlaces, size: u16, event_idx: bool, old: u16, new: u16) -> bool {
        if !event_idx {
            return self.model_u16(ring.avail) & 1 == 0;
        }
        let event = self.model_u16(after(ring.avail, 4 + 2 * u64::from(size)));
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Lets the device change the ring's event suppression from now on.
    pub(crate) fn attached(&mut self, ring: &RingPlaces, size: u16) {
        self.soft.push((ring.used, 2));
        self.soft.push((after(ring.used, 4 + 8 * u64::from(size)), 2));
    }

    /// Checks every byte of all files.
    pub(crate) fn check(&mut self) {
        let mut found = vec![0; FILE_BYTES as usize];
        for (number, file) in self.files.iter_mut().enumerate() {
            file.memory.read(GuestAddress(0), &mut found).expect("mapped");
            // The content at this read: the worker may change it at any time.
            for (place, len) in self.soft.iter().filter(|(place, _)| place.file == number) {
                let range = place.at as usize..(place.at + len) as usize;
                file.model[range.clone()].copy_from_slice(&found[range]);
            }
            if found != file.model {
                let at = found.iter().zip(&file.model).position(|(found, model)| found != model).unwrap_or_default();
                panic!("file {number} at {at:#x}: found {:#x}, expected {:#x}", found[at], file.model[at]);
            }
        }
    }

    /// Resets a queue's ring, in a layout, with a size. The queue is not attached.
    pub(crate) fn reset_ring(&mut self, queue: usize, layout: usize, size: u16, start: u16) {
        self.drivers[queue] = Driver { layout, size, avail: start, completed: start };
        let ring = self.drivers[queue].places(queue);
        self.put(ring.desc, &[0; 0x1000]);
        self.put_index(after(ring.avail, 2), start);
        self.put_index(after(ring.used, 2), start);
    }

    /// Copies a queue's ring to its other layout, as a VMM may.
    pub(crate) fn move_ring(&mut self, queue: usize) {
        let from = self.drivers[queue].places(queue);
        let mut all = vec![0; 0x1000];
        self.found(from.desc, &mut all);
        self.drivers[queue].layout ^= 1;
        let to = self.drivers[queue].places(queue);
        self.put(to.desc, &all);
    }

    /// Stores a wrong available index.
    pub(crate) fn break_index(&mut self, queue: usize, ahead: u16) {
        let (ring, avail) = (self.drivers[queue].places(queue), self.drivers[queue].avail);
        self.put_index(after(ring.avail, 2), avail.wrapping_add(ahead));
    }

    /// Makes a request available, with the guest addresses of `table`.
    pub(crate) fn publish(&mut self, queue: usize, request: BlkChoice, table: &MemoryTable) {
        let driver = self.drivers[queue];
        let (ring, slot) = (driver.places(queue), driver.avail % driver.slots());
        let own = queue as u64 * u64::from(SLOTS) + u64::from(slot);
        let header = Place { file: 0, at: HEADERS + queue as u64 * 0x1000 + u64::from(slot) * 0x100 };
        let data = Place { file: 1, at: queue as u64 * 0x2000 + u64::from(slot) * 0x400 };
        let status = after(header, STATUS);
        let kind = if driver.size < 4 { FLUSH } else { request.kind };
        let sector = request.sector.unwrap_or(own);
        self.put(header, &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
        self.put(status, &[POISON]);
        let address = |place| table.address(place).unwrap_or(0xdead_0000 + place.at);
        let mut parts = vec![(address(header), 16, 0)];
        if kind == IN || kind == OUT {
            let pattern = if kind == IN { POISON } else { request.pattern };
            let step = usize::from(kind == OUT);
            let content: Vec<u8> = (0..SECTOR).map(|at| pattern.wrapping_add((at * step) as u8)).collect();
            self.put(data, &content);
            parts.push((address(data), SECTOR as u32, if kind == IN { WRITE } else { 0 }));
        }
        parts.push((address(status), 1, WRITE));
        let first = if driver.size < 4 { 0 } else { slot * 4 };
        for (at, (address, len, flags)) in (first..).zip(&parts) {
            let more = usize::from(at - first) + 1 < parts.len();
            let flags = flags | if more { NEXT } else { 0 };
            let next = if more { at + 1 } else { 0xbad };
            let words = [&address.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
            self.put(after(ring.desc, u64::from(at) * 16), &words.concat());
        }
        self.put(after(ring.avail, 4 + 2 * u64::from(driver.avail % driver.size)), &first.to_le_bytes());
        // Requests a call for the next completion, or none, by both mechanisms.
        let used = self.indices(&ring).1;
        self.put(ring.avail, &u16::from(!request.call).to_le_bytes());
        let event = if request.call { used } else { used.wrapping_sub(1) };
        self.put(after(ring.avail, 4 + 2 * u64::from(driver.size)), &event.to_le_bytes());
        let next = driver.avail.wrapping_add(1);
        self.drivers[queue].avail = next;
        self.put_index(after(ring.avail, 2), next);
    }

    /// Returns true if queue `queue` may have its ring here: in its own part of the guest's memory, or in the file
    /// without other contents, with parts that do not overlap.
    pub(crate) fn may_be_ring(&self, ring: &RingPlaces, size: u16, queue: usize) -> bool {
        let n = u64::from(size);
        let own = queue as u64 * 0x2000..queue as u64 * 0x2000 + 0x2000;
        let parts = [(ring.desc, 16 * n), (ring.avail, 6 + 2 * n), (ring.used, 6 + 8 * n)];
        let mut ranges = parts.map(|(place, len)| (place.at, place.at + len));
        ranges.sort_unstable();
        let apart = ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0);
        // Two queues may not share a ring in the third file either.
        let here = |place: &Place| place.file == 0 && own.contains(&place.at) || place.file == 2 && queue == 0;
        apart
            && parts.iter().all(|(place, _)| here(place))
            && parts.iter().all(|(place, _)| place.file == ring.desc.file)
    }

    /// Returns the heads that an attached queue takes: those to replay, then `count` from the ring. Returns `None` if
    /// the device would find one that no driver writes.
    pub(crate) fn heads(&self, attached: &Attached, count: u16) -> Option<Vec<u16>> {
        let (ring, size) = (&attached.places, attached.size);
        let known = |head: &u16| self.chain(ring, size, *head).is_some();
        let mut heads: Vec<u16> = attached.replays.clone();
        heads.extend(self.heads_from(ring, size, attached.next_avail, count)?);
        let mut sorted = heads.clone();
        sorted.sort_unstable();
        sorted.dedup();
        (heads.iter().all(known) && sorted.len() == heads.len()).then_some(heads)
    }

    /// Returns `count` heads from available index `from` on.
    pub(crate) fn heads_from(&self, ring: &RingPlaces, size: u16, from: u16, count: u16) -> Option<Vec<u16>> {
        let head = |at: u16| self.model_u16(after(ring.avail, 4 + 2 * u64::from(from.wrapping_add(at) % size)));
        let heads: Vec<u16> = (0..count).map(head).collect();
        heads.iter().all(|head| self.chain(ring, size, *head).is_some()).then_some(heads)
    }

    /// Reads a chain: header, data if any, status.
    fn chain(&self, ring: &RingPlaces, size: u16, head: u16) -> Option<Vec<Descriptor>> {
        let mut found: Vec<Descriptor> = vec![];
        let mut index = head;
        loop {
            if index >= size || found.len() == 3 {
                return None;
            }
            let bytes = self.model(after(ring.desc, u64::from(index) * 16), 16);
            let number = |range: std::ops::Range<usize>| {
                bytes[range].iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte))
            };
            let [flags, next] = [number(12..14), number(14..16)].map(|value| value as u16);
            let descriptor = Descriptor { address: number(0..8), len: number(8..12), flags };
            found.push(descriptor);
            if flags & NEXT == 0 {
                break;
            }
            index = next;
        }
        let (first, last) = (found.first()?, found.last()?);
        let whole = found.len() > 1 && first.len == 16 && first.flags & WRITE == 0;
        (whole && last.len == 1 && last.flags & WRITE != 0).then_some(found)
    }

    /// Executes a chain by the specification, without the writes to the guest's memory.
    pub(crate) fn execute(&mut self, ring: &RingPlaces, size: u16, head: u16, table: &MemoryTable) -> Executed {
        let chain = self.chain(ring, size, head).expect("a chain that a driver wrote");
        let (header, status) = (chain[0], chain[chain.len() - 1]);
        let data = if chain.len() == 3 { Some(chain[1]) } else { None };
        let mut executed = Executed { used: 0, writes: vec![], dirty: vec![], maybe_dirty: vec![] };
        let Some(status_place) = table.place(status.address, 1) else { return executed };
        let len = data.map_or(0, |data| data.len);
        let pieces = data.map_or(Some(vec![]), |data| table.pieces(data.address, data.len));
        let into = data.is_some_and(|data| data.flags & WRITE != 0);
        let mut outcome = IOERR;
        let mut written = 1;
        if let (Some(place), Some(pieces)) = (table.place(header.address, 16), pieces) {
            let bytes = self.model(place, 16);
            let kind = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            let sector = bytes[8..].iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
            let at = usize::try_from(sector.min(SECTORS)).unwrap_or_default() * SECTOR;
            let fits = sector.checked_add(len / SECTOR as u64).is_some_and(|end| end <= SECTORS);
            let right_way = len == 0 || into == (kind == IN);
            outcome = match kind {
                IN | OUT if !fits || !right_way => IOERR,
                IN | OUT | FLUSH => OK,
                _ => UNSUPP,
            };
            if outcome == OK && kind != FLUSH {
                let mut from = at;
                for (piece, bytes) in pieces {
                    let range = from..from + bytes as usize;
                    from = range.end;
                    match kind {
                        IN => executed.writes.push((piece, self.disk[range].to_vec())),
                        _ => {
                            let content = self.model(piece, bytes as usize).to_vec();
                            self.disk[range].copy_from_slice(&content);
                        }
                    }
                }
                if kind == IN {
                    written += len as u32;
                    executed.dirty.extend(data.map(|data| (data.address, len)));
                }
            }
        }
        executed.maybe_dirty.extend(data.filter(|_| into).map(|data| (data.address, len)));
        executed.dirty.push((status.address, 1));
        executed.writes.push((status_place, vec![outcome]));
        executed.used = written;
        executed
    }

    /// Waits until the ring's used index is `old` plus the number of `expected` elements (head, bytes written), and
    /// checks these in any order.
    pub(crate) fn take_used(&mut self, ring: &RingPlaces, size: u16, old: u16, mut expected: Vec<(u16, Executed)>) {
        let new = old.wrapping_add(expected.len() as u16);
        let cell = after(ring.used, 2);
        let index = self.files[cell.file].memory.shared_u16(GuestAddress(cell.at)).expect("aligned");
        wait_until("completions", || u16::from_le(index.load(Ordering::Acquire)) == new);
        for at in 0..expected.len() as u16 {
            let place = after(ring.used, 4 + 8 * u64::from(old.wrapping_add(at) % size));
            let mut element = [0; 8];
            self.found(place, &mut element);
            let word = |at: usize| u32::from_le_bytes([element[at], element[at + 1], element[at + 2], element[at + 3]]);
            let found = expected.iter().position(|(head, _)| u32::from(*head) == word(0));
            let Some(found) = found else { panic!("used element {element:?}: found a head that was not available") };
            let (_, executed) = expected.swap_remove(found);
            assert_eq!(word(4), executed.used, "the used length of head {}", word(0));
            self.expect(place, &element);
            for (place, bytes) in executed.writes {
                self.expect(place, &bytes);
            }
        }
        self.expect(cell, &new.to_le_bytes());
    }
}

/// Returns the place `bytes` further on.
pub(crate) fn after(place: Place, bytes: u64) -> Place {
    Place { at: place.at + bytes, ..place }
}
