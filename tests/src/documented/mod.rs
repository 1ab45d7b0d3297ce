//! The commands that documents and help texts print, run as they are printed.
//!
//! [`markdown`] finds the code blocks of a page and [`help`] the examples of a help text; [`Script`] says what of a block is a server. A
//! [`Sandbox`] is a machine of a page's own, as far as its commands can tell: folders such as /tmp, /run and /srv, the network and the
//! processes are private. A [`Session`] runs blocks there as a reader does: a block that ends with a server stays in its terminal until
//! Ctrl-C, and what comes after it is typed in another one.
//!
//! All blocks of language `sh` are run but those of [`plan::NOT_RUN`]. Those of sections that start QEMU are run by
//! `tests/tests/guest/documented.rs`, with a real guest; all others by `tests/tests/documented.rs`. [`links`] looks whether the paths and
//! links of documents lead to something.

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

/// The repository that this was built from.
#[must_use]
pub fn repository() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).to_path_buf()
}
