//! The event queue: what a driver is told without having asked. Source: virtio 1.3 section 5.6.6.3, "Device Operation: Event
//! Queue".

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mqblk_core::{Armed, Pulled, Wake};
use mqblk_memory::BufferPool;
use mqblk_virtio::chain::{ChainError, ChainStart, walk};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_scsi as b;

use crate::queue::Ring;
use crate::units::Place;

/// Bytes of an event.
pub const EVENT_BYTES: usize = 16;
/// Events that wait for a buffer of the driver. Past it they are lost, and the next one says so.
pub(crate) const WAITING: usize = 64;

/// What happened. Its name as text is kept from one version to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Event {
    /// There is a new unit.
    Appeared(Place),
    /// A unit is gone.
    Removed(Place),
    /// A unit has another size.
    Resized(Place),
}

impl Event {
    /// The feature bit without which a driver is not told.
    pub fn feature(self) -> u64 {
        match self {
            Event::Appeared(_) | Event::Removed(_) => crate::features::HOTPLUG,
            Event::Resized(_) => crate::features::CHANGE,
        }
    }

    /// `struct virtio_scsi_event`.
    fn bytes(self, missed: bool) -> [u8; EVENT_BYTES] {
        let (event, place, reason) = match self {
            Event::Appeared(place) => (b::VIRTIO_SCSI_T_TRANSPORT_RESET, place, b::VIRTIO_SCSI_EVT_RESET_RESCAN),
            Event::Removed(place) => (b::VIRTIO_SCSI_T_TRANSPORT_RESET, place, b::VIRTIO_SCSI_EVT_RESET_REMOVED),
            // CAPACITY DATA HAS CHANGED: code 2A, qualifier 09.
            Event::Resized(place) => (b::VIRTIO_SCSI_T_PARAM_CHANGE, place, 0x092a),
        };
        encode(event | if missed { b::VIRTIO_SCSI_T_EVENTS_MISSED } else { 0 }, field(place), reason)
    }
}

/// The `lun` field of an event. Linux compares its LUN with those of REPORT LUNS as they stand there, address method and all, so
/// that a LUN below 256 must be in peripheral device addressing here as it is there.
fn field(place: Place) -> [u8; 8] {
    let mut field = place.to_field();
    if place.lun < 256 {
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
struct Waiting {
    /// There is a driver that listens, though its queue may be stopped for a while.
    listens: bool,
    /// Rings for the event queue while there is one.
    queue: Option<Arc<dyn Wake>>,
    events: VecDeque<Event>,
    missed: bool,
}

/// Events on their way to the driver.
#[derive(Default)]
pub struct Events(Mutex<Waiting>);

impl Events {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the driver told. Without a driver that listens it is forgotten: one that comes later scans.
    pub fn post(&self, event: Event) {
        let mut waiting = self.lock();
        if !waiting.listens {
            return;
        }
        if waiting.events.len() < WAITING {
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

    /// A driver's event queue starts. What a driver of these features does not want to hear, nobody heard of before.
    fn begin(&self, queue: Arc<dyn Wake>, features: u64, missed: bool) {
        let mut waiting = self.lock();
        waiting.listens = true;
        waiting.queue = Some(queue);
        waiting.missed |= missed;
        waiting.events.retain(|event| event.feature() & features != 0);
    }

    /// It stops. What it was not told it is when it goes on.
    fn pause(&self) {
        self.lock().queue = None;
    }

    /// Whoever drives the device next scans.
    pub fn reset(&self) {
        let mut waiting = self.lock();
        *waiting = Waiting { queue: waiting.queue.take(), ..Waiting::default() };
    }

    /// Whether there is a driver that listens.
    pub fn is_listened_to(&self) -> bool {
        self.lock().listens
    }

    /// What the driver was not told yet, in the order of telling, and whether more was lost. `None`: no driver listens.
    pub fn untold(&self) -> Option<(Vec<Event>, bool)> {
        let waiting = self.lock();
        waiting.listens.then(|| (waiting.events.iter().copied().collect(), waiting.missed))
    }

    /// The driver that goes on listens, or not, and was not told these. They are at most [`WAITING`].
    pub fn replace(&self, untold: Option<(Vec<Event>, bool)>) {
        let mut waiting = self.lock();
        waiting.listens = untold.is_some();
        let (events, missed) = untold.unwrap_or_default();
        (waiting.events, waiting.missed) = (events.into(), missed);
    }

    fn any(&self) -> bool {
        let waiting = self.lock();
        waiting.missed || !waiting.events.is_empty()
    }

    /// The next one's bytes.
    fn take(&self) -> Option<[u8; EVENT_BYTES]> {
        let mut waiting = self.lock();
        match waiting.events.pop_front() {
            Some(event) => {
                // Those that were lost came after all that wait.
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

/// The event queue. It takes a buffer off its ring only for an event, so that a driver that stops it finds the others there.
pub struct EventQueue {
    pub(crate) ring: Ring,
    events: Arc<Events>,
}

impl EventQueue {
    pub(crate) fn new(ring: Ring, features: u64, events: Arc<Events>, waker: Arc<dyn Wake>) -> EventQueue {
        // A process that died with a buffer in its hands died with an event, and perhaps with others that waited.
        events.begin(waker, features, ring.device.replays() > 0);
        EventQueue { ring, events }
    }

    /// Puts events in the driver's buffers while there are both. `given` hears of each buffer.
    pub(crate) fn deliver(&mut self, pool: &mut BufferPool, given: impl FnMut()) -> Pulled {
        match self.try_deliver(pool, given) {
            Ok(()) => Pulled::Dry,
            Err(why) => Pulled::Broken(why),
        }
    }

    fn try_deliver(&mut self, pool: &mut BufferPool, mut given: impl FnMut()) -> Result<(), &'static str> {
        while self.events.any()
            && let Some(head) = self.ring.device.take_next().map_err(|broken| broken.0)?
        {
            let start = ChainStart::fetch(&self.ring.device, pool, self.ring.lease, head);
            let buffer = pool.take(self.ring.lease);
            pool.set_writable(&buffer);
            let walked = walk(&self.ring.device, pool, self.ring.lease, &start, |pool, piece| {
                let pushed = !piece.writable || pool.push(&buffer, piece.address, piece.len, 16).is_ok();
                if pushed { Ok(()) } else { Err(ChainError::Request) }
            });
            let mut written = 0;
            // A buffer that holds no event is given back empty; the event waits for the next.
            if walked.is_ok()
                && pool.len(&buffer).0 >= EVENT_BYTES as u64
                && let Some(event) = self.events.take()
                && pool.copy_in(&buffer, 0, &event)
            {
                written = EVENT_BYTES as u32;
            }
            pool.release(buffer);
            self.ring.device.put_used(head, written);
            given();
            if let Err(ChainError::Ring(broken)) = walked {
                return Err(broken.0);
            }
        }
        Ok(())
    }

    /// The driver need not kick for buffers that nobody has a use for.
    pub(crate) fn arm(&mut self) -> Armed {
        if self.events.any() { self.ring.device.arm() } else { Armed::Sleepable }
    }

    /// The queue ends, or stops for a while.
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
    fn events_are_what_the_specification_says() {
        let place = Place { target: 5, lun: 0x102 };
        let lun = [1, 5, 0x41, 2, 0, 0, 0, 0];
        for (event, kind, reason) in
            [(Event::Appeared(place), 1_u32, 1_u32), (Event::Removed(place), 1, 2), (Event::Resized(place), 3, 0x092a)]
        {
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
            assert_eq!(Event::Resized(Place { target: 9, lun }).bytes(false)[4..8], [1, 9, address[0], address[1]]);
        }
    }

    #[test]
    fn a_driver_that_goes_on_hears_what_it_was_not_told() {
        let (events, elsewhere) = (Events::default(), Events::default());
        let (removed, resized) =
            (|target| Event::Removed(Place { target, lun: 0 }), Event::Resized(Place { target: 9, lun: 1 }));
        let all = removed(0).feature() | resized.feature();
        assert_eq!(events.untold(), None);
        events.begin(Arc::new(Silent), all, false);
        events.post(removed(1));
        events.pause();
        events.post(resized);
        assert_eq!(events.untold(), Some((vec![removed(1), resized], false)));
        elsewhere.replace(events.untold());
        assert!(elsewhere.is_listened_to());
        elsewhere.begin(Arc::new(Silent), removed(0).feature(), false);
        // It goes on here too, when it does not move after all.
        events.begin(Arc::new(Silent), all, true);
        assert_eq!(events.untold(), Some((vec![removed(1), resized], true)));
        assert_eq!(elsewhere.untold(), Some((vec![removed(1)], false)), "it does not want to hear of sizes");
        events.reset();
        assert_eq!(events.untold(), None);
    }

    #[test]
    fn lost_events_are_told_with_the_last_that_was_kept() {
        let events = Events::default();
        let removed = |target| Event::Removed(Place { target, lun: 0 });
        events.post(removed(0));
        assert!(!events.any(), "nobody listens");
        events.begin(Arc::new(Silent), Event::Removed(Place { target: 0, lun: 0 }).feature(), false);
        for target in 0..=WAITING as u8 {
            events.post(removed(target));
        }
        for target in 0..WAITING as u8 {
            let missed = usize::from(target) == WAITING - 1;
            assert_eq!(events.take(), Some(removed(target).bytes(missed)));
        }
        assert!(!events.any());
    }
}
