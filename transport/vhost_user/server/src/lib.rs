//! vhost-user back-end: binds a virtio device's queues to the engine's workers. Source: QEMU's `vhost-user.rst`.
//!
//! `listen` makes the socket, `server` starts and stops a device, `control` is its thread (one VMM at a time; it listens again when
//! that leaves), `gate` says when queues may start, `session` answers the messages of one connection, `vring` is one queue's way
//! from configured to served, `inflight` is where its requests in flight outlive this process, `disks` are the device's disks, which
//! may come and go, `active` is whether they are in use, `log` is the dirty log of a live migration, `device_state` is what travels with a guest
//! in one, `requests` are messages of our own to the VMM.
//!
//! The messages themselves are the `vhost` crate's. One control thread per device: a VMM that sends half a message and goes
//! silent holds up nobody but itself.
#![forbid(unsafe_code)]

mod active;
mod control;
mod device_state;
mod disks;
mod gate;
mod inflight;
mod listen;
mod log;
mod memory;
mod requests;
mod server;
mod session;
mod sharing;
mod vring;

pub use device_state::{HostChange, HostState};
pub use listen::{ListenSocket, SocketError, probe};
pub use requests::ConfigNotice;
pub use server::{Server, ServerOptions};
