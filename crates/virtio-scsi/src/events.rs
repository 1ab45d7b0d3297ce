//! The event queue: notifications to the driver. Source: virtio 1.3 section 5.6.6.3, "Device Operation: Event Queue".

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use mqblk_core::lock::lock;
use mqblk_core::{ArmResult, PullEnd, Wake};
use mqblk_memory::BufferPool;
use mqblk_ring::virtqueue::{ChainError, ChainHead, VirtqueueError};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_scsi as b;

use crate::config::{EVENT_BYTES, features};
use crate::lun_map::LunAddress;
use crate::queue_ring::QueueRing;

/// Maximum number of events that wait for a buffer of the driver. Further ones are lost, and the next one reports
/// that.
pub(crate) const MAX_PENDING_EVENTS: usize = 64;

/// An event. Its text form is part of saved states, so it must not change between versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ScsiEvent {
    /// A logical unit was added.
    Appeared(LunAddress),
    /// A logical unit was removed.
    Removed(LunAddress),
    /// The size of a logical unit changed.
    Resized(LunAddress),
}

impl ScsiEvent {
    /// Returns the feature bit that a driver must have negotiated to get the event.
    pub(crate) fn feature(self) -> u64 {
        match self {
            ScsiEvent::Appeared(_) | ScsiEvent::Removed(_) => features::HOTPLUG,
            ScsiEvent::Resized(_) => features::CHANGE,
        }
    }

    /// Encodes `struct virtio_scsi_event`.
    fn bytes(self, missed: bool) -> [u8; EVENT_BYTES] {
        let (event, address, reason) = match self {
            ScsiEvent::Appeared(address) => {
                (b::VIRTIO_SCSI_T_TRANSPORT_RESET, address, b::VIRTIO_SCSI_EVT_RESET_RESCAN)
            }
            ScsiEvent::Removed(address) => {
                (b::VIRTIO_SCSI_T_TRANSPORT_RESET, address, b::VIRTIO_SCSI_EVT_RESET_REMOVED)
            }
            // CAPACITY DATA HAS CHANGED: ASC 2Ah, ASCQ 09h.
            ScsiEvent::Resized(address) => (b::VIRTIO_SCSI_T_PARAM_CHANGE, address, 0x092a),
        };
        encode(event | if missed { b::VIRTIO_SCSI_T_EVENTS_MISSED } else { 0 }, lun_field(address), reason)
    }
}

/// Returns the `lun` field of an event. Linux compares it with the LUNs of REPORT LUNS byte by byte, address method
/// included, so a LUN below 256 must use peripheral device addressing here as it does there.
fn lun_field(address: LunAddress) -> [u8; 8] {
    let mut field = address.encode();
    if address.lun < 256 {
        field[2] = 0;
    }
    field
}

fn encode(event: u32, lun: [u8; 8], reason: u32) -> [u8; EVENT_BYTES] {
    let mut bytes = [0; EVENT_BYTES];
    bytes[..4].copy_from_slice(&event.to_le_bytes());
    bytes[4..12].copy_from_slice(&lun);
    bytes[12..].copy_from_slice(&reason.to_le_bytes());
    bytes
}

#[derive(Default)]
struct EventState {
    /// True if a driver uses the event queue, which may be stopped temporarily.
    has_driver: bool,
    /// Waker of the event queue while it is running.
    queue: Option<Arc<dyn Wake>>,
    events: VecDeque<ScsiEvent>,
    missed: bool,
}

/// Events that wait for delivery to the driver.
#[derive(Default)]
pub(crate) struct Events(Mutex<EventState>);

impl Events {
    fn lock(&self) -> MutexGuard<'_, EventState> {
        lock(&self.0)
    }

    /// Queues an event. Dropped if no driver uses the event queue: a later one scans.
    pub(crate) fn post(&self, event: ScsiEvent) {
        let mut waiting = self.lock();
        if !waiting.has_driver {
            return;
        }
        if waiting.events.len() < MAX_PENDING_EVENTS {
            waiting.events.push_back(event);
        } else {
            waiting.missed = true;
        }
        let queue = waiting.queue.clone();
        drop(waiting);
        if let Some(queue) = queue {
            queue.wake();
        }
    }

    /// Starts the event queue. Drops events whose features the driver has not negotiated.
    fn begin(&self, queue: Arc<dyn Wake>, features: u64, missed: bool) {
        let mut waiting = self.lock();
        waiting.has_driver = true;
        waiting.queue = Some(queue);
        waiting.missed |= missed;
        waiting.events.retain(|event| event.feature() & features != 0);
    }

    /// Stops the event queue. Its events are delivered when it starts again.
    fn pause(&self) {
        self.lock().queue = None;
    }

    /// Drops all events: the next driver scans.
    pub(crate) fn reset(&self) {
        let mut waiting = self.lock();
        *waiting = EventState { queue: waiting.queue.take(), ..EventState::default() };
    }

    /// Returns true if a driver uses the event queue.
    pub(crate) fn has_driver(&self) -> bool {
        self.lock().has_driver
    }

    /// Returns the events that have not been delivered, in order, and true if more were lost. `None`: no driver uses
    /// the event queue.
    pub(crate) fn pending(&self) -> Option<(Vec<ScsiEvent>, bool)> {
        let waiting = self.lock();
        waiting.has_driver.then(|| (waiting.events.iter().copied().collect(), waiting.missed))
    }

    /// Replaces the undelivered events by those of the source of a migration; `None`: no driver uses the event queue.
    /// They are at most [`MAX_PENDING_EVENTS`].
    pub(crate) fn replace(&self, untold: Option<(Vec<ScsiEvent>, bool)>) {
        let mut waiting = self.lock();
        waiting.has_driver = untold.is_some();
        let (events, missed) = untold.unwrap_or_default();
        (waiting.events, waiting.missed) = (events.into(), missed);
    }

    fn has_pending(&self) -> bool {
        let waiting = self.lock();
        waiting.missed || !waiting.events.is_empty()
    }

    /// Removes the next event and returns its bytes.
    fn take(&self) -> Option<[u8; EVENT_BYTES]> {
        let mut waiting = self.lock();
        match waiting.events.pop_front() {
            Some(event) => {
                // The lost events are later than all queued ones.
                let missed = waiting.events.is_empty() && std::mem::take(&mut waiting.missed);
                Some(event.bytes(missed))
            }
            None => {
                let lost = b::VIRTIO_SCSI_T_NO_EVENT | b::VIRTIO_SCSI_T_EVENTS_MISSED;
                std::mem::take(&mut waiting.missed).then(|| encode(lost, [0; 8], 0))
            }
        }
    }
}

/// The event queue. It takes a buffer off its ring only for an event, so a driver that stops the queue finds the
/// other buffers there.
pub(crate) struct EventQueue {
    pub(crate) ring: QueueRing,
    events: Arc<Events>,
}

impl EventQueue {
    pub(crate) fn new(ring: QueueRing, features: u64, events: Arc<Events>, waker: Arc<dyn Wake>) -> EventQueue {
        // A process that died with a buffer taken off the ring lost an event, and perhaps further ones.
        events.begin(waker, features, ring.device.replays() > 0);
        EventQueue { ring, events }
    }

    /// Delivers events while there are events and buffers. Calls `given` for each buffer used.
    pub(crate) fn deliver(&mut self, pool: &mut BufferPool, given: impl FnMut()) -> PullEnd {
        match self.try_deliver(pool, given) {
            Ok(taken) => PullEnd::Empty { taken },
            Err(why) => PullEnd::Broken(why),
        }
    }

    /// Delivers events. Returns the number of used buffers.
    fn try_deliver(&mut self, pool: &mut BufferPool, mut given: impl FnMut()) -> Result<usize, &'static str> {
        let mut taken = 0;
        while self.events.has_pending()
            && let Some(chain) = self.take_buffer(pool).map_err(|broken| broken.0)?
        {
            let buffer = pool.take(self.ring.share.lease());
            pool.set_writable(&buffer);
            let walked = self.ring.device.walk(pool, self.ring.share.lease(), &chain, |pool, piece| {
                let pushed = !piece.writable || pool.push(&buffer, piece.address, piece.len, 16).is_ok();
                if pushed { Ok(()) } else { Err(ChainError::BadRequest) }
            });
            let mut written = 0;
            // A buffer that is too small is returned empty; the event waits for the next.
            if walked.is_ok()
                && pool.len(&buffer).0 >= EVENT_BYTES as u64
                && let Some(event) = self.events.take()
                && pool.copy_in(&buffer, 0, &event)
            {
                written = EVENT_BYTES as u32;
            }
            pool.release(buffer);
            self.ring.device.put_used(chain.index, written);
            given();
            taken += 1;
            if let Err(ChainError::BrokenRing(broken)) = walked {
                return Err(broken.0);
            }
        }
        Ok(taken)
    }

    fn take_buffer(&mut self, pool: &mut BufferPool) -> Result<Option<ChainHead>, VirtqueueError> {
        let mut chain = [ChainHead::default()];
        let (count, _) = self.ring.device.fetch(pool, self.ring.share.lease(), &mut chain, 1)?;
        Ok(chain.into_iter().take(count).next())
    }

    /// The driver need not kick for buffers while there are no events.
    pub(crate) fn arm(&mut self) -> ArmResult {
        if self.events.has_pending() { self.ring.device.arm() } else { ArmResult::Sleepable }
    }

    /// Closes the queue, finally or temporarily.
    pub(crate) fn close(&mut self) {
        self.events.pause();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Silent;

    impl Wake for Silent {
        fn wake(&self) {}
    }

    #[test]
    fn events_match_the_specification() {
        let address = LunAddress { target: 5, lun: 0x102 };
        let lun = [1, 5, 0x41, 2, 0, 0, 0, 0];
        for (event, kind, reason) in [
            (ScsiEvent::Appeared(address), 1_u32, 1_u32),
            (ScsiEvent::Removed(address), 1, 2),
            (ScsiEvent::Resized(address), 3, 0x092a),
        ] {
            for (missed, bit) in [(false, 0), (true, 1 << 31)] {
                let bytes = event.bytes(missed);
                assert_eq!(bytes[..4], (kind | bit).to_le_bytes());
                assert_eq!((&bytes[4..12], &bytes[12..]), (&lun[..], &reason.to_le_bytes()[..]));
            }
        }
    }

    #[test]
    fn events_address_luns_as_report_luns_does() {
        for (lun, address) in [(0, [0, 0]), (1, [0, 1]), (255, [0, 255]), (256, [0x41, 0]), (16383, [0x7f, 255])] {
            assert_eq!(
                ScsiEvent::Resized(LunAddress { target: 9, lun }).bytes(false)[4..8],
                [1, 9, address[0], address[1]]
            );
        }
    }

    #[test]
    fn undelivered_events_survive_a_migration() {
        let (events, destination) = (Events::default(), Events::default());
        let (removed, resized) = (
            |target| ScsiEvent::Removed(LunAddress { target, lun: 0 }),
            ScsiEvent::Resized(LunAddress { target: 9, lun: 1 }),
        );
        let all = removed(0).feature() | resized.feature();
        assert_eq!(events.pending(), None);
        events.begin(Arc::new(Silent), all, false);
        events.post(removed(1));
        events.pause();
        events.post(resized);
        assert_eq!(events.pending(), Some((vec![removed(1), resized], false)));
        destination.replace(events.pending());
        assert!(destination.has_driver());
        destination.begin(Arc::new(Silent), removed(0).feature(), false);
        // It continues here too, if the migration fails.
        events.begin(Arc::new(Silent), all, true);
        assert_eq!(events.pending(), Some((vec![removed(1), resized], true)));
        assert_eq!(destination.pending(), Some((vec![removed(1)], false)), "it has not negotiated size changes");
        events.reset();
        assert_eq!(events.pending(), None);
    }

    #[test]
    fn lost_events_are_reported_with_the_last_queued_one() {
        let events = Events::default();
        let removed = |target| ScsiEvent::Removed(LunAddress { target, lun: 0 });
        events.post(removed(0));
        assert!(!events.has_pending(), "no driver");
        events.begin(Arc::new(Silent), ScsiEvent::Removed(LunAddress { target: 0, lun: 0 }).feature(), false);
        for target in 0..=MAX_PENDING_EVENTS as u8 {
            events.post(removed(target));
        }
        for target in 0..MAX_PENDING_EVENTS as u8 {
            let missed = usize::from(target) == MAX_PENDING_EVENTS - 1;
            assert_eq!(events.take(), Some(removed(target).bytes(missed)));
        }
        assert!(!events.has_pending());
    }
}
