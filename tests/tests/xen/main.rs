//! A real Xen, emulated by QEMU.
//!
//! Run one test at a time, after tests/xen/prepare.sh: see tests/src/xen.

mod bench;
mod crash;
mod disk;
mod dom0;
mod driver_domain;
mod hotplug;
mod kernel;
mod lifecycle;
mod loopback;
mod migration;
mod modes;
mod side_by_side;
