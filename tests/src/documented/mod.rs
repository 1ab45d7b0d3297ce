//! Runs the commands of documents and help texts as printed.
//!
//! [`markdown`] finds the code blocks of a page and [`help`] the examples of a help text; [`Script`] finds the server
//! in a block. A [`Sandbox`] is a private machine of a page, as far as its commands can see: folders such as /tmp, /run
//! and /srv, the network and the processes are private. A [`Session`] runs blocks there as a reader does: a block that
//! ends with a server stays in its terminal until Ctrl-C, and the next blocks are typed in another one.
//!
//! All blocks of language `sh` are run except those of [`plan::NOT_RUN`]. `tests/tests/guest/documented.rs` runs the
//! sections that start QEMU, with a real guest; `tests/tests/documented.rs` runs all others. [`links`] checks the paths
//! and links of documents.

pub mod help;
pub mod links;
pub mod markdown;
pub mod plan;
mod sandbox;
mod script;
mod session;
mod terminal;
mod visitor;
mod xen_guests;

use std::path::{Path, PathBuf};

pub use sandbox::{Guests, Sandbox};
pub use script::{Kind, Script};
pub use session::Session;
pub use visitor::Visitor;

/// Returns the repository that this was built from.
#[must_use]
pub fn repository() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_path_buf()
}
