//! The command line of the `mqblk` program: parses it and runs a subcommand. The guest interfaces are a parameter.
//!
//! The parts shared with `mqblk-bench` are public: help, man pages, the log, and the search for the other program.
#![forbid(unsafe_code)]

mod admin_socket;
mod broker;
mod call;
mod config;
mod controller;
mod disk;
mod explain;
mod failure;
pub mod generate;
pub mod help;
mod limit_group;
mod log;
pub mod logging;
mod lun;
pub mod program;
mod queue;
mod resize;
mod resume;
mod serve;
mod stat;
mod table;
mod top;
mod vhost_user;
mod worker;
mod xen;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use mqblk_daemon::interface::Interfaces;

use help::{Arrangement, HelpStyle};
use program::ForeignArgs;

/// Serves disks to virtual machines over many queues.
#[derive(Debug, Parser)]
#[command(name = "mqblk", version, arg_required_else_help = true, max_term_width = 120, after_help = "All options and examples of a command: mqblk COMMAND --help", after_long_help = include_str!("help.txt"))]
struct Cli {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    log: logging::LogOptions,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve images and block devices to guests, by vhost-user and Xen
    Serve(Box<serve::ServeArgs>),

    /// Load a disk through the userspace driver and measure it
    Bench(ForeignArgs),

    /// Measure published experiments, and compare the ratios
    Reproduce(ForeignArgs),

    /// Draw the results of benchmarks
    Plot(ForeignArgs),

    /// Show what a running daemon does: requests, latencies, CPU
    Stat(stat::StatArgs),

    /// Show it on a whole terminal: disks, queues, workers, and reasons for latency
    Top(top::TopArgs),

    /// Say in sentences what limits a disk now
    Explain(explain::ExplainArgs),

    /// Give a disk or LUN of a running daemon another size
    Resize(resize::ResizeArgs),

    /// Add, remove, resize and list the LUNs of a running daemon
    Lun(lun::LunArgs),

    /// Add, change, remove and list the disks of a running daemon
    Disk(disk::DiskArgs),

    /// Add, change, remove and list the controllers of a running daemon
    Controller(controller::ControllerArgs),

    /// Show which worker serves which queue, and move queues
    Queue(queue::QueueArgs),

    /// Add and remove workers of a running daemon, and list them
    Worker(worker::WorkerArgs),

    /// Compare a daemon with its configuration file, and apply changes
    Config(config::ConfigArgs),

    /// Show the level of a running daemon's log, or change it
    Log(log::LogArgs),

    /// Show and change the limits that disks of a running daemon share
    LimitGroup(limit_group::LimitGroupArgs),

    /// Resume a stopped disk of a running daemon
    Resume(resume::ResumeArgs),

    /// Attach, detach, resize and list disks of Xen guests
    Xen(xen::XenArgs),

    /// Serve one file by the vhost-user program conventions
    VhostUser(vhost_user::VhostUserArgs),

    /// Write man pages and completions of shells
    #[command(hide = true)]
    Generate(generate::GenerateArgs),

    /// Open images for a daemon in the sandbox, which starts this itself
    #[command(hide = true)]
    Broker,
}

const ARRANGEMENTS: &[Arrangement] = &[Arrangement {
    command: "serve",
    short: &[
        ("disks", "A disk: path=FILE,socket=PATH,queues=N"),
        ("controller", "A virtio-scsi controller: id=ID,socket=PATH"),
        ("lun", "A LUN: controller=ID,path=FILE"),
        ("config", "A TOML file with the same keys"),
        ("workers", "Worker threads"),
        ("pin", "The CPU of each worker: 0-3,8"),
        ("admin", "Make an admin socket for mqblk stat"),
        ("state", "Save changes at run time there"),
        ("sandbox", "Give up unneeded rights before serving"),
        ("user", "Become this user before serving"),
        ("xen-watch", "Serve the disks of Xen guests"),
        ("print_config", "Print the configuration, and exit"),
    ],
    groups: &[("Information", &["check", "print_config", "print_capabilities"])],
}];

/// Returns the options of a program with these guest interfaces.
fn command(interfaces: Interfaces, style: HelpStyle) -> clap::Command {
    let command = Cli::command().mut_subcommand("serve", |serve| serve::add_keys(serve, interfaces));
    help::arrange(command, style, ARRANGEMENTS)
}

/// Parses the command line of a program with these guest interfaces, and runs it.
pub fn run(interfaces: Interfaces) -> ExitCode {
    let arguments = vhost_user::with_word(std::env::args_os());
    let command = command(interfaces, HelpStyle::of(&arguments));
    let mut matches = command.clone().get_matches_from(&arguments);
    let given = serve::KeyOptions::of(matches.subcommand_matches("serve"), interfaces);
    let cli = Cli::from_arg_matches_mut(&mut matches).unwrap_or_else(|error| error.exit());
    let log = match logging::start(&cli.log) {
        Ok(log) => log,
        Err(error) => return failure::report(&error, failure::BAD_USAGE),
    };
    match cli.command {
        Command::Serve(args) => serve::run(*args, given, interfaces, log),
        Command::Bench(args) => args.run("bench", &arguments),
        Command::Reproduce(args) => args.run("reproduce", &arguments),
        Command::Plot(args) => args.run("plot", &arguments),
        Command::Stat(args) => stat::run(args),
        Command::Top(args) => top::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Resize(args) => resize::run(args),
        Command::Lun(args) => lun::run(args),
        Command::Disk(args) => disk::run(args),
        Command::Controller(args) => controller::run(args),
        Command::Queue(args) => queue::run(args),
        Command::Worker(args) => worker::run(args),
        Command::Config(args) => config::run(args),
        Command::Log(args) => log::run(args),
        Command::LimitGroup(args) => limit_group::run(args),
        Command::Resume(args) => resume::run(args),
        Command::Xen(args) => xen::run(args),
        Command::VhostUser(args) => serve::run_conventional(&args, interfaces, log),
        Command::Generate(args) => generate::run(&args, command, &program::WORDS),
        Command::Broker => broker::run(),
    }
}
