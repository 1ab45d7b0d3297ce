//! The clock of the data path: a worker reads it a few times a turn, so it must be cheap.

/// A point in time, in nanoseconds since the clock's source was at 0. Comparable within one worker only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticks(pub(crate) u64);

impl Ticks {
    /// Returns the nanoseconds since `earlier`; 0 when that is not earlier.
    #[inline]
    pub(crate) fn since(self, earlier: Ticks) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Reads the CPU's time-stamp counter where it runs evenly on all cores, else the system's monotonic clock.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    source: quanta::Clock,
    /// Nanoseconds of 2^32 of the source's units.
    scale: u64,
    /// The last [read](Self::read) time.
    last: Ticks,
}

/// Each unit loses at most a billionth of a nanosecond.
const SCALE_BITS: u32 = 32;

impl Clock {
    /// Returns a clock. The first one of a process is calibrated against the system's clock for some milliseconds.
    pub(crate) fn new() -> Clock {
        let source = quanta::Clock::new();
        let scale = source.delta_as_nanos(0, 1 << SCALE_BITS);
        let mut clock = Clock { source, scale, last: Ticks::default() };
        clock.read();
        clock
    }

    /// Returns the last [read](Self::read) time.
    #[inline]
    pub(crate) fn last(&self) -> Ticks {
        self.last
    }

    /// Reads the current time, keeps it and returns it.
    #[inline]
    pub(crate) fn read(&mut self) -> Ticks {
        self.last = self.now();
        self.last
    }

    /// Returns the current time.
    #[inline]
    pub(crate) fn now(&self) -> Ticks {
        // As `delta_as_nanos`, which checks the source again and shifts by a variable.
        Ticks(((u128::from(self.source.raw()) * u128::from(self.scale)) >> SCALE_BITS) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_monotonic_and_keeps_the_systems_pace() {
        let (clock, system) = (Clock::new(), std::time::Instant::now());
        let start = clock.now();
        let mut last = start;
        while system.elapsed().as_millis() < 50 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
        let (ours, theirs) = (clock.now().since(start) as f64, system.elapsed().as_nanos() as f64);
        assert!((ours / theirs - 1.0).abs() < 0.05, "{ours} beside {theirs}");
    }
}
