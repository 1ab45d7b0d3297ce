//! Lifecycle of disks and guests on a real Xen: detach and reattach, a reboot, two guests, a destroyed guest.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::{FioJobs, FioOutcome, Shell};
use mqblk_tests::xen::{
    BackendDisk, BackendProgram, BlkfrontParameters, Dom0Image, Domain, DomainConfig, XenBackend, XenHost,
};
use serde_json::json;

/// Prints the checksum of the first 8 MiB of a disk, bypassing the guest's page cache.
const BEGINNING: &str = "set -o pipefail; dd if=/dev/xvda bs=1M count=8 iflag=direct 2>/dev/null | sha256sum";

/// Returns a command that writes for ever, for guests that are destroyed.
fn endless_writes() -> String {
    FioJobs::new(
        "--name=endless --filename=/dev/xvda --ioengine=io_uring --direct=1 --iodepth=32 --thread --rw=randwrite --bs=16k \
         --offset=32M --size=32M --time_based --runtime=600",
    )
    .script("endless")
}

/// Waits until the guest's writes reach the image, so that the next action happens in mid-I/O.
fn wait_for_writes(host: &mut XenHost, image: &Dom0Image) -> Result<()> {
    let before = image.allocated(host)?;
    let mut deadline = Bound::seconds(60).begin();
    while image.allocated(host)? < before + (1 << 20) {
        ensure!(!deadline.has_passed(), "nothing is written to {}", image.path());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Checks that nothing of a guest's disk is left in xenstore after a detach.
fn nothing_is_left(backend: &XenBackend, host: &mut XenHost, domain: u16) -> Result<()> {
    let Some(mqblk) = backend.mqblk() else { return Ok(()) };
    mqblk.must_run(host)?;
    let gone = format!(
        "for i in $(seq 200); do
             [ -z \"$(xenstore-list /local/domain/0/backend/mqblk/{domain} 2>/dev/null)\" ] && exit 0; sleep 0.1
         done; xenstore-ls /local/domain/0/backend/mqblk; exit 1"
    );
    host.must(&gone).map(drop)
}

/// Checks after the end of a guest that the daemon has released its disk, and that a detach removes its xenstore nodes.
fn let_go_of(backend: &XenBackend, host: &mut XenHost, domain: u16) -> Result<()> {
    let Some(mqblk) = backend.mqblk() else { return Ok(()) };
    host.must(&format!(
        "for i in $(seq 300); do
             xenstore-exists /local/domain/0/backend/mqblk/{domain} || exit 0; sleep 0.1
         done; xenstore-ls -f /local/domain/0/backend/mqblk; exit 1"
    ))
    .context("the daemon does not let go of a guest that is gone")?;
    nothing_is_left(backend, host, domain)?;
    mqblk.must_run(host)
}

#[test]
fn detached_attached_rebooted() -> Result<()> {
    let server = BackendProgram::from_environment()?;
    let mut host = server.boot(XenHost::builder("lifecycle"))?;
    let image = Dom0Image::sparse(&mut host, "disk", 64)?;
    let backend = XenBackend::start(server, &mut host, &[BackendDisk::new("disk", &image, "queues=2")])?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("guest"))?;
    guest.load_blkfront(BlkfrontParameters::default())?;
    backend.attach(&mut host, &mut guest, "xvda", "disk")?;
    FioJobs::verified_random_writes("/dev/xvda", 2, 0, 4).run(&mut guest, Bound::seconds(90))?.must_have_verified()?;
    let sum = guest.must(BEGINNING)?;

    for round in 1..=3 {
        backend.detach(&mut host, &mut guest, "xvda")?;
        nothing_is_left(&backend, &mut host, guest.id())?;
        backend.attach(&mut host, &mut guest, "xvda", "disk")?;
        assert_eq!(guest.must("ls /sys/block/xvda/mq | wc -l")?, "2", "round {round}");
        assert_eq!(guest.must(BEGINNING)?, sum, "round {round}: the data changed");
    }

    guest.must_have_no_warnings()?;

    // The guest reboots in mid-I/O: its domain is replaced by another one.
    guest.start("endless", &endless_writes())?;
    wait_for_writes(&mut host, &image)?;
    let old = guest.id();
    let mut guest = guest.reboot(&mut host)?;
    ensure!(guest.id() != old, "the domain is the old one");
    let_go_of(&backend, &mut host, old)?;
    guest.load_blkfront(BlkfrontParameters::default())?;
    if server == BackendProgram::Mqblk {
        backend.attach(&mut host, &mut guest, "xvda", "disk")?; // xl knows the kernel's disks, not the daemon's
    }
    guest.wait_disk("xvda")?;
    assert_eq!(guest.must(BEGINNING)?, sum, "the data changed in the reboot");
    FioJobs::verified_random_writes("/dev/xvda", 2, 32, 4).run(&mut guest, Bound::seconds(90))?.must_have_verified()?;
    guest.must_have_no_warnings()?;

    guest.power_off(&mut host)?;
    backend.stop(&mut host)?;
    host.power_off()
}

#[test]
#[ignore = "long: make soak, make test-xen"]
fn two_guests_at_once() -> Result<()> {
    let server = BackendProgram::from_environment()?;
    let mut host = server.boot(XenHost::builder("two-guests"))?;
    let (image_a, image_b) = (Dom0Image::sparse(&mut host, "a", 64)?, Dom0Image::sparse(&mut host, "b", 64)?);
    let disks = [BackendDisk::new("a", &image_a, "queues=2"), BackendDisk::new("b", &image_b, "queues=2")];
    let backend = XenBackend::start(server, &mut host, &disks)?;
    let mut victim = Domain::create(&mut host, &DomainConfig::new("victim"))?;
    let mut other_guest = Domain::create(&mut host, &DomainConfig::new("witness"))?;
    for guest in [&mut victim, &mut other_guest] {
        guest.load_blkfront(BlkfrontParameters::default())?;
    }
    // Both guests have the same name and device number for their disk.
    backend.attach(&mut host, &mut victim, "xvda", "a")?;
    backend.attach(&mut host, &mut other_guest, "xvda", "b")?;
    if let Some(mqblk) = backend.mqblk() {
        let list = mqblk.list(&mut host)?;
        for (guest, id) in [(&victim, "a"), (&other_guest, "b")] {
            let mut named = list.iter().filter(|device| device["domid"] == guest.id() && device["vdev"] == "xvda");
            let device = named.next().with_context(|| format!("no disk of domain {}: {list:?}", guest.id()))?;
            assert_eq!(device["params"], format!("mqblk:{id}"), "{device}");
            assert_eq!(device["queues"], 2, "{device}");
            assert_eq!((&device["backend_state"], &device["frontend_state"]), (&json!(4), &json!(4)), "{device}");
        }
    }

    let verify = FioJobs::verified_random_writes("/dev/xvda", 2, 0, 8);
    victim.start("verify", &verify.script("verify"))?;
    other_guest.start("verify", &verify.script("verify"))?;
    for guest in [&mut victim, &mut other_guest] {
        let answer = guest.finish("verify", Bound::seconds(180))?;
        FioOutcome::read(answer.status, &answer.output)?.must_have_verified()?;
        guest.must_have_no_warnings()?;
    }

    // One is destroyed in mid-I/O, with requests in flight and pages mapped.
    let again = FioJobs::verified_random_writes("/dev/xvda", 2, 16, 16);
    other_guest.start("again", &again.script("again"))?;
    wait_for_writes(&mut host, &image_b)?;
    victim.start("endless", &endless_writes())?;
    wait_for_writes(&mut host, &image_a)?;
    ensure!(other_guest.is_running("again")?, "the other guest's verification ended before: make it longer");
    let id = victim.id();
    victim.destroy(&mut host)?;
    let_go_of(&backend, &mut host, id)?;
    let answer = other_guest.finish("again", Bound::seconds(240))?;
    FioOutcome::read(answer.status, &answer.output)?.must_have_verified()?;
    other_guest.must_have_no_warnings()?;

    // No page of the destroyed one is mapped; otherwise Xen would keep it as a dying domain.
    host.must("for i in $(seq 200); do [ $(xl list | wc -l) = 3 ] && exit 0; sleep 0.1; done; xl list; exit 1")?;

    // Its disk serves the next one.
    let mut next = Domain::create(&mut host, &DomainConfig::new("next"))?;
    next.load_blkfront(BlkfrontParameters::default())?;
    backend.attach(&mut host, &mut next, "xvda", "a")?;
    FioJobs::verified_random_writes("/dev/xvda", 2, 0, 4).run(&mut next, Bound::seconds(90))?.must_have_verified()?;
    next.must_have_no_warnings()?;
    next.power_off(&mut host)?;
    other_guest.power_off(&mut host)?;
    backend.stop(&mut host)?;
    host.power_off()
}
