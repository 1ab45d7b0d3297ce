//! A real Xen under QEMU's emulation: the hypervisor, a dom0 with the toolstack, and PV guests with Debian's blkfront.
//!
//! `tests/xen/prepare.sh` makes the boot files (see [`XenCache`]). A [`XenHost`] is a QEMU whose dom0 runs an agent. A
//! [`Domain`] is a PV guest in it, with an agent on its console, which dom0 connects to QEMU's host. Both are a
//! [`Shell`](crate::guest::Shell). A [`XenBackend`] runs in dom0: ours ([`Dom0Daemon`]) or the kernel's. Every wait has
//! a limit, so has QEMU's life, and dropping a host kills it. The output of a host and its daemons is in
//! target/test-logs/xen.
//!
//! Each host uses two CPUs, so run the tests one after another: `-- --test-threads=1`.

mod backend;
mod blkfront;
mod cache;
mod dom0_daemon;
mod domain;
mod events;
mod host;
mod image;
mod initramfs;
mod kernel_disk;

pub use backend::{BackendDisk, BackendProgram, XenBackend};
pub use blkfront::{BlkfrontParameters, HardwareQueue};
pub use cache::XenCache;
pub use dom0_daemon::Dom0Daemon;
pub use domain::{Domain, DomainConfig, SavedDomain};
pub use events::{CallCounts, KernelProbe, KernelProbes, interrupts};
pub use host::{XenHost, XenHostBuilder};
pub use image::Dom0Image;
