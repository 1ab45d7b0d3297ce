//! Xen's device nodes: `gntdev` (pages that other domains grant), `gntalloc` (pages granted to other domains), `evtchn`
//! (event channels). They are opened on use; a host without Xen has none of them.
//!
//! `unsafe` is needed because these interfaces are ioctls whose arguments hold addresses. Source: Linux's
//! `xen/gntdev.h`, `xen/gntalloc.h` and `xen/evtchn.h`.

mod evtchn;
mod gntalloc;
mod gntdev;
mod ioctl;

pub use evtchn::EvtchnPort;
pub use gntalloc::GrantedPages;
pub use gntdev::GntdevAccess;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;

/// Directory of the nodes.
const NODE_DIR: &str = "/dev/xen";

/// Opens a node.
fn open_node(name: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(format!("{NODE_DIR}/{name}")).map_err(
        |error| {
            let advice = match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                    format!("is this a domain of Xen, and has the kernel the module (`modprobe xen-{name}`)?")
                }
                io::ErrorKind::PermissionDenied => "only root may open it unless the host says otherwise".to_owned(),
                _ => return io::Error::new(error.kind(), format!("{NODE_DIR}/{name}: {error}")),
            };
            io::Error::new(error.kind(), format!("{NODE_DIR}/{name}: {error}; {advice}"))
        },
    )
}
