//! The keys of limits: a rate, the height of its bursts, and their length.

use mqblk_core::ByteLen;
use mqblk_core::settings::{Key, SettingError, Settings, parse_size};
use mqblk_engine::{Burst, DiskLimits, IoLimit, IoLimits, LimitKind};

use crate::pair::{Pair, number_or_text};

/// The group of a disk.
pub static LIMIT_GROUP: Key = Key::text("limit-group", "NAME", "the name of a `--limit-group`, or `off`")
    .default("off")
    .live()
    .about("share the limits of --limit-group name=NAME,...", "");
/// The value that removes a limit.
const OFF: &str = "off";

const fn rate(name: &'static str, about: &'static str) -> Key {
    Key::text(name, "N|off", "a whole number, or `off`").default(OFF).live().about(about, "")
}
const fn bandwidth(name: &'static str, about: &'static str) -> Key {
    Key::text(name, "SIZE|off", "a size, or `off`").default(OFF).live().about(about, "")
}
const fn seconds(name: &'static str, about: &'static str) -> Key {
    Key::number(name, 1, IoLimit::MAX_BURST_S as u64).placeholder("S").default("1").live().about(about, "")
}

static IOPS: Key = rate("iops", "most requests a second");
static IOPS_MAX: Key = rate("iops-max", "most requests a second in a burst");
static IOPS_BURST_S: Key = seconds("iops-burst-s", "how many seconds that burst may take");
static IOPS_READ: Key = rate("iops-read", "most reads a second");
static IOPS_READ_MAX: Key = rate("iops-read-max", "most reads a second in a burst");
static IOPS_READ_BURST_S: Key = seconds("iops-read-burst-s", "how many seconds that burst may take");
static IOPS_WRITE: Key = rate("iops-write", "most writes a second");
static IOPS_WRITE_MAX: Key = rate("iops-write-max", "most writes a second in a burst");
static IOPS_WRITE_BURST_S: Key = seconds("iops-write-burst-s", "how many seconds that burst may take");
static BANDWIDTH: Key = bandwidth("bandwidth", "most bytes a second");
static BANDWIDTH_MAX: Key = bandwidth("bandwidth-max", "most bytes a second in a burst");
static BANDWIDTH_BURST_S: Key = seconds("bandwidth-burst-s", "how many seconds that burst may take");
static BANDWIDTH_READ: Key = bandwidth("bandwidth-read", "most bytes read a second");
static BANDWIDTH_READ_MAX: Key = bandwidth("bandwidth-read-max", "most bytes read a second in a burst");
static BANDWIDTH_READ_BURST_S: Key = seconds("bandwidth-read-burst-s", "how many seconds that burst may take");
static BANDWIDTH_WRITE: Key = bandwidth("bandwidth-write", "most bytes written a second");
static BANDWIDTH_WRITE_MAX: Key = bandwidth("bandwidth-write-max", "most bytes written a second in a burst");
static BANDWIDTH_WRITE_BURST_S: Key = seconds("bandwidth-write-burst-s", "how many seconds that burst may take");

/// All keys of limits.
pub const KEYS: &[&Key] = &[
    &IOPS,
    &IOPS_MAX,
    &IOPS_BURST_S,
    &IOPS_READ,
    &IOPS_READ_MAX,
    &IOPS_READ_BURST_S,
    &IOPS_WRITE,
    &IOPS_WRITE_MAX,
    &IOPS_WRITE_BURST_S,
    &BANDWIDTH,
    &BANDWIDTH_MAX,
    &BANDWIDTH_BURST_S,
    &BANDWIDTH_READ,
    &BANDWIDTH_READ_MAX,
    &BANDWIDTH_READ_BURST_S,
    &BANDWIDTH_WRITE,
    &BANDWIDTH_WRITE_MAX,
    &BANDWIDTH_WRITE_BURST_S,
];

/// The keys of one limit.
struct LimitKeys {
    kind: LimitKind,
    rate: &'static Key,
    max: &'static Key,
    burst_s: &'static Key,
}

static LIMITS: [LimitKeys; 6] = [
    LimitKeys { kind: LimitKind::Iops, rate: &IOPS, max: &IOPS_MAX, burst_s: &IOPS_BURST_S },
    LimitKeys { kind: LimitKind::IopsRead, rate: &IOPS_READ, max: &IOPS_READ_MAX, burst_s: &IOPS_READ_BURST_S },
    LimitKeys { kind: LimitKind::IopsWrite, rate: &IOPS_WRITE, max: &IOPS_WRITE_MAX, burst_s: &IOPS_WRITE_BURST_S },
    LimitKeys { kind: LimitKind::Bandwidth, rate: &BANDWIDTH, max: &BANDWIDTH_MAX, burst_s: &BANDWIDTH_BURST_S },
    LimitKeys {
        kind: LimitKind::BandwidthRead,
        rate: &BANDWIDTH_READ,
        max: &BANDWIDTH_READ_MAX,
        burst_s: &BANDWIDTH_READ_BURST_S,
    },
    LimitKeys {
        kind: LimitKind::BandwidthWrite,
        rate: &BANDWIDTH_WRITE,
        max: &BANDWIDTH_WRITE_MAX,
        burst_s: &BANDWIDTH_WRITE_BURST_S,
    },
];

/// Takes the keys of limits. Keys that are not given keep the value of `current`. Removing a limit removes its burst
/// too.
///
/// # Errors
/// Returns the first invalid value.
pub fn take_limits(settings: &mut Settings, current: IoLimits) -> Result<IoLimits, SettingError> {
    let mut limits = current;
    for keys in &LIMITS {
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
    let given_seconds = settings.number(keys.burst_s)?;
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
fn take_rate(settings: &mut Settings, key: &'static Key, kind: LimitKind) -> Result<Option<Option<u64>>, SettingError> {
    let Some(text) = settings.text(key) else { return Ok(None) };
    if matches!(text.as_str(), OFF | "0") {
        return Ok(Some(None));
    }
    let most = IoLimit::max_rate(kind);
    let (rate, expected) = if kind.is_bandwidth() {
        let expected = format!("bytes a second such as 500K, 64M or 1G, up to {}, or {OFF}", ByteLen(most));
        (parse_size(&text).map(|size| size.0), expected)
    } else {
        (text.parse().ok(), format!("requests a second, a whole number from 1 to {most}, or {OFF}"))
    };
    match rate.filter(|rate| (1..=most).contains(rate)) {
        Some(rate) => Ok(Some(Some(rate))),
        None => Err(settings.error(key, format!("{text:?}"), expected)),
    }
}

/// Returns the keys of limits with their values, of those that are set.
pub fn limit_pairs(limits: &IoLimits) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for keys in &LIMITS {
        let Some(IoLimit { rate, burst }) = limits.get(keys.kind) else { continue };
        let text = |rate: u64| if keys.kind.is_bandwidth() { ByteLen(rate).to_string() } else { rate.to_string() };
        pairs.push((keys.rate.name, number_or_text(&text(rate))));
        if let Some(Burst { rate, seconds }) = burst {
            pairs.push((keys.max.name, number_or_text(&text(rate))));
            pairs.push((keys.burst_s.name, toml::Value::Integer(seconds.into())));
        }
    }
    pairs
}

/// Returns all keys of the limit that `key` belongs to: its rate, its burst's rate and its burst's length.
pub(crate) fn keys_of_limit(key: &str) -> Option<[&'static str; 3]> {
    LIMITS.iter().map(|keys| [keys.rate.name, keys.max.name, keys.burst_s.name]).find(|keys| keys.contains(&key))
}

/// Returns true if [`limit_pairs`] can return `key`.
pub(crate) fn is_limit_key(key: &str) -> bool {
    keys_of_limit(key).is_some()
}

/// Returns the present limits of a disk, in the form of [`storage_pairs`](crate::storage::storage_pairs).
pub fn current_limit_pairs(limits: &DiskLimits) -> Vec<Pair> {
    let mut pairs = limit_pairs(&limits.own());
    pairs.extend(limits.group().iter().map(|group| (LIMIT_GROUP.name, crate::pair::string(group.name()))));
    pairs
}
