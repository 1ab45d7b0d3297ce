//! An independent client: the virtio-blk-vhost-user driver of the `blkio` crate (libblkio in Rust), which shares no
//! code with this project. It adds memory in odd sizes while the rings run, and kicks before it handles calls. Programs
//! built on it connect once to query the device and again to use it.

#![expect(unsafe_code, reason = "blkio hands completions out as uninitialised memory that it has filled in")]

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::load::{BLOCK, VhostUserLoad, block, block_fault};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const DISK: u64 = 1 << 20;

/// Connects to a disk without starting it.
fn connect(daemon: &HostileDaemon, id: &str) -> Blkio {
    let mut client = Blkio::new("virtio-blk-vhost-user").expect("the driver");
    client.set_str("path", daemon.socket(id).to_str().expect("a path in UTF-8")).expect("path");
    client.connect().expect("a connection");
    client
}

/// Returns the file of a region's memory.
fn file(region: &MemoryRegion) -> File {
    let path = format!("/proc/self/fd/{}", region.fd);
    File::options().read(true).write(true).open(path).expect("the region's file")
}

/// Waits for `count` completions. Returns their user data and results.
fn completions(queue: &mut Blkioq, count: usize) -> Vec<(usize, i32)> {
    let mut found = Vec::new();
    while found.len() < count {
        let mut room: [MaybeUninit<Completion>; 8] = [const { MaybeUninit::uninit() }; 8];
        let mut limit = Duration::from_secs(20);
        let most = room.len().min(count - found.len());
        let done = queue.do_io(&mut room[..most], 1, Some(&mut limit), None).expect("an answer in time");
        // SAFETY: do_io has filled in the first `done` entries.
        found.extend(
            room[..done].iter().map(|one| unsafe { one.assume_init_ref() }).map(|one| (one.user_data, one.ret)),
        );
    }
    found
}

/// Waits for one completion, which must be a success.
fn succeed(queue: &mut Blkioq, what: &str) {
    assert_eq!(completions(queue, 1)[0].1, 0, "{what}");
}

fn serve(storage: &str) -> HostileDaemon {
    let disk = format!("{storage},queues=4");
    let readonly = "storage=ram,size=1M,readonly=on";
    HostileDaemon::start(2, &[("disk", &disk), ("readonly", readonly)])
}

const STORAGES: [&str; 3] =
    ["storage=ram,size=1M", "storage=file,path=IMAGE", "storage=fault,inner=ram,size=1M,fault-jitter-us=500,poll=off"];

#[test]
fn it_queries_disconnects_and_connects_again() {
    let daemon = serve(STORAGES[0]);
    for _ in 0..20 {
        let client = connect(&daemon, "disk");
        assert_eq!(client.get_u64("capacity").expect("capacity"), DISK);
        assert_eq!(client.get_i32("max-queues").expect("max-queues"), 4);
        assert!(client.get_u64("max-mem-regions").expect("max-mem-regions") >= 509);
    }
    let client = connect(&daemon, "disk");
    assert_eq!(client.get_i32("request-alignment").expect("request-alignment"), 512);
    assert!(client.get_bool("flush-needed").expect("flush-needed"));
    assert!(!client.get_bool("read-only").expect("read-only"));
    assert_eq!(client.get_i32("max-segments").expect("max-segments"), 126);
    drop(client);
    daemon.stop();
}

#[test]
fn written_data_is_read_back() {
    for (storage, poll) in STORAGES.into_iter().flat_map(|storage| [(storage, false), (storage, true)]) {
        let daemon = serve(storage);
        let mut client = connect(&daemon, "disk");
        client.set_i32("num-queues", if poll { 0 } else { 3 }).expect("num-queues");
        client.set_i32("num-poll-queues", if poll { 3 } else { 0 }).expect("num-poll-queues");
        client.set_i32("queue-size", 128).expect("queue-size");
        let started = client.start().expect("a start");
        let mut queues = if poll { started.poll_queues } else { started.queues };
        if !poll {
            queues.iter_mut().for_each(|queue| queue.set_completion_fd_enabled(true));
        }
        // After the start, and of an odd size.
        let region = client.alloc_mem_region(64 * BLOCK + 777).expect("memory");
        client.map_mem_region(&region).expect("memory");
        let memory = file(&region);
        let mut generations = [0_u32; 200];
        let mut random = SmallRng::seed_from_u64(1);
        for _ in 0..40 {
            for queue in &mut queues {
                round(queue, &region, &memory, &mut generations, &mut random);
            }
        }
        queues[0].flush(0, ReqFlags::empty());
        succeed(&mut queues[0], "a flush");
        client.unmap_mem_region(&region);
        drop((queues, client));
        assert_eq!(daemon.warnings("disk"), Vec::<String>::new());
        daemon.stop();
    }
}

/// Sixteen writes and reads of different blocks, verified.
fn round(queue: &mut Blkioq, region: &MemoryRegion, memory: &File, generations: &mut [u32], random: &mut SmallRng) {
    let mut jobs: Vec<(usize, bool, usize)> = Vec::new();
    for slot in 0..16 {
        let number = random.random_range(0..generations.len());
        if jobs.iter().any(|(other, ..)| *other == number) {
            continue;
        }
        let write = generations[number] == 0 || random.random_bool(0.5);
        // Unaligned.
        let at = slot * (BLOCK + 31) + 5;
        let (buffer, start) = (region.addr + at, (number * BLOCK) as u64);
        if write {
            generations[number] += 1;
            memory.write_all_at(&block(number as u64, generations[number].into()), at as u64).expect("memory");
            let flags = if random.random_bool(0.2) { ReqFlags::FUA } else { ReqFlags::empty() };
            queue.write(start, buffer as *const u8, BLOCK, jobs.len(), flags);
        } else {
            memory.write_all_at(&[0xaa; BLOCK], at as u64).expect("memory");
            queue.read(start, buffer as *mut u8, BLOCK, jobs.len(), ReqFlags::empty());
        }
        jobs.push((number, write, at));
    }
    for (job, result) in completions(queue, jobs.len()) {
        let (number, write, at) = jobs[job];
        assert_eq!(result, 0, "block {number}, a write ({write})");
        if !write {
            let mut found = vec![0; BLOCK];
            memory.read_exact_at(&mut found, at as u64).expect("memory");
            assert_eq!(block_fault(&found, number as u64, generations[number]), None);
        }
    }
}

#[test]
fn vectors_zeroes_and_discards() {
    for storage in STORAGES {
        let daemon = serve(storage);
        let mut client = connect(&daemon, "disk");
        let mut queue = client.start().expect("a start").queues.pop().expect("a queue");
        let mut regions = Vec::new();
        for len in [4096 + 1, 777, 3 * 4096] {
            let region = client.alloc_mem_region(len).expect("memory");
            client.map_mem_region(&region).expect("memory");
            regions.push(region);
        }
        // One vector over three regions, in odd segments: 512 + 700 + 3000 - 116 = 4096.
        let lens = [512, 700, 2884];
        let vector: Vec<blkio::iovec> = regions
            .iter()
            .zip(lens)
            .map(|(region, len)| blkio::iovec { iov_base: (region.addr + 13) as *mut _, iov_len: len })
            .collect();
        let content = block(7, 1);
        let mut done = 0;
        for (region, len) in regions.iter().zip(lens) {
            file(region).write_all_at(&content[done..done + len], 13).expect("memory");
            done += len;
        }
        queue.writev(8192, vector.as_ptr(), 3, 0, ReqFlags::empty());
        succeed(&mut queue, "writev");
        let read = |queue: &mut Blkioq, start: u64| {
            queue.read(start, regions[2].addr as *mut u8, 8192, 0, ReqFlags::empty());
            succeed(queue, "a read");
            let mut found = vec![0; 8192];
            file(&regions[2]).read_exact_at(&mut found, 0).expect("memory");
            found
        };
        assert!(read(&mut queue, 8192)[..4096] == content);
        for region in &regions {
            file(region).write_all_at(&[0; 700], 13).expect("memory");
        }
        queue.readv(8192, vector.as_ptr(), 3, 0, ReqFlags::empty());
        succeed(&mut queue, "readv");
        let mut found = vec![0; 700];
        file(&regions[1]).read_exact_at(&mut found, 13).expect("memory");
        assert!(found == content[512..1212], "the vector's second piece");

        queue.write_zeroes(8192, 512, 0, ReqFlags::NO_UNMAP);
        succeed(&mut queue, "zeroes that keep their space");
        queue.write_zeroes(8192 + 3584, 512, 0, ReqFlags::empty());
        succeed(&mut queue, "zeroes");
        let found = read(&mut queue, 8192);
        assert!(found[..512] == [0; 512] && found[512..3584] == content[512..3584] && found[3584..4096] == [0; 512]);
        queue.discard(8192, 4096, 0, ReqFlags::empty());
        succeed(&mut queue, "a discard");
        queue.flush(0, ReqFlags::empty());
        succeed(&mut queue, "a flush");

        // Past the end.
        queue.read(DISK - 512, regions[2].addr as *mut u8, 1024, 0, ReqFlags::empty());
        assert_ne!(completions(&mut queue, 1)[0].1, 0, "a read past the end");
        queue.discard(DISK, 512, 0, ReqFlags::empty());
        assert_ne!(completions(&mut queue, 1)[0].1, 0, "a discard past the end");
        drop((queue, client));
        let warnings = daemon.warnings("disk");
        let [read, discard] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(read.contains("error=past the end of the disk"), "{read}");
        assert!(discard.contains("is malformed") && discard.contains("beyond the end of the disk"), "{discard}");
        daemon.stop();
    }
}

#[test]
fn a_read_only_disk() {
    let daemon = serve(STORAGES[0]);
    let mut client = Blkio::new("virtio-blk-vhost-user").expect("the driver");
    client.set_str("path", daemon.socket("readonly").to_str().expect("a path in UTF-8")).expect("path");
    client.set_bool("read-only", true).expect("read-only");
    client.connect().expect("a connection");
    let mut queue = client.start().expect("a start").queues.pop().expect("a queue");
    let region = client.alloc_mem_region(512).expect("memory");
    client.map_mem_region(&region).expect("memory");
    file(&region).write_all_at(&[7; 512], 0).expect("memory");
    queue.read(0, region.addr as *mut u8, 512, 0, ReqFlags::empty());
    succeed(&mut queue, "a read");
    let mut found = [1; 512];
    file(&region).read_exact_at(&mut found, 0).expect("memory");
    assert_eq!(found, [0; 512]);
    drop((queue, client));
    daemon.stop();
}

#[test]
fn the_projects_driver_reads_the_data_that_it_writes() {
    let daemon = serve(STORAGES[1]);
    let mut client = connect(&daemon, "disk");
    let mut queue = client.start().expect("a start").queues.pop().expect("a queue");
    let region = client.alloc_mem_region(BLOCK).expect("memory");
    client.map_mem_region(&region).expect("memory");
    for number in 0..200 {
        file(&region).write_all_at(&block(number, 1), 0).expect("memory");
        queue.write(number * BLOCK as u64, region.addr as *const u8, BLOCK, 0, ReqFlags::empty());
        succeed(&mut queue, "a write");
    }
    drop((queue, client));
    let mut load = VhostUserLoad::connect(daemon.socket("disk"), 2, 200, 3);
    load.expect_generation(1);
    (0..30).for_each(|_| load.round());
    assert!(load.verified > 0);
    daemon.stop();
}
