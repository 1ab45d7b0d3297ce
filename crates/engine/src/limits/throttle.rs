//! The throttle of a disk on one worker: it holds back requests, before they are merged, until the disk's limits allow
//! them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::Tag;

use super::bucket::{Bucket, BucketRole, Demand, Lease};
use super::group::{DiskLimits, Membership};
use super::io_limits::{LimitKind, RequestClass, bytes_of};
use crate::request::{AnyCompletion, AnyRequest, Buffer, cancelled};

/// Capacity for requests that wait, so that a turn does not allocate.
const ROOM: usize = 1024;

/// A request that waits.
struct ThrottledRequest {
    request: AnyRequest,
    /// Its number in the order of arrival.
    arrival: u64,
    since_ns: u64,
}

/// The requests of a class that wait, in the order of arrival.
#[derive(Default)]
struct WaitingList {
    requests: VecDeque<ThrottledRequest>,
    sum: Demand,
}

impl WaitingList {
    fn push(&mut self, waiting: ThrottledRequest) {
        self.sum = self.sum + demand_of(&waiting.request);
        self.requests.push_back(waiting);
    }

    fn pop(&mut self) -> Option<ThrottledRequest> {
        let waiting = self.requests.pop_front()?;
        self.subtract(&waiting.request);
        Some(waiting)
    }

    fn subtract(&mut self, request: &AnyRequest) {
        let Demand { requests, bytes } = demand_of(request);
        self.sum = Demand { requests: self.sum.requests - requests, bytes: self.sum.bytes.saturating_sub(bytes) };
    }

    /// Removes the chosen requests.
    fn extract(&mut self, chosen: impl Fn(Tag) -> bool) -> Vec<ThrottledRequest> {
        let (taken, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.requests).into_iter().partition(|waiting| chosen(waiting.request.tag));
        self.requests.reserve(ROOM);
        self.requests.extend(kept);
        taken.iter().for_each(|waiting| self.subtract(&waiting.request));
        taken
    }
}

fn demand_of(request: &AnyRequest) -> Demand {
    Demand { requests: 1, bytes: bytes_of(request.op, request.len) }
}

/// A bucket of one of the disk's limits, and the worker's lease of it.
struct LeasedBucket {
    bucket: Arc<Bucket>,
    lease: Lease,
    /// Index of the group that it belongs to.
    member: usize,
}

impl LeasedBucket {
    /// Takes the debt of the worker.
    fn take_debt(&mut self) -> Option<(LimitKind, BucketRole, usize, i64)> {
        let debt = self.lease.take_debt();
        (debt > 0).then_some((self.bucket.kind, self.bucket.role, self.member, debt))
    }
}

/// The limit that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocked {
    /// A limit of its class only.
    Class,
    /// A limit of all requests.
    All,
}

/// The throttle of a disk on one worker.
pub(crate) struct Throttle {
    limits: Arc<DiskLimits>,
    members: Vec<Arc<Membership>>,
    /// Buckets of one class first: a request that waits for its class does not draw tokens that all need.
    buckets: Vec<LeasedBucket>,
    /// Waiting requests by class.
    waiting: [WaitingList; 2],
    arrivals: u64,
    /// Requests at the head of the plug that have passed.
    passed: usize,
    /// Slots of queues that leave the worker: their requests do not wait.
    leaving: Vec<u16>,
    /// Time of the next attempt, while requests wait.
    due_ns: u64,
    /// True if the groups count this worker as waiting.
    is_counted: bool,
}

impl Throttle {
    /// Returns the throttle of a disk; `None` when nothing is limited. Its first `passed` plugged requests are no
    /// longer limited.
    pub(crate) fn new(limits: &Arc<DiskLimits>, passed: usize) -> Option<Box<Throttle>> {
        if !limits.is_limited() {
            return None;
        }
        let mut throttle = Box::new(Throttle {
            limits: Arc::clone(limits),
            members: Vec::new(),
            buckets: Vec::new(),
            waiting: [WaitingList::default(), WaitingList::default()],
            arrivals: 0,
            passed,
            leaving: Vec::new(),
            due_ns: 0,
            is_counted: false,
        });
        throttle.waiting.iter_mut().for_each(|list| list.requests.reserve(ROOM));
        throttle.load();
        Some(throttle)
    }

    fn load(&mut self) {
        self.members = self.limits.memberships().collect();
        let buckets = self.members.iter().map(|member| member.buckets()).enumerate();
        let leased = buckets.flat_map(|(member, buckets)| {
            buckets.into_iter().map(move |bucket| LeasedBucket { bucket, lease: Lease::default(), member })
        });
        self.buckets = leased.collect();
        self.buckets.sort_by_key(|leased| leased.bucket.kind.class().is_none());
        self.due_ns = 0;
    }

    /// Reads the disk's limits again. Returns false if nothing is limited any more.
    pub(crate) fn reload(&mut self) -> bool {
        let debts: Vec<_> = self.buckets.iter_mut().filter_map(LeasedBucket::take_debt).collect();
        self.give_back();
        self.load();
        for LeasedBucket { bucket, lease, member } in &mut self.buckets {
            let same =
                |(kind, role, of, _): &&(_, _, _, i64)| (*kind, *role, *of) == (bucket.kind, bucket.role, *member);
            if let Some((.., debt)) = debts.iter().find(same) {
                lease.owe((*debt).min(bucket.longest_debt()));
            }
        }
        self.limits.is_limited()
    }

    /// Returns the number of requests that wait.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.iter().map(|list| list.requests.len()).sum()
    }

    /// Returns the tags of the requests that wait.
    pub(crate) fn waiting_tags(&self) -> impl Iterator<Item = Tag> {
        self.waiting.iter().flat_map(|list| &list.requests).map(|waiting| waiting.request.tag)
    }

    /// Returns true if requests wait and may pass now.
    pub(crate) fn is_due(&self) -> bool {
        self.waiting() > 0 && self.limits.clock.now_ns() >= self.due_ns
    }

    /// Returns when waiting requests may pass.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        // An hour: the time is computed again then.
        const LONGEST_NS: u64 = 3600 * 1_000_000_000;
        let wait = self.due_ns.saturating_sub(self.limits.clock.now_ns()).min(LONGEST_NS);
        (self.waiting() > 0).then(|| Instant::now() + Duration::from_nanos(wait))
    }

    /// Takes new requests that must wait out of the plug, and puts requests that may pass in. Returns true if any of
    /// those had waited.
    pub(crate) fn pass(&mut self, plug: &mut Vec<AnyRequest>) -> bool {
        let (now_ns, before) = (self.limits.clock.now_ns(), self.waiting());
        self.hold_new(plug, now_ns);
        let (mut released, mut waited_ns) = (0, 0_u64);
        let mut blocked = [false; 2];
        while let Some(class) = self.next(blocked) {
            match self.try_spend(class, now_ns) {
                Ok(()) => {
                    let Some(waiting) = self.waiting[class as usize].pop() else { break };
                    if waiting.since_ns != now_ns {
                        released += 1;
                        waited_ns = waited_ns.saturating_add(now_ns.saturating_sub(waiting.since_ns));
                    }
                    plug.push(waiting.request);
                }
                // The others would take the tokens of the oldest.
                Err(Blocked::All) => break,
                Err(Blocked::Class) => blocked[class as usize] = true,
            }
        }
        self.passed = plug.len();
        if released > 0 {
            self.limits.count_released(released, waited_ns);
        }
        self.end_pass(before, now_ns);
        released > 0
    }

    fn end_pass(&mut self, before: usize, now_ns: u64) {
        let waiting = self.waiting();
        if waiting != before {
            self.limits.count_waiting(before, waiting);
        }
        if waiting > 0 {
            if !self.is_counted {
                self.is_counted = true;
                self.members.iter().for_each(|member| member.begin_waiting());
            }
            self.due_ns =
                RequestClass::ALL.into_iter().filter_map(|class| self.due_of(class, now_ns)).min().unwrap_or(0);
        }
    }

    /// Moves the requests since the last call to the waiting lists, except those without a limit.
    fn hold_new(&mut self, plug: &mut Vec<AnyRequest>, now_ns: u64) {
        let leaving = &self.leaving;
        let is_held = |request: &mut AnyRequest| {
            RequestClass::of(request.op).is_some() && !leaving.contains(&request.tag.queue())
        };
        for request in plug.extract_if(self.passed.min(plug.len()).., is_held) {
            let Some(class) = RequestClass::of(request.op) else { continue };
            self.arrivals += 1;
            self.waiting[class as usize].push(ThrottledRequest { request, arrival: self.arrivals, since_ns: now_ns });
        }
    }

    /// Returns the class of the oldest request that waits, of the classes that are not blocked.
    fn next(&self, blocked: [bool; 2]) -> Option<RequestClass> {
        let heads = RequestClass::ALL.into_iter().filter(|class| !blocked[*class as usize]);
        let oldest = |class: &RequestClass| self.waiting[*class as usize].requests.front().map(|head| head.arrival);
        heads.filter(|class| oldest(class).is_some()).min_by_key(oldest)
    }

    /// Spends the tokens of the oldest request of a class, if it may pass now.
    fn try_spend(&mut self, class: RequestClass, now_ns: u64) -> Result<(), Blocked> {
        let Some(head) = self.waiting[class as usize].requests.front() else { return Err(Blocked::Class) };
        let bytes = bytes_of(head.request.op, head.request.len);
        let sums = self.waiting.each_ref().map(|list| list.sum);
        for LeasedBucket { bucket, lease, member } in &mut self.buckets {
            let of_class = bucket.kind.class();
            if of_class.is_some_and(|of| of != class) {
                continue;
            }
            let demand = of_class.map_or(sums[0] + sums[1], |of| sums[of as usize]);
            let sharers = || self.members[*member].sharers();
            if !lease.affords(bucket, bucket.cost(bytes), demand, sharers, now_ns) {
                return Err(if of_class.is_some() { Blocked::Class } else { Blocked::All });
            }
        }
        self.spend(class, bytes);
        Ok(())
    }

    fn spend(&mut self, class: RequestClass, bytes: u64) {
        let of_class = self.buckets.iter_mut().filter(|leased| leased.bucket.kind.class().is_none_or(|of| of == class));
        of_class.for_each(|leased| leased.lease.spend(leased.bucket.cost(bytes)));
    }

    /// Spends tokens of the disk's own limits on credit. The group's tokens belong to all its disks and are not spent.
    fn owe(&mut self, class: RequestClass, bytes: u64) {
        for LeasedBucket { bucket, lease, .. } in self.buckets.iter_mut().filter(|leased| leased.bucket.gives_credit())
        {
            if bucket.kind.class().is_none_or(|of| of == class) {
                lease.spend(bucket.cost(bytes));
            }
        }
    }

    /// Returns when the oldest request of a class may pass.
    fn due_of(&self, class: RequestClass, now_ns: u64) -> Option<u64> {
        let head = self.waiting[class as usize].requests.front()?;
        let bytes = bytes_of(head.request.op, head.request.len);
        let sums = self.waiting.each_ref().map(|list| list.sum);
        let due = |LeasedBucket { bucket, lease, .. }: &LeasedBucket| {
            let of_class = bucket.kind.class();
            if of_class.is_some_and(|of| of != class) {
                return None;
            }
            let demand = of_class.map_or(sums[0] + sums[1], |of| sums[of as usize]);
            lease.ready_at(bucket, bucket.cost(bytes), demand, now_ns)
        };
        self.buckets.iter().filter_map(due).max()
    }

    /// Called after the plug lost `passed` requests that had passed.
    pub(crate) fn forget_passed(&mut self, passed: usize) {
        self.passed -= passed.min(self.passed);
    }

    /// Called when the plug has this many requests and all have passed.
    pub(crate) fn set_passed(&mut self, passed: usize) {
        self.passed = passed;
    }

    /// Returns the number of requests at the head of the plug that have passed.
    pub(crate) fn passed(&self) -> usize {
        self.passed
    }

    /// Cancels the chosen requests among those that wait.
    pub(crate) fn cancel(&mut self, chosen: impl Fn(Tag) -> bool, finished: &mut Vec<AnyCompletion>) {
        let before = self.waiting();
        for list in &mut self.waiting {
            finished.extend(list.extract(&chosen).into_iter().map(|waiting| cancelled(waiting.request)));
        }
        self.limits.count_waiting(before, self.waiting());
    }

    /// Lets the requests of a queue pass at once, on the disk's credit. With `leaving` also later ones, until
    /// [`end_leave`](Self::end_leave).
    pub(crate) fn let_go(&mut self, slot: u16, leaving: bool, plug: &mut Vec<AnyRequest>) {
        if leaving && !self.leaving.contains(&slot) {
            self.leaving.push(slot);
        }
        self.let_go_chosen(|tag| tag.queue() == slot, plug);
    }

    /// Removes the chosen requests without completing them. Returns their tags and buffers.
    pub(crate) fn take_unserved(&mut self, chosen: impl Fn(Tag) -> bool) -> Vec<(Tag, Option<Buffer>)> {
        let before = self.waiting();
        let taken: Vec<_> = self.waiting.iter_mut().flat_map(|list| list.extract(&chosen)).collect();
        self.limits.count_waiting(before, self.waiting());
        taken.into_iter().map(|waiting| (waiting.request.tag, waiting.request.buffer)).collect()
    }

    /// Lets all requests pass at once: nothing is limited any more.
    pub(crate) fn let_all_go(&mut self, plug: &mut Vec<AnyRequest>) {
        self.let_go_chosen(|_| true, plug);
    }

    fn let_go_chosen(&mut self, chosen: impl Fn(Tag) -> bool, plug: &mut Vec<AnyRequest>) {
        let (now_ns, before) = (self.limits.clock.now_ns(), self.waiting());
        let mut gone: Vec<_> = self.waiting.iter_mut().flat_map(|list| list.extract(&chosen)).collect();
        if gone.is_empty() {
            return;
        }
        gone.sort_unstable_by_key(|waiting| waiting.arrival);
        let waited = |waiting: &ThrottledRequest| now_ns.saturating_sub(waiting.since_ns);
        self.limits.count_released(gone.len() as u64, gone.iter().map(waited).fold(0, u64::saturating_add));
        self.limits.count_waiting(before, self.waiting());
        for ThrottledRequest { request, .. } in &gone {
            if let Some(class) = RequestClass::of(request.op) {
                self.owe(class, bytes_of(request.op, request.len));
            }
        }
        // Those behind the passed ones are new, and wait from the next call on.
        let at = self.passed.min(plug.len());
        self.passed = at + gone.len();
        plug.splice(at..at, gone.into_iter().map(|waiting| waiting.request));
    }

    /// Ends a queue's leave: it has left the worker, or stays.
    pub(crate) fn end_leave(&mut self, slot: u16) {
        self.leaving.retain(|leaving| *leaving != slot);
    }

    /// Returns the leased tokens if nothing waits: the worker is about to sleep, and others may use them.
    pub(crate) fn rest(&mut self) {
        if self.waiting() == 0 {
            self.give_back();
        }
    }

    fn give_back(&mut self) {
        self.buckets.iter_mut().for_each(|leased| leased.lease.give_back(&leased.bucket));
        if std::mem::take(&mut self.is_counted) {
            self.members.iter().for_each(|member| member.end_waiting());
        }
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.limits.count_waiting(self.waiting(), 0);
        self.give_back();
    }
}
