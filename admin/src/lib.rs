//! The admin socket of the daemon: JSON-RPC 2.0, one message a line, over a Unix stream socket.
//!
//! ```text
//! server: a thread a client -> lines (bounded, with deadlines) -> protocol (one line in, one answer out) -> verbs (registry)
//! client: Client -> lines
//! both:   model, what `stat` answers; its documentation for programs is docs/admin.md
//! ```
//!
//! The crate knows neither engine nor disks: who starts the server gives it the verbs.
#![forbid(unsafe_code)]

mod client;
mod lines;
pub mod model;
mod params;
mod protocol;
mod server;
mod verbs;

pub use client::{Client, ClientError, StatQuery};
pub use params::{Param, ParamKind, Params, found};
pub use protocol::ErrorObject;
pub use server::{Server, ServerOptions};
pub use verbs::{Verb, VerbError, Verbs};
