//! One queue: what the VMM told about it, and the served queue it becomes.

use std::sync::Arc;
use std::time::Duration;

use crate::log::Logging;
use mqblk_core::Wake;
use mqblk_engine::{
    Bell, Coalesce, Engine, EventFd, FixedBufferUse, Kick, Lane, PollPolicy, QueueDisk, QueueHandle, QueueOptions,
    Tally,
};
use mqblk_memory::{GuestAddress, GuestMemory, UserAddress};
use mqblk_ring::split::{DeviceRing, SplitAddresses, SplitRing};
use mqblk_virtio::{QueueParts, QueueRole, VirtioDevice, VirtioQueue, features};

/// What all queues of a session share when they start.
pub(crate) struct Start<'a, D> {
    pub(crate) device: &'a Arc<D>,
    pub(crate) engine: &'a Engine,
    pub(crate) disks: Vec<QueueDisk>,
    pub(crate) name: &'a str,
    pub(crate) memory: &'a Arc<GuestMemory>,
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
        }
    }

    /// The ring's fields in this table.
    fn resolve(&self, memory: &GuestMemory) -> Result<SplitRing, String> {
        let (Some(size), Some(user)) = (self.size, self.addresses) else {
            return Err(format!("queue {}: found a start before SET_VRING_NUM and SET_VRING_ADDR", self.index));
        };
        let guest = |part: &str, at: UserAddress| {
            memory.guest_of_user(at).ok_or_else(|| {
                format!("queue {}: {part}: found address {:#x}, expected one in a memory region", self.index, at.0)
            })
        };
        let addresses = SplitAddresses {
            desc: guest("descriptor table", user.desc)?,
            avail: guest("available ring", user.avail)?,
            used: guest("used ring", user.used)?,
        };
        SplitRing::resolve(memory, &addresses, size).map_err(|error| format!("queue {}: {error}", self.index))
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
        let ring = self.resolve(start.memory)?;
        let mut ring = DeviceRing::new(ring, self.base, start.features & features::RING_EVENT_IDX != 0);
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
        let make = move |lane: &mut Lane, waker: &Arc<dyn Wake>| {
            let lease = lane.adopt(memory, fixed).map_err(|error| format!("fixed-buffers=on: {error}"))?;
            lane.buffers.reserve(depth);
            lane.buffers.set_log(lease, log.as_ref());
            let call = call.map(|call| Box::new(call) as Box<dyn mqblk_core::Call>);
            let waker = Arc::clone(waker);
            Ok(device.queue(index, QueueParts { ring, lease, call, features, waker }))
        };
        let leave = move |queue: &mut Q, lane: &mut Lane| {
            queue.close(lane);
            lane.buffers.unreserve(depth);
            lane.retire(queue.lease());
        };
        let handle = start.engine.attach(start.worker, options, make, leave);
        let handle = handle.map_err(|error| format!("queue {}: {error}", self.index))?;
        start.tally.attached(self.index, handle.id());
        self.served = Some(handle);
        Ok(())
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

    /// Takes the queue back and waits for its requests in flight.
    pub(crate) fn stop(&mut self, name: &str, tally: &Tally) {
        let Some(served) = self.served.take() else { return };
        let index = self.index;
        let waiting = |waited: Duration| {
            tracing::warn!(disk = name, queue = index, "waiting for storage since {} s", waited.as_secs());
        };
        match served.detach(waiting) {
            Ok(left) => {
                self.base = left.position;
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
            Err(gone) => tracing::error!(disk = name, queue = index, "{gone}"),
        }
    }
}
