//! Watches, and the delivery of their events.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_memory::DomainId;

use super::XsdError;
use super::state::{Client, ClientId, OKAY, Reply, Watch, XenstoredState, absolute, text};
use super::tree::{Change, RequiredAccess, allows, home_path, visit};
use mqblk_xen::store::Permission;
use mqblk_xen::store::wire::path_error;

impl XenstoredState {
    pub(super) fn watch(&mut self, id: ClientId, payload: &[u8]) -> Reply {
        let watch = self.parse_watch(id, payload)?;
        let domain = self.client(id)?.domain;
        let all = self.clients.values().filter(|client| client.domain == domain);
        if domain != DomainId(0) && all.map(|client| client.watches.len()).sum::<usize>() >= self.quota.watches {
            return Err(XsdError::TooBig);
        }
        let client = self.client(id)?;
        if client.watches.iter().any(|other| other.path == watch.path && other.token == watch.token) {
            return Err(XsdError::Exists);
        }
        client.queue_event(&watch, &watch.path);
        client.watches.push(watch);
        Ok(OKAY.to_vec())
    }

    pub(super) fn unwatch(&mut self, id: ClientId, payload: &[u8]) -> Reply {
        let watch = self.parse_watch(id, payload)?;
        let client = self.client(id)?;
        let found = client.watches.iter().position(|other| other.path == watch.path && other.token == watch.token);
        client.watches.remove(found.ok_or(XsdError::NoEntry)?);
        Ok(OKAY.to_vec())
    }

    fn parse_watch(&mut self, id: ClientId, payload: &[u8]) -> Result<Watch, XsdError> {
        let domain = self.client(id)?.domain;
        let mut parts = payload.split(|byte| *byte == 0);
        let path = text(parts.next())?;
        let token = parts.next().ok_or(XsdError::Invalid)?.to_vec();
        let special = path.starts_with('@');
        let relative = !special && !path.starts_with('/');
        if special && path_error(path).is_some() {
            return Err(XsdError::Invalid);
        }
        let path = if special { path.to_owned() } else { absolute(path, domain)? };
        Ok(Watch { path, token, relative })
    }

    /// Queues events of a change for all watches whose domain may read the node.
    pub(super) fn fire_watches(&mut self, change: &Change) {
        // A watch below a removed node gets an event with its own path.
        let mut below: BTreeMap<String, Arc<[Permission]>> = BTreeMap::new();
        if let Some(node) = &change.removed {
            visit(node, &mut change.path.clone(), &mut |path, node| {
                below.insert(path.to_owned(), Arc::clone(&node.permissions));
                true
            });
        }
        for client in self.clients.values_mut() {
            let domain = client.domain;
            let reads = |permissions: &Arc<[Permission]>| allows(permissions, domain, RequiredAccess::Read);
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
                client.queue_event(&watch, &path);
                client.watches.push(watch);
                let last = client.watches.len() - 1;
                client.watches.swap(index, last);
            }
        }
    }

    pub(super) fn fire_special_watch(&mut self, path: &str) {
        let permissions = self.special.get(path).cloned().into_iter().collect();
        self.fire_watches(&Change { path: path.to_owned(), permissions, removed: None });
    }
}

impl Client {
    fn queue_event(&mut self, watch: &Watch, path: &str) {
        let home = home_path(self.domain);
        let relative = path.strip_prefix(&home).map(|rest| rest.strip_prefix('/').unwrap_or(rest));
        let shown = if watch.relative { relative.unwrap_or(path) } else { path };
        let event = (shown.to_owned(), watch.token.clone());
        if self.queued.insert(event.clone()) {
            self.event_queue.push_back(event);
        }
    }
}

fn is_at_or_below(path: &str, watched: &str) -> bool {
    let below = || path.strip_prefix(watched).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if watched == "/" { path.starts_with('/') } else { below() }
}
