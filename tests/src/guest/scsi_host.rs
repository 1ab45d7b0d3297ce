//! The server of the SCSI tests' controllers: our daemon, or QEMU's own emulation to validate the tests.

use anyhow::{Context, Result};

use super::builder::GuestBuilder;
use super::controller::{ControllerConfig, GuestController, LunConfig};
use super::daemon::{DaemonProgram, StoppedDaemon, VhostUserDaemon};
use super::machine::Guest;

/// Serves controllers.
#[derive(Debug)]
pub struct ScsiHost {
    /// `None`: QEMU emulates the disks.
    daemon: Option<VhostUserDaemon>,
    controllers: Vec<ControllerConfig>,
}

impl ScsiHost {
    /// Starts our daemon with these controllers. With `MQBLK_TEST_SERVER=qemu-storage-daemon` there is none: the
    /// guest's QEMU emulates them.
    ///
    /// # Errors
    /// As [`VhostUserDaemon::start_controllers`].
    pub fn start(controllers: Vec<ControllerConfig>) -> Result<Self> {
        let daemon = match DaemonProgram::from_environment()? {
            DaemonProgram::Mqblk => Some(VhostUserDaemon::start_controllers(&controllers)?),
            DaemonProgram::QemuStorageDaemon => None,
        };
        Ok(Self { daemon, controllers })
    }

    /// Returns true if our daemon serves.
    #[must_use]
    pub fn is_mqblk(&self) -> bool {
        self.daemon.is_some()
    }

    /// Returns our daemon.
    ///
    /// # Errors
    /// When QEMU serves.
    pub fn daemon(&mut self) -> Result<&mut VhostUserDaemon> {
        self.daemon.as_mut().context("QEMU serves these disks, not our daemon")
    }

    /// Returns the guest's device for the controller `id`, with the same number of queues.
    ///
    /// # Errors
    /// When QEMU serves and does not support a LUN.
    pub fn controller(&self, id: &str) -> Result<GuestController> {
        let controller = self.find(id)?;
        match &self.daemon {
            Some(daemon) => Ok(GuestController::vhost_user(id, &daemon.socket(id), controller.queues)),
            None => GuestController::of_qemu(controller),
        }
    }

    /// Configures a guest with all the controllers.
    ///
    /// # Errors
    /// As [`ScsiHost::controller`].
    pub fn guest(&self) -> Result<GuestBuilder> {
        let mut builder = Guest::builder();
        for controller in &self.controllers {
            builder = builder.controller(self.controller(&controller.id)?);
        }
        Ok(builder)
    }

    fn find(&self, id: &str) -> Result<&ControllerConfig> {
        self.controllers.iter().find(|one| one.id == id).with_context(|| format!("no controller {id}"))
    }

    /// Adds a LUN to a controller that a guest uses.
    ///
    /// # Errors
    /// The server's.
    pub fn add_lun(&self, guest: &mut Guest, controller: &str, lun: &LunConfig) -> Result<()> {
        match &self.daemon {
            Some(daemon) => daemon.run_verb(&["lun", "add"], &[&lun.for_mqblk(controller)]).map(drop),
            None => guest.add_qemu_lun(controller, lun),
        }
    }

    /// Removes a LUN from a controller that a guest uses.
    ///
    /// # Errors
    /// The server's.
    pub fn remove_lun(&self, guest: &mut Guest, controller: &str, lun: &LunConfig) -> Result<()> {
        let Some(daemon) = &self.daemon else { return guest.remove_qemu_lun(lun) };
        daemon.run_verb(&["lun", "remove"], &words(&lun_address_arguments(controller, lun))).map(drop)
    }

    /// Resizes a LUN's image in use; `None`: our daemon queries the current size.
    ///
    /// # Errors
    /// The server's.
    pub fn resize_lun(&self, guest: &mut Guest, controller: &str, lun: &LunConfig, bytes: Option<u64>) -> Result<()> {
        let Some(daemon) = &self.daemon else {
            return guest.resize_qemu_lun(lun, bytes.context("QEMU does not look for itself")?);
        };
        let mut which = lun_address_arguments(controller, lun);
        which.push("--shrink".to_owned());
        if let Some(bytes) = bytes {
            which.extend(["--size".to_owned(), bytes.to_string()]);
        }
        daemon.run_verb(&["lun", "resize"], &words(&which)).map(drop)
    }

    /// Checks that the daemon runs.
    ///
    /// # Errors
    /// When it has ended, with its output.
    pub fn must_run(&mut self) -> Result<()> {
        self.daemon.as_mut().map_or(Ok(()), VhostUserDaemon::must_run)
    }

    /// Stops the daemon as [`VhostUserDaemon::stop`] does. Returns `None` if there is none.
    ///
    /// # Errors
    /// As [`VhostUserDaemon::stop`].
    pub fn stop(self) -> Result<Option<StoppedDaemon>> {
        self.daemon.map(VhostUserDaemon::stop).transpose()
    }
}

/// Returns the address of a LUN, in the options of `mqblk lun`.
fn lun_address_arguments(controller: &str, lun: &LunConfig) -> Vec<String> {
    let options =
        [("--controller", controller.to_owned()), ("--target", lun.target.to_string()), ("--lun", lun.lun.to_string())];
    options.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect()
}

fn words(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}
