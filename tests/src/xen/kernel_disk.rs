//! Disks of the kernel's backend, xen-blkback, to validate the tests and to compare with ours.

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

    /// Detaches a disk that was attached with [`attach_kernel_disk`](Self::attach_kernel_disk).
    ///
    /// # Errors
    /// xl's.
    pub fn detach_kernel_disk(&mut self, domain: &Domain, disk: &str) -> Result<()> {
        self.must(&format!("xl block-detach {} {disk}", domain.id())).map(drop)
    }

    /// Creates a null block device that completes requests at once. Returns its node.
    ///
    /// # Errors
    /// insmod's.
    pub fn null_device(&mut self, queues: u16) -> Result<String> {
        self.load("null_blk", &format!("nr_devices=1 queue_mode=2 irqmode=0 gb=1 bs=512 submit_queues={queues}"))?;
        Ok("/dev/nullb0".to_owned())
    }
}
