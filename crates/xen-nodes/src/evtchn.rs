//! `/dev/xen/evtchn`: event channels.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use mqblk_core::EventChannel;
use mqblk_memory::DomainId;

use crate::ioctl::{BindInterdomain, BindUnbound, NotifyPort, ResetEvents, ioctl};

/// The local port of one event channel, over its own descriptor. The port is closed with the last duplicate of the
/// descriptor.
#[derive(Debug)]
pub struct EvtchnPort {
    node: File,
    port: u32,
    /// True if the port is masked: an event was received.
    masked: Cell<bool>,
}

impl EvtchnPort {
    /// Binds to a port that `remote` has allocated for this domain. An event may be pending at once.
    ///
    /// # Errors
    /// When the node cannot be opened, or the port does not exist or is not for this domain.
    pub fn bind_interdomain(remote: DomainId, port: u32) -> io::Result<EvtchnPort> {
        let node = crate::open_node("evtchn")?;
        let bound = ioctl(&node, &mut BindInterdomain { remote_domain: remote.0.into(), remote_port: port })?;
        Ok(EvtchnPort { node, port: bound, masked: Cell::new(false) })
    }

    /// Allocates a port that `remote` may bind to.
    ///
    /// # Errors
    /// When the node cannot be opened, or no port is free.
    pub fn alloc_unbound(remote: DomainId) -> io::Result<EvtchnPort> {
        let node = crate::open_node("evtchn")?;
        let port = ioctl(&node, &mut BindUnbound { remote_domain: remote.0.into() })?;
        Ok(EvtchnPort { node, port, masked: Cell::new(false) })
    }

    /// Returns the local port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Duplicates the node's descriptor, which is readable when an event is pending.
    ///
    /// # Errors
    /// When the process has no more descriptors.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.node.as_fd().try_clone_to_owned()
    }
}

impl EventChannel for EvtchnPort {
    fn notify(&self) {
        // Fails if the remote end is closed, which needs no handling.
        let _ = ioctl(&self.node, &mut NotifyPort { port: self.port });
    }

    fn take(&self) {
        // Pending ports, 4 bytes each. Only one is bound, but it is listed again each time that it is unmasked before
        // it is read.
        let mut ports = [0; 64];
        match (&self.node).read(&mut ports) {
            Ok(0) => {}
            Ok(_) => self.masked.set(true),
            Err(error) if error.raw_os_error() == Some(libc::EFBIG) => {
                // The kernel's list has overflowed. Only one port can be on it.
                let _ = ioctl(&self.node, &mut ResetEvents);
                self.masked.set(true);
            }
            Err(_) => {}
        }
    }

    fn unmask(&self) {
        if self.masked.replace(false) {
            // Fails only for a port that is not bound.
            let _ = (&self.node).write(&self.port.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Returns a channel whose node is a socket, and the socket's other end.
    fn channel() -> (EvtchnPort, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        (EvtchnPort { node: File::from(OwnedFd::from(ours)), port: 7, masked: Cell::new(false) }, theirs)
    }

    fn unmasked(theirs: &mut UnixStream) -> Vec<u8> {
        let mut found = [0; 16];
        theirs.read(&mut found).map_or(vec![], |count| found[..count].to_vec())
    }

    #[test]
    fn an_event_is_taken_once_and_unmasked_once() {
        let (channel, mut theirs) = channel();
        channel.take();
        channel.unmask();
        assert_eq!(unmasked(&mut theirs), []);
        theirs.write_all(&[7u32, 7].map(u32::to_ne_bytes).concat()).unwrap();
        channel.unmask();
        assert_eq!(unmasked(&mut theirs), [], "no event was taken yet");
        channel.take();
        channel.take();
        channel.unmask();
        channel.unmask();
        assert_eq!(unmasked(&mut theirs), 7u32.to_ne_bytes());
    }

    #[test]
    fn a_broken_channel_ignores_errors() {
        let (channel, theirs) = channel();
        drop(theirs);
        channel.notify();
        channel.take();
        channel.unmask();
    }

    #[test]
    fn a_missing_node_gives_advice() {
        if std::path::Path::new("/dev/xen/evtchn").exists() {
            return;
        }
        let error = EvtchnPort::alloc_unbound(DomainId(0)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(
            error.to_string().contains("/dev/xen/evtchn") && error.to_string().contains("modprobe xen-evtchn"),
            "{error}"
        );
    }
}
