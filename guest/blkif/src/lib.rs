//! The Xen blkif personality: what a request of a ring means. Knows neither xenstore nor where grants and events come from.
//! Source: Xen's `public/io/blkif.h`.
#![forbid(unsafe_code)]

pub mod barrier;
pub mod journal;
