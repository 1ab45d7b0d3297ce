//! A served virtio-blk disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::lock::{LockRank, RankedMutex};
use mqblk_core::{ByteLen, DiskSlot, Resize, SizeUsers};
use mqblk_engine::{QueueDisk, QueueId, QueueMove, QueuePolicy, QueueSettings, WorkerStats};
use mqblk_vhost_user_devices::serve_blk;
use mqblk_vhost_user_server::{Frontend, Server, SocketError};
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};

use super::config::{BlkEndpoint, WORD};
use crate::change::ChangeError;
use crate::contract::{ContractRecorder, ONLY_DISK};
use crate::disk_list::DiskConfig;
use crate::interface::{DeviceDescription, DeviceStat, Export, HostContext, ServedDevice, StatDetail};
use crate::report::{DiskInfo, tenant_budget};
use crate::resize::{self, GuestNotice, ResizeOutcome};
use crate::storage::{CacheMode, StorageConfig};

/// Longest wait for the VMM to acknowledge a configuration change. Admin clients wait longer.
const CONFIG_ACK_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason why a disk could not be served.
#[derive(Debug, thiserror::Error)]
#[error("disk {id:?}: socket: {source}")]
pub(super) struct BlkStartError {
    id: String,
    source: SocketError,
}

/// A virtio-blk disk: the device, its server and its storage.
pub(super) struct BlkDisk {
    info: DiskInfo,
    device: Arc<VirtioBlk>,
    storage: StorageConfig,
    server: Arc<Server>,
    guests: Arc<ContractRecorder>,
    /// Serialises size changes.
    resize_lock: RankedMutex<()>,
}

impl BlkDisk {
    /// Returns its id.
    pub(super) fn id(&self) -> &str {
        &self.info.id
    }

    /// Forgets what its guest was given: the disk is removed.
    pub(super) fn forget_guest(&self) {
        self.guests.forget();
    }

    /// Starts to drain its queues, as the first step of a stop.
    pub(super) fn begin_stop(&self) {
        self.server.begin_stop();
    }

    /// Waits for its requests in flight, for the drain timeout at most, and stops serving it.
    pub(super) fn stop(&self) {
        self.server.stop();
    }
}

/// The users of the disk's size.
struct Users<'a>(&'a BlkDisk);

impl SizeUsers for Users<'_> {
    fn set_size(&mut self, size: ByteLen) {
        self.0.device.set_size(size);
    }

    fn refresh(&mut self) {
        self.0.server.refresh_disk(DiskSlot::FIRST);
    }
}

impl ServedDevice for BlkDisk {
    fn describe(&self) -> DeviceDescription {
        self.info.describe(self.queue_settings().as_ref())
    }

    fn stat(&self, workers: &[WorkerStats], detail: StatDetail) -> Option<DeviceStat> {
        let mut stat = self.info.stat(self.queue_settings(), &self.server.stats(workers)?, detail);
        stat.in_flight_region = self.server.has_inflight_region();
        stat.budget = Some(tenant_budget(&self.server.budget()));
        Some(DeviceStat::Disk(Box::new(stat)))
    }

    fn exports(&self) -> Vec<Export> {
        vec![self.info.export()]
    }

    fn id(&self) -> String {
        self.info.id.clone()
    }

    fn frontend(&self) -> Option<Frontend> {
        self.server.frontend()
    }

    fn is_connected(&self) -> bool {
        self.server.is_connected()
    }

    fn server(&self) -> Option<Arc<Server>> {
        Some(Arc::clone(&self.server))
    }

    fn queue_settings(&self) -> Option<QueueSettings> {
        Some(self.server.queue_settings())
    }

    fn set_policy(&self, policy: QueuePolicy) -> Result<(), String> {
        self.server.set_policy(policy)
    }

    fn move_queue(&self, queue: u16, worker: usize, timeout: Duration) -> Result<QueueMove, String> {
        self.server.move_queue(queue, worker, timeout)
    }

    fn attached_queues(&self) -> Vec<(u16, QueueId)> {
        self.server.attached_queues()
    }

    fn resize(&self, _id: &str, request: Resize) -> Result<ResizeOutcome, ChangeError> {
        let _alone = self.resize_lock.lock();
        let result = request.carry_out(self.storage.disk.as_ref(), &mut Users(self));
        let resized =
            result.map_err(|error| resize::resize_error(&format!("disk {:?}", self.info.id), request, error))?;
        let guest = match resized.is_change() {
            true => GuestNotice::from(self.server.config_changed(CONFIG_ACK_TIMEOUT)),
            false => GuestNotice::Unchanged,
        };
        if resized.is_change() {
            self.guests.set_disk(ONLY_DISK, Some(self.storage.contract(&[])));
            tracing::info!(disk = self.info.id, before = %resized.before, size = %resized.size, guest = guest.word(), "resized");
        }
        Ok(ResizeOutcome { resized, guest })
    }
}

/// Serves a disk of the configuration, or one that was added.
pub(super) fn serve(disk: DiskConfig<BlkEndpoint>, host: &HostContext) -> Result<Arc<BlkDisk>, BlkStartError> {
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
    let resize_lock = RankedMutex::new(LockRank::Resize, ());
    Ok(Arc::new(BlkDisk { info, device, storage, server: Arc::new(server), guests, resize_lock }))
}
