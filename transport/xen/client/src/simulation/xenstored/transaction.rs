//! Transactions: deeds that are done to a copy first, and to the database when nobody has come in between.

use std::collections::{BTreeSet, HashMap};

use mqblk_memory::DomainId;

use super::Refusal;
use super::state::{ClientId, OKAY, Reply, State};
use super::tree::{Actor, Change, Tree, parent};
use crate::store::Permission;

/// What a transaction does when it is committed.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    /// `None`: only makes the node.
    Write(String, Option<Vec<u8>>),
    Remove(String),
    Permit(String, Vec<Permission>),
}

#[derive(Debug)]
pub(super) struct Transaction {
    /// As all was when it began.
    before: Tree,
    /// As it sees it.
    view: Tree,
    /// Every path that it has looked at or changed: of these it must be true that nobody else changed them.
    touched: BTreeSet<String>,
    deeds: Vec<Deed>,
}

impl State {
    pub(super) fn start(&mut self, id: ClientId, within: u32) -> Reply {
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

    pub(super) fn end(&mut self, id: ClientId, number: u32, payload: &[u8]) -> Reply {
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
        let mut changes: Vec<Option<Change>> = vec![];
        let mut latest: HashMap<String, usize> = HashMap::new();
        for deed in &transaction.deeds {
            let Some(mut change) = deed.apply(&mut tree, actor)? else { continue };
            // One event for each node; who could read any state of it may hear of it.
            let earlier = latest.insert(change.path.clone(), changes.len());
            if let Some(earlier) = earlier.and_then(|at| changes[at].take()) {
                change.permissions.extend(earlier.permissions);
                change.removed = change.removed.or(earlier.removed);
            }
            changes.push(Some(change));
        }
        self.tree = tree;
        changes.iter().flatten().for_each(|change| self.fire(change));
        Ok(OKAY.to_vec())
    }
}

impl Transaction {
    /// The tree to look at a node in.
    pub(super) fn look(&mut self, path: &str, actor: Actor) -> Result<&Tree, Refusal> {
        self.touch(path, actor)?;
        // Whether one may know that a node is missing is for the next one above it to say.
        let mut path = path;
        while self.view.find(path).is_none()
            && let Some(above) = parent(path)
        {
            self.touch(above, actor)?;
            path = above;
        }
        Ok(&self.view)
    }

    pub(super) fn act(&mut self, deed: Deed, actor: Actor) -> Result<(), Refusal> {
        if actor.is_bounded() && self.deeds.len() >= actor.quota.transaction_nodes {
            return Err(Refusal::NoSpace);
        }
        self.touch(deed.path(), actor)?;
        // A node that is made or removed changes the one above it too.
        let mut changed = deed.removes() || self.view.find(deed.path()).is_none();
        let mut path = deed.path();
        while changed && let Some(above) = parent(path) {
            self.touch(above, actor)?;
            changed = self.view.find(above).is_none();
            path = above;
        }
        deed.apply(&mut self.view, actor)?;
        self.deeds.push(deed);
        Ok(())
    }

    fn touch(&mut self, path: &str, actor: Actor) -> Result<(), Refusal> {
        if actor.is_bounded() && self.touched.len() >= actor.quota.transaction_nodes && !self.touched.contains(path) {
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

    pub(super) fn apply(&self, tree: &mut Tree, actor: Actor) -> Result<Option<Change>, Refusal> {
        match self {
            Deed::Write(path, value) => tree.write(path, value.as_deref(), actor),
            Deed::Remove(path) => tree.remove(path, actor),
            Deed::Permit(path, permissions) => tree.set_permissions(path, permissions, actor).map(Some),
        }
    }
}
