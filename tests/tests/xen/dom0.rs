//! dom0 alone on a real Xen, as both ends: the crates' access to xenstore, grants and event channels.

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::Shell;
use mqblk_tests::xen::XenHost;

/// A frontend's pages come from gntalloc, which allows 1024 by default.
const MORE_GRANTS: &str = "echo 8192 >/sys/module/xen_gntalloc/parameters/limit";

#[test]
fn xenstore_grants_and_event_channels() -> Result<()> {
    let program = env!("CARGO_BIN_EXE_xen_primitives");
    let mut host = XenHost::builder("dom0").with_program("xen_primitives", program).boot()?;
    host.must(MORE_GRANTS)?;
    let output = host.must_within("RUST_BACKTRACE=1 xen_primitives", Bound::seconds(120))?;
    ensure!(output.lines().count() == 7 && output.lines().all(|line| line.starts_with("as expected: ")), "{output}");
    host.power_off()
}
