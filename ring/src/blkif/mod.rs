//! The ring of Xen's block interface. Source: Xen's `public/io/ring.h` and `public/io/blkif.h`.

pub mod back;
pub mod front;
pub mod layout;
pub mod request;

pub use back::{BackRing, Broken, Position};
pub use front::{BackBroken, FrontRing, Response};
pub use layout::{Abi, BlkifRing, SetupError};
pub use request::{Indirect, RawRequest, Request, Segment, Transfer, What, operation, status};
