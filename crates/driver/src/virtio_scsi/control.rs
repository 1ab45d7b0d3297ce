//! The control and the event queue: task management and events.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_memory::{GuestAddress, GuestMemory, SharedArray};
use mqblk_ring::driver_ring::{ChainLayout, ChainRefused, DriverRing};
use mqblk_vhost_user_client::EventFd;

use super::layout::ControlLayout;
use super::wire::{
    EVENT_BYTES, LunAddress, POISON, ScsiEvent, TMF_BYTES, TMF_STRIDE, TaskManagementFunction, TaskManagementResponse,
};
use crate::call_event::{self, CallEvent};
use crate::{DriverError, Waker};

/// Event buffers of the device.
const EVENT_BUFFERS: u16 = 16;

/// The control and the event queue, owned by one thread. It need not own request queues.
#[derive(Debug)]
pub struct ControlQueues {
    control: DriverRing,
    event_ring: DriverRing,
    kicks: [EventFd; 2],
    requests: SharedArray<[u64; 4]>,
    responses: SharedArray<u8>,
    user_data: Box<[u32]>,
    free: Vec<u16>,
    memory: Arc<GuestMemory>,
    layout: ControlLayout,
    calls: CallEvent,
}

/// A completed task management function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskCompletion {
    /// The value given at submission.
    pub user_data: u32,
    /// Its response.
    pub response: TaskManagementResponse,
}

impl ControlQueues {
    pub(crate) fn new(
        (control, control_kick): (DriverRing, EventFd),
        (event, event_kick): (DriverRing, EventFd),
        memory: &Arc<GuestMemory>,
        layout: ControlLayout,
        calls: CallEvent,
    ) -> Result<ControlQueues, DriverError> {
        let n = usize::from(control.size());
        let slots = |ok: bool| assert!(ok, "the region was made for this layout");
        let (requests, responses) = (memory.shared_array(layout.requests, n), memory.shared_array(layout.responses, n));
        slots(requests.is_some() && responses.is_some());
        let (Some(requests), Some(responses)) = (requests, responses) else { unreachable!("just checked") };
        let mut made = ControlQueues {
            user_data: vec![0; n].into(),
            free: (0..control.size()).rev().collect(),
            control,
            event_ring: event,
            kicks: [control_kick, event_kick],
            requests,
            responses,
            memory: Arc::clone(memory),
            layout,
            calls,
        };
        for slot in 0..EVENT_BUFFERS.min(made.event_ring.size()) {
            made.post_event_buffer(slot)?;
        }
        made.publish().map_err(DriverError::eventfd)?;
        Ok(made)
    }

    /// Makes an event buffer available to the device.
    fn post_event_buffer(&mut self, slot: u16) -> Result<(), DriverError> {
        let at = GuestAddress(self.layout.events.0 + u64::from(slot) * u64::from(EVENT_BYTES));
        // An event that the device does not write reads as no event.
        self.memory.write(at, &[0; EVENT_BYTES as usize]).expect("events are in shared memory");
        let added = self.event_ring.add(ChainLayout::Direct, &[], &[(at, EVENT_BYTES)], slot.into());
        added.expect("a buffer for each of at most as many entries");
        Ok(())
    }

    fn publish(&mut self) -> io::Result<()> {
        for (ring, kick) in [&mut self.control, &mut self.event_ring].into_iter().zip(&self.kicks) {
            if ring.publish() {
                kick.write(1)?;
            }
        }
        Ok(())
    }

    /// Submits a task management function. `tag`: the command, for functions that address one
    /// ([`ScsiQueueSet::tag`](super::ScsiQueueSet::tag)). Returns false if the control queue is full until a completion
    /// is reaped.
    ///
    /// # Errors
    /// [`DriverError::System`] if the kick cannot be written.
    pub fn submit(
        &mut self,
        user_data: u32,
        function: TaskManagementFunction,
        address: LunAddress,
        tag: u64,
    ) -> Result<bool, DriverError> {
        let Some(&slot) = self.free.last() else { return Ok(false) };
        let request = GuestAddress(self.layout.requests.0 + u64::from(slot) * u64::from(TMF_STRIDE));
        let response = GuestAddress(self.layout.responses.0 + u64::from(slot));
        match self.control.add(ChainLayout::Direct, &[(request, TMF_BYTES)], &[(response, 1)], slot.into()) {
            Ok(()) => {}
            Err(ChainRefused::Full) => return Ok(false),
            Err(error) => unreachable!("two segments in order: {error}"),
        }
        self.free.pop();
        self.user_data[usize::from(slot)] = user_data;
        // Type 0 (task management) and subtype, LUN, tag.
        let words =
            [(u64::from(function as u32) << 32).to_le(), u64::from_ne_bytes(address.to_bytes()), tag.to_le(), 0];
        self.requests.set(slot.into(), words);
        self.responses.set(slot.into(), POISON);
        self.publish().map_err(DriverError::eventfd)?;
        Ok(true)
    }

    /// Reaps one task management function, if one is completed.
    ///
    /// # Errors
    /// If the device violates the protocol.
    pub fn reap(&mut self) -> Result<Option<TaskCompletion>, DriverError> {
        self.control.poll_used()?;
        let Some(used) = self.control.take()? else { return Ok(None) };
        let slot = used.token as usize;
        self.free.push(slot as u16);
        Ok(Some(TaskCompletion {
            user_data: self.user_data[slot],
            response: TaskManagementResponse::from_byte(self.responses.get(slot)),
        }))
    }

    /// Takes one event, if there is one, and makes its buffer available again.
    ///
    /// # Errors
    /// If the device violates the protocol.
    pub fn take_event(&mut self) -> Result<Option<ScsiEvent>, DriverError> {
        self.event_ring.poll_used()?;
        let Some(used) = self.event_ring.take()? else { return Ok(None) };
        let slot = used.token as u16;
        let at = GuestAddress(self.layout.events.0 + u64::from(slot) * u64::from(EVENT_BYTES));
        let mut bytes = [0; EVENT_BYTES as usize];
        self.memory.read(at, &mut bytes).expect("events are in shared memory");
        self.post_event_buffer(slot)?;
        self.publish().map_err(DriverError::eventfd)?;
        Ok(Some(ScsiEvent::from_bytes(bytes)))
    }

    /// Sleeps until a function is completed, an event comes, the waker is used, or `limit` is over. May return early.
    ///
    /// # Errors
    /// If the device violates the protocol, or the wait fails.
    pub fn wait(&mut self, limit: Option<Duration>) -> Result<(), DriverError> {
        let armed = call_event::arm_rings([&mut self.control, &mut self.event_ring].into_iter(), 1)?;
        if !armed.is_ready {
            self.calls.sleep(limit)?;
        }
        self.control.disarm();
        self.event_ring.disarm();
        Ok(())
    }

    /// Submits a task management function and waits for its completion. No other may be in progress.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit) and [`reap`](Self::reap), and [`DriverError::Timeout`] after `limit`.
    pub fn run(
        &mut self,
        function: TaskManagementFunction,
        address: LunAddress,
        tag: u64,
        limit: Duration,
    ) -> Result<TaskManagementResponse, DriverError> {
        let deadline = Instant::now() + limit;
        if !self.submit(0, function, address, tag)? {
            return Err(DriverError::Timeout("task management: the control queue is full"));
        }
        loop {
            if let Some(done) = self.reap()? {
                return Ok(done.response);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DriverError::Timeout("task management"));
            }
            self.wait(Some(left.max(Duration::from_millis(1))))?;
        }
    }

    /// Returns a handle that ends a [`wait`](Self::wait) from another thread.
    ///
    /// # Errors
    /// If a system call fails.
    pub fn waker(&self) -> io::Result<Waker> {
        self.calls.waker()
    }
}
