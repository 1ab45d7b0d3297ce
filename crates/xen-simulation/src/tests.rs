//! Tests with a machine and programs in its domains.

mod channels;
mod grants;
mod interleavings;
mod processes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_memory::{
    CopyDirection, DomainId, GrantCopy, GrantRef, GrantStatus, GuestAddress, PAGE_BYTES, PageArena, PageSlot,
};

use super::*;
use mqblk_xen::{SharedPages, Xen};

const PAGE: u64 = PAGE_BYTES as u64;

/// A machine with a backend in domain 0 and a frontend in domain 1.
struct TestMachine {
    machine: Machine,
    back: Arc<dyn Xen>,
    front: Arc<dyn Xen>,
    _folder: tempfile::TempDir,
}

fn test_machine() -> TestMachine {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::start(folder.path()).unwrap();
    let back = crate::connect_dom0(folder.path()).unwrap();
    let front = connect(folder.path(), DomainId(1)).unwrap();
    TestMachine { machine, back, front, _folder: folder }
}

/// Waits, with a bound, for an effect of another thread or process.
fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_done() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn one_copy(gref: GrantRef, direction: CopyDirection) -> GrantCopy {
    let status = GrantStatus(77);
    GrantCopy { gref, offset: 8, len: 16, slot: PageSlot(1), slot_offset: 100, direction, status }
}

fn read<const N: usize>(pages: &SharedPages, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    pages.memory.read(GuestAddress(at), &mut bytes).unwrap();
    bytes
}

#[test]
fn a_folder_has_one_machine() {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::start(folder.path()).unwrap();
    let error = Machine::start(folder.path()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    assert!(connect(folder.path(), DomainId(3)).is_ok());
    assert_eq!(machine.domains(), [DomainId(0), DomainId(3)]);
    drop(machine);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "its sockets are gone");
    let Err(error) = connect(folder.path(), DomainId(3)) else { panic!("there is no machine") };
    assert!(error.to_string().contains("for domain 3"), "{error}");
    // Stale sockets of a killed machine are replaced.
    std::os::unix::net::UnixListener::bind(folder.path().join(hypercall::SOCKET)).unwrap();
    std::os::unix::net::UnixListener::bind(folder.path().join("xenstored.sock")).unwrap();
    drop(Machine::start(folder.path()).unwrap());
}

#[test]
fn programs_of_an_ended_machine_get_errors() {
    let TestMachine { machine, back, front, _folder } = test_machine();
    let pages = front.share(DomainId(0), 2, true).unwrap();
    let port = front.alloc_unbound(DomainId(0)).unwrap();
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(2).unwrap();
    grants.map(&arena, PageSlot(0), &pages.refs[..1], true).unwrap();
    drop(machine);
    assert!(grants.map(&arena, PageSlot(1), &pages.refs[..1], true).is_err());
    assert!(back.grants(DomainId(1)).is_err() && front.alloc_unbound(DomainId(0)).is_err());
    assert!(back.store().is_err());
    arena.memory().write(PageSlot(0).address(5), b"still").unwrap();
    assert_eq!(&read::<5>(&pages, 5), b"still", "what was mapped stays mapped");
    port.channel.notify();
    port.channel.take();
    port.channel.unmask();
    assert!(grants.unmap(&arena, PageSlot(0)).is_err());
}

#[test]
fn destroying_a_domain_frees_its_resources() {
    let TestMachine { machine, back, front, _folder } = test_machine();
    let pages = front.share(DomainId(0), 4, true).unwrap();
    let port = front.alloc_unbound(DomainId(0)).unwrap();
    let bound = back.bind_interdomain(DomainId(1), port.port).unwrap();
    let mut store = back.store().unwrap();
    store.watch("@releaseDomain", "r").unwrap();
    store.watch("/local/domain/1/device/vbd/51712/state", "s").unwrap();
    store.write("/local/domain/1/device/vbd/51712/state", "1").unwrap();
    let mut grants = back.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(4).unwrap();
    grants.map(&arena, PageSlot(0), &pages.refs[..2], true).unwrap();
    while store.next_event(Some(Duration::ZERO)).unwrap().is_some() {}

    assert!(!machine.destroy_domain(DomainId(0)) && !machine.destroy_domain(DomainId(9)));
    assert!(machine.destroy_domain(DomainId(1)));
    let events: Vec<_> =
        std::iter::from_fn(|| store.next_event(Some(Duration::from_secs(10))).unwrap()).take(2).collect();
    let events: Vec<_> = events.iter().map(|event| (event.path.as_str(), event.token.as_str())).collect();
    assert_eq!(events, [("/local/domain/1/device/vbd/51712/state", "s"), ("@releaseDomain", "r")]);
    assert_eq!(store.read("/local/domain/1/device/vbd/51712/state").unwrap(), None);
    assert_eq!(store.list("/local/domain").unwrap().unwrap(), ["0"]);

    let mut copies = [one_copy(pages.refs[0], CopyDirection::FromGrant)];
    grants.copy(&arena, &mut copies).unwrap();
    assert_eq!(copies[0].status, GrantStatus::BAD_DOMAIN);
    assert!(grants.map(&arena, PageSlot(3), &pages.refs[3..], true).is_err());
    assert!(front.alloc_unbound(DomainId(0)).is_err());
    bound.channel.notify();
    assert_eq!((machine.stats().live_mappings, machine.stats().live_grants), (2, 0), "we still have two pages");
    arena.memory().write(PageSlot(0).address(0), b"x").unwrap();
    grants.unmap(&arena, PageSlot(0)).unwrap();
    assert_eq!(machine.stats().live_mappings, 0);

    // The next domain of that number starts empty, and the same grant access works.
    let again = connect(machine.folder(), DomainId(1)).unwrap();
    let fresh = again.share(DomainId(0), 1, true).unwrap();
    assert_eq!(read::<8>(&fresh, 0), [0; 8]);
    let mut copies = [one_copy(fresh.refs[0], CopyDirection::FromGrant)];
    grants.copy(&arena, &mut copies).unwrap();
    assert_eq!(copies[0].status, GrantStatus::OKAY);
    drop((pages, port));
    assert_eq!(machine.domain_stats(DomainId(1)).unwrap().live_grants, 1, "the old life's end is not the new one's");
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let TestMachine { machine, back: _back, front, _folder } = test_machine();
    let before = machine.stats().connections;
    for words in [vec![], vec![99], vec![0], vec![2, 1, 7], vec![1, 0], vec![6, 0], vec![0; 5000]] {
        for connected in [false, true] {
            let mut packets = hypercall::HypercallSocket::connect(machine.folder()).unwrap();
            if connected {
                hypercall::Hypercall::Connect(DomainId(0)).encode(packets.words());
                packets.call().unwrap();
            }
            packets.words().clone_from(&words);
            packets.send(&[]).unwrap();
            let answered = packets.receive().unwrap().is_some();
            assert_eq!(answered, connected && matches!(words.as_slice(), [1, 0] | [6, 0]), "{words:?}, {connected}");
        }
    }
    until("its connections end", || machine.stats().connections == before);
    front.alloc_unbound(DomainId(0)).unwrap();
}
