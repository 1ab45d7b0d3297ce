//! Hostile frontends in the first domain of a real Xen, against a daemon in the same domain.
//!
//! `xen_loopback MQBLK [NAME...]` runs the scenarios whose names contain one of the words (all, without words) against
//! the program `MQBLK`, as root. Prints a line for each, `PASS`, or `FAIL` with the reason; the exit code is 1 if any
//! has failed.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use mqblk_tests::loopback::fixture::LoopbackFixture;
use mqblk_tests::loopback::scenarios::SCENARIOS;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(program) = args.next() else {
        say("FAIL: found no argument, expected xen_loopback MQBLK [NAME...]");
        return ExitCode::from(2);
    };
    let words: Vec<String> = args.collect();
    match run(Path::new(&program), &words) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            say(&format!("{failed} failed"));
            ExitCode::FAILURE
        }
        Err(error) => {
            say(&format!("FAIL {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Returns the number of failed scenarios.
fn run(program: &Path, words: &[String]) -> Result<u32> {
    let start = Instant::now();
    let mut fixture = LoopbackFixture::real(program).context("setting up")?;
    say(&format!("set up in {:.1} s", start.elapsed().as_secs_f64()));
    let (mut passed, mut failed) = (0, 0);
    for scenario in SCENARIOS.iter().filter(|scenario| !scenario.simulated) {
        if !words.is_empty() && !words.iter().any(|word| scenario.name.contains(word.as_str())) {
            continue;
        }
        let start = Instant::now();
        let result = fixture.run(scenario);
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(()) => {
                passed += 1;
                say(&format!("PASS {} ({seconds:.1} s)", scenario.name));
            }
            Err(error) => {
                failed += 1;
                say(&format!("FAIL {} ({seconds:.1} s): {error:#}", scenario.name));
            }
        }
    }
    let verified = fixture.finish().context("the end")?;
    say(&format!("{passed} passed, {failed} failed, {verified} blocks of the good disk verified"));
    Ok(failed)
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The console may be closed.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
