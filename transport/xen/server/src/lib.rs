//! Xen block backend: finds devices in xenstore, connects their rings to the engine's workers and disconnects them.
//!
//! `backend` is the thread that watches xenstore (`stepped`: the same without the thread, for simulations); `state_machine` decides a device's next transition, which `device` executes on a thread
//! per device; `tasks` starts and ends these, `leaving`: devices go to another process. `frontend` parses a frontend's keys, `offer` formats the backend's; `connection` opens rings, whose journal files are in
//! `journal_dir`; `device_lock` says which process acts on a device. `storage` is the interface to the program that opens disks, `open_disk` an open one, `resize` changes its size;
//! `device_stats` provides statistics. `toolstack` creates and removes devices.
#![forbid(unsafe_code)]

mod backend;
mod connection;
mod device;
mod device_lock;
mod device_stats;
mod frontend;
mod journal_dir;
mod leaving;
mod name;
mod observe;
mod offer;
mod open_disk;
mod params;
mod registry;
mod resize;
mod state_machine;
mod stepped;
mod storage;
mod tasks;
pub mod toolstack;

pub use backend::{Backend, BackendError, BackendOptions, DEVICE_CHECKS};
pub use device_stats::DeviceStats;
pub use frontend::RingLimits;
pub use name::DeviceName;
pub use params::Params;
pub use stepped::SteppedBackend;
pub use storage::{DiskBacking, Opener, VbdSettings};
