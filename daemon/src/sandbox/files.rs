//! Rules for files (landlock(7)): what may be opened by path while the daemon serves. Files that are open already need no rule.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::SandboxError;
use crate::config::ServeConfig;

/// The newest rules that are asked for. Older kernels have fewer, which are used then.
const NEWEST: ABI = ABI::V6;

/// A file that the configuration names, and that is opened while the daemon serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// A socket that is created, and removed at the end.
    Socket(PathBuf),
    /// A file that is replaced by a new one next to it.
    Replaced(PathBuf),
    /// A folder in which files are created, read, written and removed.
    Folder(PathBuf),
    /// An image or a folder with images, which are opened.
    Image(PathBuf),
}

/// What the host tells about block devices, and which CPUs it has.
const READ: [&str; 2] = ["/sys/dev/block", "/sys/devices"];

pub(super) fn uses(config: &ServeConfig) -> Vec<FileUse> {
    let admin = config.admin.iter().map(|admin| FileUse::Socket(admin.socket.clone()));
    admin.chain(config.interfaces.iter().flat_map(|interface| interface.files())).collect()
}

/// Restricts the calling thread and those that it starts to `uses` and to images at and beneath `allow`. Returns how far.
pub(super) fn restrict(uses: &[FileUse], allow: &[PathBuf]) -> Result<&'static str, SandboxError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    for path in allow {
        rules = add(rules, path, images())?;
    }
    for one in uses {
        rules = match one {
            FileUse::Socket(path) => add(rules, folder_of(path), sockets())?,
            FileUse::Replaced(path) => add(rules, folder_of(path), written())?,
            FileUse::Folder(path) => add(rules, path, written())?,
            FileUse::Image(path) => add(rules, path, images())?,
        };
    }
    for path in READ.iter().map(Path::new).filter(|path| path.exists()) {
        rules = add(rules, path, AccessFs::ReadFile | AccessFs::ReadDir)?;
    }
    Ok(match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => "restricted",
        RulesetStatus::PartiallyEnforced => "restricted as far as this kernel can",
        RulesetStatus::NotEnforced => {
            tracing::warn!("sandbox: this kernel has no landlock: files are not restricted");
            "not restricted"
        }
    })
}

fn images() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::ReadDir | AccessFs::Truncate | AccessFs::IoctlDev
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

/// Adds a rule. Of a file it has only what applies to files.
fn add(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> Result<RulesetCreated, SandboxError> {
    let fd = PathFd::new(path).map_err(|source| SandboxError::Path { path: path.to_owned(), source })?;
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(NEWEST) };
    Ok(rules.add_rule(PathBeneath::new(fd, access).set_compatibility(CompatLevel::BestEffort))?)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
