//! Every system call from every thread role in the sandbox, compared with the table `system_calls.txt`.
//!
//! No call takes effect: below the filters of the role is one that ends each call with a distinct error number. An
//! allowed call thus differs from a refused one, and neither does anything. (Of several filters that refuse, the kernel
//! takes the error of the newest: seccomp(2).)

#![cfg(target_arch = "x86_64")] // the numbers

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use mqblk_core::settings::Settings;
use mqblk_core::thread_role::{self, ThreadRole};
use mqblk_daemon::sandbox;
use mqblk_daemon::sandbox_keys::SandboxConfig;
use seccompiler::{BpfProgram, apply_filter, sock_filter};

const TABLE: &str = "system_calls.txt";
/// The control threads have the filter of connectors.
const ROLES: [(char, ThreadRole); 6] = [
    ('C', ThreadRole::Connector),
    ('W', ThreadRole::Worker),
    ('S', ThreadRole::Storage),
    ('M', ThreadRole::Metrics),
    ('N', ThreadRole::Network),
    ('R', ThreadRole::RingMaker),
];
/// Above the highest number of any kernel.
const NUMBERS: std::ops::Range<i64> = 0..600;
/// uretprobe and uprobe: no filter sees them, and the kernel ends a thread that makes one outside of its own trampoline
/// (Linux 6.11 and 6.18, kernel/seccomp.c).
const OF_THE_KERNEL: std::ops::RangeInclusive<i64> = 335..=336;
/// The error of an allowed call.
const MAY_BE_MADE: i32 = 4000;
/// The last argument of the calls that this test makes, and of no others.
const COOKIE: u32 = 0x6d71_626c;
/// Set in the process that makes the calls.
const TRIES: &str = "MQBLK_TEST_TRIES_SYSTEM_CALLS";

/// Returns calls that a role may make with certain arguments only.
fn cases() -> Vec<(String, i64, [u64; 5])> {
    let mut cases = Vec::new();
    let mut add = |name: &str, number: i64, arguments: &[i64]| {
        let mut all = [0; 5];
        all.iter_mut().zip(arguments).for_each(|(to, from)| *to = from.cast_unsigned());
        cases.push((name.to_owned(), number, all));
    };
    let (stream, datagram, raw) =
        (i64::from(libc::SOCK_STREAM), i64::from(libc::SOCK_DGRAM), i64::from(libc::SOCK_RAW));
    for (name, family) in [
        ("UNIX", libc::AF_UNIX),
        ("INET", libc::AF_INET),
        ("INET6", libc::AF_INET6),
        ("NETLINK", libc::AF_NETLINK),
        ("PACKET", libc::AF_PACKET),
        ("VSOCK", libc::AF_VSOCK),
    ] {
        for (kind_name, kind) in [("STREAM", stream), ("DGRAM", datagram), ("RAW", raw)] {
            add(&format!("socket({name}, {kind_name})"), libc::SYS_socket, &[family.into(), kind]);
        }
        add(&format!("socketpair({name}, STREAM)"), libc::SYS_socketpair, &[family.into(), stream]);
    }
    for command in 0..64 {
        add(&format!("fcntl({command})"), libc::SYS_fcntl, &[0, command]);
    }
    for command in 1024..1064 {
        add(&format!("fcntl({command})"), libc::SYS_fcntl, &[0, command]);
    }
    add("fcntl(F_SETFL, O_ASYNC)", libc::SYS_fcntl, &[0, libc::F_SETFL.into(), libc::O_ASYNC.into()]);
    let other = i64::from(std::process::id()) + 1;
    add("prlimit64(other process)", libc::SYS_prlimit64, &[other]);
    add("sched_setaffinity(other thread)", libc::SYS_sched_setaffinity, &[other]);
    add("prlimit64(new limit)", libc::SYS_prlimit64, &[0, 0, 1]);
    add("tgkill(own process)", libc::SYS_tgkill, &[std::process::id().into()]);
    add("tgkill(other process)", libc::SYS_tgkill, &[other]);
    for (name, bits) in [("EXEC", libc::PROT_EXEC), ("WRITE", libc::PROT_WRITE)] {
        add(&format!("mmap({name})"), libc::SYS_mmap, &[0, 0, bits.into()]);
        add(&format!("mprotect({name})"), libc::SYS_mprotect, &[0, 0, bits.into()]);
    }
    let thread = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
    add("clone(thread)", libc::SYS_clone, &[thread.into()]);
    add("clone(process)", libc::SYS_clone, &[libc::SIGCHLD.into()]);
    for option in 0..80 {
        add(&format!("prctl({option})"), libc::SYS_prctl, &[option]);
    }
    add("prctl(PR_SET_VMA)", libc::SYS_prctl, &[libc::PR_SET_VMA.into()]);
    add("prctl(PR_SET_PTRACER)", libc::SYS_prctl, &[libc::PR_SET_PTRACER.into()]);
    for kind in 0..=255 {
        add(&format!("ioctl(kind {kind:#x})"), libc::SYS_ioctl, &[0, kind << 8]);
    }
    for number in 0..=255 {
        add(&format!("ioctl({:#x})", 0x5400 | number), libc::SYS_ioctl, &[0, 0x5400 | number]);
    }
    cases
}

/// Ends each call whose last argument is the cookie, and allows the others.
fn end_tried_calls() {
    let step = |code: u16, jf: u8, k: u32| sock_filter { code, jt: 0, jf, k };
    let program: BpfProgram = vec![
        // Loads the lower half of the sixth argument (linux/seccomp.h: struct seccomp_data).
        step(0x20, 0, 16 + 5 * 8),
        step(0x15, 1, COOKIE),
        step(0x06, 0, libc::SECCOMP_RET_ERRNO | MAY_BE_MADE.cast_unsigned()),
        step(0x06, 0, libc::SECCOMP_RET_ALLOW),
    ];
    apply_filter(&program).expect("a filter");
}

/// Returns the error of a call.
fn try_call(number: i64, [a, b, c, d, e]: [u64; 5]) -> i32 {
    // SAFETY: the filter below ends every call, so it does nothing.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, u64::from(COOKIE)) };
    assert_eq!(result, -1, "call {number} took place");
    std::io::Error::last_os_error().raw_os_error().expect("an error of the kernel")
}

/// Returns for each call, in order, if a thread of this role may make it.
fn of_role(role: ThreadRole, calls: &[(String, i64, [u64; 5])]) -> Vec<bool> {
    let try_all = || {
        end_tried_calls();
        thread_role::enter(role).expect("the role");
        let tried = calls.iter().map(|(name, number, arguments)| match try_call(*number, *arguments) {
            MAY_BE_MADE => true,
            libc::EPERM => false,
            // clone3(2): a C library uses clone(2) then.
            libc::ENOSYS if *number == libc::SYS_clone3 => false,
            other => panic!("{name}: ended with {other}"),
        });
        tried.collect()
    };
    std::thread::scope(|scope| scope.spawn(try_all).join().expect("the thread of the role"))
}

/// Returns the names in a table, by number.
fn names(table: &str) -> BTreeMap<i64, &str> {
    let numbered = table.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.parse().ok()?, words.next()?))
    });
    numbered.collect()
}

/// Returns the actual table. `known` is the one in the repository.
fn table(known: &str) -> String {
    let mut settings = Settings::new("serve");
    settings.insert("sandbox", "on").expect("a key");
    sandbox::prepare(&SandboxConfig::take(&mut settings).expect("a sandbox")).expect("filters");
    let names = names(known);
    let numbered = NUMBERS.filter(|number| !OF_THE_KERNEL.contains(number)).map(|number| {
        let name = names.get(&number).map_or("(its name)", |name| name);
        (format!("{number:>3} {name}"), number, [0; 5])
    });
    let calls: Vec<_> = numbered.chain(cases()).collect();
    let by_role: Vec<Vec<bool>> = ROLES.iter().map(|(_, role)| of_role(*role, &calls)).collect();
    let mut text = known.split_inclusive('\n').take_while(|line| line.starts_with('#')).collect::<String>();
    for (at, (name, ..)) in calls.iter().enumerate() {
        if by_role.iter().any(|role| role[at]) {
            let marks = ROLES.iter().zip(&by_role).map(|((mark, _), role)| if role[at] { *mark } else { '.' });
            let _ = writeln!(text, "{name:<32}{}", marks.collect::<String>());
        }
    }
    text
}

#[test]
fn each_role_may_make_the_calls_of_the_table_and_no_others() {
    const NAME: &str = "system_calls::each_role_may_make_the_calls_of_the_table_and_no_others";
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/daemon").join(TABLE);
    let known = std::fs::read_to_string(&path).expect("the table");
    if std::env::var_os(TRIES).is_none() {
        // In a separate process, because its threads stay restricted.
        let mut command = Command::new(std::env::current_exe().expect("this program's path"));
        let out = command.args(["--exact", NAME, "--nocapture"]).env(TRIES, "1").output().expect("this program");
        let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let found = table(&known);
    if found != known {
        let new = path.with_extension("new");
        std::fs::write(&new, &found).expect("written");
        let differences: Vec<_> = found
            .lines()
            .filter(|line| !known.lines().any(|other| other == *line))
            .map(|line| format!("+ {line}"))
            .chain(
                known.lines().filter(|line| !found.lines().any(|other| other == *line)).map(|line| format!("- {line}")),
            )
            .collect();
        panic!(
            "found (+) is not the table (-); if it should be, it is in {}:\n{}",
            new.display(),
            differences.join("\n")
        );
    }
}
