//! How a worker waits for a disk's requests.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Longest poll window that can be asked for: polling for longer than a second is what `busy` is for.
const MAX_WINDOW_US: u64 = 1_000_000;

/// How a worker waits for a disk's requests once there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollPolicy {
    /// Sleep at once.
    Off,
    /// Keep polling until this long has passed without a request.
    Static(Duration),
    /// As `Static`, with a window that grows when it catches a request and shrinks when it does not, up to `max`.
    Adaptive {
        /// The longest window.
        max: Duration,
    },
    /// Never sleep.
    Busy,
}

impl PollPolicy {
    /// What is right, for error messages.
    pub const EXPECTED: &'static str = "off, static:<us>, adaptive:<max us> or busy, with <us> from 1 to 1000000";
}

impl Default for PollPolicy {
    /// 50 microseconds: about the round trip of a client that sleeps for each answer (45 to 63 were measured).
    fn default() -> Self {
        PollPolicy::Static(Duration::from_micros(50))
    }
}

/// A text that is no poll policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {}", PollPolicy::EXPECTED)]
pub struct NotAPollPolicy;

impl FromStr for PollPolicy {
    type Err = NotAPollPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "off" => Ok(PollPolicy::Off),
            None if text == "busy" => Ok(PollPolicy::Busy),
            Some(("static", us)) => window(us).map(PollPolicy::Static),
            Some(("adaptive", us)) => window(us).map(|max| PollPolicy::Adaptive { max }),
            _ => Err(NotAPollPolicy),
        }
    }
}

fn window(us: &str) -> Result<Duration, NotAPollPolicy> {
    let digits = !us.is_empty() && us.bytes().all(|byte| byte.is_ascii_digit());
    match us.parse::<u64>() {
        Ok(us @ 1..=MAX_WINDOW_US) if digits => Ok(Duration::from_micros(us)),
        _ => Err(NotAPollPolicy),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_printed_as_they_are_written() {
        for text in ["off", "static:1", "static:50", "static:1000000", "adaptive:200", "busy"] {
            assert_eq!(text.parse::<PollPolicy>().map(|policy| policy.to_string()), Ok(text.to_owned()));
        }
        assert_eq!(PollPolicy::default().to_string(), "static:50");
    }

    #[test]
    fn what_is_no_policy() {
        for text in [
            "",
            "on",
            "static",
            "static:",
            "static:0",
            "static:1000001",
            "static:+5",
            "static:5us",
            "busy:1",
            "off:",
            "50",
        ] {
            assert_eq!(text.parse::<PollPolicy>(), Err(NotAPollPolicy), "{text}");
        }
    }
}
