//! The admin socket of the daemon: JSON-RPC 2.0, one message a line, over a Unix stream socket.
//!
//! ```text
//! server: a thread per client -> lines (bounded, with deadlines) -> protocol (one line in, one response out) -> verbs (registry)
//! client: Client -> lines
//! both:   model, the results of the verbs; documented for programs in docs/admin.md
//! ```
//!
//! The crate knows neither engine nor disks: the server is started with its verbs.
#![forbid(unsafe_code)]

mod client;
mod clients;
mod default_socket;
mod lines;
mod live_model;
pub mod model;
mod params;
mod protocol;
mod server;
mod verb_error;
mod verbs;

pub use client::{Client, ClientError, StatQuery};
pub use default_socket::{SOCKET_VARIABLE, default_socket, names_a_socket};
pub use params::{Param, ParamKind, Params, found};
pub use protocol::{ErrorObject, respond};
pub use server::{Server, ServerOptions};
pub use verb_error::VerbError;
pub use verbs::{Caller, Verb, Verbs};
