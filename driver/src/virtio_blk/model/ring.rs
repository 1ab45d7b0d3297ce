//! The model's end of a ring. Source: virtio 1.3 sections 2.7 and 5.2.6.

use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, full_fence};

use super::{Fault, Shared};

/// Bytes of a sector, on the wire.
const SECTOR: usize = mqblk_core::units::SECTOR_BYTES as usize;

#[derive(Debug, Default)]
pub(super) struct Ring {
    pub(super) size: u16,
    /// Guest addresses of the descriptor table, the available ring, the used ring.
    pub(super) parts: [u64; 3],
    pub(super) next_avail: u16,
    pub(super) kick: Option<File>,
    pub(super) call: Option<File>,
    pub(super) enabled: bool,
    used: u16,
}

fn read<const N: usize>(memory: &GuestMemory, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    memory.read(GuestAddress(at), &mut bytes).expect("a mapped address");
    bytes
}

fn write(memory: &GuestMemory, at: u64, bytes: &[u8]) {
    memory.write(GuestAddress(at), bytes).expect("a mapped address");
}

/// (address, length, we may write)
type Piece = (u64, u32, bool);

impl Ring {
    fn cell(&self, memory: &GuestMemory, part: usize, offset: u64) -> u16 {
        memory.cell(GuestAddress(self.parts[part] + offset)).expect("a mapped cell").load(Ordering::Acquire)
    }

    /// Answers all there is. `false` when the fault says to leave.
    pub(super) fn run(&mut self, shared: &Shared, memory: &GuestMemory, event_idx: bool, index: usize) -> bool {
        loop {
            while self.next_avail != self.cell(memory, 1, 2) {
                let slot = u64::from(self.next_avail % self.size);
                let head = u16::from_le_bytes(read(memory, self.parts[1] + 4 + 2 * slot));
                self.next_avail = self.next_avail.wrapping_add(1);
                let count = shared.requests.fetch_add(1, Ordering::Relaxed);
                shared.per_queue[index].fetch_add(1, Ordering::Relaxed);
                match shared.behaviour.fault {
                    Fault::LeaveAfter(n) if count >= n => return false,
                    Fault::StallAfter(n) if count >= n => return true,
                    _ => {}
                }
                let mut pieces = vec![];
                self.walk(memory, self.parts[0], head, &mut pieces);
                let written = answer(shared, memory, &pieces, count);
                let id = match shared.behaviour.fault {
                    Fault::WrongIdAt(n) if count == n => u32::from(head) ^ 1,
                    _ => u32::from(head),
                };
                self.publish(memory, id, written, event_idx);
            }
            if !event_idx {
                return true;
            }
            // Ask for a kick at the next request, then look again.
            let avail_event = GuestAddress(self.parts[2] + 4 + 8 * u64::from(self.size));
            memory.cell(avail_event).expect("a mapped cell").store(self.next_avail, Ordering::Relaxed);
            full_fence();
            if self.next_avail == self.cell(memory, 1, 2) {
                return true;
            }
        }
    }

    fn walk(&self, memory: &GuestMemory, table: u64, first: u16, pieces: &mut Vec<Piece>) {
        let mut index = first;
        loop {
            let at = table + 16 * u64::from(index);
            let address = u64::from_le_bytes(read(memory, at));
            let len = u32::from_le_bytes(read(memory, at + 8));
            let [flags, next] = [12, 14].map(|field| u16::from_le_bytes(read(memory, at + field)));
            if flags & 4 != 0 {
                return self.walk(memory, address, 0, pieces);
            }
            pieces.push((address, len, flags & 2 != 0));
            assert!(pieces.len() <= usize::from(self.size).max(1024), "a descriptor loop");
            if flags & 1 == 0 {
                return;
            }
            index = next;
        }
    }

    fn publish(&mut self, memory: &GuestMemory, id: u32, written: u32, event_idx: bool) {
        let at = self.parts[2] + 4 + 8 * u64::from(self.used % self.size);
        write(memory, at, &id.to_le_bytes());
        write(memory, at + 4, &written.to_le_bytes());
        let old = self.used;
        self.used = self.used.wrapping_add(1);
        memory.cell(GuestAddress(self.parts[2] + 2)).expect("a mapped cell").store(self.used, Ordering::Release);
        full_fence();
        let wanted = if event_idx {
            self.cell(memory, 1, 4 + 2 * u64::from(self.size)) == old
        } else {
            self.cell(memory, 1, 0) & 1 == 0
        };
        if let (true, Some(mut call)) = (wanted, self.call.as_ref()) {
            let _ = call.write(&1_u64.to_ne_bytes());
        }
    }
}

/// Carries a request out and writes its status. Returns the bytes written.
fn answer(shared: &Shared, memory: &GuestMemory, pieces: &[Piece], count: u64) -> u32 {
    let (first, rest) = pieces.split_first().expect("a header");
    let (status, data) = rest.split_last().expect("a status");
    assert!(first.1 == 16 && !first.2 && status.1 == 1 && status.2, "framing {pieces:?}");
    let header: [u8; 16] = read(memory, first.0);
    let kind = u32::from_le_bytes(header[..4].try_into().expect("4 bytes"));
    let sector = u64::from_le_bytes(header[8..].try_into().expect("8 bytes"));
    let mut failed = matches!(shared.behaviour.fault, Fault::FailFrom(n) if count >= n);
    let mut written = 1;
    let mut disk = shared.disk();
    let mut at = sector as usize * SECTOR;
    for (address, len, writable) in data.iter().copied() {
        let len = len as usize;
        match kind {
            0 | 1 if at + len > disk.len() || (kind == 1 && shared.behaviour.read_only) => failed = true,
            0 => {
                assert!(writable);
                write(memory, address, &disk[at..at + len]);
                written += len as u32;
            }
            1 => {
                assert!(!writable);
                memory.read(GuestAddress(address), &mut disk[at..at + len]).expect("a mapped address");
                disk[at] ^= u8::from(matches!(shared.behaviour.fault, Fault::CorruptFrom(n) if count >= n));
            }
            8 => write(memory, address, b"model\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
            11 | 13 => {
                for range in (0..len as u64).step_by(16) {
                    let range = range_at(memory, address + range);
                    disk[range].fill(0);
                }
            }
            _ => failed = true,
        }
        at += len;
    }
    if kind == 4 {
        shared.flushes.fetch_add(1, Ordering::Relaxed);
    }
    if !matches!(shared.behaviour.fault, Fault::SilentFrom(n) if count >= n) {
        write(memory, status.0, &[u8::from(failed)]);
    }
    written
}

/// The bytes of the disk that a discard or write-zeroes range names.
fn range_at(memory: &GuestMemory, at: u64) -> Range<usize> {
    let start = u64::from_le_bytes(read(memory, at)) as usize * SECTOR;
    let sectors = u32::from_le_bytes(read(memory, at + 8)) as usize;
    start..start + sectors * SECTOR
}
