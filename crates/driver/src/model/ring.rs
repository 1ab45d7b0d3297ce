//! The device side of a split ring. Source: virtio 1.3 sections 2.7 and 5.2.6.

use std::fs::File;
use std::io::Write;
use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, full_fence};

use super::{Descriptor, ModelRequest, read, write};

#[derive(Debug, Default)]
pub(super) struct ModelVring {
    pub(super) size: u16,
    /// Guest addresses of the descriptor table, the available ring, the used ring.
    pub(super) addresses: [u64; 3],
    pub(super) next_avail: u16,
    pub(super) kick: Option<File>,
    pub(super) call: Option<File>,
    pub(super) enabled: bool,
    used: u16,
}

impl ModelVring {
    fn load_u16(&self, memory: &GuestMemory, part: usize, offset: u64) -> u16 {
        memory.shared_u16(GuestAddress(self.addresses[part] + offset)).expect("a mapped cell").load(Ordering::Acquire)
    }

    /// Takes all available requests.
    pub(super) fn pop_requests(&mut self, memory: &GuestMemory, queue: usize, into: &mut Vec<ModelRequest>) {
        while self.next_avail != self.load_u16(memory, 1, 2) {
            let slot = u64::from(self.next_avail % self.size);
            let head = u16::from_le_bytes(read(memory, self.addresses[1] + 4 + 2 * slot));
            self.next_avail = self.next_avail.wrapping_add(1);
            let mut parts = vec![];
            self.walk_chain(memory, self.addresses[0], head, &mut parts);
            into.push(ModelRequest { queue, head, descriptors: parts });
        }
    }

    /// Arms the ring: the next request kicks. Returns true if one is available already.
    pub(super) fn arm(&self, memory: &GuestMemory, event_idx: bool) -> bool {
        if event_idx {
            let avail_event = GuestAddress(self.addresses[2] + 4 + 8 * u64::from(self.size));
            memory.shared_u16(avail_event).expect("a mapped cell").store(self.next_avail, Ordering::Relaxed);
            full_fence();
        }
        self.next_avail != self.load_u16(memory, 1, 2)
    }

    fn walk_chain(&self, memory: &GuestMemory, table: u64, first: u16, parts: &mut Vec<Descriptor>) {
        let mut index = first;
        loop {
            let at = table + 16 * u64::from(index);
            let address = u64::from_le_bytes(read(memory, at));
            let len = u32::from_le_bytes(read(memory, at + 8));
            let [flags, next] = [12, 14].map(|field| u16::from_le_bytes(read(memory, at + field)));
            if flags & 4 != 0 {
                return self.walk_chain(memory, address, 0, parts);
            }
            parts.push((address, len, flags & 2 != 0));
            assert!(parts.len() <= usize::from(self.size).max(1024), "a descriptor loop");
            if flags & 1 == 0 {
                return;
            }
            index = next;
        }
    }

    pub(super) fn publish(&mut self, memory: &GuestMemory, id: u32, written: u32, event_idx: bool) {
        let at = self.addresses[2] + 4 + 8 * u64::from(self.used % self.size);
        write(memory, at, &id.to_le_bytes());
        write(memory, at + 4, &written.to_le_bytes());
        let old = self.used;
        self.used = self.used.wrapping_add(1);
        memory
            .shared_u16(GuestAddress(self.addresses[2] + 2))
            .expect("a mapped cell")
            .store(self.used, Ordering::Release);
        full_fence();
        let wanted = if event_idx {
            self.load_u16(memory, 1, 4 + 2 * u64::from(self.size)) == old
        } else {
            self.load_u16(memory, 1, 0) & 1 == 0
        };
        if let (true, Some(mut call)) = (wanted, self.call.as_ref()) {
            let _ = call.write(&1_u64.to_ne_bytes());
        }
    }
}
