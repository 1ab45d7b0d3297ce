//! A Xen without a hypervisor: a [`Machine`] in a folder, and programs that [connect](connect) to it, in the same process or in
//! others, each of which says which domain it runs in.
//!
//! * xenstore speaks its real wire protocol on `xenstored.sock` (domain 0) and `xenstored-N.sock` (domain N), with real permissions,
//!   transactions, watches and quotas.
//! * Grants: each domain has memory and a grant table, both files in memory. Copies are made by whoever wants them, without the
//!   machine; mappings are asked of it, and taken back when the program's connection ends.
//! * Event channels: eventfds and two bits for each direction; ends that die become vacant and are bound anew.
//!
//! What it stands in for is the interface, with its checks and failures, so that both ends of a block device can be tested and
//! measured without Xen. It is no wall: a program that is connected could read any domain's memory if it tried.

mod channels;
mod client;
mod counters;
mod events;
mod grants;
mod hypervisor;
mod machine;
mod runs;
mod table;
mod tenant;
#[cfg(test)]
mod tests;
mod wire;
mod xenstored;

use client::ask;
pub use client::connect;
pub use counters::{Counters, Sizes};
pub use machine::{DomainCounters, Machine};
pub use xenstored::Quota;
