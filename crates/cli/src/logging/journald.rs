//! Lines for systemd's journal on standard error: it adds the time itself, and takes the level from a prefix
//! (sd-daemon(3)).

use std::fmt;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The priority of warnings (syslog(3)).
pub(super) const WARNING: u8 = 4;

/// Formats events for the journal.
pub(super) struct JournaldLines;

impl<S, N> FormatEvent<S, N> for JournaldLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// Returns the priority of a level, as in syslog(3).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => WARNING,
        Level::INFO => 6,
        _ => 7,
    }
}
