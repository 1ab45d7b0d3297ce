//! Building blocks of a process' restrictions: filters of system calls (seccomp(2)) and rules for files (landlock(7)).

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use nix::libc::{self, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Cmp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// The newest rules that are requested. Older kernels apply those that they support.
pub(crate) const NEWEST: ABI = ABI::V6;

/// The allowed calls, each with rules for its arguments, of which one must match; none: any arguments.
pub(crate) type CallRules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Compiles a filter: the action for calls without a rule, and the one for calls that a rule allows.
pub(crate) fn compile(
    rules: CallRules,
    mismatch: SeccompAction,
    matches: SeccompAction,
) -> Result<BpfProgram, seccompiler::Error> {
    let arch = std::env::consts::ARCH.try_into()?;
    Ok(SeccompFilter::new(rules, mismatch, matches, arch)?.try_into()?)
}

/// Adds the calls that map memory, without executable memory.
pub(crate) fn add_memory_rules(rules: &mut CallRules) -> Result<(), seccompiler::Error> {
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![none_of(2, libc::PROT_EXEC)?]);
    }
    Ok(())
}

/// Returns the rule that an argument has none of these bits.
pub(crate) fn none_of(argument: u8, bits: i32) -> Result<SeccompRule, seccompiler::Error> {
    rule(vec![SeccompCondition::new(argument, Len::Dword, Cmp::MaskedEq(bits.cast_unsigned().into()), 0)?])
}

/// Returns the condition that an argument has this value.
pub(crate) fn equal(argument: u8, value: u64) -> Result<SeccompCondition, seccompiler::Error> {
    Ok(SeccompCondition::new(argument, Len::Dword, Cmp::Eq, value)?)
}

/// Returns the rule that requires all of these conditions.
pub(crate) fn rule(conditions: Vec<SeccompCondition>) -> Result<SeccompRule, seccompiler::Error> {
    Ok(SeccompRule::new(conditions)?)
}

/// Returns rules that allow nothing: no files, no TCP, and no access to other processes, as far as this kernel supports
/// that.
pub(crate) fn no_files() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()
}

/// Adds a rule for a file or for everything beneath a folder, as far as this kernel supports the rights.
pub(crate) fn allow(
    rules: RulesetCreated,
    file: impl AsFd,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    rules.add_rule(PathBeneath::new(file, access).set_compatibility(CompatLevel::BestEffort))
}
