//! vhost-user back-end: binds a virtio device's queues to the engine's workers. Source: QEMU's `vhost-user.rst`.
//!
//! `listen` makes the socket, `server` is the control thread of one device (one VMM at a time; it listens again when that
//! leaves), `session` answers the messages of one connection, `vring` is one queue's way from configured to served,
//! `disks` are the device's disks, which may come and go, `active` is whether they are in use, `log` is the
//! dirty log of a live migration.
//!
//! The messages themselves are the `vhost` crate's. One control thread per device: a VMM that sends half a message and goes
//! silent holds up nobody but itself.
#![forbid(unsafe_code)]

mod active;
mod disks;
mod listen;
mod log;
mod memory;
mod server;
mod session;
mod vring;

pub use listen::{ListenSocket, SocketError, probe};
pub use server::{Server, ServerOptions};
