//! When to keep polling a queue and when to arm it and sleep. Pure: time comes in as an argument.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::clock::Ticks;

/// How long a queue without requests is polled before the worker asks for kicks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// Never: every request after a pause costs a kick and a wake-up.
    Off,
    /// Until this long has passed without a request (seed 004; 50 us is its figure).
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

/// The longest window a user may ask for: past 1 s it is `busy` by another name.
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

/// Where an adaptive window starts to grow, and below which it closes, in nanoseconds.
const SMALLEST: u64 = 4000;

/// What to do with a queue that had nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idle {
    /// Look again.
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
    /// Last time that there was something to do.
    active_at: Ticks,
    /// Last time that it was looked at; `None` while it is armed.
    looked_at: Option<Ticks>,
    /// Time spent looking in vain.
    in_vain: u64,
}

impl PollState {
    /// A queue that was just attached: something is about to happen.
    pub(crate) fn new(policy: PollPolicy, now: Ticks) -> PollState {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (window, max) = match policy {
            PollPolicy::Off | PollPolicy::Busy => (0, 0),
            PollPolicy::Static(window) => (nanos(window), 0),
            PollPolicy::Adaptive { max } => (nanos(max) / 4, nanos(max)),
        };
        PollState { policy, window, max, active_at: now, looked_at: None, in_vain: 0 }
    }

    /// Requests came, or ended.
    #[inline]
    pub(crate) fn active(&mut self, now: Ticks) {
        if let PollPolicy::Adaptive { .. } = self.policy {
            self.learn(now.since(self.active_at));
        }
        self.active_at = now;
        self.looked_at = Some(now);
    }

    /// A gap within the window is what the window is for. A gap that a longer window would have covered makes it grow; a gap
    /// that none could cover makes it shrink, because the whole window was spent in vain.
    fn learn(&mut self, gap: u64) {
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

    /// There was nothing to do.
    #[inline]
    pub(crate) fn idle(&mut self, now: Ticks) -> Idle {
        self.in_vain += self.looked_at.map_or(0, |before| now.since(before));
        let keep = match self.policy {
            PollPolicy::Off => false,
            PollPolicy::Busy => true,
            PollPolicy::Static(_) | PollPolicy::Adaptive { .. } => self.idle_for(now) < self.window,
        };
        self.looked_at = keep.then_some(now);
        if keep { Idle::KeepPolling } else { Idle::Arm }
    }

    /// Nanoseconds spent looking in vain, all together.
    pub(crate) fn in_vain(&self) -> u64 {
        self.in_vain
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
    fn time_in_vain_is_that_between_looks_but_not_that_asleep() {
        let mut state = PollState::new(PollPolicy::Static(US * 50), us(0));
        state.active(us(10));
        state.idle(us(12));
        state.active(us(15));
        assert_eq!(state.in_vain(), 2000, "what ended with work is work's");
        assert_eq!(state.idle(us(40)), Idle::KeepPolling);
        assert_eq!(state.idle(us(65)), Idle::Arm);
        assert_eq!(state.in_vain(), 52_000);
        // Asleep until 1000; a kick without a request makes it look again.
        assert_eq!(state.idle(us(1000)), Idle::Arm);
        assert_eq!(state.in_vain(), 52_000);
        let mut busy = PollState::new(PollPolicy::Busy, us(0));
        busy.active(us(0));
        (1..=100).for_each(|at| assert_eq!(busy.idle(us(at)), Idle::KeepPolling));
        assert_eq!(busy.in_vain(), 100_000);
    }

    #[test]
    fn an_adaptive_window_follows_the_gaps() {
        let mut now = 0;
        let mut state = PollState::new(PollPolicy::Adaptive { max: US * 200 }, us(now));
        for _ in 0..20 {
            now += 5000;
            state.active(us(now));
        }
        assert_eq!(state.window, 0, "gaps no window can cover close it");
        for _ in 0..20 {
            now += 120;
            state.active(us(now));
        }
        assert!((120_000..=200_000).contains(&state.window), "{}", state.window);
    }
}
