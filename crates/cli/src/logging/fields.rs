//! The fields of an event as text: its message, then NAME=VALUE. Names of files and sockets, and messages of other
//! processes, may contain any characters. Control characters are therefore escaped: a line stays one line, and does
//! nothing to a terminal.

use std::fmt::{self, Write};

use tracing::field::Field;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{self, Writer};

/// Returns the formatter.
pub(super) fn escaped() -> impl for<'writer> FormatFields<'writer> + 'static {
    format::debug_fn(|writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug| {
        if field.name() != "message" {
            write!(writer, "{}=", field.name())?;
        }
        write!(Escaped(writer), "{value:?}")
    })
    .delimited(" ")
}

/// Writes text with its control characters escaped as in Rust's literals.
struct Escaped<W>(W);

impl<W: Write> Write for Escaped<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive(char::is_control) {
            let mut characters = part.chars();
            match characters.next_back().filter(|last| last.is_control()) {
                Some(last) => write!(self.0, "{}{}", characters.as_str(), last.escape_default())?,
                None => self.0.write_str(part)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::fmt::MakeWriter;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Sink {
        type Writer = Sink;

        fn make_writer(&'a self) -> Sink {
            self.clone()
        }
    }

    #[test]
    fn what_others_say_stays_one_line_and_moves_no_cursor() {
        let sink = Sink::default();
        let layer = tracing_subscriber::fmt::layer().with_writer(sink.clone()).with_ansi(false).without_time();
        let layer = layer.with_target(false).fmt_fields(escaped());
        let subscriber = tracing_subscriber::registry().with(layer);
        let path = std::path::Path::new("/run/\u{1b}[2J\u{9b}a\nERROR forged.sock");
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(disk = "d\n", socket = %path.display(), count = 3, "served on: {}", "first\r\nsecond");
        });
        let line = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        let want = " WARN served on: first\\r\\nsecond disk=\"d\\n\" socket=/run/\\u{1b}[2J\\u{9b}a\\nERROR forged.sock count=3\n";
        assert_eq!(line, want);
    }
}
