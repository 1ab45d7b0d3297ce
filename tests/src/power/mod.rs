//! Power cuts: the possible contents of a disk with a volatile write cache after a power cut at any moment.
//!
//! A [`PowerLog`] records everything that reaches storage, in order: writes with their data, flushes, and their
//! completions. A cut at a position of the log gives an image. It holds all data that a completed flush or a durable
//! write covers by then. A seeded generator chooses any part of the rest, down to single sectors. The model is that of
//! the kernel's dm-log-writes.
//!
//! A log has two sources. [`record_writes`] filters a disk in this process. [`PowerMount`] is a file system whose files
//! are the disks: it records the system calls of a daemon in another process. [`WriteHistory`] checks the writes of our
//! driver.

mod channel;
mod history;
mod log;
mod mount;

pub use channel::record_writes;
pub use history::{WriteHistory, WriteId};
pub use log::{CacheModel, EventId, Position, PowerLog, SECTOR};
pub use mount::PowerMount;
