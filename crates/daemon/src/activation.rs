//! Socket activation: sockets that the service manager has made and passes at the start (sd_listen_fds(3)).
//!
//! A socket is named by `fd:NAME`, NAME being its `FileDescriptorName=`, or by the path that it is bound to.

use std::env;
use std::io;
use std::os::unix::net::UnixListener;

use listenfd::ListenFd;
use mqblk_core::settings::{SettingError, Settings};
use mqblk_vhost_user_server::{PASSED_PREFIX, adopt, passed_names};
use rustix::fd::OwnedFd;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

/// The number of sockets.
const COUNT: &str = "LISTEN_FDS";
const NAMES: &str = "LISTEN_FDNAMES";
/// The name of a socket that nobody has named (sd_listen_fds(3)).
const UNNAMED: &str = "unknown";
/// Maximum number of sockets. A service's limit of descriptors is higher: 65536 in our unit.
const MAX_SOCKETS: usize = 4096;

/// Takes over the sockets that this process was started with. Removes the variables from the environment, so that child
/// processes do not use the sockets. Called once, before any thread is started.
///
/// # Errors
/// If one is not a listening Unix stream socket, or two have the same name.
pub fn receive() -> Result<(), SettingError> {
    let environment = Settings::new("environment");
    let Some(count) = env::var_os(COUNT) else { return Ok(()) };
    let count = count.to_string_lossy().into_owned();
    match count.parse::<usize>() {
        Ok(0..=MAX_SOCKETS) => {}
        _ => return Err(environment.error(COUNT, format!("{count:?}"), format!("a number from 0 to {MAX_SOCKETS}"))),
    }
    let names = env::var(NAMES).unwrap_or_default();
    let names: Vec<&str> = names.split(':').filter(|name| !name.is_empty()).collect();
    // Empty if they belong to another process (LISTEN_PID).
    let mut sockets = ListenFd::from_env();
    for index in 0..sockets.len() {
        let name = names.get(index).copied().unwrap_or(UNNAMED);
        let invalid = |found: String| {
            environment.error(
                NAMES,
                format!("{name:?}: {found}"),
                "listening Unix stream sockets (ListenStream=), each with a name of its own",
            )
        };
        let socket = sockets.take_unix_listener(index).map_err(|error| invalid(error.to_string()))?;
        if let Some(socket) = socket {
            adopt(name, socket).map_err(|error| invalid(error.to_string()))?;
        }
    }
    Ok(())
}

/// Takes over the listening socket with this descriptor, which this process was started with. Returns the value of
/// `socket` for it.
///
/// # Errors
/// If it is not one.
pub fn take_descriptor(number: i32) -> Result<String, SettingError> {
    let name = format!("descriptor-{number}");
    let adopted = own(number).and_then(|socket| adopt(&name, UnixListener::from(socket)));
    let expected = "the descriptor of a listening Unix stream socket";
    adopted.map_err(|error| Settings::new("vhost-user").error("fd", format!("{number}: {error}"), expected))?;
    Ok(format!("{PASSED_PREFIX}{name}"))
}

/// Returns a duplicate of the descriptor `number`.
fn own(number: i32) -> io::Result<OwnedFd> {
    let process = pidfd_open(getpid(), PidfdFlags::empty())?;
    Ok(pidfd_getfd(process, number, PidfdGetfdFlags::empty())?)
}

/// Checks that the configuration names each of them: a client of a socket that nobody serves would wait without a
/// limit.
///
/// # Errors
/// Names the unused ones.
pub(crate) fn check_all_are_used() -> Result<(), SettingError> {
    let unused = passed_names(true);
    if unused.is_empty() {
        return Ok(());
    }
    let found = format!("{:?}, which nothing is served on", unused.join(", "));
    let expected =
        "a disk or controller with socket=fd:NAME, or admin=fd:NAME, for each socket that the process was started with";
    Err(Settings::new("environment").error(NAMES, found, expected))
}
