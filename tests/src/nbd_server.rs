//! Third-party servers of the network block device protocol, as child processes.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::hostile::wait_for;

/// A server. It is killed when dropped; nbdkit also when the thread that started it ends.
#[derive(Debug)]
pub struct NbdServer {
    child: Child,
}

impl NbdServer {
    /// Starts it, and waits until it listens.
    ///
    /// # Panics
    /// When it is not installed, or does not listen.
    pub fn start(mut command: Command, is_listening: impl Fn() -> bool) -> NbdServer {
        let name = command.get_program().to_owned();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.unwrap_or_else(|error| panic!("{name:?}: {error} (apt-get install nbdkit qemu-utils)"));
        let server = NbdServer { child };
        wait_for("the NBD server to listen", || is_listening().then_some(()));
        server
    }

    /// Starts `qemu-nbd` on an image, with more arguments.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub fn qemu_nbd(image: &Path, socket: &Path, arguments: &[&str]) -> NbdServer {
        let _ = std::fs::remove_file(socket);
        let mut command = Command::new("qemu-nbd");
        command.arg("--persistent").args(arguments).arg("--socket").arg(socket).arg(image);
        NbdServer::start(command, || socket.exists())
    }

    /// Waits until it has ended by itself.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_end(&mut self) {
        wait_for("the NBD server to end", || self.child.try_wait().expect("its state"));
    }

    /// Kills it with requests in flight.
    ///
    /// # Panics
    /// When it has ended before.
    pub fn kill(&mut self) {
        assert!(self.child.try_wait().expect("its state").is_none(), "the server has ended by itself");
        self.child.kill().expect("a running server");
        self.child.wait().expect("its end");
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
