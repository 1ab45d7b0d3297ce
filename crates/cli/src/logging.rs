//! Log lines, on standard error. No thread waits for their reader. A disk whose guest or VMM causes too many loses the
//! rest.

mod fields;
mod format;
mod journald;
mod limit;
mod writer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex};

use mqblk_core::lock::lock;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_daemon::LogLevel;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};

pub use format::LogFormat;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
const EXPECTED: &str = "off, error, warn, info, debug or trace, or TARGET=LEVEL,...";

/// The options of logging, which all subcommands have.
#[derive(Clone, Debug, clap::Args)]
pub struct LogOptions {
    /// Level of the log on standard error: off, error, warn, info, debug or trace [default: RUST_LOG, else info]
    #[arg(long, global = true, value_name = "LEVEL", hide_short_help = true)]
    pub log: Option<String>,

    /// How log lines look [default: journald if standard error is systemd's journal, else text]
    #[arg(long, global = true, hide_short_help = true, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
}

/// The log level, which can be changed.
struct ReloadableLevel {
    filter: reload::Handle<EnvFilter, Registry>,
    directives: Mutex<String>,
}

impl LogLevel for ReloadableLevel {
    fn get(&self) -> String {
        lock(&self.directives).clone()
    }

    fn set(&self, directives: &str) -> Result<(), SettingError> {
        let filter = parse("log", "level", directives)?;
        let mut current = lock(&self.directives);
        let unchanged =
            |error: reload::Error| Settings::new("log").error("level", error.to_string(), "a daemon that logs");
        self.filter.reload(filter).map_err(unchanged)?;
        directives.clone_into(&mut current);
        Ok(())
    }
}

/// Starts logging at the level of the options, by default that of `RUST_LOG`, else info; by default in the format for
/// the reader.
///
/// # Errors
/// If the level is not valid.
pub fn start(options: &LogOptions) -> Result<Arc<dyn LogLevel>, SettingError> {
    let from_environment = std::env::var("RUST_LOG").ok().filter(|value| !value.is_empty());
    let (subject, key, directives) = match (options.log.as_deref(), from_environment.as_deref()) {
        (Some(level), _) => ("mqblk", "log", level),
        (None, Some(value)) => ("environment", "RUST_LOG", value),
        (None, None) => ("mqblk", "log", "info"),
    };
    let (filter, handle) = reload::Layer::new(parse(subject, key, directives)?);
    let format = options.log_format.unwrap_or_else(LogFormat::detect);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(move || writer::Lines(format))
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // Writing to a closed terminal fails; that must not panic.
        .log_internal_errors(false);
    let limited = |inner| limit::LimitedLines::new(inner, format);
    let lines = match format {
        LogFormat::Text => lines.fmt_fields(fields::escaped()).map_event_format(limited).boxed(),
        LogFormat::Json => {
            let lines = lines.json().flatten_event(true).with_current_span(false).with_span_list(false);
            lines.map_event_format(|inner| limit::LimitedLines::new(inner, format)).boxed()
        }
        LogFormat::Journald => lines
            .with_ansi(false)
            .fmt_fields(fields::escaped())
            .map_event_format(|_| limit::LimitedLines::new(journald::JournaldLines, format))
            .boxed(),
    };
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok(Arc::new(ReloadableLevel { filter: handle, directives: Mutex::new(directives.to_owned()) }))
}

fn parse(subject: &str, key: &'static str, directives: &str) -> Result<EnvFilter, SettingError> {
    let invalid = || Settings::new(subject).error(key, format!("{directives:?}"), EXPECTED);
    if !directives.split(',').all(is_directive) {
        return Err(invalid());
    }
    EnvFilter::try_new(directives).map_err(|_| invalid())
}

/// Logs panics from now on. Rust's own message waits for the reader of standard error: a panicking worker would neither
/// go on nor end the process.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let payload = panic.payload();
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref().copied()).unwrap_or("no message").replace('\n', " ");
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(thread = thread.name().unwrap_or("unnamed"), "panicked at {place}: {text}");
        if let Some(calls) = calls() {
            calls.lines().for_each(|call| tracing::error!("{}", call.trim_end()));
        }
    }));
    // The library reads the symbols at the first use, and keeps them. In the sandbox it could not open the program's
    // file.
    let _ = calls();
}

/// Returns the calls of this thread with their names, if the process was started with RUST_BACKTRACE=1.
fn calls() -> Option<String> {
    let calls = Backtrace::capture();
    (calls.status() == BacktraceStatus::Captured).then(|| calls.to_string())
}

/// Returns true if `text` is a level or `TARGET=LEVEL`. `EnvFilter` takes any other word as a target, which disables
/// all other targets.
fn is_directive(text: &str) -> bool {
    match text.split_once('=') {
        Some((target, level)) => !target.is_empty() && is_level(level),
        None => is_level(text),
    }
}

fn is_level(text: &str) -> bool {
    LEVELS.iter().any(|level| level.eq_ignore_ascii_case(text))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    use rustix::process::{Resource, Rlimit};

    use super::*;

    /// In a process of its own, whose standard error is a full pipe.
    #[test]
    fn a_panic_waits_for_no_reader() {
        const CHILD: &str = "MQBLK_TEST_PANIC";
        if std::env::var_os(CHILD).is_none() {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", "logging::tests::a_panic_waits_for_no_reader", "--nocapture"]).env(CHILD, "1");
            let mut child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            let until = Instant::now() + Duration::from_secs(30);
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status,
                    None if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
                    None => {
                        child.kill().unwrap();
                        panic!("the thread that panicked waits for a reader");
                    }
                }
            };
            assert!(status.success(), "{status}");
            let mut lines = String::new();
            child.stderr.take().unwrap().read_to_string(&mut lines).unwrap();
            let panic = lines.lines().find(|line| line.contains("panicked at")).unwrap_or_default();
            for part in ["ERROR", "thread=\"first\"", "crates/cli/src/logging.rs:", ": before two lines"] {
                assert!(panic.contains(part), "{part}: {panic:?}");
            }
            assert!(!lines.contains("second"), "there was no room for it");
            return;
        }
        start(&LogOptions { log: Some("error".to_owned()), log_format: None }).unwrap();
        log_panics();
        let panicked = |name: &str, text: &'static str| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            thread.spawn(move || panic!("{text}")).unwrap().join().is_err()
        };
        assert!(panicked("first", "before\ntwo lines"));
        let mut stderr = std::io::stderr();
        while writer::has_room(&stderr) {
            stderr.write_all(&[b'.'; 4096]).unwrap();
        }
        assert!(panicked("second", "after"));
    }

    /// In a process of its own, which can open no more files when it panics.
    #[test]
    fn calls_have_names_where_no_file_can_be_opened() {
        const CHILD: &str = "MQBLK_TEST_CALLS";
        const NAME: &str = "logging::tests::calls_have_names_where_no_file_can_be_opened";
        if std::env::var_os(CHILD).is_none() {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", NAME, "--nocapture"]).env(CHILD, "1").env("RUST_BACKTRACE", "1");
            let output = child.stdin(Stdio::null()).output().unwrap();
            let lines = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{}: {lines}", output.status);
            assert!(
                lines.lines().any(|line| line.contains("ERROR") && line.contains("core::panicking::panic_fmt")),
                "{lines}"
            );
            return;
        }
        start(&LogOptions { log: Some("error".to_owned()), log_format: None }).unwrap();
        log_panics();
        // The three standard ones are open. With a lower limit poll(2) refuses them.
        let limit = rustix::process::getrlimit(Resource::Nofile);
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
        std::fs::File::open("/proc/self/exe").expect_err("no descriptor is left");
        assert!(std::panic::catch_unwind(|| panic!("a test's")).is_err());
    }

    #[test]
    fn directives() {
        for good in ["info", "INFO", "off", "mqblk_engine=trace"] {
            assert!(is_directive(good), "{good}");
        }
        for bad in ["", "loud", "=info", "mqblk=loud", "INFO "] {
            assert!(!is_directive(bad), "{bad}");
        }
    }
}
