//! Tests of xenstored through its clients; submodules send raw messages.

mod hostile;
mod model;

use std::time::Duration;

use mqblk_memory::DomainId;

use crate::{Machine, XenstoreQuota, connect};
use mqblk_xen::store::{Access, Permission, Xenstore, XenstoreError};

struct TestMachine {
    machine: Machine,
    toolstack: Xenstore,
    guest: Xenstore,
    _folder: tempfile::TempDir,
}

/// A machine with a guest, domain 1.
fn test_machine() -> TestMachine {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::start(folder.path()).unwrap();
    machine.create_domain(DomainId(1)).unwrap();
    let toolstack = crate::connect_dom0(folder.path()).unwrap().store().unwrap();
    let guest = connect(folder.path(), DomainId(1)).unwrap().store().unwrap();
    TestMachine { machine, toolstack, guest, _folder: folder }
}

fn permission(access: Access, domain: u16) -> Permission {
    Permission { domain: DomainId(domain), access }
}

fn errno<T: std::fmt::Debug>(result: Result<T, XenstoreError>) -> String {
    result.unwrap_err().errno().to_owned()
}

/// Returns the next event's path and token.
fn event(store: &mut Xenstore) -> Option<(String, String)> {
    // Events arrive before the reply to a request that is sent after their cause.
    let _ = store.read("/");
    store.next_event(Some(Duration::from_millis(200))).unwrap().map(|event| (event.path, event.token))
}

fn expect(store: &mut Xenstore, path: &str, token: &str) {
    assert_eq!(event(store), Some((path.to_owned(), token.to_owned())));
}

#[test]
fn values_are_kept() {
    let TestMachine { machine: _machine, mut toolstack, mut guest, _folder } = test_machine();
    toolstack.write("/a/b/c", "value").unwrap();
    assert_eq!(toolstack.read("/a/b/c").unwrap().unwrap(), "value");
    assert_eq!((toolstack.read("/a").unwrap().unwrap(), toolstack.read("/a/x").unwrap()), (String::new(), None));
    toolstack.mkdir("/a/b/d").unwrap();
    toolstack.mkdir("/a/b/c").unwrap();
    assert_eq!(toolstack.read("/a/b/c").unwrap().unwrap(), "value", "it was there");
    assert_eq!(toolstack.list("/a/b").unwrap().unwrap(), ["c", "d"]);
    assert_eq!(toolstack.list("/none").unwrap(), None);
    toolstack.remove("/a/b").unwrap();
    toolstack.remove("/a/b").unwrap();
    assert_eq!(errno(toolstack.remove("/")), "EINVAL");
    assert!(toolstack.list("/a").unwrap().unwrap().is_empty());
    assert_eq!(
        (toolstack.read("domid").unwrap().unwrap(), guest.read("domid").unwrap().unwrap()),
        ("0".into(), "1".into())
    );
    assert_eq!(guest.read("/local/domain/1/name").unwrap().unwrap(), "domain-1");
}

#[test]
fn a_guest_writes_only_its_own_nodes() {
    let TestMachine { machine: _machine, mut toolstack, mut guest, _folder } = test_machine();
    toolstack.write("/local/domain/0/backend/mqblk/1/51712/state", "1").unwrap();
    for path in
        ["/x", "/local/domain/2", "/local/domain/1/x", "device/vbd", "/local/domain/0/backend/mqblk/1/51712/state"]
    {
        assert_eq!(errno(guest.write(path, "v")), "EACCES", "{path}");
        assert_eq!(errno(guest.mkdir(path)), "EACCES", "{path}");
        assert_eq!(errno(guest.remove(path)), "EACCES", "{path}");
        assert_eq!(errno(guest.set_permissions(path, &[permission(Access::ReadWrite, 1)])), "EACCES", "{path}");
    }
    assert_eq!(errno(guest.read("/local/domain/0/backend")), "EACCES");
    assert_eq!(errno(guest.read("/local/domain/2/name")), "EACCES", "a missing node is not revealed");
    assert_eq!(guest.read("/local/domain/1/device/vbd").unwrap(), None, "here it is");

    // As a toolstack does for a disk.
    let front = "/local/domain/1/device/vbd/51712";
    toolstack.mkdir(front).unwrap();
    toolstack.set_permissions(front, &[permission(Access::None, 1), permission(Access::Read, 0)]).unwrap();
    toolstack.write(&format!("{front}/state"), "1").unwrap();
    let back = "/local/domain/0/backend/mqblk/1/51712";
    toolstack.set_permissions(back, &[permission(Access::None, 0), permission(Access::Read, 1)]).unwrap();
    toolstack.write(&format!("{back}/sectors"), "8").unwrap();
    assert_eq!(guest.read(&format!("{back}/sectors")).unwrap().unwrap(), "8", "it inherits the right to read");
    assert_eq!(errno(guest.write(&format!("{back}/sectors"), "9")), "EACCES");
    guest.write("device/vbd/51712/state", "3").unwrap();
    guest.write("device/vbd/51712/queue-0/ring-ref", "8").unwrap();
    assert_eq!(toolstack.read(&format!("{front}/queue-0/ring-ref")).unwrap().unwrap(), "8");
    let inherited = guest.permissions("device/vbd/51712/queue-0").unwrap().unwrap();
    assert_eq!(inherited, [permission(Access::None, 1), permission(Access::Read, 0)]);

    // A guest may grant access to others, but not change the owner.
    let shared = [permission(Access::Read, 1), permission(Access::ReadWrite, 2)];
    guest.set_permissions("data", &shared).unwrap();
    assert_eq!(errno(guest.set_permissions("data", &[permission(Access::None, 0)])), "EPERM");
    let mut other = connect(_folder.path(), DomainId(2)).unwrap().store().unwrap();
    other.write("/local/domain/1/data/x", "from 2").unwrap();
    let owned = guest.permissions("data/x").unwrap().unwrap();
    assert_eq!(owned, [permission(Access::Read, 2), permission(Access::ReadWrite, 2)], "who makes a node owns it");
    assert_eq!(guest.read("data/x").unwrap().unwrap(), "from 2", "others may read it");
    assert_eq!(errno(guest.write("data/x", "")), "EACCES");
    guest.set_permissions("data", &[permission(Access::Write, 1)]).unwrap();
    other.write("/local/domain/1/data", "blind").unwrap();
    assert_eq!(errno(other.read("/local/domain/1/data")), "EACCES");
}

#[test]
fn watches_cover_everything_below() {
    let TestMachine { machine, mut toolstack, mut guest, _folder } = test_machine();
    toolstack.watch("/a", "one").unwrap();
    expect(&mut toolstack, "/a", "one");
    assert_eq!(event(&mut toolstack), None);
    toolstack.write("/a/b/c", "1").unwrap();
    expect(&mut toolstack, "/a/b/c", "one");
    toolstack.write("/ab", "1").unwrap();
    toolstack.mkdir("/a/b/c").unwrap();
    assert_eq!(event(&mut toolstack), None, "a neighbour; what is there is not made");
    toolstack.watch("/a/b/c", "two").unwrap();
    toolstack.watch("/a/b/none", "three").unwrap();
    expect(&mut toolstack, "/a/b/c", "two");
    expect(&mut toolstack, "/a/b/none", "three");
    toolstack.remove("/a/b").unwrap();
    expect(&mut toolstack, "/a/b", "one");
    expect(&mut toolstack, "/a/b/c", "two");
    assert_eq!(event(&mut toolstack), None);
    assert_eq!(errno(toolstack.watch("/a", "one")), "EEXIST");
    toolstack.unwatch("/a", "one").unwrap();
    assert_eq!(errno(toolstack.unwatch("/a", "one")), "ENOENT");
    toolstack.write("/a", "1").unwrap();
    assert_eq!(event(&mut toolstack), None);

    // Relative paths, and only readable nodes.
    guest.watch("device", "dev").unwrap();
    guest.watch("/local/domain/0", "host").unwrap();
    expect(&mut guest, "device", "dev");
    expect(&mut guest, "/local/domain/0", "host");
    toolstack.write("/local/domain/1/device/vbd/51712/state", "1").unwrap();
    toolstack.write("/local/domain/0/secret", "1").unwrap();
    expect(&mut guest, "device/vbd/51712/state", "dev");
    assert_eq!(event(&mut guest), None);
    let seen = "/local/domain/0/secret";
    toolstack.set_permissions(seen, &[permission(Access::None, 0), permission(Access::Read, 1)]).unwrap();
    expect(&mut guest, seen, "host");
    toolstack.remove(seen).unwrap();
    expect(&mut guest, seen, "host");

    // Special watches: domain 0, and others if it permits them.
    toolstack.watch("@introduceDomain", "in").unwrap();
    guest.watch("@introduceDomain", "in").unwrap();
    expect(&mut toolstack, "@introduceDomain", "in");
    expect(&mut guest, "@introduceDomain", "in");
    machine.create_domain(DomainId(5)).unwrap();
    expect(&mut toolstack, "@introduceDomain", "in");
    assert_eq!(event(&mut guest), None);
    assert_eq!(errno(guest.set_permissions("@introduceDomain", &[permission(Access::Read, 0)])), "EACCES");
    toolstack.set_permissions("@introduceDomain", &[permission(Access::Read, 0)]).unwrap();
    machine.create_domain(DomainId(6)).unwrap();
    machine.create_domain(DomainId(6)).unwrap();
    expect(&mut guest, "@introduceDomain", "in");
    assert_eq!(event(&mut guest), None, "it was there");
}

#[test]
fn a_transaction_is_atomic() {
    let TestMachine { machine, mut toolstack, mut guest, _folder } = test_machine();
    toolstack.set_permissions("/local/domain/1/device", &[permission(Access::Read, 1)]).unwrap();
    guest.watch("device", "t").unwrap();
    expect(&mut guest, "device", "t");
    let mut other = crate::connect_dom0(_folder.path()).unwrap().store().unwrap();
    toolstack
        .transaction(|transaction| {
            transaction.write("/local/domain/1/device/a", "1")?;
            transaction.write("/local/domain/1/device/b", "2")?;
            transaction.write("/local/domain/1/device/a", "3")?;
            assert_eq!(other.list("/local/domain/1/device")?.unwrap().len(), 0);
            assert_eq!(transaction.list("/local/domain/1/device")?.unwrap(), ["a", "b"]);
            Ok(())
        })
        .unwrap();
    assert_eq!(other.read("/local/domain/1/device/a").unwrap().unwrap(), "3");
    expect(&mut guest, "device/b", "t");
    expect(&mut guest, "device/a", "t");
    assert_eq!(event(&mut guest), None, "one event for each node");

    // An aborted transaction changes nothing.
    let aborted = toolstack.transaction(|transaction| {
        transaction.remove("/local/domain/1/device")?;
        assert_eq!(transaction.read("/local/domain/1/device/a")?, None);
        transaction.write("no such / path", "")
    });
    assert_eq!(errno(aborted), "EINVAL");
    assert_eq!(other.list("/local/domain/1/device").unwrap().unwrap(), ["a", "b"]);

    // A change of an accessed node by another writer repeats the transaction; other changes do not.
    for (path, expected) in
        [("/x/read", 2), ("/x/listed/new", 2), ("/x/missing", 2), ("/x/written", 2), ("/y", 1), ("/x/listed/old", 1)]
    {
        other.write("/x/listed/old", "").unwrap();
        other.write("/x/read", "").unwrap();
        other.write("/x/written", "").unwrap();
        let mut attempts = 0;
        toolstack
            .transaction(|transaction| {
                attempts += 1;
                transaction.read("/x/read")?;
                transaction.read("/x/missing")?;
                transaction.list("/x/listed")?;
                transaction.write("/x/written", "by us")?;
                if attempts == 1 {
                    other.write(path, "by them")?;
                }
                Ok(())
            })
            .unwrap();
        assert_eq!(attempts, expected, "{path}");
        other.remove("/x").unwrap();
    }
    machine.inject_store_conflicts(3);
    let mut attempts = 0;
    toolstack
        .transaction(|transaction| {
            attempts += 1;
            transaction.write("/z", "")
        })
        .unwrap();
    assert_eq!(attempts, 4);
}

#[test]
fn a_guest_is_limited_by_its_quota() {
    let TestMachine { machine, mut toolstack, mut guest, _folder } = test_machine();
    machine.set_store_quota(XenstoreQuota {
        nodes: 20,
        watches: 3,
        transactions: 2,
        value_bytes: 100,
        permissions: 2,
        transaction_nodes: 8,
    });
    // It owns three nodes already: data, drivers, error.
    let made = (0..100).take_while(|number| guest.mkdir(&format!("data/{number}")).is_ok()).count();
    assert_eq!(made, 17);
    assert_eq!(errno(guest.write("data/a/b/c", "")), "ENOSPC");
    guest.write("data/3", "still").unwrap();
    guest.remove("data/3").unwrap();
    guest.remove("data/4").unwrap();
    assert_eq!(errno(guest.write("data/a/b/c", "")), "ENOSPC", "there is room for two");
    guest.write("data/a/b", "").unwrap();
    guest.remove("data/a").unwrap();
    toolstack.write("/local/domain/1/data/from/above/it/all", "").unwrap();
    assert_eq!(errno(guest.mkdir("data/one")), "ENOSPC", "what is made below its nodes is its own");
    toolstack.remove("/local/domain/1/data/from").unwrap();

    assert_eq!(errno(guest.write("data/5", &"v".repeat(101))), "ENOSPC");
    guest.write("data/5", &"v".repeat(100)).unwrap();
    toolstack.write("/long", &"v".repeat(4000)).unwrap();
    let three = [permission(Access::None, 1), permission(Access::Read, 0), permission(Access::Read, 2)];
    assert_eq!(errno(guest.set_permissions("data", &three)), "ENOSPC");

    let mut second = connect(_folder.path(), DomainId(1)).unwrap().store().unwrap();
    guest.watch("a", "1").unwrap();
    second.watch("a", "1").unwrap();
    second.watch("a", "2").unwrap();
    assert_eq!((errno(guest.watch("a", "3")), errno(second.watch("a", "3"))), ("E2BIG".into(), "E2BIG".into()));
    drop(second);
    let freed = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(1));
        guest.watch("a", "3").is_ok()
    });
    assert!(freed, "a connection's watches end with it");

    // In a transaction too.
    assert_eq!(
        errno(guest.transaction(|transaction| {
            (0..9).try_for_each(|number| transaction.read(&format!("data/{number}")).map(|_| ()))
        })),
        "ENOSPC"
    );
    assert_eq!(
        errno(guest.transaction(|transaction| {
            (20..24).try_for_each(|number| transaction.mkdir(&format!("data/{number}")))
        })),
        "ENOSPC"
    );
    toolstack
        .transaction(|transaction| (0..50).try_for_each(|number| transaction.mkdir(&format!("/t/{number}"))))
        .unwrap();
    assert_eq!(guest.list("data").unwrap().unwrap().len(), 15);
}

#[test]
fn a_long_directory_is_listed_in_parts() {
    let TestMachine { machine: _machine, mut toolstack, guest: _, _folder } = test_machine();
    let mut names: Vec<String> = (0..700).map(|number| format!("a-name-of-some-length-{number:04}")).collect();
    for name in &names {
        toolstack.mkdir(&format!("/long/{name}")).unwrap();
    }
    assert_eq!(toolstack.list("/long").unwrap().unwrap(), names);
    // A name that fills the rest of a message, and all lengths around it.
    for len in (1..40).chain([1000]) {
        let name = "z".repeat(len);
        toolstack.mkdir(&format!("/long/{name}")).unwrap();
        names.push(name);
        assert_eq!(toolstack.list("/long").unwrap().unwrap(), names, "{len}");
    }
}
