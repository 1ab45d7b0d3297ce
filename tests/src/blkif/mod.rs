//! Xen guests without a hypervisor: a simulated machine, the `mqblk` binary as its back-end, and clients that verify what they read.

mod host;
mod load;

pub use host::{Holds, Host};
pub use load::{Load, Neighbour};
