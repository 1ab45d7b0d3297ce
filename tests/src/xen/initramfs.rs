//! Additions to dom0's initramfs for one boot: the programs under test with their libraries.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::guest::program_disk::libraries;

/// Writes `archive`: the cpio archive `base`, then one with `programs` in /sbin by these names, and their shared
/// libraries. The kernel unpacks both in order.
pub(crate) fn with_programs(base: &Path, programs: &[(String, PathBuf)], archive: &Path) -> Result<()> {
    let root = tempfile::Builder::new().prefix("mqblk-overlay-").tempdir()?;
    let place = |path: &str| -> Result<PathBuf> {
        let target = root.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(target.parent().context("a path below the root")?)?;
        Ok(target)
    };
    for (name, program) in programs {
        // Debug information is most of the file, and an emulated machine unpacks slowly.
        let mut strip = Command::new("strip");
        strip.arg("-o").arg(place(&format!("/sbin/{name}"))?).arg(program);
        run(strip, &[])?;
        for library in libraries(program)? {
            std::fs::copy(&library, place(&library)?).with_context(|| library.clone())?;
        }
    }
    let mut find = Command::new("find");
    find.arg(".").current_dir(root.path());
    let files = run(find, &[])?;
    let mut cpio = Command::new("cpio");
    cpio.args(["--quiet", "-o", "-H", "newc", "-R", "0:0"]).current_dir(root.path());
    let more = run(cpio, &files)?;

    std::fs::copy(base, archive).with_context(|| format!("cannot copy {}", base.display()))?;
    File::options().append(true).open(archive)?.write_all(&more)?;
    Ok(())
}

/// Runs a command to its end and returns its output.
fn run(mut command: Command, input: &[u8]) -> Result<Vec<u8>> {
    let name = command.get_program().display().to_string();
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run {name}"))?;
    // A list of a few file names fits into the pipe.
    child.stdin.take().context("stdin is a pipe")?.write_all(input)?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{name}: {}", output.status);
    Ok(output.stdout)
}
