//! The line that `mqblk serve` logs for every queue that stops, with the queue's counters.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

/// Start of the line; `key=value` pairs follow.
const LINE_START: &str = "queue stopped ";

/// Counters of a queue from one start to GET_VRING_BASE or a disconnect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoppedQueue {
    /// Id of the disk.
    pub disk: String,
    /// Index of the virtqueue.
    pub queue: u16,
    counters: BTreeMap<String, u64>,
}

impl StoppedQueue {
    /// Returns a counter, such as `requests`, `reads`, `writes`, `flushes`, `kicks` or `calls`.
    ///
    /// # Errors
    /// When the line had no such counter.
    pub fn counter(&self, name: &str) -> Result<u64> {
        self.counters.get(name).copied().with_context(|| {
            format!("the line of disk {} queue {} has no '{name}=', only {:?}", self.disk, self.queue, self.counters)
        })
    }

    fn parse(pairs: &str) -> Option<Self> {
        let mut counters = BTreeMap::new();
        let (mut disk, mut queue) = (None, None);
        for (key, value) in pairs.split_whitespace().filter_map(|pair| pair.split_once('=')) {
            match key {
                "disk" => disk = Some(value.trim_matches('"').to_owned()),
                "queue" => queue = value.parse().ok(),
                _ => {
                    if let Ok(value) = value.parse() {
                        counters.insert(key.to_owned(), value);
                    }
                }
            }
        }
        Some(Self { disk: disk?, queue: queue?, counters })
    }
}

/// Returns every stopped queue in the daemon's log, oldest first.
#[must_use]
pub fn stopped_queues(log: &str) -> Vec<StoppedQueue> {
    let plain = without_colours(log);
    plain
        .lines()
        .filter_map(|line| line.split_once(LINE_START))
        .filter_map(|(_, pairs)| StoppedQueue::parse(pairs))
        .collect()
}

/// Removes ANSI's "select graphic rendition" sequences: ESC [ ... m.
pub(crate) fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        plain.push_str(before);
        rest = after.split_once('m').map_or("", |(_, after)| after);
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::stopped_queues;

    #[test]
    fn lines_are_parsed_with_and_without_colours() -> anyhow::Result<()> {
        let log = "2026 INFO listening on /x\n\
                   2026 DEBUG queue stopped disk=a queue=0 requests=123 reads=100 flushes=1\n\
                   \x1b[32m INFO\x1b[0m queue stopped \x1b[3mdisk\x1b[0m=\"b\" \x1b[3mqueue\x1b[0m=1 \x1b[3mrequests\x1b[0m=7\n\
                   INFO queue stopped disk=c requests=1\n";
        let found = stopped_queues(log);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].disk.as_str(), found[0].queue, found[0].counter("requests")?), ("a", 0, 123));
        assert_eq!((found[1].disk.as_str(), found[1].queue, found[1].counter("requests")?), ("b", 1, 7));
        assert!(found[1].counter("flushes").is_err());
        Ok(())
    }
}
