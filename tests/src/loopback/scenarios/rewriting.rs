//! Double fetches: a guest's CPU continuously rewrites the memory that the backend reads. Each rewritten word has a few
//! versions; the backend may see any mixture of them, and must do nothing that no mixture requests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use mqblk_memory::{GrantRef, GuestAddress, SharedArray};
use mqblk_ring::blkif::{Abi, BlkifRequest, RawRequest, operation, status};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::transfers::SECTOR;
use crate::loopback::TIMEOUT;
use crate::loopback::fixture::{LoopbackDisk, LoopbackFixture, MODES, SECTORS};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend, RING_HEADER_BYTES};
use crate::loopback::pages::{GrantedPages, WORDS};
use crate::loopback::request::{PAGE_SECTORS, indirect, segment, segment_words, transfer, whole_page};

/// Entries of the ring, all in flight at once.
const ENTRIES: usize = 32;
/// Start sectors of writes: far from each other, and near the disk's end.
const STARTS: [u64; 3] = [512, 2048, SECTORS - 8];
/// Pages that requests name, and guard pages.
const NAMED: usize = 6;
const GUARDS: usize = 4;

/// A thread that continuously stores versions of words.
struct Rewriter {
    stop: Arc<AtomicBool>,
    stores: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// Index of a word, and its versions.
type Target = (usize, Vec<u32>);

impl Rewriter {
    fn start(words: SharedArray<u32>, targets: Vec<Target>) -> Rewriter {
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

    /// Stops it, and checks that it has stored anything.
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

/// Byte that fills page `page`; unique, and not 0.
fn page_byte(page: usize) -> u8 {
    0x80 + page as u8
}

/// A frontend with its reachable pages.
struct RewritingFixture {
    guest: LoopbackFrontend,
    /// [`NAMED`] pages that requests name, then [`GUARDS`].
    data: GrantedPages,
    disk: LoopbackDisk,
}

impl RewritingFixture {
    fn new(fixture: &LoopbackFixture, disk: LoopbackDisk, abi: Abi) -> Result<RewritingFixture> {
        fixture.set_content(disk, &vec![0; SECTORS as usize * SECTOR])?;
        let guest = fixture.attach(disk, FrontendConfig { abi, ..FrontendConfig::default() })?;
        let data = guest.pages((NAMED + GUARDS) as u32)?;
        (0..data.count()).for_each(|page| data.fill(page, page_byte(page)));
        Ok(RewritingFixture { guest, data, disk })
    }

    /// Returns versions of a segment: whole pages, then parts of pages, no sectors, no page.
    fn segments(&self) -> Vec<[u32; 2]> {
        let page = |page| self.data.gref(page);
        let wrong = [segment(page(1), 7, 0), segment(page(2), 0, 255), whole_page(GrantRef(u32::MAX))];
        let all = (0..NAMED).map(|named| whole_page(page(named))).chain([segment(page(0), 2, 5)]).chain(wrong);
        all.map(segment_words).collect()
    }

    /// Fills the ring repeatedly with one of the requests; each gets one response. Runs at least `count` times, and
    /// until one request has succeeded and one has failed: otherwise the rewriting had no effect, or no request was
    /// valid.
    fn rounds(&mut self, count: u32, requests: &[RawRequest]) -> Result<()> {
        let ring = &mut self.guest.rings[0];
        let (mut done, mut refused) = (0_u64, 0_u64);
        let (mut rounds, until) = (0, Instant::now() + TIMEOUT.time());
        while rounds < count || done == 0 || refused == 0 {
            ensure!(rounds < count || Instant::now() < until, "{done} done, {refused} refused");
            let request = &requests[rounds as usize % requests.len()];
            rounds += 1;
            for _ in 0..ENTRIES {
                ensure!(ring.raw.front.put(request), "the ring is full");
            }
            let _ = ring.raw.front.publish();
            ring.raw.notify();
            for _ in 0..ENTRIES {
                // The id may be rewritten too.
                match ring.poll()?.status {
                    status::OKAY => done += 1,
                    status::ERROR | status::NOT_SUPPORTED => refused += 1,
                    other => anyhow::bail!("status {other}"),
                }
            }
            ensure!(ring.raw.front.poll_responses()? == 0, "more responses than requests");
        }
        Ok(())
    }

    /// Checks the writes to the disk: they are from pages that a version names, to sectors where a version begins.
    /// `longest` is the length of the longest mixture in sectors.
    fn check_written(self, fixture: &LoopbackFixture, longest: u64) -> Result<()> {
        for page in NAMED..self.data.count() {
            ensure!(self.data.is_filled(page, page_byte(page)), "a page that no version names was written");
        }
        let stamps: BTreeSet<u8> = (0..NAMED).map(page_byte).chain([0]).collect();
        for page in 0..NAMED {
            let known = self.data.page(page).iter().all(|byte| stamps.contains(byte));
            ensure!(known, "page {page} holds something that was neither there nor on the disk");
        }
        let name = self.disk.id;
        self.guest.detach()?;
        let content = fixture.content(self.disk)?;
        for (sector, bytes) in (0..).zip(content.chunks(SECTOR)) {
            let reached = STARTS.iter().any(|start| (*start..start + longest).contains(&sector));
            let allowed = |byte: &u8| if reached { stamps.contains(byte) } else { *byte == 0 };
            ensure!(bytes.iter().all(allowed), "{name}: sector {sector} holds what no version asks for");
        }
        Ok(())
    }
}

/// Returns versions of an entry's first word: the operation and the number of segments.
fn head_versions(operations: &[u8]) -> Vec<u32> {
    let counts = [1, 2, 5, 11, 12, 0, 255];
    operations.iter().flat_map(|op| counts.map(|count| u32::from_le_bytes([*op, count, 0, 0]))).collect()
}

/// Returns versions of the words of all entries, except for those that hold a response's status.
fn entry_versions(abi: Abi, operations: &[u8], segments: &[[u32; 2]]) -> Vec<Target> {
    // In words of 32 bits: see the layouts of `blkif.h`.
    let (entry_words, sector, first_segment) = if abi == Abi::X86_32 { (27, 3, 5) } else { (28, 4, 6) };
    let starts: Vec<u64> = STARTS.into_iter().chain([SECTORS, u64::MAX - 3]).collect();
    let half = |which: usize| segments.iter().map(|words| words[which]).collect::<Vec<_>>();
    let mut targets = vec![];
    for entry in 0..ENTRIES {
        let first = RING_HEADER_BYTES as usize / size_of::<u32>() + entry * entry_words;
        targets.push((first, head_versions(operations)));
        targets.push((first + sector, starts.iter().map(|start| *start as u32).collect()));
        // Mostly within the disk.
        targets.push((first + sector + 1, vec![0, 0, 0, 0, u32::MAX]));
        for at in (0..11).map(|at| first + first_segment + 2 * at) {
            targets.extend([(at, half(0)), (at + 1, half(1))]);
        }
    }
    targets
}

pub(super) fn entries(fixture: &mut LoopbackFixture) -> Result<()> {
    for (disk, abi) in MODES.into_iter().zip(Abi::ALL) {
        // First writes, then reads, which change the pages.
        for operations in [[operation::WRITE, operation::FLUSH_DISKCACHE, 255], [operation::READ, 4, 77]] {
            let mut stage = RewritingFixture::new(fixture, disk, abi)?;
            let targets = entry_versions(abi, &operations, &stage.segments());
            let memory = &stage.guest.rings[0].raw.pages.memory;
            let rewriter =
                Rewriter::start(memory.shared_array(GuestAddress(0), WORDS).context("the ring's page")?, targets);
            let named: Vec<_> = (0..NAMED).map(|page| whole_page(stage.data.gref(page))).collect();
            let raw = RawRequest::encode(abi, &transfer(operations[0], STARTS[0], &named));
            stage.rounds(fixture.repetitions(200), &[raw]).with_context(|| disk.id)?;
            rewriter.finish()?;
            fixture.check_neighbour()?;
            stage.check_written(fixture, 11 * PAGE_SECTORS)?;
        }
    }
    Ok(())
}

pub(super) fn tables(fixture: &mut LoopbackFixture) -> Result<()> {
    const SEGMENTS: usize = 40;
    for disk in MODES {
        for inner in [operation::WRITE, operation::READ] {
            let mut stage = RewritingFixture::new(fixture, disk, Abi::X86_64)?;
            let table = stage.guest.pages(1)?;
            let versions = stage.segments();
            let (right, all) = (&versions[..NAMED + 1], &versions[..]);
            let mut targets: Vec<Target> = vec![];
            for at in 0..SEGMENTS {
                // Nearly all are valid; otherwise no request with this many segments would be.
                let from: Vec<_> = if at == 17 { right.repeat(2) } else { right.to_vec() };
                let from = if at == 17 { [&from[..], all].concat() } else { from };
                targets.push((2 * at, from.iter().map(|words| words[0]).collect()));
                targets.push((2 * at + 1, from.iter().map(|words| words[1]).collect()));
                (0..2).for_each(|half| table.words(0).set(2 * at + half, versions[at % NAMED][half]));
            }
            let rewriter = Rewriter::start(table.words(0), targets);
            let requests = [STARTS[0], STARTS[1]].map(|start| {
                let request = BlkifRequest { id: start, ..indirect(inner, start, &[table.gref(0)], SEGMENTS as u16) };
                RawRequest::encode(Abi::X86_64, &request)
            });
            stage.rounds(fixture.repetitions(100), &requests).with_context(|| disk.id)?;
            rewriter.finish()?;
            fixture.check_neighbour()?;
            stage.check_written(fixture, SEGMENTS as u64 * PAGE_SECTORS)?;
        }
    }
    Ok(())
}
