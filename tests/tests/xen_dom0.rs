//! dom0 alone on a real Xen, playing both ends: what our crates make of xenstore, grants and event channels, and what our daemon
//! makes of hostile frontends.
//!
//! One test at a time, and only after tests/xen/prepare.sh: see tests/src/xen.

use std::time::Duration;

use anyhow::{Result, ensure};
use mqblk_tests::guest::Shell;
use mqblk_tests::xen::{XenHost, XenHostBuilder};

/// A frontend's pages come from gntalloc, which gives 1024 by itself.
const MORE_GRANTS: &str = "echo 8192 >/sys/module/xen_gntalloc/parameters/limit";

fn boot(builder: XenHostBuilder) -> Result<XenHost> {
    let mut host = builder.boot()?;
    host.must(MORE_GRANTS)?;
    Ok(host)
}

#[test]
fn xenstore_grants_and_event_channels() -> Result<()> {
    let program = env!("CARGO_BIN_EXE_xen_primitives");
    let mut host = boot(XenHost::builder("dom0").with_program("xen_primitives", program))?;
    let output = host.must_within("RUST_BACKTRACE=1 xen_primitives", Duration::from_secs(120))?;
    ensure!(output.lines().count() == 7 && output.lines().all(|line| line.starts_with("as expected: ")), "{output}");
    host.power_off()
}

/// Every layout and every rule that can be broken: `tests/src/loopback`.
#[test]
fn hostile_frontends() -> Result<()> {
    let program = env!("CARGO_BIN_EXE_xen_loopback");
    let mut host = boot(XenHost::builder("hostile").with_mqblk().with_program("xen_loopback", program))?;
    // What it prints goes to the log, so that it is there when the limit is reached.
    let answer =
        host.run_within("set -o pipefail; xen_loopback /sbin/mqblk 2>&1 | tee /dev/fd/4", Duration::from_secs(400))?;
    ensure!(answer.status == 0, "exit status {}:\n{}", answer.status, answer.output);
    let passed = answer.output.lines().filter(|line| line.starts_with("PASS ")).count();
    ensure!(passed >= 30, "{passed} scenarios have run:\n{}", answer.output);
    host.power_off()
}
