//! The Xen host: the backend of its devices, and the devices created at start.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mqblk_blkif::GrantBudget;
use mqblk_core::MappingBudget;
use mqblk_engine::Engine;
use mqblk_memory::DomainId;
use mqblk_xen::{Xen, XenError};
use mqblk_xen_server::toolstack::{self, AttachResult, NewDevice, ToolstackError};
use mqblk_xen_server::{Backend, BackendError, BackendOptions, DEVICE_CHECKS, DeviceName, Params};

use super::config::{XenAttachment, XenConfig, XenDiskConfig, XenEndpoint, queue_settings, vbd_settings};
use super::devices::XenDevices;
use super::opener::DiskOpener;
use super::selector::XenSelector;
use crate::disk_list::DiskConfig;
use crate::interface::HostContext;

/// Grant mappings that Xen tracks for a domain by default: `gnttab_max_maptrack_frames` of 1024, each with 256 entries.
const MAPTRACK: u64 = 1024 * 256;

/// The kernel's drivers of backends, by type: `vbd` is xen-blkback.
const KERNEL_DRIVERS: &str = "/sys/bus/xen-backend/drivers";

/// Errors of the backend's start.
#[derive(Debug, thiserror::Error)]
pub(super) enum XenStartError {
    /// There is no Xen.
    #[error("serve: xen: {0}")]
    Xen(#[from] XenError),
    /// The kernel serves the same devices.
    #[error(
        "serve: xen-watch: found type {0:?}, whose devices a driver of the kernel serves ({KERNEL_DRIVERS}/{0}), \
         expected none (for vbd: rmmod xen-blkback)"
    )]
    KernelDriver(String),
    /// The backend failed to start.
    #[error("serve: xen: {0}")]
    Backend(#[from] BackendError),
    /// A disk could not be attached.
    #[error("disk {id:?}: {source}")]
    Attach {
        /// The disk's id.
        id: String,
        /// The cause.
        source: ToolstackError,
    },
}

/// A running Xen backend.
pub(super) struct XenHost {
    xen: Arc<dyn Xen>,
    backend: Arc<Backend>,
    opener: Arc<DiskOpener>,
    engine: Arc<Engine>,
    type_name: String,
}

impl XenHost {
    /// Starts to serve `disks`, and the devices of the configuration.
    ///
    /// # Errors
    /// If there is no Xen, or it refuses. Everything is undone then.
    pub(super) fn start(
        config: &XenConfig,
        disks: &[Arc<XenDiskConfig>],
        context: &HostContext,
    ) -> Result<XenHost, XenStartError> {
        let xen = config.host.connect()?;
        let is_simulated = matches!(config.host, XenSelector::Simulated(_));
        if !is_simulated && Path::new(KERNEL_DRIVERS).join(&config.type_name).exists() {
            return Err(XenStartError::KernelDriver(config.type_name.clone()));
        }
        let budget = match config.mapped_pages {
            Some(pages) => GrantBudget::new(pages, MappingBudget::of_process()),
            None => GrantBudget::for_host(MAPTRACK, MappingBudget::of_process()),
        };
        let default = (vbd_settings(&config.default_endpoint, false), queue_settings(&config.default_endpoint));
        let opener = Arc::new(DiskOpener::new(config.watch, default, disks, context));
        let options = BackendOptions {
            type_name: config.type_name.clone(),
            engine: Arc::clone(&context.engine),
            opener: Arc::clone(&opener) as _,
            budget,
            journal_dir: config.state.clone(),
            exclusive: config.watch,
            rate_limit: DEVICE_CHECKS,
            drain_timeout: context.drain_timeout,
        };
        let backend = Arc::new(Backend::start(Arc::clone(&xen), options)?);
        tracing::info!(xen = %config.host, r#type = config.type_name, watch = config.watch, "xen backend");
        let engine = Arc::clone(&context.engine);
        Ok(XenHost { xen, backend, opener, engine, type_name: config.type_name.clone() })
    }

    /// Creates the devices of the disks that are attached at start.
    ///
    /// # Errors
    /// If a device cannot be created. Those created before are removed again.
    pub(super) fn attach(&self, disks: &[Arc<XenDiskConfig>]) -> Result<(), XenStartError> {
        let mut created = Vec::new();
        for disk in disks.iter().map(|disk| &disk.config) {
            let Some(XenAttachment { domid, devid }) = disk.endpoint.attachment else { continue };
            let name = DeviceName { type_name: self.type_name.clone(), frontend_id: DomainId(domid), devid };
            match self.attach_one(disk, &name) {
                Ok(AttachResult::Created) => created.push(name),
                Ok(AttachResult::Existing) => tracing::debug!(device = %name, "was attached already"),
                Err(source) => {
                    for name in created {
                        self.detach(&name);
                    }
                    return Err(XenStartError::Attach { id: disk.id.clone(), source });
                }
            }
        }
        Ok(())
    }

    /// Offers a disk that was out at the start, also to devices that wait for it, and creates the device of its
    /// configuration.
    ///
    /// # Errors
    /// If the device cannot be created.
    pub(super) fn add(&self, disk: &Arc<XenDiskConfig>) -> Result<(), XenStartError> {
        self.opener.offer(disk);
        self.attach(std::slice::from_ref(disk)).inspect_err(|_| self.opener.withdraw(&disk.config.id))?;
        self.backend.scan();
        Ok(())
    }

    fn attach_one(&self, disk: &DiskConfig<XenEndpoint>, name: &DeviceName) -> Result<AttachResult, ToolstackError> {
        let params = Params::Disk(disk.id.clone()).to_string();
        let device = NewDevice { name: name.clone(), params, read_only: disk.storage.disk.geometry().read_only };
        let mut store = self.xen.store()?;
        toolstack::attach(&mut store, self.xen.domain(), &device)
    }

    fn detach(&self, name: &DeviceName) {
        let removed = self
            .xen
            .store()
            .map_err(ToolstackError::from)
            .and_then(|mut store| toolstack::detach(&mut store, self.xen.domain(), name, Duration::ZERO, true));
        if let Err(error) = removed {
            tracing::warn!(device = %name, %error, "cannot remove what was attached");
        }
    }

    /// Returns a handle to its devices.
    pub(super) fn devices(&self) -> XenDevices {
        XenDevices::new(Arc::clone(&self.xen), Arc::clone(&self.backend), Arc::clone(&self.engine))
    }

    pub(super) fn backend(&self) -> &Backend {
        &self.backend
    }
}
