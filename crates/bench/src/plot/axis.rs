//! Axes: positions of values, ticks and their labels.

/// Notation of the numbers of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quantity {
    /// With k, M, G or T from a thousand on.
    Count,
    /// Microseconds, as us, ms or s.
    Micros,
    /// Percent, with its sign.
    Percent,
    /// Plain.
    Ratio,
}

/// Shorter latencies, in microseconds, have its position.
const MIN_LATENCY: f64 = 1e-3;

/// A tick of an axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisTick {
    pub at: f64,
    pub label: String,
}

impl AxisTick {
    fn new(at: f64, quantity: Quantity) -> AxisTick {
        AxisTick { at, label: measured(at, quantity) }
    }
}

/// A vertical axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisScale {
    /// Value at the lower end.
    pub low: f64,
    /// Value at the upper end.
    pub high: f64,
    /// True if it is logarithmic.
    pub log: bool,
    /// Ticks, ascending.
    pub ticks: Vec<AxisTick>,
}

impl AxisScale {
    /// Returns an axis from 0 to a round number that is at least `most`.
    pub(super) fn linear(most: f64, quantity: Quantity) -> AxisScale {
        // All values are 0, or too small for their labels: the range is arbitrary.
        let most = if most > 1e-9 { most } else { 1.0 };
        let power = 10_f64.powf(most.log10().floor());
        // The end with the least space above the largest value that makes 4 to 7 steps; among equals, the largest step.
        let steps = [2.0, 1.0, 0.5, 0.25, 0.2, 0.1].map(|factor| factor * power);
        let ends = steps.map(|step| (step, (most / step - 1e-9).ceil()));
        let fitting = ends.into_iter().filter(|(_, count)| (4.0..=7.0).contains(count));
        let least = fitting.min_by(|(a, m), (b, n)| (a * m * (1.0 - 1e-9)).total_cmp(&(b * n)));
        let (step, count) =
            least.expect("0.2, 0.5, 1 and 2 of the largest's decimal power go into it 4 to 7 times somewhere");
        let ticks = (0..=count as u32).map(|at| AxisTick::new(f64::from(at) * step, quantity)).collect();
        AxisScale { low: 0.0, high: count * step, log: false, ticks }
    }

    /// Returns an axis between round numbers (1, 2 or 5 times a power of ten) that includes `least` and `most` (above
    /// 0). It has at most nine decades; smaller values lie at its lower end.
    pub(super) fn log(least: f64, most: f64, quantity: Quantity) -> AxisScale {
        let all = round_numbers(least.max(most / 1e9), most, &FACTORS);
        let (low, high) = (all[0], all[all.len() - 1]);
        // Labels of 1, 2 and 5 fit for less than four decades.
        let wide = (high / low).log10() >= 4.0;
        let marked = |at: &f64| !wide || (at.log10() - at.log10().round()).abs() < 1e-9;
        let ticks = all.into_iter().filter(marked).map(|at| AxisTick::new(at, quantity)).collect();
        AxisScale { low, high, log: true, ticks }
    }

    /// Returns the position of `value`: 0 at the lower end, 1 at the upper.
    pub(super) fn position(&self, value: f64) -> f64 {
        let share = if self.log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }
}

/// The first digits of round numbers.
const FACTORS: [f64; 3] = [1.0, 2.0, 5.0];

/// Returns the round numbers from the last one that is at most `least` to the first that is at least `most`: `factors`
/// times powers of ten.
fn round_numbers(least: f64, most: f64, factors: &[f64]) -> Vec<f64> {
    let decades = least.log10().floor() as i32..=most.log10().floor() as i32 + 1;
    let all = decades.flat_map(|decade| factors.iter().map(move |factor| factor * 10_f64.powi(decade)));
    let all: Vec<f64> = all.collect();
    // A round value may differ from its number by rounding.
    let first = all.iter().rposition(|at| *at <= least * (1.0 + 1e-9)).unwrap_or(0);
    let last = all.iter().position(|at| *at >= most * (1.0 - 1e-9)).unwrap_or(all.len() - 1);
    all[first..=last.max(first)].to_vec()
}

/// Returns a number with three significant digits, or all digits before the point, without trailing zeros.
pub(super) fn measured(value: f64, quantity: Quantity) -> String {
    let units: &[(f64, &str)] = match quantity {
        Quantity::Count => &[(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")],
        Quantity::Micros => &[(1e6, " s"), (1e3, " ms"), (1.0, " us")],
        Quantity::Percent => &[(1.0, "%")],
        Quantity::Ratio => &[(1.0, "")],
    };
    // A value that rounds up to the next unit gets it.
    let (scale, unit) = units.iter().find(|(unit, _)| value >= *unit * 0.9995).unwrap_or(&units[units.len() - 1]);
    let decimals = match value / scale {
        scaled if scaled >= 99.95 => 0,
        scaled if scaled >= 9.995 => 1,
        scaled if scaled >= 0.9995 => 2,
        scaled if scaled > 0.0 => (2 - scaled.log10().floor() as i32).clamp(3, 12) as usize,
        _ => 0,
    };
    let number = format!("{:.decimals$}", value / scale);
    let number = if decimals > 0 { number.trim_end_matches('0').trim_end_matches('.') } else { &number };
    // 0 is the same in all units.
    if number == "0" { "0".to_owned() } else { format!("{number}{unit}") }
}

/// Returns the position of a percentile below 100: each 9 is as wide as the one before (90, 99, 99.9).
pub(super) fn percentile_position(percentile: f64) -> f64 {
    (100.0 / (100.0 - percentile)).log10()
}

/// Returns the ticks of a percentile axis from position `first` to `last`, and of the maximum at `largest`, if it is
/// drawn.
pub(super) fn percentile_ticks(first: f64, last: f64, largest: Option<f64>) -> Vec<AxisTick> {
    const MARKS: [&str; 9] = ["0", "50", "90", "99", "99.9", "99.99", "99.999", "99.9999", "99.99999"];
    let marks = MARKS.iter().map(|label| {
        let percentile: f64 = label.parse().expect("a number");
        AxisTick { at: percentile_position(percentile), label: (*label).to_owned() }
    });
    let inside = |tick: &AxisTick| (first - 1e-9..=last + 1e-9).contains(&tick.at);
    marks.filter(inside).chain(largest.map(|at| AxisTick { at, label: "max".into() })).collect()
}

/// Returns the position of a latency in microseconds on a logarithmic axis.
pub(super) fn latency_position(us: f64) -> f64 {
    us.max(MIN_LATENCY).log10()
}

/// Returns the ticks of a latency axis around `least` to `most` microseconds; over many decades, powers of ten only.
pub(super) fn latency_ticks(least: f64, most: f64) -> Vec<AxisTick> {
    let (least, most) = (least.max(MIN_LATENCY), most.max(MIN_LATENCY));
    let factors = if (most / least).log10() > 3.0 { &FACTORS[..1] } else { &FACTORS };
    let tick = |us: f64| AxisTick { at: latency_position(us), ..AxisTick::new(us, Quantity::Micros) };
    round_numbers(least, most, factors).into_iter().map(tick).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: &AxisScale) -> Vec<&str> {
        scale.ticks.iter().map(|tick| tick.label.as_str()).collect()
    }

    #[test]
    fn linear_axes_are_round_and_hold_the_largest() {
        assert_eq!(
            labels(&AxisScale::linear(321_000.0, Quantity::Count)),
            ["0", "50k", "100k", "150k", "200k", "250k", "300k", "350k"]
        );
        assert_eq!(
            labels(&AxisScale::linear(1.1e6, Quantity::Count)),
            ["0", "200k", "400k", "600k", "800k", "1M", "1.2M"]
        );
        assert_eq!(
            labels(&AxisScale::linear(9400.0, Quantity::Micros)),
            ["0", "2 ms", "4 ms", "6 ms", "8 ms", "10 ms"]
        );
        assert_eq!(labels(&AxisScale::linear(0.083, Quantity::Count)), ["0", "0.02", "0.04", "0.06", "0.08", "0.1"]);
        assert_eq!(labels(&AxisScale::linear(100.0, Quantity::Count)), ["0", "25", "50", "75", "100"]);
        assert_eq!(labels(&AxisScale::linear(0.0, Quantity::Count)), ["0", "0.25", "0.5", "0.75", "1"]);
        for exponent in -89..=160 {
            let most = 10_f64.powf(f64::from(exponent) / 10.0);
            let scale = AxisScale::linear(most, Quantity::Count);
            assert!(
                scale.high >= most && scale.high <= most * 1.26 && (5..=8).contains(&scale.ticks.len()),
                "{most} {scale:?}"
            );
        }
    }

    #[test]
    fn log_axes_hold_all() {
        assert_eq!(
            labels(&AxisScale::log(2.5, 700.0, Quantity::Ratio)),
            ["2", "5", "10", "20", "50", "100", "200", "500", "1000"]
        );
        assert_eq!(
            labels(&AxisScale::log(0.4, 30_000.0, Quantity::Micros)),
            ["1 us", "10 us", "100 us", "1 ms", "10 ms"]
        );
        let scale = AxisScale::log(1.0, 1000.0, Quantity::Micros);
        assert_eq!((scale.low, scale.high), (1.0, 1000.0));
        for (value, position) in [(1.0, 0.0), (10.0, 1.0 / 3.0), (1000.0, 1.0), (0.1, 0.0)] {
            assert!((scale.position(value) - position).abs() < 1e-9, "{value}");
        }
        for exponent in -120..=130 {
            let least = 10_f64.powf(f64::from(exponent) / 10.0);
            let scale = AxisScale::log(least, least * 150.0, Quantity::Micros);
            assert!(
                scale.low <= least * 1.001 && scale.high >= least * 149.9 && scale.ticks.len() >= 2,
                "{least} {scale:?}"
            );
        }
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.0, "0"),
            (0.0834, "0.0834"),
            (0.000_123_4, "0.000123"),
            (1.0, "1"),
            (17.26, "17.3"),
            (999.4, "999"),
            (999.9, "1k"),
        ];
        for (value, text) in
            cases.into_iter().chain([(10_914_321.0, "10.9M"), (321_000.0, "321k"), (2e9, "2G"), (1e15, "1000T")])
        {
            assert_eq!(measured(value, Quantity::Count), text);
        }
        assert_eq!(
            (measured(4008.0, Quantity::Micros), measured(40_080.0, Quantity::Micros)),
            ("4.01 ms".into(), "40.1 ms".into())
        );
    }

    #[test]
    fn percentile_ticks_are_those_in_range() {
        let ticks = percentile_ticks(percentile_position(50.0), percentile_position(99.9), Some(4.0));
        assert_eq!(ticks.iter().map(|tick| tick.label.as_str()).collect::<Vec<_>>(), ["50", "90", "99", "99.9", "max"]);
        assert!(ticks.is_sorted_by(|a, b| a.at < b.at));
        assert!(percentile_position(100.0 - 1e-14).is_finite());
    }
}
