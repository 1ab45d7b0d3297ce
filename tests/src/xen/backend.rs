//! The backend under test.

use anyhow::{Context, Result, bail};

use super::dom0_daemon::Dom0Daemon;
use super::domain::Domain;
use super::host::{XenHost, XenHostBuilder};
use super::image::Dom0Image;
use crate::guest::Shell;

/// A program that serves disks to PV guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendProgram {
    /// Our own `mqblk serve` in dom0.
    Mqblk,
    /// The kernel's xen-blkback, to validate the tests. It ignores the options of our daemon.
    Kernel,
}

impl BackendProgram {
    /// Returns the one named by `MQBLK_TEST_XEN_SERVER` (`mqblk` or `kernel`), else ours.
    ///
    /// # Errors
    /// A bad value of the variable.
    pub fn from_environment() -> Result<Self> {
        match std::env::var("MQBLK_TEST_XEN_SERVER").ok().as_deref() {
            None | Some("mqblk") => Ok(Self::Mqblk),
            Some("kernel") => Ok(Self::Kernel),
            Some(other) => bail!("MQBLK_TEST_XEN_SERVER is '{other}', expected mqblk or kernel"),
        }
    }

    /// Boots a host whose dom0 has the prerequisites of this backend.
    ///
    /// # Errors
    /// As [`XenHostBuilder::boot`].
    pub fn boot(self, builder: XenHostBuilder) -> Result<XenHost> {
        match self {
            Self::Mqblk => builder.with_mqblk().boot(),
            Self::Kernel => builder.boot(),
        }
    }
}

/// Configuration of a disk that a [`XenBackend`] serves: a loop device over an image in dom0.
#[derive(Debug, Clone)]
pub struct BackendDisk {
    id: String,
    image: Dom0Image,
    options: String,
}

impl BackendDisk {
    /// Configures a disk with this image; `options` are further keys of `mqblk serve --disk`, separated by commas.
    #[must_use]
    pub fn new(id: &str, image: &Dom0Image, options: &str) -> Self {
        Self { id: id.to_owned(), image: image.clone(), options: options.to_owned() }
    }

    fn for_mqblk(&self) -> String {
        let mut text = format!("--disk id={},interface=xen,path={}", self.id, self.image.device());
        if !self.options.is_empty() {
            text.push(',');
            text.push_str(&self.options);
        }
        text
    }
}

/// A running backend with its disks.
#[derive(Debug)]
pub struct XenBackend {
    disks: Vec<BackendDisk>,
    mqblk: Option<Dom0Daemon>,
}

impl XenBackend {
    /// Starts the backend with these disks; [`XenBackend::attach`] gives them to guests.
    ///
    /// # Errors
    /// As [`Dom0Daemon::serve`].
    pub fn start(server: BackendProgram, host: &mut XenHost, disks: &[BackendDisk]) -> Result<Self> {
        let mqblk = match server {
            BackendProgram::Mqblk => {
                let arguments: Vec<String> = disks.iter().map(BackendDisk::for_mqblk).collect();
                Some(Dom0Daemon::serve(host, &arguments.join(" "))?)
            }
            BackendProgram::Kernel => None,
        };
        Ok(Self { disks: disks.to_vec(), mqblk })
    }

    /// Returns our daemon, if it is the one under test.
    #[must_use]
    pub fn mqblk(&self) -> Option<&Dom0Daemon> {
        self.mqblk.as_ref()
    }

    fn disk(&self, id: &str) -> Result<&BackendDisk> {
        self.disks.iter().find(|disk| disk.id == id).with_context(|| format!("no disk '{id}' is served"))
    }

    /// Attaches the disk `id` to a guest as `name`, and waits until its driver has it.
    ///
    /// # Errors
    /// The toolstack's, or a disk that does not appear.
    pub fn attach(&self, host: &mut XenHost, domain: &mut Domain, name: &str, id: &str) -> Result<()> {
        match &self.mqblk {
            Some(mqblk) => mqblk.attach(host, domain, name, &format!("mqblk:{id}"), "")?,
            None => host.attach_kernel_disk(domain, name, self.disk(id)?.image.device(), "w")?,
        }
        domain.wait_disk(name)
    }

    /// Attaches a disk read-only, as [`XenBackend::attach`].
    ///
    /// # Errors
    /// As [`XenBackend::attach`].
    pub fn attach_readonly(&self, host: &mut XenHost, domain: &mut Domain, name: &str, id: &str) -> Result<()> {
        match &self.mqblk {
            Some(mqblk) => mqblk.attach(host, domain, name, &format!("mqblk:{id}"), "--readonly")?,
            None => host.attach_kernel_disk(domain, name, self.disk(id)?.image.device(), "r")?,
        }
        domain.wait_disk(name)
    }

    /// Detaches a disk from a guest and waits until its driver has released it.
    ///
    /// # Errors
    /// The toolstack's, or a disk that stays.
    pub fn detach(&self, host: &mut XenHost, domain: &mut Domain, name: &str) -> Result<()> {
        match &self.mqblk {
            Some(mqblk) => mqblk.detach(host, domain, name)?,
            None => host.detach_kernel_disk(domain, name)?,
        }
        domain.wait_no_disk(name)
    }

    /// Reports the new size of the disk's device to the guest.
    ///
    /// # Errors
    /// The command's.
    pub fn report_new_size(&self, host: &mut XenHost, domain: &mut Domain, name: &str) -> Result<()> {
        match &self.mqblk {
            Some(mqblk) => mqblk.resize(host, domain, name, ""),
            // xen-blkback checks the size whenever it processes a ring.
            None => {
                domain.must(&format!("dd if=/dev/{name} of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null")).map(drop)
            }
        }
    }

    /// Stops the backend, which must succeed.
    ///
    /// # Errors
    /// As [`Dom0Daemon::stop`].
    pub fn stop(self, host: &mut XenHost) -> Result<()> {
        match self.mqblk {
            Some(mqblk) => mqblk.stop(host),
            None => Ok(()),
        }
    }
}
