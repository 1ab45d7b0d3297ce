//! The limit of log lines of each guest's disk, device or controller: 39,800 connections a second of one VMM would
//! write 4 MB of log a second. Lines without a guest's device, and panics, are not limited.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;
use std::time::Instant;

use mqblk_core::lock::lock;

use super::format::LogFormat;
use mqblk_core::{RateLimit, TokenBucket};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Lines that a disk may log at once: more than a device with the most queues logs when it starts or stops.
const BURST: u32 = 1000;
/// Lines per second after the burst.
const PER_SECOND: u32 = 10;
const LINES: RateLimit = RateLimit { burst: BURST, per_second: PER_SECOND };
/// Most disks with lines of their own count; further ones share a count.
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

    /// Takes one line. Returns the number of lines left out before it, or `None` if it is left out too.
    fn take(&mut self, now: Instant) -> Option<u64> {
        if self.bucket.take(LINES, now).is_err() {
            self.left_out += 1;
            return None;
        }
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Fields that name a guest's device, in the order of the search.
const OF_GUESTS: [&str; 4] = ["disk", "device", "controller", "image"];

/// The guest's device of an event. `None`: no guest causes it.
#[derive(Default)]
struct Subject(Option<(usize, String)>);

impl Subject {
    fn record(&mut self, field: &Field, value: impl FnOnce() -> String) {
        let Some(order) = OF_GUESTS.iter().position(|name| *name == field.name()) else { return };
        if self.0.as_ref().is_none_or(|(other, _)| order < *other) {
            self.0 = Some((order, value()));
        }
    }
}

impl Visit for Subject {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record(field, || value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record(field, || format!("{value:?}").trim_matches('"').to_owned());
    }
}

/// Formats events as `inner`, and leaves out those beyond the limit of their device.
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
        let mut subjects = lock(&self.subjects);
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
        let Some((_, subject)) = subject.0 else { return self.inner.format_event(context, writer, event) };
        match self.take(subject, Instant::now()) {
            None => Ok(()),
            Some(0) => self.inner.format_event(context, writer, event),
            Some(left_out) => {
                let why = format!("lines about the next one's disk were left out: more than {PER_SECOND} a second");
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

    #[derive(Clone, Default)]
    struct Sink(std::sync::Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Under any flood of a guest, and for any field that names its device.
    #[test]
    fn lines_that_no_guest_causes_are_never_left_out() {
        use tracing_subscriber::layer::SubscriberExt as _;
        let sink = Sink::default();
        let writer = sink.clone();
        let lines = tracing_subscriber::fmt::layer().with_writer(move || writer.clone()).with_ansi(false);
        let limited = lines.map_event_format(|inner| LimitedLines::new(inner, LogFormat::Text));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(limited), || {
            for _ in 0..2 * BURST {
                tracing::info!(device = "vbd-5-51712", "frontend flood");
                tracing::info!(controller = "c", "controller flood");
                tracing::info!(disk = "d", device = "vbd-6-1", "disk flood");
                tracing::error!(thread = "worker", "panicked at x.rs: y");
            }
            tracing::warn!(device = %"vbd-7-1", "of a neighbour");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        assert_eq!(count("panicked"), 2 * BURST as usize);
        assert_eq!(count("of a neighbour"), 1);
        // A second or two may pass meanwhile.
        for flood in ["frontend flood", "controller flood", "disk flood"] {
            assert!((BURST as usize..BURST as usize + 600).contains(&count(flood)), "{flood}: {}", count(flood));
        }
    }
}
