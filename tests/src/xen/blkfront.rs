//! Parameters and sysfs attributes of a PV guest's block driver.

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;

use super::domain::Domain;
use crate::guest::Shell;

/// Timeout for a disk to appear, change or disappear.
const DISK_TIMEOUT: Bound = Bound::seconds(60);

/// Parameters of the module xen-blkfront.
#[derive(Debug, Clone, Copy)]
pub struct BlkfrontParameters {
    /// Most queues of a disk; the driver uses at most one per CPU.
    pub max_queues: u16,
    /// log2 of the most pages of a ring.
    pub max_ring_page_order: u8,
    /// Most segments of an indirect request.
    pub max_indirect_segments: u16,
    /// True: offers persistent grants.
    pub persistent: bool,
}

impl Default for BlkfrontParameters {
    /// The module's defaults.
    fn default() -> Self {
        Self { max_queues: 4, max_ring_page_order: 0, max_indirect_segments: 32, persistent: true }
    }
}

/// A hardware queue of a disk, from /sys/block/DISK/mq.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HardwareQueue {
    /// The CPUs that submit to it.
    pub cpus: Vec<u16>,
    /// Number of tags: most requests in flight.
    pub tags: u32,
}

impl Domain {
    /// Loads the block driver with these parameters. No disk may be in use.
    ///
    /// # Errors
    /// insmod's.
    pub fn load_blkfront(&mut self, parameters: BlkfrontParameters) -> Result<()> {
        let BlkfrontParameters { max_queues, max_ring_page_order, max_indirect_segments, persistent } = parameters;
        self.unload_blkfront()?;
        self.must(&format!(
            "insmod /lib/modules/xen-blkfront.ko max_queues={max_queues} max_ring_page_order={max_ring_page_order} \
             max_indirect_segments={max_indirect_segments} feature_persistent={}",
            u8::from(persistent)
        ))
        .map(drop)
    }

    /// Unloads the block driver, if it is loaded. No disk may be in use.
    ///
    /// # Errors
    /// When it stays in use.
    pub fn unload_blkfront(&mut self) -> Result<()> {
        // A process may still have the node of a removed disk open.
        self.wait("! [ -d /sys/module/xen_blkfront ] || rmmod xen_blkfront", "xen_blkfront stays")
    }

    /// Waits until a disk exists and can be read.
    ///
    /// # Errors
    /// When it does not appear, with the kernel's log.
    pub fn wait_disk(&mut self, disk: &str) -> Result<()> {
        self.wait(&format!("[ -b /dev/{disk} ] && [ $(cat /sys/block/{disk}/size) -gt 0 ]"), &format!("no {disk}"))
    }

    /// Waits until a disk is gone.
    ///
    /// # Errors
    /// When it stays.
    pub fn wait_no_disk(&mut self, disk: &str) -> Result<()> {
        self.wait(&format!("! [ -e /sys/block/{disk} ]"), &format!("{disk} is still there"))
    }

    /// Waits until a disk has this size in units of 512 bytes.
    ///
    /// # Errors
    /// When it does not.
    pub fn wait_sectors(&mut self, disk: &str, sectors: u64) -> Result<()> {
        self.wait(
            &format!("[ $(cat /sys/block/{disk}/size) = {sectors} ]"),
            &format!("{disk} has not {sectors} sectors"),
        )
    }

    fn wait(&mut self, condition: &str, otherwise: &str) -> Result<()> {
        let script =
            format!("for i in $(seq 500); do {condition} && exit 0; sleep 0.1; done; dmesg | tail -n 20; exit 1");
        self.must_within(&script, DISK_TIMEOUT).map(drop).with_context(|| otherwise.to_owned())
    }

    /// Returns the hardware queues of a disk.
    ///
    /// # Errors
    /// When sysfs has none.
    pub fn hardware_queues(&mut self, disk: &str) -> Result<Vec<HardwareQueue>> {
        let text = self.must(&format!(
            "cd /sys/block/{disk}/mq && for i in $(ls | sort -n); do echo \"$(cat $i/nr_tags):$(cat $i/cpu_list)\"; done"
        ))?;
        let queues = text
            .lines()
            .map(|line| {
                let (tags, cpus) = line.split_once(':').context("TAGS:CPUS")?;
                let cpus = cpus.split(',').map(|cpu| cpu.trim().parse()).collect::<Result<_, _>>()?;
                Ok(HardwareQueue { cpus, tags: tags.parse()? })
            })
            .collect::<Result<Vec<_>>>()
            .with_context(|| format!("/sys/block/{disk}/mq: {text}"))?;
        ensure!(!queues.is_empty(), "/sys/block/{disk}/mq is empty");
        Ok(queues)
    }

    /// Returns a value of /sys/block/DISK/queue.
    ///
    /// # Errors
    /// As [`Shell::must`].
    pub fn queue_attribute(&mut self, disk: &str, name: &str) -> Result<String> {
        self.must(&format!("cat /sys/block/{disk}/queue/{name}"))
    }

    /// Returns the disk's `stat` (Documentation/block/stat.rst).
    ///
    /// # Errors
    /// As [`Shell::must`], and when it has fewer fields than that document.
    pub fn disk_stat(&mut self, disk: &str) -> Result<Vec<u64>> {
        let text = self.must(&format!("cat /sys/block/{disk}/stat"))?;
        let fields = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        ensure!(fields.len() >= 17, "/sys/block/{disk}/stat has {} fields", fields.len());
        Ok(fields)
    }
}
