//! SCSI disks as the guest's kernel sees them.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use mqblk_core::ByteLen;

use super::machine::Guest;
use super::shell::Shell;

/// First LUN that needs flat addressing. Linux leaves the address method's bits in their numbers (SAM-5 section 4.7.5).
const FLAT_FROM: u16 = 256;
const FLAT: u16 = 0x4000;

/// Prints for every SCSI disk: name, H:C:T:L, size in units of 512 bytes, block size, read-only, serial, wwid.
const LIST: &str = r#"
for disk in /sys/block/sd*; do
    [ -e $disk/device/vpd_pg80 ] || continue
    place=$(readlink -f $disk/device)
    echo "${disk##*/} ${place##*/} $(cat $disk/size) $(cat $disk/queue/logical_block_size) $(cat $disk/ro)" \
        "$(tail -c +5 $disk/device/vpd_pg80 | tr -d '\0' | tr ' ' '~') $(tr ' ' '~' <$disk/device/wwid)"
done"#;

/// A SCSI disk in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScsiDisk {
    /// Its name, such as `sda`.
    pub name: String,
    /// The number of the guest's SCSI host: its controller.
    pub host: u32,
    /// Target.
    pub target: u8,
    /// LUN.
    pub lun: u16,
    /// Capacity.
    pub size: ByteLen,
    /// Logical block size in bytes.
    pub block: u32,
    /// True if the kernel sees it as read-only.
    pub read_only: bool,
    /// Unit serial number, VPD page 80h.
    pub serial: String,
    /// The designator of VPD page 83h that the kernel chose, after its type.
    pub wwid: String,
}

impl ScsiDisk {
    /// Returns its node below /dev.
    #[must_use]
    pub fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }

    /// Linux numbers a small LUN in flat addressing as another LUN.
    fn plain_lun(lun: u16) -> u16 {
        if lun >= FLAT + FLAT_FROM { lun - FLAT } else { lun }
    }

    fn parse(line: &str) -> Option<Self> {
        const SECTOR: u64 = 512; // the unit of /sys/block/*/size for any block size
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, place, sectors, block, read_only, serial, wwid] = words[..] else { return None };
        let numbers: Vec<u64> = place.split(':').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [host, _, target, lun] = numbers[..] else { return None };
        Some(Self {
            name: name.to_owned(),
            host: host.try_into().ok()?,
            target: target.try_into().ok()?,
            lun: Self::plain_lun(lun.try_into().ok()?),
            size: ByteLen(sectors.parse::<u64>().ok()? * SECTOR),
            block: block.parse().ok()?,
            read_only: read_only == "1",
            serial: serial.trim_matches('~').replace('~', " "),
            wwid: wwid.trim_matches('~').replace('~', " "),
        })
    }
}

/// Returns the guest's SCSI disks, by target and LUN. [`ScsiDisk::host`] distinguishes equal addresses of two
/// controllers.
///
/// # Errors
/// As [`Shell::must`].
pub fn scsi_disks(guest: &mut Guest) -> Result<Vec<ScsiDisk>> {
    let list = guest.must(LIST)?;
    let parse = |line| ScsiDisk::parse(line).with_context(|| format!("not a disk's line: {line}"));
    list.lines().filter(|line| !line.is_empty()).map(parse).collect()
}

/// Waits until the guest has SCSI disks at exactly these targets and LUNs, over all its controllers, and returns them.
///
/// # Errors
/// When it has other disks at the deadline.
pub fn wait_for_luns(guest: &mut Guest, wanted: &[(u8, u16)]) -> Result<BTreeMap<(u8, u16), ScsiDisk>> {
    let count = wanted.len();
    // Each disk must have a node, and there must be no other nodes. A regular file shows that a program opened the node
    // too late or too early.
    guest.must(&format!(
        "for i in $(seq 300); do
             have=0
             for disk in /sys/block/sd*; do
                 [ -e $disk/device/vpd_pg80 ] && [ -b /dev/${{disk##*/}} ] && have=$((have + 1))
             done
             [ $have -eq {count} ] && break
             sleep 0.1
         done
         for disk in /sys/block/sd*; do
             [ ! -e $disk ] || [ -b /dev/${{disk##*/}} ] || {{ ls -l /dev/${{disk##*/}}; exit 1; }}
         done"
    ))?;
    let disks = scsi_disks(guest)?;
    let found: BTreeSet<_> = disks.iter().map(|disk| (disk.target, disk.lun)).collect();
    let wanted: BTreeSet<_> = wanted.iter().copied().collect();
    ensure!(
        found == wanted && disks.len() == count,
        "the guest has SCSI disks at (target, lun) {found:?}, expected {wanted:?}; its kernel says:\n{}",
        guest.must("dmesg | grep -i -e scsi -e virtio -e ' sd ' | tail -n 30")?
    );
    Ok(disks.into_iter().map(|disk| ((disk.target, disk.lun), disk)).collect())
}
