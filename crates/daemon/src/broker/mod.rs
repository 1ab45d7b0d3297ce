//! The broker: a process that opens images for a daemon in the sandbox, and passes their descriptors.
//!
//! The broker starts with the daemon, before that has served any guest, and keeps the rights that the daemon gives up.
//! While the daemon reads its configuration, the broker opens the images that this names and receives the folders of
//! `sandbox-allow`: these are its rules. Then it is sealed: it opens images by these rules only, and is itself
//! restricted to the few system calls and files that this takes. An attacker who takes over the daemon can have images
//! opened that the operator has allowed, and nothing else.
//!
//! `wire` has the messages. `rules` decides and opens: the only part that handles data of the daemon. `walk` finds
//! files beneath a folder. `server` is the broker's process, `client` the daemon's end.

mod client;
mod error;
mod restrict;
mod rules;
mod server;
mod walk;
mod wire;

pub use client::{AllowedImages, Broker, BrokerStartError, SUBCOMMAND};
pub use error::BrokerError;
pub use server::run;

#[cfg(test)]
mod tests;
