//! The user that the daemon becomes: `user` and `group`.
//!
//! Credentials are those of a thread in the kernel; the C library changes them for all threads of the process
//! (nptl(7)).

use std::ffi::CString;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_core::thread::spawn_scoped;
use mqblk_core::{ImageAccess, ImageOpenError, ImageOpener};
use mqblk_storage::host_images::HostImages;
use nix::unistd::{Gid, Group, Uid, User, getgrouplist, setgroups, setresgid, setresuid};
use rustix::fs::{Access, AtFlags, CWD};
use rustix::thread::{CapabilitySet, capabilities};

use crate::capabilities;
use crate::config_error::ConfigError;
use crate::file_use::FileUse;

/// The user that the daemon becomes.
pub static USER: Key = Key::text("user", "NAME|UID", "a user of this host").otherwise("the one that starts the daemon").about(
    "become this user when the disks are open; needs a start as root",
    "Images of the configuration, and with `sandbox=on` those added later, are opened with root's rights: they need not be the user's. The folders of \
     sockets, of `state`, of `reservations` and of `xen-state` must be, which is checked at the start. Sockets belong to the user. Xen's devices need \
     root.",
);
/// Its group.
pub static GROUP: Key = Key::text("group", "NAME|GID", "a group of this host").otherwise("the user's").about(
    "with user: the group of the process",
    "Also the group of its sockets: with `socket-mode=0660` VMMs in that group can connect. The user's other groups are kept.",
);

/// The process cannot become the user.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// It was not started by root.
    #[error(
        "serve: user: found {user:?}, but this process may not change its user (it has no CAP_SETUID and CAP_SETGID), \
         expected a start as root, or no user"
    )]
    NotRoot {
        /// The user.
        user: String,
    },
    /// The host refused.
    #[error("serve: user: found {user:?}: {source}, expected a user that this process can become")]
    Os {
        /// The user.
        user: String,
        /// The cause.
        source: io::Error,
    },
    /// The user lacks a right.
    #[error(
        "serve: user: found {user:?}, who may not {right} {path:?} ({what}), expected a user who may: chown {user} {path:?}"
    )]
    Path {
        /// The user.
        user: String,
        /// The right that it lacks.
        right: &'static str,
        /// The folder or file.
        path: PathBuf,
        /// The type of the file.
        what: &'static str,
    },
}

impl From<UserError> for ConfigError {
    fn from(error: UserError) -> ConfigError {
        ConfigError::Process(Box::new(error))
    }
}

/// A user of this host, with its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserConfig {
    name: String,
    uid: Uid,
    group: String,
    gid: Gid,
    /// All its groups.
    groups: Vec<Gid>,
}

impl UserConfig {
    /// Takes `user` and `group`.
    ///
    /// # Errors
    /// If there is no such user or group.
    pub fn take(settings: &mut Settings) -> Result<Option<UserConfig>, SettingError> {
        let (user, group) = (settings.text(&USER), settings.text(&GROUP));
        let Some(name) = user else {
            return match group {
                Some(group) => Err(settings.error(&GROUP, format!("{group:?}, but no user"), "user with it")),
                None => Ok(None),
            };
        };
        let failed =
            |key: &Key, found: &str, why: &dyn Display| settings.error(key, format!("{found:?}: {why}"), "one");
        let entry = match name.parse::<u32>() {
            Ok(uid) => User::from_uid(Uid::from_raw(uid)),
            Err(_) => User::from_name(&name),
        };
        let entry = entry.map_err(|error| failed(&USER, &name, &error))?;
        let uid = match (&entry, name.parse::<u32>()) {
            (Some(entry), _) => entry.uid,
            (None, Ok(uid)) => Uid::from_raw(uid),
            (None, Err(_)) => return Err(settings.error(&USER, format!("{name:?}"), "a user of this host, or a UID")),
        };
        let gid = match (&group, &entry) {
            (Some(group), _) => {
                match (find_group(group).map_err(|error| failed(&GROUP, group, &error))?, group.parse()) {
                    (Some(entry), _) => entry.gid,
                    (None, Ok(gid)) => Gid::from_raw(gid),
                    (None, Err(_)) => {
                        return Err(settings.error(&GROUP, format!("{group:?}"), "a group of this host, or a GID"));
                    }
                }
            }
            (None, Some(entry)) => entry.gid,
            (None, None) => {
                let found = format!("nothing, and user {name:?}, which has no entry on this host");
                return Err(settings.error(&GROUP, found, "the user's group with it"));
            }
        };
        let listed = entry.as_ref().and_then(|entry| CString::new(entry.name.as_str()).ok());
        let groups = match listed.map(|name| getgrouplist(&name, gid)).transpose() {
            Ok(groups) => groups.unwrap_or_else(|| vec![gid]),
            Err(error) => return Err(failed(&USER, &name, &error)),
        };
        let group = group.or_else(|| Some(Group::from_gid(gid).ok()??.name)).unwrap_or_else(|| gid.to_string());
        Ok(Some(UserConfig { name, uid, group, gid, groups }))
    }

    /// Returns the user, as given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the group, as given, or the name of the user's group.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// Returns the UID and the GID.
    pub fn ids(&self) -> (u32, u32) {
        (self.uid.as_raw(), self.gid.as_raw())
    }

    /// Makes this process a process of the user, permanently. It keeps those of its capabilities that the sandbox
    /// names. Nothing changes if it is the user's already.
    ///
    /// # Errors
    /// If it lacks the right, or the host refuses.
    pub fn become_user(&self) -> Result<(), UserError> {
        let os = |source: io::Error| UserError::Os { user: self.name.clone(), source };
        let is_user = rustix::process::geteuid().as_raw() == self.uid.as_raw()
            && rustix::process::getuid().as_raw() == self.uid.as_raw()
            && rustix::process::getegid().as_raw() == self.gid.as_raw();
        if is_user {
            return Ok(());
        }
        let before = capabilities(None).map_err(|error| os(error.into()))?;
        if !before.effective.contains(CapabilitySet::SETUID | CapabilitySet::SETGID) {
            return Err(UserError::NotRoot { user: self.name.clone() });
        }
        // Without it the kernel removes all capabilities when the last UID of root is changed (capabilities(7)).
        rustix::thread::set_keep_capabilities(true).map_err(|error| os(error.into()))?;
        let changed = setgroups(&self.groups)
            .and_then(|()| setresgid(self.gid, self.gid, self.gid))
            .and_then(|()| setresuid(self.uid, self.uid, self.uid));
        changed.map_err(|error| os(error.into()))?;
        capabilities::keep_and_use(capabilities::KEPT_CAPABILITIES).map_err(os)?;
        rustix::thread::set_keep_capabilities(false).map_err(|error| os(error.into()))?;
        tracing::info!(user = self.name, group = self.group, "serving as this user");
        Ok(())
    }

    /// Makes the calling thread a thread of the user, permanently, and takes its capabilities.
    fn become_user_alone(&self) -> io::Result<()> {
        let groups: Vec<_> = self.groups.iter().map(|group| rustix::process::Gid::from_raw(group.as_raw())).collect();
        let (uid, gid) = self.ids();
        let (uid, gid) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(gid));
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        capabilities::keep(CapabilitySet::empty())
    }

    /// Checks that this process, which is the user's, may use these files as the daemon will.
    ///
    /// # Errors
    /// Names the first file that it may not use.
    pub fn check(&self, uses: &[FileUse]) -> Result<(), UserError> {
        let refused = uses.iter().find_map(|file| {
            let (path, access) = file.needed_access();
            (!may_access(path, access)).then(|| UserError::Path {
                user: self.name.clone(),
                right: if access.contains(Access::EXEC_OK) { "create files in" } else { "read and write" },
                path: path.to_owned(),
                what: file.noun(),
            })
        });
        refused.map_or(Ok(()), Err)
    }
}

/// Opens images with the rights of a user that this process is not yet.
#[derive(Debug)]
pub struct UserImages(pub UserConfig);

impl ImageOpener for UserImages {
    fn open(&self, path: &Path, access: ImageAccess) -> Result<File, ImageOpenError> {
        let is_user = rustix::process::geteuid().as_raw() == self.0.uid.as_raw();
        if is_user {
            return HostImages.open(path, access);
        }
        let open =
            || self.0.become_user_alone().map_err(ImageOpenError::from).and_then(|()| HostImages.open(path, access));
        std::thread::scope(|scope| {
            // On a thread of its own, which keeps no right to change its user again.
            let opened = spawn_scoped(scope, "open-as-user", open)?.join();
            opened.unwrap_or_else(|_| Err(io::Error::other("the thread that opens it has ended").into()))
        })
    }
}

fn find_group(group: &str) -> nix::Result<Option<Group>> {
    match group.parse::<u32>() {
        Ok(gid) => Group::from_gid(Gid::from_raw(gid)),
        Err(_) => Group::from_name(group),
    }
}

/// Returns true if this process has these rights now.
pub(crate) fn may_access(path: &Path, access: Access) -> bool {
    rustix::fs::accessat(CWD, path, access, AtFlags::EACCESS).is_ok()
}
