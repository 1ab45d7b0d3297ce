//! Tables of metric families, and their output.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

/// Labels with their values.
pub(super) type Labels = Vec<(&'static str, String)>;

/// A value with its unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    /// Without a unit.
    Number(u64),
    /// 1 or 0.
    Flag(bool),
    Bytes(u64),
    Seconds(f64),
    /// Reported in seconds.
    Nanoseconds(u64),
}

impl Value {
    fn unit(self) -> Option<Unit> {
        match self {
            Value::Number(_) | Value::Flag(_) => None,
            Value::Bytes(_) => Some(Unit::Bytes),
            Value::Seconds(_) | Value::Nanoseconds(_) => Some(Unit::Seconds),
        }
    }
}

/// Converts to seconds, the base unit of the formats.
pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// A family of metrics: one for each item that has a value.
pub(super) struct Family<T> {
    /// The name without prefix, unit and suffix.
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    get: fn(&T) -> Option<Value>,
}

impl<T> Family<T> {
    /// A counter: it only grows while its item is there.
    pub(super) const fn counter(name: &'static str, help: &'static str, get: fn(&T) -> Option<Value>) -> Family<T> {
        Family { name, help, kind: MetricType::Counter, get }
    }

    /// A gauge.
    pub(super) const fn gauge(name: &'static str, help: &'static str, get: fn(&T) -> Option<Value>) -> Family<T> {
        Family { name, help, kind: MetricType::Gauge, get }
    }
}

/// The subject of a metric.
#[derive(Debug)]
pub(super) struct Item<T> {
    pub(super) labels: Labels,
    pub(super) of: T,
}

/// A histogram.
pub(super) struct HistogramValue {
    pub(super) sum_s: f64,
    pub(super) count: u64,
    /// The upper bound of each bucket, in seconds, ascending, and its count.
    pub(super) buckets: Vec<(f64, u64)>,
}

/// Writes families to an encoder.
pub(super) struct MetricWriter<'a, 'e> {
    encoder: &'a mut DescriptorEncoder<'e>,
}

impl<'a, 'e> MetricWriter<'a, 'e> {
    pub(super) fn new(encoder: &'a mut DescriptorEncoder<'e>) -> MetricWriter<'a, 'e> {
        MetricWriter { encoder }
    }

    /// Writes all families of a table. Skips families without a value.
    pub(super) fn families<T>(&mut self, prefix: &str, families: &[Family<T>], items: &[Item<&T>]) -> fmt::Result {
        for family in families {
            let values = items.iter().filter_map(|item| Some((&item.labels, (family.get)(item.of)?)));
            let values: Vec<(&Labels, Value)> = values.collect();
            let Some((_, first)) = values.first() else { continue };
            let (name, unit) = (format!("{prefix}{}", family.name), first.unit());
            let mut encoder = self.encoder.encode_descriptor(&name, family.help, unit.as_ref(), family.kind)?;
            for (labels, value) in values {
                let mut one = encoder.encode_family(labels)?;
                match (family.kind, value) {
                    (MetricType::Counter, Value::Number(number) | Value::Bytes(number)) => {
                        one.encode_counter::<NoLabelSet, u64, u64>(&number, None)?;
                    }
                    (MetricType::Counter, value) => {
                        one.encode_counter::<NoLabelSet, f64, u64>(&as_float(value), None)?;
                    }
                    (_, Value::Number(number) | Value::Bytes(number)) => one.encode_gauge(&number)?,
                    (_, Value::Flag(flag)) => one.encode_gauge(&u64::from(flag))?,
                    (_, value) => one.encode_gauge(&as_float(value))?,
                }
            }
        }
        Ok(())
    }

    /// Writes an info metric: labels, and the value 1.
    pub(super) fn info<T>(&mut self, name: &str, help: &str, items: &[Item<T>]) -> fmt::Result {
        if items.is_empty() {
            return Ok(());
        }
        let mut encoder = self.encoder.encode_descriptor(name, help, None, MetricType::Info)?;
        items.iter().try_for_each(|item| encoder.encode_info(&item.labels))
    }

    /// Writes a family of histograms of seconds.
    pub(super) fn histograms(&mut self, name: &str, help: &str, items: Vec<Item<HistogramValue>>) -> fmt::Result {
        if items.is_empty() {
            return Ok(());
        }
        let unit = Unit::Seconds;
        let mut encoder = self.encoder.encode_descriptor(name, help, Some(&unit), MetricType::Histogram)?;
        for Item { labels, of: HistogramValue { sum_s, count, buckets } } in &items {
            encoder.encode_family(labels)?.encode_histogram::<NoLabelSet>(*sum_s, *count, buckets, None)?;
        }
        Ok(())
    }
}

fn as_float(value: Value) -> f64 {
    match value {
        Value::Number(number) | Value::Bytes(number) => number as f64,
        Value::Flag(flag) => f64::from(u8::from(flag)),
        Value::Seconds(seconds) => seconds,
        Value::Nanoseconds(ns) => seconds(ns),
    }
}
