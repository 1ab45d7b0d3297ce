//! Disks of the kernel's own back-end, xen-blkback: what the tests are proved with, and what ours is compared with.

use anyhow::{Context, Result};

use super::domain::Domain;
use super::host::XenHost;
use crate::guest::Shell;

impl XenHost {
    /// Attaches a block device of dom0 to a running guest through xl and xen-blkback, with mode `r` or `w`.
    ///
    /// # Errors
    /// xl's.
    pub fn attach_kernel_disk(&mut self, domain: &Domain, disk: &str, device: &str, mode: &str) -> Result<()> {
        self.load("xen-blkback", "max_queues=4")?;
        let id = domain.id();
        self.must(&format!(
            "xl block-attach {id} 'format=raw,vdev={disk},access={mode},backendtype=phy,target={device}'"
        ))
        .map(drop)
        .with_context(|| format!("attaching {device} as {disk}"))
    }

    /// Detaches such a disk.
    ///
    /// # Errors
    /// xl's.
    pub fn detach_kernel_disk(&mut self, domain: &Domain, disk: &str) -> Result<()> {
        self.must(&format!("xl block-detach {} {disk}", domain.id())).map(drop)
    }

    /// A block device that stores nothing and answers at once; gives its node.
    ///
    /// # Errors
    /// insmod's.
    pub fn null_device(&mut self, queues: u16) -> Result<String> {
        self.load("null_blk", &format!("nr_devices=1 queue_mode=2 irqmode=0 gb=1 bs=512 submit_queues={queues}"))?;
        Ok("/dev/nullb0".to_owned())
    }
}
