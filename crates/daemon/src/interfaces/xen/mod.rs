//! Xen blkif: a disk is attached to a guest by the configuration or by a toolstack.

mod config;
mod devices;
mod disk_use;
mod host;
mod keys;
mod opener;
pub mod selector;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mqblk_core::lock::RankedMutex;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_engine::AnyDisk;
use mqblk_xen_server::Backend;

use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::cpus::Cpus;
use crate::disk_list::{DiskConfig, DiskKeys, Endpoint as _};
use crate::file_use::FileUse;
use crate::interface::{
    ConfiguredInterface, DiskTable, GuestInterface, HostContext, InterfaceKeys, IsTaken, ListPosition, ResolveContext,
    ServedDevice, ServedInterface, StartFailure, UnassignedQueues,
};
use crate::new_disk::NewDisk;
use crate::out::{Admission, open_all};
use crate::queues::{self, workers_of};
use crate::storage_backends::StorageBackends;
use config::{WORD, XenConfig, XenDiskConfig, XenEndpoint};
use devices::{ToolstackDevice, XenDisk};
use host::XenHost;

/// Longest wait for the backend's pause. The backend observes at most one device before, which takes xenstore's time.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Xen blkif.
#[derive(Debug)]
pub struct XenInterface;

impl GuestInterface for XenInterface {
    fn word(&self) -> &'static str {
        WORD
    }

    fn process_keys(&self) -> &'static [&'static Key] {
        keys::PROCESS_KEYS
    }

    fn serving_key(&self) -> Option<&'static Key> {
        Some(&keys::XEN_WATCH)
    }

    fn disk_keys(&self) -> &'static [&'static [&'static Key]] {
        &[keys::KEYS, queues::KEYS]
    }

    fn keys(&self) -> Box<dyn InterfaceKeys> {
        Box::new(XenKeys::default())
    }
}

/// The keys of all disks, and of the host if there is one.
#[derive(Default)]
struct XenKeys {
    disks: Vec<DiskKeys<XenEndpoint>>,
    host: Option<XenConfig>,
}

impl InterfaceKeys for XenKeys {
    fn take_disk(&mut self, disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.disks.push(DiskKeys::take(disk, context)?);
        Ok(())
    }

    fn take_process(&mut self, process: &mut Settings, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.host = keys::take_host(process, context.cpus, !self.disks.is_empty())?;
        Ok(())
    }

    /// Devices outside the configuration have as many rings as there are CPUs.
    fn expected_queues(&self, cpus: &Cpus) -> u64 {
        match &self.host {
            Some(host) if host.watch => cpus.count.into(),
            _ => 0,
        }
    }

    fn queues(&mut self) -> Vec<UnassignedQueues<'_>> {
        self.disks.iter_mut().map(DiskKeys::queues).collect()
    }

    fn open(
        self: Box<Self>,
        storages: &dyn StorageBackends,
        admission: &mut Admission,
    ) -> Result<ConfiguredInterface, ConfigError> {
        let mut disks = Vec::new();
        for (opened, keys) in open_all(self.disks, |keys| (keys.open(storages), keys)) {
            let origin = ChangeSource::Configuration;
            match admission.admit(opened, origin, |why| keys.out(WORD, origin, why))? {
                Some(config) => disks.push(config),
                None => admission.freed_queues.extend(keys.endpoint().queue_map().workers()),
            }
        }
        Ok(configured(disks, self.host))
    }
}

/// Paths of grants, event channels and xenstore, which are opened for each device, and of this domain's description.
const XEN_DEVICES: [&str; 4] = ["/dev/xen", "/proc/xen", "/sys/hypervisor", "/run/xenstored"];

/// Returns the interface with all disks of the configuration, and the host if there is one.
fn configured(disks: Vec<DiskConfig<XenEndpoint>>, host: Option<XenConfig>) -> ConfiguredInterface {
    ConfiguredInterface {
        process_pairs: host.as_ref().map(keys::host_pairs).unwrap_or_default(),
        sections: disks.iter().map(|disk| disk.section(Some(WORD))).collect(),
        ids: disks.iter().map(DiskConfig::named).collect(),
        queues: disks.iter().map(|disk| usize::from(disk.endpoint.queues)).sum(),
        expects_more: host.as_ref().is_some_and(|host| host.watch),
        files: host.as_ref().map(files).unwrap_or_default(),
        ..ConfiguredInterface::new(|context| start(disks, host, context))
    }
}

/// Returns the files that a host's backend opens by path.
fn files(host: &XenConfig) -> Vec<FileUse> {
    let journals = host.state.iter().map(|folder| FileUse::Folder(folder.clone()));
    let devices = XEN_DEVICES.iter().map(PathBuf::from).filter(|path| path.exists()).map(FileUse::Device);
    journals.chain(devices).collect()
}

fn start(
    disks: Vec<DiskConfig<XenEndpoint>>,
    host: Option<XenConfig>,
    context: &HostContext,
) -> Result<Arc<dyn ServedInterface>, StartFailure> {
    // A configuration with disks has a host.
    let Some(host) = host else {
        return Ok(Arc::new(ServedXen::new(Vec::new(), context)));
    };
    let disks = disks.into_iter().map(|config| Arc::new(XenDiskConfig::new(config))).collect();
    let served = ServedXen::new(disks, context);
    if context.stands_by.load(Ordering::SeqCst) {
        // Xenstore has the devices that the other process still serves: a backend would take them over.
        *served.pending.lock() = Some(host);
    } else {
        served.start(&host)?;
    }
    Ok(Arc::new(served))
}

/// The disks of the configuration, and the backend, if there is one.
struct ServedXen {
    context: HostContext,
    disks: RankedMutex<Vec<Arc<XenDiskConfig>>>,
    /// The configuration of the backend, which starts once another process has left the devices.
    pending: RankedMutex<Option<XenConfig>>,
    started: OnceLock<StartedXen>,
}

/// The backend, and the disks of the configuration in its form.
struct StartedXen {
    host: XenHost,
    served: RankedMutex<Vec<(ListPosition, Arc<XenDisk>)>>,
}

impl StartedXen {
    fn list(&self, disk: &XenDiskConfig) {
        let XenDiskConfig { config: disk, health, queues } = disk;
        let (info, queues, storage) = (disk.info(WORD, health), Arc::clone(queues), disk.storage.clone());
        let served = XenDisk::new(self.host.devices(), info, queues, storage);
        self.served.lock().push((disk.position, Arc::new(served)));
    }
}

impl ServedXen {
    fn new(disks: Vec<Arc<XenDiskConfig>>, context: &HostContext) -> ServedXen {
        let (disks, pending) = (RankedMutex::leaf(disks), RankedMutex::leaf(None));
        ServedXen { context: context.clone(), disks, pending, started: OnceLock::new() }
    }

    fn disks(&self) -> Vec<Arc<XenDiskConfig>> {
        self.disks.lock().clone()
    }

    fn backend(&self) -> Option<&Backend> {
        self.started.get().map(|started| started.host.backend())
    }

    /// Starts the backend.
    fn start(&self, config: &XenConfig) -> Result<(), StartFailure> {
        let disks = self.disks();
        let host = XenHost::start(config, &disks, &self.context)?;
        let started = StartedXen { host, served: RankedMutex::leaf(Vec::new()) };
        disks.iter().for_each(|disk| started.list(disk));
        // Called once.
        let _ = self.started.set(started);
        Ok(())
    }

    /// Serves a disk of the configuration that was out at the start.
    fn add(&self, settings: Settings, is_taken: IsTaken<'_>) -> Result<String, ChangeError> {
        let Some(started) = self.started.get() else {
            return Err(ChangeError::Failed("no Xen backend is started".to_owned()));
        };
        let position = ListPosition::Added(self.disks().len());
        let NewDisk { config, reservation } =
            NewDisk::<XenEndpoint>::open(settings, position, &self.context, is_taken)?;
        let disk = Arc::new(XenDiskConfig::new(config));
        let id = disk.config.id.clone();
        // Before its device exists, which would be listed as one outside the configuration.
        self.disks.lock().push(Arc::clone(&disk));
        if let Err(error) = started.host.add(&disk) {
            self.disks.lock().retain(|other| other.config.id != id);
            return Err(ChangeError::Failed(error.to_string()));
        }
        started.list(&disk);
        let workers = workers_of(&disk.queues.get());
        self.context.placement.lock().place(&workers);
        reservation.keep();
        tracing::info!(disk = id, "disk added");
        Ok(id)
    }
}

impl ServedInterface for ServedXen {
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)> {
        let Some(StartedXen { host, served }) = self.started.get() else { return Vec::new() };
        let served = served.lock().clone();
        let disks = self.disks();
        let configured = served.into_iter().map(|(position, disk)| (position, disk as _));
        let is_configured = |id: &str| disks.iter().any(|disk| disk.config.id == id);
        let others = host.devices().list().into_iter().filter(|device| !is_configured(&device.id)).enumerate();
        let others = others.map(|(index, device)| {
            (ListPosition::Added(index), Arc::new(ToolstackDevice::new(host.devices(), device, WORD)) as _)
        });
        configured.chain(others).collect()
    }

    fn add_disk(&self, settings: Settings, is_taken: IsTaken<'_>, source: ChangeSource) -> Result<String, ChangeError> {
        match source {
            ChangeSource::Configuration => self.add(settings, is_taken),
            ChangeSource::RunTime => {
                let expected =
                    "one whose disks are added here; those of Xen are configured, or attached by the guest's tools";
                Err(ChangeError::Setting(settings.error("interface", format!("{WORD:?}"), expected)))
            }
        }
    }

    fn publish(&self) -> Result<(), StartFailure> {
        let pending = self.pending.lock().take();
        if let Some(config) = pending {
            self.start(&config)?;
        }
        self.started.get().map_or(Ok(()), |started| Ok(started.host.attach(&self.disks())?))
    }

    fn begin_stop(&self) {
        self.backend().iter().for_each(|backend| backend.begin_stop());
    }

    fn stop(&self, _deadline: Instant) {
        self.backend().iter().for_each(|backend| backend.stop());
    }

    fn prepare_leave(&self, end: Instant, is_over: &dyn Fn() -> bool) -> Result<(), String> {
        let Some(backend) = self.backend() else { return Ok(()) };
        backend.pause(PAUSE_TIMEOUT)?;
        backend.leave_unjournaled(end, is_over).map_err(|devices| {
            let names: Vec<String> = devices.iter().map(ToString::to_string).collect();
            format!(
                "{}: found requests that storage has not answered and that no journal records (journal, xen-state): try again when it has",
                names.join(", ")
            )
        })
    }

    fn leave(&self) {
        self.backend().iter().for_each(|backend| backend.leave());
    }

    fn wait_left(&self, is_over: &dyn Fn() -> bool) -> Vec<String> {
        let left = self.backend().map(|backend| backend.wait_left(is_over)).unwrap_or_default();
        left.iter().map(ToString::to_string).collect()
    }

    fn serve_on(&self) {
        self.backend().iter().for_each(|backend| backend.serve_on());
    }

    fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        self.disks().iter().map(|disk| disk.config.flush_target()).collect()
    }
}
