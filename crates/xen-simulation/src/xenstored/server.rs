//! The server: one thread for all connections, as in a real xenstored. It handles a bounded amount of each connection's
//! input per round.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use mqblk_core::lock::lock;
use mqblk_memory::DomainId;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use super::state::{ClientId, XenstoredState};
use super::{XenstoreQuota, socket_path};
use crate::events::signal;
use crate::hypercall::{address, remove_stale};
use mqblk_xen::store::wire::{HEADER_BYTES, Header, PAYLOAD_MAX, Verb};

/// Bytes of unsent replies above which a client's requests wait.
const MAX_UNSENT_REPLY_BYTES: usize = 64 * 1024;
/// Number of unsent events above which a client is disconnected.
const MAX_UNSENT_EVENTS: usize = 64 * 1024;

#[derive(Debug)]
struct ClientLink {
    stream: Arc<UnixStream>,
    input: Vec<u8>,
    output: Vec<u8>,
}

#[derive(Debug)]
struct Inner {
    state: XenstoredState,
    listeners: BTreeMap<DomainId, Arc<UnixListener>>,
    links: HashMap<ClientId, ClientLink>,
    ending: bool,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// Wakes the server's thread for work that no socket signals.
    wakeup: Arc<OwnedFd>,
    folder: PathBuf,
}

#[derive(Debug)]
pub(in super::super) struct Xenstored {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Xenstored {
    /// Starts the server, without domains.
    pub(in super::super) fn start(folder: &Path) -> io::Result<Xenstored> {
        let wakeup = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = XenstoredState::new();
        let inner = Inner { state, listeners: BTreeMap::new(), links: HashMap::new(), ending: false };
        let wakeup = Arc::new(wakeup);
        let shared = Arc::new(Shared { inner: Mutex::new(inner), wakeup, folder: folder.to_owned() });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("xenstored".to_owned()).spawn(move || for_thread.serve())?;
        Ok(Xenstored { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Introduces a domain and listens on its socket.
    pub(in super::super) fn introduce(&self, domain: DomainId) -> io::Result<()> {
        let path = socket_path(&self.shared.folder, domain);
        address(&path)?;
        remove_stale(&path)?;
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        let mut inner = self.shared.inner();
        inner.listeners.insert(domain, Arc::new(listener));
        inner.state.introduce(domain);
        drop(inner);
        signal(&self.shared.wakeup);
        Ok(())
    }

    /// Releases a domain and removes its socket.
    pub(in super::super) fn release(&self, domain: DomainId) {
        let mut inner = self.shared.inner();
        inner.listeners.remove(&domain);
        let _ = std::fs::remove_file(socket_path(&self.shared.folder, domain));
        inner.state.release(domain);
        inner.drop_links_without_clients();
        drop(inner);
        signal(&self.shared.wakeup);
    }

    pub(in super::super) fn inject_conflicts(&self, count: u32) {
        self.shared.inner().state.conflicts = count;
    }

    pub(in super::super) fn set_quota(&self, quota: XenstoreQuota) {
        self.shared.inner().state.quota = quota;
    }

    /// Ends the server.
    pub(in super::super) fn end(&self) {
        self.shared.inner().ending = true;
        signal(&self.shared.wakeup);
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        let mut inner = self.shared.inner();
        for domain in std::mem::take(&mut inner.listeners).into_keys() {
            let _ = std::fs::remove_file(socket_path(&self.shared.folder, domain));
        }
        inner.links.clear();
    }
}

impl Drop for Xenstored {
    fn drop(&mut self) {
        self.end();
    }
}

/// A polled descriptor, kept open during the poll.
enum PollSource {
    Wakeup(Arc<OwnedFd>),
    Listener(DomainId, Arc<UnixListener>),
    Client(ClientId, Arc<UnixStream>, PollFlags),
}

impl PollSource {
    fn polled(&self) -> PollFd<'_> {
        match self {
            PollSource::Wakeup(wakeup) => PollFd::new(wakeup, PollFlags::IN),
            PollSource::Listener(_, listener) => PollFd::new(listener, PollFlags::IN),
            PollSource::Client(_, stream, flags) => PollFd::new(stream, *flags),
        }
    }
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    fn serve(&self) {
        loop {
            let sources = {
                let inner = self.inner();
                if inner.ending {
                    return;
                }
                inner.sources(&self.wakeup)
            };
            let mut polled: Vec<PollFd<'_>> = sources.iter().map(PollSource::polled).collect();
            let _ = rustix::event::poll(&mut polled, None);
            let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
            let mut inner = self.inner();
            for (source, _) in sources.iter().zip(ready).filter(|(_, ready)| *ready) {
                match source {
                    PollSource::Wakeup(wakeup) => {
                        let _ = rustix::io::read(wakeup, &mut [0; 8]);
                    }
                    PollSource::Listener(domain, listener) => inner.accept(*domain, listener),
                    PollSource::Client(id, _, _) => inner.read_client(*id),
                }
            }
            inner.flush_clients();
        }
    }
}

impl Inner {
    fn sources(&self, wakeup: &Arc<OwnedFd>) -> Vec<PollSource> {
        let listeners =
            self.listeners.iter().map(|(domain, listener)| PollSource::Listener(*domain, Arc::clone(listener)));
        let clients = self.links.iter().map(|(id, link)| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, link.output.len() < MAX_UNSENT_REPLY_BYTES);
            flags.set(PollFlags::OUT, !link.output.is_empty());
            PollSource::Client(*id, Arc::clone(&link.stream), flags)
        });
        [PollSource::Wakeup(Arc::clone(wakeup))].into_iter().chain(listeners).chain(clients).collect()
    }

    fn accept(&mut self, domain: DomainId, listener: &UnixListener) {
        if !self.listeners.contains_key(&domain) {
            return;
        }
        match listener.accept() {
            Ok((stream, _)) => {
                if stream.set_nonblocking(true).is_ok() {
                    let id = self.state.connect(domain);
                    self.links.insert(id, ClientLink { stream: Arc::new(stream), input: vec![], output: vec![] });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(domain = domain.0, %error, "the simulated xenstored cannot accept a connection");
                // The listener stays readable: without a pause this would spin.
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
    }

    /// Reads a bounded amount of one client's input, and handles its requests.
    fn read_client(&mut self, id: ClientId) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.output.len() < MAX_UNSENT_REPLY_BYTES {
            let mut bytes = [0; HEADER_BYTES + PAYLOAD_MAX];
            match (&*link.stream).read(&mut bytes) {
                Ok(0) => return self.end_client(id, None),
                Ok(got) => link.input.extend(&bytes[..got]),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return self.end_client(id, Some(&error.to_string())),
            }
        }
        self.handle_requests(id);
    }

    /// Handles the requests that have arrived completely.
    fn handle_requests(&mut self, id: ClientId) {
        loop {
            let Some(link) = self.links.get_mut(&id) else { return };
            let Some((header, rest)) = link.input.split_first_chunk::<HEADER_BYTES>() else { return };
            let header = Header::decode(*header);
            let len = header.len as usize;
            if len > PAYLOAD_MAX {
                let why = format!("found a payload of {len} bytes, expected {PAYLOAD_MAX} at most");
                return self.end_client(id, Some(&why));
            }
            if rest.len() < len || link.output.len() >= MAX_UNSENT_REPLY_BYTES {
                return;
            }
            let payload = rest[..len].to_vec();
            link.input.drain(..HEADER_BYTES + len);
            let reply = self.state.handle_request(id, header, &payload);
            let Some(link) = self.links.get_mut(&id) else { return };
            match reply {
                Ok(payload) => put(&mut link.output, header, &payload),
                Err(refusal) => {
                    let header = Header { verb: Verb::ERROR, ..header };
                    put(&mut link.output, header, format!("{}\0", refusal.name()).as_bytes());
                }
            }
        }
    }

    /// Sends replies and events as far as the clients' sockets take them.
    fn flush_clients(&mut self) {
        let ids: Vec<ClientId> = self.links.keys().copied().collect();
        for id in ids {
            let (Some(link), Some(client)) = (self.links.get_mut(&id), self.state.clients.get_mut(&id)) else {
                continue;
            };
            if client.event_queue.len() > MAX_UNSENT_EVENTS {
                self.end_client(id, Some("its events are not read"));
                continue;
            }
            let was_full = link.output.len() >= MAX_UNSENT_REPLY_BYTES;
            let result = loop {
                while link.output.len() < PAYLOAD_MAX
                    && let Some((path, token)) = client.next_event()
                {
                    let header = Header { verb: Verb::WATCH_EVENT, request: 0, transaction: 0, len: 0 };
                    put(&mut link.output, header, &[path.as_bytes(), &[0], &token, &[0]].concat());
                }
                if link.output.is_empty() {
                    break Ok(());
                }
                match (&*link.stream).write(&link.output) {
                    Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
                    Ok(sent) => drop(link.output.drain(..sent)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => break Err(error),
                }
            };
            match result {
                Err(error) => self.end_client(id, Some(&error.to_string())),
                // Requests may have waited for space. Their replies are sent in the next round.
                Ok(()) if was_full => self.handle_requests(id),
                Ok(()) => {}
            }
        }
    }

    fn end_client(&mut self, id: ClientId, why: Option<&str>) {
        if let (Some(client), Some(why)) = (self.state.clients.get(&id), why) {
            tracing::debug!(domain = client.domain.0, why, "the simulated xenstored ends a connection");
        }
        self.state.clients.remove(&id);
        self.links.remove(&id);
    }

    fn drop_links_without_clients(&mut self) {
        let Inner { state, links, .. } = self;
        links.retain(|id, _| state.clients.contains_key(id));
    }
}

fn put(output: &mut Vec<u8>, header: Header, payload: &[u8]) {
    output.extend(Header { len: payload.len() as u32, ..header }.encode());
    output.extend(payload);
}
