//! The keys of limits: a rate, the height of its bursts, and their length.

use mqblk_core::ByteLen;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{Burst, IoLimit, IoLimits, LimitKind};

use crate::print::{Pair, number_or_text};

/// The key of a disk that names its group.
pub const LIMIT_GROUP: &str = "limit-group";
/// The value that removes a limit.
const OFF: &str = "off";

/// The keys of one limit.
struct LimitKeys {
    kind: LimitKind,
    rate: &'static str,
    max: &'static str,
    burst_s: &'static str,
}

const KEYS: [LimitKeys; 6] = [
    LimitKeys { kind: LimitKind::Iops, rate: "iops", max: "iops-max", burst_s: "iops-burst-s" },
    LimitKeys { kind: LimitKind::IopsRead, rate: "iops-read", max: "iops-read-max", burst_s: "iops-read-burst-s" },
    LimitKeys { kind: LimitKind::IopsWrite, rate: "iops-write", max: "iops-write-max", burst_s: "iops-write-burst-s" },
    LimitKeys { kind: LimitKind::Bandwidth, rate: "bandwidth", max: "bandwidth-max", burst_s: "bandwidth-burst-s" },
    LimitKeys {
        kind: LimitKind::BandwidthRead,
        rate: "bandwidth-read",
        max: "bandwidth-read-max",
        burst_s: "bandwidth-read-burst-s",
    },
    LimitKeys {
        kind: LimitKind::BandwidthWrite,
        rate: "bandwidth-write",
        max: "bandwidth-write-max",
        burst_s: "bandwidth-write-burst-s",
    },
];

/// Takes the keys of limits. What is not given stays as it is in `current`; a limit that is removed takes its burst along.
///
/// # Errors
/// Returns the first invalid value.
pub fn take_limits(settings: &mut Settings, current: IoLimits) -> Result<IoLimits, SettingError> {
    let mut limits = current;
    for keys in &KEYS {
        let limit = take_limit(settings, keys, current.get(keys.kind))?;
        limits.set(keys.kind, limit);
    }
    Ok(limits)
}

fn take_limit(
    settings: &mut Settings,
    keys: &LimitKeys,
    current: Option<IoLimit>,
) -> Result<Option<IoLimit>, SettingError> {
    let given_rate = take_rate(settings, keys.rate, keys.kind)?;
    let given_max = take_rate(settings, keys.max, keys.kind)?;
    let given_seconds = settings.number(keys.burst_s, 1..=IoLimit::MAX_BURST_S.into())?;
    let rate = given_rate.unwrap_or(current.map(|limit| limit.rate));
    let Some(rate) = rate else {
        // With `off` for the limit its burst may be `off` too.
        let left_over = [(keys.max, given_max.flatten()), (keys.burst_s, given_seconds)];
        return match left_over.iter().find_map(|(key, value)| Some((*key, (*value)?))) {
            None => Ok(None),
            Some((key, value)) => Err(settings.error(key, value.to_string(), format!("{} with it", keys.rate))),
        };
    };
    let current_burst = current.and_then(|limit| limit.burst);
    let max = given_max.unwrap_or(current_burst.map(|burst| burst.rate));
    let burst = match (max, given_seconds) {
        (None, None) => None,
        (None, Some(seconds)) => {
            return Err(settings.error(keys.burst_s, seconds.to_string(), format!("{} with it", keys.max)));
        }
        (Some(max), _) if max <= rate => {
            let found = if given_max.is_some() { max.to_string() } else { format!("{max}, as set before") };
            let expected = format!("more than {} ({rate}), or {OFF}", keys.rate);
            return Err(settings.error(keys.max, found, expected));
        }
        (Some(max), seconds) => {
            let seconds = seconds.map_or(current_burst.map_or(1, |burst| burst.seconds), |seconds| seconds as u32);
            Some(Burst { rate: max, seconds })
        }
    };
    Ok(Some(IoLimit { rate, burst }))
}

/// Takes a rate. The inner `None`: no limit.
fn take_rate(settings: &mut Settings, key: &'static str, kind: LimitKind) -> Result<Option<Option<u64>>, SettingError> {
    if matches!(settings.peek(key), Some(OFF | "0")) {
        return Ok(settings.text(key).map(|_| None));
    }
    let most = IoLimit::max_rate(kind);
    if !kind.is_bandwidth() {
        let text = settings.peek(key).map(str::to_owned);
        let number = settings.number(key, 1..=most);
        let expected = || format!("requests a second, a whole number from 1 to {most}, or {OFF}");
        return number
            .map(|number| number.map(Some))
            .map_err(|_| settings.error(key, format!("{:?}", text.unwrap_or_default()), expected()));
    }
    let expected = || format!("bytes a second such as 500K, 64M or 1G, up to {}, or {OFF}", ByteLen(most));
    let text = settings.peek(key).map(str::to_owned);
    let size = match settings.size(key) {
        Ok(size) => size,
        Err(_) => return Err(settings.error(key, format!("{:?}", text.unwrap_or_default()), expected())),
    };
    match size {
        Some(size) if size.0 > most => Err(settings.error(key, size.to_string(), expected())),
        size => Ok(size.map(|size| Some(size.0))),
    }
}

/// Returns the keys of limits with their values, of those that are set.
pub fn limit_pairs(limits: &IoLimits) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for keys in &KEYS {
        let Some(IoLimit { rate, burst }) = limits.get(keys.kind) else { continue };
        let text = |rate: u64| if keys.kind.is_bandwidth() { ByteLen(rate).to_string() } else { rate.to_string() };
        pairs.push((keys.rate, number_or_text(&text(rate))));
        if let Some(Burst { rate, seconds }) = burst {
            pairs.push((keys.max, number_or_text(&text(rate))));
            pairs.push((keys.burst_s, toml::Value::Integer(seconds.into())));
        }
    }
    pairs
}

/// Returns the keys of the limit that `key` is one of: its rate, its burst's rate and its burst's length.
pub(crate) fn keys_of_limit(key: &str) -> Option<[&'static str; 3]> {
    KEYS.iter().map(|keys| [keys.rate, keys.max, keys.burst_s]).find(|keys| keys.contains(&key))
}

/// Returns true if `key` is one that [`limit_pairs`] may return.
pub(crate) fn is_limit_key(key: &str) -> bool {
    keys_of_limit(key).is_some()
}
