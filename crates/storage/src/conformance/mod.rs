//! The conformance suite that every storage backend runs from its own tests.
//!
//! It drives channels as a worker does (submit, one turn of the ring, reap, with every wait bounded) and checks that
//! valid requests succeed with the data of a model, that invalid ones complete with the right outcome, that every
//! buffer is returned once, and that a closed channel leaves nothing in flight.
//!
//! ```no_run
//! use mqblk_storage::conformance::{TestTarget, run};
//! run(&TestTarget { kind: "ram", settings: &[("size", "8M")], keeps_data: true, seed: 1 });
//! ```

pub mod cancel;
mod random;
mod refusals;
mod resize;
mod target;
mod volume;
mod worker;

use std::sync::Arc;

use mqblk_core::Disk;
use mqblk_core::settings::Settings;
use mqblk_uring::UringContext;

pub use target::TestTarget;
pub use worker::{TestRequest, TestResult, TestWorker};

/// Runs the whole suite.
///
/// # Panics
/// At the first failed check, with the target and its seed.
pub fn run(trial: &TestTarget<'_>) {
    let disk = trial.must_open(&[]);
    check_description(disk.as_ref());
    refusals::of_writable(trial, &disk);
    random::one_worker(trial, &disk);
    random::two_workers(trial, &disk);
    volume::a_batch_larger_than_the_ring(trial, &disk);
    volume::many_segments(trial, &disk);
    volume::large_ranges(trial, &disk);
    volume::closed_and_opened_again(trial, &disk);
    cancel::some_of_many(trial, &disk);
    cancel::unknown_tags(trial, &disk);
    resize::of_writable(trial, &disk);
    check_resolved_settings(trial, disk);
    let disk = trial.must_open(&[("readonly", "on")]);
    check_description(disk.as_ref());
    refusals::of_read_only(trial, &disk);
    resize::of_read_only(trial, &disk);
}

/// A disk's geometry and limits must be consistent.
fn check_description(disk: &dyn Disk<UringContext>) {
    let (geometry, limits) = (disk.geometry(), disk.limits());
    assert!(geometry.size.0 > 0 && geometry.size.is_aligned(geometry.logical_block), "{geometry:?}");
    assert!(geometry.physical_block >= geometry.logical_block, "{geometry:?}");
    assert!(limits.max_segments >= 1 && limits.max_transfer.0 >= 1 << 20, "{limits:?}");
    assert!(limits.max_transfer.is_aligned(geometry.logical_block), "{limits:?}");
    if let Some(discard) = limits.discard {
        assert!(!geometry.read_only && discard.max_len.0 >= discard.granularity.0.max(1), "{limits:?}");
    }
    if let Some(zeroes) = limits.write_zeroes {
        assert!(!geometry.read_only && zeroes.is_aligned(geometry.logical_block), "{limits:?}");
    }
}

/// The settings that `--print-config` prints must open the same disk.
fn check_resolved_settings(trial: &TestTarget<'_>, disk: Arc<dyn Disk<UringContext>>) {
    let (geometry, limits, resolved) = (disk.geometry(), disk.limits(), disk.resolved());
    drop(disk); // and with it its lock
    let mut settings = Settings::new("disk \"resolved\"");
    for (key, value) in &resolved {
        settings.insert(key, value).expect("every key once");
    }
    let again = crate::open(trial.kind, &mut settings).expect("resolved settings are settings");
    settings.finish().expect("the backend knows all that it resolved");
    assert_eq!((again.geometry(), again.limits(), again.resolved()), (geometry, limits, resolved), "{trial:?}");
}
