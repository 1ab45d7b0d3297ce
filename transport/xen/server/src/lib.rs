//! Xen block backend: finds devices in xenstore, connects their rings to the engine's workers and disconnects them.
//!
//! `backend` is the thread that watches xenstore; `state_machine` decides a device's next transition, which `device` executes on a thread
//! per device. `frontend` parses a frontend's keys, `offer` formats the backend's; `connection` opens rings, whose journal files are in
//! `journal_dir`. `storage` is the interface to the program that opens disks, `open_disk` an open one, `resize` changes its size;
//! `device_stats` provides statistics. `toolstack` creates and removes devices.
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
