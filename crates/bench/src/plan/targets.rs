//! Targets of a benchmark: running devices, and disks that servers are started for.

use std::path::PathBuf;

use super::Combination;

/// Keys of a disk: most entries of a virtqueue.
pub(crate) const QUEUE_SIZE_KEYS: [&str; 2] = ["queue-size", "queue_size"];

/// Location of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetSource {
    /// A running server.
    Socket(PathBuf),
    /// A device that an interface's options name.
    Device(DeviceName),
    /// A disk, for which a server is started for each run.
    Disk {
        /// The argument of `mqblk serve --disk`, without socket, queues and poll; for a controller, of each logical
        /// unit.
        spec: String,
        /// Poll policy.
        poll: Option<String>,
        /// Merging.
        merge: Option<MergeMode>,
        /// Keys of the interface.
        keys: DiskKeys,
    },
}

/// Name and number of a running device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceName {
    /// The name as it was given.
    pub name: String,
    /// The device's number.
    pub number: u32,
}

/// Keys and values that are appended to the settings of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskKeys(Vec<(&'static str, &'static str)>);

impl DiskKeys {
    /// Returns the value of `key`.
    pub fn get(&self, key: &str) -> Option<&'static str> {
        self.0.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }

    /// Sets `key`; `None` removes it: the server's default holds.
    pub fn set(&mut self, key: &'static str, value: Option<&'static str>) {
        self.0.retain(|(name, _)| *name != key);
        self.0.extend(value.map(|value| (key, value)));
    }

    /// Returns all keys and values, in the order in which they were set.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str)> + use<'_> {
        self.0.iter().copied()
    }
}

/// Request merging of a served disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeMode {
    /// Adjacent requests are merged.
    On,
    /// Nothing is merged.
    Off,
}

impl MergeMode {
    /// Returns the value of the disk's key `merge`.
    pub fn name(self) -> &'static str {
        match self {
            MergeMode::On => "on",
            MergeMode::Off => "off",
        }
    }
}

/// A target, and its description in the results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its location.
    pub source: TargetSource,
    /// `target` in the results.
    pub label: String,
    /// `storage` in the results.
    pub storage: String,
    /// `poll` in the results.
    pub poll: String,
    /// `merge` in the results.
    pub merge: String,
    /// `grants` in the results; `None` where the interface has none.
    pub grants: Option<String>,
    /// `column` in the results: an experiment's heading for it.
    pub column: Option<String>,
    /// Queues, if not those of the combination.
    pub queues: Option<u16>,
    /// Workers of the server that is started; `None`: the server's default, or a running server.
    pub workers: Option<u16>,
    /// Latency of a null disk in microseconds, in the results; `None` for other storage.
    pub latency_us: Option<u64>,
}

impl Target {
    /// Returns a running target: its other settings are unknown.
    pub(crate) fn running(source: TargetSource, label: &str, grants: Option<String>) -> Target {
        let [storage, poll, merge] = ["unknown"; 3].map(str::to_owned);
        Target {
            source,
            label: label.to_owned(),
            storage,
            poll,
            merge,
            grants,
            column: None,
            queues: None,
            workers: None,
            latency_us: None,
        }
    }

    /// Returns its label, poll policy and grants, as far as they are known.
    pub(crate) fn name(&self) -> String {
        let known = |name: &str, value: Option<&String>| {
            value.filter(|value| *value != "unknown").map_or(String::new(), |value| format!(" {name} {value}"))
        };
        format!("{}{}{}", self.label, known("poll", Some(&self.poll)), known("grants", self.grants.as_ref()))
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
    spec.split(',').find_map(|pair| pair.split_once('=').filter(|(found, _)| *found == key).map(|(_, value)| value))
}

/// Returns the latency of a null disk in microseconds; `None` for other storage.
pub(crate) fn null_latency(spec: &str) -> Option<u64> {
    let own = value_of(spec, "latency-us").unwrap_or("0");
    (value_of(spec, "storage") == Some("null")).then(|| own.parse().ok()).flatten()
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
