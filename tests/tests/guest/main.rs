//! Real guests, booted by QEMU.
//!
//! Run one test at a time, after tests/guest/prepare.sh: see tests/src/guest.

mod as_host;
mod block;
mod defaults;
mod documented;
mod firmware;
mod kexec;
mod lifecycle;
mod live;
mod migration;
mod network;
mod platform;
mod power_cut;
mod queues;
mod resize;
mod restart;
mod scsi;
mod scsi_commands;
mod scsi_paths;
mod stat;
mod takeover;
mod vmm;
mod windows_blk;
mod windows_scsi;
