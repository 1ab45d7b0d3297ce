//! Unit attention conditions of one nexus: changes of the logical unit since the initiator's last command. Source:
//! SAM-5 section 5.14, codes from SPC-4 annex F.
//!
//! The queue is one 64-bit word with 4 bits for each condition, in the order of reporting. There are fewer than 16
//! conditions and none is queued twice, so all fit; an empty queue is 0, so the data path checks it with one plain
//! load.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::sense::{Sense, SenseKey};

/// Unit attention condition. Its text form is part of saved states, so it must not change between versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum UnitAttention {
    /// 29/01: the logical unit is new to this initiator, or was switched on.
    PowerOn = 1,
    /// 29/03: a task management function reset the logical unit.
    BusDeviceReset,
    /// 29/07: the nexus was reset.
    NexusLoss,
    /// 2A/01: another nexus changed a mode page.
    ModeParametersChanged,
    /// 2A/03: another nexus cleared all persistent reservations and registrations.
    ReservationsPreempted,
    /// 2A/04: a reservation that the nexus was registered for was released or has another type.
    ReservationsReleased,
    /// 2A/05: another nexus removed this one's registration.
    RegistrationsPreempted,
    /// 2A/09: the capacity changed.
    CapacityChanged,
    /// 2F/00: another nexus aborted this one's commands.
    CommandsCleared,
    /// 3F/03: INQUIRY data changed.
    InquiryDataChanged,
    /// 3F/0E: the target's logical units changed.
    ReportedLunsChanged,
}

/// Conditions that are a reset, strongest first: a pending one covers those after it. Source: SAM-5 section 5.14.5.
const RESETS: [UnitAttention; 3] = [UnitAttention::PowerOn, UnitAttention::BusDeviceReset, UnitAttention::NexusLoss];

impl UnitAttention {
    /// All conditions.
    pub const ALL: [UnitAttention; 11] = [
        UnitAttention::PowerOn,
        UnitAttention::BusDeviceReset,
        UnitAttention::NexusLoss,
        UnitAttention::ModeParametersChanged,
        UnitAttention::ReservationsPreempted,
        UnitAttention::ReservationsReleased,
        UnitAttention::RegistrationsPreempted,
        UnitAttention::CapacityChanged,
        UnitAttention::CommandsCleared,
        UnitAttention::InquiryDataChanged,
        UnitAttention::ReportedLunsChanged,
    ];

    /// Returns the sense data that reports the condition.
    pub const fn sense(self) -> Sense {
        let (asc, ascq) = match self {
            UnitAttention::PowerOn => (0x29, 0x01),
            UnitAttention::BusDeviceReset => (0x29, 0x03),
            UnitAttention::NexusLoss => (0x29, 0x07),
            UnitAttention::ModeParametersChanged => (0x2a, 0x01),
            UnitAttention::ReservationsPreempted => (0x2a, 0x03),
            UnitAttention::ReservationsReleased => (0x2a, 0x04),
            UnitAttention::RegistrationsPreempted => (0x2a, 0x05),
            UnitAttention::CapacityChanged => (0x2a, 0x09),
            UnitAttention::CommandsCleared => (0x2f, 0x00),
            UnitAttention::InquiryDataChanged => (0x3f, 0x03),
            UnitAttention::ReportedLunsChanged => (0x3f, 0x0e),
        };
        Sense::new(SenseKey::UnitAttention, asc, ascq)
    }

    /// Returns the position among the resets; all other conditions come after them, in the order in which they were
    /// raised.
    fn reset_rank(self) -> usize {
        RESETS.iter().position(|reset| *reset == self).unwrap_or(RESETS.len())
    }

    fn is_reset(self) -> bool {
        self.reset_rank() < RESETS.len()
    }

    fn from_code(code: u64) -> Option<UnitAttention> {
        UnitAttention::ALL.into_iter().find(|kind| *kind as u64 == code)
    }
}

/// Bits of the word that one pending condition takes.
const BITS: u32 = 4;

/// Pending conditions in the order of reporting, the first one in the lowest bits.
#[derive(Clone, Copy)]
struct PendingAttentions(u64);

impl PendingAttentions {
    fn iter(self) -> impl Iterator<Item = UnitAttention> {
        (0..u64::BITS / BITS).map_while(move |index| UnitAttention::from_code((self.0 >> (index * BITS)) & 0xf))
    }

    fn collect(kinds: impl Iterator<Item = UnitAttention>) -> PendingAttentions {
        let mut word = 0;
        for (shift, kind) in (0..).step_by(BITS as usize).zip(kinds) {
            word |= (kind as u64) << shift;
        }
        PendingAttentions(word)
    }

    fn with(self, new: UnitAttention) -> PendingAttentions {
        let covers = |held: UnitAttention| held == new || (new.is_reset() && held.reset_rank() < new.reset_rank());
        if self.iter().any(covers) {
            return self;
        }
        // POWER ON voids everything raised before it; a lesser reset covers the resets below it.
        let outlived = |held: &UnitAttention| match new {
            UnitAttention::PowerOn => false,
            _ => !(new.is_reset() && held.is_reset()),
        };
        let (before, after): (Vec<_>, Vec<_>) =
            self.iter().filter(outlived).partition(|held| held.reset_rank() <= new.reset_rank());
        PendingAttentions::collect(before.into_iter().chain([new]).chain(after))
    }

    fn without(self, gone: UnitAttention) -> PendingAttentions {
        PendingAttentions::collect(self.iter().filter(|held| *held != gone))
    }
}

/// Unit attentions that are not yet reported to one nexus.
#[derive(Debug, Default)]
pub struct UnitAttentionQueue {
    word: AtomicU64,
}

impl UnitAttentionQueue {
    /// Returns an empty queue.
    pub const fn new() -> UnitAttentionQueue {
        UnitAttentionQueue { word: AtomicU64::new(0) }
    }

    /// Returns true if a unit attention is pending. One relaxed load.
    pub fn has_pending(&self) -> bool {
        self.word.load(Ordering::Relaxed) != 0
    }

    /// Queues a unit attention, unless it is queued already or covered by a queued reset.
    pub fn raise(&self, new: UnitAttention) {
        self.change(|pending| pending.with(new));
    }

    /// Removes the first unit attention and returns its sense data, which the caller reports.
    pub fn take(&self) -> Option<Sense> {
        let before = self.change(|pending| PendingAttentions(pending.0 >> BITS));
        before.iter().next().map(UnitAttention::sense)
    }

    /// Removes a unit attention that was reported in another way, for example by REPORT LUNS (SPC-4 section 6.33).
    pub fn clear(&self, told: UnitAttention) {
        self.change(|pending| pending.without(told));
    }

    /// Removes all unit attentions.
    pub fn clear_all(&self) {
        self.change(|_| PendingAttentions(0));
    }

    /// Removes all resets: the logical unit was not reset for its initiator.
    pub fn clear_resets(&self) {
        self.change(|pending| PendingAttentions::collect(pending.iter().filter(|held| !held.is_reset())));
    }

    /// Returns all pending unit attentions, in the order of reporting.
    pub fn pending(&self) -> Vec<UnitAttention> {
        PendingAttentions(self.word.load(Ordering::Acquire)).iter().collect()
    }

    /// Replaces all pending unit attentions by these, raised in this order.
    pub fn replace(&self, raised: &[UnitAttention]) {
        let pending = raised.iter().fold(PendingAttentions(0), |pending, kind| pending.with(*kind));
        self.change(|_| PendingAttentions(pending.0));
    }

    /// Removes the unit attention that this sense data, returned by [`peek`](Self::peek), has reported. Another one may
    /// precede it meanwhile.
    pub fn clear_reported(&self, sense: Sense) {
        if let Some(kind) = UnitAttention::ALL.into_iter().find(|kind| kind.sense() == sense) {
            self.clear(kind);
        }
    }

    /// Returns the sense data of the first unit attention, which stays pending.
    pub fn peek(&self) -> Option<Sense> {
        PendingAttentions(self.word.load(Ordering::Acquire)).iter().next().map(UnitAttention::sense)
    }

    fn change(&self, step: impl Fn(PendingAttentions) -> PendingAttentions) -> PendingAttentions {
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            let new = step(PendingAttentions(word)).0;
            match self.word.compare_exchange_weak(word, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(before) => return PendingAttentions(before),
                Err(found) => word = found,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::UnitAttention::*;
    use super::*;

    fn told(raised: &[UnitAttention]) -> Vec<UnitAttention> {
        let queue = UnitAttentionQueue::new();
        raised.iter().for_each(|kind| queue.raise(*kind));
        std::iter::from_fn(|| queue.take())
            .map(|sense| UnitAttention::ALL.into_iter().find(|kind| kind.sense() == sense).expect("a known kind"))
            .collect()
    }

    #[test]
    fn resets_come_first_and_cover_lesser_resets() {
        let cases: &[(&[UnitAttention], &[UnitAttention])] = &[
            (&[], &[]),
            (&[CapacityChanged, CapacityChanged], &[CapacityChanged]),
            (&[ReportedLunsChanged, ModeParametersChanged], &[ReportedLunsChanged, ModeParametersChanged]),
            // A reset comes first, also if it is raised late.
            (&[CapacityChanged, NexusLoss], &[NexusLoss, CapacityChanged]),
            (&[CapacityChanged, BusDeviceReset], &[BusDeviceReset, CapacityChanged]),
            // The stronger reset covers the weaker one, in either order.
            (&[NexusLoss, BusDeviceReset], &[BusDeviceReset]),
            (&[BusDeviceReset, NexusLoss], &[BusDeviceReset]),
            (&[PowerOn, NexusLoss, BusDeviceReset], &[PowerOn]),
            // POWER ON voids everything before it, not later conditions.
            (&[NexusLoss, CapacityChanged, PowerOn, ReportedLunsChanged], &[PowerOn, ReportedLunsChanged]),
            (&[PowerOn, CapacityChanged], &[PowerOn, CapacityChanged]),
        ];
        for (raised, expected) in cases {
            assert_eq!(told(raised), *expected, "{raised:?}");
        }
    }

    #[test]
    fn clear_resets_keeps_other_attentions() {
        let queue = UnitAttentionQueue::new();
        [PowerOn, CapacityChanged, ReportedLunsChanged].into_iter().for_each(|kind| queue.raise(kind));
        queue.clear_resets();
        assert_eq!([queue.take(), queue.take()], [CapacityChanged, ReportedLunsChanged].map(|kind| Some(kind.sense())));
        [NexusLoss, BusDeviceReset].into_iter().for_each(|kind| queue.raise(kind));
        queue.clear_resets();
        assert!(!queue.has_pending());
        [PowerOn, ReportedLunsChanged].into_iter().for_each(|kind| queue.raise(kind));
        queue.clear_all();
        assert!(!queue.has_pending());
    }

    #[test]
    fn take_and_clear() {
        let queue = UnitAttentionQueue::new();
        assert!(!queue.has_pending());
        queue.raise(CapacityChanged);
        queue.raise(ReportedLunsChanged);
        queue.raise(ModeParametersChanged);
        assert!(queue.has_pending());
        assert_eq!(queue.peek(), Some(CapacityChanged.sense()));
        queue.clear(ReportedLunsChanged);
        queue.clear(NexusLoss);
        assert_eq!(queue.take(), Some(CapacityChanged.sense()));
        assert_eq!(queue.take(), Some(ModeParametersChanged.sense()));
        assert_eq!((queue.take(), queue.has_pending()), (None, false));
        // A condition that moves to the front meanwhile has not been reported.
        queue.raise(CapacityChanged);
        let reported = queue.peek().expect("pending");
        queue.raise(BusDeviceReset);
        queue.clear_reported(reported);
        assert_eq!((queue.take(), queue.take()), (Some(BusDeviceReset.sense()), None));
    }

    #[test]
    fn pending_attentions_move_to_another_queue() {
        let (source, destination) = (UnitAttentionQueue::new(), UnitAttentionQueue::new());
        [CapacityChanged, ModeParametersChanged, NexusLoss].into_iter().for_each(|kind| source.raise(kind));
        destination.raise(PowerOn);
        assert_eq!(source.pending(), [NexusLoss, CapacityChanged, ModeParametersChanged]);
        destination.replace(&source.pending());
        assert_eq!(destination.pending(), source.pending());
        destination.replace(&[CapacityChanged, CapacityChanged]);
        assert_eq!(destination.pending(), [CapacityChanged]);
        destination.replace(&[]);
        assert!(!destination.has_pending());
    }

    #[test]
    fn every_condition_fits_at_once() {
        assert!(UnitAttention::ALL.len() <= (u64::BITS / BITS) as usize);
        let mut all = UnitAttention::ALL;
        // All but the two that POWER ON covers.
        all.reverse();
        assert_eq!(told(&all).len(), 1);
        assert_eq!(told(&UnitAttention::ALL).len(), UnitAttention::ALL.len() - 2);
        for kind in UnitAttention::ALL {
            assert_eq!(UnitAttention::from_code(kind as u64), Some(kind));
        }
    }

    /// Nothing is lost or reported twice when several threads raise while one takes.
    #[test]
    fn concurrent_raise_and_take() {
        let queue = UnitAttentionQueue::new();
        let kinds = [ModeParametersChanged, CapacityChanged, ReportedLunsChanged, CommandsCleared];
        let told = std::thread::scope(|scope| {
            for kind in kinds {
                let queue = &queue;
                scope.spawn(move || queue.raise(kind));
            }
            let mut told = Vec::new();
            while told.len() < kinds.len() {
                told.extend(queue.take());
                std::thread::yield_now();
            }
            told
        });
        for kind in kinds {
            assert_eq!(told.iter().filter(|sense| **sense == kind.sense()).count(), 1);
        }
        assert!(!queue.has_pending());
    }

    proptest! {
        #[test]
        fn any_sequence_of_raises(raised in proptest::collection::vec(0..UnitAttention::ALL.len(), 0..40)) {
            let raised: Vec<_> = raised.into_iter().map(|index| UnitAttention::ALL[index]).collect();
            let told = told(&raised);
            // Sorted by precedence, none twice, at most one reset; the last condition is reported or covered.
            prop_assert!(told.is_sorted_by_key(|kind| kind.reset_rank()));
            prop_assert!(told.iter().enumerate().all(|(index, kind)| !told[..index].contains(kind)));
            prop_assert!(told.iter().filter(|kind| kind.is_reset()).count() <= 1);
            if let Some(last) = raised.last() {
                prop_assert!(told.contains(last) || last.is_reset() && told[0].reset_rank() < last.reset_rank());
            }
        }
    }
}
