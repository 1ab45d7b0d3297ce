//! Log lines, on standard error. Nobody waits for whoever reads them, and a disk whose guest or VMM causes too many of them loses the rest.

mod limit;
mod writer;

use std::io::IsTerminal as _;

use mqblk_core::settings::{SettingError, Settings};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
const EXPECTED: &str = "off, error, warn, info, debug or trace, or TARGET=LEVEL,...";

/// Starts logging at `level`, by default at that of `RUST_LOG`, by default at info.
///
/// # Errors
/// If the level is not valid.
pub(crate) fn start(level: Option<&str>) -> Result<(), SettingError> {
    let from_environment = std::env::var("RUST_LOG").ok().filter(|value| !value.is_empty());
    let (subject, key, directives) = match (level, from_environment.as_deref()) {
        (Some(level), _) => ("mqblk", "log", level),
        (None, Some(value)) => ("environment", "RUST_LOG", value),
        (None, None) => ("mqblk", "log", "info"),
    };
    let invalid = || Settings::new(subject).error(key, format!("{directives:?}"), EXPECTED);
    if level.is_some() && !directives.split(',').all(is_directive) {
        return Err(invalid());
    }
    let filter = EnvFilter::try_new(directives).map_err(|_| invalid())?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| writer::Lines)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // Writing to a closed terminal fails; that must not panic.
        .log_internal_errors(false)
        .map_event_format(limit::LimitedLines::new);
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok(())
}

/// Returns true if `text` is a level or `TARGET=LEVEL`. `EnvFilter` takes any other word as a target, which disables all other targets.
fn is_directive(text: &str) -> bool {
    match text.split_once('=') {
        Some((target, level)) => !target.is_empty() && LEVELS.contains(&level),
        None => LEVELS.contains(&text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives() {
        for good in ["info", "off", "mqblk_engine=trace"] {
            assert!(is_directive(good), "{good}");
        }
        for bad in ["", "loud", "=info", "mqblk=loud", "INFO "] {
            assert!(!is_directive(bad), "{bad}");
        }
    }
}
