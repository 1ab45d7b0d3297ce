//! A connection to xenstore. Source: Xen's `public/io/xs_wire.h` and `docs/misc/xenstore.txt`.

/// A connection.
#[derive(Debug)]
pub struct Store {}
