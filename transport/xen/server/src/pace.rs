//! How often a device is looked at: what one guest does costs a bounded part of the thread that watches for all.

use std::time::{Duration, Instant};

/// A bucket of tokens: one is spent for each look, and they come back with time.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    tokens: f64,
    filled: Instant,
}

/// How many tokens a bucket holds, and how fast they come back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Most looks at once.
    pub burst: u32,
    /// Looks a second in the long run, at least 1.
    pub a_second: u32,
}

impl Default for Pace {
    /// A device that starts and ends takes some ten looks; a guest that does nothing else gets 100 a second.
    fn default() -> Pace {
        Pace { burst: 200, a_second: 100 }
    }
}

impl Bucket {
    /// A full one.
    pub fn new(pace: Pace, now: Instant) -> Bucket {
        Bucket { tokens: pace.burst.into(), filled: now }
    }

    fn fill(&mut self, pace: Pace, now: Instant) {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + passed * f64::from(pace.a_second)).min(pace.burst.into());
        self.filled = now;
    }

    /// Spends a token, if there is one.
    ///
    /// # Errors
    /// How long until there is one.
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
    fn a_flood_gets_no_more_than_its_part() {
        let pace = Pace { burst: 10, a_second: 50 };
        let start = Instant::now();
        let mut bucket = Bucket::new(pace, start);
        let mut spent = 0;
        // Ten seconds, a try each millisecond.
        for ms in 0..10_000 {
            spent += u32::from(bucket.spend(pace, start + Duration::from_millis(ms)).is_ok());
        }
        assert!((500..=511).contains(&spent), "{spent}");
    }

    #[test]
    fn who_waits_as_told_gets_a_token() {
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
        // A clock that stands still or goes back makes none.
        assert!(bucket.spend(pace, now).is_err());
        assert!(bucket.spend(pace, now - Duration::from_secs(5)).is_err());
    }
}
