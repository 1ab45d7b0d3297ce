//! The broker's process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::net::SocketType;

use super::error::BrokerError;
use super::restrict;
use super::rules::Rules;
use super::wire::{self, Answer, Request};
use mqblk_core::ImageOpenError;

/// Serves the daemon at standard input until the daemon has ended.
///
/// # Errors
/// If it was not started by a daemon, or the host refuses.
pub fn run() -> Result<(), BrokerError> {
    let input = io::stdin();
    let socket = input.as_fd();
    if !rustix::net::sockopt::socket_type(socket).is_ok_and(|kind| kind == SocketType::SEQPACKET) {
        return Err(BrokerError::NotStarted);
    }
    if !restrict::has_proc() {
        return Err(BrokerError::NoProc);
    }
    serve(socket, restrict::restrict)
}

/// Answers requests until the other end is closed. `restrict` gives up this process' rights once the rules are
/// complete.
pub(super) fn serve(
    socket: BorrowedFd<'_>,
    restrict: impl Fn(&Rules) -> Result<&'static str, BrokerError>,
) -> Result<(), BrokerError> {
    let mut rules = Rules::default();
    let opened = |file: File| (Some(OwnedFd::from(file)), String::new());
    loop {
        let (number, request) = match wire::receive_request(socket) {
            Ok(Some(request)) => request,
            Ok(None) => break,
            // The kernel reports this if the daemon has ended with unread answers.
            Err(error) if has_ended(&error) => break,
            Err(error) => return Err(error.into()),
        };
        let answer: Answer = match request {
            Ok(Request::Seal) => match rules.seal() {
                Ok(()) => Ok((None, restrict(&rules)?.to_owned())),
                Err(sealed) => Err(sealed),
            },
            Ok(Request::Allow(path)) => rules.allow(path).map(|()| (None, String::new())),
            Ok(Request::AllowConfig(path)) => rules.allow_config(path).map(|()| (None, String::new())),
            Ok(Request::Open(path, access)) => rules.open(&path, access).map(opened),
            Ok(Request::OpenAllowed(path, access)) => rules.open_allowed(&path, access).map(opened),
            Ok(Request::OpenConfig) => rules.open_config().map(opened),
            Err(why) => Err(ImageOpenError::Refused(why)),
        };
        match wire::send_response(socket, number, &answer) {
            Err(error) if has_ended(&error) => break,
            // A daemon that sends requests without reading the answers loses them.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => sent?,
        }
    }
    Ok(())
}

/// Returns true if the daemon has ended.
fn has_ended(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}
