//! The default path of the admin socket.

use std::env::var_os;
use std::ffi::OsString;
use std::path::PathBuf;

/// The environment variable with the socket's path.
pub const SOCKET_VARIABLE: &str = "MQBLK_ADMIN";

/// The folder of runtime files, of a system's services.
const SYSTEM_RUNTIME: &str = "/run";

/// Returns true if the environment has a path of the socket.
pub fn names_a_socket() -> bool {
    of_environment().is_some()
}

/// Returns the path of the socket: `MQBLK_ADMIN`; else `/run/mqblk/admin.sock` for root, and
/// `$XDG_RUNTIME_DIR/mqblk/admin.sock` for others who have such a folder.
pub fn default_socket() -> PathBuf {
    let of_user = if rustix::process::geteuid().is_root() { None } else { not_empty("XDG_RUNTIME_DIR") };
    resolve(of_environment(), of_user)
}

fn of_environment() -> Option<OsString> {
    not_empty(SOCKET_VARIABLE)
}

fn not_empty(variable: &str) -> Option<OsString> {
    var_os(variable).filter(|value| !value.is_empty())
}

fn resolve(named: Option<OsString>, of_user: Option<OsString>) -> PathBuf {
    match named {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(of_user.unwrap_or_else(|| SYSTEM_RUNTIME.into())).join("mqblk/admin.sock"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_goes_first() {
        for (named, of_user, want) in [
            (Some("/a/b"), Some("/run/user/1000"), "/a/b"),
            (None, Some("/run/user/1000"), "/run/user/1000/mqblk/admin.sock"),
            (None, None, "/run/mqblk/admin.sock"),
        ] {
            assert_eq!(resolve(named.map(Into::into), of_user.map(Into::into)), PathBuf::from(want));
        }
    }
}
