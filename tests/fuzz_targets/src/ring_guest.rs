//! The guest's end of one split ring: its memory, with a model of every byte of it, and chains of any layout.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use mqblk_memory::{GuestAddress, GuestMemory, Region};

/// Entries of the ring.
pub(crate) const RING: u16 = 64;
/// Bytes of guest memory.
pub(crate) const MEMORY: u64 = 0x5_0000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Bytes of the used ring: flags, index, elements, and the index that requests kicks.
const USED_BYTES: usize = 6 + 8 * RING as usize;

/// Flags of a descriptor. Source: virtio 1.3 section 2.7.5.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// A piece of memory in a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

/// A descriptor as the guest writes it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RawDescriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl RawDescriptor {
    fn bytes(self) -> Vec<u8> {
        [&self.address.to_le_bytes()[..], &self.len.to_le_bytes(), &self.flags.to_le_bytes(), &self.next.to_le_bytes()]
            .concat()
    }
}

/// Cuts `len` bytes from `from` on into at most 4 pieces; some may be empty.
pub(crate) fn cut(u: &mut Unstructured<'_>, from: u64, len: usize, writable: bool) -> Result<Vec<Piece>> {
    let mut edges = vec![0, len];
    for _ in 0..u.int_in_range(0..=3)? {
        edges.push(u.int_in_range(0..=len)?);
    }
    edges.sort_unstable();
    let piece = |pair: &[usize]| Piece { address: from + pair[0] as u64, len: (pair[1] - pair[0]) as u32, writable };
    Ok(edges.windows(2).map(piece).collect())
}

/// A guest with one ring.
pub(crate) struct RingGuest {
    pub(crate) memory: Arc<GuestMemory>,
    /// The expected content of the memory.
    model: Vec<u8>,
    avail: u16,
    used: u16,
    next_descriptor: u16,
}

impl RingGuest {
    pub(crate) fn new() -> RingGuest {
        let region = Region::shared("guest", MEMORY, GuestAddress(0)).expect("memory for a guest").0;
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).expect("one region"));
        RingGuest { memory, model: vec![0; MEMORY as usize], avail: 0, used: 0, next_descriptor: 0 }
    }

    pub(crate) fn addresses() -> mqblk_ring::virtqueue::RingAddresses {
        let [desc, avail, used] = [0, AVAIL, USED].map(GuestAddress);
        mqblk_ring::virtqueue::RingAddresses { desc, avail, used }
    }

    /// Returns the number of chains that were made available.
    pub(crate) fn avail(&self) -> u16 {
        self.avail
    }

    /// Writes as the guest.
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        self.memory.write(GuestAddress(at), bytes).expect("mapped");
        self.expect(at, bytes);
    }

    /// Expects that the device writes these bytes.
    pub(crate) fn expect(&mut self, at: u64, bytes: &[u8]) {
        self.model[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Checks every byte of the memory, except the device's flags and the index that requests kicks.
    pub(crate) fn check(&mut self) {
        let mut found = vec![0; MEMORY as usize];
        self.memory.read(GuestAddress(0), &mut found).expect("mapped");
        let used = USED as usize;
        for range in [used..used + 2, used + USED_BYTES - 2..used + USED_BYTES] {
            self.model[range.clone()].copy_from_slice(&found[range]);
        }
        if found != self.model {
            let at = found.iter().zip(&self.model).position(|(found, model)| found != model).unwrap_or_default();
            panic!("guest memory at {at:#x}: found {:#x}, expected {:#x}", found[at], self.model[at]);
        }
    }

    pub(crate) fn put_descriptor(&mut self, table: u64, index: u16, descriptor: RawDescriptor) {
        self.put(table + u64::from(index) * 16, &descriptor.bytes());
    }

    /// Returns the next descriptor of the ring's table, in a scattered order. A batch has fewer than the table.
    pub(crate) fn take_descriptor(&mut self) -> u16 {
        self.next_descriptor = self.next_descriptor.wrapping_add(1);
        self.next_descriptor.wrapping_mul(37) % RING
    }

    /// Writes a chain of these pieces: the first `direct` of them in the ring's table, the others in an indirect table
    /// at `table`. Returns its head.
    pub(crate) fn put_chain(&mut self, pieces: &[Piece], direct: usize, table: u64) -> u16 {
        let (here, there) = pieces.split_at(direct.min(pieces.len()));
        let slots = here.len() + usize::from(!there.is_empty());
        let slots: Vec<u16> = (0..slots).map(|_| self.take_descriptor()).collect();
        for (at, piece) in here.iter().enumerate() {
            let next = slots.get(at + 1).copied();
            self.put_descriptor(0, slots[at], of_piece(piece, next));
        }
        if !there.is_empty() {
            // Entries out of order: the first, then the others from the last one on.
            let count = there.len() as u16;
            let place = |at: u16| if at == 0 { 0 } else { count - at };
            for (at, piece) in (0..count).zip(there) {
                let next = (at + 1 < count).then(|| place(at + 1));
                self.put_descriptor(table, place(at), of_piece(piece, next));
            }
            let len = u32::from(count) * 16;
            let descriptor = RawDescriptor { address: table, len, flags: INDIRECT, next: 0 };
            self.put_descriptor(0, slots[here.len()], descriptor);
        }
        slots[0]
    }

    /// Makes a chain available, not visibly yet.
    pub(crate) fn offer(&mut self, head: u16) {
        self.put(AVAIL + 4 + u64::from(self.avail % RING) * 2, &head.to_le_bytes());
        self.avail = self.avail.wrapping_add(1);
    }

    /// Publishes the offered chains, and `ahead` entries more.
    pub(crate) fn publish(&mut self, ahead: u16) {
        self.put(AVAIL + 2, &self.avail.wrapping_add(ahead).to_le_bytes());
    }

    /// Requests a call for the next completion, or none, by both mechanisms.
    pub(crate) fn request_call(&mut self, wanted: bool) {
        self.put(AVAIL, &u16::from(!wanted).to_le_bytes());
        let event = if wanted { self.used } else { self.used.wrapping_sub(1) };
        self.put(AVAIL + 4 + 2 * u64::from(RING), &event.to_le_bytes());
    }

    /// Returns the device's used index.
    pub(crate) fn used_index(&self) -> u16 {
        let mut bytes = [0; 2];
        self.memory.read(GuestAddress(USED + 2), &mut bytes).expect("mapped");
        u16::from_le_bytes(bytes)
    }

    /// Returns the number of chains that were used since the last [`take_used`](Self::take_used).
    pub(crate) fn used_count(&self) -> u16 {
        self.used_index().wrapping_sub(self.used)
    }

    /// Takes the used elements: head and written bytes. They may have any content, so the model takes it over.
    pub(crate) fn take_used(&mut self) -> Vec<(u32, u32)> {
        let mut taken = vec![];
        for _ in 0..self.used_count() {
            let at = USED + 4 + u64::from(self.used % RING) * 8;
            let mut bytes = [0; 8];
            self.memory.read(GuestAddress(at), &mut bytes).expect("mapped");
            self.expect(at, &bytes);
            let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            taken.push((word(0), word(4)));
            self.used = self.used.wrapping_add(1);
        }
        self.expect(USED + 2, &self.used.to_le_bytes());
        taken
    }
}

fn of_piece(piece: &Piece, next: Option<u16>) -> RawDescriptor {
    let flags = if piece.writable { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
    RawDescriptor { address: piece.address, len: piece.len, flags, next: next.unwrap_or(0xdead) }
}
