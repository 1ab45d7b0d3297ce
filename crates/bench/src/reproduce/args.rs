//! The command line of `mqblk reproduce`.

use std::path::PathBuf;

use clap::builder::PossibleValue;

use crate::experiment::{ALL, Experiment};
use crate::words::one_of;

/// The options of `mqblk reproduce`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Each experiment is a table or a figure of a published document, measured here with mqblk's own drivers and servers, which the command \
starts itself. What is compared are ratios; absolute values belong to the machine they were measured on. Each ends with a sentence: \
reproduced, not reproduced, or not measurable here and why. The whole takes less than 15 minutes, with --quick less than 3, and needs an \
idle machine. docs/bench.md says how to read it.

FOLDER gets EXPERIMENT.json (for `mqblk plot`), .csv, .svg and .md, renewed after each combination: Ctrl-C keeps what was measured.

Examples:
  mqblk reproduce --report report.html
      all experiments, to the folder results, and a page with the plots, the machine and every command
  mqblk reproduce polling --quick --out /tmp/polling
      one of them
  mqblk reproduce block-sizes --quick --folder /var/tmp
      on the disk that /var/tmp is on
  mqblk reproduce virtio-queues --runs 11 --json -
      more runs than by default, and everything for a program on standard output
  mqblk reproduce --list
      what there is")]
pub struct ReproduceArgs {
    /// Experiments [default: all]
    #[arg(value_name = "EXPERIMENT", value_parser = one_of(&ALL, word))]
    experiments: Vec<&'static Experiment>,

    /// Fewer and shorter runs: all in less than 3 minutes
    #[arg(long)]
    pub(super) quick: bool,

    /// Folder of the results; made if it is not there
    #[arg(long, value_name = "FOLDER", default_value = "results")]
    pub(super) out: PathBuf,

    /// Folder of the file of 1 GiB (--quick: 256 MiB) that block-sizes makes, fills and removes [default: that of
    /// --out]
    #[arg(long, value_name = "FOLDER")]
    pub(super) folder: Option<PathBuf>,

    /// Write a page with plots, machine, commands and published values; it needs nothing besides itself
    #[arg(long, value_name = "FILE.html")]
    pub(super) report: Option<PathBuf>,

    /// Write everything as JSON to this file; -: to standard output, without the tables
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,

    /// Runs of each row [default: the experiment's, 2 to 7]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(super) runs: Option<u16>,

    /// Seconds of each run [default: the experiment's, 0.12 to 1]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(super) runtime: Option<f64>,

    /// List the experiments, and measure nothing
    #[arg(long)]
    pub(super) list: bool,
}

impl ReproduceArgs {
    /// Returns the experiments to measure, each once, in the order of [`ALL`].
    pub(super) fn chosen(&self) -> Vec<&'static Experiment> {
        let is_chosen = |one: &&Experiment| {
            self.experiments.is_empty() || self.experiments.iter().any(|chosen| chosen.name == one.name)
        };
        ALL.iter().filter(is_chosen).collect()
    }
}

fn word(one: &Experiment) -> PossibleValue {
    PossibleValue::new(one.name).help(one.about)
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected a number of seconds from 0.01 to 3600".into()),
    }
}
