//! The limit of log lines of each disk: 39,800 connections a second of one VMM would write 4 MB of log a second.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::LogFormat;
use mqblk_core::{RateLimit, TokenBucket};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Lines that a disk may log at once: more than a device with the most queues logs when it starts or stops.
const BURST: u32 = 1000;
/// Lines a second after those.
const PER_SECOND: u32 = 10;
const LINES: RateLimit = RateLimit { burst: BURST, per_second: PER_SECOND };
/// Most disks whose lines are counted apart; those of further ones are counted together.
const MAX_SUBJECTS: usize = 65_536;

/// Lines of one disk.
#[derive(Debug)]
struct DiskLines {
    bucket: TokenBucket,
    left_out: u64,
}

impl DiskLines {
    fn new(now: Instant) -> DiskLines {
        DiskLines { bucket: TokenBucket::new(LINES, now), left_out: 0 }
    }

    /// Takes one line. Returns how many were left out before it, or `None` if it is left out too.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.bucket.take(LINES, now).is_err() {
            self.left_out += 1;
            return None;
        }
        Some(std::mem::take(&mut self.left_out))
    }
}

/// The disk that an event is about: its field `disk`. Empty for others.
#[derive(Default)]
struct Subject(String);

impl Visit for Subject {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "disk" {
            value.clone_into(&mut self.0);
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "disk" {
            self.0 = format!("{value:?}").trim_matches('"').to_owned();
        }
    }
}

/// Formats events as `inner` does, and leaves out those beyond the limit of their disk.
pub(super) struct LimitedLines<F> {
    inner: F,
    format: LogFormat,
    subjects: Mutex<HashMap<String, DiskLines>>,
}

impl<F> LimitedLines<F> {
    pub(super) fn new(inner: F, format: LogFormat) -> LimitedLines<F> {
        LimitedLines { inner, format, subjects: Mutex::default() }
    }

    fn take(&self, mut subject: String, now: Instant) -> Option<u64> {
        let mut subjects = self.subjects.lock().unwrap_or_else(PoisonError::into_inner);
        if subjects.len() >= MAX_SUBJECTS && !subjects.contains_key(&subject) {
            subject.clear();
        }
        subjects.entry(subject).or_insert_with(|| DiskLines::new(now)).take(now)
    }
}

impl<S, N, F> FormatEvent<S, N> for LimitedLines<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut subject = Subject::default();
        event.record(&mut subject);
        match self.take(subject.0, Instant::now()) {
            None => Ok(()),
            Some(0) => self.inner.format_event(context, writer, event),
            Some(left_out) => {
                let why = format!("lines of the next one's disk were left out: more than {PER_SECOND} a second");
                writeln!(writer, "{}", self.format.note(&format!("{left_out} {why}")))?;
                self.inner.format_event(context, writer, event)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_disk_has_a_limit_of_its_own() {
        let (lines, start) = (LimitedLines::new((), LogFormat::Text), Instant::now());
        let take = |disk: &str, at: Instant| lines.take(disk.to_owned(), at);
        for _ in 0..1000 {
            assert_eq!(take("loud", start), Some(0));
        }
        assert_eq!((take("loud", start), take("loud", start), take("quiet", start)), (None, None, Some(0)));
        let later = start + Duration::from_millis(250);
        assert_eq!((take("loud", later), take("loud", later), take("loud", later)), (Some(2), Some(0), None));
        let much_later = later + Duration::from_secs(3600);
        assert_eq!((0..2000).filter(|_| take("loud", much_later).is_some()).count(), 1000);
    }

    #[test]
    fn the_number_of_disks_is_bounded() {
        let (lines, now) = (LimitedLines::new((), LogFormat::Text), Instant::now());
        for at in 0..MAX_SUBJECTS + 10 {
            lines.take(at.to_string(), now);
        }
        assert_eq!(lines.subjects.lock().unwrap().len(), MAX_SUBJECTS + 1, "the others together");
    }
}
