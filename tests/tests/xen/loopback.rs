//! Hostile frontends on a real Xen: the scenarios of `tests/tests/blkif/hostile.rs`, in dom0 against a daemon in dom0.

use anyhow::{Result, ensure};
use mqblk_test_bounds::Bound;
use mqblk_tests::guest::Shell;
use mqblk_tests::loopback::scenarios::SCENARIOS;
use mqblk_tests::xen::XenHost;

/// Timeout of all scenarios: emulation on an idle machine needs a quarter of it.
const WITHIN: Bound = Bound::seconds(700);

#[test]
#[ignore = "long: make soak, make test-xen"]
fn hostile_frontends_in_dom0() -> Result<()> {
    let builder = XenHost::builder("loopback").with_mqblk();
    let mut host = builder.with_program("xen_loopback", env!("CARGO_BIN_EXE_xen_loopback")).boot()?;
    // Descriptor 4 writes to target/test-logs, line by line. It is a port that can be opened only once, so not by tee.
    let script = "RUST_BACKTRACE=1 xen_loopback /sbin/mqblk 2>&4 | while read -r line; do echo \"$line\" >&4; echo \"$line\"; done";
    let output = host.must_within(script, WITHIN)?;
    print(&output);
    let passed = output.lines().filter(|line| line.starts_with("PASS ")).count();
    let expected = SCENARIOS.iter().filter(|scenario| !scenario.simulated).count();
    ensure!(passed == expected && !output.contains("FAIL"), "{passed} of {expected} scenarios passed:\n{output}");
    host.power_off()
}

/// Shown with `--nocapture`.
#[expect(clippy::print_stdout, reason = "what is printed this way the test program may hold back")]
fn print(output: &str) {
    println!("\n{output}");
}
