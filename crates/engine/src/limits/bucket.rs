//! A token bucket that several workers draw from, without a lock and without a shared cache line for each request.
//!
//! Tokens are numbered as they accrue: at the rate of the limit, from the start of the clock. A worker draws a *lease*:
//! it takes the next free numbers by one atomic operation, and may use each as soon as it has accrued. Tokens not
//! accrued yet can be leased too, so waiting workers are served in the order of arrival: one that always runs cannot
//! overtake one that sleeps until its time. The bucket keeps at most `depth` tokens that nobody has taken.

use std::sync::atomic::{AtomicU64, Ordering};

use super::io_limits::{IoLimit, LimitKind};

/// Tokens of a request in limits of requests: a lease may be a part of one.
const REQUEST_TOKENS: u64 = 1024;

const NS_PER_S: u64 = 1_000_000_000;

/// The default depth, also of a burst's height, in time at the rate: long enough for a late worker.
const DEPTH_NS: u64 = NS_PER_S / 10;

/// A change of a limit keeps as much debt as the new rate pays in this time.
const LONGEST_DEBT_NS: u64 = 10 * NS_PER_S;

/// Each waiter gets a lease of a bucket in about this time.
const CYCLE_NS: u64 = 4_000_000;
/// The smallest lease: a fraction of a request's tokens, or a number of bytes.
const SMALLEST_PART: u64 = 16;
const SMALLEST_BYTES: u64 = 512;

/// Shortest sleep of a worker until tokens accrue, unless fewer are enough for all waiting requests.
const SLICE_NS: u64 = 100_000;

/// On a cache line of its own, and its neighbour: CPUs fetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct OwnLine(AtomicU64);

/// The rate of a limit that a bucket enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BucketRole {
    /// The sustained rate.
    Sustained,
    /// The rate of a burst.
    Height,
}

/// The tokens of one limit.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) kind: LimitKind,
    pub(crate) role: BucketRole,
    /// Tokens a second.
    rate: u64,
    /// Tokens in 2^`shift` nanoseconds, rounded up. The shift is the largest with which this fits.
    per_2_shift_ns: u64,
    shift: u32,
    /// Most tokens that accrue while nobody takes them.
    depth: u64,
    /// True if a request that costs more than the depth passes on credit. False if others would have to wait for it.
    gives_credit: bool,
    /// Total of tokens returned as used on credit.
    debt: AtomicU64,
    /// The number of the next free token. Wraps.
    next: OwnLine,
}

/// Returns the tokens of this many requests or bytes.
const fn tokens(kind: LimitKind, amount: u64) -> u64 {
    if kind.is_bandwidth() { amount } else { amount.saturating_mul(REQUEST_TOKENS) }
}

impl Bucket {
    /// Returns the buckets of a limit, full at the time `now_ns`.
    pub(crate) fn of_limit(
        kind: LimitKind,
        limit: IoLimit,
        gives_credit: bool,
        now_ns: u64,
    ) -> impl Iterator<Item = Bucket> {
        let short = |rate: u64| of_time(tokens(kind, rate), DEPTH_NS).max(tokens(kind, 1));
        let (rate, burst) = (limit.rate, limit.burst);
        let above = burst.map_or(0, |burst| burst.rate.saturating_sub(rate).saturating_mul(burst.seconds.into()));
        // The tokens above the sustained rate during the burst.
        let depth = short(rate).saturating_add(tokens(kind, above));
        let sustained = Bucket::new(kind, BucketRole::Sustained, rate, depth, now_ns);
        let height = burst.map(|burst| Bucket::new(kind, BucketRole::Height, burst.rate, short(burst.rate), now_ns));
        std::iter::once(sustained).chain(height).map(move |bucket| Bucket { gives_credit, ..bucket })
    }

    fn new(kind: LimitKind, role: BucketRole, rate: u64, depth: u64, now_ns: u64) -> Bucket {
        let rate = tokens(kind, rate.clamp(1, IoLimit::max_rate(kind)));
        let scaled = |shift: u32| (u128::from(rate) << shift).div_ceil(u128::from(NS_PER_S));
        // From the lowest rate to the highest, of 2^37 tokens a second.
        let shift = (56..=93).rev().find(|shift| scaled(*shift) <= u128::from(u64::MAX)).unwrap_or(56);
        // Levels are signed.
        let depth = depth.min(i64::MAX as u64 / 4);
        let per_2_shift_ns = scaled(shift) as u64;
        let next = OwnLine(AtomicU64::new(0));
        let bucket = Bucket {
            kind,
            role,
            rate,
            per_2_shift_ns,
            shift,
            depth,
            gives_credit: false,
            debt: AtomicU64::new(0),
            next,
        };
        // It fits: see above.
        bucket.set_level(depth as i64, now_ns);
        bucket
    }

    /// Returns the number of tokens that have accrued. Wraps.
    #[inline]
    fn accrued(&self, now_ns: u64) -> u64 {
        ((u128::from(now_ns) * u128::from(self.per_2_shift_ns)) >> self.shift) as u64
    }

    /// Returns the number of free tokens; negative when tokens are leased that have not accrued.
    pub(crate) fn level(&self, now_ns: u64) -> i64 {
        let level = self.accrued(now_ns).wrapping_sub(self.next.0.load(Ordering::Relaxed)) as i64;
        level.min(self.depth as i64)
    }

    /// Sets the number of free tokens; negative: a debt, of which [`LONGEST_DEBT_NS`] is kept. For a bucket that nobody
    /// uses yet.
    pub(crate) fn set_level(&self, level: i64, now_ns: u64) {
        let level = level.clamp(-self.longest_debt(), self.depth as i64);
        self.next.0.store(self.accrued(now_ns).wrapping_sub(level as u64), Ordering::Relaxed);
    }

    /// Returns the number of free tokens; negative: a debt. Leased tokens that have not accrued are no debt.
    pub(crate) fn balance(&self, now_ns: u64) -> i64 {
        let debt = i64::try_from(self.debt.load(Ordering::Relaxed)).unwrap_or(i64::MAX);
        self.level(now_ns).max(-debt)
    }

    /// Returns the used tokens that have not accrued since: the number missing until it is full.
    pub(crate) fn used(&self, now_ns: u64) -> u64 {
        // Levels are far from the ends of their type.
        (self.depth as i64 - self.balance(now_ns)).max(0) as u64
    }

    /// Takes tokens that another process has used, and as much debt as a change of a limit keeps. They may exceed the
    /// free ones: later draws wait.
    pub(crate) fn charge(&self, tokens: u64, now_ns: u64) {
        let tokens = tokens.min(self.depth.saturating_add_signed(self.longest_debt()));
        self.take(tokens, now_ns);
        self.debt.fetch_add(tokens, Ordering::Relaxed);
    }

    /// Returns the tokens of the longest debt that is kept when a limit changes.
    pub(crate) fn longest_debt(&self) -> i64 {
        i64::try_from(of_time(self.rate, LONGEST_DEBT_NS)).unwrap_or(i64::MAX)
    }

    /// Takes the next `count` tokens. Returns the number of the first.
    fn take(&self, count: u64, now_ns: u64) -> u64 {
        // Tokens before this one were lost: the bucket was full.
        let oldest = self.accrued(now_ns).wrapping_sub(self.depth);
        let mut next = self.next.0.load(Ordering::Relaxed);
        loop {
            let first = if oldest.wrapping_sub(next) as i64 > 0 { oldest } else { next };
            // Relaxed: the number itself is all that is shared.
            let taken = self.next.0.compare_exchange_weak(
                next,
                first.wrapping_add(count),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match taken {
                Ok(_) => return first,
                Err(other) => next = other,
            }
        }
    }

    /// Returns tokens, or with a negative number takes those that were used on credit.
    fn give_back(&self, count: i64) {
        if count < 0 {
            self.debt.fetch_add(count.unsigned_abs(), Ordering::Relaxed);
        }
        self.next.0.fetch_sub(count as u64, Ordering::Relaxed);
    }

    /// Returns the tokens that a request of this many bytes costs.
    #[inline]
    pub(crate) fn cost(&self, bytes: u64) -> u64 {
        if self.kind.is_bandwidth() { bytes } else { REQUEST_TOKENS }
    }

    /// Returns the cost of these requests in tokens.
    #[inline]
    fn demand(&self, demand: Demand) -> u64 {
        tokens(self.kind, if self.kind.is_bandwidth() { demand.bytes } else { demand.requests })
    }

    /// Returns the number of tokens that a request of this cost needs to pass. One that costs more than the bucket
    /// holds passes on credit when the bucket is full, if it gives credit. Otherwise it gathers them, alternating with
    /// the others.
    #[inline]
    fn needed(&self, cost: u64) -> u64 {
        if self.gives_credit { cost.min(self.depth) } else { cost }
    }

    /// Returns the tokens of the lease that each of this many workers gets in turn.
    pub(crate) fn quantum(&self, sharers: u64) -> u64 {
        let smallest = if self.kind.is_bandwidth() { SMALLEST_BYTES } else { REQUEST_TOKENS / SMALLEST_PART };
        (of_time(self.rate, CYCLE_NS) / sharers.max(1)).max(smallest)
    }

    /// Returns when all tokens before `number` will have accrued.
    fn time_of(&self, number: u64, now_ns: u64) -> u64 {
        let missing = (number.wrapping_sub(self.accrued(now_ns)) as i64).max(0) as u64;
        if missing == 0 {
            return now_ns;
        }
        // Without the accrued part of the next token. 34 bits of seconds fit at any rate.
        let part = (u128::from(now_ns) * u128::from(self.per_2_shift_ns)) & ((1 << self.shift) - 1);
        let scaled = u128::from(missing).checked_mul(1 << self.shift).map_or(u128::MAX, |scaled| scaled - part);
        let wait = scaled.div_ceil(u128::from(self.per_2_shift_ns));
        now_ns.saturating_add(u64::try_from(wait).unwrap_or(u64::MAX))
    }

    /// Returns true if requests may pass on credit.
    pub(crate) fn gives_credit(&self) -> bool {
        self.gives_credit
    }

    /// Returns the tokens that a bucket holds when it is full.
    #[cfg(test)]
    pub(crate) fn depth(&self) -> u64 {
        self.depth
    }

    /// Returns the tokens that accrue in a second.
    #[cfg(test)]
    pub(crate) fn rate(&self) -> u64 {
        self.rate
    }
}

/// Returns the tokens that accrue in this many nanoseconds.
const fn of_time(rate: u64, ns: u64) -> u64 {
    (rate as u128 * ns as u128 / NS_PER_S as u128) as u64
}

/// Requests that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Demand {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
}

impl std::ops::Add for Demand {
    type Output = Demand;

    fn add(self, other: Demand) -> Demand {
        Demand { requests: self.requests + other.requests, bytes: self.bytes.saturating_add(other.bytes) }
    }
}

/// One worker's tokens of a bucket.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lease {
    /// Usable tokens; negative: used on credit, for a request that costs more than the bucket holds.
    ready: i64,
    /// The number of the next leased token that has not accrued, and the count of these.
    next: u64,
    left: u64,
}

impl Lease {
    /// Moves the tokens that have accrued to the ready ones.
    #[inline]
    fn accrue(&mut self, bucket: &Bucket, now_ns: u64) {
        if self.left > 0 {
            let count = (bucket.accrued(now_ns).wrapping_sub(self.next) as i64).clamp(0, self.left as i64);
            self.ready += count;
            self.next = self.next.wrapping_add(count as u64);
            self.left -= count as u64;
        }
    }

    /// Returns true if a request of this cost may pass now. Otherwise tokens are leased, whose time
    /// [`ready_at`](Self::ready_at) returns. `waiting` are all waiting requests, including this one; `sharers` is the
    /// number of workers that draw from the bucket.
    #[inline]
    pub(crate) fn affords(
        &mut self,
        bucket: &Bucket,
        cost: u64,
        waiting: Demand,
        sharers: impl Fn() -> u64,
        now_ns: u64,
    ) -> bool {
        let needed = bucket.needed(cost) as i64;
        if self.ready >= needed {
            return true;
        }
        self.accrue(bucket, now_ns);
        while self.ready < needed && self.left == 0 {
            self.draw(bucket, (needed - self.ready) as u64, bucket.demand(waiting), sharers(), now_ns);
        }
        self.ready >= needed
    }

    fn draw(&mut self, bucket: &Bucket, missing: u64, demand: u64, sharers: u64, now_ns: u64) {
        let quantum = bucket.quantum(sharers);
        let wanted = missing.max(demand);
        let count = if bucket.level(now_ns) >= 2 * quantum.max(missing) as i64 {
            // There are more than all waiters need: enough for several requests, so that not each one draws.
            quantum.max(missing)
        } else if sharers > 1 {
            // In equal parts, also for a request that costs more than one part.
            wanted.min(quantum)
        } else {
            // Not more than the depth at once: others may arrive.
            wanted.min(quantum).max(if bucket.gives_credit { missing } else { missing.min(bucket.depth) })
        };
        self.next = bucket.take(count, now_ns);
        self.left = count;
        self.accrue(bucket, now_ns);
    }

    /// Uses this many tokens on credit.
    pub(crate) fn owe(&mut self, tokens: i64) {
        self.ready -= tokens;
    }

    /// Clears the tokens used on credit, and returns their number; 0 if none.
    pub(crate) fn take_debt(&mut self) -> i64 {
        let debt = (-self.ready).max(0);
        self.ready += debt;
        debt
    }

    /// Uses the tokens of a request.
    #[inline]
    pub(crate) fn spend(&mut self, cost: u64) {
        self.ready -= cost as i64;
    }

    /// Returns when a request of this cost may pass or more tokens can be drawn; `None`: now, or no tokens are leased
    /// for it. Late enough for several waiting requests to pass.
    pub(crate) fn ready_at(&self, bucket: &Bucket, cost: u64, waiting: Demand, now_ns: u64) -> Option<u64> {
        let needed = bucket.needed(cost);
        if self.ready >= needed as i64 || self.left == 0 {
            return None;
        }
        let several = bucket.demand(waiting).min(of_time(bucket.rate, SLICE_NS));
        let missing = (needed.max(several) as i64 - self.ready) as u64;
        Some(bucket.time_of(self.next.wrapping_add(missing.min(self.left)), now_ns))
    }

    /// Returns all tokens to the bucket.
    pub(crate) fn give_back(&mut self, bucket: &Bucket) {
        let Lease { ready, left, .. } = std::mem::take(self);
        let count = ready + left as i64;
        if count != 0 {
            bucket.give_back(count);
        }
    }
}
