//! One queue: what the VMM told about it, and the served queue it becomes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sharing::SHARE;
use mqblk_core::{Call, Wake};
use mqblk_engine::{
    Bell, Coalesce, Detached, Draining, Engine, EventFd, FixedBufferUse, Kick, Lane, PollPolicy, QueueDisk,
    QueueHandle, QueueOptions, Tally,
};
use mqblk_memory::{GuestAddress, GuestMemory, UserAddress};
use mqblk_ring::split::{DeviceRing, SplitAddresses, SplitRing, SplitState};
use mqblk_virtio::{QueueParts, QueueRole, VirtioDevice, VirtioQueue, features};

use crate::inflight::InflightRegion;
use crate::log::Logging;

/// How often a wait for storage is logged.
const REPORT: Duration = Duration::from_secs(5);

/// What all queues of a session share when they start.
pub(crate) struct Start<'a, D> {
    pub(crate) device: &'a Arc<D>,
    pub(crate) engine: &'a Engine,
    pub(crate) disks: Vec<QueueDisk>,
    pub(crate) name: &'a str,
    pub(crate) memory: &'a Arc<GuestMemory>,
    pub(crate) inflight: Option<&'a Arc<InflightRegion>>,
    pub(crate) features: u64,
    pub(crate) poll: PollPolicy,
    pub(crate) coalesce: Coalesce,
    pub(crate) fixed: FixedBufferUse,
    pub(crate) worker: usize,
    pub(crate) tally: &'a Tally,
    pub(crate) logging: &'a Logging,
}

/// Ring addresses in the VMM's address space, as SET_VRING_ADDR gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UserAddresses {
    pub(crate) desc: UserAddress,
    pub(crate) used: UserAddress,
    pub(crate) avail: UserAddress,
}

/// One queue of a session.
pub(crate) struct Vring<Q> {
    pub(crate) index: u16,
    pub(crate) size: Option<u16>,
    pub(crate) addresses: Option<UserAddresses>,
    /// Where the used ring is logged, if it is.
    pub(crate) log: Option<GuestAddress>,
    pub(crate) base: u16,
    /// `None`: not told yet. `Some(None)`: told that there is none.
    pub(crate) kick: Option<Option<EventFd>>,
    /// Until the start: then the queue has it.
    pub(crate) call: Option<Bell>,
    pub(crate) err: Option<EventFd>,
    pub(crate) enabled: bool,
    pub(crate) served: Option<QueueHandle<Q>>,
    /// What is in flight outlives the process.
    tracked: bool,
    /// It is on its way out.
    leaving: Option<Leaving>,
}

/// A queue that drains.
struct Leaving {
    queue: Draining<SplitState>,
    since: Instant,
    /// When the wait is logged next.
    report: Instant,
}

impl<Q: VirtioQueue<Lane>> Vring<Q> {
    pub(crate) fn new(index: u16) -> Self {
        Vring {
            index,
            size: None,
            addresses: None,
            log: None,
            base: 0,
            kick: None,
            call: None,
            err: None,
            enabled: false,
            served: None,
            tracked: false,
            leaving: None,
        }
    }

    /// The ring's fields in this table.
    fn resolve(&self, memory: &GuestMemory) -> Result<SplitRing, String> {
        let (Some(size), Some(user)) = (self.size, self.addresses) else {
            return Err(format!("queue {}: found a start before SET_VRING_NUM and SET_VRING_ADDR", self.index));
        };
        let guest = |part: &str, at: UserAddress| {
            memory.guest_of_user(at).ok_or_else(|| {
                let (index, at) = (self.index, at.0);
                format!("queue {index}: {part}: found address {at:#x}, expected one in a memory region; {SHARE}")
            })
        };
        let addresses = SplitAddresses {
            desc: guest("descriptor table", user.desc)?,
            avail: guest("available ring", user.avail)?,
            used: guest("used ring", user.used)?,
        };
        SplitRing::resolve(memory, &addresses, size).map_err(|error| format!("queue {}: {error}", self.index))
    }

    /// Whether nothing of it is in flight.
    pub(crate) fn is_stopped(&self) -> bool {
        self.served.is_none() && self.leaving.is_none()
    }

    /// Whether everything is known that a start needs.
    pub(crate) fn is_startable(&self) -> bool {
        self.served.is_none() && self.kick.is_some() && self.size.is_some() && self.addresses.is_some()
    }

    /// Hands the queue to its worker.
    pub(crate) fn start<D>(&mut self, start: &Start<'_, D>) -> Result<(), String>
    where
        D: VirtioDevice<Lane, Queue = Q>,
    {
        let mut ring = self.ring(start)?;
        self.tracked = ring.is_tracked();
        ring.set_log(
            start.logging.ring(self.log, ring.size()).map_err(|error| format!("queue {}: {error}", self.index))?,
        );
        let log = start.logging.in_force().cloned();
        let depth = usize::from(ring.size());
        let kick = self.kick.clone().flatten().map(Kick::from);
        let (disks, poll, coalesce) = match start.device.role(self.index) {
            QueueRole::Requests => (start.disks.clone(), start.poll, start.coalesce),
            QueueRole::Control => (Vec::new(), PollPolicy::Off, Coalesce::default()),
        };
        // A queue that nobody will kick is only ever found by looking.
        let poll = if kick.is_some() { poll } else { PollPolicy::Busy };
        let options = QueueOptions {
            disks,
            kick,
            poll,
            coalesce,
            paused: !self.enabled,
            on_broken: self.tell_broken(start.name),
        };
        let (device, memory, fixed) = (Arc::clone(start.device), Arc::clone(start.memory), start.fixed);
        let (index, call, features) = (self.index, self.call.take(), start.features);
        let fence = start.inflight.and_then(|region| region.fence()).cloned();
        let held = fence.clone();
        let make = move |lane: &mut Lane, waker: &Arc<dyn Wake>| {
            let lease = lane.adopt(memory, fixed).map_err(|error| format!("fixed-buffers=on: {error}"))?;
            lane.buffers.reserve(depth);
            lane.buffers.set_log(lease, log.as_ref());
            if let Some(fence) = &fence
                && !lane.keep_open(fence)
            {
                tracing::debug!("a worker's table of files is full: a killed daemon's requests may outlive its lock");
            }
            let call = call.map(|call| Box::new(call) as Box<dyn Call>);
            if let Some(call) = call.as_ref().filter(|_| ring.is_resumed()) {
                // The call for what was answered last may have been lost with whoever served the ring before.
                call.call();
            }
            let waker = Arc::clone(waker);
            Ok(device.queue(index, QueueParts { ring, lease, call, features, waker }))
        };
        let leave = move |queue: &mut Q, lane: &mut Lane| {
            queue.close(lane);
            lane.buffers.unreserve(depth);
            lane.retire(queue.lease());
            if let Some(fence) = &held {
                lane.let_close(fence);
            }
        };
        let handle = start.engine.attach(start.worker, options, make, leave);
        let handle = handle.map_err(|error| format!("queue {}: {error}", self.index))?;
        start.tally.attached(self.index, handle.id());
        self.served = Some(handle);
        Ok(())
    }

    /// The ring, where it was left: by the in-flight region if it has a table there, else by what the VMM said.
    fn ring<D>(&self, start: &Start<'_, D>) -> Result<DeviceRing, String> {
        let ring = self.resolve(start.memory)?;
        let (index, event_idx) = (self.index, start.features & features::RING_EVENT_IDX != 0);
        let Some(table) = start.inflight.and_then(|region| region.table(index)) else {
            return Ok(DeviceRing::new(ring, self.base, event_idx));
        };
        let (ring, forgotten) = DeviceRing::tracked(ring, self.base, event_idx, table)
            .map_err(|error| format!("queue {index}: {error}"))?;
        if forgotten > 0 {
            tracing::info!(
                disk = start.name,
                queue = index,
                requests = forgotten,
                "the in-flight region is of an earlier life of the ring: its requests are forgotten"
            );
        }
        if ring.replays() > 0 {
            tracing::info!(
                disk = start.name,
                queue = index,
                requests = ring.replays(),
                "requests taken up again that were not answered"
            );
        }
        Ok(ring)
    }

    fn tell_broken(&self, name: &str) -> Box<dyn FnOnce(&str) + Send> {
        let (err, name, index) = (self.err.clone(), name.to_owned(), self.index);
        Box::new(move |why| {
            tracing::warn!(disk = name, queue = index, "queue retired: {why}");
            if let Some(err) = err {
                match Bell::new(&err) {
                    Ok(bell) => bell.ring(),
                    Err(error) => tracing::warn!(disk = name, queue = index, "err: {error}"),
                }
            }
        })
    }

    /// Moves a served queue to a new memory table. Requests in flight keep the old one.
    pub(crate) fn relocate(&self, memory: &Arc<GuestMemory>, fixed: FixedBufferUse) -> Result<(), String> {
        let Some(served) = &self.served else { return Ok(()) };
        let ring = self.resolve(memory)?;
        let memory = Arc::clone(memory);
        let moved = served.visit(move |queue, lane| {
            let lease = lane.adopt(memory, fixed).map_err(|error| format!("fixed-buffers=on: {error}"))?;
            lane.buffers.succeed(queue.lease(), lease);
            let old = queue.relocate(ring, lease);
            lane.retire(old);
            Ok(())
        });
        moved.unwrap_or_else(|gone| Err(gone.to_string()))
    }

    /// Has a served queue log what it writes, and what its requests write, as `logging` says. When this returns, it does.
    pub(crate) fn apply_log(&self, logging: &Logging) -> Result<(), String> {
        let (Some(served), Some(size)) = (&self.served, self.size) else { return Ok(()) };
        let ring = logging.ring(self.log, size).map_err(|error| format!("queue {}: {error}", self.index))?;
        let log = logging.in_force().cloned();
        let applied = served.visit(move |queue, lane| {
            lane.buffers.set_log(queue.lease(), log.as_ref());
            queue.set_log(ring);
        });
        applied.map_err(|gone| gone.to_string())
    }

    /// Takes no more requests off the ring. `resumes`: the driver goes on with whoever serves the ring next, so that what is parked at
    /// a stopped disk can be left to that one, where it is tracked; else it fails.
    pub(crate) fn begin_drain(&mut self, name: &str, resumes: bool) {
        let Some(served) = self.served.take() else { return };
        let drained = match resumes && self.tracked {
            true => served.drain_unanswered(|queue, lane, token, buffer| queue.forget(lane, token, buffer)),
            false => served.drain(),
        };
        match drained {
            Ok(queue) => {
                let since = Instant::now();
                self.leaving = Some(Leaving { queue, since, report: since + REPORT });
            }
            Err(gone) => tracing::error!(disk = name, queue = self.index, "{gone}"),
        }
    }

    /// Waits for the requests in flight of a queue that drains, until `end` at most. Whether none is left.
    pub(crate) fn wait_drained(&mut self, name: &str, tally: &Tally, end: Option<Instant>) -> bool {
        let Some(leaving) = &mut self.leaving else { return true };
        loop {
            let until = end.map_or(leaving.report, |end| end.min(leaving.report));
            match leaving.queue.wait(until.saturating_duration_since(Instant::now())) {
                Ok(Some(left)) => {
                    self.leaving = None;
                    self.left(name, tally, left);
                    return true;
                }
                Ok(None) => {
                    let now = Instant::now();
                    if now >= leaving.report {
                        leaving.report = now + REPORT;
                        let seconds = leaving.since.elapsed().as_secs();
                        tracing::warn!(disk = name, queue = self.index, "waiting for storage since {seconds} s");
                    }
                    if end.is_some_and(|end| now >= end) {
                        return false;
                    }
                }
                Err(gone) => {
                    tracing::error!(disk = name, queue = self.index, "{gone}");
                    self.leaving = None;
                    return true;
                }
            }
        }
    }

    /// Leaves the requests in flight of a queue that drains unanswered. Whether there were any.
    pub(crate) fn freeze(&mut self) -> bool {
        // A worker that has ended answers nothing more either.
        self.leaving.take().is_some_and(|leaving| leaving.queue.freeze().is_ok())
    }

    /// Takes the queue back and waits for its requests in flight, until `end`. Whether none is left.
    pub(crate) fn stop(&mut self, name: &str, tally: &Tally, end: Instant) -> bool {
        self.begin_drain(name, false);
        self.wait_drained(name, tally, Some(end))
    }

    fn left(&mut self, name: &str, tally: &Tally, left: Detached<SplitState>) {
        let index = self.index;
        self.base = left.position.next_avail;
        tally.detached(index, &left.report);
        let c = left.report.counters;
        tracing::info!(
            disk = name,
            queue = index,
            requests = c.requests,
            reads = c.reads,
            writes = c.writes,
            flushes = c.flushes,
            discards = c.discards,
            write_zeroes = c.write_zeroes,
            errors = c.errors,
            malformed = c.malformed,
            kicks = c.kicks,
            calls = c.calls,
            poll_ms = c.poll_ns / 1_000_000,
            "queue stopped"
        );
    }
}
