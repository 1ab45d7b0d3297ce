//! dom0 alone on a real Xen, playing both ends: what our crates make of xenstore, grants and event channels.
//!
//! One test at a time, and only after tests/xen/prepare.sh: see tests/src/xen.

use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_tests::guest::Shell;
use mqblk_tests::xen::XenHost;

#[test]
fn xenstore_grants_and_event_channels() -> Result<()> {
    let mut host =
        XenHost::builder("dom0").with_program("xen_primitives", env!("CARGO_BIN_EXE_xen_primitives")).boot()?;
    // 1024 pages, else.
    host.must("echo 4096 >/sys/module/xen_gntalloc/parameters/limit")?;
    let output = host.must_within("RUST_BACKTRACE=1 xen_primitives", Duration::from_secs(120))?;
    ensure!(output.lines().count() == 7 && output.lines().all(|line| line.starts_with("as expected: ")), "{output}");
    host.power_off()
}
