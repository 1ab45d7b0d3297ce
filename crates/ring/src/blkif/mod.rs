//! The ring of Xen's block interface. Source: Xen's `public/io/ring.h` and `public/io/blkif.h`.

mod abi;
pub mod back;
pub mod front;
pub mod layout;
pub mod request;

pub use abi::Abi;
pub use back::{BackRing, BlkifRingError, RingPosition};
pub use front::{BackendError, BlkifResponse, FrontRing};
pub use layout::{BlkifRing, BlkifSetupError};
pub use request::{BlkifRequest, IndirectRequest, RawRequest, RequestBody, RwRequest, Segment, operation, status};
