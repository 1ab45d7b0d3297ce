//! A backend that is killed and stopped repeatedly under a verified load: the driver sees only a pause.
//!
//! `oracle` models the possible contents of a disk. `load` keeps the queues of any interface busy and validates every
//! completion, through [`load_queues`](crate::load_queues) of `blk`, `scsi` or `xen`, which have the backend's
//! disks too. `daemon` is the restarted `mqblk` binary, `rig` ends it at random times, `kills` says how often, `stats`
//! sums up.

pub mod blk;
pub mod daemon;
pub mod kills;
pub mod load;
pub mod oracle;
pub mod rig;
pub mod scsi;
pub mod stats;
pub mod xen;
