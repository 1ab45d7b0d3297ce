//! The `mqblk` binary as a process that serves disks to domains.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use mqblk_admin::model::Stat;
use mqblk_admin::{Client, StatQuery};
use rustix::process::{Pid, Signal, kill_process};

use super::wait_for;
use crate::log_end::log_end;

/// Device type in xenstore that the daemon watches.
pub const DEVICE_TYPE: &str = "mqblk-loopback";

/// Returns the journal files of the daemon in `folder`.
///
/// # Errors
/// When they cannot be listed.
pub fn journal_files(folder: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder.join("journals"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        // Each device type also has a lock file there.
        if !name.ends_with(".lock") {
            all.push(name);
        }
    }
    all.sort();
    Ok(all)
}

/// Name of the admin socket.
const ADMIN_SOCKET: &str = "admin.sock";

/// A daemon. Killed on drop, unless [`stop`](Self::stop) was called.
#[derive(Debug)]
pub struct LoopbackDaemon {
    child: Child,
    folder: PathBuf,
    /// Substrings of the lines in `/proc/PID/maps` that are pages of the hostile domain.
    foreign: Vec<String>,
}

/// Resources of the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopbackDaemonResources {
    /// Open file descriptors.
    pub descriptors: usize,
    /// Names of the threads, without the kernel's io_uring workers, which come and go.
    pub threads: Vec<String>,
    /// Mappings of the hostile domain's pages.
    pub foreign_mappings: usize,
    /// Journal files.
    pub journals: Vec<String>,
}

impl LoopbackDaemonResources {
    /// Returns true if the daemon holds nothing beyond `expected`. It may hold less: `expected` may date from a time
    /// when a thread was ending, or had no name yet.
    fn is_within(&self, expected: &LoopbackDaemonResources) -> bool {
        let number = |of: &[String], name: &String| of.iter().filter(|other| *other == name).count();
        let within = |now: &[String], all: &[String]| now.iter().all(|name| number(now, name) <= number(all, name));
        self.descriptors <= expected.descriptors
            && within(&self.threads, &expected.threads)
            && self.foreign_mappings <= expected.foreign_mappings
            && within(&self.journals, &expected.journals)
    }
}

impl LoopbackDaemon {
    /// Starts `program` in `folder`. `xen` is the value of `--xen`, `disks` are those of `--disk`, and `foreign` are
    /// substrings of the names of the hostile domain's pages in `/proc/PID/maps`.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(
        program: &Path,
        folder: &Path,
        xen: &str,
        disks: &[String],
        foreign: &[&str],
    ) -> Result<LoopbackDaemon> {
        let log = File::create(folder.join("log"))?;
        let mut command = Command::new(program);
        // All disks share one worker.
        command.args(["serve", "--workers", "1", "--xen", xen, "--xen-watch", DEVICE_TYPE]);
        command.arg("--xen-state").arg(folder.join("journals"));
        command.arg("--admin").arg(folder.join(ADMIN_SOCKET));
        // The sandbox has only the files of a real Xen, and existing folders.
        if Path::new(xen).is_absolute() {
            std::fs::create_dir_all(folder.join("journals"))?;
            command.args(["--sandbox", "on", "--sandbox-allow", &format!("{}:{xen}", folder.display())]);
        }
        disks.iter().for_each(|disk| _ = command.args(["--disk", disk]));
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().with_context(|| format!("starting {}", program.display()))?;
        let foreign = foreign.iter().map(|part| (*part).to_owned()).collect();
        let mut daemon = LoopbackDaemon { child, folder: folder.to_owned(), foreign };
        wait_for("the daemon's admin socket", || {
            daemon.must_run()?;
            Ok(daemon.folder.join(ADMIN_SOCKET).exists().then_some(()))
        })?;
        Ok(daemon)
    }

    /// Returns the last lines of its log.
    pub fn log(&self) -> String {
        log_end(&std::fs::read_to_string(self.folder.join("log")).unwrap_or_default())
    }

    /// Checks that it runs.
    ///
    /// # Errors
    /// When it has ended.
    pub fn must_run(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("the daemon ended with {status}:\n{}", self.log()),
            None => Ok(()),
        }
    }

    /// Returns its current resources.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn resources(&self) -> Result<LoopbackDaemonResources> {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let maps = std::fs::read_to_string(proc.join("maps"))?;
        let is_foreign = |line: &&str| self.foreign.iter().any(|part| line.contains(part));
        let mut threads = Vec::new();
        for entry in std::fs::read_dir(proc.join("task"))? {
            // The thread may have ended meanwhile.
            let name = std::fs::read_to_string(entry?.path().join("comm")).unwrap_or_default();
            if !name.is_empty() && !name.starts_with("iou-") {
                threads.push(name.trim_end().to_owned());
            }
        }
        threads.sort();
        Ok(LoopbackDaemonResources {
            descriptors: std::fs::read_dir(proc.join("fd"))?.count(),
            threads,
            foreign_mappings: maps.lines().filter(is_foreign).count(),
            journals: journal_files(&self.folder)?,
        })
    }

    /// Returns its resources once they are stable.
    ///
    /// # Errors
    /// When they keep changing.
    pub fn stable_resources(&self) -> Result<LoopbackDaemonResources> {
        let mut last = (self.resources()?, 0);
        wait_for("the daemon's rest", || {
            std::thread::sleep(super::QUIET_TIME);
            let now = self.resources()?;
            last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
            Ok((last.1 == 3).then(|| last.0.clone()))
        })
    }

    /// Waits until it holds no more than `expected`.
    ///
    /// # Errors
    /// On timeout.
    pub fn wait_for_resources(&self, expected: &LoopbackDaemonResources) -> Result<()> {
        let mut last = None;
        wait_for("the daemon lets go", || {
            let now = self.resources()?;
            let same = now.is_within(expected);
            last = Some(now);
            Ok(same.then_some(()))
        })
        .with_context(|| format!("the daemon holds {last:?}, expected at most {expected:?}"))
    }

    /// Returns its statistics.
    ///
    /// # Errors
    /// When it does not respond.
    pub fn stat(&self) -> Result<Stat> {
        Ok(Client::connect(&self.folder.join(ADMIN_SOCKET))?.stat(&StatQuery::default())?)
    }

    /// Stops it with SIGTERM, and checks its exit.
    ///
    /// # Errors
    /// When it does not end, or fails.
    pub fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let status = wait_for("the daemon's end", || Ok(self.child.try_wait()?))?;
        ensure!(status.success(), "the daemon ended with {status}:\n{}", self.log());
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        ensure!(!log.contains("panicked at"), "the daemon panicked:\n{log}");
        Ok(())
    }
}

impl Drop for LoopbackDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
