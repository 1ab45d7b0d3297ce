//! Real guests, real clients, hostile guests.
//!
//! `blkif` is a simulated Xen with the daemon as its back-end; `guest` boots Debian under QEMU and talks to it; `xen` boots Xen with a
//! dom0 and PV guests of its own; `hostile` plays a front-end and a ring whose every byte it controls; `loopback` does so with a Xen
//! block device, on a simulated Xen or a real one; `scsi` is a guest of a SCSI controller whose workers are stepped by hand;
//! `traveller` is a guest that goes from one daemon to another and takes its devices' state along; `crash` ends daemons again and again
//! under a load that is verified; `mortal` kills a back-end in the midst of what it does; `overlay` puts a test between the engine and a
//! disk; `power` knows what a disk may hold after a power cut; `documented` runs the commands that documents print.
#![forbid(unsafe_code)]

pub mod blkif;
pub mod crash;
pub mod documented;
pub mod guest;
pub mod hostile;
pub mod loopback;
pub mod mortal;
pub mod overlay;
pub mod power;
pub mod scsi;
pub mod traveller;
pub mod xen;
