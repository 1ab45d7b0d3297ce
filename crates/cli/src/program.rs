//! Commands of the other program, which has a package of its own: found beside this one or in `PATH`, as git finds its
//! programs.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rustix::fs::{Access, access};

use crate::failure::{self, FAILED};

/// The program of benchmarks and plots, and its package.
const BENCH: &str = "mqblk-bench";
/// Its commands.
pub(crate) const WORDS: [&str; 3] = ["bench", "reproduce", "plot"];

/// The options of a command that [`BENCH`] parses.
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    before_long_help = "Examples:\n\n  mqblk bench --help",
    after_help = "It is a command of mqblk-bench, a package of its own"
)]
pub(crate) struct ForeignArgs {
    /// Its options: --help lists them
    #[arg(value_name = "OPTIONS", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

impl ForeignArgs {
    /// Executes the program of the command `word`, with the whole command line. Returns if there is none.
    pub(crate) fn run(&self, word: &str, arguments: &[OsString]) -> ExitCode {
        let Some(program) = find(BENCH) else {
            let expected = format!("it: install the package {BENCH}");
            let text = format!("{word}: found no program {BENCH} beside this one or in PATH, expected {expected}");
            return failure::report(&text, FAILED);
        };
        let error = Command::new(&program).args(&arguments[1..]).exec();
        failure::report(&format!("{word}: {}: {error}", program.display()), FAILED)
    }
}

/// Returns the program `name`: beside this one, else in `PATH`.
pub fn find(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    find_in(name, beside, std::env::var_os("PATH").as_deref())
}

fn find_in(name: &str, beside: Option<PathBuf>, path: Option<&OsStr>) -> Option<PathBuf> {
    let folders = beside.into_iter().chain(path.into_iter().flat_map(std::env::split_paths));
    let is_program = |path: &PathBuf| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    folders.map(|folder| folder.join(name)).find(is_program)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_program_is_found_beside_this_one_before_the_path() {
        let [beside, first, second] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let path = std::env::join_paths([first.path(), second.path()]).unwrap();
        let found = || find_in("other", Some(beside.path().to_owned()), Some(&path));
        // A file that is not executable is no program.
        std::fs::write(first.path().join("other"), "").unwrap();
        assert_eq!(found(), None);
        for folder in [&second, &beside] {
            let program = folder.path().join("other");
            std::fs::write(&program, "").unwrap();
            std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
            assert_eq!(found(), Some(program));
        }
    }
}
