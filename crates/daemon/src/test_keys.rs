//! Keys and variables that exist for tests and measurements only: `storage=fault`, `storage=blocking`, `grants-pool`,
//! `MQBLK_TEST_MAX_MAP_COUNT`.

use mqblk_core::MappingBudget;

/// The environment variable that enables them.
const SWITCH: &str = "MQBLK_TEST_KEYS";

/// The number of mappings of the process, instead of `vm.max_map_count`.
const MAX_MAP_COUNT: &str = "MQBLK_TEST_MAX_MAP_COUNT";

/// Limits the mappings of the process to the number that a test sets. Called before the first is used.
pub fn limit_mappings() {
    let count = std::env::var(MAX_MAP_COUNT).ok().filter(|_| are_enabled());
    if let Some(count) = count.and_then(|count| count.parse().ok()) {
        MappingBudget::limit_process(count);
    }
}

/// Returns true if the process was started with `MQBLK_TEST_KEYS=1`.
pub fn are_enabled() -> bool {
    std::env::var_os(SWITCH).is_some_and(|value| value == "1")
}
