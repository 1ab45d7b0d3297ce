//! Poll windows: when a queue is polled on and when it is armed. Pure: time comes in as an argument.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::clock::Ticks;

/// How long an idle queue is polled before it is armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// Never: every request after a pause costs a kick and a wakeup.
    Off,
    /// Until this long has passed without a request (default 50 us: *vhost_user_block polling*, 2020).
    Static(Duration),
    /// A window that grows when requests come soon after it closed and shrinks when they do not.
    Adaptive {
        /// Largest window.
        max: Duration,
    },
    /// Always. Burns a core.
    Busy,
}

impl Default for PollPolicy {
    fn default() -> Self {
        PollPolicy::Static(Duration::from_micros(50))
    }
}

/// The longest window that a user may configure: above 1 s it would be `busy` by another name.
const MAX_WINDOW_US: u64 = 1_000_000;

impl FromStr for PollPolicy {
    type Err = String;

    /// `off`, `static:<us>`, `adaptive:<max us>` or `busy`; microseconds from 1 to 1000000.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let window = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            let number = digits.parse().ok().filter(|us| plain && (1..=MAX_WINDOW_US).contains(us));
            number.map(Duration::from_micros)
        };
        let policy = match text.split_once(':') {
            None if text == "off" => Some(PollPolicy::Off),
            None if text == "busy" => Some(PollPolicy::Busy),
            Some(("static", us)) => window(us).map(PollPolicy::Static),
            Some(("adaptive", us)) => window(us).map(|max| PollPolicy::Adaptive { max }),
            _ => None,
        };
        policy.ok_or_else(|| {
            format!("off, static:<us>, adaptive:<max us> or busy, with microseconds from 1 to {MAX_WINDOW_US}")
        })
    }
}

impl fmt::Display for PollPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PollPolicy::Off => f.write_str("off"),
            PollPolicy::Static(window) => write!(f, "static:{}", window.as_micros()),
            PollPolicy::Adaptive { max } => write!(f, "adaptive:{}", max.as_micros()),
            PollPolicy::Busy => f.write_str("busy"),
        }
    }
}

/// The smallest open adaptive window, in nanoseconds: growth starts here, a smaller one closes.
const SMALLEST: u64 = 4000;

/// What to do with a queue that was idle in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Poll it in the next turn.
    KeepPolling,
    /// Arm it.
    Arm,
}

/// One queue's poll window.
#[derive(Debug)]
pub(crate) struct PollState {
    policy: PollPolicy,
    /// In nanoseconds, as all times here are.
    window: u64,
    max: u64,
    /// Last time that requests were pulled or completed.
    active_at: Ticks,
    /// Last time that it was polled; `None` while it is armed.
    polled_at: Option<Ticks>,
    /// Time spent polling without finding anything.
    empty_poll_ns: u64,
}

impl PollState {
    /// Returns the state of a queue that was just attached: requests are expected soon.
    pub(crate) fn new(policy: PollPolicy, now: Ticks) -> PollState {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (window, max) = match policy {
            PollPolicy::Off | PollPolicy::Busy => (0, 0),
            PollPolicy::Static(window) => (nanos(window), 0),
            PollPolicy::Adaptive { max } => (nanos(max) / 4, nanos(max)),
        };
        PollState { policy, window, max, active_at: now, polled_at: None, empty_poll_ns: 0 }
    }

    /// Requests were pulled or completed.
    #[inline]
    pub(crate) fn active(&mut self, now: Ticks) {
        if let PollPolicy::Adaptive { .. } = self.policy {
            self.adapt(now.since(self.active_at));
        }
        self.active_at = now;
        self.polled_at = Some(now);
    }

    /// Adapts the window to a gap between requests. A gap within the window leaves it unchanged. A gap that a longer window would have
    /// covered makes it grow; a gap that none could cover makes it shrink, because the whole window was polled without a request.
    fn adapt(&mut self, gap: u64) {
        if gap <= self.window {
            return;
        }
        if gap <= self.max {
            self.window = (self.window * 2).max(gap).max(SMALLEST).min(self.max);
        } else {
            self.window /= 2;
            if self.window < SMALLEST {
                self.window = 0;
            }
        }
    }

    /// The queue was idle in a turn.
    #[inline]
    pub(crate) fn idle(&mut self, now: Ticks) -> Idle {
        self.empty_poll_ns += self.polled_at.map_or(0, |before| now.since(before));
        let keep = match self.policy {
            PollPolicy::Off => false,
            PollPolicy::Busy => true,
            PollPolicy::Static(_) | PollPolicy::Adaptive { .. } => self.idle_for(now) < self.window,
        };
        self.polled_at = keep.then_some(now);
        if keep { Idle::KeepPolling } else { Idle::Arm }
    }

    /// Returns the total time spent polling without finding anything, in nanoseconds.
    pub(crate) fn empty_poll_ns(&self) -> u64 {
        self.empty_poll_ns
    }

    #[inline]
    fn idle_for(&self, now: Ticks) -> u64 {
        now.since(self.active_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn us(us: u64) -> Ticks {
        Ticks(us * 1000)
    }

    #[test]
    fn policies_parse_and_print() {
        for text in ["off", "busy", "static:50", "static:1", "adaptive:1000000"] {
            assert_eq!(text.parse::<PollPolicy>().unwrap().to_string(), text);
        }
        for text in
            ["", "on", "static", "static:", "static:0", "static:-1", "static:+1", "adaptive:1000001", "busy:1", "Off"]
        {
            assert!(text.parse::<PollPolicy>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_static_window_closes_and_reopens() {
        let mut state = PollState::new(PollPolicy::Static(US * 50), us(0));
        assert_eq!(state.idle(us(49)), Idle::KeepPolling);
        assert_eq!(state.idle(us(50)), Idle::Arm);
        state.active(us(60));
        assert_eq!(state.idle(us(109)), Idle::KeepPolling);
        assert_eq!(state.idle(us(110)), Idle::Arm);
    }

    #[test]
    fn off_never_polls_and_busy_always_does() {
        assert_eq!(PollState::new(PollPolicy::Off, us(0)).idle(us(0)), Idle::Arm);
        assert_eq!(PollState::new(PollPolicy::Busy, us(0)).idle(us(10_000_000)), Idle::KeepPolling);
    }

    #[test]
    fn empty_poll_time_is_counted_between_polls_but_not_while_armed() {
        let mut state = PollState::new(PollPolicy::Static(US * 50), us(0));
        state.active(us(10));
        state.idle(us(12));
        state.active(us(15));
        assert_eq!(state.empty_poll_ns(), 2000, "time that ended with a request is not counted");
        assert_eq!(state.idle(us(40)), Idle::KeepPolling);
        assert_eq!(state.idle(us(65)), Idle::Arm);
        assert_eq!(state.empty_poll_ns(), 52_000);
        // Armed until 1000; a kick without a request has it polled again.
        assert_eq!(state.idle(us(1000)), Idle::Arm);
        assert_eq!(state.empty_poll_ns(), 52_000);
        let mut busy = PollState::new(PollPolicy::Busy, us(0));
        busy.active(us(0));
        (1..=100).for_each(|at| assert_eq!(busy.idle(us(at)), Idle::KeepPolling));
        assert_eq!(busy.empty_poll_ns(), 100_000);
    }

    #[test]
    fn an_adaptive_window_follows_the_gaps() {
        let mut now = 0;
        let mut state = PollState::new(PollPolicy::Adaptive { max: US * 200 }, us(now));
        for _ in 0..20 {
            now += 5000;
            state.active(us(now));
        }
        assert_eq!(state.window, 0, "gaps that no window can cover close it");
        for _ in 0..20 {
            now += 120;
            state.active(us(now));
        }
        assert!((120_000..=200_000).contains(&state.window), "{}", state.window);
    }
}
