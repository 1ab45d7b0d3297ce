//! Features that a VMM forces upon the devices.

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, FioJobs, Guest, GuestController, GuestDisk, HostImage, LunConfig, Shell,
    VhostUserDaemon, Vmm, with_each_vmm,
};

/// As in a confidential guest: the driver uses the platform's addresses, and all data passes through its bounce
/// buffers.
#[test]
fn addresses_of_the_platform_and_bounce_buffers() -> Result<()> {
    with_each_vmm(|vmm| {
        let (disk, lun) = (HostImage::sparse(64)?, HostImage::sparse(64)?);
        let controller = ControllerConfig::new("hba", 1, vec![LunConfig::new(0, 0, lun.path())]);
        let daemon = VhostUserDaemon::start_all(&[DaemonDisk::new("disk", disk.path(), 1)], &[controller])?;
        let on = || serde_json::Value::from(true);
        let blk = GuestDisk::new("disk", &daemon.socket("disk"), 1)
            .property("iommu_platform", on())
            .property("disable-legacy", "on".into());
        let scsi = GuestController::vhost_user("hba", &daemon.socket("hba"), 1)
            .property("iommu_platform", on())
            .property("disable-legacy", "on".into());
        let builder = Guest::builder().vmm(vmm).machine("q35").kernel_parameters("swiotlb=force");
        let mut guest = builder.disk(blk).controller(scsi).boot()?;
        let features = "for device in vda sda; do
                path=/sys/block/$device/device; while ! [ -e $path/features ]; do path=$path/..; done; cut -c34 $path/features
            done";
        let accepted = guest.must(features)?;
        ensure!(accepted.split_whitespace().eq(["1", "1"]), "ACCESS_PLATFORM: found {accepted:?}");
        for node in ["/dev/vda", "/dev/sda"] {
            FioJobs::verified_random_writes(node, 2, 0, 8)
                .run(&mut guest, Bound::seconds(150))?
                .must_have_verified()?;
        }
        let used = guest.must("mount -t debugfs none /mnt && cat /mnt/swiotlb/io_tlb_used")?;
        ensure!(used.trim().parse::<u64>().is_ok_and(|slots| slots > 0), "the driver does not bounce: {used:?}");
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}

/// The rings have addresses of a virtual IOMMU, which the daemon cannot translate.
#[test]
fn addresses_of_a_virtual_iommu_are_refused_by_name() -> Result<()> {
    let disk = HostImage::sparse(64)?;
    let mut daemon = VhostUserDaemon::start(&[DaemonDisk::new("disk", disk.path(), 1)])?;
    let on = || serde_json::Value::from(true);
    let blk = GuestDisk::new("disk", &daemon.socket("disk"), 1).property("iommu_platform", on());
    let blk = blk.property("ats", on()).property("disable-legacy", "on".into());
    let iommu = ["-device".to_owned(), "intel-iommu,intremap=off,device-iotlb=on".to_owned()];
    let builder = Guest::builder().vmm(Vmm::newest()?).machine("q35").kernel_parameters("intel_iommu=on iommu=nopt");
    let guest = builder.arguments(&iommu).disk(blk).power_on()?;
    daemon.wait_log("the reason", |log| log.contains("addresses of a virtual IOMMU are not translated"))?;
    guest.kill()?;
    daemon.stop().map(drop)
}
