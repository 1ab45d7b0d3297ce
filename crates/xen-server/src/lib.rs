//! Xen block backend: finds devices in xenstore, connects their rings to the engine's workers and disconnects them.
//!
//! | module | contents |
//! |---|---|
//! | `backend`, `stepped` | the thread that watches xenstore; a backend without it, for simulations |
//! | `state_machine`, `observe` | decides a device's next transition, from what `observe` reads |
//! | `device`, `tasks` | executes it, on a thread for each device; starts and ends these |
//! | `leaving`, `leave_state` | devices go to another process |
//! | `frontend`, `offer`, `params` | the keys of a frontend; those of the backend |
//! | `connection`, `journal_dir` | opens rings; their journal files |
//! | `ownership`, `device_lock` | the lock by which this process acts on a device |
//! | `succession` | the next device of a disk waits for one that leaves |
//! | `storage`, `open_disk` | the interface to the program that opens disks; an open one |
//! | `resize`, `resize_key` | changes its size, as requested by a key |
//! | `device_stats`, `registry` | statistics of the devices with open disks |
//! | `toolstack` | creates and removes devices |
#![forbid(unsafe_code)]

mod backend;
mod connection;
mod device;
mod device_lock;
mod device_stats;
mod frontend;
mod journal_dir;
mod leave_state;
mod leaving;
mod name;
mod observe;
mod offer;
mod open_disk;
mod ownership;
mod params;
mod registry;
mod resize;
mod resize_key;
mod state_machine;
mod stepped;
mod storage;
mod succession;
mod tasks;
pub mod toolstack;

pub use backend::{Backend, BackendError, BackendOptions, DEVICE_CHECKS};
pub use device_stats::DeviceStats;
pub use frontend::RingLimits;
pub use name::DeviceName;
pub use params::Params;
pub use stepped::SteppedBackend;
pub use storage::{ActivationError, DiskBacking, DiskUse, Opener, VbdSettings};
