//! Effects that a document shows, and their reproduction here. All values are computed from measured rows and their
//! errors.

use serde::Serialize;

use super::estimate::{RatioEstimate, digits};

/// An effect that a document shows, and its measurement here.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    /// The comparison: `IOPS of static:50 over off`.
    pub what: String,
    /// The document's ratio; not 1.
    pub published: f64,
    /// The ratio here; `None` if a row is missing or nothing was completed.
    pub measured: Option<RatioEstimate>,
    /// Reason why this machine cannot show the effect.
    pub obstacle: Option<String>,
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
    /// Returns the outcome of the claim.
    pub(crate) fn result(&self) -> ClaimResult {
        let with = |outcome: Outcome, why: &str| {
            let measured = self.measured.map_or("not measured".into(), |ratio| format!("{ratio} here"));
            let why = if why.is_empty() { String::new() } else { format!(": {why}") };
            ClaimResult {
                outcome,
                reason: format!("{}, {measured}, x{} published{why}", self.what, digits(self.published)),
            }
        };
        let Some(measured) = self.measured else {
            return with(Outcome::NotMeasurable, "rows are missing, or completed nothing");
        };
        if self.failed > 0 {
            return with(Outcome::NotMeasurable, &format!("{} requests failed", self.failed));
        }
        if let Some(obstacle) = &self.obstacle {
            return with(Outcome::NotMeasurable, obstacle);
        }
        // Positive in the document's direction.
        let expected = self.published.ln().abs();
        let effect = measured.ln() * self.published.ln().signum();
        let margin = measured.margin();
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

/// Returns why a gain by more threads cannot be seen, if there are fewer `cores` than threads.
pub(crate) fn needs_cores(threads: u16, what: &str, cores: usize) -> Option<String> {
    let short = usize::from(threads) > cores;
    short.then(|| {
        format!(
            "{what} are {threads} threads, and this machine has {cores} {}",
            if cores == 1 { "core" } else { "cores" }
        )
    })
}

/// Returns the sentence at the end of an experiment: the outcome of its first (main) claim, and the number of other
/// claims with each outcome.
pub(crate) fn sentence(name: &str, results: &[ClaimResult]) -> String {
    let Some((first, others)) = results.split_first() else { return format!("{name}: nothing is claimed.") };
    let main = format!("{name}: {}: {}", first.outcome.words(), first.reason);
    let all = [Outcome::Reproduced, Outcome::NotReproduced, Outcome::NotMeasurable];
    let counts = all.map(|outcome| (others.iter().filter(|other| other.outcome == outcome).count(), outcome));
    let counts =
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, outcome)| format!("{count} {}", outcome.words()));
    let counts = counts.collect::<Vec<_>>().join(", ");
    match others.len() {
        0 => format!("{main}."),
        1 => format!("{main}; its other effect: {}.", others[0].outcome.words()),
        count => format!("{main}; its {count} other effects: {counts}."),
    }
}

#[cfg(test)]
mod tests {
    use super::super::estimate::MeasuredMean;
    use super::*;

    /// Returns a claim about invented rows: the ratio `measured`, with a relative error of each side, of 3 runs.
    fn claim(published: f64, measured: f64, error: f64) -> Claim {
        let mean = |mean: f64| MeasuredMean { mean, error: mean * error, runs: 3 };
        let measured = RatioEstimate::of(&[(mean(measured * 1e5), mean(1e5))]);
        Claim { what: "IOPS of A over B".into(), published, measured, obstacle: None, failed: 0 }
    }

    fn outcome(claim: &Claim) -> Outcome {
        claim.result().outcome
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
        for (claim, why) in [
            (Claim { measured: None, ..good.clone() }, "rows are missing"),
            (Claim { failed: 3, ..good.clone() }, "3 requests failed"),
            (
                Claim { obstacle: needs_cores(8, "4 queues", 2), ..good.clone() },
                "4 queues are 8 threads, and this machine has 2 cores",
            ),
            (Claim { measured: RatioEstimate::of(&[(once, once)]), ..good.clone() }, "the runs differ by more"),
        ] {
            let result = claim.result();
            assert_eq!(result.outcome, Outcome::NotMeasurable);
            assert!(result.reason.contains(why), "{}", result.reason);
        }
        assert_eq!(needs_cores(2, "a queue", 2), None);
    }

    #[test]
    fn the_sentence_has_both_ratios() {
        let results = [claim(1.59, 1.6, 0.001).result(), claim(0.66, 1.0, 0.001).result()];
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
