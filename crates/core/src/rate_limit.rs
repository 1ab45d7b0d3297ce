//! Rate limits: a bound on a tenant's work per second.

use std::time::{Duration, Instant};

/// Capacity and refill rate of a [`TokenBucket`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateLimit {
    /// Maximum of a burst.
    pub burst: u32,
    /// Sustained rate per second, at least 1.
    pub per_second: u32,
}

/// A token bucket: each use takes a token; tokens are refilled over time.
#[derive(Clone, Copy, Debug)]
pub struct TokenBucket {
    tokens: f64,
    refilled_at: Instant,
}

impl TokenBucket {
    /// Creates a full bucket.
    pub fn new(limit: RateLimit, now: Instant) -> TokenBucket {
        TokenBucket { tokens: limit.burst.into(), refilled_at: now }
    }

    fn refill(&mut self, limit: RateLimit, now: Instant) {
        let elapsed = now.saturating_duration_since(self.refilled_at).as_secs_f64();
        self.tokens = (self.tokens + elapsed * f64::from(limit.per_second)).min(limit.burst.into());
        self.refilled_at = now;
    }

    /// Takes a token.
    ///
    /// # Errors
    /// Returns the time until a token is available.
    pub fn take(&mut self, limit: RateLimit, now: Instant) -> Result<(), Duration> {
        self.refill(limit, now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - self.tokens) / f64::from(limit.per_second.max(1)))
            .max(Duration::from_millis(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_limited_to_the_rate() {
        let limit = RateLimit { burst: 10, per_second: 50 };
        let start = Instant::now();
        let mut bucket = TokenBucket::new(limit, start);
        let mut taken = 0;
        // Ten seconds, one attempt per millisecond.
        for ms in 0..10_000 {
            taken += u32::from(bucket.take(limit, start + Duration::from_millis(ms)).is_ok());
        }
        assert!((500..=511).contains(&taken), "{taken}");
    }

    #[test]
    fn a_token_is_available_after_the_returned_time() {
        let limit = RateLimit { burst: 1, per_second: 50 };
        let mut now = Instant::now();
        let mut bucket = TokenBucket::new(limit, now);
        for _ in 0..100 {
            match bucket.take(limit, now) {
                Ok(()) => {}
                Err(wait) => {
                    now += wait + Duration::from_micros(1);
                    assert!(bucket.take(limit, now).is_ok());
                }
            }
        }
        // A clock that stops or goes backwards adds none.
        assert!(bucket.take(limit, now).is_err());
        assert!(bucket.take(limit, now - Duration::from_secs(5)).is_err());
    }
}
