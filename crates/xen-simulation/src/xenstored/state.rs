//! The state of xenstored, and the handling of requests.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use mqblk_memory::DomainId;

use super::tree::{Caller, RequiredAccess, Tree, home_path};
use super::{XenstoreQuota, XsdError};
use mqblk_xen::store::wire::{ABSOLUTE_PATH_MAX, Header, PAYLOAD_MAX, Verb, path_error, split_strings};
use mqblk_xen::store::{Access, Permission};

const GET_DOMAIN_PATH: Verb = Verb(10);
const IS_DOMAIN_INTRODUCED: Verb = Verb(17);
const RESET_WATCHES: Verb = Verb(21);

pub(super) const INTRODUCED: &str = "@introduceDomain";
pub(super) const RELEASED: &str = "@releaseDomain";

/// Number of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ClientId(pub u64);

/// A write operation.
#[derive(Clone, Debug)]
pub(super) enum WriteOperation {
    /// `None`: only creates the node.
    Write(String, Option<Vec<u8>>),
    Remove(String),
    SetPermissions(String, Vec<Permission>),
}

#[derive(Debug)]
pub(super) struct Transaction {
    /// The tree at the start.
    pub before: Tree,
    /// The tree with the transaction's changes.
    pub view: Tree,
    /// Every path that it has read or written. The commit fails if another writer has changed one of them.
    pub accessed: BTreeSet<String>,
    pub operations: Vec<WriteOperation>,
}

#[derive(Debug)]
pub(super) struct Watch {
    pub path: String,
    pub token: Vec<u8>,
    /// True if the path is relative to the domain's directory, and so are the paths of its events.
    pub relative: bool,
}

#[derive(Debug)]
pub(super) struct Client {
    pub domain: DomainId,
    pub watches: Vec<Watch>,
    pub transactions: HashMap<u32, Transaction>,
    pub next_transaction: u32,
    /// Queued events: path and token as sent. An event that is queued is not queued again.
    pub event_queue: VecDeque<(String, Vec<u8>)>,
    pub queued: BTreeSet<(String, Vec<u8>)>,
}

impl Client {
    pub(super) fn next_event(&mut self) -> Option<(String, Vec<u8>)> {
        let event = self.event_queue.pop_front()?;
        self.queued.remove(&event);
        Some(event)
    }
}

#[derive(Debug)]
pub(super) struct XenstoredState {
    pub tree: Tree,
    pub clients: BTreeMap<ClientId, Client>,
    next_client: u64,
    pub domains: BTreeSet<DomainId>,
    /// Permissions of the two special paths: initially domain 0 only.
    pub special: BTreeMap<&'static str, Arc<[Permission]>>,
    /// Number of commits still to fail.
    pub conflicts: u32,
    pub quota: XenstoreQuota,
}

pub(super) type Reply = Result<Vec<u8>, XsdError>;

pub(super) const OKAY: &[u8] = b"OK\0";

impl XenstoredState {
    pub(super) fn new() -> XenstoredState {
        let nobody: Arc<[Permission]> = [Permission { domain: DomainId(0), access: Access::None }].into();
        XenstoredState {
            tree: Tree::new(),
            clients: BTreeMap::new(),
            next_client: 0,
            domains: BTreeSet::new(),
            special: BTreeMap::from([(INTRODUCED, Arc::clone(&nobody)), (RELEASED, nobody)]),
            conflicts: 0,
            quota: XenstoreQuota::default(),
        }
    }

    pub(super) fn connect(&mut self, domain: DomainId) -> ClientId {
        let id = ClientId(self.next_client);
        self.next_client += 1;
        let client = Client {
            domain,
            watches: vec![],
            transactions: HashMap::new(),
            next_transaction: 0,
            event_queue: VecDeque::new(),
            queued: BTreeSet::new(),
        };
        self.clients.insert(id, client);
        id
    }

    /// Introduces a domain and creates its directories, as a toolstack does.
    pub(super) fn introduce(&mut self, domain: DomainId) {
        let toolstack = Caller { domain: DomainId(0), quota: self.quota };
        let readable =
            [Permission { domain: DomainId(0), access: Access::None }, Permission { domain, access: Access::Read }];
        let own = [Permission { domain, access: Access::None }];
        let home = home_path(domain);
        let (name, id) = (format!("domain-{}", domain.0), domain.0.to_string());
        let nodes: [(&str, &str, &[Permission]); 8] = [
            ("", "", &readable),
            ("/name", &name, &readable),
            ("/domid", &id, &readable),
            ("/device", "", &readable),
            ("/control", "", &readable),
            ("/data", "", &own),
            ("/drivers", "", &own),
            ("/error", "", &own),
        ];
        for (suffix, value, permissions) in nodes {
            let path = format!("{home}{suffix}");
            let written = self.tree.write(&path, Some(value.as_bytes()), toolstack).ok().flatten();
            let permitted = self.tree.set_permissions(&path, permissions, toolstack).ok();
            written.into_iter().chain(permitted).for_each(|change| self.fire_watches(&change));
        }
        self.domains.insert(domain);
        self.fire_special_watch(INTRODUCED);
    }

    /// Releases a domain and ends its connections.
    pub(super) fn release(&mut self, domain: DomainId) {
        self.domains.remove(&domain);
        self.clients.retain(|_, client| client.domain != domain);
        for change in self.tree.remove_domain(domain) {
            self.fire_watches(&change);
        }
        self.fire_special_watch(RELEASED);
    }

    /// Handles a request and returns the reply's payload.
    pub(super) fn handle_request(&mut self, id: ClientId, header: Header, payload: &[u8]) -> Reply {
        let domain = self.clients.get(&id).ok_or(XsdError::Invalid)?.domain;
        match header.verb {
            Verb::WATCH => self.watch(id, payload),
            Verb::UNWATCH => self.unwatch(id, payload),
            Verb::TRANSACTION_START => self.start_transaction(id, header.transaction),
            Verb::TRANSACTION_END => self.end_transaction(id, header.transaction, payload),
            RESET_WATCHES => {
                let client = self.client(id)?;
                client.watches.clear();
                client.transactions.clear();
                Ok(OKAY.to_vec())
            }
            GET_DOMAIN_PATH => Ok([home_path(domain_of(payload)?).as_bytes(), &[0]].concat()),
            IS_DOMAIN_INTRODUCED => {
                let is_introduced = self.domains.contains(&domain_of(payload)?);
                Ok(if is_introduced { b"T\0".to_vec() } else { b"F\0".to_vec() })
            }
            Verb::DIRECTORY | Verb::READ | Verb::GET_PERMS | Verb::DIRECTORY_PART => {
                self.execute_read(id, domain, header, payload)
            }
            Verb::WRITE | Verb::MKDIR | Verb::RM | Verb::SET_PERMS => {
                let operation = self.parse_write(domain, header.verb, payload)?;
                self.execute_write(id, domain, header.transaction, operation)
            }
            _ => Err(XsdError::Unknown),
        }
    }

    pub(super) fn client(&mut self, id: ClientId) -> Result<&mut Client, XsdError> {
        self.clients.get_mut(&id).ok_or(XsdError::Invalid)
    }

    fn execute_read(&mut self, id: ClientId, domain: DomainId, header: Header, payload: &[u8]) -> Reply {
        let mut parts = split_strings(payload);
        let path = text(parts.next())?;
        if header.verb == Verb::GET_PERMS
            && let Some(permissions) = self.special.get(path)
        {
            return Ok(permission_texts(permissions));
        }
        let path = absolute(path, domain)?;
        let tree = match header.transaction {
            0 => &self.tree,
            transaction => {
                let caller = Caller { domain, quota: self.quota };
                let client = self.clients.get_mut(&id).ok_or(XsdError::Invalid)?;
                client.transactions.get_mut(&transaction).ok_or(XsdError::NoEntry)?.read_view(&path, caller)?
            }
        };
        let node = tree.get(&path, domain, RequiredAccess::Read)?;
        match header.verb {
            Verb::READ => fitting(node.value.clone()),
            Verb::GET_PERMS => fitting(permission_texts(&node.permissions)),
            Verb::DIRECTORY => fitting(node.children.keys().flat_map(|name| name.bytes().chain([0])).collect()),
            _ => {
                let offset: usize = text(parts.next())?.parse().map_err(|_| XsdError::Invalid)?;
                let names: Vec<u8> = node.children.keys().flat_map(|name| name.bytes().chain([0])).collect();
                let mut reply = format!("{}\0", node.generation).into_bytes();
                let rest = names.get(offset..).unwrap_or_default();
                let space = PAYLOAD_MAX - reply.len() - 1;
                // Whole names only; an empty name ends the list.
                let fits = if rest.len() <= space {
                    rest.len()
                } else {
                    rest[..space].iter().rposition(|byte| *byte == 0).map_or(0, |at| at + 1)
                };
                reply.extend(&rest[..fits]);
                if fits == rest.len() {
                    reply.push(0);
                }
                Ok(reply)
            }
        }
    }

    fn parse_write(&mut self, domain: DomainId, verb: Verb, payload: &[u8]) -> Result<WriteOperation, XsdError> {
        if verb == Verb::WRITE {
            let end = payload.iter().position(|byte| *byte == 0).ok_or(XsdError::Invalid)?;
            let path = absolute(text(Some(&payload[..end]))?, domain)?;
            return Ok(WriteOperation::Write(path, Some(payload[end + 1..].to_vec())));
        }
        let mut parts = split_strings(payload);
        let path = text(parts.next())?;
        if verb == Verb::SET_PERMS {
            let permissions = parts.map(Permission::parse).collect::<Option<Vec<_>>>().ok_or(XsdError::Invalid)?;
            if permissions.is_empty() {
                return Err(XsdError::Invalid);
            }
            let path = if self.special.contains_key(path) { path.to_owned() } else { absolute(path, domain)? };
            return Ok(WriteOperation::SetPermissions(path, permissions));
        }
        let path = absolute(path, domain)?;
        Ok(if verb == Verb::MKDIR { WriteOperation::Write(path, None) } else { WriteOperation::Remove(path) })
    }

    fn execute_write(&mut self, id: ClientId, domain: DomainId, transaction: u32, operation: WriteOperation) -> Reply {
        let caller = Caller { domain, quota: self.quota };
        if let WriteOperation::SetPermissions(path, permissions) = &operation
            && let Some(special) = self.special.get_mut(path.as_str())
        {
            if domain != DomainId(0) {
                return Err(XsdError::Access);
            }
            *special = permissions.as_slice().into();
            return Ok(OKAY.to_vec());
        }
        if transaction == 0 {
            if let Some(change) = operation.apply(&mut self.tree, caller)? {
                self.fire_watches(&change);
            }
            return Ok(OKAY.to_vec());
        }
        let transactions = &mut self.client(id)?.transactions;
        transactions.get_mut(&transaction).ok_or(XsdError::NoEntry)?.execute(operation, caller)?;
        Ok(OKAY.to_vec())
    }
}

fn fitting(payload: Vec<u8>) -> Reply {
    if payload.len() > PAYLOAD_MAX { Err(XsdError::TooBig) } else { Ok(payload) }
}

fn permission_texts(permissions: &[Permission]) -> Vec<u8> {
    permissions.iter().flat_map(|permission| format!("{permission}\0").into_bytes()).collect()
}

pub(super) fn text(part: Option<&[u8]>) -> Result<&str, XsdError> {
    std::str::from_utf8(part.ok_or(XsdError::Invalid)?).map_err(|_| XsdError::Invalid)
}

fn domain_of(payload: &[u8]) -> Result<DomainId, XsdError> {
    text(split_strings(payload).next())?.parse().map(DomainId).map_err(|_| XsdError::Invalid)
}

/// Validates a path and makes it absolute.
pub(super) fn absolute(path: &str, domain: DomainId) -> Result<String, XsdError> {
    if path_error(path).is_some() || path.starts_with('@') {
        return Err(XsdError::Invalid);
    }
    let path = if path.starts_with('/') { path.to_owned() } else { format!("{}/{path}", home_path(domain)) };
    if path.len() > ABSOLUTE_PATH_MAX { Err(XsdError::Invalid) } else { Ok(path) }
}
