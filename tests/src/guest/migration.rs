//! Migration of guests: to another QEMU, or to a file and back.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use mqblk_test_bounds::Bound;
use serde_json::{Value, json};

use super::machine::Guest;

/// Poll interval of a migration's state.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// State of a migration, from QMP's `query-migrate`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigrationStatus {
    /// Such as `active`, `completed`, `failed`, `cancelled`; `none` before the first.
    pub status: String,
    /// QEMU's whole response.
    pub details: Value,
}

impl MigrationStatus {
    /// Returns true if it has ended, with or without success.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.status.as_str(), "none" | "completed" | "failed" | "cancelled")
    }
}

impl Guest {
    /// Migrates the guest to `destination` ([`GuestBuilder::await_incoming`](super::GuestBuilder::await_incoming)) and
    /// waits until it runs there. Background scripts in the guest continue; use `destination` from now on. The source
    /// remains, stopped: [`Guest::quit`] it.
    ///
    /// # Errors
    /// QEMU's, and when the migration fails or takes longer than `within`.
    pub fn migrate_to(&mut self, destination: &mut Self, within: Bound) -> Result<()> {
        self.start_migration_to(destination)?;
        self.wait_migration_completed(within)?;
        destination.wait_qmp_event("RESUME", within)?;
        destination.continue_script_numbers_of(self);
        Ok(())
    }

    /// Starts a migration to `destination` without waiting. The guest meanwhile runs here.
    ///
    /// # Errors
    /// QEMU's.
    pub fn start_migration_to(&mut self, destination: &mut Self) -> Result<()> {
        let uri = format!("unix:{}", destination.folder().join("incoming").display());
        destination.listen_for_migration(&uri)?;
        self.start_migration(&uri)
    }

    /// Makes a destination listen at `uri` (such as `unix:PATH`), or read from it (`exec:COMMAND`).
    ///
    /// # Errors
    /// QEMU's, and when this was not started by [`GuestBuilder::await_incoming`](super::GuestBuilder::await_incoming).
    pub fn listen_for_migration(&mut self, uri: &str) -> Result<()> {
        self.migration_events()?;
        self.qmp().execute("migrate-incoming", json!({ "uri": uri })).map(drop)
    }

    /// Starts a migration to `uri` without waiting.
    ///
    /// # Errors
    /// QEMU's, such as that a device is not migratable.
    pub fn start_migration(&mut self, uri: &str) -> Result<()> {
        self.migration_events()?;
        self.qmp().execute("migrate", json!({ "uri": uri })).map(drop)
    }

    fn migration_events(&mut self) -> Result<()> {
        let events = json!([{ "capability": "events", "state": true }]);
        self.qmp().execute("migrate-set-capabilities", json!({ "capabilities": events })).map(drop)
    }

    /// Sets parameters of the next or current migration: QMP's `migrate-set-parameters`, such as `max-bandwidth` in
    /// bytes per second and `downtime-limit` in milliseconds.
    ///
    /// # Errors
    /// QEMU's.
    pub fn set_migration_parameters(&mut self, parameters: Value) -> Result<()> {
        self.qmp().execute("migrate-set-parameters", parameters).map(drop)
    }

    /// Returns the state of the outgoing migration.
    ///
    /// # Errors
    /// QEMU's.
    pub fn migration_status(&mut self) -> Result<MigrationStatus> {
        let details = self.qmp().execute("query-migrate", json!({}))?;
        let status = details["status"].as_str().unwrap_or("none").to_owned();
        Ok(MigrationStatus { status, details })
    }

    /// Waits until the outgoing migration has ended, with or without success.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn wait_migration_ended(&mut self, within: Bound) -> Result<MigrationStatus> {
        let mut deadline = within.begin();
        loop {
            let now = self.migration_status()?;
            if now.has_ended() {
                return Ok(now);
            }
            if deadline.has_passed() {
                bail!("the migration did not end within {within}: {}", now.details);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits until the outgoing migration has succeeded.
    ///
    /// # Errors
    /// When it fails or does not end in time.
    pub fn wait_migration_completed(&mut self, within: Bound) -> Result<MigrationStatus> {
        let mut deadline = within.begin();
        let ended = self.wait_migration_ended(within)?;
        ensure!(
            ended.status == "completed",
            "the migration ended as '{}': {}; QEMU says: {}",
            ended.status,
            ended.details,
            self.qemu_output()
        );
        // QEMU's migration thread reports "completed" before it enters the run state "postmigrate".
        while self.run_state()? == "finish-migrate" {
            ensure!(!deadline.has_passed(), "QEMU did not leave the run state finish-migrate within {within}");
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(ended)
    }

    /// Cancels the outgoing migration and waits until that is done. The guest continues here.
    ///
    /// # Errors
    /// QEMU's, and when the migration had already ended otherwise.
    pub fn cancel_migration(&mut self, within: Bound) -> Result<()> {
        self.qmp().execute("migrate_cancel", json!({}))?;
        let ended = self.wait_migration_ended(within)?;
        ensure!(ended.status == "cancelled", "the migration was to be cancelled: {}", ended.details);
        Ok(())
    }

    /// Stops the guest and saves its state to a file for [`Guest::restore`]. [`Guest::cont`] continues it here.
    ///
    /// # Errors
    /// QEMU's.
    pub fn save(&mut self, file: &Path, within: Bound) -> Result<()> {
        self.stop()?;
        // `file:` needs QEMU 8.2.
        self.start_migration(&format!("exec:cat >'{}'", file.display()))?;
        self.wait_migration_completed(within).map(drop)
    }

    /// Restores the state of `source` from a file, as a destination, and runs the guest.
    ///
    /// # Errors
    /// QEMU's.
    pub fn restore(&mut self, source: &Self, file: &Path, within: Bound) -> Result<()> {
        self.listen_for_migration(&format!("exec:cat '{}'", file.display()))?;
        let mut deadline = within.begin();
        while self.run_state()? == "inmigrate" {
            ensure!(!deadline.has_passed(), "the guest was not restored within {within}");
            std::thread::sleep(POLL_INTERVAL);
        }
        self.continue_script_numbers_of(source);
        // Saved stopped, so restored stopped.
        self.cont()
    }

    /// Stops the guest's CPUs, and waits until its devices are stopped too.
    ///
    /// # Errors
    /// QEMU's.
    pub fn stop(&mut self) -> Result<()> {
        self.qmp().execute("stop", json!({})).map(drop)
    }

    /// Lets the guest's CPUs run.
    ///
    /// # Errors
    /// QEMU's.
    pub fn cont(&mut self) -> Result<()> {
        self.qmp().execute("cont", json!({})).map(drop)
    }

    /// Returns the status of QMP's `query-status`, such as `running`, `paused`, `postmigrate`, `inmigrate`.
    ///
    /// # Errors
    /// QEMU's.
    pub fn run_state(&mut self) -> Result<String> {
        let status = self.qmp().execute("query-status", json!({}))?;
        Ok(status["status"].as_str().with_context(|| format!("query-status: {status}"))?.to_owned())
    }

    /// Waits for an event with any data, such as `STOP`, `RESUME` or `MIGRATION`.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn wait_qmp_event(&mut self, name: &str, within: Bound) -> Result<Value> {
        self.qmp().wait_event(name, within, |_| true)
    }

    /// Waits for the event `MIGRATION` with this status, such as `active`, `device` or `completed`.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn wait_migration_event(&mut self, status: &str, within: Bound) -> Result<Value> {
        self.qmp().wait_event("MIGRATION", within, |data| data["status"] == status)
    }
}
