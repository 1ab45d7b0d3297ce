//! virtio-blk over vhost-user: each disk is a device with a socket of its own. Disks can be added and removed while
//! others are served.
//!
//! `disk` is a served disk, `disks` has all of them at run time, `saved` is their section of the state file.

mod disk;
mod disks;
mod saved;

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_core::DiskSlot;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_engine::QueueDisk;
use mqblk_vhost_user_devices::serve_blk;
use mqblk_vhost_user_server::SocketError;
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};

use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::contract::{DiskContract, ONLY_DISK};
use crate::disk_list::{DiskConfig, DiskKeys, Endpoint};
use crate::interface::{
    Check, ConfiguredInterface, DiskTable, GuestInterface, HostContext, InterfaceKeys, ResolveContext, UnassignedQueues,
};
use crate::names::Claim;
use crate::out::{Admission, OutDisk};
use crate::pair::Pair;
use crate::queues::{self, DEFAULT_QUEUES, MAX_QUEUES, QUEUES, QueueMap};
use crate::sockets::PlannedSocket;
use crate::storage::CacheMode;
use crate::storage_backends::{StorageBackends, open_by_origin};
use crate::vhost_user::{self, VhostUserEndpoint};
use disk::BlkDisk;
use disks::ServedDisks;
use saved::SavedDisks;

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

    fn disk_keys(&self) -> &'static [&'static [&'static Key]] {
        const KEYS: &[&[&Key]] = &[vhost_user::KEYS, &[&QUEUES], queues::KEYS];
        KEYS
    }

    fn keys(&self) -> Box<dyn InterfaceKeys> {
        Box::new(BlkKeys::default())
    }
}

/// The endpoint of a disk.
#[derive(Clone)]
struct BlkEndpoint(VhostUserEndpoint);

impl Endpoint for BlkEndpoint {
    const SERIAL_BYTES: usize = SERIAL_BYTES;

    fn take(settings: &mut Settings, _id: &str, context: &mut ResolveContext<'_>) -> Result<Self, SettingError> {
        let queues = context.cpus.count.clamp(DEFAULT_QUEUES, MAX_QUEUES);
        VhostUserEndpoint::take(settings, WORD, (&QUEUES, queues), context).map(BlkEndpoint)
    }

    fn queues(&self) -> u16 {
        self.0.queues
    }

    fn queue_map(&self) -> &QueueMap {
        &self.0.queue_map
    }

    fn queue_map_mut(&mut self) -> &mut QueueMap {
        &mut self.0.queue_map
    }

    fn pairs(&self) -> Vec<Pair> {
        self.0.pairs()
    }

    fn claims(&self) -> Vec<Claim> {
        self.0.claims()
    }

    fn given(&self) -> Option<&DiskContract> {
        self.0.given.as_ref()?.disks.get(ONLY_DISK)
    }
}

/// The keys of all disks.
#[derive(Default)]
struct BlkKeys {
    disks: Vec<DiskToOpen>,
    saved: SavedDisks,
}

/// The keys of a disk, with its origin.
struct DiskToOpen {
    keys: DiskKeys<BlkEndpoint>,
    origin: ChangeSource,
}

impl InterfaceKeys for BlkKeys {
    fn take_disk(&mut self, disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.disks.push(DiskToOpen { keys: DiskKeys::take(disk, context)?, origin: ChangeSource::Configuration });
        Ok(())
    }

    fn take_process(&mut self, _process: &mut Settings, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        if let Some(saved) = context.saved {
            self.saved = saved.section(WORD)?;
            saved::apply(&mut self.saved, &mut self.disks, context);
        }
        Ok(())
    }

    fn queues(&mut self) -> Vec<UnassignedQueues<'_>> {
        self.disks.iter_mut().map(|disk| disk.keys.queues()).collect()
    }

    fn sockets(&self) -> Vec<PlannedSocket> {
        let configured = self.disks.iter().filter(|disk| disk.origin == ChangeSource::Configuration);
        configured.map(|disk| disk.keys.endpoint().0.planned_socket(disk.keys.subject())).collect()
    }

    fn open(
        self: Box<Self>,
        storages: &dyn StorageBackends,
        admission: &mut Admission,
    ) -> Result<ConfiguredInterface, ConfigError> {
        let open = |DiskToOpen { keys, origin }: DiskToOpen, storages: &dyn StorageBackends| {
            (keys.open(storages), keys, origin)
        };
        let opened = open_by_origin(self.disks, |disk| disk.origin, storages, open);
        let mut disks = Vec::new();
        for (opened, keys, origin) in opened {
            let configured = origin == ChangeSource::Configuration;
            let files = || keys.endpoint().0.files().into_iter().filter(|_| configured).collect();
            match admission.admit(opened, origin, |why| OutDisk { files: files(), ..keys.out(WORD, origin, why) })? {
                Some(config) => disks.push(ConfiguredDisk { config, origin }),
                None => admission.freed_queues.extend(keys.endpoint().queue_map().workers()),
            }
        }
        Ok(configured(disks, self.saved))
    }
}

/// A disk with its origin.
struct ConfiguredDisk {
    config: DiskConfig<BlkEndpoint>,
    origin: ChangeSource,
}

/// Returns the interface with all disks of the configuration, and those added at run time before.
fn configured(disks: Vec<ConfiguredDisk>, saved: SavedDisks) -> ConfiguredInterface {
    let configs = || disks.iter().map(|disk| &disk.config);
    // Those of the configuration alone.
    let own = || disks.iter().filter(|disk| disk.origin == ChangeSource::Configuration).map(|disk| &disk.config);
    let checks: Vec<Check> = own().map(|disk| disk.endpoint.0.check(format!("disk {:?}", disk.id))).collect();
    ConfiguredInterface {
        sections: configs().map(|disk| disk.section(None)).collect(),
        ids: configs().map(DiskConfig::named).collect(),
        queues: configs().map(|disk| usize::from(disk.endpoint.queues())).sum(),
        files: own().flat_map(|disk| disk.endpoint.0.files()).collect(),
        check: Box::new(move || checks.iter().try_for_each(|check| check())),
        ..ConfiguredInterface::new(|host| Ok(Arc::new(ServedDisks::start(disks, saved, host)?)))
    }
}

/// Reason why a disk could not be served.
#[derive(Debug, thiserror::Error)]
#[error("disk {id:?}: socket: {source}")]
struct BlkStartError {
    id: String,
    source: SocketError,
}

fn serve(disk: DiskConfig<BlkEndpoint>, host: &HostContext) -> Result<Arc<BlkDisk>, BlkStartError> {
    let health = disk.storage.new_health(&disk.id);
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
        poll = %endpoint.policy.poll,
        "serving"
    );
    let queue_disk = QueueDisk { slot: DiskSlot::FIRST, disk: Arc::clone(&storage.disk), plug: storage.plug, health };
    let disks = BTreeMap::from([(ONLY_DISK.to_owned(), storage.contract(&[]))]);
    let guests = endpoint.record_guests(WORD, disks, host);
    let options = endpoint.server_options(&id, vec![queue_disk], &guests, host);
    let server = serve_blk(Arc::clone(&device), options).map_err(|source| BlkStartError { id, source })?;
    Ok(Arc::new(BlkDisk::new(info, device, storage, server, guests)))
}
