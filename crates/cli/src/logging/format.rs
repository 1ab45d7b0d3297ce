//! Formats of log lines.

use super::journald;

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Time, level, message and fields, in colours on a terminal
    Text,
    /// A JSON object a line
    Json,
    /// As systemd's journal reads standard error: the level as `<N>`, no time
    Journald,
}

impl LogFormat {
    /// Returns the format for the reader of standard error.
    pub(super) fn detect() -> LogFormat {
        let stderr = rustix::fs::fstat(std::io::stderr());
        let journal = std::env::var("JOURNAL_STREAM").ok();
        let is_journal = |journal: &str| stderr.is_ok_and(|file| journal == format!("{}:{}", file.st_dev, file.st_ino));
        if journal.as_deref().is_some_and(is_journal) { LogFormat::Journald } else { LogFormat::Text }
    }

    /// Returns a line of the logger's own, without its end.
    pub(super) fn note(self, text: &str) -> String {
        match self {
            LogFormat::Text => format!("({text})"),
            LogFormat::Json => serde_json::json!({ "level": "WARN", "message": text }).to_string(),
            LogFormat::Journald => format!("<{}>({text})", journald::WARNING),
        }
    }
}
