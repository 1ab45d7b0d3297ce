//! Frontends that send hostile messages, on connections that come and go.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::fd::AsFd;
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::Attack;
use crate::hostile::eventfd::TestEventFd;
use crate::hostile::frontend::{DEFAULT_RING_SIZE, HostileFrontend};
use crate::hostile::memory::{FileRegion, START, mem_table_payload};
use crate::hostile::ring::RingAddresses;
use crate::hostile::socket::{NEED_REPLY, VERSION, VhostUserSocket, message as m, message_bytes, vring_state_payload};

/// Pause of a frontend that has nothing to do.
const PAUSE: Duration = Duration::from_millis(2);
/// The highest message number in use, plus one that does not exist.
const MESSAGES: u32 = 45;

/// Connects a nonblocking socket. Returns `None` if the daemon's backlog is full.
pub(super) fn connect_at_once(path: &Path) -> Option<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
    let address = SocketAddrUnix::new(path).expect("a short path");
    rustix::net::connect(&socket, &address).ok().map(|()| socket.into())
}

/// Any messages after a valid negotiation: nearly valid payloads with any descriptors. Reads no reply.
pub fn any_messages(socket: PathBuf, seed: u64) -> Attack {
    // Their replies fit in the socket's buffer.
    const PER_CONNECTION: usize = 30;
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        let memory = FileRegion::new(START, 0x7f00_0000_0000, 1 << 20, 0);
        while !control.is_stopped() {
            let mut connection = VhostUserSocket::connect(&socket);
            connection.negotiate(0);
            for _ in 0..PER_CONNECTION {
                let event = TestEventFd::new();
                let small = u64::from(random.random_range(0..4_u32));
                let payload = match random.random_range(0..6) {
                    0 => vec![],
                    1 => small.to_ne_bytes().to_vec(),
                    2 => vring_state_payload(random.random_range(0..3), random.random_range(0..300)),
                    3 => mem_table_payload(&[&memory]),
                    4 => memory.mem_reg_payload(),
                    _ => {
                        let mut bytes = vec![0; random.random_range(0..64)];
                        random.fill(&mut bytes[..]);
                        bytes
                    }
                };
                let fds = match random.random_range(0..3) {
                    0 => vec![],
                    1 => vec![event.as_fd()],
                    _ => vec![memory.fd()],
                };
                let flags = VERSION | if random.random_bool(0.3) { NEED_REPLY } else { 0 };
                control.count();
                if !connection.send(random.random_range(0..MESSAGES), flags, &payload, &fds) {
                    break;
                }
            }
        }
    })
}

/// Connects as fast as possible. Up to eight connections stay open in mid-message.
pub fn connections(socket: PathBuf, seed: u64) -> Attack {
    const HELD: usize = 8;
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut held: VecDeque<UnixStream> = VecDeque::new();
        while !control.is_stopped() {
            let Some(mut stream) = connect_at_once(&socket) else {
                // The backlog is full: the daemon still waits for the rest of a message.
                held.pop_front();
                control.pause(PAUSE);
                continue;
            };
            let message = message_bytes(m::SET_VRING_ADDR, VERSION, 40, &[0xff; 40]);
            // It may have been closed already.
            let _ = stream.write(&message[..random.random_range(0..message.len())]);
            if random.random_bool(0.05) {
                held.push_back(stream);
                if held.len() > HELD {
                    held.pop_front();
                }
            }
            control.count();
            control.pause(Duration::from_micros(500));
        }
    })
}

/// Sends requests and never reads the replies, until the socket is full.
pub fn unread_replies(socket: PathBuf) -> Attack {
    const HOLD: Duration = Duration::from_millis(200);
    Box::new(move |control| {
        while !control.is_stopped() {
            let Some(mut stream) = connect_at_once(&socket) else {
                control.pause(PAUSE);
                continue;
            };
            let message = message_bytes(m::GET_FEATURES, VERSION, 0, &[]);
            while stream.write(&message).is_ok_and(|len| len == message.len()) {}
            control.count();
            control.pause(HOLD);
        }
    })
}

/// Sets, adds and removes memory tables and regions of sparse memfds in a loop, up to more than a disk may map.
pub fn memory_tables(socket: PathBuf) -> Attack {
    const BYTES: u64 = 1 << 40;
    const REGIONS: u64 = 10;
    Box::new(move |control| {
        let region = |at: u64| FileRegion::new(at * BYTES, 0x1000_0000_0000 + at * BYTES, BYTES, 0);
        let regions: Vec<FileRegion> = (0..REGIONS).map(region).collect();
        while !control.is_stopped() {
            let mut connection = VhostUserSocket::connect(&socket);
            connection.negotiate(0);
            let table: Vec<&FileRegion> = regions[..4].iter().collect();
            let fds: Vec<_> = table.iter().map(|region| region.fd()).collect();
            let mut accepted = connection.try_send_acked(m::SET_MEM_TABLE, &mem_table_payload(&table), &fds);
            for region in &regions[4..] {
                if accepted.is_some() {
                    accepted = connection.try_send_acked(m::ADD_MEM_REG, &region.mem_reg_payload(), &[region.fd()]);
                    control.count();
                }
            }
            for region in regions.iter().rev() {
                if accepted.is_some() {
                    accepted = connection.try_send_acked(m::REM_MEM_REG, &region.mem_reg_payload(), &[]);
                }
            }
            control.pause(PAUSE);
        }
    })
}

/// In-flight regions of any bytes. Each is set, a queue is started with it, and the region is overwritten while the
/// queue runs.
pub fn inflight_regions(socket: PathBuf, seed: u64) -> Attack {
    const BYTES: usize = 2 * (16 + 16 * DEFAULT_RING_SIZE as usize);
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut bytes = vec![0; BYTES];
        while !control.is_stopped() {
            let file = File::from(rustix::fs::memfd_create("inflight", MemfdFlags::CLOEXEC).expect("memfd"));
            random.fill(&mut bytes[..]);
            // Half of them have a plausible header: version 1 and the ring's size, at offset 8.
            if random.random_bool(0.5) {
                bytes[8..12].copy_from_slice(&[1_u16.to_ne_bytes(), DEFAULT_RING_SIZE.to_ne_bytes()].concat());
                bytes[12..14].copy_from_slice(&random.random_range(0..DEFAULT_RING_SIZE).to_ne_bytes());
            }
            file.write_all_at(&bytes, 0).expect("the region");
            let mut frontend = HostileFrontend::connect(&socket, 0);
            let mut payload = [(BYTES as u64).to_ne_bytes(), [0; 8]].concat();
            payload.extend([2_u16.to_ne_bytes(), DEFAULT_RING_SIZE.to_ne_bytes(), [0; 2], [0; 2]].concat());
            let set = frontend.connection.try_send_acked(m::SET_INFLIGHT_FD, &payload, &[file.as_fd()]);
            if set == Some(0) && starts_queue(&mut frontend) {
                random.fill(&mut bytes[..]);
                file.write_all_at(&bytes, 0).expect("the region");
                file.set_len(0).expect("shorter");
            }
            control.count();
        }
    })
}

/// Starts queue 0. Returns false if the daemon refuses.
fn starts_queue(frontend: &mut HostileFrontend) -> bool {
    let addresses = frontend.vring_addr_payload(0, RingAddresses::pages(START));
    let kick = TestEventFd::new();
    kick.add(1);
    let size = vring_state_payload(0, DEFAULT_RING_SIZE.into());
    let connection = &mut frontend.connection;
    connection.try_send_acked(m::SET_VRING_NUM, &size, &[]) == Some(0)
        && connection.try_send_acked(m::SET_VRING_ADDR, &addresses, &[]) == Some(0)
        && connection.try_send_acked(m::SET_VRING_KICK, &0_u64.to_ne_bytes(), &[kick.as_fd()]) == Some(0)
        && connection.try_send_acked(m::SET_VRING_ENABLE, &vring_state_payload(0, 1), &[]) == Some(0)
}
