//! The metrics endpoint of the daemon: the result of `stat`, in the text formats of Prometheus and others, over HTTP.
//!
//! ```text
//! server: one thread for all clients -> connection (bounded, with deadlines) -> request (httparse, accept)
//! exposition: Stat -> families (tables) -> text (prometheus-client)
//! ```
//!
//! The crate knows neither engine nor disks: the server is started with a function that takes a sample.
#![forbid(unsafe_code)]

mod accept;
mod connection;
mod exposition;
mod limits;
mod listener;
mod request;
mod server;

pub use accept::TextFormat;
pub use exposition::{ProcessSample, encode};
pub use limits::ServerLimits;
pub use listener::MetricsListener;
pub use request::Detail;
pub use server::{Sample, Server};
