//! Which requests of a ring are in flight, and the judgement of what comes back: nothing of a response is believed. Source: the
//! checks of Linux's `xen-blkfront` since 2021 ("harden against malicious backend").

use mqblk_ring::blkif::{BackendError, BlkifResponse, status};

/// What a backend did wrong on a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResponseError {
    /// The index of responses cannot be.
    #[error("{0}")]
    Index(BackendError),
    /// A response to a request that cannot be.
    #[error("response: found id {found}, expected one below {ids}")]
    Id {
        /// What it says.
        found: u64,
        /// Ids in use.
        ids: u16,
    },
    /// A response to nothing.
    #[error("response: found id {0}, expected that of a request in flight")]
    NotOutstanding(u64),
    /// A response to some other request.
    #[error("response to request {id}: found operation {found}, expected {expected}")]
    Operation {
        /// The request.
        id: u64,
        /// What it says.
        found: u8,
        /// What the request asked for.
        expected: u8,
    },
    /// A response that says nothing.
    #[error("response to request {id}: found status {found}, expected 0, -1 or -2")]
    Status {
        /// The request.
        id: u64,
        /// What it says.
        found: i16,
    },
}

impl From<BackendError> for ResponseError {
    fn from(broken: BackendError) -> ResponseError {
        ResponseError::Index(broken)
    }
}

/// How the backend says a request ended. Source: `BLKIF_RSP_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlkfrontStatus {
    /// BLKIF_RSP_OKAY.
    Ok,
    /// BLKIF_RSP_ERROR.
    IoError,
    /// BLKIF_RSP_EOPNOTSUPP: this backend does not do such requests, and should not be sent more of them.
    Unsupported,
}

/// A request's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkfrontCompletion {
    /// What the submission was given.
    pub user_data: u32,
    /// How it ended.
    pub status: BlkfrontStatus,
}

/// What is known of a request id.
#[derive(Clone, Copy, Debug, Default)]
struct ShadowEntry {
    /// What the submission was given.
    user_data: u32,
    /// What the response has to say; `None`: nothing is outstanding.
    operation: Option<u8>,
}

/// The request ids of a ring.
#[derive(Debug)]
pub(super) struct ShadowRing {
    entries: Box<[ShadowEntry]>,
    /// A stack: the id that was used last comes next, and with it the pages that the backend has mapped.
    free: Vec<u16>,
}

impl ShadowRing {
    pub(super) fn new(ids: u16) -> ShadowRing {
        ShadowRing { entries: vec![ShadowEntry::default(); ids.into()].into(), free: (0..ids).rev().collect() }
    }

    /// The id that [`claim`](Self::claim) gives next.
    #[inline]
    pub(super) fn next_id(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Takes the [next](Self::next) id for a request to which the response says `operation`.
    #[inline]
    pub(super) fn claim(&mut self, user_data: u32, operation: u8) {
        if let Some(id) = self.free.pop() {
            self.entries[usize::from(id)] = ShadowEntry { user_data, operation: Some(operation) };
        }
    }

    /// A response has come.
    #[inline]
    pub(super) fn complete(&mut self, response: BlkifResponse) -> Result<BlkfrontCompletion, ResponseError> {
        let BlkifResponse { id, operation: found, status } = response;
        let place = usize::try_from(id).ok().filter(|id| *id < self.entries.len());
        let Some(place) = place else { return Err(ResponseError::Id { found: id, ids: self.entries.len() as u16 }) };
        let ShadowEntry { user_data, operation } = self.entries[place];
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
        self.entries[place].operation = None;
        self.free.push(place as u16);
        Ok(BlkfrontCompletion { user_data, status })
    }
}
