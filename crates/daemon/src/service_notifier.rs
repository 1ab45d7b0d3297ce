//! Messages to the service manager (sd_notify(3)).
//!
//! The socket is connected before the sandbox, which makes an abstract socket of another process unreachable. A library
//! that connects for each message would fail there.

use std::env;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mqblk_core::settings::{SettingError, Settings};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::clock::monotonic_ns;

/// The path of its socket; an abstract one begins with `@`.
const SOCKET: &str = "NOTIFY_SOCKET";
/// The interval in which the manager expects a sign of life, in microseconds, and the process that it expects it from.
const WATCHDOG_TIME: &str = "WATCHDOG_USEC";
const WATCHDOG_PROCESS: &str = "WATCHDOG_PID";

/// Longest wait of a message for room in the manager's socket.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// Notifies the service manager that has started this process, if one has.
#[derive(Debug)]
pub struct ServiceNotifier {
    pub(crate) socket: Option<UnixDatagram>,
    /// The time after which the manager restarts a daemon that gives no sign of life.
    pub(crate) watchdog: Option<Duration>,
    has_failed: AtomicBool,
}

impl ServiceNotifier {
    /// Connects to the manager that the environment names.
    ///
    /// # Errors
    /// If the environment is not what a manager sets, or its socket is not there.
    pub fn connect() -> Result<ServiceNotifier, SettingError> {
        let environment = Settings::new("environment");
        let socket = match env::var_os(SOCKET).filter(|name| !name.is_empty()) {
            None => None,
            Some(name) => {
                let socket = connect(name.as_bytes());
                let expected = "the socket of a service manager: an absolute path, or a name after @";
                Some(socket.map_err(|error| environment.error(SOCKET, format!("{name:?}: {error}"), expected))?)
            }
        };
        let number = |variable: &str| match env::var(variable) {
            Ok(text) => {
                text.parse::<u64>().map(Some).map_err(|_| environment.error(variable, format!("{text:?}"), "a number"))
            }
            Err(_) => Ok(None),
        };
        let is_ours = number(WATCHDOG_PROCESS)?.is_none_or(|process| process == u64::from(std::process::id()));
        let watchdog = number(WATCHDOG_TIME)?.filter(|time| *time > 0 && is_ours && socket.is_some());
        Ok(ServiceNotifier {
            socket,
            watchdog: watchdog.map(Duration::from_micros),
            has_failed: AtomicBool::new(false),
        })
    }

    /// Takes over the socket of the previous process, if this one was started without. `watchdog`: the time in which
    /// the manager expects signs of life.
    pub fn adopt(&mut self, handed: Option<(UnixDatagram, Option<Duration>)>) {
        if let (None, Some((socket, watchdog))) = (&self.socket, handed) {
            (self.socket, self.watchdog) = (Some(socket), watchdog);
        }
    }

    /// Returns a duplicate of its socket and the time in which signs of life are expected, for the next process.
    pub(crate) fn handed(&self) -> Option<(OwnedFd, Option<Duration>)> {
        let socket = self.socket.as_ref()?.try_clone().ok()?;
        Some((socket.into(), self.watchdog))
    }

    /// Reports that the daemon serves: after its start, and after it has read its configuration again.
    pub fn ready(&self) {
        self.send("READY=1");
    }

    /// Reports that the daemon reads its configuration again. [`ready`](Self::ready) follows, also after a failure.
    pub fn reloading(&self) {
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_ns() / 1000));
    }

    /// Reports that the daemon stops.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=Stopping: waits for requests in flight, and flushes");
    }

    pub(crate) fn send(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        match send_bounded(socket, message.as_bytes()) {
            Ok(()) => self.has_failed.store(false, Ordering::Relaxed),
            Err(error) if !self.has_failed.swap(true, Ordering::Relaxed) => {
                tracing::warn!("cannot send {message:?} to the service manager: {error}");
            }
            Err(_) => {}
        }
    }
}

/// Sends a message. Waits for at most [`SEND_TIMEOUT`] for room. A timeout of the socket itself would be shared with
/// the process that it came from, which could remove it.
fn send_bounded(socket: &UnixDatagram, message: &[u8]) -> io::Result<()> {
    let send = || rustix::net::send(socket, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let sent = match send() {
        Err(Errno::AGAIN) => {
            let room = Timespec::try_from(SEND_TIMEOUT).map_err(io::Error::other)?;
            poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&room))?;
            send()
        }
        sent => sent,
    };
    Ok(sent.map(drop)?)
}

fn connect(name: &[u8]) -> io::Result<UnixDatagram> {
    let address = match name {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?,
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 512];
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let len = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    }

    fn notifier(socket: UnixDatagram) -> ServiceNotifier {
        ServiceNotifier { socket: Some(socket), watchdog: None, has_failed: AtomicBool::new(false) }
    }

    #[test]
    fn sockets_by_path_and_by_abstract_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        notifier(connect(path.as_os_str().as_bytes()).unwrap()).ready();
        assert_eq!(received(&by_path), "READY=1");
        let name = format!("mqblk-notify-{}", std::process::id());
        let abstract_one = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        notifier(connect(format!("@{name}").as_bytes()).unwrap()).stopping();
        assert!(received(&abstract_one).starts_with("STOPPING=1\nSTATUS="));
        for wrong in ["relative", "", "/nonexistent/notify", "@mqblk-nobody-listens-here"] {
            assert!(connect(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_reload_has_the_time_of_the_monotonic_clock() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let before = monotonic_ns() / 1000;
        notifier(ours).reloading();
        let message = received(&theirs);
        let time = message.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().parse::<u64>().unwrap();
        assert!((before..=monotonic_ns() / 1000).contains(&time), "{message}");
    }

    #[test]
    fn a_manager_that_is_gone_keeps_nobody_waiting() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        drop(theirs);
        let notifier = notifier(ours);
        notifier.ready();
        assert!(notifier.has_failed.load(Ordering::Relaxed));
    }

    /// The previous process still has the socket, and may do anything with it.
    #[test]
    fn a_manager_that_does_not_read_keeps_nobody_waiting() {
        let (ours, _theirs) = UnixDatagram::pair().unwrap();
        let fill = ours.try_clone().unwrap();
        while rustix::net::send(&fill, &[0; 1024], SendFlags::DONTWAIT).is_ok() {}
        let notifier = notifier(ours);
        notifier.stopping();
        assert!(notifier.has_failed.load(Ordering::Relaxed));
    }
}
