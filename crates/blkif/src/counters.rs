//! Counters of a ring's grants and events.

pub use mqblk_core::counters::GrantCounters;
