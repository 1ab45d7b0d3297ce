//! The back-end under test.

use anyhow::{Context, Result, bail};

use super::domain::Domain;
use super::host::{XenHost, XenHostBuilder};
use super::image::Image;
use super::mqblk::Mqblk;
use crate::guest::Shell;

/// A program that serves disks to PV guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// Our own `mqblk serve` in dom0.
    Mqblk,
    /// The kernel's xen-blkback, to prove the tests themselves. It knows no options of ours.
    Kernel,
}

impl Server {
    /// The one named by `MQBLK_TEST_XEN_SERVER` (`mqblk` or `kernel`), else ours.
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

    /// A host whose dom0 has what this server needs.
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

/// A disk that a [`Backend`] is to serve: a loop device over an image in dom0.
#[derive(Debug, Clone)]
pub struct BackendDisk {
    id: String,
    image: Image,
    options: String,
}

impl BackendDisk {
    /// A disk of this image; `options` are further `key=value` of `mqblk serve --disk`, parted by commas.
    #[must_use]
    pub fn new(id: &str, image: &Image, options: &str) -> Self {
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

/// A running back-end with its disks.
#[derive(Debug)]
pub struct Backend {
    disks: Vec<BackendDisk>,
    mqblk: Option<Mqblk>,
}

impl Backend {
    /// Starts the server with these disks; guests get them by [`Backend::attach`].
    ///
    /// # Errors
    /// As [`Mqblk::serve`].
    pub fn start(server: Server, host: &mut XenHost, disks: &[BackendDisk]) -> Result<Self> {
        let mqblk = match server {
            Server::Mqblk => {
                let arguments: Vec<String> = disks.iter().map(BackendDisk::for_mqblk).collect();
                Some(Mqblk::serve(host, &arguments.join(" "))?)
            }
            Server::Kernel => None,
        };
        Ok(Self { disks: disks.to_vec(), mqblk })
    }

    /// Our daemon, when it is the one that is tested.
    #[must_use]
    pub fn mqblk(&self) -> Option<&Mqblk> {
        self.mqblk.as_ref()
    }

    fn disk(&self, id: &str) -> Result<&BackendDisk> {
        self.disks.iter().find(|disk| disk.id == id).with_context(|| format!("no disk '{id}' is served"))
    }

    /// Gives a guest the disk `id` by the name `name`, and waits until its driver shows it.
    ///
    /// # Errors
    /// The toolstack's, or a disk that does not come.
    pub fn attach(&self, host: &mut XenHost, domain: &mut Domain, name: &str, id: &str) -> Result<()> {
        match &self.mqblk {
            Some(mqblk) => mqblk.attach(host, domain, name, &format!("mqblk:{id}"), "")?,
            None => host.attach_kernel_disk(domain, name, self.disk(id)?.image.device(), "w")?,
        }
        domain.wait_disk(name)
    }

    /// [`Backend::attach`], but the guest may only read.
    ///
    /// # Errors
    /// As [`Backend::attach`].
    pub fn attach_readonly(&self, host: &mut XenHost, domain: &mut Domain, name: &str, id: &str) -> Result<()> {
        match &self.mqblk {
            Some(mqblk) => mqblk.attach(host, domain, name, &format!("mqblk:{id}"), "--readonly")?,
            None => host.attach_kernel_disk(domain, name, self.disk(id)?.image.device(), "r")?,
        }
        domain.wait_disk(name)
    }

    /// Takes a disk from a guest and waits until its driver has let go of it.
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

    /// Tells the guest that the disk's device has another size.
    ///
    /// # Errors
    /// The command's.
    pub fn resized(&self, host: &mut XenHost, domain: &mut Domain, name: &str) -> Result<()> {
        match &self.mqblk {
            Some(mqblk) => mqblk.resize(host, domain, name, ""),
            // xen-blkback looks at the size whenever it looks at a ring.
            None => {
                domain.must(&format!("dd if=/dev/{name} of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null")).map(drop)
            }
        }
    }

    /// Ends the server, which must go well.
    ///
    /// # Errors
    /// As [`Mqblk::stop`].
    pub fn stop(self, host: &mut XenHost) -> Result<()> {
        match self.mqblk {
            Some(mqblk) => mqblk.stop(host),
            None => Ok(()),
        }
    }
}
