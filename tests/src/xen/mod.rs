//! A real Xen under QEMU's emulation: the hypervisor, a dom0 with the toolstack, and PV guests with Debian's blkfront.
//!
//! `tests/xen/prepare.sh` makes what is booted (see [`Cache`]). A [`XenHost`] is a QEMU whose dom0 obeys an agent; a
//! [`Domain`] is a PV guest in it with an agent on its console, joined to QEMU's host through dom0. Both are a
//! [`Shell`](crate::guest::Shell). A [`Backend`] runs in dom0: ours
//! ([`Mqblk`]) or the kernel's.
//! Nothing here waits without a limit, QEMU itself is under one, and dropping a host kills it. What a host and its daemons
//! print is kept in target/test-logs/xen.
//!
//! Each host uses two CPUs, so run the tests one after another: `-- --test-threads=1`.

mod backend;
mod blkfront;
mod cache;
mod domain;
mod events;
mod host;
mod image;
mod kernel_disk;
mod mqblk;
mod overlay;

pub use backend::{Backend, BackendDisk, Server};
pub use blkfront::{Blkfront, HardwareQueue};
pub use cache::Cache;
pub use domain::{Domain, DomainConfig};
pub use events::{Calls, Probe, Probes, interrupts};
pub use host::{XenHost, XenHostBuilder};
pub use image::Image;
pub use mqblk::Mqblk;
