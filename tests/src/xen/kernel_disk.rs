//! Disks of the kernel's own back-end, xen-blkback: what the tests are proved with, and what ours is compared with.

use anyhow::{Context, Result};

use super::domain::Domain;
use super::host::XenHost;
use crate::guest::Shell;

impl XenHost {
    /// Attaches a block device of dom0 to a running guest through xl and xen-blkback.
    ///
    /// # Errors
    /// xl's.
    pub fn attach_kernel_disk(&mut self, domain: &Domain, disk: &str, device: &str) -> Result<()> {
        self.load("xen-blkback", "")?;
        let id = domain.id();
        self.must(&format!("xl block-attach {id} 'format=raw,vdev={disk},access=rw,backendtype=phy,target={device}'"))
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

    /// A sparse image of `mib` MiB in dom0's memory behind a loop device, whose node this gives.
    ///
    /// # Errors
    /// losetup's.
    pub fn loop_device(&mut self, name: &str, mib: u32) -> Result<String> {
        self.load("loop", "max_loop=8")?;
        self.must(&format!(
            "set -e; truncate -s {mib}M /tmp/{name}.img; node=$(losetup -f); losetup $node /tmp/{name}.img; echo $node"
        ))
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
