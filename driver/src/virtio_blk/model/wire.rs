//! The model's end of the conversation. Source: QEMU's `docs/interop/vhost-user.rst`.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_memory::{GuestAddress, GuestMemory, Region, UserAddress};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::Shared;
use super::ring::Ring;

const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// MQ, REPLY_ACK, CONFIG.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 9;
/// SEG_MAX, BLK_SIZE, FLUSH, CONFIG_WCE, MQ, DISCARD, WRITE_ZEROES; INDIRECT_DESC, EVENT_IDX, protocol features, VERSION_1.
const FEATURES: u64 = 1 << 2 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 14 | 0b111 << 28 | 1 << 32;

pub(super) struct Connection<'a> {
    shared: &'a Shared,
    socket: &'a UnixStream,
    memory: Arc<GuestMemory>,
    event_idx: bool,
    pub(super) rings: Vec<Ring>,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

impl<'a> Connection<'a> {
    pub(super) fn new(shared: &'a Shared, socket: &'a UnixStream) -> Connection<'a> {
        let rings = (0..shared.behaviour.queues).map(|_| Ring::default()).collect();
        Connection { shared, socket, memory: Arc::default(), event_idx: false, rings }
    }

    /// Takes one message. `false` at the end of the conversation.
    pub(super) fn message(&mut self) -> bool {
        let mut head = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(self.socket, &mut [IoSliceMut::new(&mut head)], &mut ancillary, RecvFlags::empty());
        if got.map_or(0, |got| got.bytes) != head.len() {
            return false;
        }
        let mut files: Vec<File> = vec![];
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                files.extend(fds.map(File::from));
            }
        }
        let (request, flags, size) = (u32_at(&head, 0), u32_at(&head, 4), u32_at(&head, 8));
        let mut body = vec![0; size as usize];
        if self.socket.read_exact(&mut body).is_err() {
            return false;
        }
        let answer = self.handle(request, &body, files);
        let answer = answer.or((flags & NEED_REPLY != 0).then(|| 0_u64.to_ne_bytes().to_vec()));
        let Some(answer) = answer else { return true };
        let mut reply = vec![];
        for word in [request, 1 | REPLY, answer.len() as u32] {
            reply.extend_from_slice(&word.to_ne_bytes());
        }
        reply.extend_from_slice(&answer);
        self.socket.write_all(&reply).is_ok()
    }

    fn features(&self) -> u64 {
        let behaviour = &self.shared.behaviour;
        let size_max = u64::from(behaviour.size_max.is_some()) << 1;
        (FEATURES | size_max | u64::from(behaviour.read_only) << 5) & !behaviour.without
    }

    fn handle(&mut self, request: u32, body: &[u8], mut files: Vec<File>) -> Option<Vec<u8>> {
        let word = |value: u64| Some(value.to_ne_bytes().to_vec());
        let ring = |body: &[u8]| u32_at(body, 0) as usize;
        match request {
            1 => return word(self.features()),
            2 => self.event_idx = u64_at(body, 0) & 1 << 29 != 0,
            5 => self.map(body, files),
            8 => self.rings[ring(body)].size = u32_at(body, 4) as u16,
            9 => {
                let guest = |at| self.memory.guest_of_user(UserAddress(u64_at(body, at))).expect("mapped ring").0;
                let parts = [guest(8), guest(24), guest(16)];
                self.rings[ring(body)].parts = parts;
            }
            10 => self.rings[ring(body)].next_avail = u32_at(body, 4) as u16,
            11 => {
                let index = ring(body);
                self.rings[index].enabled = false;
                let mut answer = body[..4].to_vec();
                answer.extend_from_slice(&u32::from(self.rings[index].next_avail).to_ne_bytes());
                return Some(answer);
            }
            12 => self.rings[usize::from(body[0])].kick = files.pop(),
            13 => self.rings[usize::from(body[0])].call = files.pop(),
            15 => return word(PROTOCOL),
            17 => return word(self.shared.behaviour.queues.into()),
            18 => self.rings[ring(body)].enabled = u32_at(body, 4) == 1,
            24 => {
                let (offset, size) = (u32_at(body, 0) as usize, u32_at(body, 4) as usize);
                let mut config = self.config();
                config.resize(256, 0);
                let mut answer = body[..12].to_vec();
                answer.extend_from_slice(&config[offset..offset + size]);
                return Some(answer);
            }
            25 if (u32_at(body, 0), u32_at(body, 4), u32_at(body, 8)) == (32, 1, 0) => {
                self.shared.writeback.store(body[12] != 0, Ordering::Relaxed);
            }
            _ => {}
        }
        None
    }

    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 60];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(self.shared.behaviour.size as u64 / 512).to_le_bytes());
        put(8, &self.shared.behaviour.size_max.unwrap_or(0).to_le_bytes());
        put(12, &126_u32.to_le_bytes());
        put(20, &512_u32.to_le_bytes());
        put(32, &[u8::from(self.shared.writeback.load(Ordering::Relaxed))]);
        put(34, &self.shared.behaviour.queues.to_le_bytes());
        for (sectors, ranges) in [(36, 40), (48, 52)] {
            put(sectors, &1024_u32.to_le_bytes());
            put(ranges, &32_u32.to_le_bytes());
        }
        config
    }

    fn map(&mut self, body: &[u8], files: Vec<File>) {
        let mut memory = GuestMemory::default();
        for (index, file) in files.iter().take(u32_at(body, 0) as usize).enumerate() {
            let at = 8 + 32 * index;
            let (guest, user) = (GuestAddress(u64_at(body, at)), UserAddress(u64_at(body, at + 16)));
            let region = Region::of_file(file, u64_at(body, at + 24), u64_at(body, at + 8), guest, user);
            memory = memory.with(region.expect("a region that can be mapped")).expect("no overlap");
        }
        self.memory = Arc::new(memory);
    }

    /// Answers what the rings hold. `false` when the fault says to leave.
    pub(super) fn run_rings(&mut self) -> bool {
        for (index, ring) in self.rings.iter_mut().enumerate() {
            if ring.enabled && ring.kick.is_some() && !ring.run(self.shared, &self.memory, self.event_idx, index) {
                return false;
            }
        }
        true
    }
}
