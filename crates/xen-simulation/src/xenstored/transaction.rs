//! Transactions: write operations apply to a copy first, and to the database at the commit if it does not conflict.

use std::collections::{BTreeSet, HashMap};

use mqblk_memory::DomainId;

use super::XsdError;
use super::state::{ClientId, OKAY, Reply, Transaction, WriteOperation, XenstoredState};
use super::tree::{Caller, Change, Tree, parent};

impl XenstoredState {
    pub(super) fn start_transaction(&mut self, id: ClientId, within: u32) -> Reply {
        let (tree, limit) = (self.tree.clone(), self.quota.transactions);
        let client = self.client(id)?;
        if within != 0 {
            return Err(XsdError::Busy);
        }
        if client.domain != DomainId(0) && client.transactions.len() >= limit {
            return Err(XsdError::NoSpace);
        }
        loop {
            client.next_transaction = client.next_transaction.wrapping_add(1);
            if client.next_transaction != 0 && !client.transactions.contains_key(&client.next_transaction) {
                break;
            }
        }
        let number = client.next_transaction;
        let transaction =
            Transaction { before: tree.clone(), view: tree, accessed: BTreeSet::new(), operations: vec![] };
        client.transactions.insert(number, transaction);
        Ok(format!("{number}\0").into_bytes())
    }

    pub(super) fn end_transaction(&mut self, id: ClientId, number: u32, payload: &[u8]) -> Reply {
        let commit = match payload {
            b"T\0" => true,
            b"F\0" => false,
            _ => return Err(XsdError::Invalid),
        };
        let caller = Caller { domain: self.client(id)?.domain, quota: self.quota };
        let transaction = self.client(id)?.transactions.remove(&number).ok_or(XsdError::NoEntry)?;
        if !commit {
            return Ok(OKAY.to_vec());
        }
        if self.conflicts > 0 {
            self.conflicts -= 1;
            return Err(XsdError::Again);
        }
        let generation = |tree: &Tree, path: &str| tree.find(path).map(|node| node.generation);
        if transaction.accessed.iter().any(|path| generation(&transaction.before, path) != generation(&self.tree, path))
        {
            return Err(XsdError::Again);
        }
        // Atomic: the database changes only after every operation has succeeded.
        let mut tree = self.tree.clone();
        let mut changes: Vec<Option<Change>> = vec![];
        let mut latest: HashMap<String, usize> = HashMap::new();
        for operation in &transaction.operations {
            let Some(mut change) = operation.apply(&mut tree, caller)? else { continue };
            // One event per node, for every domain that could read any state of it.
            let earlier = latest.insert(change.path.clone(), changes.len());
            if let Some(earlier) = earlier.and_then(|at| changes[at].take()) {
                change.permissions.extend(earlier.permissions);
                change.removed = change.removed.or(earlier.removed);
            }
            changes.push(Some(change));
        }
        self.tree = tree;
        changes.iter().flatten().for_each(|change| self.fire_watches(change));
        Ok(OKAY.to_vec())
    }
}

impl Transaction {
    /// Records a read of a node and returns the tree to read it from.
    pub(super) fn read_view(&mut self, path: &str, caller: Caller) -> Result<&Tree, XsdError> {
        self.record_access(path, caller)?;
        // The parents of a missing node decide between ENOENT and EACCES, so they are read too.
        let mut path = path;
        while self.view.find(path).is_none()
            && let Some(above) = parent(path)
        {
            self.record_access(above, caller)?;
            path = above;
        }
        Ok(&self.view)
    }

    pub(super) fn execute(&mut self, operation: WriteOperation, caller: Caller) -> Result<(), XsdError> {
        if caller.has_quota() && self.operations.len() >= caller.quota.transaction_nodes {
            return Err(XsdError::NoSpace);
        }
        self.record_access(operation.path(), caller)?;
        // Creating or removing a node changes its parent too.
        let mut changed = operation.removes() || self.view.find(operation.path()).is_none();
        let mut path = operation.path();
        while changed && let Some(above) = parent(path) {
            self.record_access(above, caller)?;
            changed = self.view.find(above).is_none();
            path = above;
        }
        operation.apply(&mut self.view, caller)?;
        self.operations.push(operation);
        Ok(())
    }

    fn record_access(&mut self, path: &str, caller: Caller) -> Result<(), XsdError> {
        if caller.has_quota() && self.accessed.len() >= caller.quota.transaction_nodes && !self.accessed.contains(path)
        {
            return Err(XsdError::NoSpace);
        }
        self.accessed.insert(path.to_owned());
        Ok(())
    }
}

impl WriteOperation {
    fn path(&self) -> &str {
        match self {
            WriteOperation::Write(path, _) | WriteOperation::Remove(path) | WriteOperation::SetPermissions(path, _) => {
                path
            }
        }
    }

    fn removes(&self) -> bool {
        matches!(self, WriteOperation::Remove(_))
    }

    pub(super) fn apply(&self, tree: &mut Tree, caller: Caller) -> Result<Option<Change>, XsdError> {
        match self {
            WriteOperation::Write(path, value) => tree.write(path, value.as_deref(), caller),
            WriteOperation::Remove(path) => tree.remove(path, caller),
            WriteOperation::SetPermissions(path, permissions) => {
                tree.set_permissions(path, permissions, caller).map(Some)
            }
        }
    }
}
