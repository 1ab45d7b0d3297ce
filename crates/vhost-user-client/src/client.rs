//! One connection to a backend.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mqblk_memory::Region;
use mqblk_ring::virtqueue::RingAddresses;
use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures as Protocol,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Error as MessageError, Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::backend_channel::BackendChannel;
use crate::watchdog::Watchdog;

/// Pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(20);
/// Maximum number of queues: the queue index of SET_VRING_KICK is 8 bits wide.
const MAX_QUEUES: u64 = 256;

/// Error of a connection to a backend.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No server listens.
    #[error("socket {path}: cannot connect: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Error of the last attempt.
        source: io::Error,
    },
    /// An exchange failed.
    #[error("socket {path}: {step}: {source}")]
    Exchange {
        /// The socket.
        path: PathBuf,
        /// The failed step.
        step: &'static str,
        /// The error.
        source: vhost::Error,
    },
    /// The server did not reply.
    #[error("socket {path}: {step}: no answer from the server within {} s", limit.as_secs_f32())]
    NoReply {
        /// The socket.
        path: PathBuf,
        /// The step without a reply.
        step: &'static str,
        /// Time that the client waited.
        limit: Duration,
    },
    /// The server lacks a required feature.
    #[error("socket {path}: the server does not offer {what}")]
    Missing {
        /// The socket.
        path: PathBuf,
        /// The feature.
        what: &'static str,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Host {
        /// The purpose of the call.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A memory region shared with the backend.
#[derive(Clone, Copy, Debug)]
pub struct SharedRegion<'a> {
    /// The region as mapped in this process.
    pub region: &'a Region,
    /// The file behind it, mapped from offset 0.
    pub file: &'a File,
}

/// Configuration of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueSetup<'a> {
    /// Number of entries.
    pub size: u16,
    /// Guest addresses of the rings.
    pub addresses: RingAddresses,
    /// The region that contains the rings.
    pub region: &'a Region,
    /// The next available index for the backend to read. Of a packed ring: the slot in bits 0 to 14, the wrap counter
    /// in bit 15. The backend's used position is the same.
    pub base: u16,
    /// Eventfd for kicks.
    pub kick: &'a EventFd,
    /// Eventfd for calls.
    pub call: &'a EventFd,
}

/// Memory in which the backend records the requests in flight. It outlives a backend: the next one gets it and replays
/// the requests.
pub struct InflightMemory {
    layout: VhostUserInflight,
    file: File,
}

impl std::fmt::Debug for InflightMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InflightMemory").field("bytes", &self.layout.mmap_size).finish_non_exhaustive()
    }
}

/// A connection to a vhost-user backend.
pub struct Client {
    path: PathBuf,
    socket: UnixStream,
    frontend: Frontend,
    watchdog: Watchdog,
    reply_timeout: Duration,
    protocol: Protocol,
    accepts_backend_requests: bool,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("path", &self.path).field("protocol", &self.protocol).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to the server at `path`, and retries for `timeout` while there is no socket or no listener. No later
    /// exchange waits longer than `limit` for a reply.
    ///
    /// # Errors
    /// When no server listens in time, or a system call fails.
    pub fn connect(path: &Path, timeout: Duration, limit: Duration) -> Result<Client, ClientError> {
        let deadline = Instant::now() + timeout;
        let socket = loop {
            match UnixStream::connect(path) {
                Ok(socket) => break socket,
                Err(error) => {
                    let starting = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
                    if !starting || Instant::now() >= deadline {
                        return Err(ClientError::Connect { path: path.to_owned(), source: error });
                    }
                    std::thread::sleep(RETRY);
                }
            }
        };
        let host = |source| ClientError::Host { what: "connection set-up", source };
        let watchdog = Watchdog::new(socket.try_clone().map_err(host)?, limit).map_err(host)?;
        let frontend = Frontend::from_stream(socket.try_clone().map_err(host)?, MAX_QUEUES);
        let path = path.to_owned();
        Ok(Client {
            path,
            socket,
            frontend,
            watchdog,
            reply_timeout: limit,
            protocol: Protocol::empty(),
            accepts_backend_requests: false,
        })
    }

    /// Runs one exchange with a bound on its time, and names it in the error.
    fn step<T>(
        &mut self,
        step: &'static str,
        exchange: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> Result<T, ClientError> {
        let frontend = &mut self.frontend;
        self.watchdog.guard(|| exchange(frontend)).map_err(|source| {
            let path = self.path.clone();
            match self.watchdog.expired() {
                true => ClientError::NoReply { path, step, limit: self.reply_timeout },
                false => ClientError::Exchange { path, step, source },
            }
        })
    }

    /// Offers BACKEND_REQ in [`negotiate`](Self::negotiate). The caller must then handle the backend's messages: it may
    /// wait for replies.
    pub fn accept_backend_requests(&mut self) {
        self.accepts_backend_requests = true;
    }

    /// Sends SET_OWNER and negotiates features. Returns those of `wanted` that the server offers. Uses CONFIG, MQ,
    /// REPLY_ACK, INFLIGHT_SHMFD and, after [`accept_backend_requests`](Self::accept_backend_requests), BACKEND_REQ
    /// if the server offers them.
    ///
    /// # Errors
    /// When the server lacks VERSION_1 or protocol features, or an exchange fails.
    pub fn negotiate(&mut self, wanted: u64) -> Result<u64, ClientError> {
        let missing = |path: &Path, what| ClientError::Missing { path: path.to_owned(), what };
        self.step("SET_OWNER", |f| f.set_owner())?;
        let offered = self.step("GET_FEATURES", |f| f.get_features())?;
        if offered & crate::features::VERSION_1 == 0 {
            return Err(missing(&self.path, "VIRTIO_F_VERSION_1"));
        }
        if offered & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            return Err(missing(&self.path, "VHOST_USER_F_PROTOCOL_FEATURES"));
        }
        let protocol = self.step("GET_PROTOCOL_FEATURES", |f| f.get_protocol_features())?;
        let mut known = Protocol::CONFIG | Protocol::MQ | Protocol::REPLY_ACK | Protocol::INFLIGHT_SHMFD;
        known.set(Protocol::BACKEND_REQ, self.accepts_backend_requests);
        self.protocol = protocol & known;
        let acked = self.protocol;
        self.step("SET_PROTOCOL_FEATURES", |f| f.set_protocol_features(acked))?;
        if acked.contains(Protocol::REPLY_ACK) {
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let negotiated = offered & (wanted | crate::features::PROTOCOL_FEATURES);
        self.step("SET_FEATURES", |f| f.set_features(negotiated))?;
        tracing::debug!(path = %self.path.display(), offered, negotiated, ?protocol, "negotiated");
        Ok(negotiated & wanted)
    }

    /// As [`negotiate`](Self::negotiate), with a server that resumes the queues of another one. Requires the same
    /// features.
    ///
    /// # Errors
    /// When a feature is missing, or an exchange fails.
    pub fn renegotiate(&mut self, features: u64) -> Result<(), ClientError> {
        let negotiated = self.negotiate(features)?;
        if negotiated == features {
            return Ok(());
        }
        tracing::debug!(missing = features & !negotiated, "features are missing");
        Err(ClientError::Missing { path: self.path.clone(), what: "the features that the server before it had" })
    }

    /// Returns the server's maximum number of queues.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn queue_count(&mut self) -> Result<u16, ClientError> {
        if !self.protocol.contains(Protocol::MQ) {
            return Ok(1);
        }
        let count = self.step("GET_QUEUE_NUM", |f| f.get_queue_num())?;
        Ok(count.min(MAX_QUEUES) as u16)
    }

    /// Returns true if the server has the device's configuration space. For a SCSI controller the VMM often has it
    /// instead.
    pub fn has_config(&self) -> bool {
        self.protocol.contains(Protocol::CONFIG)
    }

    /// Reads the device's configuration from `offset` into `bytes`.
    ///
    /// # Errors
    /// When the server has none, refuses the range, or returns another length.
    pub fn read_config(&mut self, offset: u32, bytes: &mut [u8]) -> Result<(), ClientError> {
        if !self.has_config() {
            return Err(ClientError::Missing { path: self.path.clone(), what: "VHOST_USER_PROTOCOL_F_CONFIG" });
        }
        let zeroes = vec![0; bytes.len()];
        let flags = VhostUserConfigFlags::empty();
        let (_, found) = self.step("GET_CONFIG", |f| f.get_config(offset, zeroes.len() as u32, flags, &zeroes))?;
        if found.len() != bytes.len() {
            let source = vhost::Error::VhostUserProtocol(MessageError::InvalidMessage);
            return Err(ClientError::Exchange { path: self.path.clone(), step: "GET_CONFIG", source });
        }
        bytes.copy_from_slice(&found);
        Ok(())
    }

    /// Writes to the device's configuration at `offset`, as a driver does.
    ///
    /// # Errors
    /// When the exchange fails, or (with REPLY_ACK) the server refuses.
    pub fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), ClientError> {
        // Flags 0 is a driver's write (VHOST_SET_CONFIG_TYPE_FRONTEND); the crate's WRITABLE is bit 0, which means
        // migration.
        self.step("SET_CONFIG", |f| f.set_config(offset, VhostUserConfigFlags::empty(), bytes))
    }

    /// Sends SET_BACKEND_REQ_FD and returns the channel for the backend's messages. `None` if BACKEND_REQ was not
    /// negotiated.
    ///
    /// # Errors
    /// When no socket can be created, or the exchange fails.
    pub fn open_backend_channel(&mut self) -> Result<Option<BackendChannel>, ClientError> {
        if !self.protocol.contains(Protocol::BACKEND_REQ) {
            return Ok(None);
        }
        let pair = BackendChannel::pair();
        let (ours, theirs) = pair.map_err(|source| ClientError::Host { what: "backend request socket", source })?;
        self.step("SET_BACKEND_REQ_FD", |f| f.set_backend_request_fd(&theirs))?;
        Ok(Some(ours))
    }

    /// Replaces the memory table.
    ///
    /// # Errors
    /// When the exchange fails, or (with REPLY_ACK) the server refuses.
    pub fn set_memory(&mut self, regions: &[SharedRegion<'_>]) -> Result<(), ClientError> {
        let table: Vec<VhostUserMemoryRegionInfo> = regions
            .iter()
            .map(|SharedRegion { region, file }| VhostUserMemoryRegionInfo {
                guest_phys_addr: region.guest().0,
                memory_size: region.len(),
                userspace_addr: region.user().0,
                mmap_offset: 0,
                mmap_handle: file.as_raw_fd(),
            })
            .collect();
        self.step("SET_MEM_TABLE", |f| f.set_mem_table(&table).map(|_| ()))
    }

    /// Sends GET_INFLIGHT_FD for `queues` queues of at most `queue_size` entries, then SET_INFLIGHT_FD. `None` if
    /// INFLIGHT_SHMFD was not negotiated. Call it before any queue starts.
    ///
    /// # Errors
    /// When an exchange fails.
    pub fn create_inflight(&mut self, queues: u16, queue_size: u16) -> Result<Option<InflightMemory>, ClientError> {
        if !self.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Ok(None);
        }
        let wanted = VhostUserInflight { mmap_size: 0, mmap_offset: 0, num_queues: queues, queue_size };
        let (layout, file) = self.step("GET_INFLIGHT_FD", |f| f.get_inflight_fd(&wanted))?;
        // The library receives it without the flag: programs that this process starts would hold the memory.
        let _ = rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC);
        let memory = InflightMemory { layout, file };
        self.set_inflight(&memory)?;
        Ok(Some(memory))
    }

    /// Sends SET_INFLIGHT_FD with the memory of an earlier backend. Call it before any queue starts.
    ///
    /// # Errors
    /// When INFLIGHT_SHMFD was not negotiated, or the exchange fails.
    pub fn set_inflight(&mut self, memory: &InflightMemory) -> Result<(), ClientError> {
        if !self.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Err(ClientError::Missing { path: self.path.clone(), what: "VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD" });
        }
        self.step("SET_INFLIGHT_FD", |f| f.set_inflight_fd(&memory.layout, memory.file.as_raw_fd()))
    }

    /// Configures, starts and enables queue `index`.
    ///
    /// # Errors
    /// When an exchange fails, or (with REPLY_ACK) the server refuses.
    pub fn start_queue(&mut self, index: u16, queue: &QueueSetup<'_>) -> Result<(), ClientError> {
        let region = queue.region;
        // Rings are given by their addresses in this process (no IOMMU).
        let user = |guest: u64| guest.wrapping_sub(region.guest().0).wrapping_add(region.user().0);
        let address = VringConfigData {
            queue_max_size: queue.size,
            queue_size: queue.size,
            flags: 0,
            desc_table_addr: user(queue.addresses.desc.0),
            used_ring_addr: user(queue.addresses.used.0),
            avail_ring_addr: user(queue.addresses.avail.0),
            log_addr: None,
        };
        let queue_index = usize::from(index);
        self.step("SET_VRING_NUM", |f| f.set_vring_num(queue_index, queue.size))?;
        self.step("SET_VRING_BASE", |f| f.set_vring_base(queue_index, queue.base))?;
        self.step("SET_VRING_ADDR", |f| f.set_vring_addr(queue_index, &address))?;
        self.step("SET_VRING_CALL", |f| f.set_vring_call(queue_index, queue.call))?;
        self.step("SET_VRING_KICK", |f| f.set_vring_kick(queue_index, queue.kick))?;
        self.step("SET_VRING_ENABLE", |f| f.set_vring_enable(queue_index, true))
    }

    /// Stops queue `index` (GET_VRING_BASE): the server replies after it has completed or cancelled the requests in
    /// flight. Returns the next available index that it would read, see [`QueueSetup::base`].
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn stop_queue(&mut self, index: u16) -> Result<u16, ClientError> {
        let base = self.step("GET_VRING_BASE", |f| f.get_vring_base(usize::from(index)))?;
        Ok(base as u16)
    }

    /// Returns the server's process id, if known.
    pub fn server_pid(&self) -> Option<i32> {
        let peer = rustix::net::sockopt::socket_peercred(&self.socket).ok()?;
        Some(peer.pid.as_raw_nonzero().get())
    }

    /// Returns a monitor of the connection's end.
    ///
    /// # Errors
    /// When the descriptor cannot be duplicated.
    pub fn hangup_monitor(&self) -> io::Result<HangupMonitor> {
        Ok(HangupMonitor { socket: self.socket.try_clone()? })
    }
}

/// Detects that the server has closed the connection.
#[derive(Debug)]
pub struct HangupMonitor {
    socket: UnixStream,
}

impl HangupMonitor {
    /// Waits until the server closes the connection, for `timeout` at most. Returns true if it has.
    pub fn wait_hangup(&self, timeout: Duration) -> bool {
        let timeout =
            rustix::event::Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => !fds[0].revents().is_empty(),
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;

    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn a_missing_server_is_an_error_that_names_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let error = Client::connect(&folder.path().join("none"), SHORT, SHORT).unwrap_err();
        assert!(matches!(&error, ClientError::Connect { source, .. } if source.kind() == io::ErrorKind::NotFound));
        assert!(error.to_string().contains("/none"));
    }

    #[test]
    fn a_wait_for_a_reply_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("silent");
        let _listener = UnixListener::bind(&path).unwrap();
        let mut client = Client::connect(&path, SHORT, SHORT).unwrap();
        let error = client.negotiate(0).unwrap_err();
        assert!(matches!(error, ClientError::NoReply { step: "GET_FEATURES", .. }), "{error}");
    }

    #[test]
    fn a_closed_connection_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("leaving");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = Client::connect(&path, SHORT, Duration::from_secs(60)).unwrap();
        let monitor = client.hangup_monitor().unwrap();
        let (served, _) = listener.accept().unwrap();
        assert!(!monitor.wait_hangup(Duration::ZERO));
        assert_eq!(client.server_pid(), Some(std::process::id() as i32));
        drop(served);
        assert!(monitor.wait_hangup(Duration::from_secs(60)));
        assert!(matches!(
            client.negotiate(0).unwrap_err(),
            ClientError::Exchange { step: "SET_OWNER" | "GET_FEATURES", .. }
        ));
    }

    /// A server that offers VERSION_1 and INFLIGHT_SHMFD, and gives `file` for the entries.
    fn give_inflight(mut socket: std::os::unix::net::UnixStream, file: std::fs::File) {
        use std::io::{IoSlice, Read};
        let mut head = [0; 12];
        while socket.read_exact(&mut head).is_ok() {
            let [request, _, size] = [0, 4, 8].map(|at| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap()));
            socket.read_exact(&mut vec![0; size as usize]).unwrap();
            let payload: Vec<u8> = match request {
                1 => (crate::features::VERSION_1 | crate::features::PROTOCOL_FEATURES).to_ne_bytes().to_vec(),
                15 => Protocol::INFLIGHT_SHMFD.bits().to_ne_bytes().to_vec(),
                // The size, the offset, queues, entries, and the end of a structure of u64.
                31 => [&4096_u64.to_ne_bytes()[..], &[0; 8], &[1, 0, 16, 0, 0, 0, 0, 0]].concat(),
                _ => continue,
            };
            let reply: Vec<u8> = [request, 5, payload.len() as u32].into_iter().flat_map(u32::to_ne_bytes).collect();
            let fds = [file.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
            if request == 31 {
                control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
            }
            let parts = [IoSlice::new(&reply), IoSlice::new(&payload)];
            rustix::net::sendmsg(&socket, &parts, &mut control, rustix::net::SendFlags::empty()).unwrap();
        }
    }

    #[test]
    fn programs_that_are_started_do_not_inherit_inflight_memory() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let minute = Duration::from_secs(60);
        let mut client = Client::connect(&folder.path().join("socket"), minute, minute).unwrap();
        let (socket, file) = (listener.accept().unwrap().0, tempfile::tempfile().unwrap());
        let server = std::thread::spawn(move || give_inflight(socket, file));
        client.negotiate(0).unwrap();
        let memory = client.create_inflight(1, 16).unwrap().expect("it is offered");
        assert_eq!(memory.layout.mmap_size, 4096);
        assert!(rustix::io::fcntl_getfd(&memory.file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        drop(client);
        server.join().unwrap();
    }
}
