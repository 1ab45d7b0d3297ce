//! Keys that exist for tests and measurements only: `storage=fault` and `grants-pool`.

/// The environment variable that makes them known.
const SWITCH: &str = "MQBLK_TEST_KEYS";

/// True if the process was started with `MQBLK_TEST_KEYS=1`.
pub fn are_enabled() -> bool {
    std::env::var_os(SWITCH).is_some_and(|value| value == "1")
}
