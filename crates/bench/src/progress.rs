//! Progress on standard error: a bar on a terminal, else a line for each run.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Thousandths: the bar's resolution.
const WHOLE: u64 = 1000;

/// The progress of all runs.
#[derive(Debug)]
pub struct ProgressDisplay {
    bar: Option<ProgressBar>,
    done: u64,
}

impl ProgressDisplay {
    /// Creates the display of `runs` runs.
    pub fn new(runs: u64) -> ProgressDisplay {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(runs * WHOLE);
            let template = "{wide_bar} {percent:>3}%  {elapsed} of about {duration}\n{msg}";
            bar.set_style(ProgressStyle::with_template(template).expect("a template that the library takes"));
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        ProgressDisplay { bar, done: 0 }
    }

    /// Shows that a run starts.
    pub fn start(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_owned());
        }
    }

    /// Shows that `part` of the run is done, from 0 to 1.
    pub fn update(&self, part: f64) {
        if let Some(bar) = &self.bar {
            bar.set_position(self.done * WHOLE + (part.clamp(0.0, 1.0) * WHOLE as f64) as u64);
        }
    }

    /// Shows the result of the run.
    pub fn end(&mut self, result: &str) {
        self.done += 1;
        match &self.bar {
            Some(bar) => bar.set_position(self.done * WHOLE),
            // Standard error may be closed.
            None => drop(writeln!(std::io::stderr(), "{result}")),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
