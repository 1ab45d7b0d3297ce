//! Ratios of measured means, with confidence intervals.

use crate::report::ResultRow;
use crate::table::three_digits;

/// Two-sided 95 % quantiles of Student's t distribution for 1 to 10 degrees of freedom. Beyond, the last one is used:
/// intervals become too wide rather than too narrow.
const T_95: [f64; 10] = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23];

/// The mean of a measured value over the runs of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MeasuredMean {
    pub mean: f64,
    /// Its standard error.
    pub error: f64,
    pub runs: usize,
}

impl MeasuredMean {
    /// Returns the I/Os per second of a row.
    pub(crate) fn iops(row: &ResultRow) -> MeasuredMean {
        MeasuredMean { mean: row.iops_mean, error: row.iops_stderr, runs: row.runs }
    }

    /// Returns the bytes per second of a row.
    pub(crate) fn bandwidth(row: &ResultRow) -> MeasuredMean {
        MeasuredMean { mean: row.bw_bytes_per_s, error: row.bw_stderr, runs: row.runs }
    }
}

/// A ratio of two means, or the geometric mean of several ratios. Kept as its logarithm: half and double are equally
/// far from 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RatioEstimate {
    /// Natural logarithm of the ratio.
    pub ln: f64,
    /// Half of its 95 % confidence interval; infinite if a value was measured once.
    pub margin: f64,
}

impl RatioEstimate {
    /// Returns the geometric mean of the ratios of pairs (value, base). `None` for no pairs, and where nothing was
    /// completed.
    ///
    /// The relative errors of both values are independent; degrees of freedom are those of Welch and Satterthwaite.
    pub(crate) fn of(pairs: &[(MeasuredMean, MeasuredMean)]) -> Option<RatioEstimate> {
        if pairs.is_empty() || pairs.iter().any(|(value, base)| value.mean <= 0.0 || base.mean <= 0.0) {
            return None;
        }
        let count = pairs.len() as f64;
        let ln = pairs.iter().map(|(value, base)| (value.mean / base.mean).ln()).sum::<f64>() / count;
        let all = || pairs.iter().flat_map(|(value, base)| [value, base]);
        if all().any(|one| one.runs < 2) {
            return Some(RatioEstimate { ln, margin: f64::INFINITY });
        }
        let variances = || all().map(|one| ((one.error / one.mean / count).powi(2), one.runs - 1));
        let variance: f64 = variances().map(|(variance, _)| variance).sum();
        let weighted: f64 = variances().map(|(variance, freedom)| variance.powi(2) / freedom as f64).sum();
        let freedom = if weighted > 0.0 { (variance.powi(2) / weighted + 1e-9) as usize } else { T_95.len() };
        let quantile = T_95[freedom.clamp(1, T_95.len()) - 1];
        Some(RatioEstimate { ln, margin: quantile * variance.sqrt() })
    }
}

impl std::fmt::Display for RatioEstimate {
    /// Writes `x1.62 (1.58 to 1.66)`: the ratio, and its 95 % confidence interval.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [low, high] = [self.ln - self.margin, self.ln + self.margin].map(f64::exp);
        write!(f, "x{}", three_digits(self.ln.exp()))?;
        match self.margin.is_finite() {
            true => write!(f, " ({} to {})", three_digits(low), three_digits(high)),
            false => write!(f, " (one run, so its error is not known)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean(mean: f64, error: f64, runs: usize) -> MeasuredMean {
        MeasuredMean { mean, error, runs }
    }

    #[test]
    fn the_interval_grows_with_the_error_and_shrinks_with_runs() {
        let of = |error: f64, runs: usize| {
            RatioEstimate::of(&[(mean(160.0, 1.6 * error, runs), mean(100.0, error, runs))]).unwrap()
        };
        assert!((of(1.0, 3).ln.exp() - 1.6).abs() < 1e-12);
        // Both relative errors are 1 %: of 3 runs each the degrees of freedom are 4, of 2 runs 2.
        assert!((of(1.0, 3).margin - 2.78 * 0.01 * 2_f64.sqrt()).abs() < 1e-9);
        assert!((of(1.0, 2).margin - 4.30 * 0.01 * 2_f64.sqrt()).abs() < 1e-9);
        assert!((of(2.0, 20).margin - 2.23 * 0.02 * 2_f64.sqrt()).abs() < 1e-9);
        assert_eq!(of(1.0, 1).margin, f64::INFINITY);
        assert_eq!(of(0.0, 5).margin, 0.0);
        // An error of one side alone has that side's degrees of freedom.
        let one = RatioEstimate::of(&[(mean(2.0, 0.02, 3), mean(1.0, 0.0, 9))]).unwrap();
        assert!((one.margin - 4.30 * 0.01).abs() < 1e-9);
        assert_eq!(of(1.0, 3).to_string(), "x1.60 (1.54 to 1.66)");
        assert_eq!(of(1.0, 1).to_string(), "x1.60 (one run, so its error is not known)");
    }

    #[test]
    fn several_ratios_make_a_geometric_mean() {
        let pair = |ratio: f64| (mean(ratio, 0.01 * ratio, 3), mean(1.0, 0.01, 3));
        let both = RatioEstimate::of(&[pair(0.5), pair(8.0)]).unwrap();
        assert!((both.ln.exp() - 2.0).abs() < 1e-12);
        let one = RatioEstimate::of(&[pair(0.5)]).unwrap();
        assert!(both.margin < one.margin);
        assert_eq!(RatioEstimate::of(&[]), None);
        assert_eq!(RatioEstimate::of(&[pair(1.0), (mean(0.0, 0.0, 3), mean(1.0, 0.0, 3))]), None);
    }
}
