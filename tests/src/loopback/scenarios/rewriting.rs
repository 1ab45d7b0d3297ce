//! Double fetches: a guest's processor rewrites what the back-end looks at, at full speed, while it looks. Each word of what is
//! rewritten has a few versions; whatever the back-end sees is a mixture of them, and it must not do what no mixture asks for.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, ensure};
use mqblk_memory::{GrantRef, GuestAddress, SharedSlots};
use mqblk_ring::blkif::{Abi, RawRequest, Request, operation, status};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::transfers::SECTOR;
use crate::loopback::guest::{Guest, HEADER, Shape};
use crate::loopback::pages::{PAGE, Pages};
use crate::loopback::request::{PAGE_SECTORS, indirect, segment, transfer, whole, word};
use crate::loopback::rig::{Disk, MODES, Rig, SECTORS};

/// Entries of the ring, all in flight at once.
const ENTRIES: usize = 32;
/// Words of an entry.
const ENTRY_WORDS: usize = 14;
/// Where a write may begin: far from each other, and near the disk's end.
const STARTS: [u64; 3] = [512, 2048, SECTORS - 8];
/// Pages that requests name, and those that none does.
const NAMED: usize = 6;
const GUARDS: usize = 4;

/// A thread that goes on storing versions of words.
struct Rewriter {
    stop: Arc<AtomicBool>,
    stores: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// A word, and its versions.
type Target = (usize, Vec<u64>);

impl Rewriter {
    fn start(words: SharedSlots<u64>, targets: Vec<Target>) -> Rewriter {
        let (stop, stores) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop2, stores2) = (Arc::clone(&stop), Arc::clone(&stores));
        let thread = std::thread::spawn(move || {
            let mut random = SmallRng::seed_from_u64(3);
            while !stop2.load(Ordering::Relaxed) {
                for (at, versions) in &targets {
                    words.set(*at, versions[random.random_range(0..versions.len())]);
                }
                stores2.fetch_add(targets.len() as u64, Ordering::Relaxed);
            }
        });
        Rewriter { stop, stores, thread: Some(thread) }
    }

    /// Ends it; it has been at work.
    fn finish(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("a running thread")?;
        thread.join().map_err(|_| anyhow!("the rewriting thread panicked"))?;
        ensure!(self.stores.load(Ordering::Relaxed) > 0, "nothing was rewritten");
        Ok(())
    }
}

impl Drop for Rewriter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Byte that fills page `page`; no two the same, none 0.
fn stamp(page: usize) -> u8 {
    0x80 + page as u8
}

/// What the guest has, and what it may lead to.
struct Stage {
    guest: Guest,
    /// [`NAMED`] pages that requests name, then [`GUARDS`].
    data: Pages,
    disk: Disk,
}

impl Stage {
    fn new(rig: &Rig, disk: Disk) -> Result<Stage> {
        rig.set_content(disk, &vec![0; SECTORS as usize * SECTOR])?;
        let guest = rig.attach(disk, Shape::default())?;
        let data = guest.pages((NAMED + GUARDS) as u32)?;
        (0..data.count()).for_each(|page| data.fill(page, stamp(page)));
        Ok(Stage { guest, data, disk })
    }

    /// Versions of a segment: whole pages, parts of pages, no sectors, no page.
    fn segments(&self) -> Vec<u64> {
        let mut all: Vec<u64> = (0..NAMED).map(|page| word(whole(self.data.gref(page)))).collect();
        all.push(word(segment(self.data.gref(0), 2, 5)));
        all.push(word(segment(self.data.gref(1), 7, 0)));
        all.push(word(segment(self.data.gref(2), 0, 255)));
        all.push(word(whole(GrantRef(u32::MAX))));
        all
    }

    /// Fills the ring again and again with `request`; every request is answered, once.
    fn rounds(&mut self, count: u32, request: &RawRequest) -> Result<(u64, u64)> {
        let ring = &mut self.guest.rings[0];
        let (mut done, mut refused) = (0, 0);
        for _ in 0..count {
            for _ in 0..ENTRIES {
                ensure!(ring.raw.front.put(request), "the ring is full");
            }
            let _ = ring.raw.front.publish();
            ring.raw.notify();
            for _ in 0..ENTRIES {
                // Its id may be rewritten as well.
                match ring.poll()?.status {
                    status::OKAY => done += 1,
                    status::ERROR | status::NOT_SUPPORTED => refused += 1,
                    other => anyhow::bail!("status {other}"),
                }
            }
            ensure!(ring.raw.front.look()? == 0, "more responses than requests");
        }
        Ok((done, refused))
    }

    /// Whether only what some version names was written: to the disk, from pages that some version names, where some version
    /// begins; `longest` is the length of the longest mixture in sectors.
    fn judge(self, rig: &Rig, longest: u64) -> Result<()> {
        for page in NAMED..self.data.count() {
            ensure!(self.data.is_filled(page, stamp(page)), "a page that no version names was written");
        }
        let stamps: BTreeSet<u8> = (0..NAMED).map(stamp).chain([0]).collect();
        for page in 0..NAMED {
            let known = self.data.page(page).iter().all(|byte| stamps.contains(byte));
            ensure!(known, "page {page} holds something that was neither there nor on the disk");
        }
        let name = self.disk.id;
        self.guest.detach()?;
        let content = rig.content(self.disk)?;
        for (sector, bytes) in (0..).zip(content.chunks(SECTOR)) {
            let reached = STARTS.iter().any(|start| (*start..start + longest).contains(&sector));
            let allowed = |byte: &u8| if reached { stamps.contains(byte) } else { *byte == 0 };
            ensure!(bytes.iter().all(allowed), "{name}: sector {sector} holds what no version asks for");
        }
        Ok(())
    }
}

/// Versions of a number of segments and what stands beside it: the first word of an entry.
fn heads(operations: &[u8]) -> Vec<u64> {
    let counts = [1, 2, 5, 11, 12, 0, 255];
    let head = |op: u8, count: u8| u64::from_le_bytes([op, count, 0, 0, 0, 0, 0, 0]);
    operations.iter().flat_map(|op| counts.map(|count| head(*op, count))).collect()
}

pub(super) fn entries(rig: &mut Rig) -> Result<()> {
    for disk in MODES {
        // What is written; then what is read, which ends in the pages.
        for operations in [[operation::WRITE, operation::FLUSH_DISKCACHE, 255], [operation::READ, 4, 77]] {
            let mut stage = Stage::new(rig, disk)?;
            let segments = stage.segments();
            let starts: Vec<u64> = STARTS.into_iter().chain([SECTORS, u64::MAX - 3]).collect();
            let mut targets: Vec<Target> = vec![];
            for entry in 0..ENTRIES {
                let first = HEADER as usize / 8 + entry * ENTRY_WORDS;
                // Not the id, which is the response's status when there is one.
                targets.push((first, heads(&operations)));
                targets.push((first + 2, starts.clone()));
                targets.extend((0..11).map(|at| (first + 3 + at, segments.clone())));
            }
            let memory = &stage.guest.rings[0].raw.pages.memory;
            let words = memory.slots(GuestAddress(0), PAGE / 8).context("the ring's page")?;
            let rewriter = Rewriter::start(words, targets);
            let named: Vec<_> = (0..NAMED).map(|page| whole(stage.data.gref(page))).collect();
            let request = transfer(operations[0], STARTS[0], &named);
            let raw = RawRequest::encode(Abi::X86_64, &request);
            let (done, refused) = stage.rounds(rig.repeat(600), &raw)?;
            rewriter.finish()?;
            // Else nothing was seen that had been rewritten, or nothing that was right.
            ensure!(done > 0 && refused > 0, "{}: {done} done, {refused} refused", disk.id);
            rig.neighbour_goes_on()?;
            stage.judge(rig, 11 * PAGE_SECTORS)?;
        }
    }
    Ok(())
}

pub(super) fn tables(rig: &mut Rig) -> Result<()> {
    const SEGMENTS: u16 = 40;
    for disk in MODES {
        for inner in [operation::WRITE, operation::READ] {
            let mut stage = Stage::new(rig, disk)?;
            let table = stage.guest.pages(1)?;
            // Nearly all right, or no request of so many segments would ever be.
            let (mut versions, wrong) = (vec![], stage.segments());
            (0..10).for_each(|_| versions.extend(&wrong[..NAMED]));
            versions.push(wrong[NAMED]);
            let mut targets: Vec<Target> = (0..usize::from(SEGMENTS)).map(|at| (at, versions.clone())).collect();
            targets[17].1.extend(&wrong[NAMED + 1..]);
            for at in 0..usize::from(SEGMENTS) {
                table.words(0).set(at, wrong[at % NAMED]);
            }
            let rewriter = Rewriter::start(table.words(0), targets);
            let requests = [STARTS[0], STARTS[1]].map(|start| {
                let request = Request { id: start, ..indirect(inner, start, &[table.gref(0)], SEGMENTS) };
                RawRequest::encode(Abi::X86_64, &request)
            });
            let (mut done, mut refused) = (0, 0);
            for turn in 0..rig.repeat(300) as usize {
                let counts = stage.rounds(1, &requests[turn % 2])?;
                (done, refused) = (done + counts.0, refused + counts.1);
            }
            rewriter.finish()?;
            ensure!(done > 0 && refused > 0, "{}: {done} done, {refused} refused", disk.id);
            rig.neighbour_goes_on()?;
            stage.judge(rig, u64::from(SEGMENTS) * PAGE_SECTORS)?;
        }
    }
    Ok(())
}
