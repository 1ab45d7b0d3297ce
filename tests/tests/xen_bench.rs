//! The benchmark as a frontend on a real Xen: in dom0 against a daemon beside it, in every layout of requests and with rings and
//! requests of all sizes.
//!
//! One test at a time, and only after tests/xen/prepare.sh: see tests/src/xen.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mqblk_tests::guest::Shell;
use mqblk_tests::xen::XenHost;

/// For one benchmark; an idle machine that emulates needs a tenth of it.
const WITHIN: Duration = Duration::from_secs(120);

/// What xenstore, the event channels and the grants of dom0 have left of devices.
const LEFT: &str = "xenstore-ls /local/domain/0/device/vbd 2>/dev/null; xenstore-ls /local/domain/0/backend/mqblk 2>/dev/null; true";

#[test]
fn every_block_is_verified_through_rings_of_dom0() -> Result<()> {
    let mut host = XenHost::builder("bench").with_mqblk().boot()?;
    // 1024 pages, else.
    host.must("echo 16384 >/sys/module/xen_gntalloc/parameters/limit")?;
    for options in [
        "--grants copy --abi x86_64 --queues 2 --ring-order 0 --bs 4k --iodepth 8",
        "--grants persistent --abi x86_32 --queues 2 --ring-order 4 --bs 64k --iodepth 4",
        "--grants map --abi arm --queues 1 --ring-order 1 --bs 16k --iodepth 8",
        // As many segments as Linux offers, then none that is indirect: six requests for an I/O.
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
