//! Runs in dom0: tests xenstore, grants and event channels of a real Xen through our crates. Domain 0 plays both ends.
//!
//! Prints a line for each passed part, and panics at the first failure.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_memory::{
    CopyDirection, DomainId, GrantCopy, GrantRef, GrantStatus, GuestAddress, PAGE_BYTES, PageArena, PageSlot,
};
use mqblk_xen::store::{Access, Permission, XenstoreErrorKind};
use mqblk_xen::{EventPort, Xen};
use rustix::event::{PollFd, PollFlags, poll};

const US: DomainId = DomainId(0);

/// No domain has this id.
const NO_DOMAIN: DomainId = DomainId(77);

/// A grant reference that is not granted.
const NO_GRANT: GrantRef = GrantRef(30_000);

/// Timeout of an expected event. An emulated CPU may need milliseconds.
const EVENT_TIMEOUT: Duration = Duration::from_secs(60);

/// Time that the test waits for an event that must not come.
const QUIET_TIME: Duration = Duration::from_millis(300);

/// A group of checks.
type CheckGroup = fn(&Arc<dyn Xen>);

fn main() {
    let xen = mqblk_xen::connect_real().expect("a Xen");
    assert_eq!(xen.domain(), US);
    let parts: [(&str, CheckGroup); 7] = [
        ("xenstore: values, directories, permissions", values),
        ("xenstore: transactions that conflict", transactions),
        ("xenstore: watches", watches),
        ("grants: copies, each with its status", copies),
        ("grants: maps, all or nothing", maps),
        ("grants: thousands of pages", many_pages),
        ("event channels", events),
    ];
    for (name, part) in parts {
        let before = descriptors();
        part(&xen);
        assert_eq!(descriptors(), before, "{name}: open descriptors before and after");
        writeln!(std::io::stdout(), "as expected: {name}").expect("stdout");
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc/self/fd").count()
}

fn values(xen: &Arc<dyn Xen>) {
    let mut store = xen.store().expect("a connection");
    assert_eq!(store.read("/test/missing").expect("a read"), None);
    store.write("/test/a/b", "value").expect("a write");
    store.write("/test/a/empty", "").expect("an empty value");
    assert_eq!(store.read("/test/a/b").expect("a read").as_deref(), Some("value"));
    assert_eq!(store.read("/test/a/empty").expect("a read").as_deref(), Some(""));
    let mut names = store.list("/test/a").expect("a list").expect("a directory");
    names.sort();
    assert_eq!(names, ["b", "empty"]);
    assert_eq!(store.list("/test/missing").expect("a list"), None);
    let permissions =
        [Permission { domain: US, access: Access::None }, Permission { domain: US, access: Access::Read }];
    store.set_permissions("/test/a", &permissions).expect("permissions");
    assert_eq!(store.permissions("/test/a").expect("permissions").as_deref(), Some(&permissions[..]));
    // xenstored of Xen 4.17 rejects permissions for unknown domains.
    let strange = [Permission { domain: NO_DOMAIN, access: Access::ReadWrite }];
    let refused = store.set_permissions("/test/a", &strange).expect_err("a domain that is not there");
    assert_eq!(refused.errno(), "ENOENT", "{refused}");
    let long = "x".repeat(3900);
    store.write("/test/long", &long).expect("a long value");
    assert_eq!(store.read("/test/long").expect("a read"), Some(long));
    store.remove("/test").expect("a removal");
    assert_eq!(store.read("/test/a/b").expect("a read"), None);
}

fn transactions(xen: &Arc<dyn Xen>) {
    let (mut store, mut other) = (xen.store().expect("a connection"), xen.store().expect("another"));
    store.write("/test/counter", "0").expect("a write");
    let mut tries = 0;
    let sum = store
        .transaction(|transaction| {
            tries += 1;
            let seen: u32 = transaction.read("/test/counter")?.unwrap_or_default().parse().expect("a number");
            if tries <= 3 {
                // A concurrent write of a node that was read: EAGAIN at the commit.
                other.write("/test/counter", &(seen + 10).to_string())?;
            }
            transaction.write("/test/counter", &(seen + 1).to_string())?;
            Ok(seen + 1)
        })
        .expect("a transaction");
    assert_eq!((tries, sum), (4, 31));
    assert_eq!(store.read("/test/counter").expect("a read").as_deref(), Some("31"));
    let undone = store.transaction(|transaction| -> Result<(), _> {
        transaction.write("/test/counter", "99")?;
        transaction.set_permissions("/test/counter", &[Permission { domain: NO_DOMAIN, access: Access::ReadWrite }])
    });
    assert!(undone.is_err());
    assert_eq!(store.read("/test/counter").expect("a read").as_deref(), Some("31"), "an aborted transaction wrote");
    store.remove("/test").expect("a removal");
}

fn watches(xen: &Arc<dyn Xen>) {
    let (mut store, mut other) = (xen.store().expect("a connection"), xen.store().expect("another"));
    store.write("/test/seen", "1").expect("a write");
    store.watch("/test/seen", "token one").expect("a watch");
    let event = store.next_event(Some(EVENT_TIMEOUT)).expect("an event").expect("the first event comes at once");
    assert_eq!((event.path.as_str(), event.token.as_str()), ("/test/seen", "token one"));
    assert_eq!(store.next_event(Some(QUIET_TIME)).expect("no error"), None);
    other.write("/test/seen/below", "x").expect("a write");
    let event = store.next_event(Some(EVENT_TIMEOUT)).expect("an event").expect("a change below");
    assert_eq!(event.path, "/test/seen/below");
    other.write("/test/unseen", "x").expect("a write");
    assert_eq!(store.next_event(Some(QUIET_TIME)).expect("no error"), None);
    let twice = store.watch("/test/seen", "token one").expect_err("the same watch twice");
    assert!(matches!(twice.kind, XenstoreErrorKind::Refused(_)), "{twice}");
    // Many writes of one node may be coalesced, and their events are bounded.
    for round in 0..2000 {
        other.write("/test/seen", &round.to_string()).expect("a write");
    }
    let mut count = 0;
    while store.next_event(Some(QUIET_TIME)).expect("no error").is_some() {
        count += 1;
    }
    assert!((1..=2000).contains(&count), "{count} events");
    store.unwatch("/test/seen", "token one").expect("an end");
    other.write("/test/seen", "2").expect("a write");
    assert_eq!(store.next_event(Some(QUIET_TIME)).expect("no error"), None);
    store.remove("/test").expect("a removal");
}

/// Returns the content of a page; no two pages are equal.
fn pattern(page: u32) -> Vec<u8> {
    (0..PAGE_BYTES).map(|at| (at % 251 + page * 7 + 1) as u8).collect()
}

fn at(page: u32) -> GuestAddress {
    GuestAddress(u64::from(page) * u64::from(PAGE_BYTES))
}

fn copies(xen: &Arc<dyn Xen>) {
    let shared = xen.share(US, 4, true).expect("pages to share");
    let read_only = xen.share(US, 1, false).expect("a page to share for reading");
    let arena = PageArena::reserve(8).expect("an arena");
    let mut grants = xen.grants(US).expect("gntdev");
    for page in 0..4 {
        shared.memory.write(at(page), &pattern(page)).expect("a page");
    }
    let copy = |gref, slot, offset, len, direction| GrantCopy {
        gref,
        offset,
        len,
        slot: PageSlot(slot),
        slot_offset: offset,
        direction,
        status: GrantStatus(1),
    };
    let mut batch = [
        copy(shared.refs[0], 0, 0, 4096, CopyDirection::FromGrant),
        copy(NO_GRANT, 1, 0, 512, CopyDirection::FromGrant),
        copy(shared.refs[2], 2, 512, 1024, CopyDirection::FromGrant),
        copy(read_only.refs[0], 0, 0, 512, CopyDirection::ToGrant),
        copy(shared.refs[3], 0, 0, 512, CopyDirection::ToGrant),
    ];
    grants.copy(&arena, &mut batch).expect("a batch");
    let statuses: Vec<GrantStatus> = batch.iter().map(|copy| copy.status).collect();
    assert_eq!(
        statuses,
        [GrantStatus::OKAY, GrantStatus::BAD_REF, GrantStatus::OKAY, GrantStatus::GENERAL_ERROR, GrantStatus::OKAY]
    );
    let mut seen = vec![0; 4096];
    arena.memory().read(at(0), &mut seen).expect("slot 0");
    assert_eq!(seen, pattern(0));
    arena.memory().read(at(2), &mut seen).expect("slot 2");
    assert_eq!(seen[512..1536], pattern(2)[512..1536]);
    assert!(seen[..512].iter().all(|&byte| byte == 0), "what was not copied");
    shared.memory.read(at(3), &mut seen).expect("page 3");
    assert_eq!((&seen[..512], &seen[512..]), (&pattern(0)[..512], &pattern(3)[512..]));

    // A copy beyond its page fails alone, and copies nothing beyond.
    let mut batch = [
        copy(shared.refs[1], 4, 0, 512, CopyDirection::FromGrant),
        copy(shared.refs[1], 5, 4000, 512, CopyDirection::FromGrant),
    ];
    grants.copy(&arena, &mut batch).expect("a batch with a copy that leaves its page");
    assert_eq!(batch[0].status, GrantStatus::OKAY);
    assert_ne!(batch[1].status, GrantStatus::OKAY);

    let mut strange = xen.grants(NO_DOMAIN).expect("gntdev");
    let mut batch = [copy(shared.refs[0], 0, 0, 512, CopyDirection::FromGrant)];
    strange.copy(&arena, &mut batch).expect("a batch");
    assert_eq!(batch[0].status, GrantStatus::BAD_DOMAIN);
}

fn maps(xen: &Arc<dyn Xen>) {
    let shared = xen.share(US, 4, true).expect("pages to share");
    let read_only = xen.share(US, 1, false).expect("a page to share for reading");
    let arena = PageArena::reserve(8).expect("an arena");
    let memory = arena.memory();
    let mut grants = xen.grants(US).expect("gntdev");
    memory.write(at(2), b"what the slot held").expect("slot 2");

    grants.map(&arena, PageSlot(2), &shared.refs, true).expect("a map");
    let mut seen = [0; 5];
    shared.memory.write(at(3), b"there").expect("page 3");
    memory.read(at(5), &mut seen).expect("slot 5");
    assert_eq!(&seen, b"there", "what they write we see");
    memory.write(at(4), b"here!").expect("slot 4");
    shared.memory.read(at(2), &mut seen).expect("page 2");
    assert_eq!(&seen, b"here!", "what we write they see");
    // The adjacent slots keep the process's own pages.
    memory.write(at(1), b"own").and_then(|()| memory.write(at(6), b"own")).expect("slots 1 and 6");

    let refused = grants.map(&arena, PageSlot(6), &[shared.refs[0], NO_GRANT], true);
    assert!(refused.is_err(), "a map with a grant that is not there");
    assert!(grants.map(&arena, PageSlot(6), &read_only.refs, true).is_err(), "a read-only grant mapped for writing");
    memory.write(at(6), b"own").expect("slot 6 is ours after a map that failed");
    grants.map(&arena, PageSlot(6), &read_only.refs, false).expect("a map for reading");
    read_only.memory.write(at(0), b"fixed").expect("the page");
    memory.read(at(6), &mut seen).expect("slot 6");
    assert_eq!(&seen, b"fixed");

    grants.unmap(&arena, PageSlot(2)).expect("an unmap");
    grants.unmap(&arena, PageSlot(6)).expect("an unmap");
    memory.read(at(5), &mut seen).expect("slot 5");
    assert_eq!(seen, [0; 5], "zero pages of our own after an unmap");
    memory.write(at(5), b"mine!").expect("slot 5");
    shared.memory.read(at(3), &mut seen).expect("page 3");
    assert_eq!(&seen, b"there", "what we write now they do not see");
    // Mapped again, and dropped without an unmap: closing the descriptor unmaps the pages.
    grants.map(&arena, PageSlot(0), &shared.refs, true).expect("a map");
    drop(grants);
    drop(arena);
    drop(shared);
}

fn many_pages(xen: &Arc<dyn Xen>) {
    const PAGES: u32 = 1056;
    let shared = xen.share(US, PAGES, true).expect("pages to share");
    let arena = PageArena::reserve(PAGES).expect("an arena");
    let mut grants = xen.grants(US).expect("gntdev");
    for page in 0..PAGES {
        shared.memory.write(at(page), &page.to_le_bytes()).expect("a page");
        grants.map(&arena, PageSlot(page), &[shared.refs[page as usize]], true).expect("a map of one page");
    }
    for page in 0..PAGES {
        let mut seen = [0; 4];
        arena.memory().read(at(page), &mut seen).expect("a slot");
        assert_eq!(u32::from_le_bytes(seen), page);
    }
    for page in 0..PAGES {
        grants.unmap(&arena, PageSlot(page)).expect("an unmap");
    }
    // The largest batch of copies that a ring can need.
    let mut batch: Vec<GrantCopy> = (0..PAGES)
        .map(|page| GrantCopy {
            gref: shared.refs[page as usize],
            offset: 0,
            len: 4096,
            slot: PageSlot(page),
            slot_offset: 0,
            direction: CopyDirection::FromGrant,
            status: GrantStatus(1),
        })
        .collect();
    grants.copy(&arena, &mut batch).expect("a batch");
    assert!(batch.iter().all(|copy| copy.status == GrantStatus::OKAY));
}

/// Returns true if an event comes within the limit.
fn event_comes(port: &EventPort, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(&port.descriptor, PollFlags::IN)];
        let wait = rustix::event::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut fds, Some(&wait)) {
            Ok(count) => return count > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
    }
}

fn events(xen: &Arc<dyn Xen>) {
    let front = xen.alloc_unbound(US).expect("a port");
    let back = xen.bind_interdomain(US, front.port).expect("its other end");
    // A binding may start with a pending event.
    for end in [&front, &back] {
        if event_comes(end, QUIET_TIME) {
            end.channel.take();
            end.channel.unmask();
        }
    }
    front.channel.notify();
    assert!(event_comes(&back, EVENT_TIMEOUT), "an event");
    assert!(!event_comes(&front, QUIET_TIME), "its own event");
    back.channel.take();
    assert!(!event_comes(&back, QUIET_TIME), "it was taken");
    // Masked until it is unmasked; an event in between is delivered then.
    front.channel.notify();
    assert!(!event_comes(&back, QUIET_TIME), "an event of a masked port");
    back.channel.unmask();
    assert!(event_comes(&back, EVENT_TIMEOUT), "an event that came while the port was masked");
    back.channel.take();
    back.channel.unmask();
    back.channel.notify();
    assert!(event_comes(&front, EVENT_TIMEOUT), "the other way");

    assert!(xen.bind_interdomain(US, front.port).is_err(), "a second binding of a port");
    assert!(xen.bind_interdomain(NO_DOMAIN, front.port).is_err(), "a domain that is not there");
    // When a backend dies, its successor can bind the port.
    drop(back);
    let next = xen.bind_interdomain(US, front.port).expect("a successor");
    if event_comes(&next, QUIET_TIME) {
        next.channel.take();
        next.channel.unmask();
    }
    front.channel.notify();
    assert!(event_comes(&next, EVENT_TIMEOUT), "an event for the successor");
}
