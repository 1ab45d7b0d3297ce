//! Layout of help: `-h` is one screen; `--help` has everything, examples first and options in groups.
//!
//! The options and their texts are defined where they are parsed, those of keys with their headings in the table of
//! keys. An [`Arrangement`] selects the options on the screen of `-h`, with texts of one line each, and the group of
//! each option.

use std::ffi::OsString;

use clap::Command;

/// As clap's own, with the text before the help below the usage: examples appear there, after the command's name.
const TEMPLATE: &str = "{about-with-newline}\n{usage-heading} {usage}\n\n{before-help}{all-args}{after-help}";

/// The line before examples.
const EXAMPLES: &str = "Examples:";

/// A subcommand with many options.
#[derive(Debug)]
pub struct Arrangement {
    /// Its name.
    pub command: &'static str,
    /// The options of `-h`, each with its text there.
    pub short: &'static [(&'static str, &'static str)],
    /// The groups of `--help`: a heading, and its options. Others are below "Options".
    pub groups: &'static [(&'static str, &'static [&'static str])],
}

/// The requested help. The styles differ where clap cannot: groups, and possible values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelpStyle {
    /// That of `-h`.
    Short,
    /// That of `--help`, of man pages and completions.
    Long,
}

impl HelpStyle {
    /// Returns the style that a command line requests.
    pub fn of(arguments: &[OsString]) -> HelpStyle {
        if arguments.iter().any(|argument| argument == "-h") { HelpStyle::Short } else { HelpStyle::Long }
    }
}

/// Arranges the help of a command and its subcommands.
pub fn arrange(command: Command, style: HelpStyle, all: &[Arrangement]) -> Command {
    let command = command.mut_subcommands(|subcommand| arrange(arrange_options(subcommand, style, all), style, all));
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

fn arrange_options(mut command: Command, style: HelpStyle, all: &[Arrangement]) -> Command {
    let name = command.get_name().to_owned();
    let Some(Arrangement { short, groups, .. }) = all.iter().find(|one| one.command == name) else {
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
