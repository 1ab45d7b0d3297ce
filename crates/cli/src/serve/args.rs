//! The options of `mqblk serve`. Options for configuration keys are generated from the table of keys.

use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args as _, Command, FromArgMatches as _};
use mqblk_core::settings::Key;
use mqblk_daemon::interface::{ConfigTable, Interfaces};
use mqblk_daemon::keys::{PROCESS_GROUPS, process_keys};

use super::keys;

/// The `display_order` of the tables of interfaces, after --disk, and of keys. The numbers are small because that of
/// --log, which all subcommands have, is 8.
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

    /// A TOML file with the same keys: a table `[[disk]]`, `[[limit-group]]`, `[[controller]]` or `[[controller.lun]]`
    /// for each option; workers, pin, admin, state at the top
    ///
    /// Its disks, controllers and LUNs come before those of the command line; --workers, --pin and --admin override
    /// its own.
    #[arg(long, value_name = "FILE.toml", display_order = 3)]
    pub config: Option<PathBuf>,

    /// Take over from the daemon at this admin socket, with all guests that it serves: they notice nothing, and it
    /// ends. Without PATH it is the one that --admin without PATH makes
    ///
    /// The configuration is that of the running daemon; only the program, and what no guest depends on, may be new. If
    /// this daemon cannot start, the other one goes on.
    #[arg(long, value_name = "PATH", num_args = 0..=1, display_order = 9)]
    pub takeover: Option<Option<PathBuf>>,

    /// With --takeover: serve in the background, and return when the takeover has ended: for ExecReload= of a systemd
    /// unit
    #[arg(long, requires = "takeover", display_order = 9)]
    pub background: bool,

    /// Open all storage, say what would be out, and exit: with 1 if a disk could not be served
    #[arg(long, display_order = 60)]
    pub check: bool,

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

/// The values of the options for keys.
#[derive(Debug, Default)]
pub(crate) struct KeyOptions {
    /// The top-level keys with their values.
    pub process: Vec<(&'static str, String)>,
    /// The tables: the index of the interface, the name, and the text of each option in order.
    pub tables: Vec<(usize, &'static str, Vec<String>)>,
    /// The options of the vhost-user program conventions.
    pub conventions: Option<ConventionArgs>,
}

/// Adds the options for keys, and the help on all keys, to `mqblk serve`.
pub(crate) fn add_keys(mut serve: Command, interfaces: Interfaces) -> Command {
    for (number, (_, table)) in all_tables(interfaces).into_iter().enumerate() {
        let option = Arg::new(table.name).long(table.name).value_name(table.value_name).help(table.about);
        serve = serve.arg(option.action(ArgAction::Append).display_order(TABLES_ORDER + number));
    }
    let own = PROCESS_GROUPS.iter().flat_map(|(heading, keys)| keys.iter().map(|key| (*key, Some(*heading))));
    let headed = interfaces.0.iter().map(|interface| (interface.process_keys(), Some(interface.word())));
    let of_interfaces = headed.flat_map(|(keys, heading)| keys.iter().map(move |key| (*key, heading)));
    for (number, (key, heading)) in own.chain(of_interfaces).enumerate() {
        serve = serve.arg(keys::option_of(key, heading).display_order(KEYS_ORDER + number));
    }
    ConventionArgs::augment_args(serve).after_long_help(keys::help(interfaces) + include_str!("examples_help.txt"))
}

/// Returns the tables of all interfaces, outer ones before those inside them.
fn all_tables(interfaces: Interfaces) -> Vec<(usize, &'static ConfigTable)> {
    let with_inner = |(index, table): (usize, &'static ConfigTable)| {
        std::iter::once((index, table)).chain(table.inner.iter().map(move |inner| (index, inner)))
    };
    interfaces.tables().flat_map(with_inner).collect()
}

impl KeyOptions {
    /// Returns the options of a parsed command line; `matches` are the subcommand's, if it is `serve`.
    pub(crate) fn of(matches: Option<&ArgMatches>, interfaces: Interfaces) -> KeyOptions {
        let Some(matches) = matches else { return KeyOptions::default() };
        let given = |key: &'static Key| {
            let values: Vec<_> = matches.get_many::<String>(key.name)?.map(String::as_str).collect();
            Some((key.name, values.join(":")))
        };
        let texts = |name| matches.get_many::<String>(name).map(|texts| texts.cloned().collect()).unwrap_or_default();
        let tables = all_tables(interfaces).into_iter().map(|(index, table)| (index, table.name, texts(table.name)));
        KeyOptions {
            process: process_keys(interfaces).filter_map(given).collect(),
            tables: tables.collect(),
            conventions: ConventionArgs::from_arg_matches(matches).ok(),
        }
    }
}
