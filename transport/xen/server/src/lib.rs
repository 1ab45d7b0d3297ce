//! Xen block back-end: finds devices in xenstore, connects their rings to the engine's workers and disconnects them.
//!
//! `backend` is the thread that watches; `life` decides what is done about a device, `device` does it on a thread of the device's own;
//! `frontend` judges what a frontend has published, `offer` is what is written for it, `connection` makes rings of it, which
//! `journals` outlive the process for; `resize` is for a disk that grows; `storage` is where disks come from (`opened` one that is there), `figures` what can be asked of a device; `toolstack` makes
//! and removes devices.
#![forbid(unsafe_code)]

mod backend;
mod connection;
mod device;
mod figures;
mod frontend;
mod journals;
mod life;
mod look;
mod name;
mod offer;
mod opened;
mod pace;
mod params;
mod registry;
mod resize;
mod storage;
pub mod toolstack;

pub use backend::{Backend, BackendError, BackendOptions};
pub use figures::Figures;
pub use frontend::Bounds;
pub use name::DeviceName;
pub use pace::Pace;
pub use params::Params;
pub use storage::{Backing, Opener, VbdSettings};
