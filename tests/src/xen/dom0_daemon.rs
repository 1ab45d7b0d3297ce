//! Our daemon in dom0, and the commands that attach its disks to guests.

use anyhow::{Context, Result, ensure};
use mqblk_admin::model::{DiskStat, Stat};
use mqblk_test_bounds::Bound;
use serde_json::Value;

use super::domain::Domain;
use super::host::XenHost;
use super::image::SLOW_GROUP;
use crate::guest::Shell;

/// Path of the daemon's admin socket in dom0.
const ADMIN_SOCKET: &str = "/run/mqblk.sock";

/// Timeout for the daemon to start, to exit, and to change its devices.
const DAEMON_TIMEOUT: Bound = Bound::seconds(60);

/// `mqblk serve` in dom0. It ends with its host.
#[derive(Debug)]
pub struct Dom0Daemon {
    /// The type of the devices that it serves.
    type_name: &'static str,
    arguments: String,
}

impl Dom0Daemon {
    /// Starts `mqblk serve --xen-watch mqblk` with these further arguments, and waits until it listens.
    ///
    /// # Errors
    /// When it ends at once, or does not listen in time.
    pub fn serve(host: &mut XenHost, arguments: &str) -> Result<Self> {
        Self::serve_type(host, "mqblk", arguments)
    }

    /// As [`Dom0Daemon::serve`], for devices of another type: `vbd` are those that xl makes.
    ///
    /// # Errors
    /// As [`Dom0Daemon::serve`].
    pub fn serve_type(host: &mut XenHost, type_name: &'static str, arguments: &str) -> Result<Self> {
        let daemon = Self { type_name, arguments: arguments.to_owned() };
        daemon.launch(host)?;
        Ok(daemon)
    }

    fn launch(&self, host: &mut XenHost) -> Result<()> {
        host.must_within(
            &format!(
                "rm -f {ADMIN_SOCKET} /run/mqblk.exit /run/mqblk.pid
                 (! [ -d {SLOW_GROUP} ] || echo 0 >{SLOW_GROUP}/cgroup.procs
                  MQBLK_TEST_KEYS=1 mqblk serve --xen-watch {} --admin {ADMIN_SOCKET} {} & echo $! >/run/mqblk.new; mv /run/mqblk.new /run/mqblk.pid
                  wait $!; echo $? >/run/mqblk.exit) </dev/null >&4 2>&4 &
                 for i in $(seq 500); do
                     [ -S {ADMIN_SOCKET} ] && [ -e /run/mqblk.pid ] && exit 0
                     [ -e /run/mqblk.exit ] && {{ echo \"mqblk serve ended with $(cat /run/mqblk.exit)\"; exit 1; }}
                     sleep 0.1
                 done
                 echo 'no admin socket'; exit 1",
                self.type_name, self.arguments
            ),
            DAEMON_TIMEOUT,
        )
        .map(drop)
    }

    /// Kills it with SIGKILL.
    ///
    /// # Errors
    /// When it has ended before.
    pub fn kill(&self, host: &mut XenHost) -> Result<()> {
        self.end(host, "KILL", 137)
    }

    /// Ends the daemon by SIGTERM. It must exit with 0.
    ///
    /// # Errors
    /// When it has ended before, stays, or exits with another code.
    pub fn stop(self, host: &mut XenHost) -> Result<()> {
        self.end(host, "TERM", 0)
    }

    fn end(&self, host: &mut XenHost, signal: &str, status: i32) -> Result<()> {
        let script = format!(
            "kill -{signal} $(cat /run/mqblk.pid) || exit 1
             for i in $(seq 500); do [ -e /run/mqblk.exit ] && exec cat /run/mqblk.exit; sleep 0.1; done
             echo 'it is still there'; exit 1"
        );
        let found = host.must_within(&script, DAEMON_TIMEOUT)?;
        ensure!(found.trim() == status.to_string(), "after SIG{signal} mqblk exited with {found}, expected {status}");
        Ok(())
    }

    /// Restarts it after [`Dom0Daemon::kill`], with the same arguments.
    ///
    /// # Errors
    /// As [`Dom0Daemon::serve`].
    pub fn restart(&self, host: &mut XenHost) -> Result<()> {
        self.launch(host)
    }

    /// Checks that it runs.
    ///
    /// # Errors
    /// When it has ended.
    pub fn must_run(&self, host: &mut XenHost) -> Result<()> {
        host.must("kill -0 $(cat /run/mqblk.pid) && ! [ -e /run/mqblk.exit ]").map(drop).context("mqblk has ended")
    }

    /// Attaches a disk to a guest, and waits until it is connected: `params` is `file:PATH`, `null:SIZE` or
    /// `mqblk:DISK-ID`; `more` are further options.
    ///
    /// # Errors
    /// The command's.
    pub fn attach(&self, host: &mut XenHost, domain: &Domain, disk: &str, params: &str, more: &str) -> Result<()> {
        let id = domain.id();
        host.must(&format!("mqblk xen attach --wait 60 --domid {id} --vdev {disk} {more} {params}")).map(drop)
    }

    /// Detaches a disk from a guest, and waits until it is gone from xenstore.
    ///
    /// # Errors
    /// The command's.
    pub fn detach(&self, host: &mut XenHost, domain: &Domain, disk: &str) -> Result<()> {
        host.must_within(&format!("mqblk xen detach --wait 50 --domid {} --vdev {disk}", domain.id()), DAEMON_TIMEOUT)
            .map(drop)
    }

    /// Reports the current size of a disk to the guest; `more` may set another one, `--size SIZE`.
    ///
    /// # Errors
    /// The command's.
    pub fn resize(&self, host: &mut XenHost, domain: &Domain, disk: &str, more: &str) -> Result<()> {
        host.must(&format!("mqblk xen resize --domid {} --vdev {disk} {more}", domain.id())).map(drop)
    }

    /// Returns the devices of `mqblk xen list --json`.
    ///
    /// # Errors
    /// The command's.
    pub fn list(&self, host: &mut XenHost) -> Result<Vec<Value>> {
        let text = host.must(&format!("mqblk xen list --type {} --json", self.type_name))?;
        let json: Value = serde_json::from_str(&text).with_context(|| format!("mqblk xen list --json said: {text}"))?;
        json["devices"].as_array().cloned().with_context(|| format!("no devices in {text}"))
    }

    /// Returns the daemon's statistics.
    ///
    /// # Errors
    /// The command's.
    pub fn stat(&self, host: &mut XenHost) -> Result<Stat> {
        let text = host.must(&format!("mqblk stat --json --queues --socket {ADMIN_SOCKET}"))?;
        let mut line: Value = serde_json::from_str(&text).with_context(|| format!("mqblk stat --json said: {text}"))?;
        Ok(serde_json::from_value(line["stat"].take())?)
    }

    /// Returns the daemon's statistics of a disk, with its queues.
    ///
    /// # Errors
    /// As [`Dom0Daemon::stat`], and when it has no such disk.
    pub fn disk_stat(&self, host: &mut XenHost, id: &str) -> Result<DiskStat> {
        let stat = self.stat(host)?;
        let known: Vec<String> = stat.disks.iter().map(|disk| disk.id.clone()).collect();
        stat.disks.into_iter().find(|disk| disk.id == id).with_context(|| format!("no disk {id}, only {known:?}"))
    }
}
