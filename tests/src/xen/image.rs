//! Image files in dom0's memory, each behind a loop device. The device's counters and the file's holes show the
//! requests that reached it.

use anyhow::{Context, Result};

use super::host::XenHost;
use crate::guest::Shell;

/// Mount point of dom0's control groups, and the group whose members write slowly.
const CONTROL_GROUPS: &str = "/run/cgroup";
pub(super) const SLOW_GROUP: &str = "/run/cgroup/slow";

/// An image; it ends with its host.
#[derive(Debug, Clone)]
pub struct Dom0Image {
    path: String,
    device: String,
}

impl Dom0Image {
    /// Creates a sparse image of `mib` MiB.
    ///
    /// # Errors
    /// losetup's.
    pub fn sparse(host: &mut XenHost, name: &str, mib: u32) -> Result<Self> {
        Self::create(host, name, &format!("truncate -s {mib}M /tmp/{name}.img"))
    }

    /// Creates an image of `mib` MiB that is allocated and full of the letter U.
    ///
    /// # Errors
    /// losetup's, or too little memory.
    pub fn full(host: &mut XenHost, name: &str, mib: u32) -> Result<Self> {
        Self::create(
            host,
            name,
            &format!("dd if=/dev/zero bs=1M count={mib} 2>/dev/null | tr '\\0' U >/tmp/{name}.img"),
        )
    }

    fn create(host: &mut XenHost, name: &str, make: &str) -> Result<Self> {
        host.load("loop", "max_loop=16")?;
        let path = format!("/tmp/{name}.img");
        let device = host.must(&format!("set -e; {make}; node=$(losetup -f); losetup $node {path}; echo $node"))?;
        Ok(Self { path, device })
    }

    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the loop device's node.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Resizes the file to `mib` MiB, and the loop device with it.
    ///
    /// # Errors
    /// losetup's.
    pub fn resize(&self, host: &mut XenHost, mib: u32) -> Result<()> {
        host.must(&format!("truncate -s {mib}M {} && losetup -c {}", self.path, self.device)).map(drop)
    }

    /// Limits the daemons started from now on to this many writes per second to the image, by the kernel's block
    /// throttling. Their requests wait in the kernel, so a killed daemon has requests in flight.
    ///
    /// # Errors
    /// When the kernel has no such control group.
    pub fn slow_down(&self, host: &mut XenHost, writes_per_second: u32) -> Result<()> {
        let name = self.device.trim_start_matches("/dev/");
        host.must(&format!(
            "set -e
             if ! [ -d {SLOW_GROUP} ]; then
                 mkdir -p {CONTROL_GROUPS}
                 mount -t cgroup2 none {CONTROL_GROUPS}
                 echo +io >{CONTROL_GROUPS}/cgroup.subtree_control
                 mkdir {SLOW_GROUP}
             fi
             echo \"$(cat /sys/block/{name}/dev) wiops={writes_per_second}\" >{SLOW_GROUP}/io.max"
        ))
        .map(drop)
    }

    /// Returns the allocated bytes of the file.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn allocated(&self, host: &mut XenHost) -> Result<u64> {
        const ST_BLOCKS_UNIT: u64 = 512;
        Ok(host.must(&format!("stat -c %b {}", self.path))?.parse::<u64>()? * ST_BLOCKS_UNIT)
    }

    /// Returns the SHA-256 checksum of `count` MiB from MiB `from` on; an emulated CPU does about 10 MiB/s.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn checksum(&self, host: &mut XenHost, from: u32, count: u32) -> Result<String> {
        let path = &self.path;
        let text = host.must(&format!("dd if={path} bs=1M skip={from} count={count} 2>/dev/null | sha256sum"))?;
        Ok(text.split_whitespace().next().context("sha256sum prints a sum")?.to_owned())
    }

    /// Returns the flush requests that the loop device has completed: the 16th field of its `stat`
    /// (Documentation/block/stat.rst).
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn flushes(&self, host: &mut XenHost) -> Result<u64> {
        let name = self.device.trim_start_matches("/dev/");
        let text = host.must(&format!("cat /sys/block/{name}/stat"))?;
        Ok(text.split_whitespace().nth(15).context("stat has a flush counter")?.parse()?)
    }
}
