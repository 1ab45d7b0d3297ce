//! Xen guests without a hypervisor: a simulated machine, the `mqblk` binary as its backend, and verifying clients.

mod host;
mod load;

pub use host::{SimulatedHost, SimulatedHostResources};
pub use load::{BlkfrontLoad, start_neighbour};
