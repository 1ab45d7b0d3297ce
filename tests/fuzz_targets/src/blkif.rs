//! A blkif device: a disk in memory on a stepped worker of a simulated Xen host, and a guest with one or two rings,
//! whose requests reach its pages through grants. The guest stops and starts the rings between batches, changes
//! requests that the backend has read, and at last violates a ring's protocol. The oracle is exact: every byte of guest
//! memory, the responses, the events in both directions, the disk, the mapped grants, and the reason of a broken ring.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use arbitrary::{Result, Unstructured};
use mqblk_core::ByteLen;
use mqblk_test_bounds::Bound;

use crate::blkif_device::{BlkifMachine, RingBackend, TURNS};
use crate::blkif_guest::requests::{
    BATCH, DeviceRules, Effect, GuestRequest, PART, PageAccess, SECTOR, SECTORS, Verdict,
};
use crate::blkif_guest::{GuestRing, SharedGuest, lock};

/// Most requests that a backend reads at once. Up to this number, the guest knows which ones it has read.
const READ_AT_ONCE: usize = 32;

/// An idle worker sleeps long before this.
const SLEEPS_WITHIN: Bound = Bound::seconds(10);

/// A request on a ring.
struct Offered {
    request: GuestRequest,
    verdict: Verdict,
}

impl BlkifMachine {
    /// Puts a batch on the rings and publishes it. Returns the requests of each ring.
    fn offer(&mut self, u: &mut Unstructured<'_>, requests: Vec<GuestRequest>) -> Result<Vec<Vec<Offered>>> {
        let (rules, model, sleeps) = (self.rules, &self.model, self.setup.sleeps);
        let mut guest = lock(&self.guest);
        let guest = &mut *guest;
        let rings = guest.rings.len();
        guest.clear_overwrites();
        let overwrite: bool = u.arbitrary()?;
        let mut offered: Vec<Vec<Offered>> = (0..rings).map(|_| vec![]).collect();
        let mut entries = vec![vec![]; rings];
        for request in requests {
            let ring = u.choose_index(rings)?;
            guest.memory.prepare(u, &request)?;
            let verdict = request.verdict(&rules, &guest.memory, model);
            let padding = u.arbitrary()?;
            entries[ring].push(guest.rings[ring].put(&request.encode(rules.abi, padding)));
            offered[ring].push(Offered { request, verdict });
        }
        for (ring, (requests, entries)) in offered.iter().zip(entries).enumerate() {
            // A backend reads the ring up to a barrier.
            let read_at_once = requests.len() <= READ_AT_ONCE && requests.iter().all(|one| !one.request.is_barrier());
            if overwrite && read_at_once {
                entries.iter().zip(requests).for_each(|(at, one)| guest.overwrite_later(ring, *at, &one.request));
            }
            let count = requests.len() as u32;
            let event = match u.int_in_range(0..=5)? {
                0 => 0,
                1 => count.wrapping_add(1),
                2 => u.arbitrary()?,
                3 => count,
                _ => 1,
            };
            let guest_ring = &mut guest.rings[ring];
            guest_ring.request_event(guest_ring.rsp_cons.wrapping_add(event));
            let before = guest_ring.req_prod.wrapping_sub(count);
            let requested = guest_ring.publish(before);
            if count > 0 {
                assert!(
                    requested || !self.asleep,
                    "a backend that sleeps has requested an event with the next request"
                );
            }
            if requested && count > 0 || u.ratio(1, 16)? {
                self.backends[ring].port.channel.notify();
            }
        }
        self.asleep &= !sleeps;
        Ok(offered)
    }

    /// Runs a batch to its completion and checks it.
    fn batch(&mut self, u: &mut Unstructured<'_>, requests: Vec<GuestRequest>) -> Result<()> {
        let sent: Vec<_> = self.backends.iter().map(|backend| backend.sent.load(Ordering::Relaxed)).collect();
        let offered = self.offer(u, requests)?;
        let complete = |guest: &SharedGuest| {
            let guest = lock(guest);
            guest.rings.iter().zip(&offered).all(|(ring, offered)| ring.ready() >= offered.len() as u32)
        };
        let mut turns = 0;
        while !complete(&self.guest) {
            let idle = !self.worker.turn();
            if idle && self.setup.sleeps {
                self.worker.arm();
            }
            turns += 1;
            let reasons = || self.backends.iter().map(RingBackend::reasons).collect::<Vec<_>>();
            assert!(turns < TURNS, "a batch is never complete: {:?}", reasons());
        }
        for (ring, offered) in offered.into_iter().enumerate() {
            let sent = self.backends[ring].sent.load(Ordering::Relaxed) - sent[ring];
            self.check_ring(ring, offered, sent);
        }
        if self.setup.sleeps && u.arbitrary()? {
            self.sleep();
        }
        lock(&self.guest).memory.check();
        self.check_mappings();
        Ok(())
    }

    /// Runs turns until the worker would sleep. `off` polls for at most 40 us before that, so the number of turns
    /// depends on the machine.
    fn sleep(&mut self) {
        let begun = Instant::now();
        while begun.elapsed() < SLEEPS_WITHIN.time() {
            if !self.worker.turn() && self.worker.arm() {
                self.asleep = true;
                return;
            }
        }
        panic!("an idle worker never sleeps");
    }

    /// Checks the responses of a batch on one ring.
    fn check_ring(&mut self, ring: usize, mut offered: Vec<Offered>, events: u64) {
        let mut guest = lock(&self.guest);
        let guest = &mut *guest;
        let count = offered.len() as u32;
        let (ready, before) = (guest.rings[ring].ready(), guest.rings[ring].rsp_cons);
        assert_eq!(ready, count, "a response for each request");
        let event = guest.rings[ring].pages.read_u32(12);
        let expected = u64::from(event.wrapping_sub(before.wrapping_add(1)) < count);
        assert_eq!(events, expected, "events for {count} responses from {before} on, requested with {event}");
        while !offered.is_empty() {
            let (id, operation, status) = guest.rings[ring].response();
            let at = offered.iter().position(|one| one.request.id == id);
            let at = at.unwrap_or_else(|| panic!("a response with the id {id:#x}, which no open request has"));
            let before_barrier = offered[..at].iter().any(|one| one.verdict.ordered);
            assert!(!before_barrier, "a response to a request behind a barrier comes before the barrier's");
            let Offered { request, verdict } = offered.remove(at);
            assert!(!verdict.ordered || at == 0, "a barrier's response comes before those to earlier requests");
            assert_eq!((operation, status), (verdict.operation, verdict.status), "{:?}: {request:?}", self.rules);
            guest.rings[ring].take(id, operation, status);
            guest.memory.enter(&request, &verdict);
            if let Effect::Stored(at, content) = &verdict.effect {
                self.model[*at..at + content.len()].copy_from_slice(content);
            }
        }
        guest.rings[ring].check();
        assert_eq!(self.backends[ring].reasons(), Vec::<String>::new(), "a ring that keeps the protocol");
    }

    /// Checks the mapped pages of the guest while nothing is in flight.
    fn check_mappings(&self) {
        let rings: usize = lock(&self.guest).rings.iter().map(|ring| ring.page_count).sum();
        let mapped = self.host.in_use().0 - rings as u64;
        match self.rules.access {
            PageAccess::Copy | PageAccess::Map => assert_eq!(mapped, 0, "pages that are mapped between requests"),
            PageAccess::Persistent | PageAccess::PersistentBounce => {
                let limit = u64::from(self.setup.persistent_max) * self.backends.len() as u64;
                assert!(mapped <= limit.min(self.setup.budget), "{mapped} pages stay mapped");
            }
        }
        assert_eq!(self.vbd.options().budget.used(), mapped, "the pages of the budget are those that are mapped");
    }

    /// Publishes an impossible index. The ring must be retired for that reason, and nothing may be written for it.
    fn break_ring(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let ring = u.choose_index(self.backends.len())?;
        let before: Vec<_> = self.backends.iter().map(|backend| backend.sent.load(Ordering::Relaxed)).collect();
        {
            let mut guest = lock(&self.guest);
            let guest_ring = &mut guest.rings[ring];
            let count = u.int_in_range(0..=3)?;
            for id in 0..count {
                let request = GuestRequest::without_data(u, id)?;
                guest_ring.put(&request.encode(self.rules.abi, 0));
            }
            let entries = guest_ring.entries;
            let ahead = match u.int_in_range(0..=3)? {
                0 => u32::MAX,
                1 => entries + 1,
                2 => u.int_in_range(entries + 1..=u32::MAX)?,
                _ => u.int_in_range(entries + 1..=2 * entries + 1)?,
            };
            let index = guest_ring.rsp_cons.wrapping_add(ahead);
            guest_ring.publish_index(index);
        }
        self.backends[ring].port.channel.notify();
        self.run_idle();
        let reason = "the request producer index is further ahead than the ring is long";
        assert_eq!(self.backends[ring].reasons(), [reason], "why the ring is broken");
        // It stays broken.
        if u.arbitrary()? {
            let mut guest = lock(&self.guest);
            let index = guest.rings[ring].rsp_cons.wrapping_add(1);
            guest.rings[ring].publish_index(index);
        }
        self.backends[ring].port.channel.notify();
        self.run_idle();
        for (backend, before) in self.backends.iter().zip(before) {
            assert_eq!(backend.sent.load(Ordering::Relaxed), before, "events of a broken ring");
        }
        let guest = lock(&self.guest);
        guest.memory.check();
        guest.rings.iter().for_each(GuestRing::check);
        Ok(())
    }

    fn run_idle(&mut self) {
        for _ in 0..8 {
            if !self.worker.turn() && self.setup.sleeps {
                self.worker.arm();
            }
        }
    }
}

/// Returns a batch: requests with data, each in its own part, and sometimes a ring full of others.
fn choose_batch(u: &mut Unstructured<'_>, rules: &DeviceRules, guest: &SharedGuest) -> Result<Vec<GuestRequest>> {
    let guest = lock(guest);
    let count = u.int_in_range(1..=BATCH)?;
    let mut requests = vec![];
    for part in 0..count {
        let id = u.arbitrary::<u64>()? & !0x3ff | part as u64;
        requests.push(GuestRequest::any(u, rules, &guest.memory, part, id)?);
    }
    if u.ratio(1, 10)? {
        let fewest = guest.rings.iter().map(|ring| ring.entries).min().expect("a ring");
        let others = u.int_in_range(0..=fewest as usize - count)?;
        for number in 0..others {
            requests.push(GuestRequest::without_data(u, (count + number) as u64)?);
        }
    }
    Ok(requests)
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut machine = BlkifMachine::new(u)?;
    for _ in 0..24 {
        if u.is_empty() {
            break;
        }
        match u.int_in_range(0..=15)? {
            0 | 1 => machine.restart(),
            2 => {
                machine.rules.size = *u.choose(&[SECTORS, PART, PART + 8])?;
                machine.vbd.set_size(ByteLen(machine.rules.size * SECTOR as u64));
            }
            _ => {}
        }
        let requests = choose_batch(u, &machine.rules, &machine.guest)?;
        machine.batch(u, requests)?;
    }
    machine.rules.size = SECTORS;
    machine.vbd.set_size(ByteLen(SECTORS * SECTOR as u64));
    for piece in 0..PART / 88 {
        let guest = Arc::clone(&machine.guest);
        let read = |part| GuestRequest::read_piece(&lock(&guest).memory, part, piece);
        let requests: Vec<_> = (0..BATCH).map(read).collect();
        machine.batch(u, requests)?;
    }
    machine.break_ring(u)?;
    machine.end();
    Ok(())
}

const _: () = assert!(PART.is_multiple_of(88), "the disk is read in pieces of a ring entry");

/// Runs the target.
///
/// # Panics
/// When the device violates the protocol.
pub fn target(data: &[u8]) {
    // Input that ends early ends the run.
    let _ = run(&mut Unstructured::new(data));
}
