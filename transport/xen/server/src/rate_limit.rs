//! Limits how often a device is checked, so that one guest's changes cost the watcher thread a bounded amount of time.

use std::time::{Duration, Instant};

/// A token bucket: each check takes a token; tokens are refilled over time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenBucket {
    tokens: f64,
    refilled_at: Instant,
}

/// Capacity and refill rate of a [`TokenBucket`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateLimit {
    /// Maximum of checks in a burst.
    pub burst: u32,
    /// Sustained checks per second, at least 1.
    pub per_second: u32,
}

impl Default for RateLimit {
    /// A device that starts and ends needs about ten checks; a flooding guest gets 100 a second.
    fn default() -> RateLimit {
        RateLimit { burst: 200, per_second: 100 }
    }
}

impl TokenBucket {
    /// Creates a full bucket.
    pub(crate) fn new(pace: RateLimit, now: Instant) -> TokenBucket {
        TokenBucket { tokens: pace.burst.into(), refilled_at: now }
    }

    fn refill(&mut self, pace: RateLimit, now: Instant) {
        let elapsed = now.saturating_duration_since(self.refilled_at).as_secs_f64();
        self.tokens = (self.tokens + elapsed * f64::from(pace.per_second)).min(pace.burst.into());
        self.refilled_at = now;
    }

    /// Takes a token.
    ///
    /// # Errors
    /// Returns the time until a token is available.
    pub(crate) fn take(&mut self, pace: RateLimit, now: Instant) -> Result<(), Duration> {
        self.refill(pace, now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - self.tokens) / f64::from(pace.per_second.max(1)))
            .max(Duration::from_millis(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_limited_to_the_rate() {
        let pace = RateLimit { burst: 10, per_second: 50 };
        let start = Instant::now();
        let mut bucket = TokenBucket::new(pace, start);
        let mut taken = 0;
        // Ten seconds, one attempt per millisecond.
        for ms in 0..10_000 {
            taken += u32::from(bucket.take(pace, start + Duration::from_millis(ms)).is_ok());
        }
        assert!((500..=511).contains(&taken), "{taken}");
    }

    #[test]
    fn a_token_is_available_after_the_returned_time() {
        let pace = RateLimit { burst: 1, per_second: 50 };
        let mut now = Instant::now();
        let mut bucket = TokenBucket::new(pace, now);
        for _ in 0..100 {
            match bucket.take(pace, now) {
                Ok(()) => {}
                Err(wait) => {
                    now += wait + Duration::from_micros(1);
                    assert!(bucket.take(pace, now).is_ok());
                }
            }
        }
        // A clock that stops or goes backwards adds none.
        assert!(bucket.take(pace, now).is_err());
        assert!(bucket.take(pace, now - Duration::from_secs(5)).is_err());
    }
}
