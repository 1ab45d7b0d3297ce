//! Plug and merge end to end: the project's driver, a real socket, worker threads that sleep, and a real file with bad
//! sectors.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use mqblk_core::{ByteLen, ByteOffset, Completion, DiskChannel, Request, Tag};
use mqblk_driver::virtio_blk::{
    BlkConnectOptions, BlkQueue, BlkQueueSet, BlkStatus, DataSegment, SectorRange, SubmitError,
};
use mqblk_engine::{AnyDisk, MergeMode, PlugOptions, PollPolicy, UringContext};
use mqblk_memory::GuestAddress;
use mqblk_tests::filter_disk::{AnyChannel, FilterDisk};
use mqblk_tests::in_process::{Plan, Rig, disk};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;
const DEPTH: u32 = 64;
/// The queue slot in the tags of merged requests.
const MERGED: u16 = u16::MAX;

type Buffer = <UringContext as mqblk_core::IoContext>::Buffer;

#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    merged: AtomicU64,
}

struct CountingChannel {
    inner: AnyChannel,
    counts: Arc<Counts>,
}

impl DiskChannel<UringContext> for CountingChannel {
    fn submit(
        &mut self,
        context: &mut UringContext,
        batch: &mut Vec<Request<Buffer>>,
        finished: &mut Vec<Completion<Buffer>>,
    ) -> usize {
        let merged = batch.iter().filter(|request| request.tag.queue() == MERGED).count();
        self.counts.merged.fetch_add(merged as u64, Ordering::Relaxed);
        let taken = self.inner.submit(context, batch, finished);
        self.counts.requests.fetch_add(taken as u64, Ordering::Relaxed);
        taken
    }
    fn reap(&mut self, context: &mut UringContext, finished: &mut Vec<Completion<Buffer>>) -> usize {
        self.inner.reap(context, finished)
    }
    fn cancel(&mut self, context: &mut UringContext, tags: &[Tag], finished: &mut Vec<Completion<Buffer>>) {
        self.inner.cancel(context, tags, finished);
    }
    fn outstanding(&self) -> u32 {
        self.inner.outstanding()
    }
    fn deadline(&self) -> Option<std::time::Instant> {
        self.inner.deadline()
    }
    fn close(&mut self, context: &mut UringContext) {
        self.inner.close(context);
    }
}

/// Wraps `inner` in a disk that counts requests.
fn counted(inner: Arc<AnyDisk>) -> (Arc<AnyDisk>, Arc<Counts>) {
    let counts = Arc::<Counts>::default();
    let seen = Arc::clone(&counts);
    let channel = move |inner| CountingChannel { inner, counts: Arc::clone(&seen) };
    (Arc::new(FilterDisk::new(inner, move |inner| Box::new(channel(inner)) as AnyChannel)), counts)
}

/// Returns the content of a block.
fn content(block: u64) -> Vec<u8> {
    (0..BLOCK).map(|byte| (byte * 7 + block * 131 + (block >> 8)) as u8 | 1).collect()
}

fn address(queue: &BlkQueue, slot: u32) -> GuestAddress {
    GuestAddress(queue.data().0.0 + u64::from(slot) * BLOCK)
}

fn sector(block: u64) -> mqblk_core::Sector512 {
    ByteOffset(block * BLOCK).to_sector().expect("blocks are whole sectors")
}

/// Sends one request for each block in sequence, spread over all queues, and calls `done` with each block's status.
fn stream(
    set: &mut BlkQueueSet,
    send: impl Fn(&mut BlkQueue, u32, u64, DataSegment) -> Result<(), SubmitError>,
    mut done: impl FnMut(&BlkQueue, u64, DataSegment, BlkStatus),
) {
    let queues = set.queues_mut().len() as u64;
    let mut free = vec![(0..DEPTH).collect::<Vec<_>>(); queues as usize];
    let mut blocks = vec![vec![0; DEPTH as usize]; queues as usize];
    let (mut sent, mut ended) = (0, 0);
    while ended < BLOCKS {
        while sent < BLOCKS {
            let at = (sent % queues) as usize;
            let Some(slot) = free[at].pop() else { break };
            let queue = &mut set.queues_mut()[at];
            let piece = DataSegment { address: address(queue, slot), len: BLOCK as u32 };
            send(queue, slot, sent, piece).expect("the ring has space");
            blocks[at][slot as usize] = sent;
            sent += 1;
        }
        let before = ended;
        for (at, queue) in set.queues_mut().iter_mut().enumerate() {
            queue.publish().expect("a kick can be sent");
            queue.poll().expect("the device keeps to the protocol");
            while let Some(completed) = queue.reap().expect("the device keeps to the protocol") {
                let piece = DataSegment { address: address(queue, completed.user_data), len: BLOCK as u32 };
                done(queue, blocks[at][completed.user_data as usize], piece, completed.status);
                free[at].push(completed.user_data);
                ended += 1;
            }
        }
        if ended == before {
            set.wait(1).expect("a call comes");
        }
    }
}

/// Sends one request and waits for its status.
fn one(set: &mut BlkQueueSet, send: impl FnOnce(&mut BlkQueue) -> Result<(), SubmitError>) -> BlkStatus {
    let queue = &mut set.queues_mut()[0];
    send(queue).expect("the ring has space");
    queue.publish().expect("a kick can be sent");
    loop {
        let queue = &mut set.queues_mut()[0];
        queue.poll().expect("the device keeps to the protocol");
        if let Some(done) = queue.reap().expect("the device keeps to the protocol") {
            return done.status;
        }
        set.wait(1).expect("a call comes");
    }
}

fn connect(disk: &Arc<AnyDisk>, queues: u16, poll: PollPolicy, plug: PlugOptions) -> (Rig, Vec<BlkQueueSet>) {
    let plan = Plan { disk: Arc::clone(disk), workers: 1, policy: poll.into(), plug, health: Default::default() };
    Rig::new(plan, |options: &mut BlkConnectOptions| {
        options.queues = queues;
        options.data_per_queue = ByteLen(u64::from(DEPTH) * BLOCK);
    })
}

const BAD_WRITE: u64 = 100;
const BAD_READ: u64 = 200;
const BAD_ZEROES: u64 = 300;

#[test]
fn streams_over_several_queues_fail_only_where_the_disk_is_bad() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder");
    let path = folder.path().join("disk");
    let file = std::fs::File::create_new(&path).expect("the disk's file");
    file.set_len(BLOCKS * BLOCK).expect("the disk's size");
    let bad = |block: u64| format!("{}+512:EIO", block * BLOCK + 1024);
    let inner = disk(
        "fault",
        &[
            ("inner", "file"),
            ("path", path.to_str().expect("plain text")),
            ("fail-write", &bad(BAD_WRITE)),
            ("fail-read", &bad(BAD_READ)),
            ("fail-zeroes", &bad(BAD_ZEROES)),
            ("fault-reorder", "3"),
            ("fault-seed", "7"),
        ],
    );
    let (disk, counts) = counted(inner);
    for (queues, poll) in [(2, PollPolicy::Off), (3, PollPolicy::default())] {
        let (rig, mut sets) = connect(&disk, queues, poll, PlugOptions::default());
        let [set] = sets.as_mut_slice() else { panic!("one thread owns all the queues") };
        let write = |queue: &mut BlkQueue, slot, block, piece: DataSegment| {
            queue.memory().write(piece.address, &content(block)).expect("mapped");
            queue.write(slot, sector(block), piece)
        };
        let want = |bad: u64, block: u64| if block == bad { BlkStatus::IoError } else { BlkStatus::Ok };
        stream(set, write, |_, block, _, status| assert_eq!(status, want(BAD_WRITE, block), "write of block {block}"));
        assert_eq!(one(set, |queue| queue.flush(0)), BlkStatus::Ok);
        let read = |queue: &mut BlkQueue, slot, block, piece| queue.read(slot, sector(block), piece);
        stream(set, read, |queue, block, piece, status| {
            assert_eq!(status, want(BAD_READ, block), "read of block {block}");
            let mut found = vec![0; BLOCK as usize];
            queue.memory().read(piece.address, &mut found).expect("mapped");
            if block != BAD_WRITE && block != BAD_READ {
                assert!(found == content(block), "block {block} reads wrong");
            }
        });
        let zeroes = |queue: &mut BlkQueue, slot, block, _: DataSegment| {
            queue.write_zeroes(slot, &[SectorRange { start: sector(block), sectors: 8, unmap: false }])
        };
        let mut found = vec![0; BLOCK as usize];
        for block in 0..BLOCKS {
            file.read_exact_at(&mut found, block * BLOCK).expect("read");
            assert!(found == content(block) || block == BAD_WRITE, "block {block} of the file");
        }
        stream(set, zeroes, |_, block, _, status| {
            assert_eq!(status, want(BAD_ZEROES, block), "zeroes at block {block}")
        });
        assert_eq!(one(set, |queue| queue.flush(0)), BlkStatus::Ok);
        for block in 0..BLOCKS {
            file.read_exact_at(&mut found, block * BLOCK).expect("read");
            assert_eq!(found.iter().any(|byte| *byte != 0), block == BAD_ZEROES, "block {block} of the file");
        }
        rig.stop(sets);
        // Fewer requests reached the storage than were sent, although some were repeated.
        let (reached, merged) = (counts.requests.swap(0, Ordering::Relaxed), counts.merged.swap(0, Ordering::Relaxed));
        assert!(merged > 0 && reached < 3 * BLOCKS, "{merged} of {reached} requests were merged");
    }
}

/// Runs `test` on a thread for at most a minute, because it checks for a hang.
fn with_timeout(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(Duration::from_secs(60)) {
        panic!("no completion for a minute");
    }
    thread.join().expect("it ends well");
}

#[test]
fn a_failed_merged_request_is_repeated_although_nothing_else_is_in_flight() {
    with_timeout(|| {
        // The members must be repeated by a worker that would otherwise sleep.
        for latency in ["0", "300"] {
            let settings =
                [("inner", "ram"), ("size", "1M"), ("fail-read", "4K+512:EIO"), ("fault-latency-us", latency)];
            let (disk, counts) = counted(disk("fault", &settings));
            let plug = PlugOptions { merge: MergeMode::On, ..PlugOptions::default() };
            let (rig, mut sets) = connect(&disk, 1, PollPolicy::Off, plug);
            for _ in 0..20 {
                let queue = &mut sets[0].queues_mut()[0];
                for slot in 0..2 {
                    let piece = DataSegment { address: address(queue, slot), len: BLOCK as u32 };
                    queue.read(slot, sector(slot.into()), piece).expect("the ring has space");
                }
                queue.publish().expect("a kick can be sent");
                let mut left = 2;
                while left > 0 {
                    let queue = &mut sets[0].queues_mut()[0];
                    queue.poll().expect("the device keeps to the protocol");
                    while let Some(done) = queue.reap().expect("the device keeps to the protocol") {
                        let want = if done.user_data == 1 { BlkStatus::IoError } else { BlkStatus::Ok };
                        assert_eq!(done.status, want, "request {}", done.user_data);
                        left -= 1;
                    }
                    if left > 0 {
                        sets[0].wait(1).expect("a call comes");
                    }
                }
            }
            rig.stop(sets);
            assert_eq!(counts.merged.load(Ordering::Relaxed), 20);
            assert_eq!(counts.requests.load(Ordering::Relaxed), 20 * 3);
        }
    });
}
