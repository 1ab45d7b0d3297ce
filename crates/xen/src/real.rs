//! The real Xen, through the kernel's device nodes and xenstored.

use std::io;
use std::path::Path;
use std::sync::Arc;

use mqblk_memory::{DomainId, GrantAccess};
use mqblk_xen_nodes::{EvtchnPort, GntdevAccess, GrantedPages};

use crate::store::Xenstore;
use crate::{EventPort, Port, SharedPages, Xen, XenError, vbd};

/// Connects to the Xen that this domain runs on. Device nodes are opened on first use: a program that only uses
/// xenstore needs none.
///
/// # Errors
/// When there is no xenstore (a machine without Xen), or it does not give the domain's number.
pub fn connect_real() -> Result<Arc<dyn Xen>, XenError> {
    let mut store = open_store()?;
    let what = || "the number of this domain".to_owned();
    let value = store.read("domid").map_err(|error| XenError { what: what(), source: io::Error::other(error) })?;
    // A dom0 may not have the node.
    let number = vbd::parse_number_or("domid", value.as_deref(), u64::from(u16::MAX), 0);
    let number = number.map_err(|error| XenError { what: what(), source: io::Error::other(error) })?;
    Ok(Arc::new(RealXen { domain: DomainId(number as u16), translated: is_translated(Path::new(GUEST_TYPE)) }))
}

/// `PV`, `PVH` or `HVM` (Documentation/ABI/stable/sysfs-hypervisor-xen).
const GUEST_TYPE: &str = "/sys/hypervisor/guest_type";

/// Returns true for an auto-translated guest (PVH, HVM). An unreadable type counts as paravirtualized.
fn is_translated(guest_type: &Path) -> bool {
    std::fs::read_to_string(guest_type).is_ok_and(|kind| matches!(kind.trim(), "PVH" | "HVM"))
}

fn open_store() -> Result<Xenstore, XenError> {
    Xenstore::connect_real().map_err(|source| XenError { what: "xenstore".to_owned(), source })
}

#[derive(Debug)]
struct RealXen {
    domain: DomainId,
    /// The domain is auto-translated (PVH or HVM), not paravirtualized.
    translated: bool,
}

impl Xen for RealXen {
    fn store(&self) -> Result<Xenstore, XenError> {
        open_store()
    }

    fn domain(&self) -> DomainId {
        self.domain
    }

    fn pages_may_be_pinned(&self) -> bool {
        self.translated
    }

    fn grants(&self, of: DomainId) -> Result<Box<dyn GrantAccess>, XenError> {
        let what = || format!("grants of domain {}", of.0);
        Ok(Box::new(GntdevAccess::open(of).map_err(|source| XenError { what: what(), source })?))
    }

    fn bind_interdomain(&self, remote: DomainId, port: Port) -> Result<EventPort, XenError> {
        let what = || format!("event channel to port {} of domain {}", port.0, remote.0);
        event_port(EvtchnPort::bind_interdomain(remote, port.0)).map_err(|source| XenError { what: what(), source })
    }

    fn alloc_unbound(&self, remote: DomainId) -> Result<EventPort, XenError> {
        let what = || format!("event channel for domain {}", remote.0);
        event_port(EvtchnPort::alloc_unbound(remote)).map_err(|source| XenError { what: what(), source })
    }

    fn share(&self, with: DomainId, pages: u32, writable: bool) -> Result<SharedPages, XenError> {
        let what = || format!("pages for domain {}", with.0);
        let granted = GrantedPages::new(with, pages, writable).map_err(|source| XenError { what: what(), source })?;
        let (memory, refs) = (Arc::clone(granted.memory()), granted.refs().to_vec());
        Ok(SharedPages { memory, refs, guard: Box::new(granted) })
    }
}

fn event_port(node: io::Result<EvtchnPort>) -> io::Result<EventPort> {
    let node = node?;
    let (port, descriptor) = (Port(node.port()), node.descriptor()?);
    Ok(EventPort { port, channel: Box::new(node), descriptor })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_translated_domain_may_pin_mapped_pages() {
        let folder = tempfile::tempdir().unwrap();
        for (kind, translated) in [("PVH\n", true), ("HVM\n", true), ("PV\n", false), ("", false)] {
            let path = folder.path().join("guest_type");
            std::fs::write(&path, kind).unwrap();
            assert_eq!(is_translated(&path), translated, "{kind:?}");
        }
        assert!(!is_translated(&folder.path().join("none")));
    }

    #[test]
    fn without_xen_the_error_names_what_is_missing() {
        if crate::store::CONNECTION_PATHS.iter().any(|path| std::path::Path::new(path).exists()) {
            return;
        }
        let text = connect_real().err().expect("no Xen").to_string();
        for part in ["xenstore: ", "/run/xenstored/socket", "/dev/xen/xenbus", "does xenstored run?"] {
            assert!(text.contains(part), "{text}");
        }
        let real = RealXen { domain: DomainId(0), translated: false };
        let text = real.grants(DomainId(3)).err().expect("no Xen").to_string();
        assert!(
            text.starts_with("grants of domain 3: /dev/xen/gntdev: ") && text.contains("modprobe xen-gntdev"),
            "{text}"
        );
        let text = real.share(DomainId(3), 1, true).err().expect("no Xen").to_string();
        assert!(text.contains("modprobe xen-gntalloc"), "{text}");
        assert!(real.bind_interdomain(DomainId(3), Port(1)).is_err() && real.alloc_unbound(DomainId(3)).is_err());
    }
}
