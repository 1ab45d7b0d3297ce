//! Measures the slowness of this machine and prints the value of `MQBLK_TEST_SLOWNESS` for the test programs.
#![forbid(unsafe_code)]

use std::io::Write;

use mqblk_test_bounds::Slowness;

fn main() -> std::io::Result<()> {
    writeln!(std::io::stdout(), "{}", Slowness::measured().to_variable())
}
