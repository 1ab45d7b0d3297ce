//! The same attacks against another server: `t --test hostile peers:: -- --ignored --nocapture --test-threads=1`. Needs
//! qemu-storage-daemon (Debian's package qemu-utils), root and /dev/fuse. Prints the state of the server and of a
//! second disk on the same thread.

#![allow(clippy::print_stderr, reason = "figures for people")]

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mqblk_tests::hostile::daemon::mqblk_binary;
use mqblk_tests::hostile::frontend::{HostileFrontend, SEG_MAX, SIZE_MAX};
use mqblk_tests::hostile::fuse::HangingFile;
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::memory::{FileRegion, mem_table_payload};
use mqblk_tests::hostile::neighbour::Neighbour;
use mqblk_tests::hostile::one_region::{DATA, ENTRIES, MEMORY, connect, memory, offer};
use mqblk_tests::hostile::request::{readable, request_type, writable, write_direct};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::socket::{VERSION, VhostUserSocket, message as m};
use mqblk_tests::hostile::wait_for;

/// A server with two disks, `bad` and `good`, on one thread.
struct Server {
    child: Child,
    folder: tempfile::TempDir,
}

impl Server {
    fn start(name: &str) -> Server {
        let folder = tempfile::tempdir().expect("a folder");
        let image = |id: &str| folder.path().join(format!("{id}.img"));
        for id in ["bad", "good"] {
            std::fs::File::create(image(id)).and_then(|file| file.set_len(1 << 30)).expect("an image");
        }
        let socket = |id: &str| folder.path().join(format!("{id}.sock")).display().to_string();
        let mut command = if name == "mqblk" {
            let mut command = Command::new(mqblk_binary());
            command.args(["serve", "--workers", "1"]);
            for id in ["bad", "good"] {
                command.args(["--disk", &format!("id={id},path={},socket={}", image(id).display(), socket(id))]);
            }
            command
        } else {
            let mut command = Command::new(name);
            command.args(["--object", "iothread,id=one"]);
            for id in ["bad", "good"] {
                let path = image(id).display().to_string();
                command.args(["--blockdev", &format!("driver=file,node-name={id},filename={path},aio=io_uring")]);
                let socket = socket(id);
                let export = format!("type=vhost-user-blk,id=export-{id},node-name={id},writable=on,iothread=one");
                command.args(["--export", &format!("{export},addr.type=unix,addr.path={socket}")]);
            }
            command
        };
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the server");
        let server = Server { child, folder };
        wait_for("sockets", || server.socket("good").exists().then_some(()));
        server
    }

    fn socket(&self, id: &str) -> PathBuf {
        self.folder.path().join(format!("{id}.sock"))
    }

    /// Observes the good disk for `time`. Returns the line to print.
    fn watch(&mut self, neighbour: &Neighbour, time: Duration) -> String {
        let (begin, before) = (Instant::now(), neighbour.rounds());
        let (mut last, mut since, mut longest) = (before, begin, Duration::ZERO);
        while begin.elapsed() < time {
            std::thread::sleep(Duration::from_micros(500));
            if let Ok(Some(status)) = self.child.try_wait() {
                return format!("the server died ({status})");
            }
            let now = neighbour.rounds();
            longest = longest.max(since.elapsed());
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        format!("alive, {} rounds of the good disk in {time:?}, the longest pause {longest:.1?}", last - before)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SERVERS: [&str; 2] = ["qemu-storage-daemon", "mqblk"];
const TIME: Duration = Duration::from_secs(3);

fn against_each(what: &str, attack: impl Fn(&mut Server, &Neighbour) -> String) {
    for name in SERVERS {
        let mut server = Server::start(name);
        let neighbour = start_neighbour(server.socket("good"), 1, 3);
        let quiet = server.watch(&neighbour, TIME);
        let attacked = attack(&mut server, &neighbour);
        eprintln!("{what}, {name}:\n  before: {quiet}\n  under attack: {attacked}");
        drop(server);
        // The server is gone, so its thread fails.
        std::mem::forget(neighbour);
    }
}

#[test]
#[ignore = "compares with another server"]
fn a_truncated_memfd() {
    against_each("guest memory cut off", |server, neighbour| {
        let mut frontend = connect(&server.socket("bad"), 0);
        offer(&mut frontend, 0, request_type::IN, 0, &[writable(DATA, 4096)]);
        frontend.queues[0].publish_and_kick();
        _ = frontend.queues[0].wait_completion();
        frontend.memory.regions[0].file.set_len(0).expect("shorter");
        frontend.queues[0].kick.add(1);
        server.watch(neighbour, TIME)
    });
}

#[test]
#[ignore = "compares with another server"]
fn giant_chains() {
    const PIECES: usize = 249;
    against_each("16 reads of 996 MiB", |server, neighbour| {
        let mut frontend = connect(&server.socket("bad"), SIZE_MAX | SEG_MAX);
        for index in 0..16 {
            offer(&mut frontend, index, request_type::IN, 0, &[writable(DATA, 4 << 20); PIECES]);
        }
        frontend.queues[0].publish_and_kick();
        let seen = server.watch(neighbour, 2 * TIME);
        format!("{seen}; {} of 16 reads completed", frontend.queues[0].ring.used())
    });
}

#[test]
#[ignore = "compares with another server"]
fn memory_that_answers_no_page_fault() {
    against_each("guest memory in a FUSE file that hangs", |server, neighbour| {
        let hanging = HangingFile::mount(MEMORY as usize);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(hanging.path()).expect("the file");
        let slow = FileRegion { file, ..FileRegion::new(1 << 30, 0x7e00_0000_0000, MEMORY, 0) };
        let mut connection = VhostUserSocket::connect(&server.socket("bad"));
        connection.negotiate(0);
        let own = memory();
        let regions = [&own.regions[0], &slow];
        let fds = regions.map(|region| region.fd());
        let accepted = connection.try_send_acked(m::SET_MEM_TABLE, &mem_table_payload(&regions), &fds) == Some(0);
        let seen = if accepted {
            let mut frontend = HostileFrontend { connection, memory: own.into(), queues: vec![], features: 0 };
            frontend.add_queue(RingAddresses::pages(0), ENTRIES);
            let hangs = hanging.hang();
            let queue = &mut frontend.queues[0];
            let head = write_direct(&queue.ring, &[0, 1], &[readable(1 << 30, 16), writable(DATA, 513)]);
            queue.ring.offer(head);
            queue.publish_and_kick();
            let seen = server.watch(neighbour, TIME);
            let _ = server.child.kill();
            drop(hangs);
            seen
        } else {
            drop(connection);
            server.watch(neighbour, TIME)
        };
        format!("{}; {seen}", if accepted { "accepted" } else { "refused" })
    });
}

#[test]
#[ignore = "compares with another server"]
fn connections_and_messages_as_fast_as_they_go() {
    against_each("connections and messages as fast as they go", |server, neighbour| {
        let socket = server.socket("bad");
        let stop = Instant::now() + TIME;
        let flood = std::thread::spawn(move || {
            let mut count = 0_u32;
            while Instant::now() < stop {
                let connection = VhostUserSocket::connect(&socket);
                connection.send(m::GET_FEATURES, VERSION, &[], &[]);
                count += 1;
            }
            count
        });
        let seen = server.watch(neighbour, TIME);
        format!("{seen}; {:?} connections", flood.join().ok())
    });
}
