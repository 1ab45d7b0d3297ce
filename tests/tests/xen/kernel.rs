//! The kernel's own backend on a real Xen: validates the test harness.

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{FioJobs, Shell};
use mqblk_tests::xen::{
    BackendDisk, BackendProgram, BlkfrontParameters, Dom0Image, Domain, DomainConfig, HardwareQueue, XenBackend,
    XenHost, interrupts,
};

#[test]
#[ignore = "long: make soak, make test-xen"]
fn the_harness_sees_a_disk_of_the_kernel() -> Result<()> {
    let mut host = XenHost::builder("kernel").boot()?;
    let image = Dom0Image::sparse(&mut host, "disk", 64)?;
    let backend = XenBackend::start(BackendProgram::Kernel, &mut host, &[BackendDisk::new("disk", &image, "")])?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    guest.load_blkfront(BlkfrontParameters::default())?;
    backend.attach(&mut host, &mut guest, "xvda", "disk")?;

    // One queue per CPU, each with a ring of one page.
    let each = |cpu| HardwareQueue { cpus: vec![cpu], tags: 32 };
    assert_eq!(guest.hardware_queues("xvda")?, [each(0), each(1)]);
    FioJobs::verified_random_writes("/dev/xvda", 2, 0, 8).run(&mut guest, Bound::seconds(120))?.must_have_verified()?;
    let events = interrupts(&mut guest, "blkif")?;
    ensure!(events.len() == 2 && events.iter().all(|&count| count > 0), "events of the two queues: {events:?}");
    ensure!(image.allocated(&mut host)? >= 8 << 20, "fio's data is not in the image");

    // The detection of guest errors must work.
    guest.must_have_no_warnings()?;
    let beyond = guest.run("echo '<3>blkfront: xvda: a complaint' >/dev/kmsg")?;
    assert_eq!(beyond.status, 0);
    ensure!(guest.must_have_no_warnings().is_err(), "a complaint in the guest's log was not found");
    // The wait for a disk must not report a missing one.
    ensure!(guest.must("[ -e /sys/block/xvdb ]").is_err(), "a disk that nobody attached");

    backend.detach(&mut host, &mut guest, "xvda")?;
    guest.power_off(&mut host)?;
    host.power_off()
}
