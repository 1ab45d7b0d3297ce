//! Command lines of `mqblk bench`. Everything is measured by one, so that a reader can repeat any row.

use std::fmt;

use clap::Parser;

use crate::BenchError;
use crate::args::BenchArgs;
use crate::plan::Plan;

/// The options of a command line of `mqblk bench`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BenchCommand {
    options: Vec<String>,
}

#[derive(Debug, Parser)]
#[command(name = "bench", no_binary_name = true)]
struct BenchOptions {
    #[command(flatten)]
    args: BenchArgs,
}

impl BenchCommand {
    /// Creates a command of options that hold no spaces, separated by spaces.
    pub(crate) fn new(options: &str) -> BenchCommand {
        BenchCommand { options: options.split_ascii_whitespace().map(str::to_owned).collect() }
    }

    /// Adds an option, and a value that may hold anything.
    pub(crate) fn with(mut self, option: &str, value: impl Into<String>) -> BenchCommand {
        self.options.extend([option.to_owned(), value.into()]);
        self
    }

    /// Returns what the command measures, checked as the benchmark checks it.
    ///
    /// # Errors
    /// [`BenchError::Usage`], with the command.
    pub(crate) fn plan(&self) -> Result<Plan, BenchError> {
        let wrong = |why: &dyn fmt::Display| BenchError::Usage(format!("{self}: {why}"));
        let args = parse_options(&self.options).map_err(|error| wrong(&error))?;
        Plan::new(&args).map_err(|error| wrong(&error))
    }
}

/// Parses options of `mqblk bench`.
///
/// # Errors
/// As a user sees them.
pub(crate) fn parse_options(options: &[impl AsRef<str>]) -> Result<BenchArgs, clap::Error> {
    BenchOptions::try_parse_from(options.iter().map(AsRef::as_ref)).map(|options| options.args)
}

impl fmt::Display for BenchCommand {
    /// Writes the command as a shell takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mqblk bench")?;
        self.options.iter().try_for_each(|option| write!(f, " {}", shell_word(option)))
    }
}

/// Returns a word as a shell reads it: in single quotes if anything in it may mean something.
pub(crate) fn shell_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=,.:/+%@".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_printed_as_a_shell_takes_it() {
        let command = BenchCommand::new("--rw read --bs 512-4M").with("--disk", "path=/srv/it's here.img");
        assert_eq!(command.to_string(), r"mqblk bench --rw read --bs 512-4M --disk 'path=/srv/it'\''s here.img'");
        assert_eq!((shell_word(""), shell_word("a=b,c")), ("''".into(), "a=b,c".into()));
    }

    #[test]
    fn a_plan_is_what_the_benchmark_makes_of_it() {
        let plan = BenchCommand::new("--disk storage=null,size=1G --queues 1,2 --runs 2").plan().unwrap();
        assert_eq!((plan.combinations.len(), plan.runs), (2, 2));
        let error = BenchCommand::new("--disk storage=null,size=1G --bs 5").plan().unwrap_err().to_string();
        assert!(error.starts_with("mqblk bench --disk storage=null,size=1G --bs 5: --bs: found 5"), "{error}");
        assert!(BenchCommand::new("--wrong").plan().is_err());
    }
}
