//! The benchmark as a frontend on a real Xen. In dom0 against a daemon in dom0: every layout of requests, and rings and
//! requests of all sizes. Then in a PV guest against the daemon in dom0.

use anyhow::{Context, Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::Shell;
use mqblk_tests::xen::{BlkfrontParameters, Dom0Daemon, Domain, DomainConfig, XenHost};

/// Timeout of one benchmark; emulation on an idle machine needs a tenth of it.
const WITHIN: Bound = Bound::seconds(120);

/// Checks for leaks of devices in xenstore, event channels and grants of dom0.
const LEFT: &str =
    "xenstore-ls /local/domain/0/device/vbd 2>/dev/null; xenstore-ls /local/domain/0/backend/mqblk 2>/dev/null; true";

#[test]
#[ignore = "long: make soak, make test-xen"]
fn every_block_is_verified_through_rings_of_dom0() -> Result<()> {
    let mut host = XenHost::builder("bench").with_mqblk().boot()?;
    // 1024 pages by default.
    host.must("echo 16384 >/sys/module/xen_gntalloc/parameters/limit")?;
    for options in [
        "--grants copy --abi x86_64 --queues 2 --ring-order 0 --bs 4k --iodepth 8",
        "--grants persistent --abi x86_32 --queues 2 --ring-order 4 --bs 64k --iodepth 4",
        "--grants map --abi arm --queues 1 --ring-order 1 --bs 16k --iodepth 8",
        // As many segments as Linux offers, then no indirect segments: six requests per I/O.
        "--grants persistent --abi x86_32 --queues 1 --ring-order 1 --bs 1M --iodepth 2",
        "--grants copy --abi arm --queues 2 --ring-order 0 --bs 256k --iodepth 2 --indirect-segments 11",
    ] {
        let output = host.must_within(
            &format!(
                "RUST_BACKTRACE=1 mqblk bench --interface xen --xen auto --disk storage=ram,size=4M --rw write \
                 --verify crc32c --allow-write {options} 2>&1"
            ),
            WITHIN,
        );
        let output = output.context(options)?;
        ensure!(output.contains("blocks verified") && output.contains("errors 0"), "{options}: {output}");
        let left = host.must(LEFT)?;
        ensure!(!left.contains("state"), "{options}: left in xenstore:\n{left}");
    }
    host.power_off()
}

/// Puts the program and its libraries on a disk of dom0, for a guest.
const PROGRAM: &str = "cd / && tar chf /tmp/program.tar sbin/mqblk-bench \
     $(LD_TRACE_LOADED_OBJECTS=1 mqblk-bench | tr ' \\t' '\\n\\n' | sed -n 's|^/||p')";

#[test]
#[ignore = "long: make soak, make test-xen"]
fn every_block_is_verified_from_a_guest_without_a_driver() -> Result<()> {
    let mut host = XenHost::builder("bench-guest").with_mqblk().boot()?;
    host.must(PROGRAM)?;
    let daemon = Dom0Daemon::serve(&mut host, "--disk id=ram,storage=ram,size=4M,interface=xen,queues=2")?;
    let mut guest = Domain::create(&mut host, &DomainConfig::new("bench"))?;
    guest.load_blkfront(BlkfrontParameters::default())?;
    daemon.attach(&mut host, &guest, "xvdy", "file:/tmp/program.tar", "")?;
    guest.wait_disk("xvdy")?;
    guest.must_within("tar x -f /dev/xvdy -C / && mqblk-bench --version", WITHIN)?;
    daemon.detach(&mut host, &guest, "xvdy")?;
    guest.unload_blkfront()?;
    guest.must("insmod /lib/modules/xen-evtchn.ko && insmod /lib/modules/xen-gntalloc.ko limit=16384")?;
    host.must(&format!("mqblk xen attach --wait 0 --domid {} --vdev xvdb mqblk:ram", guest.id()))?;
    for options in [
        "--queues 2 --bs 4k --iodepth 16",
        "--queues 1 --ring-order 2 --abi x86_32 --bs 256k --iodepth 4",
        "--queues 2 --ring-order 0 --abi arm --bs 64k --iodepth 4 --indirect-segments 11",
    ] {
        let output = guest.must_within(
            &format!(
                "RUST_BACKTRACE=1 mqblk-bench bench --interface xen --vdev xvdb --rw randwrite --verify crc32c --allow-write \
                 {options} 2>&1"
            ),
            WITHIN,
        );
        let output = output.context(options)?;
        ensure!(output.contains("blocks verified") && output.contains("errors 0"), "{options}: {output}");
    }
    let used = daemon.disk_stat(&mut host, "ram")?.grants.context("no figures of grants")?;
    ensure!((used.copy_errors, used.map_errors, used.stuck_pages) == (0, 0, 0), "something failed: {used:?}");
    daemon.detach(&mut host, &guest, "xvdb")?;
    guest.power_off(&mut host)?;
    daemon.stop(&mut host)?;
    host.power_off()
}
