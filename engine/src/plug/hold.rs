//! When a plug is held back for more to join it (`plug-us`). Pure: what it must know comes in as arguments.

use crate::clock::Moment;

/// What is known of a plug when it could be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sight {
    pub(crate) now: Moment,
    /// Since when it is held; `None` when it is not yet.
    pub(crate) since: Option<Moment>,
    /// Requests that the storage works on.
    pub(crate) outstanding: u32,
    pub(crate) requests: usize,
    /// Of those, how many follow another one of the plug, or what was submitted last.
    pub(crate) following: usize,
    /// A request must not wait: there is a flush among them, or what could be joined is as long as it may get.
    pub(crate) urgent: bool,
}

/// What becomes of a plug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is submitted now.
    Submit,
    /// It waits, at most until then.
    HoldUntil(Moment),
}

/// Holds a plug for at most `limit` nanoseconds, and only while the storage is busy and the requests are a sequential stream:
/// more than half of them follow another.
pub(crate) fn judge(limit: u64, sight: &Sight) -> Verdict {
    let until = Moment(sight.since.unwrap_or(sight.now).0.saturating_add(limit));
    let sequential = sight.following > sight.requests / 2;
    if sight.outstanding == 0 || sight.urgent || !sequential || sight.now >= until {
        return Verdict::Submit;
    }
    Verdict::HoldUntil(until)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Sight =
        Sight { now: Moment(1000), since: None, outstanding: 1, requests: 4, following: 3, urgent: false };

    #[test]
    fn only_a_sequential_stream_to_busy_storage_is_held() {
        assert_eq!(judge(50, &STREAM), Verdict::HoldUntil(Moment(1050)));
        for go in [
            Sight { outstanding: 0, ..STREAM },
            Sight { following: 2, ..STREAM },
            Sight { following: 0, requests: 1, ..STREAM },
            Sight { urgent: true, ..STREAM },
        ] {
            assert_eq!(judge(50, &go), Verdict::Submit, "{go:?}");
        }
        assert_eq!(judge(0, &STREAM), Verdict::Submit, "no time, no hold");
        let alone = Sight { following: 1, requests: 1, ..STREAM };
        assert_eq!(judge(50, &alone), Verdict::HoldUntil(Moment(1050)), "it follows what was submitted last");
    }

    #[test]
    fn a_hold_ends_by_its_first_moment() {
        let held = |now| judge(50, &Sight { now: Moment(now), since: Some(Moment(1000)), ..STREAM });
        assert_eq!(held(1000), Verdict::HoldUntil(Moment(1050)));
        assert_eq!(held(1049), Verdict::HoldUntil(Moment(1050)));
        assert_eq!(held(1050), Verdict::Submit);
        let late = Sight { now: Moment(u64::MAX - 1), since: Some(Moment(u64::MAX - 1)), ..STREAM };
        assert_eq!(judge(u64::MAX, &late), Verdict::HoldUntil(Moment(u64::MAX)));
    }
}
