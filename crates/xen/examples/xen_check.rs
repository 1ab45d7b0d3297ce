//! Checks the interfaces of a real Xen that a backend and a frontend need, within one domain: xenstore over its socket
//! and the kernel's node, grants, grant copies, event channels. Run it as root in a Xen domain, for example dom0.
//! Prints `PASS` or `FAIL` with a reason for each check; the exit code is 1 if any has failed.
#![forbid(unsafe_code)]

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use mqblk_memory::{
    CopyDirection, GrantAccess, GrantCopy, GrantRef, GrantStatus, GuestAddress, PAGE_BYTES, PageArena, PageSlot,
};
use mqblk_xen::store::{Access, CONNECTION_PATHS, Permission, Xenstore};
use mqblk_xen::{EventPort, SharedPages, Xen, connect_real};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

type Failure = Box<dyn std::error::Error>;
type Check = Result<(), Failure>;
type Named<T> = (&'static str, fn(&T) -> Check);

/// Fails the check unless the two are equal.
macro_rules! same {
    ($found:expr, $expected:expr) => {
        match (&$found, &$expected) {
            (found, expected) if *found != *expected => {
                return Err(format!("line {}: found {found:?}, expected {expected:?}", line!()).into());
            }
            _ => {}
        }
    };
}

/// Directory of the checks in xenstore, below the domain's directory.
const CHECK_DIRECTORY: &str = "mqblk-check";
const PAGE: usize = PAGE_BYTES as usize;
/// Timeout of an event. Emulated machines are slow.
const EVENT_TIMEOUT: Duration = Duration::from_secs(20);
/// Time that a check waits for the absence of an event.
const SILENCE: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    let xen = match connect_real() {
        Ok(xen) => xen,
        Err(error) => {
            say(&format!("FAIL real: {error}"));
            return ExitCode::FAILURE;
        }
    };
    say(&format!("domain {}", xen.domain().0));
    let mut failed = 0;
    for path in CONNECTION_PATHS.into_iter().filter(|path| Path::new(path).exists()) {
        let checks: [Named<Path>; 4] = [
            ("values", values),
            ("long directory", long_directory),
            ("transactions", transactions),
            ("watches", watches),
        ];
        for (name, check) in checks {
            failed += report(&format!("{name} over {path}"), check(Path::new(path)));
        }
    }
    let checks: [Named<dyn Xen>; 8] = [
        ("pages are shared and mapped", mapping),
        ("grants that are not there", bad_grants),
        ("mappings come and go", many_mappings),
        ("copies", copies),
        ("copies that fail alone", bad_copies),
        ("events", events),
        ("an end that comes again", rebinding),
        ("shares that end", shares_that_end),
    ];
    for (name, check) in checks {
        let before = descriptors();
        let result = check(&*xen).and_then(|()| {
            same!(descriptors(), before);
            Ok(())
        });
        failed += report(name, result);
    }
    say(&format!("{failed} failed"));
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Fails only if the console is closed.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn report(name: &str, result: Check) -> u32 {
    match result {
        Ok(()) => say(&format!("PASS {name}")),
        Err(error) => {
            say(&format!("FAIL {name}: {error}"));
            return 1;
        }
    }
    0
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

fn values(xenstore_path: &Path) -> Check {
    let mut store = Xenstore::connect(xenstore_path)?;
    store.remove(CHECK_DIRECTORY)?;
    let path = format!("{CHECK_DIRECTORY}/a/b");
    same!(store.read(&path)?, None);
    same!(store.list(CHECK_DIRECTORY)?, None);
    store.write(&path, "value")?;
    same!(store.read(&path)?.as_deref(), Some("value"));
    store.write(&path, "")?;
    same!(store.read(&path)?.as_deref(), Some(""));
    let long = "x".repeat(2048);
    store.write(&path, &long)?;
    same!(store.read(&path)?, Some(long));
    store.mkdir(&format!("{CHECK_DIRECTORY}/c"))?;
    store.mkdir(&format!("{CHECK_DIRECTORY}/c"))?;
    let mut names = store.list(CHECK_DIRECTORY)?.unwrap_or_default();
    names.sort();
    same!(names, ["a", "c"]);
    same!(store.list(&path)?, Some(vec![]));
    let owner = store.permissions(&path)?.and_then(|list| list.first().copied()).ok_or("no owner")?;
    let wanted = [owner, Permission { domain: mqblk_memory::DomainId(7), access: Access::Read }];
    store.set_permissions(&path, &wanted)?;
    same!(store.permissions(&path)?, Some(wanted.to_vec()));
    same!(store.permissions(&format!("{CHECK_DIRECTORY}/none"))?, None);
    store.remove(CHECK_DIRECTORY)?;
    store.remove(CHECK_DIRECTORY)?;
    same!(store.read(&path)?, None);
    Ok(())
}

fn long_directory(xenstore_path: &Path) -> Check {
    let mut store = Xenstore::connect(xenstore_path)?;
    store.remove(CHECK_DIRECTORY)?;
    let mut names: Vec<String> = (0..200).map(|n| format!("{n:03}-{}", "n".repeat(60))).collect();
    store.transaction(|transaction| {
        names.iter().try_for_each(|name| transaction.mkdir(&format!("{CHECK_DIRECTORY}/{name}")))
    })?;
    let mut found = store.list(CHECK_DIRECTORY)?.unwrap_or_default();
    found.sort();
    names.sort();
    store.remove(CHECK_DIRECTORY)?;
    same!(found, names);
    Ok(())
}

fn transactions(xenstore_path: &Path) -> Check {
    let (mut store, mut other) = (Xenstore::connect(xenstore_path)?, Xenstore::connect(xenstore_path)?);
    let [first, second] = ["first", "second"].map(|name| format!("{CHECK_DIRECTORY}/{name}"));
    store.write(&first, "0")?;
    let mut runs = 0;
    let seen = store.transaction(|transaction| {
        runs += 1;
        let seen = transaction.read(&first)?;
        transaction.write(&second, "done")?;
        if runs == 1 {
            // Another client changes the value that was read.
            other.write(&first, "1")?;
        }
        same_read(&mut other, &second, runs)?;
        Ok(seen)
    })?;
    same!((seen.as_deref(), runs), (Some("1"), 2));
    same!(other.read(&second)?.as_deref(), Some("done"));
    let failed: Result<(), _> = store.transaction(|transaction| {
        transaction.write(&first, "given up")?;
        transaction.write("no//path", "")
    });
    same!(failed.map_err(|error| error.errno().to_owned()), Err("EINVAL".to_owned()));
    same!(other.read(&first)?.as_deref(), Some("1"));
    store.remove(CHECK_DIRECTORY)?;
    Ok(())
}

/// Checks that a transaction's writes are not visible before its commit.
fn same_read(other: &mut Xenstore, path: &str, run: u32) -> Result<(), mqblk_xen::store::XenstoreError> {
    match other.read(path)? {
        None => Ok(()),
        // Fails with an errno that the check does not expect.
        Some(_) => other.write(&format!("found-too-early//{run}"), ""),
    }
}

fn watches(xenstore_path: &Path) -> Check {
    let (mut store, mut other) = (Xenstore::connect(xenstore_path)?, Xenstore::connect(xenstore_path)?);
    store.write(CHECK_DIRECTORY, "")?;
    store.watch(CHECK_DIRECTORY, "token")?;
    let next =
        |store: &mut Xenstore, timeout| store.next_event(Some(timeout)).map(|event| event.map(|event| event.path));
    same!(next(&mut store, EVENT_TIMEOUT)?.as_deref(), Some(CHECK_DIRECTORY));
    same!(next(&mut store, SILENCE)?, None);
    let path = format!("{CHECK_DIRECTORY}/state");
    other.write(&path, "4")?;
    let ready =
        poll(&mut [PollFd::from_borrowed_fd(store.descriptor(), PollFlags::IN)], Some(&timespec(EVENT_TIMEOUT)))?;
    same!(ready, 1);
    same!(next(&mut store, EVENT_TIMEOUT)?, Some(path.clone()));
    for n in 0..500 {
        other.write(&path, &n.to_string())?;
        other.write(&format!("{CHECK_DIRECTORY}/{n}"), "")?;
    }
    same!(other.read(&path)?.as_deref(), Some("499"));
    std::thread::sleep(SILENCE);
    let mut seen = vec![];
    while let Some(path) = next(&mut store, SILENCE)? {
        seen.push(path);
    }
    // Fewer events than changes, and every change is covered.
    let missing = (0..500).map(|n| format!("{CHECK_DIRECTORY}/{n}")).find(|path| !seen.contains(path));
    let all = seen.iter().any(|path| path == CHECK_DIRECTORY) || (missing.is_none() && seen.contains(&path));
    same!((all, seen.len() < 1000), (true, true));
    same!(store.watch(CHECK_DIRECTORY, "token").map_err(|error| error.errno().to_owned()), Err("EEXIST".to_owned()));
    store.unwatch(CHECK_DIRECTORY, "token")?;
    same!(store.unwatch(CHECK_DIRECTORY, "token").map_err(|error| error.errno().to_owned()), Err("ENOENT".to_owned()));
    other.remove(CHECK_DIRECTORY)?;
    same!(next(&mut store, SILENCE)?, None);
    Ok(())
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

/// Shares pages with the own domain. Returns them, access to their grants, and slots to map them.
fn with_ourselves(
    xen: &dyn Xen,
    pages: u32,
    writable: bool,
) -> Result<(SharedPages, Box<dyn GrantAccess>, PageArena), Failure> {
    let own = xen.domain();
    Ok((xen.share(own, pages, writable)?, xen.grants(own)?, PageArena::reserve(pages + 4)?))
}

fn byte(memory: &mqblk_memory::GuestMemory, page: u32, at: u32) -> u8 {
    let mut byte = [0];
    memory.read(PageSlot(page).address(at), &mut byte).map_or(0, |()| byte[0])
}

fn mapping(xen: &dyn Xen) -> Check {
    let (shared, mut grants, arena) = with_ourselves(xen, 3, true)?;
    same!(shared.refs.len(), 3);
    same!((byte(&shared.memory, 0, 0), byte(&shared.memory, 2, 4095)), (0, 0));
    for page in 0..3 {
        shared.memory.write(PageSlot(page).address(100), &[10 + page as u8]).ok_or("no page")?;
    }
    grants.map(&arena, PageSlot(2), &shared.refs, true)?;
    same!([2, 3, 4].map(|slot| byte(arena.memory(), slot, 100)), [10, 11, 12]);
    arena.memory().write(PageSlot(3).address(5), &[77]).ok_or("no slot")?;
    same!(byte(&shared.memory, 1, 5), 77);
    same!(grants.map(&arena, PageSlot(2), &shared.refs, true).is_err(), true);
    grants.unmap(&arena, PageSlot(2))?;
    same!([2, 3, 4].map(|slot| byte(arena.memory(), slot, 100)), [0, 0, 0]);
    same!(grants.unmap(&arena, PageSlot(2)).is_err(), true);
    // Read-only, in another order, and one page twice.
    let refs = [shared.refs[2], shared.refs[0], shared.refs[2]];
    grants.map(&arena, PageSlot(0), &refs, false)?;
    same!([0, 1, 2].map(|slot| byte(arena.memory(), slot, 100)), [12, 10, 12]);
    grants.unmap(&arena, PageSlot(0))?;
    Ok(())
}

/// Checks in /proc/self/maps that all slots of an arena are mapped.
fn no_holes(arena: &PageArena) -> Check {
    let start = arena.host_address(PageSlot(0), 0, 1).ok_or("no slots")?;
    let end = start + u64::from(arena.pages()) * u64::from(PAGE_BYTES);
    let mut at = start;
    for line in std::fs::read_to_string("/proc/self/maps")?.lines() {
        let (from, to) = line.split_once(' ').and_then(|(range, _)| range.split_once('-')).ok_or("no range")?;
        let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
        if from <= at && at < to {
            at = to;
        }
    }
    if at < end {
        return Err(format!("found a hole at slot {}", (at - start) / u64::from(PAGE_BYTES)).into());
    }
    Ok(())
}

fn bad_grants(xen: &dyn Xen) -> Check {
    let (shared, mut grants, arena) = with_ourselves(xen, 2, false)?;
    arena.memory().write(GuestAddress(0), &vec![5; 6 * PAGE]).ok_or("no slots")?;
    let bad = GrantRef(30_000);
    for (refs, writable) in [
        (vec![bad], true),
        (vec![shared.refs[0], bad], false),
        (vec![GrantRef(u32::MAX)], false),
        // A read-only grant.
        (vec![shared.refs[0]], true),
    ] {
        let error = grants.map(&arena, PageSlot(2), &refs, writable).err().ok_or(format!("{refs:?} were mapped"))?;
        same!(error.raw_os_error(), Some(22));
        no_holes(&arena)?;
        let slots = [1, 2, 3, 4].map(|slot| byte(arena.memory(), slot, 9));
        same!((slots[0], slots[3]), (5, 5));
    }
    // The slots are still usable.
    grants.map(&arena, PageSlot(2), &shared.refs, false)?;
    same!([2, 3].map(|slot| byte(arena.memory(), slot, 9)), [0, 0]);
    grants.unmap(&arena, PageSlot(2))?;
    let mut nobody = xen.grants(mqblk_memory::DomainId(999))?;
    same!(nobody.map(&arena, PageSlot(0), &shared.refs, false).is_err(), true);
    no_holes(&arena)
}

fn many_mappings(xen: &dyn Xen) -> Check {
    let (shared, mut grants, arena) = with_ourselves(xen, 32, true)?;
    let maps = || std::fs::read_to_string("/proc/self/maps").map(|text| text.lines().count());
    let before = maps()?;
    for round in 0..100u32 {
        shared.memory.write(PageSlot(round % 32).address(0), &[round as u8]).ok_or("no page")?;
        grants.map(&arena, PageSlot(round % 4), &shared.refs, true)?;
        same!(byte(arena.memory(), round % 4 + round % 32, 0), round as u8);
        grants.unmap(&arena, PageSlot(round % 4))?;
    }
    same!(maps()?, before);
    // Pages still mapped when the access is dropped stay in the slots until the arena is dropped.
    grants.map(&arena, PageSlot(0), &shared.refs, true)?;
    drop(grants);
    no_holes(&arena)?;
    same!(byte(arena.memory(), 99 % 32, 0), 99);
    Ok(())
}

fn copy(gref: GrantRef, direction: CopyDirection, offset: u16, len: u16, slot: u32, slot_offset: u16) -> GrantCopy {
    GrantCopy { gref, offset, len, slot: PageSlot(slot), slot_offset, direction, status: GrantStatus(99) }
}

fn copies(xen: &dyn Xen) -> Check {
    let (shared, mut grants, arena) = with_ourselves(xen, 64, true)?;
    let pattern = |page: u32, at: usize| (page as usize * 31 + at * 7) as u8;
    for page in 0..64 {
        let bytes: Vec<u8> = (0..PAGE).map(|at| pattern(page, at)).collect();
        shared.memory.write(PageSlot(page).address(0), &bytes).ok_or("no page")?;
    }
    // More than the kernel passes to the hypervisor at once.
    let mut all: Vec<GrantCopy> =
        (0..64).map(|page| copy(shared.refs[63 - page as usize], CopyDirection::FromGrant, 0, 4096, page, 0)).collect();
    grants.copy(&arena, &mut all)?;
    same!(all.iter().position(|copy| copy.status != GrantStatus::OKAY), None);
    for page in 0..64 {
        let mut bytes = vec![0; PAGE];
        arena.memory().read(PageSlot(page).address(0), &mut bytes).ok_or("no slot")?;
        same!(bytes.iter().enumerate().position(|(at, byte)| *byte != pattern(63 - page, at)), None);
    }
    // Unaligned offsets, across two slots, and back to a page.
    let mut odd = [
        copy(shared.refs[5], CopyDirection::FromGrant, 4000, 96, 1, 4050),
        copy(shared.refs[6], CopyDirection::ToGrant, 1, 3, 2, 10),
    ];
    arena.memory().write(PageSlot(2).address(9), &[1, 2, 3, 4, 5]).ok_or("no slot")?;
    let mut before = [0; 5];
    shared.memory.read(PageSlot(6).address(0), &mut before).ok_or("no page")?;
    grants.copy(&arena, &mut odd)?;
    same!(odd.map(|copy| copy.status), [GrantStatus::OKAY; 2]);
    let mut bytes = [0; 96];
    arena.memory().read(PageSlot(1).address(4050), &mut bytes[..46]).ok_or("no slot")?;
    arena.memory().read(PageSlot(2).address(15), &mut bytes[61..]).ok_or("no slot")?;
    same!(
        (bytes[0], bytes[45], bytes[61], bytes[95]),
        (pattern(5, 4000), pattern(5, 4045), pattern(5, 4061), pattern(5, 4095))
    );
    let mut after = [0; 5];
    shared.memory.read(PageSlot(6).address(0), &mut after).ok_or("no page")?;
    same!((after[0], after[4]), (before[0], before[4]));
    same!(byte(arena.memory(), 2, 10), after[1]);
    Ok(())
}

fn bad_copies(xen: &dyn Xen) -> Check {
    let (shared, mut grants, arena) = with_ourselves(xen, 2, false)?;
    shared.memory.write(PageSlot(1).address(0), &[42]).ok_or("no page")?;
    let from = CopyDirection::FromGrant;
    let mut batch = [
        copy(shared.refs[0], from, 0, 16, 0, 0),
        copy(GrantRef(30_000), from, 0, 16, 0, 0),
        copy(shared.refs[0], CopyDirection::ToGrant, 0, 16, 0, 0),
        copy(shared.refs[0], from, 4090, 16, 0, 0),
        copy(shared.refs[0], from, 0, 16, 9000, 0),
        copy(shared.refs[1], from, 0, 16, 1, 0),
    ];
    grants.copy(&arena, &mut batch)?;
    same!(batch.map(|copy| copy.status.0), [0, -3, -1, -10, -10, 0]);
    same!(byte(arena.memory(), 1, 0), 42);
    let mut nobody = xen.grants(mqblk_memory::DomainId(999))?;
    nobody.copy(&arena, &mut batch[..1])?;
    same!(batch[0].status, GrantStatus::BAD_DOMAIN);
    Ok(())
}

/// Returns true if an event arrives in time.
fn comes(port: &EventPort, within: Duration) -> std::io::Result<bool> {
    Ok(poll(&mut [PollFd::new(&port.descriptor, PollFlags::IN)], Some(&timespec(within)))? > 0)
}

/// Creates a channel and takes the events that binding may cause.
fn channel(xen: &dyn Xen) -> Result<(EventPort, EventPort), Failure> {
    let own = xen.domain();
    let first = xen.alloc_unbound(own)?;
    let second = xen.bind_interdomain(own, first.port)?;
    for end in [&first, &second] {
        if comes(end, SILENCE)? {
            end.channel.take();
            end.channel.unmask();
        }
    }
    Ok((first, second))
}

fn events(xen: &dyn Xen) -> Check {
    let (first, second) = channel(xen)?;
    for (from, to) in [(&first, &second), (&second, &first)] {
        for _ in 0..10 {
            from.channel.notify();
            same!(comes(to, EVENT_TIMEOUT)?, true);
            same!(comes(from, Duration::ZERO)?, false);
            to.channel.take();
            same!(comes(to, Duration::ZERO)?, false);
            // Masked: events stay pending.
            from.channel.notify();
            from.channel.notify();
            same!(comes(to, SILENCE / 10)?, false);
            to.channel.unmask();
            same!(comes(to, EVENT_TIMEOUT)?, true);
            to.channel.take();
            to.channel.take();
            to.channel.unmask();
            to.channel.unmask();
            same!(comes(to, SILENCE / 10)?, false);
        }
    }
    let missing = xen.bind_interdomain(xen.domain(), mqblk_xen::Port(4000));
    same!(missing.is_err(), true);
    Ok(())
}

fn rebinding(xen: &dyn Xen) -> Check {
    let (front, back) = channel(xen)?;
    // The backend dies, and another one binds to the port.
    drop(back);
    front.channel.notify();
    let back = xen.bind_interdomain(xen.domain(), front.port)?;
    if comes(&back, SILENCE)? {
        back.channel.take();
        back.channel.unmask();
    }
    front.channel.notify();
    same!(comes(&back, EVENT_TIMEOUT)?, true);
    back.channel.notify();
    same!(comes(&front, EVENT_TIMEOUT)?, true);
    // The channel or the descriptor alone keeps the port open.
    let EventPort { port, channel, descriptor } = front;
    drop(channel);
    same!(xen.bind_interdomain(xen.domain(), port).is_err(), true);
    drop(descriptor);
    Ok(())
}

fn shares_that_end(xen: &dyn Xen) -> Check {
    let (shared, mut grants, arena) = with_ourselves(xen, 2, true)?;
    let SharedPages { memory, refs, guard } = shared;
    let kept = Arc::clone(&memory);
    memory.write(GuestAddress(0), &[9]).ok_or("no page")?;
    drop(guard);
    // The memory is still mapped here, but no longer granted.
    same!(byte(&kept, 0, 0), 0);
    let mut one = [copy(refs[0], CopyDirection::FromGrant, 0, 1, 0, 0)];
    grants.copy(&arena, &mut one)?;
    same!(one[0].status, GrantStatus::GENERAL_ERROR);
    let many = xen.share(xen.domain(), 5000, true).err().ok_or("5000 pages were granted")?.to_string();
    same!(many.contains("granting 5000 pages") && many.contains("xen_gntalloc/parameters/limit"), true);
    Ok(())
}
