//! A user's limits: requests and bytes a second, of all requests, of reads and of writes.

use mqblk_core::{ByteLen, Op};

/// A quantity that can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// Requests a second.
    Iops,
    /// Reads a second.
    IopsRead,
    /// Writes a second.
    IopsWrite,
    /// Bytes a second.
    Bandwidth,
    /// Bytes read a second.
    BandwidthRead,
    /// Bytes written a second.
    BandwidthWrite,
}

impl LimitKind {
    /// All kinds, in the order of messages.
    pub const ALL: [LimitKind; 6] = [
        LimitKind::Iops,
        LimitKind::IopsRead,
        LimitKind::IopsWrite,
        LimitKind::Bandwidth,
        LimitKind::BandwidthRead,
        LimitKind::BandwidthWrite,
    ];

    /// Returns true if bytes are counted, not requests.
    pub const fn is_bandwidth(self) -> bool {
        matches!(self, LimitKind::Bandwidth | LimitKind::BandwidthRead | LimitKind::BandwidthWrite)
    }

    /// Returns the only class of requests that it counts; `None`: it counts all.
    pub(crate) const fn class(self) -> Option<RequestClass> {
        match self {
            LimitKind::Iops | LimitKind::Bandwidth => None,
            LimitKind::IopsRead | LimitKind::BandwidthRead => Some(RequestClass::Read),
            LimitKind::IopsWrite | LimitKind::BandwidthWrite => Some(RequestClass::Write),
        }
    }
}

/// The class of a request that limits apply to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestClass {
    Read,
    /// Writes, write-zeroes and discards.
    Write,
}

impl RequestClass {
    pub(crate) const ALL: [RequestClass; 2] = [RequestClass::Read, RequestClass::Write];

    /// Returns the class of an operation; `None` for a flush, which is never throttled: it moves no data of its own,
    /// and a guest's file systems wait for it while they hold locks.
    #[inline]
    pub(crate) const fn of(op: Op) -> Option<RequestClass> {
        match op {
            Op::Read => Some(RequestClass::Read),
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard { .. } => Some(RequestClass::Write),
            Op::Flush => None,
        }
    }
}

/// Returns how many bytes of bandwidth a request uses. Write-zeroes counts its whole range, because storage without a
/// faster way writes it. A discard counts none: it moves no data, and a guest that trims a terabyte would take hours.
#[inline]
pub(crate) const fn bytes_of(op: Op, len: ByteLen) -> u64 {
    match op {
        Op::Read | Op::Write { .. } | Op::WriteZeroes { .. } => len.0,
        Op::Discard { .. } | Op::Flush => 0,
    }
}

/// A higher rate for a while, after a time of lower use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst {
    /// The rate during the burst, a second; above that of the limit.
    pub rate: u64,
    /// Its longest duration in seconds, from 1.
    pub seconds: u32,
}

/// The limit of one quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoLimit {
    /// The sustained rate: requests or bytes a second, from 1 to [`IoLimit::MAX_IOPS`] or [`IoLimit::MAX_BANDWIDTH`].
    pub rate: u64,
    /// The allowed burst; `None`: a tenth of a second's worth, at any speed.
    pub burst: Option<Burst>,
}

impl IoLimit {
    /// Highest limit of requests a second.
    pub const MAX_IOPS: u64 = 100_000_000;
    /// Highest limit of bytes a second.
    pub const MAX_BANDWIDTH: u64 = 128 << 30;
    /// Longest burst, in seconds.
    pub const MAX_BURST_S: u32 = 86_400;

    /// Returns the highest rate of a kind.
    pub const fn max_rate(kind: LimitKind) -> u64 {
        if kind.is_bandwidth() { IoLimit::MAX_BANDWIDTH } else { IoLimit::MAX_IOPS }
    }
}

/// The limits of a disk or a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoLimits([Option<IoLimit>; LimitKind::ALL.len()]);

impl IoLimits {
    /// Returns the limit of a kind.
    pub const fn get(&self, kind: LimitKind) -> Option<IoLimit> {
        self.0[kind as usize]
    }

    /// Sets or removes the limit of a kind.
    pub const fn set(&mut self, kind: LimitKind, limit: Option<IoLimit>) {
        self.0[kind as usize] = limit;
    }

    /// Returns these limits with another one.
    #[must_use]
    pub const fn with(mut self, kind: LimitKind, limit: IoLimit) -> IoLimits {
        self.set(kind, Some(limit));
        self
    }

    /// Returns true if nothing is limited.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Returns the limits that are set.
    pub fn iter(&self) -> impl Iterator<Item = (LimitKind, IoLimit)> {
        LimitKind::ALL.into_iter().filter_map(|kind| Some((kind, self.get(kind)?)))
    }
}
