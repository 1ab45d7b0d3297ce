//! The shadow ring: a private record of a ring's requests in flight, against which every response is checked. Source:
//! the checks of Linux's `xen-blkfront` since 2021 ("harden against malicious backend").

use mqblk_ring::blkif::{BlkifResponse, status};

use crate::error::ResponseError;

/// Status of a completed request. Source: `BLKIF_RSP_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlkfrontStatus {
    /// BLKIF_RSP_OKAY.
    Ok,
    /// BLKIF_RSP_ERROR.
    IoError,
    /// BLKIF_RSP_EOPNOTSUPP: the backend does not support the operation, and should not get more of these requests.
    Unsupported,
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkfrontCompletion {
    /// The value given at submission.
    pub user_data: u32,
    /// Its status.
    pub status: BlkfrontStatus,
}

/// The record of a request id.
#[derive(Clone, Copy, Debug, Default)]
struct ShadowEntry {
    /// The value given at submission.
    user_data: u32,
    /// The operation that the response must have. `None`: the id is free.
    operation: Option<u8>,
}

/// The records of a ring's requests in flight, by id.
#[derive(Debug)]
pub(super) struct ShadowRing {
    entries: Box<[ShadowEntry]>,
    /// Free ids, a stack: the id used last comes next, and with it the indirect pages that the backend has mapped.
    free: Vec<u16>,
}

impl ShadowRing {
    pub(super) fn new(ids: u16) -> ShadowRing {
        ShadowRing { entries: vec![ShadowEntry::default(); ids.into()].into(), free: (0..ids).rev().collect() }
    }

    /// Returns the id that the next [`claim`](Self::claim) takes.
    #[inline]
    pub(super) fn next_id(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Takes the [next](Self::next_id) id for a request whose response must have `operation`.
    #[inline]
    pub(super) fn claim(&mut self, user_data: u32, operation: u8) {
        if let Some(id) = self.free.pop() {
            self.entries[usize::from(id)] = ShadowEntry { user_data, operation: Some(operation) };
        }
    }

    /// Checks a response and releases its id.
    #[inline]
    pub(super) fn complete(&mut self, response: BlkifResponse) -> Result<BlkfrontCompletion, ResponseError> {
        let BlkifResponse { id, operation: found, status } = response;
        let index = usize::try_from(id).ok().filter(|id| *id < self.entries.len());
        let Some(index) = index else { return Err(ResponseError::Id { found: id, ids: self.entries.len() as u16 }) };
        let ShadowEntry { user_data, operation } = self.entries[index];
        let Some(expected) = operation else { return Err(ResponseError::NotOutstanding(id)) };
        if found != expected {
            return Err(ResponseError::Operation { id, found, expected });
        }
        let status = match status {
            status::OKAY => BlkfrontStatus::Ok,
            status::ERROR => BlkfrontStatus::IoError,
            status::NOT_SUPPORTED => BlkfrontStatus::Unsupported,
            found => return Err(ResponseError::Status { id, found }),
        };
        self.entries[index].operation = None;
        self.free.push(index as u16);
        Ok(BlkfrontCompletion { user_data, status })
    }
}
