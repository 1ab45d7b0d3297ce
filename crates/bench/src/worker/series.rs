//! The time series of a run: the I/Os that completed in each interval. Each thread records its own; they have a common
//! start.

use std::time::{Duration, Instant};

use crate::device::IoOp;

/// Most intervals of a run: ten megabytes in each thread.
pub(crate) const MAX_INTERVALS: usize = 100_000;

/// How a thread records its time series.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeriesSettings {
    /// Length of an interval.
    pub interval: Duration,
    /// Intervals to allocate at the start.
    pub expected: usize,
}

/// I/Os of one operation that completed in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IntervalSums {
    /// Their number. Those that failed are not among them.
    pub ios: u64,
    /// The sum of their latencies, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The greatest of their latencies, in nanoseconds.
    pub latency_max_ns: u64,
}

impl IntervalSums {
    #[inline]
    fn record(&mut self, latency_ns: u64) {
        self.ios += 1;
        self.latency_sum_ns = self.latency_sum_ns.saturating_add(latency_ns);
        self.latency_max_ns = self.latency_max_ns.max(latency_ns);
    }

    fn add(&mut self, other: &IntervalSums) {
        self.ios += other.ios;
        self.latency_sum_ns = self.latency_sum_ns.saturating_add(other.latency_sum_ns);
        self.latency_max_ns = self.latency_max_ns.max(other.latency_max_ns);
    }
}

/// The sums of one interval, by [`IoOp`].
type IntervalOps = [IntervalSums; IoOp::COUNT];

fn add(sums: &mut IntervalOps, others: &IntervalOps) {
    sums.iter_mut().zip(others).for_each(|(sums, other)| sums.add(other));
}

/// The I/Os that completed in each interval from the start of the measurement on.
#[derive(Clone, Debug)]
pub struct TimeSeries {
    /// Length of an interval.
    pub(crate) interval_ns: u64,
    /// From the start to the end of the measurement.
    length_ns: u64,
    intervals: Vec<IntervalOps>,
}

/// An interval of a [`TimeSeries`], in nanoseconds from the start of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interval {
    /// Its start.
    pub start_ns: u64,
    /// Its end.
    pub end_ns: u64,
    /// Sums of the I/Os that completed in it.
    pub sums: IntervalSums,
}

impl TimeSeries {
    fn new(settings: SeriesSettings) -> TimeSeries {
        // The interval is at most a day.
        let interval_ns = (settings.interval.as_nanos() as u64).max(1);
        let intervals = Vec::with_capacity(settings.expected.min(MAX_INTERVALS));
        TimeSeries { interval_ns, length_ns: 0, intervals }
    }

    /// Doubles the length of the intervals.
    fn coarsen(&mut self) {
        let half = self.intervals.len().div_ceil(2);
        for at in 0..half {
            let mut sums = self.intervals[2 * at];
            if let Some(next) = self.intervals.get(2 * at + 1) {
                add(&mut sums, next);
            }
            self.intervals[at] = sums;
        }
        self.intervals.truncate(half);
        self.interval_ns *= 2;
    }

    /// Adds another thread's series.
    pub(crate) fn merge(&mut self, mut other: TimeSeries) {
        while self.interval_ns < other.interval_ns {
            self.coarsen();
        }
        while other.interval_ns < self.interval_ns {
            other.coarsen();
        }
        if self.intervals.len() < other.intervals.len() {
            self.intervals.resize(other.intervals.len(), IntervalOps::default());
        }
        self.intervals.iter_mut().zip(&other.intervals).for_each(|(sums, others)| add(sums, others));
        self.length_ns = self.length_ns.max(other.length_ns);
    }

    /// Sets the end of the measurement: threads notice it later.
    pub(crate) fn end_at(&mut self, length: Duration) {
        self.length_ns = self.length_ns.min(length.as_nanos() as u64);
    }

    /// Returns the intervals of one operation. All are equally long except the last, which ends with the measurement. A
    /// rest shorter than half an interval belongs to the one before: its rate says little. I/Os that completed while
    /// threads noticed the end are in the last one.
    pub(crate) fn of(&self, op: IoOp) -> impl ExactSizeIterator<Item = Interval> + use<'_> {
        let (whole, rest) = (self.length_ns / self.interval_ns, self.length_ns % self.interval_ns);
        let count = match rest {
            0 => whole,
            rest if whole > 0 && rest < self.interval_ns.div_ceil(2) => whole,
            _ => whole + 1,
        } as usize;
        (0..count).map(move |at| {
            let is_last = at + 1 == count;
            let mut sums = IntervalSums::default();
            let end = if is_last { self.intervals.len() } else { at + 1 };
            self.intervals.iter().take(end).skip(at).for_each(|interval| sums.add(&interval[op as usize]));
            let start_ns = at as u64 * self.interval_ns;
            Interval { start_ns, end_ns: if is_last { self.length_ns } else { start_ns + self.interval_ns }, sums }
        })
    }
}

/// Records the time series of a thread.
#[derive(Debug)]
pub(super) struct SeriesRecorder {
    series: TimeSeries,
    /// Start of the measurement by the thread's clock.
    start_ns: u64,
    /// The interval that is recorded.
    current: usize,
    /// Its end by the thread's clock.
    end_ns: u64,
}

impl SeriesRecorder {
    pub(super) fn new(settings: SeriesSettings) -> SeriesRecorder {
        SeriesRecorder { series: TimeSeries::new(settings), start_ns: 0, current: 0, end_ns: 0 }
    }

    /// Begins at `start`, which is the same for all threads. `origin`: time 0 of the thread's clock.
    pub(super) fn begin(&mut self, origin: Instant, start: Instant) {
        self.start_ns = start.saturating_duration_since(origin).as_nanos() as u64;
        self.series.intervals.clear();
        self.enter(0);
    }

    /// Advances to the interval of `now`, by the thread's clock.
    #[inline]
    pub(super) fn seek(&mut self, now: u64) {
        if now >= self.end_ns {
            self.advance(now);
        }
    }

    #[cold]
    fn advance(&mut self, now: u64) {
        let mut at = (now - self.start_ns) / self.series.interval_ns;
        while at >= MAX_INTERVALS as u64 {
            // Reached only without a runtime, or when the benchmark does not end in time.
            self.series.coarsen();
            at /= 2;
        }
        self.enter(at as usize);
    }

    fn enter(&mut self, at: usize) {
        if self.series.intervals.len() <= at {
            self.series.intervals.resize(at + 1, IntervalOps::default());
        }
        self.current = at;
        self.end_ns = self.start_ns + (at as u64 + 1) * self.series.interval_ns;
    }

    /// Records an I/O in the interval of the last [`seek`](Self::seek).
    #[inline]
    pub(super) fn record(&mut self, op: IoOp, latency_ns: u64) {
        self.series.intervals[self.current][op as usize].record(latency_ns);
    }

    /// Returns the series of a measurement that ended at `now`, by the thread's clock.
    pub(super) fn end(mut self, now: u64) -> TimeSeries {
        self.series.length_ns = now.saturating_sub(self.start_ns);
        self.series
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn recorder(interval_ms: u64) -> SeriesRecorder {
        let settings = SeriesSettings { interval: Duration::from_millis(interval_ms), expected: 8 };
        let mut recorder = SeriesRecorder::new(settings);
        // The measurement starts 7 ms after the thread.
        let origin = Instant::now();
        recorder.begin(origin, origin + Duration::from_millis(7));
        recorder
    }

    /// Records reads at these times after the start, in units of a millisecond, that took as long each.
    fn record(recorder: &mut SeriesRecorder, at: &[f64]) {
        for ms in at {
            let ns = (ms * MS as f64) as u64;
            recorder.seek(7 * MS + ns);
            recorder.record(IoOp::Read, ns);
        }
    }

    /// Returns start, end (in ms) and number of I/Os of each interval.
    fn shape(series: &TimeSeries) -> Vec<(f64, f64, u64)> {
        let ms = |ns: u64| ns as f64 / MS as f64;
        series.of(IoOp::Read).map(|one| (ms(one.start_ns), ms(one.end_ns), one.sums.ios)).collect()
    }

    #[test]
    fn an_io_belongs_to_the_interval_in_which_it_completed() {
        let mut own = recorder(10);
        record(&mut own, &[0.0, 9.999999, 10.0, 10.5, 35.0]);
        own.record(IoOp::Write, 3);
        let series = own.end((7 + 40) * MS);
        assert_eq!(shape(&series), [(0.0, 10.0, 2), (10.0, 20.0, 2), (20.0, 30.0, 0), (30.0, 40.0, 1)]);
        let second = series.of(IoOp::Read).nth(1).unwrap().sums;
        assert_eq!((second.latency_sum_ns, second.latency_max_ns), (20 * MS + MS / 2, 10 * MS + MS / 2));
        assert_eq!(series.of(IoOp::Write).map(|one| one.sums.ios).collect::<Vec<_>>(), [0, 0, 0, 1]);
    }

    #[test]
    fn the_last_interval_has_its_own_length() {
        for (end, last) in [
            (30.0, (20.0, 30.0, 1)),
            // A short rest belongs to the interval before it.
            (30.1, (20.0, 30.1, 1)),
            (34.9, (20.0, 34.9, 1)),
            (35.0, (30.0, 35.0, 0)),
            (39.0, (30.0, 39.0, 0)),
            // I/Os that completed while the thread noticed the end stay counted.
            (21.0, (10.0, 21.0, 2)),
            (3.0, (0.0, 3.0, 3)),
        ] {
            let mut own = recorder(10);
            record(&mut own, &[1.0, 15.0, 25.0]);
            let mut series = own.end(60 * MS);
            series.end_at(Duration::from_nanos((end * MS as f64) as u64));
            let found = shape(&series);
            assert_eq!(found.last(), Some(&last), "{end}");
            assert_eq!(found.iter().map(|one| one.2).sum::<u64>(), 3, "{end}");
            assert!(found.is_sorted_by(|a, b| a.1 == b.0), "{end}: {found:?}");
        }
        // Nothing was measured.
        assert_eq!(shape(&recorder(10).end(7 * MS)), []);
        // A pause at the end has intervals.
        let mut own = recorder(10);
        record(&mut own, &[5.0]);
        assert_eq!(shape(&own.end((7 + 30) * MS)), [(0.0, 10.0, 1), (10.0, 20.0, 0), (20.0, 30.0, 0)]);
    }

    #[test]
    fn threads_are_summed() {
        let (mut one, mut other) = (recorder(10), recorder(10));
        record(&mut one, &[1.0, 12.0]);
        record(&mut other, &[2.0, 25.0]);
        let mut sum = one.end((7 + 20) * MS);
        sum.merge(other.end((7 + 30) * MS));
        assert_eq!(shape(&sum), [(0.0, 10.0, 2), (10.0, 20.0, 1), (20.0, 30.0, 1)]);
        assert_eq!(sum.of(IoOp::Read).next().unwrap().sums.latency_max_ns, 2 * MS);
    }

    #[test]
    fn a_series_has_a_bounded_number_of_intervals_and_loses_nothing() {
        let mut long = recorder(1);
        let last = (3 * MAX_INTERVALS) as u64;
        for ms in 0..last {
            long.seek((7 + ms) * MS);
            long.record(IoOp::Read, 1);
        }
        let mut long = long.end((7 + last) * MS);
        assert_eq!((long.interval_ns, long.intervals.len()), (4 * MS, 3 * MAX_INTERVALS / 4));
        assert!(long.of(IoOp::Read).all(|interval| interval.sums.ios == 4));
        // The finer series is coarsened, in either order of merging.
        let mut short = recorder(1);
        record(&mut short, &[0.0, 5.0]);
        let mut short = short.end(10 * MS);
        let copy = short.clone();
        short.merge(long.clone());
        long.merge(copy);
        for sum in [short, long] {
            assert_eq!(sum.of(IoOp::Read).take(3).map(|one| one.sums.ios).collect::<Vec<_>>(), [5, 5, 4]);
            assert_eq!(sum.of(IoOp::Read).map(|one| one.sums.ios).sum::<u64>(), last + 2);
        }
    }
}
