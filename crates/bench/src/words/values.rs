//! Values of options that are neither words nor sizes.

use mqblk_core::settings::{EXPECTED_CPUS, parse_cpu_list};

use super::{CpuList, Distribution};

/// Parses a list of CPUs.
pub(crate) fn parse_cpus(text: &str) -> Result<CpuList, String> {
    parse_cpu_list(text).map(CpuList).ok_or_else(|| format!("expected {EXPECTED_CPUS}"))
}

/// Parses a time: seconds, or numbers with units.
pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    let time = text.parse::<f64>().ok().or_else(|| humantime::parse_duration(text).ok().map(|time| time.as_secs_f64()));
    match time {
        Some(seconds) if (0.0..=86400.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected a time from 0 to 86400 seconds, such as 30, 30s, 500ms or 2m".into()),
    }
}

/// Parses a distribution of random blocks.
pub(crate) fn parse_distribution(text: &str) -> Result<Distribution, String> {
    if text == "random" {
        return Ok(Distribution::Uniform);
    }
    let theta = text.strip_prefix("zipf:").and_then(|theta| theta.parse::<f64>().ok());
    match theta {
        Some(theta) if theta > 0.0 && theta <= 100.0 => Ok(Distribution::Zipf(theta)),
        _ => Err("expected random or zipf:THETA with a theta above 0, such as zipf:1.2".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in
            [("30", 30.0), ("0.5", 0.5), ("30s", 30.0), ("2m", 120.0), ("500ms", 0.5), ("1m30s", 90.0), ("0", 0.0)]
        {
            assert_eq!(parse_seconds(text), Ok(seconds), "{text}");
        }
        for text in ["", "-1", "2 weeks", "x", "1e9", "inf", "NaN"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn distributions_are_words() {
        assert_eq!(parse_distribution("random"), Ok(Distribution::Uniform));
        assert_eq!(parse_distribution("zipf:1.2").map(|found| found.to_string()), Ok("zipf:1.2".into()));
        for text in ["zipf", "zipf:0", "zipf:-1", "zipf:NaN", "pareto:0.2", ""] {
            assert!(parse_distribution(text).is_err(), "{text}");
        }
    }
}
