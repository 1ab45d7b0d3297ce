//! Random requests in random layouts against a model disk: valid ones must succeed with the right data, invalid ones
//! must fail with the right status, and nothing else may change. The oracle is exact: status, used length, data, and
//! the disk at the end.
//!
//! `MQBLK_FUZZ_SEED` repeats a run, `MQBLK_FUZZ_BATCHES` makes it longer.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::{EVENT_IDX, FrontendQueue, HostileFrontend, INDIRECT_DESC, SEG_MAX, SIZE_MAX};
use mqblk_tests::hostile::memory::{END, SEAM, START, SharedMemory};
use mqblk_tests::hostile::request::{
    MemorySegment, SECTOR, STATUS_IOERR, STATUS_OK, STATUS_POISON, STATUS_UNSUPP, header, range, readable,
    request_type, writable, write_direct, write_indirect,
};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::ring_fixture::read_disk;
use mqblk_tests::hostile::wait_for;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

const DISK: usize = 1 << 20;
const SECTORS: u64 = (DISK / SECTOR) as u64;
/// Entries of the ring.
const RING: u16 = 256;
/// Most requests of a batch. Each has its own range of the disk, so that their order does not matter.
const BATCH: usize = 7;
/// Guest memory of each request: one stream at its start, one in its middle, a table near its end.
const ROOM: u64 = 0x3_c000;
/// The first request's memory. The middle of the fourth is where two regions touch.
const FIRST: u64 = SEAM - 3 * ROOM - ROOM / 2;
const _: () = assert!(FIRST >= START + 0x1_0000 && FIRST + BATCH as u64 * ROOM <= END);
/// Serial of the disk under test.
const SERIAL: &[u8] = b"fuzzed";

/// A request and its expected effects.
#[derive(Debug)]
struct Request {
    kind: u32,
    sector: u64,
    /// Bytes for the device to read.
    out: Vec<u8>,
    /// Bytes that the device may write.
    room: usize,
    status: u8,
    used: u32,
    /// The expected content of the writable part from its start, as far as it is known.
    found: Vec<u8>,
    /// The expected change of the disk: byte offset and new content.
    stored: Vec<(usize, Vec<u8>)>,
}

/// The properties of the disk.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// Sectors of a block.
    block: u64,
    read_only: bool,
}

/// Returns a request on its own `count` sectors from `first` on, sometimes an invalid one.
fn request(random: &mut SmallRng, rules: Rules, model: &[u8], first: u64, count: u64) -> Request {
    let kinds =
        [request_type::IN, request_type::IN, request_type::IN, request_type::OUT, request_type::OUT, request_type::OUT];
    let others = [
        request_type::FLUSH,
        request_type::GET_ID,
        request_type::DISCARD,
        request_type::WRITE_ZEROES,
        request_type::SECURE_ERASE,
        2,
        77,
        u32::MAX,
    ];
    let kind = match random.random_bool(0.7) {
        true => kinds[random.random_range(0..kinds.len())],
        false => others[random.random_range(0..others.len())],
    };
    match kind {
        request_type::IN | request_type::OUT => transfer(random, rules, model, kind, first, count),
        request_type::DISCARD | request_type::WRITE_ZEROES => ranges(random, rules, kind, first, count),
        request_type::GET_ID => {
            let room = random.random_range(0..40);
            let mut id = SERIAL.to_vec();
            id.resize(20, 0);
            id.truncate(room);
            let used = id.len() as u32 + 1;
            Request {
                kind,
                sector: random.random(),
                out: vec![],
                room,
                status: STATUS_OK,
                used,
                found: id,
                stored: vec![],
            }
        }
        request_type::FLUSH => plain(kind, STATUS_OK),
        _ => plain(kind, STATUS_UNSUPP),
    }
}

fn plain(kind: u32, status: u8) -> Request {
    Request { kind, sector: 0, out: vec![], room: 0, status, used: 1, found: vec![], stored: vec![] }
}

/// Returns a range of the disk, nearly always within the request's own sectors, else out of range or misaligned in one
/// of many ways.
fn place(random: &mut SmallRng, rules: Rules, first: u64, count: u64) -> (u64, usize) {
    let (blocks, block) = (count / rules.block, rules.block);
    let at = random.random_range(0..blocks);
    let len = random.random_range(1..=(blocks - at).min(24)) * block * SECTOR as u64;
    let (sector, len) = (first + at * block, len as usize);
    match random.random_range(0..20) {
        0 => (SECTORS - random.random_range(0..len as u64 / 512), len),
        1 => (SECTORS + random.random_range(0..1 << 40), len),
        2 => (u64::MAX - random.random_range(0..100), len),
        3 => ((1 << 55) + sector, len),
        4 => (sector, len - random.random_range(1..512)),
        5 => (sector + random.random_range(0..block), len),
        6 => (sector, 0),
        _ => (sector, len),
    }
}

/// Returns true if `len` bytes from `sector` on lie on the disk and are whole blocks.
fn is_good(rules: Rules, sector: u64, len: usize) -> bool {
    let block = rules.block * SECTOR as u64;
    let end = u128::from(sector) * SECTOR as u128 + len as u128;
    end <= DISK as u128 && sector.is_multiple_of(rules.block) && (len as u64).is_multiple_of(block)
}

fn transfer(random: &mut SmallRng, rules: Rules, model: &[u8], kind: u32, first: u64, count: u64) -> Request {
    let (sector, len) = place(random, rules, first, count);
    let mut new = vec![0; len];
    random.fill(&mut new[..]);
    // Sometimes with data in the wrong direction.
    let wrong = if random.random_bool(0.03) { random.random_range(1..600) } else { 0 };
    let good = is_good(rules, sector, len) && wrong == 0 && (kind == request_type::IN || !rules.read_only);
    let at = sector as usize % (1 << 40) * SECTOR;
    let status = if good { STATUS_OK } else { STATUS_IOERR };
    let base = Request { kind, sector, out: vec![], room: 0, status, used: 1, found: vec![], stored: vec![] };
    match kind {
        request_type::IN => {
            let found = if good { model[at..at + len].to_vec() } else { vec![] };
            let used = found.len() as u32 + 1;
            Request { out: vec![1; wrong], room: len, used, found, ..base }
        }
        _ => {
            let stored = if good { vec![(at, new.clone())] } else { vec![] };
            Request { out: new, room: wrong, stored, ..base }
        }
    }
}

fn ranges(random: &mut SmallRng, rules: Rules, kind: u32, first: u64, count: u64) -> Request {
    let mut list = Vec::new();
    let mut stored = Vec::new();
    let (mut good, mut known) = (true, true);
    let entries = if random.random_bool(0.05) { random.random_range(0..70) } else { random.random_range(1..5) };
    for _ in 0..entries {
        let (sector, len) = place(random, rules, first, count);
        let sectors = (len / SECTOR) as u32;
        let flags = match random.random_range(0..12) {
            0 => 2,
            1 | 2 => 1,
            _ => 0,
        };
        list.extend(range(sector, sectors, flags));
        // The first fault in the list decides.
        if good && known {
            known = flags == 0 || (flags == 1 && kind == request_type::WRITE_ZEROES);
            good = is_good(rules, sector, sectors as usize * SECTOR);
            stored.push((sector as usize % (1 << 40) * SECTOR, vec![0; sectors as usize * SECTOR]));
        }
    }
    if random.random_bool(0.03) {
        list.push(0);
    }
    let shaped = list.len().is_multiple_of(16) && (1..=64).contains(&(list.len() / 16));
    let status = match (rules.read_only, shaped, known, good) {
        (true, ..) => STATUS_UNSUPP,
        (_, false, ..) => STATUS_IOERR,
        (_, _, false, _) => STATUS_UNSUPP,
        (_, _, _, false) => STATUS_IOERR,
        _ => STATUS_OK,
    };
    if status != STATUS_OK {
        stored.clear();
    }
    Request { kind, sector: 0, out: list, room: 0, status, used: 1, found: vec![], stored }
}

/// Cuts `len` bytes from `from` on into at most `most` random segments, sometimes with empty ones in between.
fn cut(random: &mut SmallRng, from: u64, len: usize, most: usize, writable_: bool) -> Vec<MemorySegment> {
    let make = if writable_ { writable } else { readable };
    let cuts = random.random_range(0..most.max(1));
    let mut edges: Vec<usize> = (0..cuts).map(|_| random.random_range(0..=len)).collect();
    edges.extend([0, len]);
    edges.sort_unstable();
    edges.windows(2).map(|pair| make(from + pair[0] as u64, (pair[1] - pair[0]) as u32)).collect()
}

/// A request in guest memory.
#[derive(Debug)]
struct Laid {
    request: Request,
    pieces: Vec<MemorySegment>,
    /// The writable segments, in order.
    room: Vec<MemorySegment>,
    status: u64,
}

/// Writes a request to guest memory from `at` on: header and readable data as one stream, writable data and status as
/// another. Each is cut at random, so that they share descriptors or span many.
fn lay(random: &mut SmallRng, memory: &SharedMemory, at: u64, request: Request, most: usize) -> Laid {
    let stream = [&header(request.kind, request.sector)[..], &request.out].concat();
    let (start, middle) = (at + random.random_range(0..64), at + ROOM / 2 - random.random_range(0..600));
    let (read, write) = if random.random_bool(0.5) { (start, middle) } else { (middle, start) };
    memory.write(read, &stream);
    memory.write(write, &vec![STATUS_POISON; request.room + 1]);
    let mut pieces = cut(random, read, stream.len(), most / 2, false);
    let all = cut(random, write, request.room + 1, most - pieces.len(), true);
    pieces.extend(&all);
    let room = vec![writable(write, request.room as u32)];
    Laid { status: write + request.room as u64, request, pieces, room }
}

/// Offers a laid-out request in ring entries taken from `free`, direct, indirect, or both. Returns the head.
fn offer(
    random: &mut SmallRng,
    queue: &mut FrontendQueue,
    free: &mut Vec<u16>,
    table: u64,
    laid: &Laid,
    tables: bool,
) -> u16 {
    let pieces = &laid.pieces;
    let before = match random.random_range(0..3) {
        // All direct, if there are enough descriptors.
        0 if pieces.len() < free.len() / 2 => pieces.len(),
        // Some direct, then a table.
        1 if tables => random.random_range(0..pieces.len().min(free.len() / 8)),
        _ if tables => 0,
        _ => pieces.len(),
    };
    let slots: Vec<u16> = free.drain(free.len() - (before + 1)..).collect();
    if before == pieces.len() {
        return write_direct(&queue.ring, &slots, pieces);
    }
    let rest = &pieces[before..];
    let mut order: Vec<u16> = (1..rest.len() as u16 + random.random_range(1..4)).collect();
    order.shuffle(random);
    order.insert(0, 0);
    let desc = write_indirect(&queue.ring.memory, table, order.len() as u16, &order, rest);
    if before > 0 {
        // The direct part is chained to the table's descriptor: an empty segment reserves it.
        let held = [&pieces[..before], &[readable(0, 0)]].concat();
        write_direct(&queue.ring, &slots, &held);
    }
    queue.ring.write_descriptor(slots[before], desc);
    slots[0]
}

/// Runs one batch: lays it out, publishes it, waits for its completion and checks it.
fn batch(random: &mut SmallRng, frontend: &mut HostileFrontend, rules: Rules, model: &mut [u8]) {
    let memory = Arc::clone(&frontend.memory);
    let tables = frontend.features & INDIRECT_DESC != 0;
    let requests = random.random_range(1..=BATCH);
    let own = SECTORS / BATCH as u64;
    let mut free: Vec<u16> = (0..RING).collect();
    free.shuffle(random);
    let queue = &mut frontend.queues[0];
    let mut waiting = BTreeMap::new();
    for number in 0..requests {
        let request = request(random, rules, model, own * number as u64, own);
        let most = if tables { [3, 20, 300][random.random_range(0..3)] } else { 20 };
        let at = FIRST + ROOM * number as u64;
        let laid = lay(random, &memory, at, request, most);
        let head = offer(random, queue, &mut free, at + ROOM - 0x3000, &laid, tables);
        queue.ring.offer(head);
        waiting.insert(u32::from(head), laid);
        if random.random_bool(0.2) {
            queue.publish_and_kick();
        }
    }
    queue.publish_and_kick();
    while !waiting.is_empty() {
        let (head, used) = wait_for("an answer", || queue.ring.take());
        let laid = waiting.remove(&head).unwrap_or_else(|| panic!("head {head} was answered, which was not asked"));
        check(&memory, &laid, used);
        for (at, content) in laid.request.stored {
            model[at..at + content.len()].copy_from_slice(&content);
        }
    }
}

fn check(memory: &SharedMemory, laid: &Laid, used: u32) {
    let request = &laid.request;
    let short = format!(
        "type {} sector {} out {} room {}, {} pieces, the first of them {:x?}",
        request.kind,
        request.sector,
        request.out.len(),
        request.room,
        laid.pieces.len(),
        &laid.pieces[..laid.pieces.len().min(8)]
    );
    assert_eq!(memory.read(laid.status, 1), [request.status], "the status of {short}");
    assert_eq!(used, request.used, "the used length of {short}");
    let room: Vec<u8> = laid.room.iter().flat_map(|piece| memory.read(piece.address, piece.len as usize)).collect();
    assert!(room[..request.found.len()] == request.found, "the data of {short}");
    assert!(
        room[request.found.len()..].iter().all(|byte| *byte == STATUS_POISON),
        "more than the data was written: {short}"
    );
}

fn fuzz(disk: &str, rules: Rules, without: u64, seed: u64, batches: usize) {
    let settings = format!("{disk},queues=1,serial={}", String::from_utf8_lossy(SERIAL));
    let daemon = HostileDaemon::start(1, &[("fuzzed", &settings)]);
    let mut model = vec![0; DISK];
    let mut random = SmallRng::seed_from_u64(seed);
    let mut left = batches;
    while left > 0 {
        let run = left.min(200);
        left -= run;
        let mut frontend = HostileFrontend::connect(&daemon.socket("fuzzed"), without | SIZE_MAX | SEG_MAX);
        frontend.add_queue(RingAddresses::pages(START), RING);
        for _ in 0..run {
            batch(&mut random, &mut frontend, rules, &mut model);
        }
        drop(frontend);
        assert!(read_disk(&daemon.socket("fuzzed"), DISK) == model, "the disk's content");
    }
    // Rate-limited warnings of failed requests, those past the end of the disk, and the first malformed ones.
    let mut others = daemon.warnings("fuzzed");
    others.retain(|line| !line.contains("I/O error") && !line.contains("is malformed"));
    assert_eq!(others, Vec::<String>::new());
    daemon.stop();
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().expect("a number"))
}

/// Runs one disk; prints the seed of a failure.
fn run(disk: &str, rules: Rules, without: u64) {
    let seed = number("MQBLK_FUZZ_SEED", 20_26);
    let batches = number("MQBLK_FUZZ_BATCHES", 1200) as usize;
    let fuzzed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fuzz(disk, rules, without, seed, batches)));
    assert!(fuzzed.is_ok(), "{disk} without features {without:#x}: to repeat: MQBLK_FUZZ_SEED={seed}");
}

const SMALL: Rules = Rules { block: 1, read_only: false };

#[test]
fn ram() {
    run("storage=ram,size=1M", SMALL, 0);
}

#[test]
fn ram_without_tables_and_event_index() {
    run("storage=ram,size=1M", SMALL, INDIRECT_DESC | EVENT_IDX);
}

#[test]
fn ram_with_large_blocks() {
    run("storage=ram,size=1M,block-size=4096", Rules { block: 8, read_only: false }, 0);
}

#[test]
fn read_only_ram() {
    run("storage=ram,size=1M,readonly=on", Rules { block: 1, read_only: true }, 0);
}

#[test]
fn file() {
    run("storage=file,path=IMAGE,block-size=512,direct=off", SMALL, 0);
}

#[test]
fn file_past_the_page_cache() {
    run("storage=file,path=IMAGE,block-size=4096", Rules { block: 8, read_only: false }, 0);
}

#[test]
fn late_and_out_of_order() {
    run("storage=fault,inner=ram,size=1M,fault-jitter-us=200,fault-reorder=3", SMALL, 0);
}
