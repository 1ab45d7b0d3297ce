//! Programs in other processes, which are killed. Each process runs this test binary again.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;
use mqblk_xen::Port;

const FOLDER: &str = "MQBLK_TEST_SIMULATED_FOLDER";

/// Starts this binary again as a backend in another process, and waits until it is ready.
fn start_backend(folder: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::processes::a_backend_in_another_process", "--nocapture", "--include-ignored"])
        .env(FOLDER, folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let ready = output.lines().map_while(Result::ok).any(|line| line.contains("backend is ready"));
    assert!(ready, "the other process did not get ready");
    child
}

/// The other process: maps and binds the grants and the port from xenstore, replies once, and waits until it is killed.
#[test]
#[ignore = "run by the others, in a process of its own"]
fn a_backend_in_another_process() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let xen = crate::connect_dom0(Path::new(&folder)).unwrap();
    let mut store = xen.store().unwrap();
    let mut number =
        |key: &str| -> u32 { store.read(&format!("/local/domain/1/device/{key}")).unwrap().unwrap().parse().unwrap() };
    let (first, port) = (number("ring-ref"), number("event-channel"));
    let refs: Vec<GrantRef> = (first..first + 4).map(GrantRef).collect();
    let mut grants = xen.grants(DomainId(1)).unwrap();
    let arena = PageArena::reserve(8).unwrap();
    grants.map(&arena, PageSlot(0), &refs, true).unwrap();
    let mut copies = [one_copy(refs[3], CopyDirection::FromGrant)];
    grants.copy(&arena, &mut copies).unwrap();
    assert_eq!(copies[0].status, GrantStatus::OKAY);
    // Reverses what the guest has written, and notifies it.
    let mut bytes = [0; 16];
    arena.memory().read(PageSlot(1).address(100), &mut bytes).unwrap();
    bytes.reverse();
    arena.memory().write(PageSlot(0).address(0), &bytes).unwrap();
    let channel = xen.bind_interdomain(DomainId(1), Port(port)).unwrap();
    channel.channel.notify();
    std::io::stdout().write_all(b"\nbackend is ready\n").unwrap();
    std::io::stdout().flush().unwrap();
    // Waits until it is killed, or its parent has exited.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

#[test]
fn a_killed_process_leaves_nothing_behind() {
    let TestMachine { machine, back, front, _folder } = test_machine();
    let pages = front.share(DomainId(0), 4, true).unwrap();
    let port = front.alloc_unbound(DomainId(0)).unwrap();
    let mut store = back.store().unwrap();
    store.write("/local/domain/1/device/ring-ref", &pages.refs[0].0.to_string()).unwrap();
    store.write("/local/domain/1/device/event-channel", &port.port.0.to_string()).unwrap();
    let before = machine.stats();
    for round in 0..3u8 {
        pages
            .memory
            .write(GuestAddress(3 * PAGE + 8), &[round, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
            .unwrap();
        let mut child = start_backend(machine.folder());
        assert_eq!(read::<16>(&pages, 0), [15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, round]);
        assert!(machine.is_bound(DomainId(1), port.port));
        port.channel.take();
        port.channel.unmask();
        let stats = machine.stats();
        assert_eq!((stats.live_mappings, machine.mapping_count(DomainId(1), pages.refs[2])), (4, 1));
        assert_eq!(stats.copies, before.copies + u64::from(round) + 1, "its copies are counted");
        child.kill().unwrap();
        child.wait().unwrap();
        until("its mappings end", || machine.stats().live_mappings == 0);
        until("its port is closed", || !machine.is_bound(DomainId(1), port.port));
        until("its connections end", || machine.stats().connections == before.connections);
        assert_eq!(machine.domain_stats(DomainId(0)).unwrap().maptrack, 0);
        port.channel.notify();
    }
    let again = back.bind_interdomain(DomainId(1), port.port).unwrap();
    again.channel.take();
    assert_eq!(machine.stats().open_ports, 2);
}
