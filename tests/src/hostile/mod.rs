//! Hostile and awkward clients of a real daemon.
//!
//! `case` is one ring with what must come of it, `conversation` the same for what is said on a socket, `daemon` is the `mqblk` binary as a child, `socket` says anything on a vhost-user socket, `memory` and `ring` are a guest's
//! memory and a split ring of which every byte is under control, `front_end` sets queues up from these, `request` builds
//! virtio-blk requests, `load` is a well-behaved client that verifies all that it reads, `pusher`
//! does the same on a raw queue.

pub mod case;
pub mod conversation;
pub mod daemon;
pub mod event;
pub mod front_end;
pub mod load;
pub mod memory;
pub mod pusher;
pub mod request;
pub mod ring;
pub mod socket;
pub mod table;

use std::time::{Duration, Instant};

/// No wait in these tests is longer: what takes this long does not come.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How long a thing is watched that must not happen.
pub const WATCH: Duration = Duration::from_millis(30);

/// Looks again and again until `found` gives something.
///
/// # Panics
/// When it does not within [`PATIENCE`]; `what` is named.
pub fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    let mut pause = Duration::from_micros(20);
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
}
