//! Invalid or changing xenstore keys of a frontend.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, ensure};
use mqblk_ring::blkif::Abi;
use mqblk_xen::vbd::XenbusState;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::rings::{check_all_rings, frontend_keys};
use crate::loopback::fixture::{DEFAULT_DISK, LoopbackFixture};
use crate::loopback::frontend::{FrontendConfig, LoopbackFrontend};

/// Keys (`None`: removed), and the name that the error must contain.
type InvalidKeys = (&'static [(&'static str, Option<&'static str>)], &'static str);

/// For a frontend with two rings of one page, whose other keys are valid.
const TWO_RINGS: &[InvalidKeys] = &[
    (&[("protocol", Some(""))], "protocol"),
    (&[("protocol", Some("x86_64"))], "protocol"),
    (&[("protocol", Some("x86_64-abi "))], "protocol"),
    (&[("protocol", Some("X86_64-ABI"))], "protocol"),
    (&[("protocol", Some("powerpc64-abi"))], "protocol"),
    (&[("multi-queue-num-queues", Some("0"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("5"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("65537"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("4294967298"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("18446744073709551618"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("-1"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("0x2"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("two"))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some(""))], "multi-queue-num-queues"),
    (&[("multi-queue-num-queues", Some("3"))], "queue-2/"),
    // A single ring has its keys at the top level, where there are none.
    (&[("multi-queue-num-queues", None)], "ring-ref"),
    (&[("multi-queue-num-queues", Some("1"))], "ring-ref"),
    (&[("ring-page-order", Some("3"))], "ring-page-order"),
    (&[("ring-page-order", Some("32"))], "ring-page-order"),
    (&[("ring-page-order", Some("4294967296"))], "ring-page-order"),
    (&[("ring-page-order", Some("-1"))], "ring-page-order"),
    (&[("ring-page-order", Some("1"))], "queue-0/ring-ref0"),
    (&[("ring-page-order", Some("one"))], "ring-page-order"),
    (&[("num-ring-pages", Some("3"))], "num-ring-pages"),
    (&[("num-ring-pages", Some("0"))], "num-ring-pages"),
    (&[("num-ring-pages", Some("8"))], "num-ring-pages"),
    (&[("queue-0/ring-ref", None)], "queue-0/ring-ref"),
    (&[("queue-1/ring-ref", Some(""))], "queue-1/ring-ref"),
    (&[("queue-1/ring-ref", Some("-8"))], "queue-1/ring-ref"),
    (&[("queue-1/ring-ref", Some("4294967296"))], "queue-1/ring-ref"),
    (&[("queue-1/ring-ref", Some("8 9"))], "queue-1/ring-ref"),
    (&[("queue-0/event-channel", None)], "queue-0/event-channel"),
    (&[("queue-1/event-channel", Some("nine"))], "queue-1/event-channel"),
    (&[("queue-1/event-channel", Some("99999999999999999999"))], "queue-1/event-channel"),
    (&[("queue-0", Some("here")), ("queue-0/ring-ref", None)], "queue-0/ring-ref"),
];

/// Unusual keys without effect.
const HARMLESS: &[&[(&str, Option<&str>)]] = &[
    &[("feature-large-sector-size", Some("1"))],
    &[("feature-persistent", Some("maybe"))],
    &[("feature-persistent", None)],
    &[("feature-persistent", Some("99999999999999999999999"))],
    &[("num-ring-pages", Some("1")), ("queue-0", Some("here"))],
    &[("ring-ref", Some("no")), ("event-channel", Some("no"))],
    &[("queue-7/ring-ref", Some("12")), ("queue-2/event-channel", Some("-"))],
    &[("a/b/c/d/e/f", Some("g")), ("sectors", Some("1"))],
];

const CONFIG: FrontendConfig = FrontendConfig { abi: Abi::X86_64, persistent: true, rings: 2, ring_page_order: 0 };

/// Returns the keys of `guest` with some changes.
fn with_changes(guest: &LoopbackFrontend, changes: &[(&str, Option<&str>)]) -> Vec<(String, String)> {
    let mut all = frontend_keys(guest, CONFIG.abi);
    for (key, value) in changes {
        all.retain(|(name, _)| name != key);
        all.extend(value.map(|value| ((*key).to_owned(), value.to_owned())));
    }
    all
}

pub(super) fn malformed_keys(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.create(DEFAULT_DISK)?;
    let mut other = fixture.attach(super::super::fixture::BLOCKS_4K, FrontendConfig::default())?;
    let data = guest.pages(2)?;
    let long = "9".repeat(2000);
    let more: &[(&str, Option<&str>)] = &[("multi-queue-num-queues", Some(&long))];
    let all =
        fixture.sample(TWO_RINGS).map(|(changes, words)| (*changes, *words)).chain([(more, "multi-queue-num-queues")]);
    for (changes, words) in all {
        guest.make_rings(CONFIG)?;
        let keys = with_changes(&guest, changes);
        ensure!(guest.front.connect(&keys).is_err(), "{changes:?} was taken");
        guest.must_fail(words).with_context(|| format!("{changes:?}"))?;
        let error = guest.backend_error()?.unwrap_or_default();
        ensure!(error.len() < 300, "the error is as long as the guest likes: {} bytes", error.len());
        check_all_rings(&mut other, &data).with_context(|| format!("another device, after {changes:?}"))?;
        guest.close()?;
        guest.front.initialise()?;
        remove_all(&mut guest, changes)?;
    }
    for changes in HARMLESS {
        guest.make_rings(CONFIG)?;
        let keys = with_changes(&guest, changes);
        guest.front.connect(&keys).with_context(|| format!("{changes:?}"))?;
        check_all_rings(&mut guest, &data).with_context(|| format!("{changes:?}"))?;
        guest.close()?;
        guest.front.initialise()?;
        remove_all(&mut guest, changes)?;
    }
    fixture.check_neighbour()?;
    guest.detach()?;
    other.detach()
}

fn remove_all(guest: &mut LoopbackFrontend, changes: &[(&str, Option<&str>)]) -> Result<()> {
    for (key, value) in changes {
        if value.is_some() {
            // With the directory that the frontend may have created.
            guest.front.remove(key.split('/').next().unwrap_or(key))?;
        }
    }
    Ok(())
}

/// Starts a thread that continuously overwrites keys of a frontend with valid and invalid values.
fn rewriter(guest: &LoopbackFrontend, stop: &Arc<AtomicBool>) -> Result<std::thread::JoinHandle<Result<u32>>> {
    let (mut store, stop, path) = (guest.xen().store()?, Arc::clone(stop), guest.vbd.frontend_path());
    let own: Vec<(String, String)> = frontend_keys(guest, CONFIG.abi);
    Ok(std::thread::spawn(move || {
        let mut random = SmallRng::seed_from_u64(1);
        let mut writes = 0;
        while !stop.load(Ordering::Relaxed) {
            let (key, value) = &own[random.random_range(0..own.len())];
            let value = match random.random_range(0..4) {
                0 => String::new(),
                1 => random.random_range(0..5000).to_string(),
                _ => value.clone(),
            };
            store.write(&format!("{path}/{key}"), &value)?;
            writes += 1;
        }
        Ok(writes)
    }))
}

pub(super) fn keys_rewritten(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.create(DEFAULT_DISK)?;
    let data = guest.pages(2)?;
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..fixture.repetitions(30) {
        let right = guest.make_rings(CONFIG)?;
        let stop = Arc::new(AtomicBool::new(false));
        let writer = rewriter(&guest, &stop)?;
        let state = guest.write_keys(&right);
        stop.store(true, Ordering::Relaxed);
        ensure!(writer.join().map_err(|_| anyhow!("the writer panicked"))?? > 0, "nothing was rewritten");
        match state? {
            // With the keys of one moment.
            XenbusState::Connected => taken += 1,
            _ => {
                refused += 1;
                ensure!(guest.backend_error()?.is_some(), "it does not say why");
            }
        }
        fixture.check_neighbour()?;
        guest.close()?;
        guest.front.initialise()?;
    }
    ensure!(taken + refused > 0, "nothing was tried");
    guest.connect(CONFIG)?;
    check_all_rings(&mut guest, &data)?;
    guest.detach()
}

pub(super) fn keys_rewritten_while_connected(fixture: &mut LoopbackFixture) -> Result<()> {
    let mut guest = fixture.attach(DEFAULT_DISK, CONFIG)?;
    let data = guest.pages(2)?;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = rewriter(&guest, &stop)?;
    // A connected device stays connected, regardless of the keys and of the connected state that is written.
    let mut worked = Ok(());
    for turn in 0..fixture.repetitions(60) {
        let state = if turn % 2 == 0 { XenbusState::Initialised } else { XenbusState::Connected };
        guest.front.set_state(state)?;
        worked = worked.and_then(|()| check_all_rings(&mut guest, &data));
    }
    stop.store(true, Ordering::Relaxed);
    ensure!(writer.join().map_err(|_| anyhow!("the writer panicked"))?? > 0, "nothing was rewritten");
    worked?;
    ensure!(guest.backend_state()? == XenbusState::Connected, "the backend is in state {}", guest.backend_state()?);
    fixture.check_neighbour()?;
    guest.close()?;
    guest.reconnect(CONFIG)?;
    check_all_rings(&mut guest, &data)?;
    guest.detach()
}
