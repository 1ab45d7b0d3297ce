//! Poll windows: when a queue is polled on and when it is armed. Pure: time comes in as an argument.
//!
//! `off` and `auto` reckon with what was caught (`credit`): each request or completion that came soon earns time to poll for the next, and time
//! polled is spent. `off` counts as soon what comes while the queue would be armed; `auto` what comes within 300 us, and closes the window where
//! its worker says so: it [tries](crate::windows) what polling brings, and knows whether others want the CPU.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::clock::Ticks;
use crate::poll_list::IdleResult;

/// How long an idle queue is polled before it is armed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollPolicy {
    /// Not beyond about 10 us, which arming, sleeping and being woken would take as well: every request after a pause costs a kick and a wakeup.
    Off,
    /// While requests and completions come soon, the guests get more done so, and others do not want the CPU.
    #[default]
    Auto,
    /// Until this long has passed without a request (*vhost_user_block polling*, 2020: 50 us).
    Static(Duration),
    /// A window that grows when requests come soon after it closed and shrinks when they do not.
    Adaptive {
        /// Largest window.
        max: Duration,
    },
    /// Always. Burns a core.
    Busy,
}

/// The longest window that a user may configure: above 1 s it would be `busy` by another name.
const MAX_WINDOW_US: u64 = 1_000_000;

impl FromStr for PollPolicy {
    type Err = String;

    /// `off`, `auto`, `static:<us>`, `adaptive:<max us>` or `busy`; microseconds from 1 to 1000000.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let window = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            let number = digits.parse().ok().filter(|us| plain && (1..=MAX_WINDOW_US).contains(us));
            number.map(Duration::from_micros)
        };
        let policy = match text.split_once(':') {
            None if text == "off" => Some(PollPolicy::Off),
            None if text == "auto" => Some(PollPolicy::Auto),
            None if text == "busy" => Some(PollPolicy::Busy),
            Some(("static", us)) => window(us).map(PollPolicy::Static),
            Some(("adaptive", us)) => window(us).map(|max| PollPolicy::Adaptive { max }),
            _ => None,
        };
        policy.ok_or_else(|| {
            format!("off, auto, static:<us>, adaptive:<max us> or busy, with microseconds from 1 to {MAX_WINDOW_US}")
        })
    }
}

impl fmt::Display for PollPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PollPolicy::Off => f.write_str("off"),
            PollPolicy::Auto => f.write_str("auto"),
            PollPolicy::Static(window) => write!(f, "static:{}", window.as_micros()),
            PollPolicy::Adaptive { max } => write!(f, "adaptive:{}", max.as_micros()),
            PollPolicy::Busy => f.write_str("busy"),
        }
    }
}

/// The smallest open adaptive window, in nanoseconds: growth starts here, a smaller one closes.
const SMALLEST: u64 = 4000;

/// How the windows of `auto` are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WindowMode {
    /// They are closed, and why: the worker arms its queues and sleeps at once.
    Closed(PollReason),
    /// The worker looks at its queues by a timer, and sleeps between two looks. The queues are not armed.
    Timer,
    /// The worker looks at its queues all the time.
    Open,
}

/// What `off` counts as soon, in nanoseconds: about what it takes to arm a queue, to go to sleep, and to be kicked and woken.
const OFF_HORIZON: u64 = 10_000;
/// How much time to poll `off` can earn.
const OFF_MAX: u64 = 4 * OFF_HORIZON;
/// For how long `auto` polls where that costs others their CPU, in nanoseconds: about what it takes to arm a queue and go to sleep.
const WANTED_HORIZON: u64 = 3000;
/// What `auto` counts as soon, in nanoseconds. While the worker sleeps, two wake-ups, the worker's and the guest's, are in each gap: 50 us and more of
/// it on some hosts. So more counts as soon than polling is worth: that is tried.
const AUTO_HORIZON: u64 = 300_000;
/// How much time to poll `auto` can earn, in nanoseconds: so long a pause between two bursts is polled through.
const AUTO_MAX: u64 = 1_000_000;

/// From when on another thread kept the CPU for long, in nanoseconds: more than a guest's thread that makes requests and waits again.
pub(crate) const AWAY: u64 = 100_000;

/// Why a queue is polled on, or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollReason {
    /// Its policy says so.
    #[default]
    Policy,
    /// Requests or completions come soon.
    Expected,
    /// None is expected soon.
    Quiet,
    /// Others wanted the CPU while the worker polled.
    CpuWanted,
    /// The guests of this worker get no more done if it polls.
    NoGain,
}

impl PollReason {
    /// Returns the word for it.
    pub fn word(self) -> &'static str {
        match self {
            PollReason::Policy => "policy",
            PollReason::Expected => "expected",
            PollReason::Quiet => "quiet",
            PollReason::CpuWanted => "cpu-wanted",
            PollReason::NoGain => "no-gain",
        }
    }
}

/// Time to poll that was earned, by whether requests are in flight: completions may be soon where requests are not, and the reverse.
#[derive(Clone, Copy, Debug)]
struct Credit {
    horizon: u64,
    max: u64,
    /// Without and with requests in flight.
    left: [u64; 2],
}

impl Credit {
    fn new(horizon: u64, max: u64) -> Credit {
        Credit { horizon, max, left: [max.min(horizon); 2] }
    }

    /// Something came after `gap`, in the given state.
    #[inline]
    fn earn(&mut self, in_flight: bool, gap: u64) {
        if gap <= self.horizon {
            let left = &mut self.left[usize::from(in_flight)];
            *left = (*left + self.horizon).min(self.max);
        }
    }

    #[inline]
    fn spend(&mut self, in_flight: bool, time: u64) {
        let left = &mut self.left[usize::from(in_flight)];
        *left = left.saturating_sub(time);
    }

    #[inline]
    fn has(&self, in_flight: bool) -> bool {
        self.left[usize::from(in_flight)] > 0
    }
}

/// Not before any time.
const NOT_POLLED: Ticks = Ticks(u64::MAX);

/// One queue's poll window.
#[derive(Debug)]
pub(crate) struct PollState {
    policy: PollPolicy,
    /// In nanoseconds, as all times here are.
    window: u64,
    max: u64,
    /// Of `auto` while its window is open, or its worker looks by a timer.
    credit: Credit,
    /// Of `off`, and of `auto` while its window is closed.
    moment: Credit,
    /// Last time that requests were pulled or completed.
    active_at: Ticks,
    /// Requests have been in flight since then.
    in_flight: bool,
    /// Last time that it was polled; [`NOT_POLLED`] while it is armed.
    polled_at: Ticks,
    /// Since then its worker sleeps, until the timer or until something comes.
    by_timer: bool,
    /// Time spent polling without finding anything.
    empty_poll_ns: u64,
}

impl PollState {
    /// Returns the state of a queue that was just attached: requests are expected soon.
    pub(crate) fn new(policy: PollPolicy, now: Ticks) -> PollState {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (window, max) = match policy {
            PollPolicy::Off | PollPolicy::Auto | PollPolicy::Busy => (0, 0),
            PollPolicy::Static(window) => (nanos(window), 0),
            PollPolicy::Adaptive { max } => (nanos(max) / 4, nanos(max)),
        };
        PollState {
            policy,
            window,
            max,
            credit: Credit::new(AUTO_HORIZON, AUTO_MAX),
            moment: Credit::new(OFF_HORIZON, OFF_MAX),
            active_at: now,
            in_flight: false,
            polled_at: now,
            by_timer: false,
            empty_poll_ns: 0,
        }
    }

    /// Requests were pulled or completed. `in_flight`: some are in flight now.
    #[inline]
    pub(crate) fn active(&mut self, in_flight: bool, now: Ticks) {
        if self.policy == PollPolicy::Busy {
            // It is never armed, has no window, and nothing to reckon with.
            self.polled_at = now;
            return;
        }
        if self.polled_at != NOT_POLLED {
            self.polled_at = now;
        }
        let gap = now.since(self.active_at);
        // Branches, which are predicted well; a jump table is not.
        if matches!(self.policy, PollPolicy::Off | PollPolicy::Auto) {
            self.moment.earn(self.in_flight, gap);
            if self.policy == PollPolicy::Auto {
                self.credit.earn(self.in_flight, gap);
            }
        } else if let PollPolicy::Adaptive { .. } = self.policy {
            self.adapt(gap);
        }
        (self.active_at, self.in_flight, self.by_timer) = (now, in_flight, false);
    }

    /// The queue is polled from here on: it was kicked, or [should be](Self::should_resume).
    pub(crate) fn resume(&mut self, now: Ticks) {
        self.polled_at = now;
    }

    /// Returns true if the queue is armed and should be polled: requests are expected soon.
    #[inline]
    pub(crate) fn should_resume(&self, mode: WindowMode) -> bool {
        self.polled_at == NOT_POLLED && self.policy == PollPolicy::Auto && self.auto(mode)
    }

    /// Returns why the queue is polled on, or not, and for how long at most from here on, in nanoseconds; `None`: for ever. `mode`: of
    /// `auto`.
    pub(crate) fn reason(&self, mode: WindowMode) -> (PollReason, Option<u64>) {
        match self.policy {
            PollPolicy::Busy => (PollReason::Policy, None),
            PollPolicy::Off | PollPolicy::Static(_) => (PollReason::Policy, Some(self.window)),
            PollPolicy::Adaptive { .. } if self.window > 0 => (PollReason::Expected, Some(self.window)),
            PollPolicy::Adaptive { .. } => (PollReason::Quiet, Some(0)),
            PollPolicy::Auto => match (self.credit.left[usize::from(self.in_flight)], mode) {
                (0, _) => (PollReason::Quiet, Some(0)),
                (_, WindowMode::Closed(reason)) => (reason, Some(0)),
                (left, WindowMode::Timer | WindowMode::Open) => (PollReason::Expected, Some(left)),
            },
        }
    }

    #[inline]
    fn auto(&self, mode: WindowMode) -> bool {
        match mode {
            WindowMode::Closed(_) => false,
            WindowMode::Timer | WindowMode::Open => self.credit.has(self.in_flight),
        }
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

    /// The queue was idle in a turn. Returns how it is polled on; `None`: it is to be armed. `mode`: of `auto`.
    #[inline]
    pub(crate) fn idle(&mut self, now: Ticks, mode: WindowMode) -> Option<IdleResult> {
        // 0 if it was armed.
        let mut polled = now.since(self.polled_at);
        if !std::mem::take(&mut self.by_timer) {
            // Another thread had the CPU in a longer gap: that was not polling.
            polled = if polled < AWAY { polled } else { 0 };
            self.empty_poll_ns += polled;
        }
        let window_open = match self.policy {
            PollPolicy::Static(_) | PollPolicy::Adaptive { .. } => now.since(self.active_at) < self.window,
            PollPolicy::Auto => {
                self.credit.spend(self.in_flight, polled);
                self.auto(mode)
            }
            PollPolicy::Off | PollPolicy::Busy => false,
        };
        let is_wanted = self.policy == PollPolicy::Auto && mode == WindowMode::Closed(PollReason::CpuWanted);
        let keep = match self.policy {
            PollPolicy::Off | PollPolicy::Auto => {
                self.moment.spend(self.in_flight, polled);
                let is_over = is_wanted && now.since(self.active_at) >= WANTED_HORIZON;
                self.moment.has(self.in_flight) && !is_over
            }
            PollPolicy::Busy => true,
            PollPolicy::Static(_) | PollPolicy::Adaptive { .. } => false,
        };
        self.polled_at = if window_open || keep { now } else { NOT_POLLED };
        self.by_timer = window_open && self.has_timer(mode);
        match (window_open, keep) {
            (true, _) if self.by_timer => Some(IdleResult::PollByTimer),
            (true, _) if self.policy == PollPolicy::Auto => Some(IdleResult::PollInWindow),
            (true, _) => Some(IdleResult::PollInFixedWindow),
            // An offer would be taken for a time slice.
            (false, true) if is_wanted || self.policy == PollPolicy::Busy => Some(IdleResult::Poll),
            (false, true) => Some(IdleResult::PollInFixedWindow),
            (false, false) => None,
        }
    }

    /// Returns true if the queue is polled by a timer while something is expected. `mode`: of `auto`.
    pub(crate) fn has_timer(&self, mode: WindowMode) -> bool {
        mode == WindowMode::Timer && self.policy == PollPolicy::Auto
    }

    /// Returns the total time spent polling without finding anything, in nanoseconds.
    pub(crate) fn empty_poll_ns(&self) -> u64 {
        self.empty_poll_ns
    }
}

#[cfg(test)]
mod tests;
