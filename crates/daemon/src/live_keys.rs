//! Keys that can change while guests use their object.

use std::collections::BTreeMap;

use mqblk_core::settings::Key;

use crate::limits::{LIMIT_GROUP, LIMIT_KEYS, keys_of_limit};
use crate::queues::{self, COALESCE_MAX, COALESCE_US, POLL, POLL_QUEUE};
use crate::storage::PLUG_KEYS;

/// The keys that can change, if they are marked as live.
const KEYS: [&[&Key]; 4] = [queues::KEYS, PLUG_KEYS, &[&LIMIT_GROUP], LIMIT_KEYS];

/// Returns the key of this name, if it can change while guests use its object.
fn live_key(name: &str) -> Option<&'static Key> {
    KEYS.into_iter().flatten().copied().find(|key| key.name == name && key.is_live)
}

/// Returns true if a key can change while guests use its object.
pub(crate) fn is_live_key(key: &str) -> bool {
    live_key(key).is_some()
}

/// Returns true if a key is one of a device's queues.
pub(crate) fn is_queue_key(key: &str) -> bool {
    queues::KEYS.iter().any(|known| known.name == key)
}

/// Returns the value to set for a key that the configuration lacks; `None`: none is needed. `keys`: the other set keys.
pub(crate) fn configured_value(key: &str, keys: &BTreeMap<String, Option<String>>) -> Option<String> {
    let is_set = |key: &str| keys.get(key).is_some_and(Option::is_some);
    // Not needed if another key sets it, or if it has no meaning without another one.
    let is_needed = match key {
        _ if key == POLL.name => !keys.contains_key(POLL_QUEUE.name),
        _ if key == COALESCE_MAX.name => is_set(COALESCE_US.name),
        _ => keys_of_limit(key).is_none_or(|[_, max, burst_s]| key != burst_s || is_set(max)),
    };
    live_key(key)?.default_value().filter(|_| is_needed).map(str::to_owned)
}

/// Returns the keys that are set or saved together with `key`, as they are checked together.
pub(crate) fn keys_set_with(key: &str) -> Vec<&str> {
    match key {
        key if key == POLL_QUEUE.name => vec![POLL.name],
        key if key == COALESCE_US.name || key == COALESCE_MAX.name => vec![COALESCE_US.name, COALESCE_MAX.name],
        key => keys_of_limit(key).map_or_else(|| vec![key], |keys| keys.to_vec()),
    }
}
