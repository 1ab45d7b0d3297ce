//! The kernel's own back-end on a real Xen: what proves the harness that our back-end is tested with.
//!
//! One test at a time, and only after tests/xen/prepare.sh: see tests/src/xen.

use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_tests::guest::{FioJobs, Shell};
use mqblk_tests::xen::{Blkfront, Domain, DomainConfig, HardwareQueue, XenHost, interrupts};

#[test]
fn blkback_of_the_kernel() -> Result<()> {
    let mut host = XenHost::builder("kernel").boot()?;
    let node = host.loop_device("disk", 64)?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    guest.load_blkfront(Blkfront::default())?;
    host.attach_kernel_disk(&guest, "xvda", &node)?;
    guest.wait_disk("xvda")?;

    // One queue a CPU, each with a ring of one page: 32 requests of up to 11 segments.
    let each = |cpu| HardwareQueue { cpus: vec![cpu], tags: 32 };
    assert_eq!(guest.hardware_queues("xvda")?, [each(0), each(1)]);
    assert_eq!(guest.must("cat /sys/block/xvda/size")?, (64 * 2048).to_string());

    FioJobs::verified_random_writes("/dev/xvda", 2, 0, 8)
        .run(&mut guest, Duration::from_secs(120))?
        .must_have_verified()?;
    let events = interrupts(&mut guest, "blkif")?;
    ensure!(events.len() == 2 && events.iter().all(|&count| count > 0), "events of the two queues: {events:?}");

    guest.must("/sbin/blkdiscard -o 16M -l 16M /dev/xvda")?;
    host.detach_kernel_disk(&guest, "xvda")?;
    guest.wait_no_disk("xvda")?;
    guest.must_be_content()?;

    let mut guest = guest.reboot(&mut host)?;
    guest.must("uname -r")?;
    guest.power_off(&mut host)?;
    host.power_off()
}
