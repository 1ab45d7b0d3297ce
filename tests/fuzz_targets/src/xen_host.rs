//! A simulated Xen host with one guest, for the targets of Xen's block protocol.

use std::ops::Range;
use std::sync::Arc;

use mqblk_memory::DomainId;
use mqblk_xen::{SharedPages, Xen};
use mqblk_xen_simulation::{DomainLimits, Machine, connect};
use tempfile::TempDir;

/// The guest's domain.
pub(crate) const GUEST: DomainId = DomainId(1);
/// The backend's domain.
pub(crate) const HOST: DomainId = DomainId(0);
/// Bytes of a page.
pub(crate) const PAGE: usize = mqblk_memory::PAGE_BYTES as usize;

/// A machine with both domains. Its fields are dropped in order: programs before the machine, the machine before its
/// folder.
pub(crate) struct XenHost {
    pub(crate) guest: Arc<dyn Xen>,
    pub(crate) host: Arc<dyn Xen>,
    pub(crate) machine: Machine,
    _folder: TempDir,
}

impl XenHost {
    pub(crate) fn new() -> XenHost {
        let folder = tempfile::Builder::new().prefix("mqblk-fuzz-").tempdir().expect("a folder");
        let limits = DomainLimits { pages: 1024, refs: 2048, maptrack: 4096 };
        let machine = Machine::with_limits(folder.path(), limits).expect("a machine");
        let connected = |domain| connect(folder.path(), domain).expect("the machine runs");
        XenHost { guest: connected(GUEST), host: connected(HOST), machine, _folder: folder }
    }

    /// Returns the guest's pages that the host has mapped, the guest's grants, and the open ports of both.
    pub(crate) fn in_use(&self) -> (u64, u64, u64) {
        let guest = self.machine.domain_stats(GUEST).expect("the guest's domain");
        let host = self.machine.domain_stats(HOST).expect("the host's domain");
        (guest.live_mappings, guest.live_grants, guest.open_ports + host.open_ports)
    }
}

/// Granted pages of the guest, with a model of every byte of them.
pub(crate) struct GuestPages {
    shared: SharedPages,
    expected: Vec<u8>,
}

impl GuestPages {
    /// Grants new pages, all zero, to a domain.
    pub(crate) fn new(guest: &dyn Xen, with: DomainId, count: usize, writable: bool) -> GuestPages {
        let shared = guest.share(with, count as u32, writable).expect("the guest has pages");
        GuestPages { shared, expected: vec![0; count * PAGE] }
    }

    pub(crate) fn gref(&self, page: usize) -> u32 {
        self.shared.refs[page].0
    }

    /// Returns the expected bytes from `at` on.
    pub(crate) fn expected(&self, at: usize, len: usize) -> &[u8] {
        &self.expected[at..at + len]
    }

    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.shared.memory.read(mqblk_memory::GuestAddress(at as u64), &mut bytes).expect("the guest's own pages");
        bytes
    }

    pub(crate) fn read_u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.read(at, 4).try_into().expect("4 bytes"))
    }

    /// Writes as the guest.
    pub(crate) fn put(&mut self, at: usize, bytes: &[u8]) {
        self.shared.memory.write(mqblk_memory::GuestAddress(at as u64), bytes).expect("the guest's own pages");
        self.expect(at, bytes);
    }

    /// Expects that the host has written these bytes.
    pub(crate) fn expect(&mut self, at: usize, bytes: &[u8]) {
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Checks every byte.
    pub(crate) fn check(&self, what: &str) {
        self.check_except(what, 0..0);
    }

    /// Checks every byte, except those that the host may write at any time.
    pub(crate) fn check_except(&self, what: &str, ignored: Range<usize>) {
        let mut found = self.read(0, self.expected.len());
        found[ignored.clone()].copy_from_slice(&self.expected[ignored]);
        if found != self.expected
            && let Some(at) = (0..found.len()).find(|at| found[*at] != self.expected[*at])
        {
            let (page, offset, expected) = (at / PAGE, at % PAGE, self.expected[at]);
            panic!("{what}: page {page}, byte {offset}: found {:#x}, expected {expected:#x}", found[at]);
        }
    }
}
