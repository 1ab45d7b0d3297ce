//! Keys and verbs that exist for tests and measurements only: `storage=fault`, `grants-pool`, `queue.move`.

/// The environment variable that enables them.
const SWITCH: &str = "MQBLK_TEST_KEYS";

/// True if the process was started with `MQBLK_TEST_KEYS=1`.
pub fn are_enabled() -> bool {
    std::env::var_os(SWITCH).is_some_and(|value| value == "1")
}
