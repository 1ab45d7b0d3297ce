//! Broken rings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, anyhow, ensure};
use mqblk_driver::blkfront::raw::RawFrontend;
use mqblk_memory::{GrantRef, GuestAddress};
use mqblk_ring::blkif::{Abi, BlkifRequest, operation, status};
use mqblk_xen::vbd::keys;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::transfers::SECTOR;
use crate::loopback::fixture::{DEFAULT_DISK, LoopbackFixture, MAX_RING_PAGE_ORDER, MODES, OTHER_DOMAIN, SECTORS};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend, LoopbackRing};
use crate::loopback::pages::GrantedPages;
use crate::loopback::request::{transfer, whole_page};
use crate::loopback::{TIMEOUT, wait_for};

/// Offsets of fields in the first page.
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// Writes a page and reads it back, verified.
pub(super) fn check_ring(ring: &mut LoopbackRing, data: &GrantedPages, sector: u64, stamp: u8) -> Result<()> {
    for (operation, page) in [(operation::WRITE, 0), (operation::READ, 1)] {
        data.fill(0, stamp);
        data.fill(1, !stamp);
        let response_status =
            ring.run(&BlkifRequest { id: sector, ..transfer(operation, sector, &[whole_page(data.gref(page))]) })?;
        ensure!(response_status == status::OKAY, "operation {operation} at {sector}: status {response_status}");
    }
    ensure!(data.is_filled(1, stamp), "other data than was written came back");
    Ok(())
}

/// Checks that all rings of a device work.
pub(super) fn check_all_rings(guest: &mut LoopbackFrontend, data: &GrantedPages) -> Result<()> {
    for (ring, at) in guest.rings.iter_mut().zip(0..) {
        check_ring(ring, data, u64::from(at) * 8, at + 1).with_context(|| format!("ring {at}"))?;
    }
    Ok(())
}

pub(super) fn producer_jumps(fixture: &mut LoopbackFixture) -> Result<()> {
    let jumps = [33_u32, 34, 1000, u32::MAX, 1 << 16, 1 << 31, (1 << 31) + 1, u32::MAX - 40];
    for (jump, disk) in fixture.sample(&jumps).zip(MODES.into_iter().cycle()) {
        let config = FrontendConfig { rings: 3, ..FrontendConfig::default() };
        let mut guest = fixture.attach(disk, config)?;
        let data = guest.pages(2)?;
        check_all_rings(&mut guest, &data)?;
        let mut other = fixture.attach(DEFAULT_DISK, FrontendConfig::default())?;
        // Requests before the jump may or may not get a response; none comes after it.
        guest.rings[1].raw.front.publish_index(2_u32.wrapping_add(*jump));
        guest.rings[1].raw.notify();
        guest.rings[1].must_have_no_response().with_context(|| format!("a jump by {jump}"))?;
        guest.rings[1].raw.front.publish_index(3);
        guest.rings[1].raw.notify();
        guest.rings[1].must_have_no_response().with_context(|| format!("after a jump by {jump}"))?;
        for ring in [0, 2] {
            check_ring(&mut guest.rings[ring], &data, 64, 0x31)
                .with_context(|| format!("ring {ring} beside a dead one"))?;
        }
        check_all_rings(&mut other, &data).context("another device")?;
        fixture.check_neighbour()?;
        wait_for("the error node", || Ok(guest.backend_error()?.filter(|error| error.contains("ring 1"))))?;
        guest.close()?;
        guest.reconnect(FrontendConfig { persistent: disk.persistent, ..config }).context("after a ring's death")?;
        check_all_rings(&mut guest, &data).context("after a ring's death")?;
        guest.detach()?;
        other.detach()?;
    }
    // The largest valid jump: a ring full of garbage, with a response to each entry.
    let mut guest = fixture
        .attach(DEFAULT_DISK, FrontendConfig { ring_page_order: MAX_RING_PAGE_ORDER, ..FrontendConfig::default() })?;
    let data = guest.pages(2)?;
    let ring = &mut guest.rings[0];
    for _ in 0..ring.raw.front.size() {
        ring.send(&transfer(77, 0, &[]))?;
    }
    for _ in 0..ring.raw.front.size() {
        ensure!(ring.poll()?.status == status::NOT_SUPPORTED, "an operation that is not there was done");
    }
    check_all_rings(&mut guest, &data)?;
    guest.detach()
}

pub(super) fn event_floods(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.attach(DEFAULT_DISK, FrontendConfig { rings: 4, ..FrontendConfig::default() })?;
    let data = guest.pages(2)?;
    let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut ring = guest.rings.pop().context("a ring")?;
    let (stop2, sent2) = (Arc::clone(&stop), Arc::clone(&sent));
    let rings: Vec<_> = std::mem::take(&mut guest.rings);
    let flood = std::thread::spawn(move || {
        while !stop2.load(Ordering::Relaxed) {
            rings.iter().for_each(|ring| ring.raw.notify());
            sent2.fetch_add(rings.len() as u64, Ordering::Relaxed);
        }
        rings
    });
    let enough = u64::from(fixture.repetitions(100_000));
    let worked = wait_for("a flood of events", || {
        check_ring(&mut ring, &data, 8, 0x42)?;
        fixture.check_neighbour()?;
        Ok((sent.load(Ordering::Relaxed) >= enough).then_some(()))
    });
    stop.store(true, Ordering::Relaxed);
    guest.rings = flood.join().map_err(|_| anyhow!("the flood panicked"))?;
    worked?;
    guest.rings.push(ring);
    check_all_rings(&mut guest, &data)?;
    guest.detach()
}

pub(super) fn scribbled_indices(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut guest = fixture.attach(disk, FrontendConfig::default())?;
        let data = guest.pages(2)?;
        let memory = Arc::clone(&guest.rings[0].raw.pages.memory);
        let cell = |at: usize| memory.shared_u32(GuestAddress(at as u64)).context("the ring's page");
        let events = [cell(REQ_EVENT)?, cell(RSP_EVENT)?];
        let stop = Arc::new(AtomicBool::new(false));
        let stop2 = Arc::clone(&stop);
        let scribbler = std::thread::spawn(move || {
            let mut random = SmallRng::seed_from_u64(8);
            while !stop2.load(Ordering::Relaxed) {
                events.iter().for_each(|cell| cell.store(random.random(), Ordering::Relaxed));
            }
        });
        let worked = (0..fixture.repetitions(400)).try_for_each(|turn| {
            data.fill(0, turn as u8);
            // The backend always notifies, and does not wait for events.
            let sector = u64::from(turn) * 8 % SECTORS;
            for (operation, page) in [(operation::WRITE, 0), (operation::READ, 1)] {
                let request = transfer(operation, sector, &[whole_page(data.gref(page))]);
                guest.rings[0].send(&BlkifRequest { id: u64::from(turn), ..request })?;
                let response = guest.rings[0].poll()?;
                ensure!((response.id, response.status) == (u64::from(turn), status::OKAY), "{response:?}");
            }
            ensure!(data.is_filled(1, turn as u8), "other data than was written came back");
            Ok(())
        });
        stop.store(true, Ordering::Relaxed);
        scribbler.join().map_err(|_| anyhow!("the scribbler panicked"))?;
        worked.with_context(|| disk.id)?;
        // The backend has its own index of responses.
        let cell = cell(RSP_PROD)?;
        let before = u32::from_le(cell.load(Ordering::Acquire));
        for wrong in [before.wrapping_sub(1), before.wrapping_add(30), 0, u32::MAX] {
            let now = guest.rings[0].raw.front.in_flight();
            ensure!(now == 0, "{now} requests are in flight");
            let right = u32::from_le(cell.load(Ordering::Acquire)).wrapping_add(1);
            cell.store(wrong.to_le(), Ordering::Release);
            guest.rings[0].send(&transfer(operation::READ, 0, &[whole_page(data.gref(1))]))?;
            wait_for("the right index", || Ok((u32::from_le(cell.load(Ordering::Acquire)) == right).then_some(())))?;
            ensure!(guest.rings[0].poll()?.status == status::OKAY, "a good read failed");
        }
        check_all_rings(&mut guest, &data).with_context(|| disk.id)?;
        guest.detach()?;
    }
    Ok(())
}

pub(super) fn unread_responses(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let mut guest = fixture.attach(disk, FrontendConfig { rings: 2, ..FrontendConfig::default() })?;
        let data = guest.pages(2)?;
        data.fill(0, 9);
        let memory = Arc::clone(&guest.rings[0].raw.pages.memory);
        let cell = memory.shared_u32(GuestAddress(RSP_PROD as u64)).context("the ring's page")?;
        let abi = guest.rings[0].raw.front.abi();
        let (first, entry) = (crate::loopback::frontend::RING_HEADER_BYTES, u64::from(abi.entry_bytes()));
        let raw =
            mqblk_ring::blkif::RawRequest::encode(abi, &transfer(operation::WRITE, 8, &[whole_page(data.gref(0))]));
        let mut produced = 0_u32;
        for _ in 0..fixture.repetitions(200) {
            // A full ring, over responses that were never taken.
            for slot in 0..32 {
                guest.rings[0].raw.overwrite(first + slot * entry, &raw.bytes()[..entry as usize]);
            }
            produced += 32;
            guest.rings[0].raw.front.publish_index(produced);
            guest.rings[0].raw.notify();
            wait_for("the responses", || Ok((u32::from_le(cell.load(Ordering::Acquire)) == produced).then_some(())))?;
        }
        check_ring(&mut guest.rings[1], &data, 64, 3).with_context(|| disk.id)?;
        guest.detach()?;
        let content = fixture.content(disk)?;
        ensure!(content[8 * SECTOR..16 * SECTOR].iter().all(|byte| *byte == 9), "the writes are not on the disk");
    }
    Ok(())
}

pub(super) fn revoked_pages(fixture: &mut LoopbackFixture) -> Result<()> {
    for disk in MODES {
        let config = FrontendConfig { rings: 2, persistent: disk.persistent, ..FrontendConfig::default() };
        let mut guest = fixture.attach(disk, config)?;
        let data = guest.pages(2)?;
        // With requests in the ring.
        for _ in 0..16 {
            guest.rings[0].send(&transfer(operation::READ, 0, &[whole_page(data.gref(1))]))?;
        }
        drop(guest.rings.remove(0));
        check_ring(&mut guest.rings[0], &data, 8, 0x19).with_context(|| format!("{}: the other ring", disk.id))?;
        fixture.check_neighbour()?;
        guest.close()?;
        guest.reconnect(config)?;
        check_all_rings(&mut guest, &data).with_context(|| disk.id)?;
        // All rings, without a state change.
        guest.rings.clear();
        fixture.check_neighbour()?;
        guest.detach()?;
    }
    Ok(())
}

/// Returns the keys with another value of `key`.
fn with_key(mut keys: Vec<(String, String)>, key: &str, value: impl ToString) -> Vec<(String, String)> {
    keys.retain(|(name, _)| name != key);
    keys.push((key.to_owned(), value.to_string()));
    keys
}

pub(super) fn unusable_rings(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.create(DEFAULT_DISK)?;
    let config = FrontendConfig { rings: 2, ..FrontendConfig::default() };
    let back = guest.vbd.backend;
    let read_only = guest.pages_for(back, 1, false)?;
    let strangers = guest.pages_for(OTHER_DOMAIN, 1, true)?;
    let stranger_port = guest.xen().alloc_unbound(OTHER_DOMAIN)?;
    let bound = guest.xen().alloc_unbound(back)?;
    let data = guest.pages(2)?;
    for (queue, key, value, words) in [
        (0, keys::RING_REF, GrantRef(u32::MAX).0, "ring-ref"),
        (1, keys::RING_REF, 0, "ring-ref"),
        (1, keys::RING_REF, read_only.gref(0).0, "ring-ref"),
        (0, keys::RING_REF, strangers.gref(0).0, "ring-ref"),
        (0, keys::EVENT_CHANNEL, u32::MAX, "event-channel"),
        (1, keys::EVENT_CHANNEL, 0, "event-channel"),
        (1, keys::EVENT_CHANNEL, 100_000, "event-channel"),
        (1, keys::EVENT_CHANNEL, stranger_port.port.0, "event-channel"),
    ] {
        let keys = guest.make_rings(config)?;
        let keys = with_key(keys, &format!("queue-{queue}/{key}"), value);
        ensure!(guest.front.connect(&keys).is_err(), "{key} {value} of ring {queue} was taken");
        guest.must_fail(words).with_context(|| format!("{key} {value} of ring {queue}"))?;
        guest.close()?;
        guest.front.initialise()?;
    }
    // A page whose grant has ended.
    let keys = guest.make_rings(config)?;
    let ended = guest.pages(1)?.gref(0);
    ensure!(guest.front.connect(&with_key(keys, "queue-1/ring-ref", ended.0)).is_err(), "a grant that ended");
    guest.must_fail("ring-ref").context("a grant that ended")?;
    guest.close()?;
    guest.front.initialise()?;
    // One port for both rings.
    let keys = guest.make_rings(config)?;
    let keys = with_key(keys, "queue-0/event-channel", bound.port.0);
    let keys = with_key(keys, "queue-1/event-channel", bound.port.0);
    ensure!(guest.front.connect(&keys).is_err(), "one port for two rings was taken");
    guest.must_fail("event-channel")?;
    guest.close()?;
    guest.reconnect(config)?;
    check_all_rings(&mut guest, &data)?;
    ensure!(guest.backend_error()?.is_none(), "the error node outlives the error");
    guest.detach()
}

pub(super) fn shared_page(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.create(DEFAULT_DISK)?;
    let config = FrontendConfig { rings: 2, ..FrontendConfig::default() };
    let keys = guest.make_rings(config)?;
    let first = guest.rings[0].raw.pages.refs[0];
    let keys = with_key(keys, "queue-1/ring-ref", first.0);
    let data = guest.pages(2)?;
    // Two rings read the same requests and overwrite each other's responses: only they are affected.
    if guest.front.connect(&keys).is_ok() {
        for turn in 0..fixture.repetitions(100) {
            let raw = transfer(operation::READ, u64::from(turn), &[whole_page(data.gref(1))]);
            let raw = mqblk_ring::blkif::RawRequest::encode(Abi::X86_64, &raw);
            guest.rings[0].raw.overwrite(
                crate::loopback::frontend::RING_HEADER_BYTES + u64::from(turn % 32) * 112,
                &raw.bytes()[..112],
            );
            guest.rings[0].raw.front.publish_index(turn + 1);
            guest.rings.iter().for_each(|ring| ring.raw.notify());
        }
        fixture.check_neighbour()?;
    }
    guest.close()?;
    guest.reconnect(FrontendConfig { persistent: true, ..config })?;
    check_all_rings(&mut guest, &data)?;
    // The same page twice in one ring.
    guest.close()?;
    guest.front.initialise()?;
    let keys = guest.make_rings(FrontendConfig { ring_page_order: 1, rings: 1, ..config })?;
    let first = guest.rings[0].raw.pages.refs[0];
    if guest.front.connect(&with_key(keys, "ring-ref1", first.0)).is_ok() {
        guest.rings[0].send(&transfer(operation::READ, 0, &[whole_page(data.gref(1))]))?;
        ensure!(guest.rings[0].raw.sleep(TIMEOUT.time()), "no event came");
    }
    guest.detach()
}

/// Returns the keys of a correct frontend, for other scenarios.
pub(super) fn frontend_keys(guest: &LoopbackFrontend, abi: Abi) -> Vec<(String, String)> {
    RawFrontend::ring_keys(abi, true, &guest.rings.iter().map(|ring| &ring.raw).collect::<Vec<_>>())
}
