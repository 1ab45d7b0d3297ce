//! The nodes. A tree is a value: a copy costs nothing until one of the two is changed, which is what a transaction works on.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_memory::DomainId;

use super::{Quota, Refusal};
use crate::store::{Access, Permission};

/// What somebody wants to do with a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Read,
    Write,
    /// Its permissions: only the owner.
    Own,
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub value: Vec<u8>,
    /// The first is the owner, and what domains that are not named may do. Never empty.
    pub permissions: Arc<[Permission]>,
    pub children: BTreeMap<String, Arc<Node>>,
    /// Of the last change: of the value, of the permissions, or of which children there are.
    pub generation: u64,
}

impl Node {
    fn owner(&self) -> DomainId {
        self.permissions[0].domain
    }
}

/// Whether `domain` may. Domain 0 always may, and so may the owner.
pub(super) fn allows(permissions: &[Permission], domain: DomainId, need: Need) -> bool {
    let Some(owner) = permissions.first() else { return false };
    if domain == DomainId(0) || domain == owner.domain {
        return true;
    }
    let named = permissions[1..].iter().find(|permission| permission.domain == domain);
    let access = named.map_or(owner.access, |permission| permission.access);
    match need {
        Need::Read => matches!(access, Access::Read | Access::Both),
        Need::Write => matches!(access, Access::Write | Access::Both),
        Need::Own => false,
    }
}

/// What has been done to a node, for watches.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub path: String,
    /// What the node may be read by before and after.
    pub permissions: Vec<Arc<[Permission]>>,
    /// The node as it was, with all below it, if it is gone.
    pub removed: Option<Arc<Node>>,
}

#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: Arc<Node>,
    /// Nodes of each domain.
    owned: BTreeMap<DomainId, u32>,
    clock: u64,
}

/// The names of a path that starts with a slash.
fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty())
}

/// The path of the node that holds this one.
pub(super) fn parent(path: &str) -> Option<&str> {
    let (above, _) = path.rsplit_once('/').filter(|_| path != "/")?;
    Some(if above.is_empty() { "/" } else { above })
}

/// Who does something, and what there may be of his.
#[derive(Clone, Copy, Debug)]
pub(super) struct Actor {
    pub domain: DomainId,
    pub quota: Quota,
}

impl Actor {
    /// Domain 0 may have what it likes.
    pub(super) fn is_bounded(&self) -> bool {
        self.domain != DomainId(0)
    }
}

impl Tree {
    pub(super) fn new() -> Tree {
        let permissions = [Permission { domain: DomainId(0), access: Access::None }].into();
        let root = Node { value: vec![], permissions, children: BTreeMap::new(), generation: 0 };
        Tree { root: Arc::new(root), owned: BTreeMap::from([(DomainId(0), 1)]), clock: 0 }
    }

    pub(super) fn find(&self, path: &str) -> Option<&Arc<Node>> {
        names(path).try_fold(&self.root, |node, name| node.children.get(name))
    }

    /// Nodes of a domain.
    #[cfg(test)]
    pub(super) fn owned_by(&self, domain: DomainId) -> u32 {
        self.owned.get(&domain).copied().unwrap_or(0)
    }

    /// The node, if `domain` may. Whether a node is missing is told only to those who may do the same to the next one above it.
    pub(super) fn get(&self, path: &str, domain: DomainId, need: Need) -> Result<&Arc<Node>, Refusal> {
        let (node, is_it) = self.nearest(path);
        match (allows(&node.permissions, domain, need), is_it) {
            (true, true) => Ok(node),
            (true, false) => Err(Refusal::NoEntry),
            (false, _) => Err(Refusal::Access),
        }
    }

    /// The node, or the lowest one above it that there is.
    fn nearest(&self, path: &str) -> (&Arc<Node>, bool) {
        let mut node = &self.root;
        for name in names(path) {
            match node.children.get(name) {
                Some(child) => node = child,
                None => return (node, false),
            }
        }
        (node, true)
    }

    /// The node to be changed.
    fn reach(&mut self, path: &str) -> Option<&mut Node> {
        names(path).try_fold(Arc::make_mut(&mut self.root), |node, name| node.children.get_mut(name).map(Arc::make_mut))
    }

    /// Sets a value, and makes the nodes that are missing.
    pub(super) fn write(&mut self, path: &str, value: Option<&[u8]>, actor: Actor) -> Result<Option<Change>, Refusal> {
        if actor.is_bounded() && value.is_some_and(|value| value.len() > actor.quota.value_bytes) {
            return Err(Refusal::NoSpace);
        }
        match self.get(path, actor.domain, Need::Write) {
            Ok(_) if value.is_none() => return Ok(None),
            Ok(_) => {}
            Err(Refusal::NoEntry) => self.make(path, actor)?,
            Err(refusal) => return Err(refusal),
        }
        self.clock += 1;
        let clock = self.clock;
        let node = self.reach(path).ok_or(Refusal::NoEntry)?;
        if let Some(value) = value {
            node.value = value.to_vec();
            node.generation = clock;
        }
        let permissions = vec![Arc::clone(&node.permissions)];
        Ok(Some(Change { path: path.to_owned(), permissions, removed: None }))
    }

    /// Makes a node and those above it. They inherit permissions, and belong to who makes them.
    fn make(&mut self, path: &str, actor: Actor) -> Result<(), Refusal> {
        let (above, _) = self.nearest(path);
        let mut permissions = Arc::clone(&above.permissions);
        if actor.is_bounded() {
            let mut own = permissions.to_vec();
            own[0].domain = actor.domain;
            permissions = own.into();
        }
        let owner = permissions[0].domain;
        let missing = names(path).count() - self.depth_of_nearest(path);
        let owned = self.owned.get(&owner).copied().unwrap_or(0) + missing as u32;
        if actor.is_bounded() && owned > actor.quota.nodes {
            return Err(Refusal::NoSpace);
        }
        self.owned.insert(owner, owned);
        self.clock += 1;
        let clock = self.clock;
        let mut node = Arc::make_mut(&mut self.root);
        for name in names(path) {
            if !node.children.contains_key(name) {
                node.generation = clock;
                let permissions = Arc::clone(&permissions);
                let child = Node { value: vec![], permissions, children: BTreeMap::new(), generation: clock };
                node.children.insert(name.to_owned(), Arc::new(child));
            }
            node = Arc::make_mut(node.children.get_mut(name).expect("it is there now"));
        }
        Ok(())
    }

    fn depth_of_nearest(&self, path: &str) -> usize {
        let mut node = &self.root;
        names(path).take_while(|name| node.children.get(*name).map(|child| node = child).is_some()).count()
    }

    /// Removes a node and all below it. It need not be there, but the one above it must.
    pub(super) fn remove(&mut self, path: &str, actor: Actor) -> Result<Option<Change>, Refusal> {
        let above = parent(path).ok_or(Refusal::Invalid)?;
        match self.get(path, actor.domain, Need::Write) {
            Err(Refusal::NoEntry) if self.find(above).is_some() => return Ok(None),
            other => other?,
        };
        Ok(self.cut(path))
    }

    /// Removes a node, whoever asks.
    fn cut(&mut self, path: &str) -> Option<Change> {
        let name = names(path).last()?;
        self.find(path)?;
        self.clock += 1;
        let clock = self.clock;
        let above = self.reach(parent(path)?)?;
        above.generation = clock;
        let removed = above.children.remove(name)?;
        self.disown(&removed);
        let permissions = vec![Arc::clone(&removed.permissions)];
        Some(Change { path: path.to_owned(), permissions, removed: Some(removed) })
    }

    fn disown(&mut self, node: &Node) {
        if let Some(count) = self.owned.get_mut(&node.owner()) {
            *count = count.saturating_sub(1);
        }
        node.children.values().for_each(|child| self.disown(child));
    }

    /// Sets who may do what with a node.
    pub(super) fn set_permissions(
        &mut self,
        path: &str,
        permissions: &[Permission],
        actor: Actor,
    ) -> Result<Change, Refusal> {
        let node = self.get(path, actor.domain, Need::Own)?;
        let (before, new) = (Arc::clone(&node.permissions), permissions.first().ok_or(Refusal::Invalid)?);
        let (old_owner, new_owner) = (node.owner(), new.domain);
        if actor.is_bounded() && (new_owner != old_owner || permissions.len() > actor.quota.permissions) {
            return Err(if new_owner == old_owner { Refusal::NoSpace } else { Refusal::NotPermitted });
        }
        let count = self.owned.entry(old_owner).or_default();
        *count = count.saturating_sub(1);
        *self.owned.entry(new_owner).or_default() += 1;
        self.clock += 1;
        let clock = self.clock;
        let node = self.reach(path).ok_or(Refusal::NoEntry)?;
        node.permissions = permissions.into();
        node.generation = clock;
        let permissions = vec![before, Arc::clone(&node.permissions)];
        Ok(Change { path: path.to_owned(), permissions, removed: None })
    }

    /// Removes what a domain has left: its own directory, every node that it owns, and what it was allowed elsewhere.
    pub(super) fn forget(&mut self, domain: DomainId) -> Vec<Change> {
        let home = home(domain);
        let mut gone = vec![];
        let mut named = vec![];
        visit(&self.root, &mut String::new(), &mut |path, node| {
            let goes = path == home || (node.owner() == domain && !path.is_empty());
            if goes {
                gone.push(path.to_owned());
            } else if node.permissions[1..].iter().any(|permission| permission.domain == domain) {
                named.push(path.to_owned());
            }
            !goes
        });
        for path in named {
            self.clock += 1;
            let clock = self.clock;
            if let Some(node) = self.reach(&path) {
                node.permissions = node.permissions.iter().filter(|each| each.domain != domain).copied().collect();
                node.generation = clock;
            }
        }
        let changes = gone.iter().filter_map(|path| self.cut(path)).collect();
        self.owned.remove(&domain);
        changes
    }
}

/// The directory of a domain, which its relative paths start from.
pub(super) fn home(domain: DomainId) -> String {
    format!("/local/domain/{}", domain.0)
}

/// Shows each node with its path (the root's is empty), and those below it if `into` says so.
pub(super) fn visit(node: &Node, path: &mut String, into: &mut dyn FnMut(&str, &Node) -> bool) {
    if !into(path, node) {
        return;
    }
    for (name, child) in &node.children {
        let len = path.len();
        path.push('/');
        path.push_str(name);
        visit(child, path, into);
        path.truncate(len);
    }
}
