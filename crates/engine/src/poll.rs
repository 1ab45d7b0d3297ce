//! Decides when a worker polls a queue and when it sleeps. Pure: time is an argument.
//!
//! The rule is that of KVM's halt polling and QEMU's adaptive polling, with the bound of ski rental. After a request or
//! a completion a queue is polled for a window, at most as long as the cost of sleeping and waking. A window grows when
//! the next event came soon after it had closed, and closes otherwise. There is one window while no request is in
//! flight, and one, half as long, while some are: so the worker sleeps for slow storage, and then hardly polls for the
//! guest's next request. A worker whose CPU another thread took for a time slice closes its windows for a while.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::clock::Ticks;
use crate::poll_list::IdleResult;

/// Polling of an idle queue before it is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// As adaptive, for at most 10 us, the cost of arming, sleeping and waking: every request after a pause costs a
    /// kick and a wake-up.
    Off,
    /// For a window that grows when requests come soon after it closed, and closes otherwise.
    Adaptive {
        /// Longest window. `None`: the cost of sleeping and waking on this machine.
        max: Option<Duration>,
    },
    /// Until this long has passed without a request (*vhost_user_block polling*, 2020: 50 us).
    Static(Duration),
    /// Always. Burns a core.
    Busy,
}

impl Default for PollPolicy {
    fn default() -> PollPolicy {
        PollPolicy::Adaptive { max: None }
    }
}

/// The longest window that a user may configure: above 1 s it would be `busy`.
const MAX_WINDOW_US: u64 = 1_000_000;

impl FromStr for PollPolicy {
    type Err = String;

    /// Parses `off`, `adaptive` (or `auto`), `adaptive:<max us>`, `<us>` (or `static:<us>`) or `busy`; microseconds
    /// from 1 to 1000000.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let window = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            let number = digits.parse().ok().filter(|us| plain && (1..=MAX_WINDOW_US).contains(us));
            number.map(Duration::from_micros)
        };
        let policy = match text.split_once(':') {
            None if text == "off" => Some(PollPolicy::Off),
            None if matches!(text, "adaptive" | "auto") => Some(PollPolicy::default()),
            None if text == "busy" => Some(PollPolicy::Busy),
            None => window(text).map(PollPolicy::Static),
            Some(("static", us)) => window(us).map(PollPolicy::Static),
            Some(("adaptive", us)) => window(us).map(|max| PollPolicy::Adaptive { max: Some(max) }),
            _ => None,
        };
        policy.ok_or_else(|| {
            format!("off, adaptive, adaptive:<max us>, <us> or busy, with microseconds from 1 to {MAX_WINDOW_US}")
        })
    }
}

impl fmt::Display for PollPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PollPolicy::Off => f.write_str("off"),
            PollPolicy::Adaptive { max: None } => f.write_str("adaptive"),
            PollPolicy::Adaptive { max: Some(max) } => write!(f, "adaptive:{}", max.as_micros()),
            PollPolicy::Static(window) => write!(f, "{}", window.as_micros()),
            PollPolicy::Busy => f.write_str("busy"),
        }
    }
}

/// The reason for polling a queue, or for not polling it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollReason {
    /// Its policy.
    #[default]
    Policy,
    /// Requests or completions are expected soon.
    Expected,
    /// No request or completion is expected soon.
    Quiet,
    /// Others wanted the CPU while the worker polled.
    CpuWanted,
}

impl PollReason {
    /// Returns the word for it.
    pub fn word(self) -> &'static str {
        match self {
            PollReason::Policy => "policy",
            PollReason::Expected => "expected",
            PollReason::Quiet => "quiet",
            PollReason::CpuWanted => "cpu-wanted",
        }
    }
}

/// Shortest absence that counts as a time slice of another thread, in nanoseconds: longer than a guest's thread that
/// makes requests and waits.
const TIME_SLICE: u64 = 500_000;

/// Sleep of a worker between two checks by its timer: guests on its CPU make requests meanwhile. A thread that slept
/// for 12 us does not preempt another one when it is woken (Linux 6.18), and waits for the end of its time slice.
pub(crate) const TIMER_PERIOD: Duration = Duration::from_micros(25);

/// Requests that come within this time are gathered by a timer while others want the CPU, in nanoseconds.
const BUSY: u64 = 4 * TIMER_PERIOD.as_nanos() as u64;

/// Cost of sleeping, in wake-ups: two round trips (`sleep_cost.rs`).
const WAKE_UPS: u64 = 4;

/// The longest window of `off`, in nanoseconds.
const OFF_MAX: u64 = 10_000;

/// A window grows from this part of the longest one.
const SMALLEST_PART: u64 = 4;

/// Later than any time.
const NOT_POLLED: Ticks = Ticks(u64::MAX);

/// One queue's poll windows.
#[derive(Debug)]
pub(crate) struct PollState {
    policy: PollPolicy,
    /// Without and with requests in flight, in nanoseconds, as all times here are.
    windows: [u64; 2],
    /// The longest of each; 0 if it does not adapt.
    max: [u64; 2],
    /// Time beyond the longest window that a gap may have and still open it: an event right after its end is seen only
    /// after the wake-up.
    wake_ns: u64,
    /// Last time that requests were pulled or completed, and the gap to the time before.
    active_at: Ticks,
    gap: u64,
    /// True if requests have been in flight since then.
    in_flight: bool,
    /// Last time that it was polled; [`NOT_POLLED`] while it is armed.
    polled_at: Ticks,
    /// True if its worker has slept since then, until the timer or an event.
    by_timer: bool,
    /// Time spent polling without finding anything.
    empty_poll_ns: u64,
}

impl PollState {
    /// Returns the state of a newly attached queue: requests are expected soon. `sleep_ns`: the cost of sleeping and
    /// waking.
    pub(crate) fn new(policy: PollPolicy, sleep_ns: u64, now: Ticks) -> PollState {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // A guest with several requests in flight does not wait for each.
        let adapting = |max: u64| ([max, max / 2], [max, max / 2]);
        let (windows, max) = match policy {
            PollPolicy::Off => adapting(OFF_MAX),
            PollPolicy::Adaptive { max } => adapting(max.map_or(sleep_ns, nanos)),
            PollPolicy::Static(window) => ([nanos(window); 2], [0; 2]),
            PollPolicy::Busy => ([u64::MAX; 2], [0; 2]),
        };
        PollState {
            policy,
            windows,
            max,
            wake_ns: sleep_ns / WAKE_UPS,
            active_at: now,
            gap: 0,
            in_flight: false,
            polled_at: now,
            by_timer: false,
            empty_poll_ns: 0,
        }
    }

    /// Called after requests were pulled or completed. `in_flight`: some are in flight now.
    #[inline]
    pub(crate) fn active(&mut self, in_flight: bool, now: Ticks) {
        if self.polled_at != NOT_POLLED {
            self.polled_at = now;
        }
        self.gap = now.since(self.active_at);
        if self.gap > self.window() {
            self.missed();
        }
        (self.active_at, self.in_flight, self.by_timer) = (now, in_flight, false);
    }

    /// Returns the present window.
    fn window(&self) -> u64 {
        let [idle, in_flight] = self.windows;
        match self.in_flight {
            true => in_flight,
            // Beside slow storage the wake-up that polling for the guest's next request spares is small.
            false if in_flight == 0 => idle.min(OFF_MAX),
            false => idle,
        }
    }

    /// Adapts the window that has closed before an event.
    fn missed(&mut self) {
        let at = usize::from(self.in_flight);
        let (window, max) = (&mut self.windows[at], self.max[at]);
        if max == 0 {
            return;
        }
        // Storage that takes about as long as the window is slept for: polling for it pays no wake-up of the guest.
        let wake_ns = if self.in_flight { 0 } else { self.wake_ns };
        if self.gap <= max + wake_ns {
            *window = (*window * 2).clamp(max / SMALLEST_PART, max);
        } else {
            *window = 0;
        }
    }

    /// Polls the queue from here on: it was kicked, or [should be polled](Self::should_resume).
    pub(crate) fn resume(&mut self, now: Ticks) {
        self.polled_at = now;
    }

    /// Returns true if the queue is armed and should be polled: a completion was published, and requests are expected
    /// soon.
    #[inline]
    pub(crate) fn should_resume(&self) -> bool {
        self.polled_at == NOT_POLLED && self.window() > 0
    }

    /// Returns the reason for polling the queue, or for not polling it, and the longest time, in nanoseconds; `None`:
    /// unlimited. `is_wanted`: others want the worker's CPU.
    pub(crate) fn reason(&self, is_wanted: bool) -> (PollReason, Option<u64>) {
        let window = self.window();
        match self.policy {
            PollPolicy::Busy => (PollReason::Policy, None),
            PollPolicy::Static(_) => (PollReason::Policy, Some(window)),
            PollPolicy::Off | PollPolicy::Adaptive { .. } => match (is_wanted, window) {
                (true, _) => (PollReason::CpuWanted, Some(0)),
                (false, 0) => (PollReason::Quiet, Some(0)),
                (false, _) => (PollReason::Expected, Some(window)),
            },
        }
    }

    /// Called after a turn in which the queue was idle. Returns how it is polled on; `None`: arm it. `is_wanted`:
    /// others want the worker's CPU.
    #[inline]
    pub(crate) fn idle(&mut self, now: Ticks, is_wanted: bool) -> Option<IdleResult> {
        let was_by_timer = std::mem::take(&mut self.by_timer);
        // 0 if it was armed.
        let polled = now.since(self.polled_at);
        // In a longer gap another thread had the CPU: it was not polling.
        if !was_by_timer && polled < TIME_SLICE {
            self.empty_poll_ns += polled;
        }
        let result = if is_wanted && self.max[0] > 0 {
            // A check that finds nothing is the last one.
            (!was_by_timer && self.gap <= BUSY).then_some(IdleResult::PollByTimer)
        } else if now.since(self.active_at) < self.window() {
            // A busy one does not offer its CPU.
            Some(if self.policy == PollPolicy::Busy { IdleResult::Poll } else { IdleResult::PollInWindow })
        } else {
            None
        };
        self.by_timer = result == Some(IdleResult::PollByTimer);
        self.polled_at = if result.is_some() { now } else { NOT_POLLED };
        result
    }

    /// Returns the time spent polling without finding anything, in nanoseconds.
    pub(crate) fn empty_poll_ns(&self) -> u64 {
        self.empty_poll_ns
    }
}

/// Time of polling without a result before a worker offers its CPU to other threads, in nanoseconds.
const OFFER_AFTER: u64 = 5_000;

/// A second time slice within this time shows that others want the CPU, in nanoseconds. A single one may be a
/// hypervisor's, or an interrupt's.
const AGAIN: u64 = 20_000_000;

/// Time for which a worker then closes its windows, in nanoseconds: at first, and at most, if it happens again when
/// they are open.
const GIVE_WAY: u64 = 100_000_000;
const MAX_GIVE_WAY: u64 = 1_600_000_000;

/// Offers of a polling worker's CPU, and the demand of others for it.
#[derive(Debug, Default)]
pub(crate) struct CpuOffers {
    /// True if something happened in the turn before this one.
    was_active: bool,
    /// Time of the last offer of the CPU, or of the last event.
    offered_at: Ticks,
    /// Time at which another thread last took a time slice.
    taken_at: Ticks,
    /// End of the time for which windows are closed.
    give_way_until: Ticks,
    /// The next such time.
    give_way: u64,
}

impl CpuOffers {
    pub(crate) fn new() -> CpuOffers {
        CpuOffers { give_way: GIVE_WAY, ..CpuOffers::default() }
    }

    /// Called if something happened in this turn.
    #[inline]
    pub(crate) fn active(&mut self) {
        self.was_active = true;
    }

    /// Returns true if others want the CPU.
    #[inline]
    pub(crate) fn is_wanted(&self, now: Ticks) -> bool {
        now < self.give_way_until
    }

    /// Returns true if the CPU must be offered in this idle turn, in which a window is open.
    #[inline]
    pub(crate) fn is_due(&mut self, now: Ticks) -> bool {
        if std::mem::take(&mut self.was_active) {
            self.offered_at = now;
            return false;
        }
        now.since(self.offered_at) >= OFFER_AFTER
    }

    /// Called after an offer of the CPU, which the worker had again after `away` nanoseconds. Returns true if another
    /// thread had it for a time slice.
    pub(crate) fn offered(&mut self, away: u64, now: Ticks) -> bool {
        self.offered_at = now;
        let taken = away >= TIME_SLICE;
        if taken {
            let before = std::mem::replace(&mut self.taken_at, now);
            if before.0 > 0 && now.since(before) <= AGAIN.saturating_add(away) {
                self.give_way_until = Ticks(now.0.saturating_add(self.give_way));
                self.give_way = (2 * self.give_way).min(MAX_GIVE_WAY);
            }
        } else if now.since(self.give_way_until) >= self.give_way {
            self.give_way = GIVE_WAY;
        }
        taken
    }
}

#[cfg(test)]
mod tests;
