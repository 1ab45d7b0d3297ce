//! What a person sees while it runs: a bar on a terminal, a line now and then elsewhere.

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
    /// For `runs` runs.
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

    /// A run starts.
    pub fn start(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_owned());
        }
    }

    /// `part` of the run is done, from 0 to 1.
    pub fn update(&self, part: f64) {
        if let Some(bar) = &self.bar {
            bar.set_position(self.done * WHOLE + (part.clamp(0.0, 1.0) * WHOLE as f64) as u64);
        }
    }

    /// The run is over.
    pub fn end(&mut self, result: &str) {
        self.done += 1;
        match &self.bar {
            Some(bar) => bar.set_position(self.done * WHOLE),
            // Nobody is left to tell when standard error is closed.
            None => drop(writeln!(std::io::stderr(), "{result}")),
        }
    }

    /// All is over.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
