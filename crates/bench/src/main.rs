//! The `mqblk-bench` program. `mqblk` becomes this one for `mqblk bench`, `mqblk reproduce` and `mqblk plot`. It is
//! also `mqblk` with simulated machines of Xen, to serve the disks of a benchmark.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use mqblk_bench::plot::PlotArgs;
use mqblk_bench::reproduce::ReproduceArgs;
use mqblk_bench::{ARRANGEMENTS, BenchArgs};
use mqblk_cli::generate::{self, GenerateArgs};
use mqblk_cli::help::{self, HelpStyle};
use mqblk_cli::logging::{self, LogOptions};
use mqblk_daemon::interfaces::{INTERFACES, xen::selector};

const NAME: &str = "mqblk-bench";

/// Measures disks of virtual machines, and draws the results.
#[derive(Debug, Parser)]
#[command(
    name = NAME,
    display_name = "mqblk",
    bin_name = "mqblk",
    version,
    arg_required_else_help = true,
    max_term_width = 120,
    after_long_help = include_str!("help.txt"),
    after_help = "All options and examples of a command: mqblk COMMAND --help"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    log: LogOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Load a disk through the userspace driver and measure it
    Bench(Box<BenchArgs>),

    /// Measure published experiments, and compare the ratios
    Reproduce(ReproduceArgs),

    /// Draw the results of benchmarks
    Plot(PlotArgs),

    /// Write man pages and completions of shells
    #[command(hide = true)]
    Generate(GenerateArgs),

    /// A command of mqblk
    #[command(external_subcommand)]
    OfDaemon(#[expect(dead_code, reason = "the command line is parsed again as a whole")] Vec<OsString>),
}

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let command = help::arrange(Cli::command(), HelpStyle::of(&arguments), ARRANGEMENTS);
    let mut matches = command.clone().get_matches_from(&arguments);
    let cli = Cli::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| error.exit());
    if let Command::OfDaemon(_) = cli.command {
        selector::provide_simulated(mqblk_xen_simulation::connect_dom0);
        return mqblk_cli::run(INTERFACES);
    }
    if let Err(error) = logging::start(&cli.log) {
        return mqblk_bench::fail("log", &error.to_string(), 2);
    }
    match cli.command {
        Command::Bench(args) => mqblk_bench::run(&args),
        Command::Reproduce(args) => mqblk_bench::reproduce::run(&args),
        Command::Plot(args) => mqblk_bench::plot::run(&args),
        // Its pages are those of its commands.
        Command::Generate(args) => generate::run(&args, command, &[NAME]),
        Command::OfDaemon(_) => unreachable!("it was run above"),
    }
}
