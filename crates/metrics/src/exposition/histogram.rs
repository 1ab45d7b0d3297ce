//! Histograms of latencies with few buckets, from the 249 of workers.

use mqblk_admin::model::Distribution;

use super::family::{HistogramValue, seconds};

/// The upper bounds of the buckets as powers of two, in nanoseconds: 1 us, each octave from 4 us to 17 ms, then every
/// second one to 17 s. They are also bounds of the workers' buckets, so that no bucket is divided.
const BOUNDS: [u32; 19] = [10, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 26, 28, 30, 32, 34];

/// Sums up the buckets of a distribution.
pub(super) fn histogram(of: &Distribution) -> HistogramValue {
    let mut counts = [0; BOUNDS.len() + 1];
    for (_, upper_ns, count) in &of.buckets {
        let at = BOUNDS.partition_point(|bound| (1_u64 << bound) < *upper_ns);
        counts[at] += count;
    }
    let bounds = BOUNDS.iter().map(|bound| seconds(1 << bound)).chain([f64::INFINITY]);
    HistogramValue { sum_s: seconds(of.sum_ns), count: counts.iter().sum(), buckets: bounds.zip(counts).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bucket_is_in_the_one_that_covers_it() {
        // The first one holds all below 64 ns; the workers' last one ends at 2^37 ns.
        let buckets = vec![
            (0, 64, 1),
            (896, 1024, 2),
            (1024, 1152, 4),
            (3584, 4096, 8),
            (4096, 4608, 16),
            (1 << 36, 1 << 37, 32),
        ];
        let found = histogram(&Distribution { sum_ns: 2_500_000_000, buckets, ..Distribution::default() });
        assert_eq!((found.sum_s, found.count, found.buckets.len()), (2.5, 63, 20));
        assert_eq!(found.buckets[..3], [(0.000_001_024, 3), (0.000_004_096, 12), (0.000_008_192, 16)]);
        assert_eq!(found.buckets[18..], [(17.179_869_184, 0), (f64::INFINITY, 32)]);
        assert!(found.buckets.is_sorted_by(|one, next| one.0 < next.0));
    }
}
