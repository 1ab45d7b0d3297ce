//! Image files in dom0's memory, each behind a loop device whose counters and holes tell what reached it.

use anyhow::{Context, Result};

use super::host::XenHost;
use crate::guest::Shell;

/// Where dom0's control groups are mounted, and the one whose members write slowly.
const CONTROL_GROUPS: &str = "/run/cgroup";
pub(super) const SLOW_GROUP: &str = "/run/cgroup/slow";

/// An image; it ends with its host.
#[derive(Debug, Clone)]
pub struct Image {
    path: String,
    device: String,
}

impl Image {
    /// A sparse image of `mib` MiB.
    ///
    /// # Errors
    /// losetup's.
    pub fn sparse(host: &mut XenHost, name: &str, mib: u32) -> Result<Self> {
        Self::create(host, name, &format!("truncate -s {mib}M /tmp/{name}.img"))
    }

    /// An image of `mib` MiB that is allocated and full of the letter U.
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

    /// The file.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The loop device's node.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Makes it `mib` MiB large, and the loop device with it.
    ///
    /// # Errors
    /// losetup's.
    pub fn resize(&self, host: &mut XenHost, mib: u32) -> Result<()> {
        host.must(&format!("truncate -s {mib}M {} && losetup -c {}", self.path, self.device)).map(drop)
    }

    /// Lets the daemons that are started from now on write to it no more than so many times a second, by the kernel's block
    /// throttling: what they have asked for waits in the kernel, so a daemon that is killed has requests under way.
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

    /// The bytes that the file occupies.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn allocated(&self, host: &mut XenHost) -> Result<u64> {
        const ST_BLOCKS_UNIT: u64 = 512;
        Ok(host.must(&format!("stat -c %b {}", self.path))?.parse::<u64>()? * ST_BLOCKS_UNIT)
    }

    /// A checksum of `count` MiB from MiB `from` on: the SHA-256, of which an emulated CPU does some 10 MiB/s.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn sum(&self, host: &mut XenHost, from: u32, count: u32) -> Result<String> {
        let path = &self.path;
        let text = host.must(&format!("dd if={path} bs=1M skip={from} count={count} 2>/dev/null | sha256sum"))?;
        Ok(text.split_whitespace().next().context("sha256sum prints a sum")?.to_owned())
    }

    /// Flush requests that the loop device has completed: the 16th field of its `stat` (Documentation/block/stat.rst).
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn flushes(&self, host: &mut XenHost) -> Result<u64> {
        let name = self.device.trim_start_matches("/dev/");
        let text = host.must(&format!("cat /sys/block/{name}/stat"))?;
        Ok(text.split_whitespace().nth(15).context("stat has a flush counter")?.parse()?)
    }
}
