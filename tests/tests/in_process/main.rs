//! The project's driver, connected over a socket to a daemon's components in this process.

mod counts;
mod deactivation;
mod limits;
mod merge;
mod panics;
mod power_cut;
mod ring_sizes;
mod wakeup_soak;
