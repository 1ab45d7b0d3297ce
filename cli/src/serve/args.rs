//! The options of `mqblk serve`: those of the daemon, and those of its guest interfaces.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args as _, Command, FromArgMatches as _};
use mqblk_daemon::interface::{ConfigTable, Interfaces, ProcessKey};

/// The `display_order` of the tables and of the keys of interfaces: after --disk, and after --drain-timeout-s. The numbers are small because
/// that of --log, which all subcommands have, is 8.
const TABLES_ORDER: usize = 1;
const KEYS_ORDER: usize = 10;

/// The options of `mqblk serve`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Keys of --disk, --controller and --lun, and examples: mqblk serve --help")]
pub(crate) struct ServeArgs {
    /// A disk to serve; may be repeated
    #[arg(long = "disk", value_name = "KEY=VALUE,...", display_order = 0)]
    pub disks: Vec<String>,

    /// Limits that all disks with limit-group=NAME share: name=NAME and the keys of limits; may be repeated
    #[arg(long = "limit-group", value_name = "name=NAME,KEY=VALUE,...", display_order = 2)]
    pub limit_groups: Vec<String>,

    /// A TOML file with the same keys: [[disk]], [[limit-group]], [[controller]] and [[controller.lun]] tables; workers, pin, admin, state at the top
    ///
    /// Its disks, controllers and LUNs come before those of the command line; --workers, --pin and --admin override its own.
    #[arg(long, value_name = "FILE.toml", display_order = 3)]
    pub config: Option<PathBuf>,

    /// Worker threads, 1 to 256 [default: the number of CPUs or of all queues, whichever is smaller]
    #[arg(long, value_name = "N", display_order = 4)]
    pub workers: Option<String>,

    /// The CPU of each worker, in order, such as 0-3,8 [default: not pinned]
    #[arg(long, value_name = "CPU,...", display_order = 5)]
    pub pin: Option<String>,

    /// Warn in the log of a request that the storage has not ended after S seconds; 0: never [default: 10]
    #[arg(long, value_name = "S", display_order = 6)]
    pub hang_warning_s: Option<String>,

    /// Make an admin socket for `mqblk stat` and others; without PATH where they look [default: none]
    ///
    /// JSON-RPC, one message a line. Without PATH it is $MQBLK_ADMIN, else /run/mqblk/admin.sock for root and
    /// $XDG_RUNTIME_DIR/mqblk/admin.sock for others. fd:NAME: the socket of that name that systemd has made.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "on", display_order = 7)]
    pub admin: Option<String>,

    /// The admin socket's permissions, octal [default: 0600]
    #[arg(long, value_name = "BITS", display_order = 8)]
    pub admin_mode: Option<String>,

    /// Keep what is added and removed while the daemon runs in this file, for the next start [default: it is lost]
    ///
    /// Made when it is not there. What does not go together with the configuration is left out, with a warning.
    #[arg(long, value_name = "FILE", display_order = 9)]
    pub state: Option<String>,

    /// The admin socket's owner [default: the user of the daemon]
    #[arg(long, value_name = "NAME|UID", display_order = 8)]
    pub admin_owner: Option<String>,

    /// The admin socket's group [default: that of the daemon]
    #[arg(long, value_name = "NAME|GID", display_order = 8)]
    pub admin_group: Option<String>,

    /// Serve metrics there over HTTP, for Prometheus and others: at IP:PORT, or at unix:PATH; without authentication [default: none]
    #[arg(long, value_name = "IP:PORT|unix:PATH", display_order = 9)]
    pub metrics: Option<String>,

    /// The permissions of the Unix socket for metrics, octal [default: 0600]
    #[arg(long, value_name = "BITS", display_order = 9)]
    pub metrics_mode: Option<String>,

    /// How long a stop waits for storage, 1 to 3600 seconds; then requests stay for whoever serves the queues next [default: 30]
    #[arg(long, value_name = "SECONDS", display_order = 9)]
    pub drain_timeout_s: Option<String>,

    /// Take over from the daemon at this admin socket, with all guests that it serves: they notice nothing, and it ends. Without PATH it is the
    /// one that --admin without PATH makes
    ///
    /// The configuration is that of the running daemon; only the program, and what no guest depends on, may be new. If this daemon cannot start,
    /// the other one goes on.
    #[arg(long, value_name = "PATH", num_args = 0..=1, display_order = 9)]
    pub takeover: Option<Option<PathBuf>>,

    /// With --takeover: serve in the background, and return when the takeover has ended: for ExecReload= of a systemd unit
    #[arg(long, requires = "takeover", display_order = 9)]
    pub background: bool,

    /// Serve nothing if a disk cannot be served
    ///
    /// Without it the other disks are served, and this one is tried again: `mqblk disk list` and the log say why it is out.
    #[arg(long, display_order = 10)]
    pub strict: bool,

    /// Open all storage, say what would be out, and exit: with 1 if a disk could not be served
    #[arg(long, display_order = 60)]
    pub check: bool,

    /// Give up before serving what the daemon does not need: system calls, capabilities, files that the configuration does not name. log:
    /// only log the system calls [default: off]
    #[arg(long, value_name = "on|off|log", display_order = 50)]
    pub sandbox: Option<String>,

    /// With --sandbox: images at and beneath PATH may be opened while the daemon runs, for disks that are added; may be repeated
    #[arg(long, value_name = "PATH", display_order = 51)]
    pub sandbox_allow: Vec<String>,

    /// Become this user when the disks are open; needs a start as root [default: stay the user that starts the daemon]
    #[arg(long, value_name = "NAME|UID", display_order = 52)]
    pub user: Option<String>,

    /// With --user: the group [default: that of the user]
    #[arg(long, value_name = "NAME|GID", display_order = 53)]
    pub group: Option<String>,

    /// Print the configuration with every default filled in, as TOML for --config, and exit
    #[arg(long, display_order = 60)]
    pub print_config: bool,

    /// Print what this vhost-user program can do, as JSON, and exit
    #[arg(long, display_order = 61)]
    pub print_capabilities: bool,
}

// The options of the vhost-user program conventions. A doc comment would become the subcommand's description.
#[derive(Debug, clap::Args)]
pub(crate) struct ConventionArgs {
    /// Serve one file, in the words of the vhost-user program conventions: the socket
    #[arg(long, value_name = "PATH", requires = "blk_file", help_heading = "vhost-user program conventions")]
    pub socket_path: Option<String>,

    /// Serve one file, in the words of the vhost-user program conventions: the file
    #[arg(long, value_name = "PATH", requires = "socket_path", help_heading = "vhost-user program conventions")]
    pub blk_file: Option<String>,

    /// The file of --blk-file is served read-only
    #[arg(long, requires = "blk_file", help_heading = "vhost-user program conventions")]
    pub read_only: bool,
}

/// The values of the options that belong to interfaces.
#[derive(Debug, Default)]
pub(crate) struct InterfaceOptions {
    /// The top-level keys with their values.
    pub process: Vec<(&'static str, String)>,
    /// The tables: the index of the interface, the name, and the text of each option in order.
    pub tables: Vec<(usize, &'static str, Vec<String>)>,
    /// The options of the vhost-user program conventions.
    pub conventions: Option<ConventionArgs>,
}

/// Adds the options of interfaces and the help on their keys to `mqblk serve`.
pub(crate) fn add_interfaces(serve: Command, interfaces: Interfaces) -> Command {
    let mut help = include_str!("disk_help.txt").to_owned();
    interfaces.0.iter().for_each(|interface| help.push_str(interface.disk_help()));
    let mut serve = serve;
    for (number, (_, table)) in all_tables(interfaces).into_iter().enumerate() {
        help.push_str(table.help);
        let option = Arg::new(table.name).long(table.name).value_name(table.value_name).help(table.about);
        serve = serve.arg(option.action(ArgAction::Append).display_order(TABLES_ORDER + number));
    }
    for (number, key) in interfaces.process_keys().enumerate() {
        serve = serve.arg(process_option(key).display_order(KEYS_ORDER + number));
    }
    help.push_str(include_str!("examples_help.txt"));
    ConventionArgs::augment_args(serve).after_long_help(help)
}

/// Returns the tables of all interfaces, outer ones before those inside them.
fn all_tables(interfaces: Interfaces) -> Vec<(usize, &'static ConfigTable)> {
    let with_inner = |(index, table): (usize, &'static ConfigTable)| {
        std::iter::once((index, table)).chain(table.inner.iter().map(move |inner| (index, inner)))
    };
    interfaces.tables().flat_map(with_inner).collect()
}

fn process_option(key: &'static ProcessKey) -> Arg {
    let mut option = Arg::new(key.key).long(key.key).value_name(key.value_name).help(key.about);
    if !key.more.is_empty() {
        option = option.long_help(format!("{}\n\n{}", key.about, key.more));
    }
    if let Some(value) = key.value_if_omitted {
        option = option.num_args(0..=1).default_missing_value(value);
    }
    if let Some(heading) = key.heading {
        option = option.help_heading(heading);
    }
    option
}

impl InterfaceOptions {
    /// Returns those of a parsed command line; `matches` are the subcommand's, if it is `serve`.
    pub(crate) fn of(matches: Option<&ArgMatches>, interfaces: Interfaces) -> InterfaceOptions {
        let Some(matches) = matches else { return InterfaceOptions::default() };
        let process = interfaces.process_keys().filter_map(|key| Some((key.key, matches.get_one::<String>(key.key)?)));
        let texts = |name| matches.get_many::<String>(name).map(|texts| texts.cloned().collect()).unwrap_or_default();
        let tables = all_tables(interfaces).into_iter().map(|(index, table)| (index, table.name, texts(table.name)));
        InterfaceOptions {
            process: process.map(|(key, value)| (key, value.clone())).collect(),
            tables: tables.collect(),
            conventions: ConventionArgs::from_arg_matches(matches).ok(),
        }
    }
}
