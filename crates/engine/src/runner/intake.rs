//! A queue's input to the engine in one call: requests, and its own completions.

use mqblk_core::{ByteLen, ByteOffset, Completion, DiskSlot, Intake, Op, Outcome, Request, Tag};

use crate::counters::QueueCounters;
use crate::queue_options::{FaultHandler, QueueFault};
use crate::request::Buffer;
use crate::route::{Route, SubmitContext};
use crate::tags::TagTable;

/// The engine's side of one call to a queue.
pub(super) struct QueueIntake<'a, R, T> {
    pub(super) submit: &'a mut SubmitContext<R>,
    pub(super) tags: &'a mut TagTable<T>,
    pub(super) counters: &'a mut QueueCounters,
    pub(super) on_fault: &'a mut FaultHandler,
}

#[inline(always)] // else the token would travel through memory
fn take_tag<R, T>(
    submit: &SubmitContext<R>,
    tags: &mut TagTable<T>,
    token: T,
    what: (DiskSlot, Op, ByteOffset),
    parts: u16,
) -> Tag {
    let index = tags.take(token, what, parts, submit.now).expect("a queue checks room() before each request");
    Tag::new(submit.slot, index)
}

/// Admits a request that is refused. Kept out of line, so that the outcome of the check is not kept while others get
/// their tags.
#[cold]
#[inline(never)]
fn refuse<R: Route, T>(
    submit: &mut SubmitContext<R>,
    tags: &mut TagTable<T>,
    token: T,
    what: (DiskSlot, Op, ByteOffset),
    outcome: Outcome,
    buffer: Option<Buffer>,
) {
    let tag = take_tag(submit, tags, token, what, 1);
    submit.route.refuse(Completion { outcome, tag, buffer });
}

impl<R: Route, T> Intake<T, Buffer> for QueueIntake<'_, R, T> {
    #[inline]
    fn room(&self) -> usize {
        self.tags.room()
    }

    #[inline(always)] // else the token would travel through memory
    fn admit(&mut self, token: T, disk: DiskSlot, op: Op, start: ByteOffset, len: ByteLen, buffer: Option<Buffer>) {
        match self.submit.route.check(disk, op, start, len) {
            Ok(at) => {
                let tag = take_tag(self.submit, self.tags, token, (disk, op, start), 1);
                self.submit.route.plug(at, Request { op, start, len, tag, buffer });
            }
            Err(outcome) => refuse(self.submit, self.tags, token, (disk, op, start), outcome, buffer),
        }
    }

    fn admit_parts(&mut self, token: T, disk: DiskSlot, op: Op, parts: &[(ByteOffset, ByteLen)]) {
        let bytes = parts.iter().map(|(_, len)| len.0).fold(0, u64::saturating_add);
        self.counters.other_bytes = self.counters.other_bytes.saturating_add(bytes);
        let mut checked = Err(Outcome::Done(ByteLen::ZERO));
        for &(start, len) in parts {
            checked = self.submit.route.check(disk, op, start, len);
            if checked.is_err() {
                break;
            }
        }
        let count = if checked.is_err() { 1 } else { parts.len() as u16 };
        let first = parts.first().map_or(ByteOffset(0), |(start, _)| *start);
        let tag = take_tag(self.submit, self.tags, token, (disk, op, first), count);
        match checked {
            Ok(at) => {
                for &(start, len) in parts {
                    self.submit.route.plug(at, Request { op, start, len, tag, buffer: None });
                }
            }
            Err(outcome) => self.submit.route.refuse(Completion { outcome, tag, buffer: None }),
        }
    }

    fn cancel(&mut self, pick: &mut dyn FnMut(&mut T) -> bool) {
        let slot = self.submit.slot;
        let picked = self.tags.pick(pick).map(|(index, disk)| (disk, Tag::new(slot, index)));
        self.submit.route.cancel(picked);
    }

    #[inline]
    fn completed_locally(&mut self) {
        self.counters.requests += 1;
        self.counters.answered_alone += 1;
    }

    #[cold]
    fn malformed(&mut self, why: &'static str) {
        self.completed_locally();
        if self.counters.malformed == 0 {
            (self.on_fault)(QueueFault::MalformedRequest(why));
        }
        self.counters.malformed += 1;
    }
}
