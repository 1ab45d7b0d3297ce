//! A block device's two ends on one machine: a frontend of which every byte is under control, and the daemon's process. The same
//! scenarios run over a simulated Xen, and in the first domain of a real one.
//!
//! `rig` is the machine with the daemon and a good disk beside the bad ones; `daemon` is the process, and what it holds; `guest` is
//! the hostile frontend, `pages` the memory that it grants, `request` what it asks for; `neighbour` is the good disk's client.
//! [`scenarios::ALL`] is what is done, and what must come of it.

pub mod daemon;
pub mod guest;
pub mod neighbour;
pub mod pages;
pub mod request;
pub mod rig;
pub mod scenarios;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// No wait is longer: what takes this long does not come. An emulated machine is slow.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// How long a thing is watched that must not happen.
pub const WATCH: Duration = Duration::from_millis(60);

/// Looks again and again until `found` gives something.
///
/// # Errors
/// What `found` fails with, and when it gives nothing within [`PATIENCE`].
pub fn wait_for<T>(what: &str, mut found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let until = Instant::now() + PATIENCE;
    let mut pause = Duration::from_micros(50);
    loop {
        if let Some(found) = found()? {
            return Ok(found);
        }
        ensure!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}
