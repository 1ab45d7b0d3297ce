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

/// A tick of an axis.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisTick {
    pub at: f64,
    pub label: String,
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
        let ticks = (0..=count as u32).map(|at| f64::from(at) * step);
        let ticks = ticks.map(|at| AxisTick { at, label: number(at, quantity) }).collect();
        AxisScale { low: 0.0, high: count * step, log: false, ticks }
    }

    /// Returns an axis between round numbers (1, 2 or 5 times a power of ten) that includes `least` and `most` (above
    /// 0). It has at most nine decades; smaller values lie at its lower end.
    pub(super) fn log(least: f64, most: f64, quantity: Quantity) -> AxisScale {
        let least = least.max(most / 1e9);
        let round = |decade: i32| [1.0, 2.0, 5.0].map(|factor| factor * 10_f64.powi(decade));
        let (first, last) = (least.log10().floor() as i32, most.log10().floor() as i32);
        let all: Vec<f64> = (first..=last + 1).flat_map(round).collect();
        // A round value may differ from its number by rounding.
        let low = all.iter().copied().rfind(|at| *at <= least * (1.0 + 1e-9)).unwrap_or(all[0]);
        let high = all.iter().copied().find(|at| *at >= most * (1.0 - 1e-9)).unwrap_or(all[all.len() - 1]);
        // Labels of 1, 2 and 5 fit for less than four decades.
        let wide = (high / low).log10() >= 4.0;
        let marked = |at: &f64| (low..=high).contains(at) && (!wide || (at.log10() - at.log10().round()).abs() < 1e-9);
        let ticks =
            all.iter().filter(|at| marked(at)).map(|at| AxisTick { at: *at, label: number(*at, quantity) }).collect();
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

/// Returns the label of a number, with up to three decimals (digits, below 1), without trailing zeros.
pub(super) fn number(value: f64, quantity: Quantity) -> String {
    let (scaled, unit) = scaled(value, quantity);
    let decimals = if scaled < 1.0 { small_decimals(scaled) } else { 3 };
    labelled(trimmed(format!("{scaled:.decimals$}")), unit)
}

/// Returns the decimals that show three digits of a number below 1, at most twelve.
fn small_decimals(value: f64) -> usize {
    if value > 0.0 { (2 - value.log10().floor() as i32).clamp(3, 12) as usize } else { 0 }
}

/// Returns a measured number with three significant digits, or all digits before the point.
pub(super) fn measured(value: f64, quantity: Quantity) -> String {
    let (scaled, unit) = scaled(value, quantity);
    let decimals = match scaled {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        v => small_decimals(v),
    };
    labelled(trimmed(format!("{scaled:.decimals$}")), unit)
}

fn labelled(number: String, unit: &str) -> String {
    // 0 is the same in all units.
    if number == "0" { number } else { number + unit }
}

/// Returns a scaled number and its unit.
fn scaled(value: f64, quantity: Quantity) -> (f64, &'static str) {
    let units: &[(f64, &str)] = match quantity {
        Quantity::Count => &[(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, "")],
        Quantity::Micros => &[(1e6, " s"), (1e3, " ms"), (0.0, " us")],
        Quantity::Percent => &[(0.0, "%")],
        Quantity::Ratio => &[(0.0, "")],
    };
    // A value that rounds up to the next unit gets it.
    let fitting = units.iter().find(|(unit, _)| value >= *unit * 0.9995).unwrap_or(&units[units.len() - 1]);
    (if fitting.0 > 0.0 { value / fitting.0 } else { value }, fitting.1)
}

fn trimmed(text: String) -> String {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
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
    us.max(1e-3).log10()
}

/// Returns the ticks of a latency axis around the positions `first` to `last`: 1, 2 and 5 times powers of ten; over
/// many decades, powers of ten only.
pub(super) fn latency_ticks(first: f64, last: f64) -> Vec<AxisTick> {
    let factors: &[f64] = if last - first > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let decades = first.floor() as i32..=last.ceil() as i32;
    let all = decades.flat_map(|decade| factors.iter().map(move |factor| factor * 10_f64.powi(decade)));
    let ticks: Vec<AxisTick> = all.map(|us| AxisTick { at: us.log10(), label: number(us, Quantity::Micros) }).collect();
    // From the last one before the first position to the first one behind the last.
    let start = ticks.iter().rposition(|tick| tick.at <= first + 1e-9).unwrap_or(0);
    let end = ticks.iter().position(|tick| tick.at >= last - 1e-9).unwrap_or(ticks.len() - 1);
    ticks[start..=end.max(start)].to_vec()
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
