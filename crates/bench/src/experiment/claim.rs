//! Effects that a document shows, and their reproduction here. All values are computed from measured rows and their
//! errors.

use serde::Serialize;

use super::estimate::{MeasuredMean, RatioEstimate};
use crate::report::ResultRow;
use crate::table::three_digits;

/// An effect that a document shows, and its measurement here.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    /// The comparison: `IOPS of static:50 over off`.
    pub what: String,
    /// The document's ratio; not 1.
    pub published: f64,
    /// The ratio here; `None` if a row is missing or nothing was completed.
    pub measured: Option<RatioEstimate>,
    /// Threads that the effect needs at once, and what they are.
    pub threads: (usize, &'static str),
    /// Requests that failed in the rows.
    pub failed: u64,
}

/// Outcome of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// In the same direction beyond the error, and at least half as much as published (of the logarithm).
    Reproduced,
    /// Beyond the error less than published, and not beyond the error at least half as much.
    NotReproduced,
    /// The machine or the errors allow no decision.
    NotMeasurable,
}

impl Outcome {
    /// Returns it in words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Outcome::Reproduced => "reproduced",
            Outcome::NotReproduced => "not reproduced",
            Outcome::NotMeasurable => "not measurable here",
        }
    }
}

/// An outcome and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ClaimResult {
    pub outcome: Outcome,
    /// The comparison, both ratios, and the reason for the outcome.
    pub reason: String,
}

impl Claim {
    /// Creates a claim about the ratio of the values to the bases of pairs (value, base): their `mean`.
    pub(super) fn new<'a>(
        what: impl Into<String>,
        published: f64,
        mean: fn(&ResultRow) -> MeasuredMean,
        pairs: impl IntoIterator<Item = (&'a ResultRow, &'a ResultRow)>,
    ) -> Claim {
        let pairs: Vec<(&ResultRow, &ResultRow)> = pairs.into_iter().collect();
        let means: Vec<_> = pairs.iter().map(|(value, base)| (mean(value), mean(base))).collect();
        let failed = pairs.iter().map(|(value, base)| value.errors + base.errors).sum();
        Claim { what: what.into(), published, measured: RatioEstimate::of(&means), threads: (1, ""), failed }
    }

    /// Returns the claim as one that only a machine with this many cores can show.
    pub(super) fn of_threads(self, threads: usize, what: &'static str) -> Claim {
        Claim { threads: (threads, what), ..self }
    }

    /// Returns the outcome of the claim on a machine with this number of cores.
    pub(crate) fn result(&self, cores: usize) -> ClaimResult {
        let with = |outcome: Outcome, why: &str| {
            let measured = self.measured.map_or("not measured".into(), |ratio| format!("{ratio} here"));
            let why = if why.is_empty() { String::new() } else { format!(": {why}") };
            ClaimResult {
                outcome,
                reason: format!("{}, {measured}, x{} published{why}", self.what, three_digits(self.published)),
            }
        };
        let Some(measured) = self.measured else {
            return with(Outcome::NotMeasurable, "rows are missing, or completed nothing");
        };
        if self.failed > 0 {
            return with(Outcome::NotMeasurable, &format!("{} requests failed", self.failed));
        }
        let (threads, what) = self.threads;
        if threads > cores {
            let cores = if cores == 1 { "1 core".into() } else { format!("{cores} cores") };
            return with(
                Outcome::NotMeasurable,
                &format!("{what} are {threads} threads, and this machine has {cores}"),
            );
        }
        // Positive in the document's direction.
        let expected = self.published.ln().abs();
        let effect = measured.ln * self.published.ln().signum();
        let margin = measured.margin;
        if effect - margin > 0.0 && effect >= expected / 2.0 {
            return with(Outcome::Reproduced, "");
        }
        if effect + margin < expected {
            let why = if effect - margin > 0.0 {
                "the same direction, but less than half as much"
            } else if effect + margin < 0.0 {
                "the opposite direction"
            } else {
                "no difference beyond the error"
            };
            return with(Outcome::NotReproduced, why);
        }
        with(Outcome::NotMeasurable, "the runs differ by more than the effect")
    }
}

/// Returns the sentence at the end of an experiment: the outcome of its first (main) claim, and the number of other
/// claims with each outcome.
pub(crate) fn sentence(name: &str, results: &[ClaimResult]) -> String {
    let Some((first, others)) = results.split_first() else { return format!("{name}: nothing is claimed.") };
    let main = format!("{name}: {}: {}", first.outcome.words(), first.reason);
    let count = |outcome: Outcome| {
        let count = others.iter().filter(|other| other.outcome == outcome).count();
        (count > 0).then(|| format!("{count} {}", outcome.words()))
    };
    let all = [Outcome::Reproduced, Outcome::NotReproduced, Outcome::NotMeasurable];
    let counts = all.into_iter().filter_map(count).collect::<Vec<_>>().join(", ");
    match others.len() {
        0 => format!("{main}."),
        1 => format!("{main}; its other effect: {}.", others[0].outcome.words()),
        count => format!("{main}; its {count} other effects: {counts}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a claim about invented rows: the ratio `measured`, with a relative error of each side, of 3 runs.
    fn claim(published: f64, measured: f64, error: f64) -> Claim {
        let mean = |mean: f64| MeasuredMean { mean, error: mean * error, runs: 3 };
        let measured = RatioEstimate::of(&[(mean(measured * 1e5), mean(1e5))]);
        Claim { what: "IOPS of A over B".into(), published, measured, threads: (8, "4 queues"), failed: 0 }
    }

    fn outcome(claim: &Claim) -> Outcome {
        claim.result(8).outcome
    }

    #[test]
    fn an_effect_beyond_its_error_is_reproduced() {
        use Outcome::{NotMeasurable, NotReproduced, Reproduced};
        for (published, measured, error, expected) in [
            (1.59, 1.60, 0.01, Reproduced),
            // A larger effect counts, also with a large error.
            (1.59, 6.6, 0.1, Reproduced),
            // Half of the logarithm.
            (1.59, 1.27, 0.01, Reproduced),
            (1.59, 1.25, 0.01, NotReproduced),
            (1.59, 1.00, 0.01, NotReproduced),
            (1.59, 0.70, 0.01, NotReproduced),
            // 3.9 times the relative error: 1.6 may be 1.
            (1.59, 1.60, 0.15, NotMeasurable),
            (1.59, 1.10, 0.15, NotMeasurable),
            // Losses, likewise.
            (0.66, 0.70, 0.01, Reproduced),
            (0.66, 1.00, 0.01, NotReproduced),
            (0.66, 1.40, 0.01, NotReproduced),
            (0.66, 0.80, 0.20, NotMeasurable),
        ] {
            assert_eq!(outcome(&claim(published, measured, error)), expected, "{published} {measured} {error}");
        }
    }

    #[test]
    fn what_cannot_be_compared_is_not_measurable() {
        let good = claim(1.59, 1.6, 0.01);
        let once = MeasuredMean { mean: 1.0, error: 0.0, runs: 1 };
        for (claim, cores, why) in [
            (Claim { measured: None, ..good.clone() }, 8, "rows are missing"),
            (Claim { failed: 3, ..good.clone() }, 8, "3 requests failed"),
            (good.clone(), 2, "4 queues are 8 threads, and this machine has 2 cores"),
            (Claim { measured: RatioEstimate::of(&[(once, once)]), ..good.clone() }, 8, "the runs differ by more"),
        ] {
            let result = claim.result(cores);
            assert_eq!(result.outcome, Outcome::NotMeasurable);
            assert!(result.reason.contains(why), "{}", result.reason);
        }
        assert_eq!(good.result(8).outcome, Outcome::Reproduced);
    }

    #[test]
    fn the_sentence_has_both_ratios() {
        let results = [claim(1.59, 1.6, 0.001).result(8), claim(0.66, 1.0, 0.001).result(8)];
        assert_eq!(
            sentence("polling", &results),
            "polling: reproduced: IOPS of A over B, x1.60 (1.59 to 1.61) here, x1.59 published; its other effect: not reproduced."
        );
        assert_eq!(
            results[1].reason,
            "IOPS of A over B, x1.00 (1.00 to 1.00) here, x0.66 published: no difference beyond the error"
        );
        let three = sentence("a", &[&results[..], &results[..]].concat());
        assert!(three.ends_with("; its 3 other effects: 1 reproduced, 2 not reproduced."), "{three}");
    }
}
