//! Rules for files (landlock(7)) that the daemon opens by path while it serves. Open files need no rule.

use std::path::Path;

use landlock::{
    Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::error::SandboxError;
use crate::config::ServeConfig;
use crate::file_use::{FileUse, folder_of};
use crate::kernel_rules::{NEWEST, allow, no_files};
use crate::process::MetricsAddress;
use crate::sockets::file_of_socket;
use crate::user::may_access;

/// The host's description of block devices and CPUs.
const READ: [&str; 2] = ["/sys/dev/block", "/sys/devices"];

/// Returns the files that the daemon of this configuration opens while it serves.
pub(crate) fn file_uses(config: &ServeConfig) -> Vec<FileUse> {
    let admin = config.admin.iter().filter_map(|admin| file_of_socket(&admin.socket));
    let metrics = config.metrics.as_ref().and_then(|metrics| match &metrics.address {
        MetricsAddress::Unix(path) => Some(FileUse::Socket(path.clone())),
        // Listens before the sandbox is entered.
        MetricsAddress::Tcp(_) => None,
    });
    let state = config.state.iter().map(|state| FileUse::Replaced(state.path().to_owned()));
    let read_again = config.source.iter().filter_map(|source| source.file()).map(FileUse::Config);
    admin
        .chain(metrics)
        .chain(state)
        .chain(read_again)
        .chain(config.interfaces.iter().flat_map(|interface| interface.files.iter().cloned()))
        .chain(config.out.iter().flat_map(|disk| disk.files.iter().cloned()))
        .collect()
}

/// Returns the first file that the calling thread may not use with its present capabilities.
pub(super) fn inaccessible(uses: &[FileUse]) -> Option<&Path> {
    uses.iter().map(FileUse::needed_access).find(|(path, access)| !may_access(path, *access)).map(|(path, _)| path)
}

/// Restricts the calling thread and those that it starts to `uses`, and to connections to these TCP ports. Returns the
/// extent of the restriction, in words. The broker opens images.
pub(super) fn restrict(uses: &[FileUse], ports: &[u16]) -> Result<&'static str, SandboxError> {
    let mut rules = no_files()?;
    for port in ports {
        let rule = NetPort::new(*port, AccessNet::ConnectTcp).set_compatibility(CompatLevel::BestEffort);
        rules = rules.add_rule(rule)?;
    }
    for one in uses {
        rules = match one {
            FileUse::Socket(path) => add(rules, folder_of(path), sockets())?,
            FileUse::Replaced(path) => add(rules, folder_of(path), written())?,
            FileUse::Folder(path) => add(rules, path, written())?,
            FileUse::Device(path) => add(rules, path, devices())?,
            // The broker opens these.
            FileUse::Images(_) | FileUse::Config(_) => rules,
        };
    }
    for path in READ.iter().map(Path::new).filter(|path| path.exists()) {
        rules = add(rules, path, AccessFs::ReadFile | AccessFs::ReadDir)?;
    }
    Ok(how_far(rules.restrict_self()?.ruleset))
}

fn how_far(status: RulesetStatus) -> &'static str {
    match status {
        RulesetStatus::FullyEnforced => "restricted",
        RulesetStatus::PartiallyEnforced => "restricted as far as this kernel can",
        RulesetStatus::NotEnforced => {
            tracing::warn!("sandbox: this kernel has no landlock: files are not restricted");
            "not restricted"
        }
    }
}

/// Restricts the calling thread and those that it starts to reading files and to connecting: they may not listen. They
/// may read any file, as the library chooses (configuration, keys, host names). Returns the extent as [`restrict`]
/// does.
pub(super) fn restrict_to_reading() -> Result<&'static str, SandboxError> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let rules = add(rules, Path::new("/"), AccessFs::ReadFile | AccessFs::ReadDir)?;
    Ok(how_far(rules.restrict_self()?.ruleset))
}

fn devices() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::ReadDir | AccessFs::IoctlDev
}

fn sockets() -> BitFlags<AccessFs> {
    AccessFs::ReadDir | AccessFs::MakeSock | AccessFs::RemoveFile
}

fn written() -> BitFlags<AccessFs> {
    AccessFs::ReadDir
        | AccessFs::ReadFile
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::RemoveFile
}

/// Adds a rule. A file gets only the rights that apply to files.
fn add(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> Result<RulesetCreated, SandboxError> {
    let file = PathFd::new(path).map_err(|source| SandboxError::Path { path: path.to_owned(), source })?;
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(NEWEST) };
    Ok(allow(rules, file, access)?)
}
