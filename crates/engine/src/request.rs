//! Requests and completions as a worker moves them between its queues and its disks' channels.

use mqblk_core::{Completion, IoContext as ContextTypes, Outcome, Request};
use mqblk_uring::UringContext;

pub(crate) type Buffer = <UringContext as ContextTypes>::Buffer;
pub(crate) type AnyRequest = Request<Buffer>;
pub(crate) type AnyCompletion = Completion<Buffer>;

/// Queue slot in the tags of merged requests; no queue has it.
pub(crate) const MERGED_SLOT: u16 = u16::MAX;

/// Queue slot in the tags of slices of long requests; no queue has it.
pub(crate) const SLICED_SLOT: u16 = u16::MAX - 1;

/// Number of slots that queues may have: the others are reserved.
pub(crate) const QUEUE_SLOTS: usize = SLICED_SLOT as usize;

/// Returns the completion of a request that was cancelled before the storage saw it.
pub(crate) fn cancelled(request: AnyRequest) -> AnyCompletion {
    AnyCompletion { outcome: Outcome::Aborted, tag: request.tag, buffer: request.buffer }
}
