//! The controller for a transport.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_virtio::features::RING_FEATURES;
use mqblk_virtio::{ApplyState, GuestContext, QueueResources, QueueRole, VirtioDevice};

use crate::config::{DriverSizes, features};
use crate::control::ControlQueue;
use crate::device::{FIXED_QUEUES, VirtioScsi};
use crate::events::EventQueue;
use crate::queue::{QueueKind, ScsiQueue};
use crate::queue_ring::QueueRing;
use crate::request_queue::RequestQueue;
use crate::state;

impl<C: GuestContext> VirtioDevice<C> for VirtioScsi {
    type Queue = ScsiQueue<C>;

    fn features(&self) -> u64 {
        features::HOTPLUG | features::CHANGE | RING_FEATURES
    }

    fn set_features(&self, accepted: u64) {
        self.negotiated.store(accepted, Ordering::Relaxed);
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        mqblk_virtio::read_config_space(&self.config().bytes(), offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        self.config().apply_write(offset, bytes).map(|sizes| self.set_sizes(sizes))
    }

    fn reset(&self) {
        self.negotiated.store(0, Ordering::Relaxed);
        self.unused_since_reset.store(true, Ordering::Relaxed);
        self.reset_before_start.store(!self.has_started.load(Ordering::Relaxed), Ordering::Relaxed);
        self.set_sizes(DriverSizes::DEFAULT);
        self.events.reset();
    }

    fn driver_started(&self, resumed: bool) {
        if resumed {
            // Before any queue starts: the first one may be unused by the driver so far.
            self.resume_initiator();
        } else {
            for unit in self.lun_map().iter() {
                unit.nexus.initiator_reset();
                unit.nexus.unit().end_replay();
            }
        }
    }

    fn queue_stopped(&self) {
        self.driver_resumed();
    }

    fn expect_replay(&self, queues: &[u16]) {
        let requests = queues.iter().copied().filter(|queue| *queue >= FIXED_QUEUES);
        self.replay_gate.begin(requests.collect());
    }

    fn end_replay_wait(&self) {
        if self.replay_gate.cancel() {
            self.tmf_mailboxes.wake_all();
        }
        self.lun_map().iter().for_each(|unit| unit.nexus.unit().end_replay());
    }

    fn config_bits(&self) -> u64 {
        let DriverSizes { sense, cdb } = self.sizes();
        u64::from(sense) << 32 | u64::from(cdb)
    }

    fn restore_config_bits(&self, configured: u64) {
        let (sense, cdb) = ((configured >> 32) as u32, configured as u32);
        if configured != 0
            && let Ok(sizes) = self.config().validate_sizes(DriverSizes { sense, cdb })
        {
            self.set_sizes(sizes);
        }
    }

    fn device_type(&self) -> &'static str {
        "virtio-scsi"
    }

    fn save_state(&self) -> String {
        state::save(self)
    }

    fn load_state(self: &Arc<Self>, state: &str) -> Result<ApplyState, String> {
        state::load(self, state)
    }

    fn num_queues(&self) -> u16 {
        FIXED_QUEUES + self.options.queues
    }

    fn queue_role(&self, index: u16) -> QueueRole {
        if index < FIXED_QUEUES { QueueRole::Control } else { QueueRole::Requests }
    }

    fn max_ring_size(&self) -> u16 {
        self.options.queue_size
    }

    fn create_queue(self: &Arc<Self>, index: u16, parts: QueueResources) -> ScsiQueue<C> {
        let QueueResources { ring, share, call, features, waker } = parts;
        if ring.is_resumed() {
            self.resume_initiator();
        }
        self.has_started.store(true, Ordering::Relaxed);
        if self.replay_gate.queue_started(index, ring.recorded_steps()) {
            self.tmf_mailboxes.wake_all();
        }
        let ring = QueueRing { device: ring, share, call };
        ScsiQueue::new(match index {
            0 => QueueKind::Control(Box::new(ControlQueue::new(Arc::clone(self), ring, waker))),
            1 => QueueKind::Event(Box::new(EventQueue::new(ring, features, Arc::clone(&self.events), waker))),
            _ => QueueKind::Request(Box::new(RequestQueue::new(Arc::clone(self), ring, waker))),
        })
    }
}
