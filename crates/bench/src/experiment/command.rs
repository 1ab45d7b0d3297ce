//! Command lines of `mqblk bench`. Each measurement has one, so that a reader can repeat any row.

use std::fmt;

/// Stands for a file in the options of an experiment.
pub(super) const IMAGE: &str = "IMAGE";

/// The options of a command line of `mqblk bench`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BenchCommand {
    pub options: Vec<String>,
}

impl BenchCommand {
    /// Creates a command of space-separated options. [`IMAGE`] becomes `image`, which may have
    /// spaces.
    pub(crate) fn new(options: &str, image: &str) -> BenchCommand {
        let options = options.split_ascii_whitespace().map(|word| word.replace(IMAGE, image));
        BenchCommand { options: options.collect() }
    }
}

impl fmt::Display for BenchCommand {
    /// Writes the command as a shell takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mqblk bench")?;
        self.options.iter().try_for_each(|option| write!(f, " {}", shell_word(option)))
    }
}

/// Returns a word as a shell reads it: in single quotes unless all its characters are plain.
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
        let command = BenchCommand::new("--rw read --bs 512-4M --disk path=IMAGE", "/srv/it's here.img");
        assert_eq!(command.to_string(), r"mqblk bench --rw read --bs 512-4M --disk 'path=/srv/it'\''s here.img'");
        assert_eq!((shell_word(""), shell_word("a=b,c")), ("''".into(), "a=b,c".into()));
    }
}
