//! `mqblk vhost-user`: one virtio-blk disk, by the conventions for vhost-user programs (QEMU's
//! docs/interop/vhost-user.rst). A program named `vhost-user-block` is the same without the word.

use std::ffi::OsString;
use std::path::Path;

use mqblk_core::settings::{SettingError, Settings};

/// The word of the command line.
const WORD: &str = "vhost-user";
/// The name of the program without the word: "vhost-user-" and the name of the device in Linux's `virtio_ids.h`.
const PROGRAM: &str = "vhost-user-block";

/// The options of `mqblk vhost-user`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = include_str!("vhost_user_help.txt"), after_help = "Examples: mqblk vhost-user --help")]
pub(crate) struct VhostUserArgs {
    /// The socket to make
    #[arg(long, value_name = "PATH", conflicts_with = "fd", required_unless_present_any = ["fd", "print_capabilities"])]
    socket_path: Option<String>,

    /// A listening socket that the program was started with
    #[arg(long, value_name = "FDNUM")]
    fd: Option<i32>,

    /// The file or block device to serve
    #[arg(long, value_name = "PATH", required_unless_present = "print_capabilities")]
    blk_file: Option<String>,

    /// The guest may not write
    #[arg(long)]
    read_only: bool,

    /// Print what this program can do, as JSON, and exit
    #[arg(long)]
    pub print_capabilities: bool,
}

impl VhostUserArgs {
    /// Returns the disk as keys and values.
    ///
    /// # Errors
    /// If the descriptor cannot be served.
    pub(crate) fn disk(&self) -> Result<Settings, SettingError> {
        let mut disk = Settings::new(WORD);
        let socket = match self.fd {
            Some(number) => mqblk_daemon::activation::take_descriptor(number)?,
            None => self.socket_path.clone().unwrap_or_default(),
        };
        disk.insert("socket", &socket)?;
        disk.insert("path", self.blk_file.as_deref().unwrap_or_default())?;
        disk.insert("readonly", if self.read_only { "on" } else { "off" })?;
        Ok(disk)
    }
}

/// Returns the command line, with the word inserted if the program's name implies it.
pub(crate) fn with_word(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.into_iter().collect();
    let is_it = arguments.first().is_some_and(|name| Path::new(name).file_name().is_some_and(|name| name == PROGRAM));
    if is_it {
        arguments.insert(1, WORD.into());
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_name_stands_for_the_word() {
        let line = |words: &[&str]| with_word(words.iter().map(OsString::from)).join(&OsString::from(" "));
        assert_eq!(
            line(&["/usr/libexec/mqblk/vhost-user-block", "--fd=3"]),
            "/usr/libexec/mqblk/vhost-user-block vhost-user --fd=3"
        );
        assert_eq!(line(&["/usr/bin/mqblk", "serve"]), "/usr/bin/mqblk serve");
        assert_eq!(line(&[]), "");
    }
}
