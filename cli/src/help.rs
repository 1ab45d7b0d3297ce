//! How help looks: `-h` is one screen, `--help` has everything, its examples first and its options in groups.
//!
//! The options and their texts are where they are parsed, those of keys with their headings in the table of keys. Here is which of many are on the screen of `-h`, with words short enough for a line
//! each, and which group an option is in.

use std::ffi::OsString;

use clap::Command;

/// As clap's own, with what comes before the help below the usage: there examples are seen, and one knows of what.
const TEMPLATE: &str = "{about-with-newline}\n{usage-heading} {usage}\n\n{before-help}{all-args}{after-help}";

/// What a line says that is followed by examples.
const EXAMPLES: &str = "Examples:";

/// A subcommand with many options.
struct Arrangement {
    command: &'static str,
    /// The options of `-h`, each with its text there.
    short: &'static [(&'static str, &'static str)],
    /// The groups of `--help`: a heading, and its options. Others are below "Options".
    groups: &'static [(&'static str, &'static [&'static str])],
}

const ARRANGEMENTS: &[Arrangement] = &[
    Arrangement {
        command: "serve",
        short: &[
            ("disks", "A disk: path=FILE,socket=PATH,queues=N"),
            ("controller", "A virtio-scsi controller: id=ID,socket=PATH"),
            ("lun", "A LUN: controller=ID,path=FILE"),
            ("config", "A TOML file with the same keys"),
            ("workers", "Worker threads"),
            ("pin", "The CPU of each worker: 0-3,8"),
            ("admin", "Make an admin socket for mqblk stat"),
            ("state", "Keep what is changed at run time there"),
            ("sandbox", "Give up what the daemon does not need"),
            ("user", "Become this user before serving"),
            ("xen-watch", "Serve the disks of Xen guests"),
            ("print_config", "Print the configuration, and exit"),
        ],
        groups: &[("Information", &["check", "print_config", "print_capabilities"])],
    },
    Arrangement {
        command: "bench",
        short: &[
            ("socket", "Socket of a vhost-user server; repeatable"),
            ("disk", "Disk to serve for each run; repeatable"),
            ("rw", "randread, randwrite, read, write, trim, ..."),
            ("bs", "Bytes of an I/O: 4k, or 512-4M for many"),
            ("iodepth", "I/Os in flight of each job"),
            ("queues", "Queues to use"),
            ("jobs", "Jobs [default: one for each queue]"),
            ("runtime", "Time to measure: 30, 500ms, 2m [default: 5]"),
            ("runs", "Runs of each combination [default: 3]"),
            ("size", "Length of the range to work on"),
            ("verify", "crc32c: write and check blocks"),
            ("allow_write", "Let writes destroy what is on the disk"),
            ("experiment", "block-size, polling, targets, ..."),
            ("json", "Write the results to this file; -: stdout"),
        ],
        groups: &[
            (
                "Load",
                &[
                    "rw",
                    "rwmixread",
                    "random_distribution",
                    "fsync",
                    "bs",
                    "bsrange",
                    "iodepth",
                    "queues",
                    "jobs",
                    "threads",
                    "batch",
                    "rate_iops",
                    "client",
                    "pin",
                ],
            ),
            ("Virtqueues", &["queue_size", "descriptors", "packed"]),
            ("Range and data", &["offset", "size", "offset_increment", "verify", "fill", "allow_write"]),
            ("Runs", &["experiment", "runtime", "time_based", "runs", "warmup", "seed"]),
            ("The server of --disk", &["poll", "server_cpus", "grants", "grants_pool"]),
            ("virtio-scsi", &["targets", "luns", "steer"]),
            ("Xen", &["xen", "vdev", "ring_order", "indirect_segments", "abi"]),
        ],
    },
    Arrangement {
        command: "reproduce",
        short: &[
            ("experiments", "xen-queues, polling, ... [default: all]"),
            ("quick", "All in less than 3 minutes"),
            ("out", "Folder of the results"),
            ("folder", "A folder on the disk to measure"),
            ("report", "Write a page with all of it"),
            ("json", "Write it as JSON; - for standard output"),
            ("runs", "Runs of each row"),
            ("runtime", "Seconds of each run"),
            ("list", "List the experiments"),
        ],
        groups: &[],
    },
    Arrangement {
        command: "plot",
        short: &[
            ("results", "Files that mqblk bench --json wrote"),
            ("output", "Picture to write: .svg or .png"),
            ("x", "What goes to the right: bs, queues, ..."),
            ("y", "What goes up: iops, bandwidth, latency, ..."),
            ("panels", "A panel for each value of this key"),
            ("only", "Draw only rows with these values"),
            ("title", "Title"),
        ],
        groups: &[],
    },
];

/// What help is asked for. They differ in what clap cannot say for one of them alone: groups, and values that are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelpStyle {
    /// That of `-h`.
    Short,
    /// That of `--help`, of man pages and completions.
    Long,
}

impl HelpStyle {
    /// Returns the one that a command line asks for.
    pub(crate) fn of(arguments: &[OsString]) -> HelpStyle {
        if arguments.iter().any(|argument| argument == "-h") { HelpStyle::Short } else { HelpStyle::Long }
    }
}

/// Arranges the help of a command and its subcommands.
pub(crate) fn arrange(command: Command, style: HelpStyle) -> Command {
    let command = command.mut_subcommands(|subcommand| arrange(arrange_options(subcommand, style), style));
    let command = command.help_template(TEMPLATE);
    let text = command.get_after_long_help().or_else(|| command.get_after_help()).map(ToString::to_string);
    let Some(text) = text else { return command };
    let (examples, rest) = split(&text);
    let has_short = command.get_after_long_help().is_some();
    let short = command.get_after_help().filter(|_| has_short).cloned();
    let short =
        short.unwrap_or_else(|| format!("All options, and examples: mqblk {} --help", command.get_name()).into());
    let command = command.after_long_help(rest).after_help(short);
    if examples.is_empty() { command } else { command.before_long_help(examples) }
}

fn arrange_options(mut command: Command, style: HelpStyle) -> Command {
    let name = command.get_name().to_owned();
    let Some(Arrangement { short, groups, .. }) = ARRANGEMENTS.iter().find(|one| one.command == name) else {
        return command;
    };
    if style == HelpStyle::Short {
        let ids: Vec<_> = command.get_arguments().map(|option| option.get_id().to_string()).collect();
        for id in &ids {
            let text = short.iter().find(|(shown, _)| shown == id).map(|(_, text)| *text);
            command = command.mut_arg(id, |option| match text {
                None => option.hide_short_help(true),
                Some(text) => {
                    let takes_values = option.get_action().takes_values();
                    option.help(text).help_heading(None::<&str>).hide_possible_values(takes_values)
                }
            });
        }
        return command;
    }
    for (heading, members) in *groups {
        for id in *members {
            command = command.mut_arg(id, |option| option.help_heading(*heading));
        }
    }
    command
}

/// Splits a text into its examples, with their heading, and the rest.
fn split(text: &str) -> (String, String) {
    let mut parts = (Vec::new(), Vec::new());
    let mut is_example = false;
    for line in text.lines() {
        is_example = match line {
            EXAMPLES => true,
            line => is_example && (line.is_empty() || line.starts_with(' ')),
        };
        let part = if is_example { &mut parts.0 } else { &mut parts.1 };
        part.push(line);
    }
    (parts.0.join("\n").trim_end().to_owned(), parts.1.join("\n").trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_end_where_text_begins() {
        let text = "Does it.\n\nExamples:\n\n  mqblk a\n      explained\n  mqblk b\n\nExit code: 0\n";
        let (examples, rest) = split(text);
        assert_eq!(examples, "Examples:\n\n  mqblk a\n      explained\n  mqblk b");
        assert_eq!(rest, "Does it.\n\nExit code: 0");
        assert_eq!(split("nothing"), (String::new(), "nothing".to_owned()));
    }
}
