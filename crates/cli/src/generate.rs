//! `mqblk generate`, `mqblk-bench generate`: man pages and shell completions, made from the options themselves. For
//! packages.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use crate::failure::{self, FAILED};

/// The shells that completions are made for.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// The options of `generate`.
#[derive(Debug, clap::Args)]
pub struct GenerateArgs {
    /// Files to write
    #[arg(value_enum)]
    what: Output,

    /// The folder to write to
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Output {
    /// Man pages: a file for each subcommand
    Man,
    /// Completions: for bash, zsh and fish
    Completions,
}

/// Writes the files of a program's command; `foreign` are commands with pages in another program. Exit code 1 if they
/// cannot be written.
pub fn run(args: &GenerateArgs, command: Command, foreign: &[&str]) -> ExitCode {
    let written = match args.what {
        Output::Man => write_man_pages(command, &args.folder, foreign),
        Output::Completions => write_completions(command, &args.folder),
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&format!("generate: {:?}: {error}", args.folder), FAILED),
    }
}

fn write_completions(mut command: Command, folder: &Path) -> io::Result<()> {
    let name = command.get_name().to_owned();
    for shell in SHELLS {
        let path = clap_complete::generate_to(shell, &mut command, &name, folder)?;
        if shell == Shell::Bash && name.contains('-') {
            // clap_complete 4.6 takes a hyphen in the program's name for the beginning of a subcommand where it
            // answers, but not where it asks.
            let (asked, answered) = (name.replace('-', "__"), name.replace('-', "__subcmd__"));
            let script = std::fs::read_to_string(&path)?;
            let script = script.replace(&format!("{answered}__subcmd__"), &format!("{asked}__subcmd__"));
            std::fs::write(&path, script)?;
        }
    }
    Ok(())
}

fn write_man_pages(command: Command, folder: &Path, foreign: &[&str]) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_pages(&command, folder, foreign)
}

fn write_pages(command: &Command, folder: &Path, foreign: &[&str]) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        write_pages(subcommand, folder, foreign)?;
    }
    if foreign.contains(&command.get_name()) {
        return Ok(());
    }
    let version = format!("mqblk {}", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).source(version).manual("mqblk");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    write_section("EXAMPLES", command.get_before_long_help(), &mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    write_section("NOTES", command.get_after_long_help(), &mut page)?;
    std::fs::write(folder.join(man.get_filename()), page)
}

/// Writes a text unchanged: its lines and tables are made for 80 columns.
fn write_section(heading: &str, text: Option<&clap::builder::StyledStr>, page: &mut Vec<u8>) -> io::Result<()> {
    let text = text.map(ToString::to_string).unwrap_or_default();
    if text.trim().is_empty() {
        return Ok(());
    }
    let mut section = Roff::new();
    section.control("SH", [heading]);
    section.control("nf", []);
    for line in text.lines().skip_while(|line| line.is_empty() || *line == "Examples:") {
        section.text([roman(line)]);
    }
    section.control("fi", []);
    section.to_writer(page)
}
