//! A VMM whose guest reads into all of its memory: `fill_memory SOCKET MIB touched|untouched [AGAIN]`
//!
//! `touched`: the VMM allocates the memory first, as QEMU's `prealloc=on`. Prints `filled`, and keeps the memory until
//! it is killed. Once the file AGAIN exists, the guest reads into the first MiB again; prints `completed` or `retired`.
//! Ends with code 3 if the daemon refuses the memory.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mqblk_tests::hostile::TIMEOUT;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::memory::{FileRegion, SharedMemory, mem_table_payload};
use mqblk_tests::hostile::request::{STATUS_OK, header, readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::{VhostUserSocket, message};

/// Start of the data, after ring and headers.
const DATA: u64 = 1 << 20;
const HEADER: u64 = 0x8_0000;
/// Bytes of a request, and of the disk.
const CHUNK: u64 = 1 << 20;

fn read_into(frontend: &mut HostileFrontend, data: u64) {
    let pieces = [readable(HEADER, 16), writable(data, CHUNK as u32), writable(HEADER + 64, 1)];
    let queue = &mut frontend.queues[0];
    let head = write_direct(&queue.ring, &[0, 1, 2], &pieces);
    queue.ring.offer(head);
    queue.publish_and_kick();
}

fn say(word: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "{word}").and_then(|()| out.flush()).expect("standard output");
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().expect("fill_memory SOCKET MIB touched|untouched [AGAIN]");
    let (socket, mib) = (PathBuf::from(next()), next().parse::<u64>().expect("a number of MiB"));
    let region = FileRegion::new(0, 0x7f00_0000_0000, DATA + mib * CHUNK, 0);
    let memory = SharedMemory { regions: vec![region] };
    if next() == "touched" {
        (0..mib).for_each(|at| memory.write(DATA + at * CHUNK, &[1; CHUNK as usize]));
    }
    let mut first = VhostUserSocket::connect(&socket);
    first.negotiate(0);
    let regions = [&memory.regions[0]];
    if first.try_send_acked(message::SET_MEM_TABLE, &mem_table_payload(&regions), &[regions[0].fd()]) != Some(0) {
        std::process::exit(3);
    }
    drop(first);
    let mut frontend = HostileFrontend::with_memory(&socket, 0, memory);
    frontend.add_queue(RingAddresses::pages(0), 64);
    frontend.memory.write(HEADER, &header(request_type::IN, 0));
    for at in 0..mib {
        read_into(&mut frontend, DATA + at * CHUNK);
        _ = frontend.queues[0].wait_completion();
        assert_eq!(frontend.memory.read(HEADER + 64, 1), [STATUS_OK]);
    }
    say("filled");
    if let Some(again) = args.next() {
        while !Path::new(&again).exists() {
            std::thread::sleep(Duration::from_millis(50));
        }
        read_into(&mut frontend, DATA);
        say(if frontend.queues[0].wait_retired(TIMEOUT.time()) { "retired" } else { "completed" });
    }
    loop {
        std::thread::park();
    }
}
