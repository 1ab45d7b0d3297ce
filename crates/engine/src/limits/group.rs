//! Groups that share limits, and the limits of a disk: its own, and its group's.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;

use super::bucket::Bucket;
use super::io_limits::{IoLimits, LimitKind};
use super::limit_clock::LimitClock;

/// Limits that several disks share.
#[derive(Debug, Default)]
pub struct LimitGroup {
    name: String,
    clock: LimitClock,
    /// True if it belongs to one disk, which may use tokens on credit: no other disk waits for them.
    is_of_disk: bool,
    current: Mutex<Current>,
    /// Disks with requests that wait.
    waiting_disks: AtomicI32,
}

/// Tokens of limits that were used and have not accrued since: by [`LimitKind`], of the sustained rate and of the
/// burst's. Bytes, or 1024ths of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsedTokens(pub [[u64; 2]; LimitKind::ALL.len()]);

/// The limits in force.
#[derive(Debug, Default)]
struct Current {
    limits: IoLimits,
    buckets: Vec<Arc<Bucket>>,
}

impl LimitGroup {
    /// Returns a group. Its disks may use the bursts at once.
    pub fn new(name: impl Into<String>, limits: IoLimits) -> LimitGroup {
        LimitGroup::with_clock(name, limits, LimitClock::default())
    }

    /// Returns a group of this clock, which must be the one of its disks.
    pub fn with_clock(name: impl Into<String>, limits: IoLimits, clock: LimitClock) -> LimitGroup {
        let group = LimitGroup { name: name.into(), clock, ..LimitGroup::default() };
        group.set(limits);
        group
    }

    /// Returns the group of a disk's own limits.
    fn of_disk(limits: IoLimits, clock: LimitClock) -> LimitGroup {
        let group = LimitGroup { clock, is_of_disk: true, ..LimitGroup::default() };
        group.set(limits);
        group
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its limits.
    pub fn limits(&self) -> IoLimits {
        lock(&self.current).limits
    }

    /// Replaces its limits. Workers use the new ones after [`disks_changed`](crate::Engine::disks_changed). A changed
    /// limit keeps the rest of its burst, as far as the new one allows, and its debt, up to ten seconds of the new
    /// rate.
    pub fn set(&self, limits: IoLimits) {
        let now_ns = self.clock.now_ns();
        let mut current = lock(&self.current);
        let fresh = limits.iter().flat_map(|(kind, limit)| Bucket::of_limit(kind, limit, self.is_of_disk, now_ns));
        let fresh: Vec<_> = fresh.map(Arc::new).collect();
        for bucket in &fresh {
            let same = |old: &&Arc<Bucket>| (old.kind, old.role) == (bucket.kind, bucket.role);
            if let Some(old) = current.buckets.iter().find(same) {
                bucket.set_level(old.balance(now_ns), now_ns);
            }
        }
        *current = Current { limits, buckets: fresh };
    }

    /// Returns the used tokens that have not accrued since, without the workers' leases.
    pub fn used(&self) -> UsedTokens {
        let now_ns = self.clock.now_ns();
        let mut used = UsedTokens::default();
        for bucket in &lock(&self.current).buckets {
            used.0[bucket.kind as usize][bucket.role as usize] = bucket.used(now_ns);
        }
        used
    }

    /// Takes the tokens that another process, which enforced these limits, has [used](Self::used).
    pub fn charge(&self, used: &UsedTokens) {
        let now_ns = self.clock.now_ns();
        for bucket in &lock(&self.current).buckets {
            bucket.charge(used.0[bucket.kind as usize][bucket.role as usize], now_ns);
        }
    }

    pub(super) fn buckets(&self) -> Vec<Arc<Bucket>> {
        lock(&self.current).buckets.clone()
    }
}

/// A disk's membership of a group, with the number of workers that have waiting requests of the disk.
#[derive(Debug)]
pub(super) struct Membership {
    group: Arc<LimitGroup>,
    waiting_workers: AtomicI32,
}

impl Membership {
    fn new(group: &Arc<LimitGroup>) -> Arc<Membership> {
        Arc::new(Membership { group: Arc::clone(group), waiting_workers: AtomicI32::new(0) })
    }

    pub(super) fn buckets(&self) -> Vec<Arc<Bucket>> {
        self.group.buckets()
    }

    /// Called when a worker begins to have waiting requests.
    pub(super) fn begin_waiting(&self) {
        if self.waiting_workers.fetch_add(1, Ordering::Relaxed) == 0 {
            self.group.waiting_disks.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn end_waiting(&self) {
        if self.waiting_workers.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.group.waiting_disks.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of parts of the group's tokens, of which a worker of this disk gets one: disks get equal
    /// parts, for any number of their workers. Approximate while it changes.
    pub(super) fn sharers(&self) -> u64 {
        let at_least_one = |count: &AtomicI32| count.load(Ordering::Relaxed).max(1) as u64;
        at_least_one(&self.group.waiting_disks) * at_least_one(&self.waiting_workers)
    }
}

/// The limits of a disk, which all its workers share, and their counters.
#[derive(Debug)]
pub struct DiskLimits {
    pub(super) clock: LimitClock,
    /// The disk's own limits are a group with one member.
    own: Arc<Membership>,
    group: Mutex<Option<Arc<Membership>>>,
    throttled: AtomicU64,
    throttled_ns: AtomicU64,
    waiting: AtomicU64,
}

/// Statistics of a disk's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleStats {
    /// Requests that had to wait, and do not any more.
    pub throttled: u64,
    /// Sum of their waiting times, in nanoseconds.
    pub throttled_ns: u64,
    /// Requests that wait now.
    pub waiting: u64,
}

impl Default for DiskLimits {
    fn default() -> DiskLimits {
        DiskLimits::new(IoLimits::default(), None)
    }
}

impl DiskLimits {
    /// Returns the limits of a disk: its own, and those of a group.
    pub fn new(own: IoLimits, group: Option<&Arc<LimitGroup>>) -> DiskLimits {
        DiskLimits::with_clock(own, group, LimitClock::default())
    }

    /// Returns limits of this clock.
    pub fn with_clock(own: IoLimits, group: Option<&Arc<LimitGroup>>, clock: LimitClock) -> DiskLimits {
        let own = Arc::new(LimitGroup::of_disk(own, clock.clone()));
        DiskLimits {
            clock,
            own: Membership::new(&own),
            group: Mutex::new(group.map(Membership::new)),
            throttled: AtomicU64::new(0),
            throttled_ns: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
        }
    }

    /// Returns the disk's own limits.
    pub fn own(&self) -> IoLimits {
        self.own.group.limits()
    }

    /// Returns the used tokens of its own limits, as [`LimitGroup::used`].
    pub fn used(&self) -> UsedTokens {
        self.own.group.used()
    }

    /// Takes the tokens that another process has used from its own limits, as [`LimitGroup::charge`].
    pub fn charge(&self, used: &UsedTokens) {
        self.own.group.charge(used);
    }

    /// Returns its group.
    pub fn group(&self) -> Option<Arc<LimitGroup>> {
        lock(&self.group).as_ref().map(|member| Arc::clone(&member.group))
    }

    /// Replaces its own limits, as [`LimitGroup::set`].
    pub fn set_own(&self, limits: IoLimits) {
        self.own.group.set(limits);
    }

    /// Moves it to another group, or to none. Workers use it as after [`LimitGroup::set`].
    pub fn set_group(&self, group: Option<&Arc<LimitGroup>>) {
        let mut current = lock(&self.group);
        let same = match (current.as_ref(), group) {
            (Some(current), Some(group)) => Arc::ptr_eq(&current.group, group),
            (current, group) => current.is_none() && group.is_none(),
        };
        if !same {
            *current = group.map(Membership::new);
        }
    }

    /// Returns true if anything is limited.
    pub fn is_limited(&self) -> bool {
        !self.own().is_empty() || self.group().is_some_and(|group| !group.limits().is_empty())
    }

    /// Returns its statistics.
    pub fn stats(&self) -> ThrottleStats {
        ThrottleStats {
            throttled: self.throttled.load(Ordering::Relaxed),
            throttled_ns: self.throttled_ns.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
        }
    }

    pub(super) fn memberships(&self) -> impl Iterator<Item = Arc<Membership>> {
        std::iter::once(Arc::clone(&self.own)).chain(lock(&self.group).clone())
    }

    /// Counts requests that waited, with the sum of their waiting times.
    pub(super) fn count_released(&self, requests: u64, waited_ns: u64) {
        self.throttled.fetch_add(requests, Ordering::Relaxed);
        self.throttled_ns.fetch_add(waited_ns, Ordering::Relaxed);
    }

    /// Sets the number of requests that wait on a worker, which was `before`.
    pub(super) fn count_waiting(&self, before: usize, now: usize) {
        self.waiting.fetch_add((now as u64).wrapping_sub(before as u64), Ordering::Relaxed);
    }
}
