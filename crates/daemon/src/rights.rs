//! The rights with which storage is opened, and the remaining ones after that.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;

use mqblk_core::ImageOpener;
use mqblk_storage::host_images::HostImages;
use mqblk_vhost_user_server::SocketError;

use crate::broker::{AllowedImages, Broker};
use crate::config::ServeConfig;
use crate::config_error::ConfigError;
use crate::resolve::ClosedConfig;
use crate::sandbox;
use crate::sandbox_keys::SandboxMode;
use crate::sockets::PlannedSocket;
use crate::storage_backends::Registry;
use crate::takeover::{HandedFiles, HandedImages};
use crate::user::{UserConfig, UserImages};

/// Opens the storage of a configuration with the rights that the process was started with. Then the process becomes the
/// user of the configuration.
///
/// Disks that were added at run time are opened with the remaining rights: the daemon itself writes the file that names
/// them.
///
/// `handed` are images that another process has open and hands over.
///
/// In the sandbox a broker opens the storage, and keeps these rights. The process changes its user before, because the
/// threads of some storage are not allowed to.
///
/// # Errors
/// If the storage cannot be opened, or the host refuses.
pub(crate) fn open(closed: ClosedConfig, handed: Option<Arc<HandedFiles>>) -> Result<ServeConfig, ConfigError> {
    let opener = |others: Arc<dyn ImageOpener>| -> Arc<dyn ImageOpener> {
        match &handed {
            None => others,
            Some(handed) => Arc::new(HandedImages::new(Arc::clone(handed), others)),
        }
    };
    let user = closed.user().cloned();
    let become_user = || user.as_ref().map_or(Ok(()), |user| user.become_user());
    sandbox::prepare(closed.sandbox())?;
    make_sockets_early(&closed, user.as_ref())?;
    let config = match closed.sandbox().mode {
        SandboxMode::On => {
            let broker = Broker::start()?;
            for path in &closed.sandbox().allow {
                broker.allow(path, "sandbox-allow")?;
            }
            become_user()?;
            let broker = Arc::new(broker);
            let added = opener(Arc::new(AllowedImages(Arc::clone(&broker))));
            let config = closed.open(Arc::new(Registry::new(opener(Arc::clone(&broker) as _), added)))?;
            ServeConfig { broker: Some(broker), ..config }
        }
        SandboxMode::Off | SandboxMode::Log => {
            let added =
                opener(user.clone().map_or_else(|| Arc::new(HostImages) as _, |user| Arc::new(UserImages(user)) as _));
            let config = closed.open(Arc::new(Registry::new(opener(Arc::new(HostImages)), added)))?;
            become_user()?;
            config
        }
    };
    if let Some(user) = &user {
        user.check(&sandbox::file_uses(&config))?;
    }
    Ok(config)
}

/// Makes everything that needs rights which are given up later: the folder of the admin socket, and sockets with an
/// owner or group of their own.
fn make_sockets_early(closed: &ClosedConfig, user: Option<&UserConfig>) -> Result<(), ConfigError> {
    if let Some(admin) = closed.admin() {
        if admin.makes_folder {
            make_folder(&admin.socket, user).map_err(ConfigError::Admin)?;
        }
        let (subject, permissions) = ("serve".to_owned(), admin.permissions.clone());
        PlannedSocket { subject, path: admin.socket.clone(), permissions }
            .make_early(user)
            .map_err(ConfigError::Admin)?;
    }
    for socket in closed.sockets() {
        socket.make_early(user).map_err(|source| ConfigError::Socket { subject: socket.subject.clone(), source })?;
    }
    Ok(())
}

/// Makes the folder of a socket if it is missing, owned by `user`.
fn make_folder(socket: &Path, user: Option<&UserConfig>) -> Result<(), SocketError> {
    let os = |source| SocketError::Os { path: socket.to_owned(), source };
    let Some(folder) = socket.parent() else { return Ok(()) };
    match std::fs::DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(()),
        made => made.map_err(os)?,
    }
    let (uid, gid) = user.map(UserConfig::ids).unzip();
    std::os::unix::fs::lchown(folder, uid, gid).map_err(os)
}
