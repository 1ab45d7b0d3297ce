//! The rule about rate limits.

use mqblk_core::settings::parse_size;
use serde_json::{Map, Value};

use super::evidence::{Evidence, Finding, requests_per_s, time};
use crate::stat::throttle::ThrottleRates;

/// Smallest share of waiting requests that gets a sentence, in percent.
const FEW: f64 = 1.0;
/// Utilisation at which a limit is the one that requests wait for, in percent. Bursts and the rounding of samples leave
/// a few percent over an interval.
const USED_UP: f64 = 90.0;
/// The key of a disk's group.
const GROUP: &str = "limit-group";

/// A disk's work per second, by what limits count.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    reads: f64,
    writes: f64,
    read_bytes: f64,
    written_bytes: f64,
}

/// Returns the rates of the rate limits of the disk or LUN; `None` without limits, and for a controller.
pub(super) fn rates(evidence: &Evidence<'_>) -> Option<ThrottleRates> {
    let id = evidence.subject.id;
    let disk = evidence.report.disks.iter().find(|disk| disk.id == id).map(|disk| disk.throttle);
    let lun = || lun_of(evidence).and_then(|lun| lun.throttle);
    evidence.subject.health?;
    disk.unwrap_or_else(lun)
}

fn lun_of<'a>(evidence: &'a Evidence<'_>) -> Option<&'a crate::stat::rates::LunRates> {
    let luns = evidence.report.controllers.iter().flat_map(|controller| &controller.luns);
    luns.into_iter().find(|lun| lun.id == evidence.subject.id)
}

/// Returns a LUN's own work, else its device's.
fn work(evidence: &Evidence<'_>) -> Work {
    let lun = lun_of(evidence).and_then(|lun| lun.rates);
    let is_lun = evidence.subject.id != evidence.subject.device;
    match lun.filter(|_| is_lun) {
        Some(lun) => Work {
            reads: lun.reads_per_s,
            writes: lun.writes_per_s,
            read_bytes: lun.read_bytes_per_s,
            written_bytes: lun.written_bytes_per_s,
        },
        None => Work {
            reads: evidence.rates.reads_per_s,
            writes: evidence.rates.writes_per_s,
            read_bytes: evidence.rates.read_bytes_per_s,
            written_bytes: evidence.rates.written_bytes_per_s,
        },
    }
}

/// Returns the most used of the disk's own limits: key, value as set, and utilisation in percent.
fn most_used(limits: &Map<String, Value>, work: Work) -> Option<(&str, String, f64)> {
    let used = limits.iter().filter_map(|(key, value)| {
        let done = match key.as_str() {
            "iops" => work.reads + work.writes,
            "iops-read" => work.reads,
            "iops-write" => work.writes,
            "bandwidth" => work.read_bytes + work.written_bytes,
            "bandwidth-read" => work.read_bytes,
            "bandwidth-write" => work.written_bytes,
            _ => return None,
        };
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let limit = parse_size(&text).filter(|limit| limit.0 > 0)?;
        Some((key.as_str(), text, 100.0 * done / limit.0 as f64))
    });
    used.max_by(|one, other| one.2.total_cmp(&other.2))
}

/// Reports the share of the requests that waited for a rate limit, and the limit.
pub(super) fn throttled(evidence: &Evidence<'_>) -> Vec<Finding> {
    let (Some(rates), Some(throttle)) =
        (rates(evidence), evidence.subject.health.and_then(|health| health.throttle.as_ref()))
    else {
        return Vec::new();
    };
    let work = work(evidence);
    let all = match lun_of(evidence) {
        Some(_) => work.reads + work.writes,
        None => requests_per_s(&evidence.rates),
    };
    let percent = if all > 0.0 { (100.0 * rates.throttled_per_s / all).min(100.0) } else { 0.0 };
    if percent < FEW && rates.waiting == 0 {
        return Vec::new();
    }
    let mut figures = vec![
        ("throttled_percent", percent),
        ("throttled_per_s", rates.throttled_per_s),
        ("throttled_await_us", rates.throttled_await_us),
        ("waiting_requests", rates.waiting as f64),
    ];
    let group = throttle.limits.get(GROUP).and_then(Value::as_str);
    let own = most_used(&throttle.limits, work);
    let which = match (own, group) {
        (Some((key, value, used)), group) if used >= USED_UP || group.is_none() => {
            figures.push(("limit_used_percent", used));
            if used < FEW { format!("{key}={value}") } else { format!("{key}={value} (used to {used:.0} percent)") }
        }
        (_, Some(group)) => format!("a limit of its group {group}"),
        // Only bursts of limits that were just removed.
        (..) => "a limit".to_owned(),
    };
    let waiting = match rates.waiting {
        0 => String::new(),
        1 => "; 1 waits now".to_owned(),
        waiting => format!("; {waiting} wait now"),
    };
    let sentence = if percent >= FEW {
        format!(
            "{percent:.0} percent of its requests waited for {which}, for {} on average{waiting}.",
            time(rates.throttled_await_us)
        )
    } else {
        format!("Requests wait for {which}{waiting}.")
    };
    vec![Finding::new("throttled", sentence, &figures)]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_limit_that_is_used_most_is_found() {
        let work = Work { reads: 600.0, writes: 300.0, read_bytes: 6e6, written_bytes: 3e6 };
        let most = |limits: Value| {
            let limits = limits.as_object().cloned().unwrap();
            most_used(&limits, work).map(|(key, value, used)| (key.to_owned(), value, used.round()))
        };
        let found = |key: &str, value: &str, used| Some((key.to_owned(), value.to_owned(), used));
        assert_eq!(most(json!({"iops": 1000, "iops-read": 2000})), found("iops", "1000", 90.0));
        assert_eq!(most(json!({"iops": 1000, "iops-write": 300})), found("iops-write", "300", 100.0));
        assert_eq!(most(json!({"bandwidth": "10MB", "bandwidth-read": "6MB"})), found("bandwidth-read", "6MB", 100.0));
        assert_eq!(most(json!({"bandwidth-write": "6MB", "iops-read": 600})), found("iops-read", "600", 100.0));
        assert_eq!(most(json!({"limit-group": "gold", "iops-max": 5, "iops-burst-s": 3})), None);
    }
}
