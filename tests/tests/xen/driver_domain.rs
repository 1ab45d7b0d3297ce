//! The daemon in a driver domain, not dom0: another guest has its disk.

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{FioJobs, Shell};
use mqblk_tests::xen::{BackendProgram, BlkfrontParameters, Domain, DomainConfig, HardwareQueue, XenHost};

/// The guests' initramfs with the daemon, and dom0's libraries for it. The kernel unpacks both archives.
const RAMDISK: &str = "/run/driver.cpio";
const MAKE_RAMDISK: &str = "cd / && cp /guest/initramfs.cpio /run/driver.cpio &&
    find sbin/mqblk lib64 lib/x86_64-linux-gnu | cpio -o -H newc >>/run/driver.cpio 2>/dev/null";

const SERVE: &str = "for module in xen-evtchn xen-gntdev; do insmod /lib/modules/$module.ko || exit 1; done
    mkdir -p /run/mqblk
    mqblk serve --xen-watch vbd --admin /run/mqblk/admin \
        --disk id=disk,interface=xen,storage=ram,size=32M,queues=2 >/run/mqblk.log 2>&1 &
    for i in $(seq 300); do [ -S /run/mqblk/admin ] && exit 0; sleep 0.1; done
    cat /run/mqblk.log; exit 1";

#[test]
#[ignore = "long: make soak, make test-xen"]
fn a_driver_domain_serves_a_guest() -> Result<()> {
    if BackendProgram::from_environment()? == BackendProgram::Kernel {
        return Ok(());
    }
    let mut host = BackendProgram::Mqblk.boot(XenHost::builder("driver-domain"))?;
    host.must(MAKE_RAMDISK)?;
    let config = DomainConfig::new("driver").memory_mib(512).driver_domain(RAMDISK);
    let mut driver = Domain::create(&mut host, &config)?;
    driver.must(SERVE)?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    guest.load_blkfront(BlkfrontParameters::default())?;
    let disk = "format=raw,vdev=xvda,access=rw,backend=driver,script=/bin/true,target=mqblk:disk";
    host.must(&format!("xl block-attach guest '{disk}'"))?;
    guest.wait_disk("xvda")?;
    let each = |cpu| HardwareQueue { cpus: vec![cpu], tags: 32 };
    assert_eq!(guest.hardware_queues("xvda")?, [each(0), each(1)]);
    FioJobs::verified_random_writes("/dev/xvda", 2, 0, 8).run(&mut guest, Bound::seconds(120))?.must_have_verified()?;
    guest.must_have_no_warnings()?;
    let list = driver.must("mqblk xen list --type vbd --json")?;
    let list: serde_json::Value = serde_json::from_str(&list)?;
    let device = &list["devices"][0];
    ensure!(device["domid"] == guest.id() && device["queues"] == 2 && device["backend_state"] == 4, "{list}");
    host.must("! xenstore-exists /local/domain/0/backend/vbd")?;

    // The guest dies: its disk is free again.
    let id = guest.id();
    guest.destroy(&mut host)?;
    let mut next = Domain::create(&mut host, &DomainConfig::new("next"))?;
    next.load_blkfront(BlkfrontParameters::default())?;
    host.must(&format!("xl block-attach next '{disk}'"))?;
    next.wait_disk("xvda")?;
    ensure!(next.id() != id, "the domain is the old one");
    FioJobs::verified_random_writes("/dev/xvda", 2, 16, 4).run(&mut next, Bound::seconds(120))?.must_have_verified()?;
    next.must_have_no_warnings()?;
    next.power_off(&mut host)?;
    driver.must("kill $(pidof mqblk)")?;
    driver.power_off(&mut host)?;
    host.power_off()
}
