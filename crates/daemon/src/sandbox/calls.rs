//! Filters of system calls (seccomp(2)), one for each role.
//!
//! A filter lists the allowed calls. Filters of a thread add up: no thread may make a call that the process' filter
//! refuses.

use mqblk_core::thread_role::ThreadRole;
use nix::libc::{self, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Cmp, SeccompCondition, SeccompRule,
    apply_filter,
};

use crate::kernel_rules::{CallRules, add_memory_rules, compile, equal, rule};
use crate::sandbox_keys::SandboxMode;

/// Allowed to every thread: memory, time, waiting, and open files and sockets.
const OPEN_FILES: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_eventfd2,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munlock,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_set_robust_list,
    libc::SYS_shutdown,
    libc::SYS_sigaltstack,
    libc::SYS_sync_file_range,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Calls of x86 that other architectures do not have.
#[cfg(target_arch = "x86_64")]
const OLD_OPEN_FILES: &[c_long] = &[libc::SYS_poll, libc::SYS_time];
#[cfg(not(target_arch = "x86_64"))]
const OLD_OPEN_FILES: &[c_long] = &[];

/// Also allowed to threads that open files and sockets, and start threads.
const CONTROL: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_connect,
    libc::SYS_copy_file_range,
    libc::SYS_dup3,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_flock,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_getuid,
    libc::SYS_linkat,
    libc::SYS_listen,
    libc::SYS_memfd_create,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_readlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    // More filters and rules only restrict further.
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_restrict_self,
    libc::SYS_seccomp,
    libc::SYS_setsockopt,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    // Reads the broker's exit status.
    libc::SYS_wait4,
    libc::SYS_waitid,
];

#[cfg(target_arch = "x86_64")]
const OLD_CONTROL: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_chmod,
    libc::SYS_epoll_wait,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_stat,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CONTROL: &[c_long] = &[];

/// Also allowed to threads of a library for network storage: queries of name resolution and of the library's start.
const NETWORK: &[c_long] = &[libc::SYS_sendmmsg, libc::SYS_recvmmsg, libc::SYS_sysinfo];

/// As [`OLD_CONTROL`].
#[cfg(target_arch = "x86_64")]
const OLD_NETWORK: &[c_long] = &[libc::SYS_epoll_create];
#[cfg(not(target_arch = "x86_64"))]
const OLD_NETWORK: &[c_long] = &[];

/// Refused to them: listening, changing files, and rings. A file in memory (memfd_create, ftruncate) holds the header
/// of an encrypted image.
const NOT_FOR_NETWORK: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_capset,
    libc::SYS_copy_file_range,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_linkat,
    libc::SYS_listen,
    libc::SYS_mkdirat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
];

#[cfg(target_arch = "x86_64")]
const OLD_NOT_FOR_NETWORK: &[c_long] = &[libc::SYS_chmod, libc::SYS_mkdir, libc::SYS_rename, libc::SYS_unlink];
#[cfg(not(target_arch = "x86_64"))]
const OLD_NOT_FOR_NETWORK: &[c_long] = &[];

/// All calls of the thread that sets up rings, besides the memory of its stack and its heap. It uses no ring.
const RING_MAKER: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_gettid,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// The allowed commands of fcntl(2): descriptors, flags of open files except [`O_ASYNC`](libc::O_ASYNC), locks of open
/// files, seals. The receiver of a signal that a file is ready or has changed cannot be set: the kernel would send it
/// to any process.
const FCNTL_COMMANDS: [i32; 8] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// The flags of clone(2) with which a C library starts a thread. Starting a process lacks some of them.
const THREAD_FLAGS: u64 =
    (libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD) as u64;

/// Types of allowed ioctls, the second byte of their number: block devices (`linux/fs.h`), event channels, grants and
/// xenbus (`xen/evtchn.h`, `xen/gntdev.h`, `xen/xenbus_dev.h`).
const IOCTL_KINDS: [u8; 4] = [0x12, b'E', b'G', b'B'];
/// The bits of a socket's type without its flags (`linux/net.h`).
const SOCKET_TYPE: u64 = 0xf;
/// Ioctls by number: terminal check (for colours of the log), non-blocking mode.
const IOCTLS: [u64; 2] = [libc::TCGETS, libc::FIONBIO];

/// The compiled filters.
pub(super) struct CallFilters {
    /// Refuses clone3(2) as unknown: its flags are in memory, which a filter cannot read. C libraries fall back to
    /// clone(2).
    no_clone3: BpfProgram,
    process: BpfProgram,
    /// The process' filter with TCP sockets, for disks behind a network.
    tcp_process: BpfProgram,
    servers: BpfProgram,
    metrics: BpfProgram,
    network: BpfProgram,
    ring_maker: BpfProgram,
}

impl CallFilters {
    pub(super) fn compile(mode: SandboxMode) -> Result<CallFilters, seccompiler::Error> {
        let refused = match mode {
            SandboxMode::Log => SeccompAction::Log,
            _ => SeccompAction::Errno(libc::EPERM as u32),
        };
        let allow = SeccompAction::Allow;
        let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
        let clone3 = CallRules::from([(libc::SYS_clone3, Vec::new())]);
        Ok(CallFilters {
            no_clone3: compile(clone3, allow.clone(), unknown)?,
            process: compile(process_rules(false)?, refused.clone(), allow.clone())?,
            tcp_process: compile(process_rules(true)?, refused.clone(), allow.clone())?,
            servers: compile(server_rules()?, refused.clone(), allow.clone())?,
            metrics: compile(metrics_rules()?, refused.clone(), allow.clone())?,
            network: compile(network_rules()?, refused.clone(), allow.clone())?,
            ring_maker: compile(ring_maker_rules()?, refused, allow)?,
        })
    }

    /// Restricts the calling thread and the threads that it starts to the needs of the process.
    pub(super) fn apply_to_process(&self, uses_tcp: bool) -> Result<(), seccompiler::Error> {
        apply_filter(if uses_tcp { &self.tcp_process } else { &self.process })?;
        // The error of the newest filter is returned.
        apply_filter(&self.no_clone3)
    }

    /// Restricts the calling thread to its role.
    pub(super) fn apply_to(&self, role: ThreadRole, uses_tcp: bool) -> Result<(), seccompiler::Error> {
        match role {
            ThreadRole::Worker | ThreadRole::Storage => apply_filter(&self.servers),
            ThreadRole::Metrics => apply_filter(&self.metrics),
            ThreadRole::RingMaker => apply_filter(&self.ring_maker),
            ThreadRole::Connector => self.apply_to_process(uses_tcp),
            ThreadRole::Network => {
                apply_filter(&self.network)?;
                apply_filter(&self.no_clone3)
            }
        }
    }
}

/// Returns the rules of threads that serve: they open, connect and start nothing.
fn server_rules() -> Result<CallRules, seccompiler::Error> {
    let mut rules = unconditional(&[OPEN_FILES, OLD_OPEN_FILES]);
    add_argument_rules(&mut rules)?;
    Ok(rules)
}

/// Returns the rules of the thread that answers scrapers: those of threads that serve, and accepting connections.
fn metrics_rules() -> Result<CallRules, seccompiler::Error> {
    let mut rules = server_rules()?;
    rules.extend(unconditional(&[&[libc::SYS_accept4]]));
    Ok(rules)
}

/// Returns the rules of the thread that sets up rings.
fn ring_maker_rules() -> Result<CallRules, seccompiler::Error> {
    let mut rules = unconditional(&[RING_MAKER]);
    add_memory_rules(&mut rules)?;
    Ok(rules)
}

/// Returns the rules of the process. `uses_tcp`: with stream sockets of the network.
fn process_rules(uses_tcp: bool) -> Result<CallRules, seccompiler::Error> {
    let mut sockets = vec![rule(vec![equal(0, libc::AF_UNIX as u64)?])?];
    for family in [libc::AF_INET, libc::AF_INET6].into_iter().filter(|_| uses_tcp) {
        let stream = SeccompCondition::new(1, Len::Dword, Cmp::MaskedEq(SOCKET_TYPE), libc::SOCK_STREAM as u64)?;
        sockets.push(rule(vec![equal(0, family as u64)?, stream])?);
    }
    rules_with_sockets(sockets)
}

/// Returns the rules of the threads of a library for network storage: those of the process, and connections of the
/// network. They do not listen, change no files and have no rings.
fn network_rules() -> Result<CallRules, seccompiler::Error> {
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    let sockets = families.map(|family| rule(vec![equal(0, family as u64)?]));
    let mut rules = rules_with_sockets(sockets.into_iter().collect::<Result<_, _>>()?)?;
    for call in NOT_FOR_NETWORK.iter().chain(OLD_NOT_FOR_NETWORK) {
        rules.remove(call);
    }
    rules.extend(unconditional(&[NETWORK, OLD_NETWORK]));
    Ok(rules)
}

/// Returns the rules of the process with these sockets.
fn rules_with_sockets(sockets: Vec<SeccompRule>) -> Result<CallRules, seccompiler::Error> {
    let mut rules = unconditional(&[OPEN_FILES, OLD_OPEN_FILES, CONTROL, OLD_CONTROL]);
    add_argument_rules(&mut rules)?;
    rules.insert(libc::SYS_socket, sockets);
    // Only of the calling thread: another id could be of any process of this user.
    rules.insert(libc::SYS_sched_setaffinity, vec![rule(vec![equal(0, 0)?])?]);
    rules.insert(libc::SYS_socketpair, vec![rule(vec![equal(0, libc::AF_UNIX as u64)?])?]);
    let thread = SeccompCondition::new(0, Len::Qword, Cmp::MaskedEq(THREAD_FLAGS), THREAD_FLAGS)?;
    rules.insert(libc::SYS_clone, vec![rule(vec![thread])?]);
    Ok(rules)
}

fn unconditional(lists: &[&[c_long]]) -> CallRules {
    lists.iter().flat_map(|list| list.iter()).map(|call| (*call, Vec::new())).collect()
}

/// Adds the calls that are allowed with some arguments only.
fn add_argument_rules(rules: &mut CallRules) -> Result<(), seccompiler::Error> {
    add_memory_rules(rules)?;
    // Signals to the own process only, for abort.
    rules.insert(libc::SYS_tgkill, vec![rule(vec![equal(0, std::process::id().into())?])?]);
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_NO_NEW_PRIVS, libc::PR_SET_VMA];
    let names = names.map(|option| rule(vec![equal(0, option as u64)?]));
    rules.insert(libc::SYS_prctl, names.into_iter().collect::<Result<_, _>>()?);
    // Only the limits of this process, and only reading them.
    let own_limits = vec![equal(0, 0)?, SeccompCondition::new(2, Len::Qword, Cmp::Eq, 0)?];
    rules.insert(libc::SYS_prlimit64, vec![rule(own_limits)?]);
    let without_signal = SeccompCondition::new(2, Len::Dword, Cmp::MaskedEq(libc::O_ASYNC as u64), 0)?;
    let mut commands = vec![rule(vec![equal(1, libc::F_SETFL as u64)?, without_signal])?];
    for command in FCNTL_COMMANDS {
        commands.push(rule(vec![equal(1, command as u64)?])?);
    }
    rules.insert(libc::SYS_fcntl, commands);
    let kinds =
        IOCTL_KINDS.map(|kind| SeccompCondition::new(1, Len::Dword, Cmp::MaskedEq(0xff00), u64::from(kind) << 8));
    let numbers = IOCTLS.map(|number| SeccompCondition::new(1, Len::Dword, Cmp::Eq, number));
    let ioctls = kinds.into_iter().chain(numbers).map(|condition| rule(vec![condition?]));
    rules.insert(libc::SYS_ioctl, ioctls.collect::<Result<_, _>>()?);
    Ok(())
}
