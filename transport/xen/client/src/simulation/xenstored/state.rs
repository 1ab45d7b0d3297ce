//! What xenstored knows, and what it answers.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use mqblk_memory::DomainId;

use super::tree::{Actor, Change, Need, Tree, allows, home, parent, visit};
use super::{Quota, Refusal};
use crate::store::wire::{ABSOLUTE_PATH_MAX, Header, PAYLOAD_MAX, Verb, judge_path, texts};
use crate::store::{Access, Permission};

const GET_DOMAIN_PATH: Verb = Verb(10);
const IS_DOMAIN_INTRODUCED: Verb = Verb(17);
const RESET_WATCHES: Verb = Verb(21);

pub(super) const INTRODUCED: &str = "@introduceDomain";
pub(super) const RELEASED: &str = "@releaseDomain";

#[derive(Debug)]
struct Watch {
    path: String,
    token: Vec<u8>,
    /// The path was given relative to the domain's directory, and so are those of its events.
    relative: bool,
}

/// What a transaction does when it is committed.
#[derive(Clone, Debug)]
enum Deed {
    /// `None`: only makes the node.
    Write(String, Option<Vec<u8>>),
    Remove(String),
    Permit(String, Vec<Permission>),
}

#[derive(Debug)]
struct Transaction {
    /// As all was when it began.
    before: Tree,
    /// As it sees it.
    view: Tree,
    /// Every path that it has looked at or changed: of these it must be true that nobody else changed them.
    touched: BTreeSet<String>,
    deeds: Vec<Deed>,
}

/// A connection's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ClientId(pub u64);

#[derive(Debug)]
pub(super) struct Client {
    pub domain: DomainId,
    watches: Vec<Watch>,
    transactions: HashMap<u32, Transaction>,
    next_transaction: u32,
    /// Path and token, as they are sent. One that waits already is not put in again.
    pub events: VecDeque<(String, Vec<u8>)>,
    waiting: BTreeSet<(String, Vec<u8>)>,
}

impl Client {
    pub(super) fn next_event(&mut self) -> Option<(String, Vec<u8>)> {
        let event = self.events.pop_front()?;
        self.waiting.remove(&event);
        Some(event)
    }
}

#[derive(Debug)]
pub(super) struct State {
    tree: Tree,
    pub clients: BTreeMap<ClientId, Client>,
    next_client: u64,
    pub domains: BTreeSet<DomainId>,
    /// Who may watch the two special paths: domain 0 only, until it says otherwise.
    special: BTreeMap<&'static str, Arc<[Permission]>>,
    /// Commits that are still to fail.
    pub conflicts: u32,
    pub quota: Quota,
}

type Reply = Result<Vec<u8>, Refusal>;

const OKAY: &[u8] = b"OK\0";

impl State {
    pub(super) fn new() -> State {
        let nobody: Arc<[Permission]> = [Permission { domain: DomainId(0), access: Access::None }].into();
        State {
            tree: Tree::new(),
            clients: BTreeMap::new(),
            next_client: 0,
            domains: BTreeSet::new(),
            special: BTreeMap::from([(INTRODUCED, Arc::clone(&nobody)), (RELEASED, nobody)]),
            conflicts: 0,
            quota: Quota::default(),
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
            events: VecDeque::new(),
            waiting: BTreeSet::new(),
        };
        self.clients.insert(id, client);
        id
    }

    /// A domain has come: it gets the directories that a toolstack gives one.
    pub(super) fn introduce(&mut self, domain: DomainId) {
        let toolstack = Actor { domain: DomainId(0), quota: self.quota };
        let readable =
            [Permission { domain: DomainId(0), access: Access::None }, Permission { domain, access: Access::Read }];
        let own = [Permission { domain, access: Access::None }];
        let home = home(domain);
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
        for (below, value, permissions) in nodes {
            let path = format!("{home}{below}");
            let written = self.tree.write(&path, Some(value.as_bytes()), toolstack).ok().flatten();
            let permitted = self.tree.set_permissions(&path, permissions, toolstack).ok();
            written.into_iter().chain(permitted).for_each(|change| self.fire(&change));
        }
        self.domains.insert(domain);
        self.fire_special(INTRODUCED);
    }

    /// A domain has ended, and with it its connections.
    pub(super) fn release(&mut self, domain: DomainId) {
        self.domains.remove(&domain);
        self.clients.retain(|_, client| client.domain != domain);
        for change in self.tree.forget(domain) {
            self.fire(&change);
        }
        self.fire_special(RELEASED);
    }

    /// Answers a request.
    pub(super) fn answer(&mut self, id: ClientId, header: Header, payload: &[u8]) -> Reply {
        let domain = self.clients.get(&id).ok_or(Refusal::Invalid)?.domain;
        match header.verb {
            Verb::WATCH => self.watch(id, payload),
            Verb::UNWATCH => self.unwatch(id, payload),
            Verb::TRANSACTION_START => self.start(id, header.transaction),
            Verb::TRANSACTION_END => self.end(id, header.transaction, payload),
            RESET_WATCHES => {
                let client = self.client(id)?;
                client.watches.clear();
                client.transactions.clear();
                Ok(OKAY.to_vec())
            }
            GET_DOMAIN_PATH => Ok([home(domain_of(payload)?).as_bytes(), &[0]].concat()),
            IS_DOMAIN_INTRODUCED => {
                let known = self.domains.contains(&domain_of(payload)?);
                Ok(if known { b"T\0".to_vec() } else { b"F\0".to_vec() })
            }
            Verb::DIRECTORY | Verb::READ | Verb::GET_PERMS | Verb::DIRECTORY_PART => {
                self.look(id, domain, header, payload)
            }
            Verb::WRITE | Verb::MKDIR | Verb::RM | Verb::SET_PERMS => {
                let deed = self.deed(domain, header.verb, payload)?;
                self.act(id, domain, header.transaction, deed)
            }
            _ => Err(Refusal::Unknown),
        }
    }

    fn client(&mut self, id: ClientId) -> Result<&mut Client, Refusal> {
        self.clients.get_mut(&id).ok_or(Refusal::Invalid)
    }

    fn look(&mut self, id: ClientId, domain: DomainId, header: Header, payload: &[u8]) -> Reply {
        let mut parts = texts(payload);
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
                let limit = self.quota.transaction_nodes;
                let client = self.clients.get_mut(&id).ok_or(Refusal::Invalid)?;
                let transaction = client.transactions.get_mut(&transaction).ok_or(Refusal::NoEntry)?;
                transaction.touch(&path, domain, limit)?;
                &transaction.view
            }
        };
        let node = tree.get(&path, domain, Need::Read)?;
        match header.verb {
            Verb::READ => fitting(node.value.clone()),
            Verb::GET_PERMS => fitting(permission_texts(&node.permissions)),
            Verb::DIRECTORY => fitting(node.children.keys().flat_map(|name| name.bytes().chain([0])).collect()),
            _ => {
                let offset: usize = text(parts.next())?.parse().map_err(|_| Refusal::Invalid)?;
                let names: Vec<u8> = node.children.keys().flat_map(|name| name.bytes().chain([0])).collect();
                let mut reply = format!("{}\0", node.generation).into_bytes();
                let rest = names.get(offset..).unwrap_or_default();
                let room = PAYLOAD_MAX - reply.len() - 1;
                // Whole names only; an empty one ends the list.
                let fits = if rest.len() <= room {
                    rest.len()
                } else {
                    rest[..room].iter().rposition(|byte| *byte == 0).map_or(0, |at| at + 1)
                };
                reply.extend(&rest[..fits]);
                if fits == rest.len() {
                    reply.push(0);
                }
                Ok(reply)
            }
        }
    }

    fn deed(&mut self, domain: DomainId, verb: Verb, payload: &[u8]) -> Result<Deed, Refusal> {
        if verb == Verb::WRITE {
            let end = payload.iter().position(|byte| *byte == 0).ok_or(Refusal::Invalid)?;
            let path = absolute(text(Some(&payload[..end]))?, domain)?;
            return Ok(Deed::Write(path, Some(payload[end + 1..].to_vec())));
        }
        let mut parts = texts(payload);
        let path = text(parts.next())?;
        if verb == Verb::SET_PERMS {
            let permissions = parts.map(Permission::parse).collect::<Option<Vec<_>>>().ok_or(Refusal::Invalid)?;
            if permissions.is_empty() {
                return Err(Refusal::Invalid);
            }
            let path = if self.special.contains_key(path) { path.to_owned() } else { absolute(path, domain)? };
            return Ok(Deed::Permit(path, permissions));
        }
        let path = absolute(path, domain)?;
        Ok(if verb == Verb::MKDIR { Deed::Write(path, None) } else { Deed::Remove(path) })
    }

    fn act(&mut self, id: ClientId, domain: DomainId, transaction: u32, deed: Deed) -> Reply {
        let actor = Actor { domain, quota: self.quota };
        if let Deed::Permit(path, permissions) = &deed
            && let Some(special) = self.special.get_mut(path.as_str())
        {
            if domain != DomainId(0) {
                return Err(Refusal::Access);
            }
            *special = permissions.as_slice().into();
            return Ok(OKAY.to_vec());
        }
        if transaction == 0 {
            if let Some(change) = deed.apply(&mut self.tree, actor)? {
                self.fire(&change);
            }
            return Ok(OKAY.to_vec());
        }
        let limit = self.quota.transaction_nodes;
        let transactions = &mut self.client(id)?.transactions;
        let transaction = transactions.get_mut(&transaction).ok_or(Refusal::NoEntry)?;
        transaction.touch(deed.path(), domain, limit)?;
        // A node that is made or removed changes the one above it too.
        let mut changed = deed.removes() || transaction.view.find(deed.path()).is_none();
        let mut path = deed.path();
        while changed && let Some(above) = parent(path) {
            transaction.touch(above, domain, limit)?;
            changed = transaction.view.find(above).is_none();
            path = above;
        }
        deed.apply(&mut transaction.view, actor)?;
        transaction.deeds.push(deed);
        Ok(OKAY.to_vec())
    }

    fn start(&mut self, id: ClientId, within: u32) -> Reply {
        let (tree, limit) = (self.tree.clone(), self.quota.transactions);
        let client = self.client(id)?;
        if within != 0 {
            return Err(Refusal::Busy);
        }
        if client.domain != DomainId(0) && client.transactions.len() >= limit {
            return Err(Refusal::NoSpace);
        }
        loop {
            client.next_transaction = client.next_transaction.wrapping_add(1);
            if client.next_transaction != 0 && !client.transactions.contains_key(&client.next_transaction) {
                break;
            }
        }
        let number = client.next_transaction;
        let transaction = Transaction { before: tree.clone(), view: tree, touched: BTreeSet::new(), deeds: vec![] };
        client.transactions.insert(number, transaction);
        Ok(format!("{number}\0").into_bytes())
    }

    fn end(&mut self, id: ClientId, number: u32, payload: &[u8]) -> Reply {
        let commit = match payload {
            b"T\0" => true,
            b"F\0" => false,
            _ => return Err(Refusal::Invalid),
        };
        let actor = Actor { domain: self.client(id)?.domain, quota: self.quota };
        let transaction = self.client(id)?.transactions.remove(&number).ok_or(Refusal::NoEntry)?;
        if !commit {
            return Ok(OKAY.to_vec());
        }
        if self.conflicts > 0 {
            self.conflicts -= 1;
            return Err(Refusal::Again);
        }
        let generation = |tree: &Tree, path: &str| tree.find(path).map(|node| node.generation);
        if transaction.touched.iter().any(|path| generation(&transaction.before, path) != generation(&self.tree, path))
        {
            return Err(Refusal::Again);
        }
        // All or nothing: nothing is to be seen of it until it is done.
        let mut tree = self.tree.clone();
        let mut changes: Vec<Change> = vec![];
        for deed in &transaction.deeds {
            if let Some(mut change) = deed.apply(&mut tree, actor)? {
                // One event for each node; who could read any state of it may hear of it.
                if let Some(at) = changes.iter().position(|earlier| earlier.path == change.path) {
                    let earlier = changes.remove(at);
                    change.permissions.extend(earlier.permissions);
                    change.removed = change.removed.or(earlier.removed);
                }
                changes.push(change);
            }
        }
        self.tree = tree;
        changes.iter().for_each(|change| self.fire(change));
        Ok(OKAY.to_vec())
    }

    fn watch(&mut self, id: ClientId, payload: &[u8]) -> Reply {
        let watch = self.watch_of(id, payload)?;
        let domain = self.client(id)?.domain;
        let all = self.clients.values().filter(|client| client.domain == domain);
        if domain != DomainId(0) && all.map(|client| client.watches.len()).sum::<usize>() >= self.quota.watches {
            return Err(Refusal::TooBig);
        }
        let client = self.client(id)?;
        if client.watches.iter().any(|other| other.path == watch.path && other.token == watch.token) {
            return Err(Refusal::Exists);
        }
        client.put_event(&watch, &watch.path);
        client.watches.push(watch);
        Ok(OKAY.to_vec())
    }

    fn unwatch(&mut self, id: ClientId, payload: &[u8]) -> Reply {
        let watch = self.watch_of(id, payload)?;
        let client = self.client(id)?;
        let found = client.watches.iter().position(|other| other.path == watch.path && other.token == watch.token);
        client.watches.remove(found.ok_or(Refusal::NoEntry)?);
        Ok(OKAY.to_vec())
    }

    fn watch_of(&mut self, id: ClientId, payload: &[u8]) -> Result<Watch, Refusal> {
        let domain = self.client(id)?.domain;
        let mut parts = payload.split(|byte| *byte == 0);
        let path = text(parts.next())?;
        let token = parts.next().ok_or(Refusal::Invalid)?.to_vec();
        let special = path.starts_with('@');
        let relative = !special && !path.starts_with('/');
        if special && judge_path(path).is_some() {
            return Err(Refusal::Invalid);
        }
        let path = if special { path.to_owned() } else { absolute(path, domain)? };
        Ok(Watch { path, token, relative })
    }

    /// Tells those who watch, and may read, that something has changed.
    fn fire(&mut self, change: &Change) {
        // Watches below a node that is gone hear of it by their own path.
        let mut below: BTreeMap<String, Arc<[Permission]>> = BTreeMap::new();
        if let Some(node) = &change.removed {
            visit(node, &mut change.path.clone(), &mut |path, node| {
                below.insert(path.to_owned(), Arc::clone(&node.permissions));
                true
            });
        }
        for client in self.clients.values_mut() {
            let domain = client.domain;
            let reads = |permissions: &Arc<[Permission]>| allows(permissions, domain, Need::Read);
            let mut events = vec![];
            for (index, watch) in client.watches.iter().enumerate() {
                if is_at_or_below(&change.path, &watch.path) {
                    events.extend(change.permissions.iter().any(reads).then(|| (index, change.path.clone())));
                } else if below.get(&watch.path).is_some_and(reads) {
                    events.push((index, watch.path.clone()));
                }
            }
            for (index, path) in events {
                let watch = client.watches.swap_remove(index);
                client.put_event(&watch, &path);
                client.watches.push(watch);
                let last = client.watches.len() - 1;
                client.watches.swap(index, last);
            }
        }
    }

    fn fire_special(&mut self, path: &str) {
        let permissions = self.special.get(path).cloned().into_iter().collect();
        self.fire(&Change { path: path.to_owned(), permissions, removed: None });
    }
}

impl Client {
    fn put_event(&mut self, watch: &Watch, path: &str) {
        let home = home(self.domain);
        let relative = path.strip_prefix(&home).map(|rest| rest.strip_prefix('/').unwrap_or(rest));
        let shown = if watch.relative { relative.unwrap_or(path) } else { path };
        let event = (shown.to_owned(), watch.token.clone());
        if self.waiting.insert(event.clone()) {
            self.events.push_back(event);
        }
    }
}

impl Transaction {
    fn touch(&mut self, path: &str, domain: DomainId, limit: usize) -> Result<(), Refusal> {
        if domain != DomainId(0) && self.touched.len() >= limit && !self.touched.contains(path) {
            return Err(Refusal::NoSpace);
        }
        self.touched.insert(path.to_owned());
        Ok(())
    }
}

impl Deed {
    fn path(&self) -> &str {
        match self {
            Deed::Write(path, _) | Deed::Remove(path) | Deed::Permit(path, _) => path,
        }
    }

    fn removes(&self) -> bool {
        matches!(self, Deed::Remove(_))
    }

    fn apply(&self, tree: &mut Tree, actor: Actor) -> Result<Option<Change>, Refusal> {
        match self {
            Deed::Write(path, value) => tree.write(path, value.as_deref(), actor),
            Deed::Remove(path) => tree.remove(path, actor),
            Deed::Permit(path, permissions) => tree.set_permissions(path, permissions, actor).map(Some),
        }
    }
}

fn fitting(payload: Vec<u8>) -> Reply {
    if payload.len() > PAYLOAD_MAX { Err(Refusal::TooBig) } else { Ok(payload) }
}

fn permission_texts(permissions: &[Permission]) -> Vec<u8> {
    permissions.iter().flat_map(|permission| format!("{permission}\0").into_bytes()).collect()
}

fn text(part: Option<&[u8]>) -> Result<&str, Refusal> {
    std::str::from_utf8(part.ok_or(Refusal::Invalid)?).map_err(|_| Refusal::Invalid)
}

fn domain_of(payload: &[u8]) -> Result<DomainId, Refusal> {
    text(texts(payload).next())?.parse().map(DomainId).map_err(|_| Refusal::Invalid)
}

/// The path from the root.
fn absolute(path: &str, domain: DomainId) -> Result<String, Refusal> {
    if judge_path(path).is_some() || path.starts_with('@') {
        return Err(Refusal::Invalid);
    }
    let path = if path.starts_with('/') { path.to_owned() } else { format!("{}/{path}", home(domain)) };
    if path.len() > ABSOLUTE_PATH_MAX { Err(Refusal::Invalid) } else { Ok(path) }
}

fn is_at_or_below(path: &str, watched: &str) -> bool {
    let below = || path.strip_prefix(watched).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if watched == "/" { path.starts_with('/') } else { below() }
}
