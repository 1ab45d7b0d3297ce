//! A bounded queue of watch events.
//!
//! A guest may write below a watched path at any rate (XSA-349): an event that is already queued is not queued again,
//! and beyond [`PATHS_PER_WATCH`] different paths of one watch further ones are merged into one event for the watched
//! path itself.

use std::collections::{HashMap, HashSet, VecDeque};

/// Maximum number of different paths queued per watch.
pub(super) const PATHS_PER_WATCH: usize = 32;

/// A change at or below a watched path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WatchEvent {
    /// The changed path. If it is the watched path itself, everything below may have changed: this is so for the
    /// initial event of a watch, and after an overflow.
    pub path: String,
    /// Token of the watch.
    pub token: String,
}

#[derive(Debug)]
struct Watch {
    id: u64,
    path: String,
    queued: usize,
}

impl Watch {
    fn covers(&self, path: &str) -> bool {
        let rest = path.strip_prefix(self.path.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || self.path == "/")
    }
}

/// The watches of a connection and their queued events.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    watches: HashMap<String, Vec<Watch>>,
    queue: VecDeque<(u64, WatchEvent)>,
    queued: HashSet<WatchEvent>,
    next_id: u64,
}

impl EventQueue {
    /// Adds a watch. Returns false if it exists.
    pub(super) fn add(&mut self, path: &str, token: &str) -> bool {
        let watches = self.watches.entry(token.to_owned()).or_default();
        if watches.iter().any(|watch| watch.path == path) {
            return false;
        }
        watches.push(Watch { id: self.next_id, path: path.to_owned(), queued: 0 });
        self.next_id += 1;
        true
    }

    pub(super) fn contains(&self, path: &str, token: &str) -> bool {
        self.watches.get(token).is_some_and(|watches| watches.iter().any(|watch| watch.path == path))
    }

    /// Removes a watch and its queued events.
    pub(super) fn remove(&mut self, path: &str, token: &str) {
        let Some(watches) = self.watches.get_mut(token) else { return };
        let Some(at) = watches.iter().position(|watch| watch.path == path) else { return };
        let id = watches.swap_remove(at).id;
        if watches.is_empty() {
            self.watches.remove(token);
        }
        let queued = &mut self.queued;
        self.queue.retain(|(of, event)| *of != id || !queued.remove(event));
    }

    /// Queues an event. An event of no watch is dropped.
    pub(super) fn push(&mut self, path: &str, token: &str) {
        let watches = self.watches.get_mut(token);
        let Some(watch) = watches.and_then(|watches| watches.iter_mut().find(|watch| watch.covers(path))) else {
            tracing::debug!(path, token, "a watch event without a watch");
            return;
        };
        let path = if watch.queued < PATHS_PER_WATCH { path } else { watch.path.as_str() };
        let event = WatchEvent { path: path.to_owned(), token: token.to_owned() };
        if self.queued.insert(event.clone()) {
            watch.queued += 1;
            self.queue.push_back((watch.id, event));
        }
    }

    /// Takes the oldest event.
    pub(super) fn pop(&mut self) -> Option<WatchEvent> {
        let (id, event) = self.queue.pop_front()?;
        self.queued.remove(&event);
        let watches = self.watches.get_mut(&event.token);
        if let Some(watch) = watches.and_then(|watches| watches.iter_mut().find(|watch| watch.id == id)) {
            watch.queued -= 1;
        }
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(path: &str, token: &str) -> WatchEvent {
        WatchEvent { path: path.to_owned(), token: token.to_owned() }
    }

    #[test]
    fn an_event_is_queued_once() {
        let mut events = EventQueue::default();
        assert!(events.add("/a", "t"));
        assert!(!events.add("/a", "t"));
        for path in ["/a", "/a/b", "/a", "/a/b", "/ab", "/b"] {
            events.push(path, "t");
            events.push(path, "other");
        }
        assert_eq!(events.pop(), Some(event("/a", "t")));
        events.push("/a", "t");
        assert_eq!(events.pop(), Some(event("/a/b", "t")));
        assert_eq!(events.pop(), Some(event("/a", "t")));
        assert_eq!(events.pop(), None);
    }

    #[test]
    fn a_flood_is_merged_and_other_watches_get_their_events() {
        let mut events = EventQueue::default();
        events.add("/guest/1/state", "one");
        events.add("/guest/2/state", "two");
        for n in 0..10_000 {
            events.push(&format!("/guest/1/state/{n}"), "one");
        }
        events.push("/guest/2/state", "two");
        let all: Vec<WatchEvent> = std::iter::from_fn(|| events.pop()).collect();
        assert_eq!(all.len(), PATHS_PER_WATCH + 2);
        assert_eq!(all[PATHS_PER_WATCH], event("/guest/1/state", "one"));
        assert_eq!(all[PATHS_PER_WATCH + 1], event("/guest/2/state", "two"));
        events.push("/guest/1/state/7", "one");
        assert_eq!(events.pop(), Some(event("/guest/1/state/7", "one")));
    }

    #[test]
    fn events_of_a_removed_watch_are_dropped() {
        let mut events = EventQueue::default();
        events.add("/a", "t");
        events.add("/a", "u");
        events.push("/a/b", "t");
        events.push("/a/b", "u");
        events.remove("/a", "t");
        events.remove("/a", "none");
        events.push("/a/b", "t");
        assert_eq!(events.pop(), Some(event("/a/b", "u")));
        assert_eq!(events.pop(), None);
        events.add("/a", "t");
        events.push("/a/b", "t");
        assert_eq!(events.pop(), Some(event("/a/b", "t")));
    }

    #[test]
    fn the_root_and_special_paths_can_be_watched() {
        let mut events = EventQueue::default();
        events.add("/", "root");
        events.add("@releaseDomain", "gone");
        events.push("/local/domain/1", "root");
        events.push("@releaseDomain", "gone");
        assert_eq!(events.pop(), Some(event("/local/domain/1", "root")));
        assert_eq!(events.pop(), Some(event("@releaseDomain", "gone")));
    }

    proptest! {
        /// For any sequence: the queue is bounded, each event belongs to a watch, and no change is lost: after the last
        /// push below a watch, the pushed path or the watched path is returned.
        #[test]
        fn bounded_and_complete(
            watched in proptest::collection::vec((0..3u8, 0..2u8), 1..4),
            pushed in proptest::collection::vec((0..3u8, 0..50u8, 0..2u8, any::<bool>()), 0..400),
        ) {
            let mut events = EventQueue::default();
            for (path, token) in &watched {
                events.add(&format!("/{path}"), &token.to_string());
            }
            let mut due: HashSet<(String, WatchEvent)> = HashSet::new();
            let take = |events: &mut EventQueue, due: &mut HashSet<(String, WatchEvent)>| {
                let found = events.pop();
                if let Some(found) = &found {
                    due.retain(|(watch, want)| want.token != found.token || (want != found && *watch != found.path));
                }
                found.is_some()
            };
            for (path, child, token, pop) in pushed {
                let (watch, token) = (format!("/{path}"), token.to_string());
                let pushed = format!("{watch}/{child}");
                events.push(&pushed, &token);
                if watched.contains(&(path, token.parse().unwrap())) {
                    due.insert((watch, WatchEvent { path: pushed, token }));
                }
                prop_assert!(events.queue.len() <= watched.len() * (PATHS_PER_WATCH + 1));
                if pop {
                    take(&mut events, &mut due);
                }
            }
            while take(&mut events, &mut due) {}
            prop_assert!(due.is_empty(), "{due:?}");
            prop_assert!(events.queued.is_empty());
            prop_assert!(events.watches.values().flatten().all(|watch| watch.queued == 0));
        }
    }
}
