//! Frontends that change their state arbitrarily.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, ensure};
use mqblk_memory::GrantRef;
use mqblk_ring::blkif::{Abi, RawRequest, operation};
use mqblk_xen::vbd::XenbusState;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::rings::check_all_rings;
use crate::loopback::fixture::{DEFAULT_DISK, LoopbackFixture};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend, RING_HEADER_BYTES};
use crate::loopback::request::{transfer, whole_page};
use crate::loopback::wait_for;

const FLIPS: u32 = 1000;
const CONFIG: FrontendConfig = FrontendConfig { abi: Abi::X86_64, persistent: true, rings: 2, ring_page_order: 0 };

/// Writes states as fast as possible, some of them invalid.
fn write_states(guest: &mut LoopbackFrontend, count: u32, seed: u64) -> Result<()> {
    let mut random = SmallRng::seed_from_u64(seed);
    for _ in 0..count {
        let value = match random.random_range(0..40) {
            38 => "".to_owned(),
            39 => "-1".to_owned(),
            // States of a connection are more likely.
            30..38 => random.random_range(0..12).to_string(),
            other => [1, 3, 4, 5, 6][other % 5].to_string(),
        };
        guest.front.write("state", &value)?;
    }
    Ok(())
}

/// Closes from any state, and waits for the backend's Closed.
///
/// The first Closed may answer an earlier flip, while the daemon still acts on a state that it read before. One more
/// cycle proves that the daemon has read the last state: InitWait and then Closed again.
fn close_and_wait(guest: &mut LoopbackFrontend) -> Result<()> {
    for (front, back) in [
        (XenbusState::Closed, XenbusState::Closed),
        (XenbusState::Initialising, XenbusState::InitWait),
        (XenbusState::Closed, XenbusState::Closed),
    ] {
        guest.front.set_state(front)?;
        wait_for("the backend follows the frontend's state", || Ok((guest.backend_state()? == back).then_some(())))?;
    }
    Ok(())
}

pub(super) fn states_flipped(fixture: &mut LoopbackFixture) -> Result<()> {
    for seed in 0..fixture.repetitions(90).div_ceil(30).into() {
        let mut guest = fixture.create(DEFAULT_DISK)?;
        let data = guest.pages(2)?;
        // The keys are valid, so that state 3 or 4 connects.
        guest.connect(CONFIG)?;
        write_states(&mut guest, FLIPS, seed)?;
        fixture.check_neighbour()?;
        close_and_wait(&mut guest).with_context(|| format!("seed {seed}"))?;
        guest.rings.clear();
        guest.reconnect(CONFIG).context("after the flips")?;
        check_all_rings(&mut guest, &data).context("after the flips")?;
        guest.detach()?;
    }
    Ok(())
}

pub(super) fn states_flipped_under_load(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.attach(DEFAULT_DISK, CONFIG)?;
    let data = guest.pages(8)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut rings = std::mem::take(&mut guest.rings);
    let grefs: Vec<GrantRef> = (0..8).map(|page| data.gref(page)).collect();
    let stop2 = Arc::clone(&stop);
    // Requests are sent all the time, in any state.
    let load = std::thread::spawn(move || {
        let segments: Vec<_> = grefs.iter().map(|gref| whole_page(*gref)).collect();
        let raw = RawRequest::encode(CONFIG.abi, &transfer(operation::READ, 0, &segments));
        let mut produced = 0_u32;
        while !stop2.load(Ordering::Relaxed) {
            for ring in &mut rings {
                for slot in 0..32 {
                    ring.raw.overwrite(RING_HEADER_BYTES + slot * 112, &raw.bytes()[..112]);
                }
                // As many as fit, if there are responses.
                let answered = ring.read_field(8);
                produced = answered.wrapping_add(16);
                ring.raw.front.publish_index(produced);
                ring.raw.notify();
            }
        }
        (rings, produced)
    });
    let flipped = write_states(&mut guest, FLIPS, 77);
    let settled = flipped.and_then(|()| close_and_wait(&mut guest));
    stop.store(true, Ordering::Relaxed);
    let (rings, produced) = load.join().map_err(|_| anyhow!("the load panicked"))?;
    settled?;
    ensure!(produced > 0, "no request was sent");
    fixture.check_neighbour()?;
    drop(rings);
    guest.reconnect(CONFIG).context("after the flips")?;
    check_all_rings(&mut guest, &data).context("after the flips")?;
    guest.detach()
}

pub(super) fn restarted_frontend(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.attach(DEFAULT_DISK, CONFIG)?;
    let data = guest.pages(2)?;
    for turn in 0..fixture.repetitions(30) {
        let config = FrontendConfig { rings: 1 + turn % 4, ring_page_order: (turn % 3) as u8, ..CONFIG };
        guest.rings[0].send(&transfer(operation::READ, 0, &[whole_page(data.gref(1))]))?;
        // The guest's kernel was replaced: it starts in Initialising, without closing the old connection.
        guest.front.set_state(XenbusState::Initialising)?;
        let waits = || Ok((guest.backend_state()? == XenbusState::InitWait).then_some(()));
        wait_for("the backend waits again", waits)?;
        guest.connect(config).with_context(|| format!("turn {turn}"))?;
        check_all_rings(&mut guest, &data).with_context(|| format!("turn {turn}"))?;
    }
    fixture.check_neighbour()?;
    guest.detach()
}
