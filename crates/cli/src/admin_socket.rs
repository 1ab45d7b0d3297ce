//! The daemon that a subcommand talks to.

use std::path::PathBuf;

/// The option for a daemon's admin socket.
#[derive(Debug, clap::Args)]
pub(crate) struct AdminSocket {
    /// The daemon's admin socket [default: $MQBLK_ADMIN, else that of `mqblk serve --admin`]
    ///
    /// Without the option and without MQBLK_ADMIN in the environment it is /run/mqblk/admin.sock for root, and
    /// $XDG_RUNTIME_DIR/mqblk/admin.sock for others.
    #[arg(long, value_name = "ADMIN")]
    socket: Option<PathBuf>,
}

impl AdminSocket {
    /// Returns the path of the socket.
    pub(crate) fn path(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(mqblk_admin::default_socket)
    }
}
