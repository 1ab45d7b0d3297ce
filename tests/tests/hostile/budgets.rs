//! Resource budgets of a VMM: beyond them it is refused or has to wait, and the VMMs of other disks notice nothing.

use std::path::PathBuf;

use mqblk_admin::model::TenantBudgetStat;
use mqblk_admin::{Client, StatQuery};
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::memory::{FileRegion, SharedMemory};
use mqblk_tests::hostile::neighbour::Neighbour;
use mqblk_tests::hostile::session::{completes_read, one_page_region};
use mqblk_tests::hostile::socket::{VERSION, VhostUserSocket, message as m};
use mqblk_tests::hostile::{TIMEOUT, wait_for};
use tempfile::TempDir;

const TIB: u64 = 1 << 40;

/// A daemon with a disk `bad` that has limits, a disk `good` under load, and an admin socket.
struct Fixture {
    daemon: HostileDaemon,
    neighbour: Neighbour,
    admin: PathBuf,
    _folder: TempDir,
}

impl Fixture {
    fn start(limits: &str) -> Fixture {
        let folder = tempfile::tempdir().expect("a folder");
        let admin = folder.path().join("admin");
        let bad = format!("storage=ram,size=1M,queues=1{limits}");
        let disks = [("bad", bad.as_str()), ("good", "storage=ram,size=1M,queues=1")];
        let daemon = HostileDaemon::start_with(1, &disks, &["--admin", &admin.display().to_string()]);
        let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
        Fixture { daemon, neighbour, admin, _folder: folder }
    }

    fn connect(&self) -> HostileFrontend {
        HostileFrontend::connect(&self.daemon.socket("bad"), 0)
    }

    /// Returns the budget of the VMM of `bad`.
    fn budget(&self) -> TenantBudgetStat {
        let mut client = Client::connect_with(&self.admin, TIMEOUT.time()).expect("the admin socket");
        let stat = client.stat(&StatQuery::default()).expect("statistics");
        stat.disks.iter().find(|disk| disk.id == "bad").and_then(|disk| disk.budget).expect("a budget")
    }

    /// Checks that all resources are free again, that another VMM is served, and that the log named `key` once.
    fn finish(self, key: &str) {
        self.daemon.wait_for_session_end("bad");
        wait_for("the charges to end", || {
            let used = self.budget();
            (used.mappings.used + used.address_space_bytes.used + used.guest_memory_bytes.used == 0).then_some(())
        });
        let warnings = self.daemon.warnings("bad");
        assert_eq!(warnings.iter().filter(|line| line.contains(&format!("{key}: found"))).count(), 1, "{warnings:#?}");
        let mut next = HostileFrontend::start(&self.daemon.socket("bad"), 0, 1);
        assert!(completes_read(&mut next, 0));
        drop(next);
        self.neighbour.assert_progress("the refusal");
        self.neighbour.finish();
        self.daemon.stop();
    }
}

/// Returns true if the daemon accepts one more region.
fn add(frontend: &mut HostileFrontend, region: &FileRegion) -> bool {
    frontend.connection.try_send_acked(m::ADD_MEM_REG, &region.mem_reg_payload(), &[region.fd()]) == Some(0)
}

#[test]
fn mappings_are_bounded() {
    let fixture = Fixture::start(",max-mappings=8");
    let mut frontend = fixture.connect();
    for number in 0..6 {
        assert!(add(&mut frontend, &one_page_region(TIB + number * 4096)), "region {number}");
    }
    assert_eq!(fixture.budget().mappings.used, 8);
    assert!(!add(&mut frontend, &one_page_region(TIB + 6 * 4096)), "the ninth");
    drop(frontend);
    let used = fixture.budget();
    assert_eq!((used.mappings.highest, used.mappings.limit, used.mappings.refused), (8, Some(8), 1));
    fixture.finish("max-mappings");
}

/// 128 TiB of sparse memfds take all of a process's address space: no other VMM could share its memory.
#[test]
fn address_space_is_bounded_by_default() {
    let fixture = Fixture::start("");
    let mut frontend = fixture.connect();
    let accepted = (0..64).take_while(|number| {
        let region = FileRegion::new((1 + 2 * number) * TIB, (1 + 2 * number) * TIB, 2 * TIB - (1 << 20), 0);
        add(&mut frontend, &region)
    });
    assert_eq!(accepted.count(), 4, "regions of 2 TiB in 8 TiB");
    drop(frontend);
    let region = FileRegion::new(0, TIB, TIB, 0);
    let other = HostileFrontend::with_memory(&fixture.daemon.socket("bad"), 0, SharedMemory { regions: vec![region] });
    drop(other);
    assert_eq!(fixture.budget().address_space_bytes.refused, 1);
    fixture.finish("max-address-space");
}

/// Without a budget of the process, the next thread gets no signal stack, and the standard library ends the process.
#[test]
fn vmms_that_take_all_mappings_of_the_process_are_refused_and_threads_still_start() {
    let disks = ["a", "b", "good"].map(|id| (id, "storage=ram,size=1M,queues=1"));
    let daemon = HostileDaemon::start_with_variables(1, &disks, &[], &[("MQBLK_TEST_MAX_MAP_COUNT", "800")]);
    let neighbour = start_neighbour(daemon.socket("good"), 1, 3);
    let hogs = ["a", "b"].map(|id| {
        let mut frontend = HostileFrontend::connect(&daemon.socket(id), 0);
        let accepted = (0..500).take_while(|number| add(&mut frontend, &one_page_region(TIB + number * 4096))).count();
        (frontend, accepted)
    });
    let accepted = hogs.each_ref().map(|(_, accepted)| *accepted);
    assert!((500..700).contains(&accepted.iter().sum::<usize>()), "regions of both: {accepted:?}");
    let refused = wait_for("a line about the refusal", || {
        daemon.warnings("b").into_iter().find(|line| line.contains("mappings: found"))
    });
    assert!(
        refused.contains("of the process's 800 in use") && refused.contains("sysctl vm.max_map_count"),
        "{refused}"
    );
    // Each client of the admin socket has a thread.
    let mut clients: Vec<Client> =
        (0..4).map(|_| Client::connect(&daemon.folder().join("admin.sock")).expect("the admin socket")).collect();
    assert!(clients.iter_mut().all(|client| client.stat(&StatQuery::default()).is_ok()));
    neighbour.assert_progress("all mappings are taken");
    drop(hogs);
    for id in ["a", "b"] {
        daemon.wait_for_session_end(id);
        assert!(completes_read(&mut HostileFrontend::start(&daemon.socket(id), 0, 1), 0), "{id}: they are given back");
    }
    neighbour.finish();
    daemon.stop();
}

#[test]
fn guest_memory_is_bounded_by_mem_budget() {
    let fixture = Fixture::start(",mem-budget=2M");
    let mut frontend = fixture.connect();
    // The same memory as before: it replaces the table.
    frontend.set_memory_table();
    assert_eq!(fixture.budget().guest_memory_bytes.used, 2 << 20);
    assert!(!add(&mut frontend, &one_page_region(TIB)), "one page more");
    drop(frontend);
    assert_eq!(fixture.budget().guest_memory_bytes.refused, 1);
    fixture.finish("mem-budget");
}

#[test]
fn connections_and_messages_have_a_rate() {
    let fixture = Fixture::start("");
    let socket = fixture.daemon.socket("bad");
    // Until one of them waits.
    wait_for("a connection that waits", || {
        (0..200).for_each(|_| drop(VhostUserSocket::connect(&socket)));
        (fixture.budget().delayed_connections > 0).then_some(())
    });
    let mut connection = VhostUserSocket::connect(&socket);
    wait_for("a message that waits", || {
        // As many as fit in the socket, with their replies.
        for _ in 0..10 {
            (0..50).for_each(|_| _ = connection.send(m::GET_FEATURES, VERSION, &[], &[]));
            (0..50).for_each(|_| _ = connection.receive());
        }
        (fixture.budget().delayed_messages > 0).then_some(())
    });
    assert_ne!(connection.request_u64(m::GET_FEATURES), 0, "it is served on");
    fixture.neighbour.assert_progress("floods");
    fixture.neighbour.finish();
    drop(connection);
    fixture.daemon.stop();
}
