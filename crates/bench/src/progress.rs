//! Progress on standard error: a bar on a terminal, else a line for each run.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The progress of all runs, in milliseconds of their expected time. The time left goes by the pace so far.
#[derive(Debug)]
pub struct ProgressDisplay {
    /// Hidden unless standard error is a terminal.
    bar: ProgressBar,
    /// Expected time of the runs that have ended, and of the current one.
    done: Duration,
    current: Duration,
}

impl ProgressDisplay {
    /// Creates the display of runs that are expected to take `total`.
    pub fn new(total: Duration) -> ProgressDisplay {
        let bar = ProgressBar::with_draw_target(Some(millis(total)), ProgressDrawTarget::hidden());
        if std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            let template = "{wide_bar} {percent:>3}%  {elapsed} of about {duration}\n{msg}";
            bar.set_style(ProgressStyle::with_template(template).expect("a template that the library takes"));
            bar.enable_steady_tick(Duration::from_millis(500));
        }
        ProgressDisplay { bar, done: Duration::ZERO, current: Duration::ZERO }
    }

    /// Returns the expected time of all runs, in words.
    pub fn total(&self) -> String {
        HumanDuration(Duration::from_millis(self.bar.length().unwrap_or(0))).to_string()
    }

    /// Shows that a run starts, which is expected to take `time`.
    pub fn start(&mut self, what: &str, time: Duration) {
        if self.done.is_zero() {
            // The time before the first run does not count.
            self.bar.reset_eta();
        }
        self.current = time;
        self.bar.set_message(what.to_owned());
    }

    /// Shows that `part` of the run is done, from 0 to 1.
    pub fn update(&self, part: f64) {
        self.bar.set_position(millis(self.done + self.current.mul_f64(part.clamp(0.0, 1.0))));
    }

    /// Shows the result of the run.
    pub fn end(&mut self, result: &str) {
        self.update(1.0);
        self.done += self.current;
        if self.bar.is_hidden() {
            // Standard error may be closed.
            let _ = writeln!(std::io::stderr(), "{result} ({} left)", HumanDuration(self.bar.eta()));
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_goes_by_what_was_measured() {
        let mut progress = ProgressDisplay::new(Duration::from_secs(100));
        assert_eq!(progress.total(), "2 minutes");
        progress.start("a run", Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(10));
        progress.end("it ended");
        // The rest takes four times as long as this run, which was faster than expected.
        let left = progress.bar.eta();
        assert!((Duration::from_millis(30)..Duration::from_secs(80)).contains(&left), "{left:?}");
        progress.start("another", Duration::from_secs(80));
        progress.end("it ended too");
        assert_eq!(progress.bar.eta(), Duration::ZERO);
    }
}
