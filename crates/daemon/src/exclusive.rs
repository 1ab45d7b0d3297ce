//! Verbs that change the same object, one after the other.
//!
//! Verbs exclude each other by the object that they change, and for a bounded time. A verb that waits for a tenant's
//! storage without a limit only holds up verbs on that tenant's disk, and their error names it.

use std::fmt;
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

use mqblk_core::lock::{LockRank, RankedMutex};

/// The object that a verb changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VerbScope {
    /// The configuration. Taken first: applying it takes the others.
    Configuration,
    /// The workers, and the placement of all devices' queues.
    Workers,
    /// A disk, LUN or controller, by its id.
    Target(String),
    /// A group of limits, by its name.
    LimitGroup(String),
}

impl VerbScope {
    fn excludes(&self, other: &VerbScope) -> bool {
        match (self, other) {
            (VerbScope::Workers, VerbScope::Target(_)) | (VerbScope::Target(_), VerbScope::Workers) => true,
            (one, other) => one == other,
        }
    }
}

impl fmt::Display for VerbScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VerbScope::Configuration => f.write_str("the configuration"),
            VerbScope::Workers => f.write_str("the workers"),
            VerbScope::Target(id) => write!(f, "{id:?}"),
            VerbScope::LimitGroup(name) => write!(f, "limit group {name:?}"),
        }
    }
}

#[derive(Debug)]
struct ListedVerb {
    number: u64,
    scope: VerbScope,
    verb: &'static str,
    since: Instant,
}

#[derive(Debug, Default)]
struct VerbList {
    last_number: u64,
    verbs: Vec<ListedVerb>,
}

#[derive(Debug)]
struct SharedVerbs {
    list: RankedMutex<VerbList>,
    ended: Condvar,
}

/// The running verbs that exclude others.
#[derive(Debug)]
pub(crate) struct ExclusiveVerbs(Arc<SharedVerbs>);

/// A verb that runs until this is dropped.
#[derive(Debug)]
pub(crate) struct RunningVerb {
    shared: Arc<SharedVerbs>,
    number: u64,
}

impl Default for ExclusiveVerbs {
    fn default() -> ExclusiveVerbs {
        let list = RankedMutex::new(LockRank::ExclusiveVerbs, VerbList::default());
        ExclusiveVerbs(Arc::new(SharedVerbs { list, ended: Condvar::new() }))
    }
}

impl ExclusiveVerbs {
    /// Begins a verb. Waits for those that it excludes, for `timeout` at most.
    ///
    /// # Errors
    /// If one of them does not end: names it.
    pub(crate) fn begin(&self, scope: VerbScope, verb: &'static str, timeout: Duration) -> Result<RunningVerb, String> {
        let deadline = Instant::now() + timeout;
        let mut list = self.0.list.lock();
        while let Some(other) = list.verbs.iter().find(|other| other.scope.excludes(&scope)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let (other, of, since) = (other.verb, &other.scope, other.since.elapsed().as_secs());
                return Err(format!(
                    "found {other} of {of}, which has run for {since} s, expected its end within {} s; try again",
                    timeout.as_secs()
                ));
            }
            list = list.wait_timeout(&self.0.ended, left);
        }
        list.last_number += 1;
        let number = list.last_number;
        list.verbs.push(ListedVerb { number, scope, verb, since: Instant::now() });
        Ok(RunningVerb { shared: Arc::clone(&self.0), number })
    }
}

impl Drop for RunningVerb {
    fn drop(&mut self) {
        self.shared.list.lock().verbs.retain(|verb| verb.number != self.number);
        self.shared.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn target(id: &str) -> VerbScope {
        VerbScope::Target(id.to_owned())
    }

    #[test]
    fn a_verb_excludes_those_that_change_the_same_and_names_itself() {
        let verbs = ExclusiveVerbs::default();
        let hangs = verbs.begin(target("a"), "disk.set", LONG).unwrap();
        let other = verbs.begin(target("b"), "disk.set", Duration::ZERO).unwrap();
        let group = verbs.begin(VerbScope::LimitGroup("a".to_owned()), "limit-group.set", Duration::ZERO).unwrap();
        let config = verbs.begin(VerbScope::Configuration, "config.apply", Duration::ZERO).unwrap();
        let why = verbs.begin(target("a"), "queue.move", Duration::ZERO).unwrap_err();
        assert_eq!(why, "found disk.set of \"a\", which has run for 0 s, expected its end within 0 s; try again");
        assert!(verbs.begin(VerbScope::Workers, "worker.add", Duration::from_millis(1)).is_err());
        drop((other, group, config));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| verbs.begin(VerbScope::Workers, "worker.add", LONG).map(drop));
            drop(hangs);
            waits.join().unwrap().unwrap();
        });
        assert!(verbs.0.list.lock().verbs.is_empty());
    }
}
