//! Real guests, real clients, hostile guests.
//!
//! `blkif` is a simulated Xen with the daemon as its backend. `guest` boots Debian under QEMU. `xen` boots Xen with a
//! dom0 and PV guests. `hostile` is a vhost-user frontend that controls every byte of its messages, memory and rings;
//! `loopback` is the same for a Xen block device, on a simulated or a real Xen. `stepped_scsi` is the guest of a SCSI
//! controller whose workers are stepped by the test. `migrating_guest` migrates between daemons with the state of its
//! devices. `crash` restarts daemons under a verified load; `load_queues` abstracts the interface of a load.
//! `in_process` serves a disk from the test's process. `stepped` sets up workers that a test steps. `filter_disk`
//! places a test between the engine and a disk. `power` models a disk's content after a power cut; `documented` runs
//! the commands of documents. `ceph` starts a real cluster of Ceph, `nbd_server` NBD servers. `unprivileged` runs tests
//! of limits that do not bind root.
#![forbid(unsafe_code)]

pub mod blkif;
pub mod ceph;
pub mod crash;
pub mod documented;
pub mod filter_disk;
pub mod fourth_interface;
pub mod guest;
pub mod hostile;
pub mod in_process;
pub mod load_queues;
pub mod log_end;
pub mod loopback;
pub mod migrating_guest;
pub mod nbd_server;
pub mod power;
pub mod stepped;
pub mod stepped_scsi;
pub mod unprivileged;
pub mod windows;
pub mod xen;

/// Returns the number of repetitions of a test's body: `MQBLK_REPETITIONS` in a long run, else 1.
pub fn repetitions() -> u32 {
    std::env::var("MQBLK_REPETITIONS").map_or(1, |text| text.parse().expect("MQBLK_REPETITIONS: a number"))
}
