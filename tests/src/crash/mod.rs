//! A back-end that is killed and stopped, again and again, under a verified load: in the driver's process nothing is noticed but a
//! pause.
//!
//! `oracle` knows what a disk may hold, `load` keeps queues of any interface busy and judges all that comes back, `port` is what
//! differs between the interfaces (`blk`, `scsi`, `xen`), `daemon` is the `mqblk` binary that goes and comes, `kills` ends it at
//! random moments, `report` sums up.

pub mod blk;
pub mod daemon;
pub mod kills;
pub mod load;
pub mod oracle;
pub mod port;
pub mod report;
pub mod scsi;
pub mod xen;
