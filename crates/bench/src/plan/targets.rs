//! Targets of a benchmark: running devices, and disks that servers are started for.

use std::fmt::Display;
use std::path::PathBuf;

use super::combination::Combination;

/// Keys of a disk: most entries of a virtqueue.
pub(crate) const QUEUE_SIZE_KEYS: [&str; 2] = ["queue-size", "queue_size"];

/// Location of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetSource {
    /// A running server.
    Socket(PathBuf),
    /// A device that an interface's options name.
    Device(DeviceName),
    /// A disk, for which a server is started for each run: the argument of `mqblk serve --disk`, without its address
    /// and queues; for a controller, of each logical unit.
    Disk(String),
}

/// Name and number of a running device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName {
    /// The name as it was given.
    pub name: String,
    /// The device's number.
    pub number: u32,
}

/// A target, and its description in the results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its location.
    pub source: TargetSource,
    /// `target` in the results.
    pub label: String,
    /// `grants` in the results; `None` where the interface has none.
    pub grants: Option<String>,
    /// `column` in the results: an experiment's heading for it.
    pub column: Option<String>,
    /// Queues, if not those of the combination.
    pub queues: Option<u16>,
    /// Workers of the server that is started; `None`: the server's default, or a running server.
    pub workers: Option<u16>,
}

impl Target {
    /// Returns the settings of a served disk; `None` for a running server.
    pub(crate) fn spec(&self) -> Option<&str> {
        if let TargetSource::Disk(spec) = &self.source { Some(spec) } else { None }
    }

    /// Returns the setting `key` of a served disk, or the server's default of it. Those of a running one are unknown.
    pub(crate) fn setting<'a>(&'a self, key: &str, default: &'a str) -> &'a str {
        self.spec().map_or("unknown", |spec| value_of(spec, key).unwrap_or(default))
    }

    /// Returns `storage` of the results.
    pub(crate) fn storage(&self) -> &str {
        self.setting("storage", "file")
    }

    /// Returns `poll` of the results.
    pub(crate) fn poll(&self) -> &str {
        self.setting("poll", "default")
    }

    /// Returns `merge` of the results.
    pub(crate) fn merge(&self) -> &str {
        self.setting("merge", "auto")
    }

    /// Returns the latency of a null disk in microseconds; `None` for other storage.
    pub(crate) fn latency_us(&self) -> Option<u64> {
        (self.storage() == "null").then(|| self.setting("latency-us", "0").parse().ok()).flatten()
    }

    /// Returns the target with another setting of its served disk.
    pub(crate) fn with(&self, key: &str, value: impl Display) -> Target {
        let mut changed = self.clone();
        if let TargetSource::Disk(spec) = &mut changed.source {
            spec.push_str(&format!(",{key}={value}"));
        }
        changed
    }

    /// Returns its label, poll policy and grants, as far as they are known.
    pub(crate) fn name(&self) -> String {
        let known = |name: &str, value: Option<&str>| {
            value.filter(|value| *value != "unknown").map_or(String::new(), |value| format!(" {name} {value}"))
        };
        format!("{}{}{}", self.label, known("poll", Some(self.poll())), known("grants", self.grants.as_deref()))
    }

    /// Returns the target as an experiment's column, with its heading and number of queues.
    pub(crate) fn as_column(&self, heading: String, queues: u16) -> Target {
        Target { column: Some(heading), queues: Some(queues), ..self.clone() }
    }

    /// Returns the combination of the sweep with the target's own queues.
    pub fn combination(&self, of: &Combination) -> Combination {
        Combination { queues: self.queues.unwrap_or(of.queues), ..*of }
    }
}

/// Returns the value of `key` in `KEY=VALUE,...`.
pub(crate) fn value_of<'a>(spec: &'a str, key: &str) -> Option<&'a str> {
    let pairs = split_pairs(spec).into_iter();
    pairs.filter_map(|pair| pair.split_once('=')).find(|(found, _)| *found == key).map(|(_, value)| value)
}

/// Returns the pairs of `KEY=VALUE,...`, in which a comma of a value is written twice.
pub(crate) fn split_pairs(spec: &str) -> Vec<&str> {
    let mut pairs = vec![];
    let (mut start, mut at) = (0, 0);
    let bytes = spec.as_bytes();
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b',', Some(b',')) => at += 1,
            (b',', _) => {
                pairs.push(&spec[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    pairs.push(&spec[start..]);
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_commas_belong_to_values() {
        assert_eq!(split_pairs("a=1,,2,b=,,,c"), ["a=1,,2", "b=,,", "c"]);
    }
}
