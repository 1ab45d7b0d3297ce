//! A minimal configuration: each VMM chooses rings and queues.

use anyhow::Result;
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{
    ControllerConfig, DaemonDisk, FioJobs, Guest, GuestController, GuestDisk, HostImage, LunConfig, VhostUserDaemon,
    wait_for_luns, with_each_vmm,
};

const WITHIN: Bound = Bound::seconds(150);

/// QEMU 10.0 gives every vhost-user-blk ring 1024 entries, QEMU 7.2 has 128. For a controller it sets up a request
/// queue for each virtual CPU, regardless of the host's number.
#[test]
fn a_disk_and_a_controller_with_the_queues_and_rings_of_each_vmm() -> Result<()> {
    with_each_vmm(|vmm| {
        let images = [HostImage::sparse(64)?, HostImage::sparse(64)?];
        let luns = vec![LunConfig::new(0, 0, images[1].path())];
        let daemon = VhostUserDaemon::start_all(
            &[DaemonDisk::new("plain", images[0].path(), 6)],
            &[ControllerConfig::new("c", 0, luns)],
        )?;
        let disk = GuestDisk::with_defaults("plain", &daemon.socket("plain"));
        let controller = GuestController::with_defaults("c", &daemon.socket("c"));
        let mut guest = Guest::builder().vmm(vmm).vcpus(6).disk(disk).controller(controller).boot()?;
        let luns = wait_for_luns(&mut guest, &[(0, 0)])?;
        for node in ["/dev/vda", &luns[&(0, 0)].node()] {
            FioJobs::verified_random_writes(node, 2, 0, 8).run(&mut guest, WITHIN)?.must_have_verified()?;
        }
        guest.power_off()?;
        daemon.stop().map(drop)
    })
}

/// QEMU exits or continues without the disk, depending on its next message after the connection is closed; 10.0 first
/// connects a few times. Either way the log names the setting to change.
#[test]
fn fewer_queues_than_the_vmm_sets_up_are_logged() -> Result<()> {
    with_each_vmm(|vmm| {
        let image = HostImage::sparse(16)?;
        let mut daemon = VhostUserDaemon::start_controllers(&[ControllerConfig::new(
            "few",
            1,
            vec![LunConfig::new(0, 0, image.path())],
        )])?;
        let controller = GuestController::with_defaults("few", &daemon.socket("few"));
        let guest = Guest::builder().vmm(vmm).vcpus(2).controller(controller).power_on();
        daemon.wait_log("a warning of too many queues", |log| {
            log.contains("queue index: found 3") && log.contains("num_queues=")
        })?;
        // QEMU may have ended before or after it was ready here.
        drop(guest);
        daemon.must_run()
    })
}

/// QEMU omits memory without a file from the table, and passes private files as if they were shared.
#[test]
#[ignore = "long: make soak, make test-guest"]
fn memory_that_is_not_shared_is_logged() -> Result<()> {
    with_each_vmm(|vmm| {
        for backend in ["memory-backend-ram", "memory-backend-memfd,share=off"] {
            let image = HostImage::sparse(16)?;
            let mut daemon = VhostUserDaemon::start(&[DaemonDisk::new("lonely", image.path(), 2)])?;
            let disk = GuestDisk::with_defaults("lonely", &daemon.socket("lonely"));
            let guest = Guest::builder().vmm(vmm).memory_backend(backend).disk(disk).power_on()?;
            daemon.wait_log("a warning that memory is not shared", |log| log.contains("share=on"))?;
            guest.kill()?;
            daemon.must_run()?;
        }
        Ok(())
    })
}
