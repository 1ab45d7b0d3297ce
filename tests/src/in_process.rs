//! A daemon's components in this process, and the project's driver connected to them over a real socket.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::DiskSlot;
use mqblk_core::disk::DiskError;
use mqblk_core::settings::Settings;
use mqblk_driver::virtio_blk::{BlkConnectOptions, BlkDevice, BlkQueueSet};
use mqblk_engine::{
    AnyDisk, DiskHealth, Engine, EngineOptions, FixedBufferUse, PlugOptions, QueueDisk, QueuePolicy, QueueStats,
    UringContext, UringOptions, WorkerStats,
};
use mqblk_vhost_user_server::{Server, ServerOptions, SocketAccess};
use mqblk_virtio::VirtioDevice;
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};

/// The parameters of a fixture.
pub struct Plan {
    /// The disk that is served.
    pub disk: Arc<AnyDisk>,
    /// Number of workers.
    pub workers: usize,
    /// The polling of its queues, and the coalescing of their calls.
    pub policy: QueuePolicy,
    /// Its merge options.
    pub plug: PlugOptions,
    /// Its error policy and its limits.
    pub health: Arc<DiskHealth>,
}

/// A served disk and its driver.
pub struct Rig {
    device: BlkDevice,
    options: BlkConnectOptions,
    server: Server,
    engine: Arc<Engine>,
    _folder: tempfile::TempDir,
}

/// Opens a disk by its settings.
///
/// # Panics
/// When it does not open.
pub fn disk(kind: &str, settings: &[(&str, &str)]) -> Arc<AnyDisk> {
    try_disk(kind, settings).expect("the disk opens")
}

/// As [`disk`], for one that may be refused.
///
/// # Errors
/// The storage's.
pub fn try_disk(kind: &str, settings: &[(&str, &str)]) -> Result<Arc<AnyDisk>, DiskError> {
    let mut given = Settings::new("disk");
    for (key, value) in settings {
        given.insert(key, value).expect("each key once");
    }
    let disk = mqblk_storage::open(kind, &mut given)?;
    given.finish().expect("all settings are known");
    Ok(disk)
}

/// Serves `plan` on the socket of `options`, with its queues.
///
/// # Panics
/// When that fails.
pub fn serve(plan: Plan, options: &BlkConnectOptions) -> (Server, Arc<Engine>) {
    serve_device(plan, options, |blk| blk)
}

/// Serves the device that `make` makes from that of `plan`.
///
/// # Panics
/// As [`serve`].
pub fn serve_device<D: VirtioDevice<UringContext>>(
    plan: Plan,
    options: &BlkConnectOptions,
    make: impl FnOnce(Arc<VirtioBlk>) -> Arc<D>,
) -> (Server, Arc<Engine>) {
    let engine = EngineOptions { workers: plan.workers, pin: vec![], context: UringOptions::default() };
    let engine = Arc::new(Engine::start(&engine).expect("workers start"));
    let blk = BlkOptions {
        serial: "rig".to_owned(),
        queues: options.queues,
        queue_size: options.queue_size,
        writeback: true,
    };
    let device = make(Arc::new(VirtioBlk::new(plan.disk.geometry(), plan.disk.limits(), blk)));
    let serve = ServerOptions {
        name: "rig".to_owned(),
        socket: options.socket.clone(),
        socket_access: SocketAccess::with_mode(0o600),
        queue_map: vec![],
        policy: plan.policy,
        sharing: mqblk_vhost_user_server::SharePolicy::default(),
        fixed_buffers: FixedBufferUse::Off,
        drain_timeout: Duration::from_secs(30),
        disks: vec![QueueDisk { slot: DiskSlot::FIRST, disk: plan.disk, plug: plan.plug, health: plan.health }],
        engine: Arc::clone(&engine),
        host_state: None,
        standby: false,
        guests: None,
    };
    let server = Server::start(device, serve).expect("the socket can be made");
    (server, engine)
}

impl Rig {
    /// Serves `plan` and connects with the options as changed by `choose`.
    pub fn new(plan: Plan, choose: impl FnOnce(&mut BlkConnectOptions)) -> (Rig, Vec<BlkQueueSet>) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut options = BlkConnectOptions::new(folder.path().join("socket"));
        choose(&mut options);
        let (server, engine) = serve(plan, &options);
        let mut device = BlkDevice::connect(&options).expect("connected");
        let queues = device.take_queues();
        (Rig { device, options, server, engine, _folder: folder }, queues)
    }
    /// Stops the queues, disconnects and reconnects.
    pub fn reconnect(self, queues: Vec<BlkQueueSet>) -> (Rig, Vec<BlkQueueSet>) {
        let Rig { device, options, server, engine, _folder } = self;
        device.stop(queues).expect("the queues stop");
        let mut device = BlkDevice::connect(&options).expect("connected again");
        let queues = device.take_queues();
        (Rig { device, options, server, engine, _folder }, queues)
    }

    /// Makes the workers use changed limits.
    pub fn disks_changed(&self) {
        self.engine.disks_changed().expect("the workers run");
    }

    /// Returns the workers' statistics.
    pub fn worker_stats(&self) -> Vec<WorkerStats> {
        self.engine.stats().expect("the workers run")
    }

    /// Enables or disables the device's write cache.
    pub fn set_writeback(&mut self, on: bool) {
        self.device.set_writeback(on).expect("the cache mode can be switched");
    }

    /// Returns the server's statistics, by queue.
    pub fn report(&self) -> Vec<QueueStats> {
        let report = || self.server.stats(&self.engine.stats().expect("the workers run"));
        (0..100).find_map(|_| report()).expect("no queue comes or goes")
    }

    /// Stops the queues, then the server.
    pub fn stop(self, queues: Vec<BlkQueueSet>) {
        self.device.stop(queues).expect("the queues stop");
        self.server.stop();
    }
}
