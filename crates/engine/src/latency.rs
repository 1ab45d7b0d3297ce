//! Latency histograms: plain numbers that one worker writes.

/// Buckets in an octave: a value is known to an eighth of itself.
const PER_OCTAVE: usize = 8;
/// Log2 of the first bucket's upper bound: 64 ns.
const FIRST: u32 = 6;
/// Octaves above the first bucket: the last ends at 2^37 ns, two minutes. Longer latencies are counted there.
const OCTAVES: usize = 31;

/// A histogram of latencies. Buckets are an eighth of an octave wide: a percentile is off by 6 percent at most. The sum
/// is exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyHistogram {
    counts: [u64; 1 + PER_OCTAVE * OCTAVES],
    sum_ns: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        LatencyHistogram { counts: [0; 1 + PER_OCTAVE * OCTAVES], sum_ns: 0 }
    }
}

impl LatencyHistogram {
    /// Counts `times` occurrences of `ns` nanoseconds.
    #[inline]
    pub fn record(&mut self, ns: u64, times: u64) {
        self.sum_ns = self.sum_ns.wrapping_add(ns.wrapping_mul(times));
        self.counts[bucket(ns)] += times;
    }

    /// Returns the number of occurrences.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of all occurrences, in nanoseconds.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Returns the non-empty buckets, as (lower bound, upper bound, occurrences), in nanoseconds, ascending. A value
    /// equal to an upper bound is in the next bucket.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> + Clone {
        self.counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(at, count)| {
            let (from, to) = bounds(at);
            (from, to, *count)
        })
    }

    /// Returns the latency in nanoseconds below which `percent` of the occurrences lie: the middle of its bucket;
    /// `None` without any.
    pub fn percentile_ns(&self, percent: f64) -> Option<u64> {
        percentile_ns(self.buckets(), percent)
    }

    /// Adds another histogram.
    pub fn add(&mut self, other: &LatencyHistogram) {
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        for (ours, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *ours += theirs;
        }
    }
}

/// Returns the value below which `percent` of all occurrences lie, from buckets in the form of
/// [`LatencyHistogram::buckets`]: the middle of its bucket; `None` without any.
pub fn percentile_ns(buckets: impl Iterator<Item = (u64, u64, u64)> + Clone, percent: f64) -> Option<u64> {
    let count: u64 = buckets.clone().map(|(_, _, times)| times).sum();
    let rank = ((percent / 100.0 * count as f64).ceil() as u64).clamp(1, count.max(1));
    let mut seen = 0;
    let mut filled = buckets.filter(|(_, _, times)| *times > 0);
    filled.find_map(|(from, to, times)| {
        seen += times;
        (seen >= rank).then_some(from.midpoint(to))
    })
}

#[inline]
fn bucket(ns: u64) -> usize {
    // A floating-point number's exponent is the octave, and its next three bits the eighth of it. Half of it is a
    // positive number of 64 bits, and the lost bit does not matter: the smallest bucket is 8 ns wide.
    let float = ((ns / 2) as i64 as f64).to_bits() >> (f64::MANTISSA_DIGITS - 1 - PER_OCTAVE.ilog2());
    (float.clamp(BELOW, BELOW + (PER_OCTAVE * OCTAVES) as u64) - BELOW) as usize
}

/// Exponent and top mantissa bits of half the last number in the first bucket.
const BELOW: u64 = ((1023 + FIRST as u64 - 1) << PER_OCTAVE.ilog2()) - 1;

fn bounds(at: usize) -> (u64, u64) {
    let start = |at: usize| {
        let (octave, eighth) = ((at - 1) / PER_OCTAVE, (at - 1) % PER_OCTAVE);
        ((PER_OCTAVE + eighth) as u64) << (FIRST as usize + octave) >> PER_OCTAVE.ilog2()
    };
    if at == 0 { (0, 1 << FIRST) } else { (start(at), start(at + 1)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_empty_one_has_no_percentile() {
        let empty = LatencyHistogram::default();
        assert_eq!((empty.count(), empty.percentile_ns(50.0), empty.buckets().count()), (0, None, 0));
    }

    #[test]
    fn the_longest_goes_into_the_last_bucket() {
        let mut one = LatencyHistogram::default();
        one.record(u64::MAX, 1);
        let (from, to, count) = one.buckets().next().unwrap();
        assert_eq!((to, count), (1 << 37, 1));
        assert!(from < to);
    }

    proptest! {
        #[test]
        fn a_value_lies_within_its_bucket(ns in 0u64..1 << 37) {
            let (from, to) = bounds(bucket(ns));
            prop_assert!(from <= ns && ns < to, "{ns} in {from}..{to}");
            prop_assert!(ns < 64 || (to - from) * 8 <= from + from / 8 + 8);
        }

        #[test]
        fn percentiles_are_near_the_exact_ones(mut values in prop::collection::vec(64u64..10_000_000, 1..300), percent in 0.0f64..=100.0) {
            let mut all = LatencyHistogram::default();
            values.iter().for_each(|ns| all.record(*ns, 1));
            values.sort_unstable();
            let rank = ((percent / 100.0 * values.len() as f64).ceil() as usize).clamp(1, values.len());
            let (exact, ours) = (values[rank - 1] as f64, all.percentile_ns(percent).unwrap() as f64);
            prop_assert!((ours / exact - 1.0).abs() < 0.0667, "{ours} beside {exact}");
            prop_assert_eq!((all.count(), all.sum_ns()), (values.len() as u64, values.iter().sum()));
        }

        #[test]
        fn adding_is_counting_both(a in prop::collection::vec(0u64..1 << 40, 0..50), b in prop::collection::vec(0u64..1 << 40, 0..50)) {
            let of = |values: &[u64]| { let mut all = LatencyHistogram::default(); values.iter().for_each(|ns| all.record(*ns, 2)); all };
            let mut both = of(&a);
            both.add(&of(&b));
            prop_assert_eq!(both, of(&[a, b].concat()));
        }
    }
}
