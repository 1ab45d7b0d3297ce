//! `/dev/xen/evtchn`: event channels.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use mqblk_core::EventChannel;
use mqblk_memory::DomainId;

use crate::ioctl::{BindInterdomain, BindUnbound, NotifyPort, ResetEvents, call};

/// Our end of one event channel, over a descriptor of its own. The channel is closed with the last copy of the descriptor.
#[derive(Debug)]
pub struct EventNode {
    node: File,
    port: u32,
    /// An event was taken: the port is masked.
    masked: Cell<bool>,
}

impl EventNode {
    /// Binds to a port that `remote` has opened for this domain. An event may come at once.
    ///
    /// # Errors
    /// When there is no such node or it may not be opened; when there is no such port, or it is not for this domain.
    pub fn bind(remote: DomainId, port: u32) -> io::Result<EventNode> {
        let node = crate::open("evtchn")?;
        let bound = call(&node, &mut BindInterdomain { remote_domain: remote.0.into(), remote_port: port })?;
        Ok(EventNode { node, port: bound, masked: Cell::new(false) })
    }

    /// Opens a port that `remote` may bind to.
    ///
    /// # Errors
    /// When there is no such node or it may not be opened, or there are no more ports.
    pub fn open(remote: DomainId) -> io::Result<EventNode> {
        let node = crate::open("evtchn")?;
        let port = call(&node, &mut BindUnbound { remote_domain: remote.0.into() })?;
        Ok(EventNode { node, port, masked: Cell::new(false) })
    }

    /// Our port.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Another descriptor of the node, readable when an event has come.
    ///
    /// # Errors
    /// When there are no more descriptors.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.node.as_fd().try_clone_to_owned()
    }
}

impl EventChannel for EventNode {
    fn notify(&self) {
        // The other end may have gone, which is its own loss.
        let _ = call(&self.node, &mut NotifyPort { port: self.port });
    }

    fn take(&self) {
        // Ports that have had an event, 4 bytes each. Only one is bound, but it is listed once more each time that it is
        // unmasked before it was read.
        let mut ports = [0; 64];
        match (&self.node).read(&mut ports) {
            Ok(0) => {}
            Ok(_) => self.masked.set(true),
            Err(error) if error.raw_os_error() == Some(libc::EFBIG) => {
                // The list was too short. Which ports were on it is no question.
                let _ = call(&self.node, &mut ResetEvents);
                self.masked.set(true);
            }
            Err(_) => {}
        }
    }

    fn unmask(&self) {
        if self.masked.replace(false) {
            // It fails only for a port that is not bound.
            let _ = (&self.node).write(&self.port.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A channel whose node is a socket: what is read and written can be seen.
    fn channel() -> (EventNode, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        (EventNode { node: File::from(OwnedFd::from(ours)), port: 7, masked: Cell::new(false) }, theirs)
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
        assert_eq!(unmasked(&mut theirs), [], "nothing was taken yet");
        channel.take();
        channel.take();
        channel.unmask();
        channel.unmask();
        assert_eq!(unmasked(&mut theirs), 7u32.to_ne_bytes());
    }

    #[test]
    fn a_channel_that_is_broken_is_silent() {
        let (channel, theirs) = channel();
        drop(theirs);
        channel.notify();
        channel.take();
        channel.unmask();
    }

    #[test]
    fn a_host_without_the_node_says_what_to_do() {
        if std::path::Path::new("/dev/xen/evtchn").exists() {
            return;
        }
        let error = EventNode::open(DomainId(0)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(
            error.to_string().contains("/dev/xen/evtchn") && error.to_string().contains("modprobe xen-evtchn"),
            "{error}"
        );
    }
}
