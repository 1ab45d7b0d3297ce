//! Power cuts: what a disk with a volatile cache may hold after its power went at any moment.
//!
//! A [`PowerLog`] notes everything that reaches storage in its order: writes with their data, flushes, and when each was answered.
//! A cut at a position of the log gives an image: all that an answered flush or a durable write covers by then is on it, and of
//! the rest any part, down to single sectors, as a seeded generator chooses. This is the model of the kernel's dm-log-writes.
//!
//! Two things feed a log: [`logged`] stands between the engine and a disk in this process; [`PowerMount`] is a file system
//! whose files are the disks, so that the log has what a daemon, which is another process, asks of the kernel.
//! [`History`] is the judge of writes by our driver.

mod channel;
mod history;
mod log;
mod mount;

pub use channel::logged;
pub use history::{History, WriteId};
pub use log::{Cache, EventId, Position, PowerLog, SECTOR};
pub use mount::PowerMount;
