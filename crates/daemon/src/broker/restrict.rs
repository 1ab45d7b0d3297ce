//! The restrictions of a sealed broker: it can only open images by its rules and pass them.

use std::io;
use std::path::Path;

use landlock::{AccessFs, BitFlags, PathFd, RulesetStatus};
use nix::libc::{self, c_long};
use rustix::thread::CapabilitySet;
use seccompiler::{SeccompAction, apply_filter};

use super::error::BrokerError;
use super::rules::Rules;
use crate::capabilities;
use crate::kernel_rules::{CallRules, add_memory_rules, compile, equal, none_of, rule};
use crate::kernel_rules::{allow, no_files};

/// Kept if the broker has it: images of other users are opened with root's rights.
const KEPT: CapabilitySet = CapabilitySet::DAC_OVERRIDE;

/// The calls of a loop that receives, opens, passes and closes, of the memory allocator, and of the end.
const CALLS: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fstat,
    libc::SYS_futex,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_newfstatat,
    libc::SYS_readlinkat,
    libc::SYS_recvmsg,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendmsg,
    libc::SYS_sigaltstack,
    libc::SYS_statx,
    libc::SYS_write,
];

/// Restricts this process. Returns the extent of its file restrictions, in words.
pub(super) fn restrict(rules: &Rules) -> Result<&'static str, BrokerError> {
    rustix::thread::set_no_new_privs(true).map_err(io::Error::from)?;
    let files = restrict_files(rules)?;
    capabilities::keep(KEPT)?;
    restrict_calls()?;
    Ok(files)
}

/// Allows opening files and folders of the rules for reading and writing. Opening decides the use of a descriptor: the
/// daemon resizes files, and queries block devices.
fn restrict_files(rules: &Rules) -> Result<&'static str, BrokerError> {
    let images: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
    let mut ruleset = no_files()?;
    for path in rules.paths() {
        ruleset = match path {
            Ok(folder) => allow(ruleset, folder, images),
            Err(path) => match PathFd::new(path) {
                Ok(file) => allow(ruleset, file, images),
                // The file has disappeared since it was opened, and cannot be opened again.
                Err(_) => continue,
            },
        }?;
    }
    if let Some((folder, path)) = rules.config() {
        ruleset = allow(ruleset, folder, AccessFs::ReadFile.into())?;
        if let Ok(file) = PathFd::new(path) {
            ruleset = allow(ruleset, file, AccessFs::ReadFile.into())?;
        }
    }
    Ok(match ruleset.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => "restricted",
        RulesetStatus::PartiallyEnforced => "restricted as far as this kernel can",
        RulesetStatus::NotEnforced => "checked by the broker only: this kernel has no landlock",
    })
}

fn restrict_calls() -> Result<(), seccompiler::Error> {
    let refuse = SeccompAction::Errno(libc::EPERM.cast_unsigned());
    apply_filter(&compile(call_rules()?, refuse, SeccompAction::Allow)?)
}

fn call_rules() -> Result<CallRules, seccompiler::Error> {
    let mut rules: CallRules = CALLS.iter().map(|call| (*call, Vec::new())).collect();
    // Nothing is created or truncated.
    rules.insert(libc::SYS_openat, vec![none_of(2, libc::O_CREAT | libc::O_TRUNC)?]);
    add_memory_rules(&mut rules)?;
    // The standard library duplicates descriptors with it.
    rules.insert(libc::SYS_fcntl, vec![rule(vec![equal(1, libc::F_DUPFD_CLOEXEC as u64)?])?]);
    Ok(rules)
}

/// Returns true if this process can find its open files in /proc: it opens images through that.
pub(super) fn has_proc() -> bool {
    Path::new("/proc/self/fd/0").symlink_metadata().is_ok()
}
