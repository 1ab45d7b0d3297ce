//! The predecessor, from which this process takes over.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mqblk_admin::{Client, ClientError};
use mqblk_core::lock::{RankedGuard, RankedMutex};
use mqblk_metrics::MetricsListener;
use mqblk_storage::file::{Sharing, set_sharing};
use mqblk_vhost_user_server::{AdoptError, HandedConnection, Server, adopt_handed};
use serde_json::json;

use super::channel::Channel;
use super::images::HandedFiles;
use super::{Message, Offer, OfferedDevice, OfferedMetrics, OfferedSocket, PROTOCOL, TakeoverError, VERB, images};
use crate::contract::SavedContracts;
use crate::state::DaemonState;

/// Longest wait for the predecessor: it may drain for its own timeout, which is at most an hour.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(3700);
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time of a message that has begun, and of one without a wait before it.
const PACKET_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the checks for the end of this process.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// Longest wait for the answer to the verb, and for the offer.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of characters of a version.
const MAX_VERSION: usize = 32;
/// JSON-RPC's "no such method".
const NO_SUCH_VERB: i64 = -32601;

/// A running daemon that hands over to this process. A guest may have taken it over, and an upgrade must end that: its
/// messages and descriptors are used only after a comparison with what this process would have opened itself.
pub struct Predecessor {
    channel: Channel,
    /// Its user.
    uid: Option<u32>,
    version: String,
    devices: Vec<OfferedDevice>,
    admin: Option<OfferedSocket>,
    contracts: SavedContracts,
    parts: RankedMutex<Parts>,
}

/// Parts that are used once.
struct Parts {
    images: Arc<HandedFiles>,
    metrics: Option<(OfferedMetrics, OwnedFd)>,
    state_lock: Option<(PathBuf, File)>,
    service_manager: Option<(UnixDatagram, Option<Duration>)>,
}

impl Predecessor {
    /// Requests a takeover from the daemon at an admin socket, and receives its listening sockets. The daemon continues
    /// to serve until [`take_over`](Self::take_over), and if this is dropped.
    ///
    /// # Errors
    /// If it cannot hand over, or has another version.
    pub fn connect(admin: &Path) -> Result<Predecessor, TakeoverError> {
        let (channel, theirs) = Channel::pair()?;
        let params = json!({ "protocol": PROTOCOL, "version": env!("CARGO_PKG_VERSION") });
        let mut client = Client::connect_with(admin, BEGIN_TIMEOUT)?;
        client.call_with(VERB, &params, Some(theirs.as_fd())).map_err(|error| match error {
            ClientError::Refused(error) if error.code == NO_SUCH_VERB => TakeoverError::unexpected(
                "a daemon that cannot hand over",
                "one of a later version: restart it instead, once",
            ),
            error => error.into(),
        })?;
        drop(theirs);
        let (message, descriptors) = channel.receive(BEGIN_TIMEOUT)?;
        let Message::Offer(offer) = message else {
            return Err(TakeoverError::unexpected("another message", "an offer"));
        };
        Predecessor::of(channel, client.server_uid(), offer, descriptors)
    }

    fn of(
        channel: Channel,
        uid: Option<u32>,
        offer: Offer,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Predecessor, TakeoverError> {
        let is_version =
            offer.version.len() <= MAX_VERSION && offer.version.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_version || offer.protocol != PROTOCOL {
            let found = format!("protocol {} (mqblk {:.MAX_VERSION$?})", offer.protocol, offer.version);
            return Err(TakeoverError::unexpected(found, format!("{PROTOCOL}: restart the daemon instead, once")));
        }
        let mut descriptors = descriptors.into_iter();
        let mut next =
            || descriptors.next().ok_or_else(|| TakeoverError::unexpected("too few descriptors", "one of each"));
        let adopt = |socket: &OfferedSocket, listener: OwnedFd| {
            let adopted = adopt_handed(socket.path.clone(), UnixListener::from(listener));
            adopted.map_err(|error| TakeoverError::Failed(format!("socket {:?}: {error}", socket.path)))
        };
        for device in &offer.devices {
            adopt(&device.socket, next()?)?;
        }
        if let Some(admin) = &offer.admin {
            adopt(admin, next()?)?;
        }
        let mut parts = Parts { images: Arc::default(), metrics: None, state_lock: None, service_manager: None };
        if let Some(metrics) = offer.metrics {
            parts.metrics = Some((metrics, next()?));
        }
        if let Some(path) = offer.state {
            parts.state_lock = Some((path, File::from(next()?)));
        }
        let mut images = Vec::new();
        for image in offer.images {
            images.push(images::received(image, next()?));
        }
        parts.images = Arc::new(HandedFiles::new(images));
        if let Some(manager) = offer.service_manager {
            let watchdog = manager.watchdog_us.map(Duration::from_micros);
            parts.service_manager = Some((UnixDatagram::from(next()?), watchdog));
        }
        set_sharing(Sharing::Undecided);
        tracing::info!(version = offer.version, devices = offer.devices.len(), "a running daemon hands over");
        let parts = RankedMutex::leaf(parts);
        let Offer { version, devices, admin, contracts, .. } = offer;
        Ok(Predecessor { channel, uid, version, devices, admin, contracts, parts })
    }

    /// Checks the user of the predecessor: root, this process' user, or `user`, which this process becomes.
    ///
    /// # Errors
    /// If it is another user: whoever may bind an admin socket's path must not get all guests' images and memory
    /// opened.
    pub(crate) fn check_user(&self, user: Option<u32>) -> Result<(), TakeoverError> {
        let own = rustix::process::geteuid().as_raw();
        if self.uid.is_some_and(|uid| uid == 0 || uid == own || Some(uid) == user) {
            return Ok(());
        }
        let found = self.uid.map_or("a daemon of an unknown user".to_owned(), |uid| format!("a daemon of user {uid}"));
        let or_user = user.filter(|user| *user != own).map_or(String::new(), |user| format!(" or {user} (user=)"));
        Err(TakeoverError::unexpected(found, format!("one of root, user {own}{or_user}")))
    }

    fn parts(&self) -> RankedGuard<'_, Parts> {
        self.parts.lock()
    }

    /// Returns the devices as it has given them to guests.
    pub(crate) fn contracts(&self) -> &SavedContracts {
        &self.contracts
    }

    /// Returns its open images. Empty after [`take_over`](Self::take_over).
    pub(crate) fn images(&self) -> Arc<HandedFiles> {
        Arc::clone(&self.parts().images)
    }

    /// Takes its listener for metrics, if it has one at this address. True if it includes the file of the socket.
    pub(crate) fn take_metrics(&self, address: &str) -> Option<(MetricsListener, bool)> {
        let (offered, listener) = self.parts().metrics.take_if(|(offered, _)| offered.address == address)?;
        let listener = match address.starts_with("unix:") {
            true => MetricsListener::Unix(UnixListener::from(listener)),
            false => MetricsListener::Tcp(TcpListener::from(listener)),
        };
        Some((listener, offered.owns_file))
    }

    /// Takes its lock of the state file at `path`.
    pub(crate) fn take_state_lock(&self, path: &Path) -> Option<File> {
        let absolute = |path: &Path| std::path::absolute(path).ok();
        let mut parts = self.parts();
        parts.state_lock.take_if(|(locked, _)| absolute(locked) == absolute(path)).map(|(_, lock)| lock)
    }

    /// Takes its socket of the service manager, with the time in which the manager expects a sign of life.
    pub fn take_service_manager(&self) -> Option<(UnixDatagram, Option<Duration>)> {
        self.parts().service_manager.take()
    }

    /// Returns true if the file of the admin socket is handed over with the socket.
    pub(crate) fn leaves_admin(&self, path: &Path) -> bool {
        self.admin.as_ref().is_some_and(|admin| admin.owns_file && admin.path == path)
    }

    /// Takes over all devices. Those of `state` stand by, and serve afterwards. `stop`: a signal ends this process.
    ///
    /// # Errors
    /// If a device does not fit, the predecessor gives up, or this process is to end. The predecessor continues to
    /// serve then.
    pub(crate) fn take_over(&self, state: &DaemonState, stop: &AtomicBool) -> Result<(), TakeoverError> {
        let checked = self.check(state);
        if let Err(error) = &checked {
            let why = error.to_string();
            // The predecessor also notices the end of the connection.
            let _ = self.channel.send(&Message::Failed { why }, &[], SEND_TIMEOUT);
        }
        checked?;
        let devices = state.devices();
        let servers: Servers = devices.iter().filter_map(|device| Some((device.id(), device.server()?))).collect();
        let sockets = devices.iter().filter_map(|device| Some(device.server()?.listener()?.0)).collect();
        let devices = devices.iter().map(|device| device.id()).collect();
        let out = state.out().list().into_iter().map(|disk| disk.id).collect();
        self.channel.send(&Message::StandsBy { devices, sockets, out }, &[], SEND_TIMEOUT)?;
        let start = Instant::now();
        let mut served = HashSet::new();
        loop {
            self.wait_message(stop)?;
            let (message, descriptors) = self.channel.receive(PACKET_TIMEOUT)?;
            let result = match message {
                Message::Connection { device, state: connection, waits } => {
                    match adopt(&servers, &device, connection, waits, descriptors) {
                        Err(AdoptError::Frontend(why)) => {
                            let evicted = Message::Evicted { why: format!("{device:?}: {why}") };
                            self.channel.send(&evicted, &[], SEND_TIMEOUT)?;
                            continue;
                        }
                        adopted => adopted.map_err(|error| format!("{device:?}: {error}")),
                    }
                }
                Message::Serve { device, positions } => {
                    let result = find(&servers, &device)
                        .and_then(|server| server.serve(positions).map_err(|why| format!("{device:?}: {why}")));
                    served.insert(device);
                    result
                }
                Message::Finished { used } => {
                    used.charge(state);
                    break;
                }
                _ => Err("found another message, expected a device".to_owned()),
            };
            let answer = match result {
                Ok(()) => Message::Done,
                Err(why) => Message::Failed { why },
            };
            self.channel.send(&answer, &[], SEND_TIMEOUT)?;
        }
        // The predecessor ends without releasing anything.
        self.images().clear();
        set_sharing(Sharing::Alone);
        self.serve_others(state, &served);
        tracing::info!(version = self.version, devices = served.len(), ms = start.elapsed().as_millis(), "taken over");
        Ok(())
    }

    /// Waits for its next message, which may take as long as its storage.
    ///
    /// # Errors
    /// If this process is to end, of which the predecessor is notified, or after an hour.
    fn wait_message(&self, stop: &AtomicBool) -> Result<(), TakeoverError> {
        let end = Instant::now() + MESSAGE_TIMEOUT;
        loop {
            if stop.load(Ordering::SeqCst) {
                let why = "a signal ends the successor".to_owned();
                // The predecessor also notices the end of the connection.
                let _ = self.channel.send(&Message::Failed { why }, &[], PACKET_TIMEOUT);
                return Err(TakeoverError::Failed(
                    "a signal ends this process; the running daemon serves on".to_owned(),
                ));
            }
            if self.channel.wait_readable(STOP_CHECK)? {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
        }
    }

    /// Notifies the predecessor that this process serves everything. It ends then.
    pub(crate) fn end(&self) {
        if let Err(error) = self.channel.send(&Message::Done, &[], SEND_TIMEOUT) {
            tracing::warn!("the daemon before this one has ended early: {error}");
        }
    }

    /// Checks that no guest would lose its device.
    fn check(&self, state: &DaemonState) -> Result<(), TakeoverError> {
        if let Some(why) = self.images().refused() {
            return Err(TakeoverError::Failed(why));
        }
        let devices: HashMap<String, _> = state.devices().into_iter().map(|device| (device.id(), device)).collect();
        for offered in self.devices.iter().filter(|offered| offered.is_connected) {
            let found = devices.get(&offered.id);
            let is_same = found.is_some_and(|device| device.describe().interface == offered.interface);
            if found.is_none() && state.out().find(&offered.id).is_some() {
                tracing::error!(disk = offered.id, "its guest has to wait: the disk is out");
            } else if !is_same {
                let OfferedDevice { id, interface, .. } = offered;
                return Err(TakeoverError::Failed(format!(
                    "found {id:?} ({interface}) of the running daemon, which a guest uses, and not here, expected it in the configuration \
                     (devices added at run time are in its --state file)"
                )));
            }
        }
        Ok(())
    }

    /// Serves the devices that the predecessor does not have, and takes over the files of its sockets.
    fn serve_others(&self, state: &DaemonState, served: &HashSet<String>) {
        let owned = self.devices.iter().filter(|offered| offered.socket.owns_file);
        let owned: HashSet<&Path> = owned.map(|offered| offered.socket.path.as_path()).collect();
        for device in state.devices() {
            let Some(server) = device.server() else { continue };
            // Another device may have had the socket.
            if server.listener().is_some_and(|(path, ..)| owned.contains(path.as_path())) {
                server.own_file();
            }
            if served.contains(&device.id()) {
                continue;
            }
            if let Err(why) = server.serve(None) {
                tracing::error!(disk = device.id(), "not served: {why}");
            }
        }
    }
}

/// The servers of the devices, by id.
type Servers = HashMap<String, Arc<Server>>;

fn find<'a>(servers: &'a Servers, id: &str) -> Result<&'a Server, String> {
    servers.get(id).map(Arc::as_ref).ok_or_else(|| format!("{id:?}: no such device here"))
}

fn adopt(
    servers: &Servers,
    id: &str,
    connection: Option<String>,
    waits: bool,
    mut descriptors: Vec<OwnedFd>,
) -> Result<(), AdoptError> {
    let waiting = if waits { descriptors.pop() } else { None };
    let connection = HandedConnection { state: connection, descriptors, waiting };
    find(servers, id).map_err(AdoptError::Configuration)?.adopt(connection)
}
