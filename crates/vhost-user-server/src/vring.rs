//! One queue: its configuration by SET_VRING_* messages, and its attached queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sharing::SHARE_HINT;
use mqblk_core::counters::QueueCounters;
use mqblk_core::{Call, Wake};
use mqblk_engine::{
    CallDescriptor, Detached, Draining, Engine, EventFd, FaultHandler, FixedBufferUse, Kick, MoveResult, Notifier,
    PollPolicy, QueueDisk, QueueFault, QueueHandle, QueueMove, QueueOptions, QueuePolicy, StatsRegistry, UringContext,
};
use mqblk_memory::{GuestAddress, GuestMemory, MemoryShare, UserAddress};
use mqblk_ring::virtqueue::{DeviceRing, MappedRing, RingAddresses, RingFormat, RingState};
use mqblk_virtio::{QueueResources, QueueRole, VirtioDevice, VirtioQueue, features};

use crate::dirty_log::DirtyLogging;
use crate::inflight::InflightRegion;

/// Interval between log lines while a drain waits for storage.
const DRAIN_LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Advice for the log, if the driver uses the platform's addresses.
const IOMMU_HINT: &str =
    "addresses of a virtual IOMMU are not translated: give the device none (QEMU: iommu_platform=off)";

/// Parameters that all queues of a session share when they start.
pub(crate) struct StartParams<'a, D> {
    pub(crate) device: &'a Arc<D>,
    pub(crate) engine: &'a Engine,
    pub(crate) disks: Vec<QueueDisk>,
    pub(crate) name: &'a str,
    pub(crate) memory: &'a Arc<GuestMemory>,
    pub(crate) inflight: Option<&'a Arc<InflightRegion>>,
    pub(crate) features: u64,
    pub(crate) policy: QueuePolicy,
    pub(crate) fixed_buffers: FixedBufferUse,
    pub(crate) worker: usize,
    pub(crate) stats: &'a StatsRegistry,
    pub(crate) logging: &'a DirtyLogging,
}

/// Ring addresses in the frontend's address space, from SET_VRING_ADDR.
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
    /// Guest address at which writes to the used ring are logged; `None` if they are not.
    pub(crate) log_address: Option<GuestAddress>,
    /// The position at which the ring is resumed; `None` if it is new.
    pub(crate) base: Option<u32>,
    /// The ring's format, since it was started.
    format: RingFormat,
    /// True if the driver, since the ring was started, uses the platform's addresses.
    uses_platform: bool,
    /// `None`: SET_VRING_KICK has not arrived. `Some(None)`: the frontend has no kick descriptor.
    pub(crate) kick: Option<Option<EventFd>>,
    /// Moved into the queue when it starts.
    pub(crate) call: Option<Notifier>,
    /// The descriptor of `call`.
    pub(crate) call_event: Option<CallDescriptor>,
    pub(crate) err: Option<CallDescriptor>,
    pub(crate) enabled: bool,
    pub(crate) attached: Option<QueueHandle<Q>>,
    /// True if the in-flight region records its requests.
    tracked: bool,
    /// The drain, while the queue drains.
    draining: Option<DrainingVring>,
    /// Its counters over all attachments, and their number.
    served: ServedQueue,
}

/// The counters of a queue that has stopped.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ServedQueue {
    pub(crate) starts: u32,
    pub(crate) counters: QueueCounters,
}

/// A draining queue.
struct DrainingVring {
    queue: Draining<RingState>,
    since: Instant,
    /// Next time at which the wait is logged.
    next_log: Instant,
    /// True if it does not wait for storage: its requests are left to whoever serves the ring next.
    is_suspended: bool,
}

impl<Q: VirtioQueue<UringContext>> Vring<Q> {
    pub(crate) fn new(index: u16) -> Self {
        Vring {
            index,
            size: None,
            addresses: None,
            log_address: None,
            base: None,
            format: RingFormat::default(),
            uses_platform: false,
            kick: None,
            call: None,
            call_event: None,
            err: None,
            enabled: false,
            attached: None,
            tracked: false,
            draining: None,
            served: ServedQueue::default(),
        }
    }

    /// Makes the notifier again, which the queue has taken.
    pub(crate) fn renew_call(&mut self) -> Result<(), String> {
        if self.is_stopped() {
            let call = self.call_event.as_ref().map(Notifier::new).transpose();
            self.call = call.map_err(|error| format!("call: {error}"))?;
        }
        Ok(())
    }

    /// Forgets the frontend's setup.
    pub(crate) fn reset(&mut self) {
        *self = Vring { served: self.served, ..Vring::new(self.index) };
    }

    /// Returns its counters until the stop.
    pub(crate) fn served(&self) -> ServedQueue {
        self.served
    }

    /// Translates the ring's addresses with this memory table.
    fn resolve(&self, memory: &GuestMemory, format: RingFormat) -> Result<MappedRing, String> {
        let (Some(size), Some(user)) = (self.size, self.addresses) else {
            return Err(format!("queue {}: found a start before SET_VRING_NUM and SET_VRING_ADDR", self.index));
        };
        let guest = |part: &str, address: UserAddress| {
            memory.user_to_guest(address).ok_or_else(|| {
                let (index, address) = (self.index, address.0);
                let hint = if self.uses_platform { IOMMU_HINT } else { SHARE_HINT };
                format!("queue {index}: {part}: found address {address:#x}, expected one in a memory region; {hint}")
            })
        };
        let addresses = RingAddresses {
            desc: guest("descriptor table", user.desc)?,
            avail: guest("available ring", user.avail)?,
            used: guest("used ring", user.used)?,
        };
        MappedRing::resolve(memory, &addresses, size, format).map_err(|error| format!("queue {}: {error}", self.index))
    }

    /// Returns true if the queue is neither attached nor draining.
    pub(crate) fn is_stopped(&self) -> bool {
        self.attached.is_none() && self.draining.is_none()
    }

    /// Returns true if the queue is stopped and all messages that a start needs have arrived.
    pub(crate) fn is_startable(&self) -> bool {
        self.attached.is_none() && self.kick.is_some() && self.size.is_some() && self.addresses.is_some()
    }

    /// Returns true if the in-flight region records its requests.
    pub(crate) fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Returns true if it was stopped with requests in flight, which the storage has not answered yet.
    pub(crate) fn is_suspended(&self) -> bool {
        self.draining.as_ref().is_some_and(|drain| drain.is_suspended)
    }

    /// Attaches the queue to its worker.
    pub(crate) fn start<D>(&mut self, start: &StartParams<'_, D>) -> Result<(), String>
    where
        D: VirtioDevice<UringContext, Queue = Q>,
    {
        self.format = features::ring_format(start.features);
        self.uses_platform = start.features & features::ACCESS_PLATFORM != 0;
        let mut ring = self.open_ring(start)?;
        self.tracked = ring.is_tracked();
        ring.set_log(
            start
                .logging
                .ring_log(self.log_address, ring.size(), self.format)
                .map_err(|error| format!("queue {}: {error}", self.index))?,
        );
        let share = MemoryShare::new(Arc::clone(start.memory), ring.size().into())
            .with_fixed_buffers(start.fixed_buffers)
            .with_log(start.logging.active().cloned())
            .with_fence(start.inflight.and_then(|region| region.fence()).cloned());
        let kick = self.kick.clone().flatten().map(Kick::from);
        let (disks, policy) = match start.device.queue_role(self.index) {
            QueueRole::Requests => (start.disks.clone(), start.policy),
            QueueRole::Control => (Vec::new(), PollPolicy::Off.into()),
        };
        // Without a kick descriptor new requests are only found by polling.
        let poll = if kick.is_some() { policy.poll } else { PollPolicy::Busy };
        let options = QueueOptions {
            disks,
            kick,
            policy: QueuePolicy { poll, ..policy },
            paused: !self.enabled,
            on_fault: self.fault_handler(start.name),
        };
        let (device, index) = (Arc::clone(start.device), self.index);
        let (call, features) = (self.call.take(), start.features);
        let make = move |waker: &Arc<dyn Wake>| {
            let call = call.map(|call| Box::new(call) as Box<dyn Call>);
            if let Some(call) = call.as_ref().filter(|_| ring.is_resumed()) {
                // The previous backend may have died between the completion and the call.
                call.call();
            }
            let waker = Arc::clone(waker);
            Ok(device.create_queue(index, QueueResources { ring, share, call, features, waker }))
        };
        let handle = start.engine.attach(start.worker, options, make);
        let handle = handle.map_err(|error| format!("queue {}: {error}", self.index))?;
        start.stats.attached(self.index, handle.id());
        self.attached = Some(handle);
        Ok(())
    }

    /// Moves an attached queue to worker `worker`, unless its requests in flight take longer than `timeout`.
    pub(crate) fn move_to(
        &mut self,
        engine: &Engine,
        worker: usize,
        timeout: Duration,
        stats: &StatsRegistry,
    ) -> Result<QueueMove, String> {
        let Some(attached) = self.attached.take() else { return Ok(QueueMove::AtStart) };
        let (handle, result) = match attached.move_to(engine, worker, timeout) {
            Ok(MoveResult::Moved(handle)) => (handle, Ok(QueueMove::Moved)),
            Ok(MoveResult::Busy(handle)) => (handle, Ok(QueueMove::Busy)),
            Ok(MoveResult::Refused(handle, why)) => (handle, Err(format!("queue {}: {why}", self.index))),
            Ok(MoveResult::Stranded(state, why)) => {
                self.base = Some(state.position().base);
                return Err(format!("queue {}: no worker takes it: {why}", self.index));
            }
            Err(gone) => return Err(format!("queue {}: {gone}", self.index)),
        };
        stats.attached(self.index, handle.id());
        self.attached = Some(handle);
        result
    }

    /// Opens the ring at its last position: from the in-flight region's table if there is one, else from
    /// SET_VRING_BASE.
    fn open_ring<D>(&self, start: &StartParams<'_, D>) -> Result<DeviceRing, String> {
        let ring = self.resolve(start.memory, self.format)?;
        let base = self.base.unwrap_or(self.format.first_base());
        let valid = self.size.map_or(Ok(()), |size| self.format.check_base(base, size));
        valid.map_err(|error| format!("queue {}: {error}", self.index))?;
        let (index, event_idx) = (self.index, start.features & features::RING_EVENT_IDX != 0);
        let Some(table) = start.inflight.and_then(|region| region.table(index, self.format)) else {
            return Ok(DeviceRing::new(ring, base, event_idx));
        };
        let (ring, stale) =
            DeviceRing::tracked(ring, base, event_idx, table).map_err(|error| format!("queue {index}: {error}"))?;
        if stale > 0 {
            tracing::info!(
                disk = start.name,
                queue = index,
                requests = stale,
                "the in-flight region was recorded before the ring was reset: its requests are ignored"
            );
        }
        if ring.replays() > 0 {
            tracing::info!(
                disk = start.name,
                queue = index,
                requests = ring.replays(),
                "replaying unanswered requests"
            );
        }
        Ok(ring)
    }

    fn fault_handler(&self, name: &str) -> FaultHandler {
        let (mut err, name, index) = (self.err.clone(), name.to_owned(), self.index);
        Box::new(move |fault| match fault {
            QueueFault::MalformedRequest(why) => {
                tracing::warn!(disk = name, queue = index, "a request of the driver is malformed, and failed: {why}");
            }
            QueueFault::BrokenRing(why) => {
                tracing::warn!(disk = name, queue = index, "queue retired: {why}");
                match err.take().map(|err| Notifier::new(&err)) {
                    Some(Ok(eventfd)) => eventfd.notify(),
                    Some(Err(error)) => tracing::warn!(disk = name, queue = index, "err: {error}"),
                    None => {}
                }
            }
        })
    }

    /// Moves an attached queue to a new memory table. Requests in flight keep their lease on the old one.
    pub(crate) fn relocate(&self, memory: &Arc<GuestMemory>) -> Result<(), String> {
        let Some(attached) = &self.attached else { return Ok(()) };
        let ring = self.resolve(memory, self.format)?;
        let memory = Arc::clone(memory);
        let moved = attached.visit(move |queue, context| queue.relocate(context, ring, memory));
        moved.unwrap_or_else(|gone| Err(gone.to_string()))
    }

    /// Applies the dirty log to an attached queue and its requests. On return every later write is logged as `logging`
    /// says.
    pub(crate) fn apply_log(&self, logging: &DirtyLogging) -> Result<(), String> {
        let (Some(attached), Some(size)) = (&self.attached, self.size) else { return Ok(()) };
        let ring = logging
            .ring_log(self.log_address, size, self.format)
            .map_err(|error| format!("queue {}: {error}", self.index))?;
        let log = logging.active().cloned();
        let applied = attached.visit(move |queue, context| queue.set_log(context, ring, log));
        applied.map_err(|gone| gone.to_string())
    }

    /// Stops pulling requests. Requests parked at a stopped disk fail, and those that wait for a limit are served as it
    /// allows, unless `resumes` (the driver continues with the next backend) and the in-flight region tracks them:
    /// then the next backend replays them.
    pub(crate) fn begin_drain(&mut self, name: &str, resumes: bool) {
        let Some(attached) = self.attached.take() else { return };
        let drained = match resumes && self.tracked {
            true => attached.drain_unanswered(),
            false => attached.drain(),
        };
        match drained {
            Ok(queue) => {
                let since = Instant::now();
                self.draining =
                    Some(DrainingVring { queue, since, next_log: since + DRAIN_LOG_INTERVAL, is_suspended: false });
            }
            Err(gone) => tracing::error!(disk = name, queue = self.index, "{gone}"),
        }
    }

    /// Lets throttled requests of a draining queue pass if no process would replay them: this process no longer serves
    /// the queue.
    pub(crate) fn pass_throttled(&self, name: &str) {
        if let Some(drain) = self.draining.as_ref().filter(|_| !self.tracked)
            && let Err(gone) = drain.queue.pass_throttled()
        {
            tracing::error!(disk = name, queue = self.index, "{gone}");
        }
    }

    /// Waits for the requests in flight of a draining queue, until `end` at most. Returns true if none is left.
    pub(crate) fn wait_drained(&mut self, name: &str, stats: &StatsRegistry, end: Option<Instant>) -> bool {
        let Some(drain) = &mut self.draining else { return true };
        loop {
            let until = end.map_or(drain.next_log, |end| end.min(drain.next_log));
            match drain.queue.wait(until.saturating_duration_since(Instant::now())) {
                Ok(Some(detached)) => {
                    let is_suspended = drain.is_suspended;
                    self.draining = None;
                    self.finish_drain(name, stats, detached, is_suspended);
                    return true;
                }
                Ok(None) => {
                    let now = Instant::now();
                    if now >= drain.next_log && !drain.is_suspended {
                        drain.next_log = now + DRAIN_LOG_INTERVAL;
                        let seconds = drain.since.elapsed().as_secs();
                        tracing::warn!(disk = name, queue = self.index, "waiting for storage since {seconds} s");
                    }
                    if end.is_some_and(|end| now >= end) {
                        return false;
                    }
                }
                Err(gone) => {
                    tracing::error!(disk = name, queue = self.index, "{gone}");
                    self.draining = None;
                    return true;
                }
            }
        }
    }

    /// Stops waiting for a draining queue: its requests in flight never complete. Returns true if there were any.
    pub(crate) fn freeze(&mut self) -> bool {
        // A worker that has ended completes nothing either.
        self.draining.take().is_some_and(|drain| drain.queue.freeze().is_ok())
    }

    /// Leaves the requests of a draining queue in flight, recorded in the in-flight region: nothing more is written to
    /// the guest's memory for them by this process.
    pub(crate) fn suspend(&mut self, name: &str, stats: &StatsRegistry) {
        let Some(drain) = &mut self.draining else { return };
        match drain.queue.freeze() {
            Ok(Some(position)) => {
                drain.is_suspended = true;
                self.base = Some(position.base);
                tracing::warn!(
                    disk = name,
                    queue = self.index,
                    requests = position.in_flight.len(),
                    "stopped without a wait for storage: what it has not answered is left to the next backend"
                );
            }
            // It was drained meanwhile, or its worker has ended.
            Ok(None) | Err(_) => _ = self.wait_drained(name, stats, None),
        }
    }

    fn finish_drain(&mut self, name: &str, stats: &StatsRegistry, detached: Detached<RingState>, is_suspended: bool) {
        let index = self.index;
        // The frontend may have set it since.
        if !is_suspended {
            self.base = Some(detached.position.base);
        }
        stats.detached(index, &detached.report);
        let c = detached.report.counters;
        self.served.starts += 1;
        self.served.counters.add(&c);
        tracing::debug!(
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
