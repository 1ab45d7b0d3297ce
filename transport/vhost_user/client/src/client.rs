//! One connection to a back-end.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mqblk_memory::Region;
use mqblk_ring::split::SplitAddresses;
use rustix::event::{PollFd, PollFlags, poll};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures as Protocol,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Error as MessageError, Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::watchdog::Watchdog;

/// Pause between two tries to connect.
const RETRY: Duration = Duration::from_millis(20);
/// What vhost-user can name: the queue index of a kick is 8 bits wide.
const MAX_QUEUES: u64 = 256;

/// Why a back-end cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("socket {path}: cannot connect: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The last try's error.
        source: io::Error,
    },
    /// A step of the set-up failed.
    #[error("socket {path}: {step}: {source}")]
    Step {
        /// The socket.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        source: vhost::Error,
    },
    /// The server took the message and did not answer.
    #[error("socket {path}: {step}: no answer from the server within {} s", limit.as_secs_f32())]
    NoAnswer {
        /// The socket.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
    /// The server lacks something that cannot be done without.
    #[error("socket {path}: the server does not offer {what}")]
    Missing {
        /// The socket.
        path: PathBuf,
        /// What is missing.
        what: &'static str,
    },
    /// The host refused a resource.
    #[error("{what}: {source}")]
    Host {
        /// What was asked for.
        what: &'static str,
        /// The host's answer.
        source: io::Error,
    },
}

/// Memory that both sides see.
#[derive(Clone, Copy, Debug)]
pub struct SharedRegion<'a> {
    /// The region as mapped here.
    pub region: &'a Region,
    /// The file behind it, from its first byte.
    pub file: &'a File,
}

/// What a back-end needs to know of a split queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueSetup<'a> {
    /// Entries.
    pub size: u16,
    /// Where it lies, in guest addresses.
    pub at: SplitAddresses,
    /// The region that it lies in.
    pub region: &'a Region,
    /// The next available index that the back-end takes.
    pub base: u16,
    /// What we write to when the back-end asked for a kick.
    pub kick: &'a EventFd,
    /// What the back-end writes to when we asked for a call.
    pub call: &'a EventFd,
}

/// Memory where the back-end keeps which requests are in flight. It outlives a back-end's death: whoever serves the queues next is
/// shown it, and goes on by it.
pub struct InflightMemory {
    told: VhostUserInflight,
    file: File,
}

impl std::fmt::Debug for InflightMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InflightMemory").field("bytes", &self.told.mmap_size).finish_non_exhaustive()
    }
}

/// A connection to a vhost-user back-end.
pub struct Client {
    path: PathBuf,
    socket: UnixStream,
    frontend: Frontend,
    watchdog: Watchdog,
    limit: Duration,
    protocol: Protocol,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("path", &self.path).field("protocol", &self.protocol).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects to the server at `path`, trying again while there is no socket or nobody listens, until `patience` is
    /// over. No later step waits longer than `limit` for an answer.
    ///
    /// # Errors
    /// When nobody listened in time, or the host refuses a thread.
    pub fn connect(path: &Path, patience: Duration, limit: Duration) -> Result<Client, ClientError> {
        let deadline = Instant::now() + patience;
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
        Ok(Client { path, socket, frontend, watchdog, limit, protocol: Protocol::empty() })
    }

    /// One exchange, with its time bounded and its error named.
    fn step<T>(
        &mut self,
        step: &'static str,
        exchange: impl FnOnce(&mut Frontend) -> vhost::Result<T>,
    ) -> Result<T, ClientError> {
        let frontend = &mut self.frontend;
        self.watchdog.guard(|| exchange(frontend)).map_err(|source| {
            let path = self.path.clone();
            match self.watchdog.expired() {
                true => ClientError::NoAnswer { path, step, limit: self.limit },
                false => ClientError::Step { path, step, source },
            }
        })
    }

    /// Takes ownership and agrees on features: of `wanted`, what the server offers. Returns them. CONFIG, MQ and REPLY_ACK are
    /// used when there.
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
        let known = Protocol::CONFIG | Protocol::MQ | Protocol::REPLY_ACK | Protocol::INFLIGHT_SHMFD;
        self.protocol = protocol & known;
        let acked = self.protocol;
        self.step("SET_PROTOCOL_FEATURES", |f| f.set_protocol_features(acked))?;
        if acked.contains(Protocol::REPLY_ACK) {
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let agreed = offered & (wanted | crate::features::PROTOCOL_FEATURES);
        self.step("SET_FEATURES", |f| f.set_features(agreed))?;
        tracing::debug!(path = %self.path.display(), offered, agreed, ?protocol, "negotiated");
        Ok(agreed & wanted)
    }

    /// As [`negotiate`](Self::negotiate), with a server that goes on where another one stopped: the features in use stay.
    ///
    /// # Errors
    /// When one of them is missing, or an exchange fails.
    pub fn negotiate_again(&mut self, features: u64) -> Result<(), ClientError> {
        let agreed = self.negotiate(features)?;
        if agreed == features {
            return Ok(());
        }
        tracing::debug!(missing = features & !agreed, "features are missing");
        Err(ClientError::Missing { path: self.path.clone(), what: "the features that the server before it had" })
    }

    /// The most queues the server has.
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

    /// Whether the server has the device's configuration. That of a SCSI controller is often kept by the VMM instead.
    pub fn has_config(&self) -> bool {
        self.protocol.contains(Protocol::CONFIG)
    }

    /// Reads the device's configuration from `offset` into `bytes`.
    ///
    /// # Errors
    /// When the server has none, refuses the range, or answers with another length.
    pub fn read_config(&mut self, offset: u32, bytes: &mut [u8]) -> Result<(), ClientError> {
        if !self.has_config() {
            return Err(ClientError::Missing { path: self.path.clone(), what: "VHOST_USER_PROTOCOL_F_CONFIG" });
        }
        let zeroes = vec![0; bytes.len()];
        let flags = VhostUserConfigFlags::empty();
        let (_, found) = self.step("GET_CONFIG", |f| f.get_config(offset, zeroes.len() as u32, flags, &zeroes))?;
        if found.len() != bytes.len() {
            let source = vhost::Error::VhostUserProtocol(MessageError::InvalidMessage);
            return Err(ClientError::Step { path: self.path.clone(), step: "GET_CONFIG", source });
        }
        bytes.copy_from_slice(&found);
        Ok(())
    }

    /// Writes to the device's configuration at `offset`, as a driver does.
    ///
    /// # Errors
    /// When the exchange fails, or (with REPLY_ACK) the server refuses.
    pub fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), ClientError> {
        // Flags 0 is a driver's write (VHOST_SET_CONFIG_TYPE_FRONTEND); the crate's WRITABLE is bit 0, which says migration.
        self.step("SET_CONFIG", |f| f.set_config(offset, VhostUserConfigFlags::empty(), bytes))
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

    /// Has the back-end make memory for the requests in flight of `queues` queues, of at most `queue_size` entries, and use it.
    /// `None` when it keeps no such memory. Before any queue starts.
    ///
    /// # Errors
    /// When an exchange fails.
    pub fn make_inflight(&mut self, queues: u16, queue_size: u16) -> Result<Option<InflightMemory>, ClientError> {
        if !self.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Ok(None);
        }
        let wanted = VhostUserInflight { mmap_size: 0, mmap_offset: 0, num_queues: queues, queue_size };
        let (told, file) = self.step("GET_INFLIGHT_FD", |f| f.get_inflight_fd(&wanted))?;
        let memory = InflightMemory { told, file };
        self.show_inflight(&memory)?;
        Ok(Some(memory))
    }

    /// Shows the back-end the memory where another one kept what was in flight. Before any queue starts.
    ///
    /// # Errors
    /// When it keeps no such memory, or the exchange fails.
    pub fn show_inflight(&mut self, memory: &InflightMemory) -> Result<(), ClientError> {
        if !self.protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Err(ClientError::Missing { path: self.path.clone(), what: "VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD" });
        }
        self.step("SET_INFLIGHT_FD", |f| f.set_inflight_fd(&memory.told, memory.file.as_raw_fd()))
    }

    /// Sets queue `index` up, enables it and starts it.
    ///
    /// # Errors
    /// When an exchange fails, or (with REPLY_ACK) the server refuses.
    pub fn start_queue(&mut self, index: u16, queue: &QueueSetup<'_>) -> Result<(), ClientError> {
        let region = queue.region;
        // Rings are named by the address in this process (no IOMMU).
        let user = |guest: u64| guest.wrapping_sub(region.guest().0).wrapping_add(region.user().0);
        let address = VringConfigData {
            queue_max_size: queue.size,
            queue_size: queue.size,
            flags: 0,
            desc_table_addr: user(queue.at.desc.0),
            used_ring_addr: user(queue.at.used.0),
            avail_ring_addr: user(queue.at.avail.0),
            log_addr: None,
        };
        let at = usize::from(index);
        self.step("SET_VRING_NUM", |f| f.set_vring_num(at, queue.size))?;
        self.step("SET_VRING_BASE", |f| f.set_vring_base(at, queue.base))?;
        self.step("SET_VRING_ADDR", |f| f.set_vring_addr(at, &address))?;
        self.step("SET_VRING_CALL", |f| f.set_vring_call(at, queue.call))?;
        self.step("SET_VRING_KICK", |f| f.set_vring_kick(at, queue.kick))?;
        self.step("SET_VRING_ENABLE", |f| f.set_vring_enable(at, true))
    }

    /// Stops queue `index`: answered when the server has finished or given up what was in flight. Returns the next
    /// available index that it would take.
    ///
    /// # Errors
    /// When the exchange fails.
    pub fn stop_queue(&mut self, index: u16) -> Result<u16, ClientError> {
        let base = self.step("GET_VRING_BASE", |f| f.get_vring_base(usize::from(index)))?;
        Ok(base as u16)
    }

    /// The process on the other end, if the system says.
    pub fn server_pid(&self) -> Option<i32> {
        let peer = rustix::net::sockopt::socket_peercred(&self.socket).ok()?;
        Some(peer.pid.as_raw_nonzero().get())
    }

    /// Another handle to the connection, to see its end with.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn lifeline(&self) -> io::Result<Lifeline> {
        Ok(Lifeline { socket: self.socket.try_clone()? })
    }
}

/// Sees when the server goes away.
#[derive(Debug)]
pub struct Lifeline {
    socket: UnixStream,
}

impl Lifeline {
    /// Waits until the server closes the connection, or `timeout` is over. Returns whether the server is gone.
    pub fn wait_gone(&self, timeout: Duration) -> bool {
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
    use std::os::unix::net::UnixListener;

    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn nobody_listening_is_an_error_that_names_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let error = Client::connect(&folder.path().join("none"), SHORT, SHORT).unwrap_err();
        assert!(matches!(&error, ClientError::Connect { source, .. } if source.kind() == io::ErrorKind::NotFound));
        assert!(error.to_string().contains("/none"));
    }

    #[test]
    fn a_server_that_does_not_answer_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("silent");
        let _listener = UnixListener::bind(&path).unwrap();
        let mut client = Client::connect(&path, SHORT, SHORT).unwrap();
        let error = client.negotiate(0).unwrap_err();
        assert!(matches!(error, ClientError::NoAnswer { step: "GET_FEATURES", .. }), "{error}");
    }

    #[test]
    fn a_server_that_leaves_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("leaving");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = Client::connect(&path, SHORT, Duration::from_secs(60)).unwrap();
        let lifeline = client.lifeline().unwrap();
        let (served, _) = listener.accept().unwrap();
        assert!(!lifeline.wait_gone(Duration::ZERO));
        assert_eq!(client.server_pid(), Some(std::process::id() as i32));
        drop(served);
        assert!(lifeline.wait_gone(Duration::from_secs(60)));
        assert!(matches!(
            client.negotiate(0).unwrap_err(),
            ClientError::Step { step: "SET_OWNER" | "GET_FEATURES", .. }
        ));
    }
}
