//! The broker: a process that opens images for a daemon in the sandbox, and passes their descriptors.
//!
//! It is started with the daemon, before that has served anybody, and keeps the rights that the daemon gives up. While the daemon reads its
//! configuration, the broker opens what that names, and is told the folders of `sandbox-allow`: these are its rules. Then it is sealed: from
//! then on it can only open images by these rules, and is restricted itself to the few system calls and files that this takes. Whoever takes
//! over the daemon can ask for images that the operator has allowed, and for nothing else.
//!
//! `wire` has the messages, `rules` decides and opens (the only part that handles what the daemon sends), `walk` finds files beneath a folder, `server` is the broker's process
//! and `client` the daemon's end.

mod client;
mod restrict;
mod rules;
mod server;
mod walk;
mod wire;

pub use client::{AllowedImages, Broker, BrokerStartError, SUBCOMMAND};
pub use server::{BrokerError, run};

#[cfg(test)]
mod tests;
