//! A backend that is killed and stopped repeatedly under a verified load: the driver sees only a pause.
//!
//! `oracle` models the possible contents of a disk. `load` keeps the queues of any interface busy and validates every
//! completion, through [`load_queues`](crate::load_queues) of `blk`, `scsi` or `xen`. `blk_rig` has both ends of
//! virtio-blk disks. `daemon` is the restarted `mqblk` binary, `kills` ends it at random times, `stats` sums up.

pub mod blk;
pub mod blk_rig;
pub mod daemon;
pub mod kills;
pub mod load;
pub mod oracle;
pub mod scsi;
pub mod stats;
pub mod xen;
