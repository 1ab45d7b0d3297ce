//! Components on workers that the test steps, or with a guest that the test plays: no daemon, no driver.

mod blkif_barrier;
mod blkif_barrier_soak;
mod blkif_crash;
mod blkif_rig;
mod cancel;
mod crash_rig;
mod harness;
mod killable;
mod many_workers;
mod merge;
mod scsi_layouts;
mod scsi_stepped;
mod tmf;
mod virtio_crash;
