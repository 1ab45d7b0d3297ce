//! The tree of nodes. A clone is copy-on-write, so a transaction cheaply works on its own copy.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_memory::DomainId;

use super::{XenstoreQuota, XsdError};
use mqblk_xen::store::{Access, Permission};

/// Access that an operation requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequiredAccess {
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
pub(super) fn allows(permissions: &[Permission], domain: DomainId, need: RequiredAccess) -> bool {
    let Some(owner) = permissions.first() else { return false };
    if domain == DomainId(0) || domain == owner.domain {
        return true;
    }
    let entry = permissions[1..].iter().find(|permission| permission.domain == domain);
    let access = entry.map_or(owner.access, |permission| permission.access);
    match need {
        RequiredAccess::Read => matches!(access, Access::Read | Access::ReadWrite),
        RequiredAccess::Write => matches!(access, Access::Write | Access::ReadWrite),
        RequiredAccess::Own => false,
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
    generation: u64,
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
pub(super) struct Caller {
    pub domain: DomainId,
    pub quota: XenstoreQuota,
}

impl Caller {
    /// Returns true if the quota applies: not to domain 0.
    pub(super) fn has_quota(&self) -> bool {
        self.domain != DomainId(0)
    }
}

impl Tree {
    pub(super) fn new() -> Tree {
        let permissions = [Permission { domain: DomainId(0), access: Access::None }].into();
        let root = Node { value: vec![], permissions, children: BTreeMap::new(), generation: 0 };
        Tree { root: Arc::new(root), owned: BTreeMap::from([(DomainId(0), 1)]), generation: 0 }
    }

    pub(super) fn find(&self, path: &str) -> Option<&Arc<Node>> {
        names(path).try_fold(&self.root, |node, name| node.children.get(name))
    }

    /// Returns the number of nodes that a domain owns.
    #[cfg(test)]
    pub(super) fn owned_by(&self, domain: DomainId) -> u32 {
        self.owned.get(&domain).copied().unwrap_or(0)
    }

    /// Returns the node if `domain` has the required access. ENOENT only if it has that access to the nearest existing
    /// parent, else EACCES.
    pub(super) fn get(&self, path: &str, domain: DomainId, need: RequiredAccess) -> Result<&Arc<Node>, XsdError> {
        let (node, exists) = self.nearest_existing(path);
        match (allows(&node.permissions, domain, need), exists) {
            (true, true) => Ok(node),
            (true, false) => Err(XsdError::NoEntry),
            (false, _) => Err(XsdError::Access),
        }
    }

    /// Returns the node and true, or its nearest existing parent and false.
    fn nearest_existing(&self, path: &str) -> (&Arc<Node>, bool) {
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
    fn node_mut(&mut self, path: &str) -> Option<&mut Node> {
        names(path).try_fold(Arc::make_mut(&mut self.root), |node, name| node.children.get_mut(name).map(Arc::make_mut))
    }

    /// Sets a value (`None`: keeps it), and creates missing nodes.
    pub(super) fn write(
        &mut self,
        path: &str,
        value: Option<&[u8]>,
        caller: Caller,
    ) -> Result<Option<Change>, XsdError> {
        if caller.has_quota() && value.is_some_and(|value| value.len() > caller.quota.value_bytes) {
            return Err(XsdError::NoSpace);
        }
        match self.get(path, caller.domain, RequiredAccess::Write) {
            Ok(_) if value.is_none() => return Ok(None),
            Ok(_) => {}
            Err(XsdError::NoEntry) => self.create(path, caller)?,
            Err(refusal) => return Err(refusal),
        }
        self.generation += 1;
        let clock = self.generation;
        let node = self.node_mut(path).ok_or(XsdError::NoEntry)?;
        if let Some(value) = value {
            node.value = value.to_vec();
            node.generation = clock;
        }
        let permissions = vec![Arc::clone(&node.permissions)];
        Ok(Some(Change { path: path.to_owned(), permissions, removed: None }))
    }

    /// Creates a node and its missing parents. They inherit permissions, and belong to the caller.
    fn create(&mut self, path: &str, caller: Caller) -> Result<(), XsdError> {
        let (above, _) = self.nearest_existing(path);
        let mut permissions = Arc::clone(&above.permissions);
        if caller.has_quota() {
            let mut own = permissions.to_vec();
            own[0].domain = caller.domain;
            permissions = own.into();
        }
        let owner = permissions[0].domain;
        let missing = names(path).count() - self.depth_of_nearest(path);
        let owned = self.owned.get(&owner).copied().unwrap_or(0) + missing as u32;
        if caller.has_quota() && owned > caller.quota.nodes {
            return Err(XsdError::NoSpace);
        }
        self.owned.insert(owner, owned);
        self.generation += 1;
        let clock = self.generation;
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
    pub(super) fn remove(&mut self, path: &str, caller: Caller) -> Result<Option<Change>, XsdError> {
        let above = parent(path).ok_or(XsdError::Invalid)?;
        match self.get(path, caller.domain, RequiredAccess::Write) {
            Err(XsdError::NoEntry) if self.find(above).is_some() => return Ok(None),
            other => other?,
        };
        Ok(self.remove_subtree(path))
    }

    /// Removes a node without a permission check.
    fn remove_subtree(&mut self, path: &str) -> Option<Change> {
        let name = names(path).last()?;
        self.find(path)?;
        self.generation += 1;
        let clock = self.generation;
        let above = self.node_mut(parent(path)?)?;
        above.generation = clock;
        let removed = above.children.remove(name)?;
        self.uncount_owned(&removed);
        let permissions = vec![Arc::clone(&removed.permissions)];
        Some(Change { path: path.to_owned(), permissions, removed: Some(removed) })
    }

    fn uncount_owned(&mut self, node: &Node) {
        if let Some(count) = self.owned.get_mut(&node.owner()) {
            *count = count.saturating_sub(1);
        }
        node.children.values().for_each(|child| self.uncount_owned(child));
    }

    /// Sets the permissions of a node.
    pub(super) fn set_permissions(
        &mut self,
        path: &str,
        permissions: &[Permission],
        caller: Caller,
    ) -> Result<Change, XsdError> {
        let node = self.get(path, caller.domain, RequiredAccess::Own)?;
        let (before, first) = (Arc::clone(&node.permissions), permissions.first().ok_or(XsdError::Invalid)?);
        let (old_owner, new_owner) = (node.owner(), first.domain);
        if caller.has_quota() && (new_owner != old_owner || permissions.len() > caller.quota.permissions) {
            return Err(if new_owner == old_owner { XsdError::NoSpace } else { XsdError::NotPermitted });
        }
        let count = self.owned.entry(old_owner).or_default();
        *count = count.saturating_sub(1);
        *self.owned.entry(new_owner).or_default() += 1;
        self.generation += 1;
        let clock = self.generation;
        let node = self.node_mut(path).ok_or(XsdError::NoEntry)?;
        node.permissions = permissions.into();
        node.generation = clock;
        let permissions = vec![before, Arc::clone(&node.permissions)];
        Ok(Change { path: path.to_owned(), permissions, removed: None })
    }

    /// Removes a destroyed domain: its directory, every node that it owns, and its permissions elsewhere.
    pub(super) fn remove_domain(&mut self, domain: DomainId) -> Vec<Change> {
        let home = home_path(domain);
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
            self.generation += 1;
            let clock = self.generation;
            if let Some(node) = self.node_mut(&path) {
                node.permissions = node.permissions.iter().filter(|each| each.domain != domain).copied().collect();
                node.generation = clock;
            }
        }
        let changes = removed.iter().filter_map(|path| self.remove_subtree(path)).collect();
        self.owned.remove(&domain);
        changes
    }
}

/// Returns the directory of a domain, to which its relative paths refer.
pub(super) fn home_path(domain: DomainId) -> String {
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
