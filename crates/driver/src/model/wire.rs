//! The model's side of a vhost-user connection. Source: QEMU's `docs/interop/vhost-user.rst`.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, Region, UserAddress};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::ring::ModelVring;
use super::{ModelDevice, ModelRequest, RequestOutcome};

const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// VIRTIO_RING_F_EVENT_IDX.
const EVENT_IDX: u64 = 1 << 29;

pub(super) struct Connection<'a, P> {
    device: &'a P,
    socket: &'a UnixStream,
    memory: Arc<GuestMemory>,
    event_idx: bool,
    /// Requests that were taken and are not completed.
    held_requests: Vec<ModelRequest>,
    pub(super) rings: Vec<ModelVring>,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

impl<'a, P: ModelDevice> Connection<'a, P> {
    pub(super) fn new(device: &'a P, socket: &'a UnixStream) -> Connection<'a, P> {
        let rings = (0..device.ring_count()).map(|_| ModelVring::default()).collect();
        Connection { device, socket, memory: Arc::default(), event_idx: false, held_requests: vec![], rings }
    }

    /// Handles one message. Returns false at the end of the connection.
    pub(super) fn handle_message(&mut self) -> bool {
        let mut head = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(self.socket, &mut [IoSliceMut::new(&mut head)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
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
        let body = self.handle_request(request, &body, files);
        let body = body.or((flags & NEED_REPLY != 0).then(|| 0_u64.to_ne_bytes().to_vec()));
        let Some(body) = body else { return true };
        let mut reply = vec![];
        for word in [request, 1 | REPLY, body.len() as u32] {
            reply.extend_from_slice(&word.to_ne_bytes());
        }
        reply.extend_from_slice(&body);
        self.socket.write_all(&reply).is_ok()
    }

    fn handle_request(&mut self, request: u32, body: &[u8], mut files: Vec<File>) -> Option<Vec<u8>> {
        let word = |value: u64| Some(value.to_ne_bytes().to_vec());
        let ring = |body: &[u8]| u32_at(body, 0) as usize;
        match request {
            1 => return word(self.device.features()),
            2 => self.event_idx = u64_at(body, 0) & EVENT_IDX != 0,
            5 => self.map_memory(body, files),
            8 => self.rings[ring(body)].size = u32_at(body, 4) as u16,
            9 => {
                let guest = |at| self.memory.user_to_guest(UserAddress(u64_at(body, at))).expect("mapped ring").0;
                let parts = [guest(8), guest(24), guest(16)];
                self.rings[ring(body)].addresses = parts;
            }
            10 => self.rings[ring(body)].next_avail = u32_at(body, 4) as u16,
            11 => {
                let index = ring(body);
                self.rings[index].enabled = false;
                let mut reply = body[..4].to_vec();
                reply.extend_from_slice(&u32::from(self.rings[index].next_avail).to_ne_bytes());
                return Some(reply);
            }
            12 => self.rings[usize::from(body[0])].kick = files.pop(),
            13 => self.rings[usize::from(body[0])].call = files.pop(),
            15 => return word(self.device.protocol_features()),
            17 => return word(self.device.ring_count().into()),
            18 => self.rings[ring(body)].enabled = u32_at(body, 4) == 1,
            24 => {
                let (offset, size) = (u32_at(body, 0) as usize, u32_at(body, 4) as usize);
                let mut config = self.device.config();
                config.resize(256, 0);
                let mut reply = body[..12].to_vec();
                reply.extend_from_slice(&config[offset..offset + size]);
                return Some(reply);
            }
            25 => {
                assert_eq!(u32_at(body, 8), 0, "a driver's write has flags 0");
                self.device.write_config(u32_at(body, 0), &body[12..]);
            }
            _ => {}
        }
        None
    }

    fn map_memory(&mut self, body: &[u8], files: Vec<File>) {
        let mut memory = GuestMemory::default();
        for (index, file) in files.iter().take(u32_at(body, 0) as usize).enumerate() {
            let at = 8 + 32 * index;
            let (guest, user_data) = (GuestAddress(u64_at(body, at)), UserAddress(u64_at(body, at + 16)));
            let region = Region::from_file(file, u64_at(body, at + 24), u64_at(body, at + 8), guest, user_data);
            memory = memory.with_region(region.expect("a region that can be mapped")).expect("no overlap");
        }
        self.memory = Arc::new(memory);
    }

    /// Executes the requests of all rings. Returns false if the device closes the connection.
    pub(super) fn serve_rings(&mut self) -> bool {
        loop {
            let mut again = false;
            // Takes the requests of all rings before any is executed, so that the device observes all that are in
            // flight together.
            for (index, ring) in self.rings.iter_mut().enumerate() {
                if ring.enabled && ring.kick.is_some() {
                    ring.pop_requests(&self.memory, index, &mut self.held_requests);
                }
            }
            self.device.observe_in_flight(&self.memory, &self.held_requests);
            for found in std::mem::take(&mut self.held_requests) {
                let (id, written) = match self.device.execute(&self.memory, &found) {
                    RequestOutcome::Complete(written) => (u32::from(found.head), written),
                    RequestOutcome::CompleteWrongId(written) => (u32::from(found.head) ^ 1, written),
                    RequestOutcome::Hold => {
                        self.held_requests.push(found);
                        continue;
                    }
                    RequestOutcome::Disconnect => return false,
                };
                self.rings[found.queue].publish(&self.memory, id, written, self.event_idx);
            }
            for ring in self.rings.iter().filter(|ring| ring.enabled && ring.kick.is_some()) {
                again |= ring.arm(&self.memory, self.event_idx);
            }
            if !again {
                return true;
            }
        }
    }
}
