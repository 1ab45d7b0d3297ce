//! Limits how often a device is checked, so that one guest's changes cost the watcher thread a bounded amount of time.

use std::time::{Duration, Instant};

/// A token bucket: each check takes a token; tokens are refilled over time.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    tokens: f64,
    filled: Instant,
}

/// Capacity and refill rate of a [`TokenBucket`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Maximum of checks in a burst.
    pub burst: u32,
    /// Sustained checks per second, at least 1.
    pub a_second: u32,
}

impl Default for Pace {
    /// A device that starts and ends needs about ten checks; a flooding guest gets 100 a second.
    fn default() -> Pace {
        Pace { burst: 200, a_second: 100 }
    }
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(pace: Pace, now: Instant) -> Bucket {
        Bucket { tokens: pace.burst.into(), filled: now }
    }

    fn fill(&mut self, pace: Pace, now: Instant) {
        let elapsed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + elapsed * f64::from(pace.a_second)).min(pace.burst.into());
        self.filled = now;
    }

    /// Takes a token.
    ///
    /// # Errors
    /// Returns the time until a token is available.
    pub fn spend(&mut self, pace: Pace, now: Instant) -> Result<(), Duration> {
        self.fill(pace, now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - self.tokens) / f64::from(pace.a_second.max(1)))
            .max(Duration::from_millis(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_limited_to_the_rate() {
        let pace = Pace { burst: 10, a_second: 50 };
        let start = Instant::now();
        let mut bucket = Bucket::new(pace, start);
        let mut taken = 0;
        // Ten seconds, one attempt per millisecond.
        for ms in 0..10_000 {
            taken += u32::from(bucket.spend(pace, start + Duration::from_millis(ms)).is_ok());
        }
        assert!((500..=511).contains(&taken), "{taken}");
    }

    #[test]
    fn a_token_is_available_after_the_returned_time() {
        let pace = Pace { burst: 1, a_second: 50 };
        let mut now = Instant::now();
        let mut bucket = Bucket::new(pace, now);
        for _ in 0..100 {
            match bucket.spend(pace, now) {
                Ok(()) => {}
                Err(wait) => {
                    now += wait + Duration::from_micros(1);
                    assert!(bucket.spend(pace, now).is_ok());
                }
            }
        }
        // A clock that stops or goes backwards adds none.
        assert!(bucket.spend(pace, now).is_err());
        assert!(bucket.spend(pace, now - Duration::from_secs(5)).is_err());
    }
}
