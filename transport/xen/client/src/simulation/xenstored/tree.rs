//! The tree of nodes. A clone is copy-on-write, so a transaction cheaply works on its own copy.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_memory::DomainId;

use super::{Quota, Refusal};
use crate::store::{Access, Permission};

/// Access that an operation requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    Read,
    Write,
    /// Change the permissions: only the owner may.
    Own,
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub value: Vec<u8>,
    /// The first entry is the owner, with the access of domains without an entry. Never empty.
    pub permissions: Arc<[Permission]>,
    pub children: BTreeMap<String, Arc<Node>>,
    /// Generation of the last change of the value, the permissions, or the set of children.
    pub generation: u64,
}

impl Node {
    fn owner(&self) -> DomainId {
        self.permissions[0].domain
    }
}

/// Returns true if `domain` has the required access. Domain 0 and the owner always have.
pub(super) fn allows(permissions: &[Permission], domain: DomainId, need: Need) -> bool {
    let Some(owner) = permissions.first() else { return false };
    if domain == DomainId(0) || domain == owner.domain {
        return true;
    }
    let entry = permissions[1..].iter().find(|permission| permission.domain == domain);
    let access = entry.map_or(owner.access, |permission| permission.access);
    match need {
        Need::Read => matches!(access, Access::Read | Access::Both),
        Need::Write => matches!(access, Access::Write | Access::Both),
        Need::Own => false,
    }
}

/// A change of a node, for watches.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub path: String,
    /// The node's permissions before and after: a domain that could read it in either state is notified.
    pub permissions: Vec<Arc<[Permission]>>,
    /// The removed node with everything below it, if it was removed.
    pub removed: Option<Arc<Node>>,
}

#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: Arc<Node>,
    /// Number of nodes that each domain owns.
    owned: BTreeMap<DomainId, u32>,
    clock: u64,
}

/// Splits an absolute path into names.
fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty())
}

/// Returns the path of the parent node; `None` for the root.
pub(super) fn parent(path: &str) -> Option<&str> {
    let (above, _) = path.rsplit_once('/').filter(|_| path != "/")?;
    Some(if above.is_empty() { "/" } else { above })
}

/// The domain that makes a request, and its quota.
#[derive(Clone, Copy, Debug)]
pub(super) struct Actor {
    pub domain: DomainId,
    pub quota: Quota,
}

impl Actor {
    /// Returns true if the quota applies: not to domain 0.
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

    /// Returns the number of nodes that a domain owns.
    #[cfg(test)]
    pub(super) fn owned_by(&self, domain: DomainId) -> u32 {
        self.owned.get(&domain).copied().unwrap_or(0)
    }

    /// Returns the node if `domain` has the required access. ENOENT only if it has that access to the nearest existing parent, else EACCES.
    pub(super) fn get(&self, path: &str, domain: DomainId, need: Need) -> Result<&Arc<Node>, Refusal> {
        let (node, exists) = self.nearest(path);
        match (allows(&node.permissions, domain, need), exists) {
            (true, true) => Ok(node),
            (true, false) => Err(Refusal::NoEntry),
            (false, _) => Err(Refusal::Access),
        }
    }

    /// Returns the node and true, or its nearest existing parent and false.
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

    /// Returns the node for a change.
    fn reach(&mut self, path: &str) -> Option<&mut Node> {
        names(path).try_fold(Arc::make_mut(&mut self.root), |node, name| node.children.get_mut(name).map(Arc::make_mut))
    }

    /// Sets a value (`None`: leaves it), and creates missing nodes.
    pub(super) fn write(&mut self, path: &str, value: Option<&[u8]>, caller: Actor) -> Result<Option<Change>, Refusal> {
        if caller.is_bounded() && value.is_some_and(|value| value.len() > caller.quota.value_bytes) {
            return Err(Refusal::NoSpace);
        }
        match self.get(path, caller.domain, Need::Write) {
            Ok(_) if value.is_none() => return Ok(None),
            Ok(_) => {}
            Err(Refusal::NoEntry) => self.make(path, caller)?,
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

    /// Creates a node and its missing parents. They inherit permissions, and belong to the caller.
    fn make(&mut self, path: &str, caller: Actor) -> Result<(), Refusal> {
        let (above, _) = self.nearest(path);
        let mut permissions = Arc::clone(&above.permissions);
        if caller.is_bounded() {
            let mut own = permissions.to_vec();
            own[0].domain = caller.domain;
            permissions = own.into();
        }
        let owner = permissions[0].domain;
        let missing = names(path).count() - self.depth_of_nearest(path);
        let owned = self.owned.get(&owner).copied().unwrap_or(0) + missing as u32;
        if caller.is_bounded() && owned > caller.quota.nodes {
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
            node = Arc::make_mut(node.children.get_mut(name).expect("inserted above"));
        }
        Ok(())
    }

    fn depth_of_nearest(&self, path: &str) -> usize {
        let mut node = &self.root;
        names(path).take_while(|name| node.children.get(*name).map(|child| node = child).is_some()).count()
    }

    /// Removes a node and everything below it. The node may be missing, its parent not.
    pub(super) fn remove(&mut self, path: &str, caller: Actor) -> Result<Option<Change>, Refusal> {
        let above = parent(path).ok_or(Refusal::Invalid)?;
        match self.get(path, caller.domain, Need::Write) {
            Err(Refusal::NoEntry) if self.find(above).is_some() => return Ok(None),
            other => other?,
        };
        Ok(self.cut(path))
    }

    /// Removes a node without a permission check.
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

    /// Sets the permissions of a node.
    pub(super) fn set_permissions(
        &mut self,
        path: &str,
        permissions: &[Permission],
        caller: Actor,
    ) -> Result<Change, Refusal> {
        let node = self.get(path, caller.domain, Need::Own)?;
        let (before, first) = (Arc::clone(&node.permissions), permissions.first().ok_or(Refusal::Invalid)?);
        let (old_owner, new_owner) = (node.owner(), first.domain);
        if caller.is_bounded() && (new_owner != old_owner || permissions.len() > caller.quota.permissions) {
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

    /// Removes a destroyed domain: its directory, every node that it owns, and its permissions elsewhere.
    pub(super) fn forget(&mut self, domain: DomainId) -> Vec<Change> {
        let home = home(domain);
        let mut removed = vec![];
        let mut permitted = vec![];
        visit(&self.root, &mut String::new(), &mut |path, node| {
            let is_removed = path == home || (node.owner() == domain && !path.is_empty());
            if is_removed {
                removed.push(path.to_owned());
            } else if node.permissions[1..].iter().any(|permission| permission.domain == domain) {
                permitted.push(path.to_owned());
            }
            !is_removed
        });
        for path in permitted {
            self.clock += 1;
            let clock = self.clock;
            if let Some(node) = self.reach(&path) {
                node.permissions = node.permissions.iter().filter(|each| each.domain != domain).copied().collect();
                node.generation = clock;
            }
        }
        let changes = removed.iter().filter_map(|path| self.cut(path)).collect();
        self.owned.remove(&domain);
        changes
    }
}

/// Returns the directory of a domain, to which its relative paths refer.
pub(super) fn home(domain: DomainId) -> String {
    format!("/local/domain/{}", domain.0)
}

/// Visits each node with its path (the root's is empty). Descends if `visitor` returns true.
pub(super) fn visit(node: &Node, path: &mut String, visitor: &mut dyn FnMut(&str, &Node) -> bool) {
    if !visitor(path, node) {
        return;
    }
    for (name, child) in &node.children {
        let len = path.len();
        path.push('/');
        path.push_str(name);
        visit(child, path, visitor);
        path.truncate(len);
    }
}
