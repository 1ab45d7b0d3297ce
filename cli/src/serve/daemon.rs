//! The running daemon.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mqblk_core::DiskSlot;
use mqblk_engine::{AnyDisk, DiskHealth, Engine, EngineOptions, QueueDisk, UringOptions, Watchdog};
use mqblk_vhost_user_server::{ListenSocket, Server, ServerOptions, SocketError};
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};

use super::admin::{self, DaemonState, DiskInfo, ServedDisk};
use super::blk::BlkDisk;
use super::config::{AdminConfig, CacheMode, DiskConfig, DiskEndpoint, ServeConfig, StorageConfig, VhostUserEndpoint};
use super::flush::flush_all;
use super::interfaces::AnyExport;
use super::luns::{Luns, LunsError};
use super::resolve::UniqueNames;
use super::watch::SizeWatch;
use super::xen::{XenDisk, XenDiskConfig, XenHost, XenStartError};

/// Why the daemon could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The worker threads could not be started.
    #[error("workers: {0}")]
    Workers(#[source] io::Error),
    /// The size watch thread could not be started.
    #[error("size watch: {0}")]
    Watch(#[source] io::Error),
    /// The controllers could not be served.
    #[error(transparent)]
    Luns(#[from] LunsError),
    /// The admin socket could not be created.
    #[error("serve: admin: {0}")]
    Admin(#[source] SocketError),
    /// Xen guests could not be served.
    #[error(transparent)]
    Xen(#[from] XenStartError),
    /// A device's socket could not be created.
    #[error("{subject}: socket: {source}")]
    Socket {
        /// The disk or controller.
        subject: String,
        /// The cause.
        source: SocketError,
    },
}

/// A running daemon: serves all disks and controllers until [`Daemon::stop`].
pub struct Daemon {
    admin: Option<AdminSocket>,
    source: Arc<DaemonState>,
    xen: Option<XenHost>,
    watchdog: Option<Watchdog>,
    disks: Vec<(String, Arc<AnyDisk>)>,
    watch: SizeWatch,
    drain_timeout: Duration,
}

impl Daemon {
    /// Starts to serve. Undoes all of it on an error.
    ///
    /// # Errors
    /// If the host refuses a resource.
    pub fn start(config: ServeConfig<Arc<AnyDisk>>) -> Result<Daemon, StartError> {
        let options = EngineOptions {
            workers: config.workers.into(),
            pin: config.pin.iter().flatten().map(|cpu| usize::from(*cpu)).collect(),
            context: UringOptions::default(),
        };
        let engine = Arc::new(Engine::start(&options).map_err(StartError::Workers)?);
        let mut names = UniqueNames::default();
        for (kind, id) in (config.disks.iter().map(|disk| ("disk", &disk.id)))
            .chain(config.controllers.iter().map(|controller| ("controller", &controller.id)))
        {
            names.insert(&("id", id.clone()), &format!("{kind} {id:?}"));
        }
        let mut disks = Vec::new();
        let mut served = Vec::new();
        let health = |disk: &DiskConfig<_>| Arc::new(DiskHealth::new(&disk.id, disk.storage.errors));
        let healths: Vec<_> = config.disks.iter().map(health).collect();
        let watchdog = config.hang_warning.map(|age| engine.watch(age)).transpose().map_err(StartError::Workers)?;
        let xen_disks = config.disks.iter().zip(&healths).filter_map(|(disk, health)| XenDiskConfig::of(disk, health));
        let xen_disks: Vec<_> = xen_disks.collect();
        let xen = config.xen.as_ref().map(|xen| XenHost::start(xen, &xen_disks, (&engine, config.drain_timeout)));
        let xen = xen.transpose()?;
        for (disk, health) in config.disks.into_iter().zip(healths) {
            disks.push((disk.id.clone(), Arc::clone(&disk.storage.disk)));
            let watched = disk.storage.watch_size.then(|| Arc::clone(&disk.storage.disk));
            let about = DiskInfo::of(&disk, &health);
            let guest: AnyExport = match (disk.endpoint, &xen) {
                (DiskEndpoint::VhostUser(endpoint), _) => {
                    Arc::new(serve_blk(disk.id, endpoint, disk.storage, health, (&engine, config.drain_timeout))?)
                }
                (DiskEndpoint::Xen(endpoint), Some(xen)) => {
                    Arc::new(XenDisk::new(xen, &disk.id, endpoint.queues.into(), disk.storage.disk))
                }
                (DiskEndpoint::Xen(_), None) => unreachable!("a configuration with Xen disks has a Xen"),
            };
            served.push(ServedDisk { info: about, export: guest, watched });
        }
        let luns = Luns::start(&config.controllers, names, (&engine, config.drain_timeout), config.state)?;
        let luns = Arc::new(luns);
        let devices = xen.as_ref().map(XenHost::devices);
        let source = Arc::new(DaemonState::new(engine, served, devices, luns));
        let admin = config.admin.as_ref().map(|admin| AdminSocket::start(admin, &source)).transpose();
        let admin = admin.map_err(StartError::Admin)?;
        let watch = SizeWatch::start(&source).map_err(StartError::Watch)?;
        let drain_timeout = config.drain_timeout;
        let daemon = Daemon { admin, source, xen, watchdog, disks, watch, drain_timeout };
        // Last: guests see the disks as soon as they are attached.
        if let Some(xen) = &daemon.xen {
            xen.attach(&xen_disks)?;
        }
        daemon.source.luns().set_migratable(true);
        Ok(daemon)
    }

    /// Drains requests in flight, flushes and closes the disks, and removes the sockets.
    ///
    /// # Errors
    /// If the storage of a disk or a logical unit cannot be flushed, or does not complete in time. The others are flushed nevertheless.
    pub fn stop(self) -> io::Result<()> {
        drop(self.admin);
        drop(self.watch);
        self.source.luns().set_migratable(false);
        // The admin socket is closed: no further removal can start.
        self.source.luns().wait_for_removals();
        // In parallel: each takes as long as its storage.
        self.source.begin_stop();
        let disks = self.disks.iter().map(|(id, disk)| (format!("disk {id:?}"), Arc::clone(disk)));
        let units = self.source.luns().units();
        let units = units.iter().map(|unit| (format!("lun {:?}", unit.name()), Arc::clone(unit.disk())));
        let all: Vec<_> = disks.chain(units).collect();
        if let Some(xen) = &self.xen {
            xen.backend().stop();
        }
        // Drops the last reference, which stops the servers.
        drop(self.source);
        drop(self.watchdog);
        flush_all(all, self.drain_timeout)
    }
}

/// The admin socket, served until this is dropped.
struct AdminSocket {
    _server: mqblk_admin::Server,
    /// Dropped after the server.
    _socket: ListenSocket,
}

impl AdminSocket {
    fn start(config: &AdminConfig, source: &Arc<DaemonState>) -> Result<AdminSocket, SocketError> {
        let socket = ListenSocket::bind(&config.socket, config.mode.bits())?;
        let listener = socket.listener().try_clone();
        let server = listener
            .and_then(|listener| mqblk_admin::Server::start(listener, admin::verbs(source), Default::default()))
            .map_err(|error| SocketError::Os { path: config.socket.clone(), source: error })?;
        tracing::info!(socket = %config.socket.display(), "admin socket");
        Ok(AdminSocket { _server: server, _socket: socket })
    }
}

fn serve_blk(
    id: String,
    endpoint: VhostUserEndpoint,
    storage: StorageConfig<Arc<AnyDisk>>,
    health: Arc<DiskHealth>,
    (engine, drain_timeout): (&Arc<Engine>, Duration),
) -> Result<BlkDisk, StartError> {
    let geometry = storage.disk.geometry();
    let device = VirtioBlk::new(
        geometry,
        storage.disk.limits(),
        BlkOptions {
            serial: storage.serial,
            queues: endpoint.queues,
            queue_size: endpoint.queue_size,
            writeback: storage.cache == CacheMode::Writeback,
        },
    );
    tracing::info!(
        disk = %id,
        size = %geometry.size,
        block_size = geometry.logical_block.bytes(),
        read_only = geometry.read_only,
        queues = endpoint.queues,
        poll = %endpoint.poll,
        "serving"
    );
    let options = ServerOptions {
        name: id.clone(),
        socket: endpoint.socket,
        socket_mode: endpoint.socket_mode.bits(),
        queue_map: endpoint.queue_map.iter().map(|worker| usize::from(*worker)).collect(),
        poll: endpoint.poll,
        coalesce: endpoint.coalesce,
        fixed_buffers: endpoint.fixed_buffers,
        drain_timeout,
        disks: vec![QueueDisk { slot: DiskSlot::FIRST, disk: Arc::clone(&storage.disk), plug: storage.plug, health }],
        engine: Arc::clone(engine),
        host_state: None,
    };
    let device = Arc::new(device);
    let server = Server::start(Arc::clone(&device), options)
        .map_err(|source| StartError::Socket { subject: format!("disk {id:?}"), source })?;
    Ok(BlkDisk::new(id, device, storage.disk, server))
}
