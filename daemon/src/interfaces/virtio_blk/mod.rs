//! virtio-blk over vhost-user: each disk is a device with a socket of its own.

mod disk;

use std::sync::Arc;
use std::time::Instant;

use mqblk_core::DiskSlot;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{AnyDisk, DiskHealth, QueueDisk, QueuePlacement};
use mqblk_vhost_user_server::{Server, SocketError};
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};

use crate::config::CacheMode;
use crate::disk_list::{DiskConfig, DiskKeys, Endpoint, ServedDisk};
use crate::interface::{
    ConfiguredInterface, DeviceKeys, DiskTable, GuestInterface, HostContext, InterfaceKeys, ListPosition,
    ResolveContext, ServedDevice, ServedInterface, StartFailure,
};
use crate::print::{Pair, Section};
use crate::queues::MAX_QUEUES;
use crate::resolve::ConfigError;
use crate::sandbox::FileUse;
use crate::storage_backends::StorageBackends;
use crate::vhost_user::VhostUserEndpoint;
use disk::BlkDisk;

/// The word of the interface.
const WORD: &str = "virtio-blk";
/// Maximum length of virtio-blk's identification string (virtio 1.3 section 5.2.6, VIRTIO_BLK_T_GET_ID).
const SERIAL_BYTES: usize = 20;

/// virtio-blk.
#[derive(Debug)]
pub struct VirtioBlkInterface;

impl GuestInterface for VirtioBlkInterface {
    fn word(&self) -> &'static str {
        WORD
    }

    fn keys(&self) -> Box<dyn InterfaceKeys> {
        Box::new(BlkKeys::default())
    }
}

/// The endpoint of a disk.
struct BlkEndpoint(VhostUserEndpoint);

impl Endpoint for BlkEndpoint {
    const SERIAL_BYTES: usize = SERIAL_BYTES;

    fn take(settings: &mut Settings, context: &mut ResolveContext<'_>) -> Result<Self, SettingError> {
        let queues = context.cpus.count;
        VhostUserEndpoint::take(settings, (queues, MAX_QUEUES), context).map(BlkEndpoint)
    }

    fn queues(&self) -> u16 {
        self.0.queues
    }

    fn assign_queues(&mut self, settings: &Settings, placement: &mut QueuePlacement) -> Result<(), SettingError> {
        self.0.assign_queues(settings, placement)
    }

    fn keep_on_one_worker(&mut self, settings: &Settings) -> Result<(), SettingError> {
        self.0.keep_on_one_worker(settings, None)
    }

    fn queue_map(&self) -> &[u16] {
        self.0.queue_map.workers()
    }

    fn pairs(&self) -> Vec<Pair> {
        self.0.pairs()
    }
}

/// The keys of all disks.
#[derive(Default)]
struct BlkKeys(Vec<DiskKeys<BlkEndpoint>>);

impl InterfaceKeys for BlkKeys {
    fn take_disk(&mut self, disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.0.push(DiskKeys::take(disk, context)?);
        Ok(())
    }

    fn devices(&mut self) -> Vec<(ListPosition, &mut dyn DeviceKeys)> {
        self.0.iter_mut().map(DiskKeys::device).collect()
    }

    fn open(self: Box<Self>, storages: &dyn StorageBackends) -> Result<Box<dyn ConfiguredInterface>, ConfigError> {
        let disks = self.0.into_iter().map(|disk| disk.open(storages)).collect::<Result<_, _>>()?;
        Ok(Box::new(BlkConfig(disks)))
    }
}

/// All disks of the configuration.
struct BlkConfig(Vec<DiskConfig<BlkEndpoint>>);

impl ConfiguredInterface for BlkConfig {
    fn sections(&self) -> Vec<(ListPosition, Vec<Section>)> {
        self.0.iter().map(|disk| disk.section(None)).collect()
    }

    fn ids(&self) -> Vec<(&'static str, String)> {
        self.0.iter().map(DiskConfig::named).collect()
    }

    fn queues(&self) -> usize {
        self.0.iter().map(|disk| usize::from(disk.endpoint.queues())).sum()
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.0.iter().try_for_each(|disk| disk.endpoint.0.check(format!("disk {:?}", disk.id)))
    }

    fn files(&self) -> Vec<FileUse> {
        self.0.iter().flat_map(|disk| disk.endpoint.0.files()).collect()
    }

    fn start(self: Box<Self>, host: &HostContext) -> Result<Arc<dyn ServedInterface>, StartFailure> {
        let disks = self.0.into_iter().map(|disk| {
            let (position, flush_target) = (disk.position, disk.flush_target());
            Ok(ListedDisk { position, flush_target, served: serve(disk, host)? })
        });
        Ok(Arc::new(ServedDisks(disks.collect::<Result<_, StartFailure>>()?)))
    }
}

/// Why a disk could not be served.
#[derive(Debug, thiserror::Error)]
#[error("disk {id:?}: socket: {source}")]
struct BlkStartError {
    id: String,
    source: SocketError,
}

fn serve(disk: DiskConfig<BlkEndpoint>, host: &HostContext) -> Result<Arc<ServedDisk<BlkDisk>>, BlkStartError> {
    let health = Arc::new(DiskHealth::new(&disk.id, disk.storage.errors));
    let info = disk.info(WORD, &health);
    let DiskConfig { id, endpoint: BlkEndpoint(endpoint), storage, .. } = disk;
    let geometry = storage.disk.geometry();
    let device = Arc::new(VirtioBlk::new(
        geometry,
        storage.disk.limits(),
        BlkOptions {
            serial: storage.serial.clone(),
            queues: endpoint.queues,
            queue_size: endpoint.queue_size,
            writeback: storage.cache == CacheMode::Writeback,
        },
    ));
    tracing::info!(
        disk = %id,
        size = %geometry.size,
        block_size = geometry.logical_block.bytes(),
        read_only = geometry.read_only,
        queues = endpoint.queues,
        poll = %endpoint.poll,
        "serving"
    );
    let queue_disk = QueueDisk { slot: DiskSlot::FIRST, disk: Arc::clone(&storage.disk), plug: storage.plug, health };
    let options = endpoint.server_options(&id, vec![queue_disk], host);
    let server =
        Server::start(Arc::clone(&device), options).map_err(|source| BlkStartError { id: id.clone(), source })?;
    Ok(ServedDisk::new(info, Arc::new(BlkDisk::new(id, device, storage, server))))
}

/// A served disk and its position.
struct ListedDisk {
    position: ListPosition,
    flush_target: (String, Arc<AnyDisk>),
    served: Arc<ServedDisk<BlkDisk>>,
}

/// All disks, served.
struct ServedDisks(Vec<ListedDisk>);

impl ServedInterface for ServedDisks {
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)> {
        self.0.iter().map(|disk| (disk.position, Arc::clone(&disk.served) as _)).collect()
    }

    fn begin_stop(&self) {
        self.0.iter().for_each(|disk| disk.served.export().begin_stop());
    }

    fn stop(&self, _deadline: Instant) {
        self.0.iter().for_each(|disk| disk.served.export().stop());
    }

    fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        self.0.iter().map(|disk| disk.flush_target.clone()).collect()
    }
}
