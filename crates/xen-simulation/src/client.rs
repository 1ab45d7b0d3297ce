//! The program's side of a simulated Xen.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use mqblk_memory::{DomainId, GrantAccess, GrantRef, PAGE_BYTES};

use super::foreign_domains::ForeignDomains;
use super::grants::SimulatedGrants;
use super::hypercall::{Hypercall, HypercallSocket, hypercall, malformed_result};
use super::shared_memory::{ForeignDomain, SharedInfo, map_file};
use super::{events, xenstored};
use mqblk_xen::store::Xenstore;
use mqblk_xen::{EventPort, Port, SharedPages, Xen, XenError};

/// A program's connection to a simulated machine.
struct SimulatedXen {
    folder: PathBuf,
    domain: DomainId,
    connection: Arc<Mutex<HypercallSocket>>,
    shared_info: Arc<SharedInfo>,
    domains: Arc<ForeignDomains>,
    /// The own domain's memory, attached by the first `share`.
    own_memory: OnceLock<Arc<ForeignDomain>>,
}

/// Connects a program of `domain`. Returns the connection, its number and the machine's shared info.
fn connect_packets(folder: &Path, domain: DomainId) -> io::Result<(Mutex<HypercallSocket>, u32, OwnedFd)> {
    let connection = Mutex::new(HypercallSocket::connect(folder)?);
    let (number, board) = hypercall(&connection, &Hypercall::Connect(domain), |words, descriptors| {
        let [board] = descriptors.try_into().map_err(|_| malformed_result())?;
        Ok((*words.first().ok_or_else(malformed_result)?, board))
    })?;
    Ok((connection, number, board))
}

/// Connects to the machine in `folder` as a program of `domain`. Creates the domain if it does not exist.
///
/// # Errors
/// When no machine runs there.
pub fn connect(folder: &Path, domain: DomainId) -> Result<Arc<dyn Xen>, XenError> {
    let connected = connect_packets(folder, domain).and_then(|(connection, _, board)| {
        Ok(SimulatedXen {
            folder: folder.to_owned(),
            domain,
            connection: Arc::new(connection),
            shared_info: Arc::new(SharedInfo::attach(board)?),
            domains: Arc::default(),
            own_memory: OnceLock::new(),
        })
    });
    match connected {
        Ok(simulated) => Ok(Arc::new(simulated)),
        Err(source) => {
            let what = format!("the simulated machine in {}, for domain {}", folder.display(), domain.0);
            Err(XenError { what, source })
        }
    }
}

impl SimulatedXen {
    fn failed(&self, what: String) -> impl FnOnce(io::Error) -> XenError {
        let what =
            format!("{what}, for domain {} of the simulated machine in {}", self.domain.0, self.folder.display());
        move |source| XenError { what, source }
    }

    fn port(&self, call: &Hypercall) -> io::Result<EventPort> {
        hypercall(&self.connection, call, |words, descriptors| {
            let [port, outgoing, incoming] = *words else { return Err(malformed_result()) };
            let [local, remote] = descriptors.try_into().map_err(|_| malformed_result())?;
            let descriptor: OwnedFd = OwnedFd::try_clone(&local)?;
            let channel = events::SimulatedPort {
                connection: Arc::clone(&self.connection),
                port: Port(port),
                outgoing: self.shared_info.event_line(outgoing).ok_or_else(malformed_result)?,
                remote_event: remote,
                incoming: self.shared_info.event_line(incoming).ok_or_else(malformed_result)?,
                local_event: local,
            };
            Ok(EventPort { port: Port(port), channel: Box::new(channel), descriptor })
        })
    }

    fn share_pages(&self, with: DomainId, pages: u32, writable: bool) -> io::Result<SharedPages> {
        let own = match self.own_memory.get() {
            Some(own) => own,
            None => {
                let own = self.domains.attach(self.domain, &self.connection)?;
                self.own_memory.get_or_init(|| own)
            }
        };
        let call = Hypercall::SharePages { with, pages, writable };
        let [share, first_frame, first_ref] =
            hypercall(&self.connection, &call, |words, _| words.try_into().map_err(|_| malformed_result()))?;
        let guard = GrantGuard { connection: Arc::clone(&self.connection), share };
        let page = u64::from(PAGE_BYTES);
        let memory = map_file(&own.memory_file, u64::from(first_frame) * page, u64::from(pages) * page)?;
        let refs = (first_ref..).map(GrantRef).take(pages as usize).collect();
        Ok(SharedPages { memory, refs, guard: Box::new(guard) })
    }
}

/// Ends the grants of one `share` on drop.
struct GrantGuard {
    connection: Arc<Mutex<HypercallSocket>>,
    share: u32,
}

impl Drop for GrantGuard {
    fn drop(&mut self) {
        if let Err(error) = hypercall(&self.connection, &Hypercall::UnsharePages { share: self.share }, |_, _| Ok(())) {
            // The machine or the own domain has ended, and the grants with it.
            tracing::debug!(share = self.share, %error, "ending grants");
        }
    }
}

impl Xen for SimulatedXen {
    fn store(&self) -> Result<Xenstore, XenError> {
        let path = xenstored::socket_path(&self.folder, self.domain);
        Xenstore::connect(&path).map_err(|error| self.failed("xenstore".to_owned())(io::Error::other(error)))
    }

    fn domain(&self) -> DomainId {
        self.domain
    }

    fn pages_may_be_pinned(&self) -> bool {
        true
    }

    fn grants(&self, of: DomainId) -> Result<Box<dyn GrantAccess>, XenError> {
        let connected = connect_packets(&self.folder, self.domain);
        let line = connected.and_then(|(connection, number, _)| {
            Ok((connection, self.shared_info.connection_line(number).ok_or_else(malformed_result)?))
        });
        let (connection, line) = line.map_err(self.failed(format!("grants of domain {}", of.0)))?;
        Ok(Box::new(SimulatedGrants::new(of, self.domain, connection, line, Arc::clone(&self.domains))))
    }

    fn bind_interdomain(&self, remote: DomainId, port: Port) -> Result<EventPort, XenError> {
        let failed = self.failed(format!("binding to port {} of domain {}", port.0, remote.0));
        self.port(&Hypercall::BindInterdomain { remote, port }).map_err(failed)
    }

    fn alloc_unbound(&self, remote: DomainId) -> Result<EventPort, XenError> {
        self.port(&Hypercall::AllocUnbound { remote }).map_err(self.failed(format!("a port for domain {}", remote.0)))
    }

    fn share(&self, with: DomainId, pages: u32, writable: bool) -> Result<SharedPages, XenError> {
        let failed = self.failed(format!("sharing {pages} pages with domain {}", with.0));
        self.share_pages(with, pages, writable).map_err(failed)
    }
}
