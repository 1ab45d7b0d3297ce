//! The settings, and errors of opening by setting.

use std::path::PathBuf;

use mqblk_core::BlockSize;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_rbd::{FailedStep, ImageOptions, LoadError, RbdError};

use super::encryption::EncryptionSettings;
use crate::admission;
use crate::keys::{DISCARD, READONLY};
use crate::lock_mode::LockMode;

pub(super) static POOL: Key = Key::text("pool", "NAME", "a name").required().about("the pool of the image", "");
pub(super) static IMAGE: Key = Key::text("image", "NAME", "a name").required().about("the image", "");
pub(super) static NAMESPACE: Key = Key::text("namespace", "NAME", "a name").about("the namespace in the pool", "");
pub(super) static SNAP: Key =
    Key::text("snap", "NAME", "a name").about("a snapshot of the image, which is read-only", "");
pub(super) static CONF: Key =
    Key::text("conf", "FILE", "a path").otherwise("Ceph's").about("the cluster's configuration file", "");
pub(super) static USER: Key =
    Key::text("user", "NAME", "a name without `client.`").otherwise("Ceph's").about("the user of the cluster", "");

/// The settings of a disk, as given.
pub(super) struct RbdSettings {
    pub(super) options: ImageOptions,
    pub(super) block: BlockSize,
    pub(super) unmap: bool,
    pub(super) lock: LockMode,
    pub(super) encryption: Option<EncryptionSettings>,
}

impl RbdSettings {
    pub(super) fn take(settings: &mut Settings) -> Result<RbdSettings, SettingError> {
        let pool = name(settings, &POOL)?;
        let Some(pool) = pool else {
            return Err(settings.error(&POOL, "nothing", "the pool of the image"));
        };
        let Some(image) = name(settings, &IMAGE)? else {
            return Err(settings.error(&IMAGE, "nothing", "the name of an image in the pool"));
        };
        let snapshot = name(settings, &SNAP)?;
        let namespace = name(settings, &NAMESPACE)?.unwrap_or_default();
        let user = name(settings, &USER)?;
        let conf = settings.text(&CONF).map(PathBuf::from);
        let read_only = settings.switch(&READONLY)?;
        if snapshot.is_some() && read_only == Some(false) {
            return Err(settings.error(
                &READONLY,
                "off, with snap",
                "readonly=on or nothing: a snapshot is not written",
            ));
        }
        let read_only = read_only.unwrap_or(snapshot.is_some());
        let encryption = EncryptionSettings::take(settings)?;
        let discard = settings.word(&DISCARD)?;
        if encryption.is_some() && discard == Some("unmap") {
            let expected = "discard=ignore or nothing: the library would write zeroes, and free nothing";
            return Err(settings.error(&DISCARD, "unmap, with encryption", expected));
        }
        Ok(RbdSettings {
            options: ImageOptions { conf, user, pool, namespace, image, snapshot, read_only },
            block: admission::block_size(settings)?.unwrap_or(BlockSize::B512),
            unmap: discard != Some("ignore") && encryption.is_none(),
            lock: LockMode::from_settings(settings)?,
            encryption,
        })
    }
}

/// Takes a name. An empty one counts as given.
fn name(settings: &mut Settings, key: &'static Key) -> Result<Option<String>, SettingError> {
    match settings.text(key) {
        Some(text) if text.is_empty() && !std::ptr::eq(key, &NAMESPACE) => {
            Err(settings.error(key, "an empty text", "a name"))
        }
        text => Ok(text),
    }
}

/// Returns the image in one word, for messages.
pub(super) fn place(options: &ImageOptions) -> String {
    let ImageOptions { pool, namespace, image, snapshot, .. } = options;
    let namespace = if namespace.is_empty() { String::new() } else { format!("{namespace}/") };
    let snapshot = snapshot.as_ref().map_or(String::new(), |snapshot| format!("@{snapshot}"));
    format!("rbd:{pool}/{namespace}{image}{snapshot}")
}

/// Returns the error for libraries that cannot be used.
pub(super) fn not_loaded(settings: &Settings, error: &LoadError) -> SettingError {
    settings.refused("storage", format!("rbd ({error})"), "the libraries of Ceph 16 or later")
}

/// Returns the error for a process whose sandbox refuses connections.
pub(super) fn no_network(settings: &Settings) -> SettingError {
    let expected = "sandbox-rbd=on, or a disk of storage=rbd, in the configuration that the daemon was started with: without one its \
                    sandbox refuses connections of the network";
    settings.error("storage", "rbd, in a sandbox without it", expected)
}

/// Returns the error of opening, with the setting that it is about.
pub(super) fn refused(settings: &Settings, given: &RbdSettings, error: &RbdError) -> SettingError {
    let options = &given.options;
    let conf = options.conf.as_ref().map_or("the default of Ceph".to_owned(), |path| format!("{path:?}"));
    let user = options.user.as_deref().unwrap_or("admin");
    let place = place(options);
    if let (FailedStep::Encryption, Some(encryption)) = (error.step, &given.encryption) {
        return encryption.refused(settings, &place, error);
    }
    let (key, found, expected) = match error.step {
        FailedStep::Load => ("storage", "rbd".to_owned(), "the libraries of Ceph 16 or later".to_owned()),
        FailedStep::Configuration => {
            ("conf", conf, "the configuration file of a Ceph cluster, which this user may read".to_owned())
        }
        FailedStep::Connection => {
            ("conf", conf, "a cluster whose monitors answer in time (client_mount_timeout)".to_owned())
        }
        FailedStep::Authentication => {
            let expected = format!(
                "a user of the cluster in {conf} (`ceph auth get client.{user}`), with its key in a keyring that this user of the host may \
                 read (`keyring` in the configuration file)"
            );
            ("user", format!("client.{user}"), expected)
        }
        FailedStep::Pool => {
            ("pool", format!("{:?}", options.pool), format!("a pool of the cluster that client.{user} may use"))
        }
        FailedStep::Override => {
            let expected = "the daemon's own value of that option: `rbd config image rm` or `rbd config pool rm` removes it from the image \
                            or its pool";
            ("image", place, expected.to_owned())
        }
        FailedStep::Image | FailedStep::Call if is_not_permitted(error) => {
            ("user", format!("client.{user} at {place}"), permitted_user(options))
        }
        FailedStep::Image | FailedStep::Call if options.snapshot.is_some() => {
            ("snap", place, format!("an image and a snapshot of it in the cluster that client.{user} may read"))
        }
        FailedStep::Image | FailedStep::Call | FailedStep::Encryption => {
            let done = if options.read_only { "read" } else { "write" };
            (
                "image",
                place,
                format!("an image in the pool that client.{user} may {done}; `rbd ls {}` lists them", options.pool),
            )
        }
    };
    settings.refused(key, format!("{found} ({error})"), expected)
}

/// Returns true if the cluster does not permit the user what it asked for.
pub(super) fn is_not_permitted(error: &RbdError) -> bool {
    matches!(error.errno(), nix::libc::EPERM | nix::libc::EACCES)
}

/// Describes a user that may have the image.
pub(super) fn permitted_user(options: &ImageOptions) -> String {
    let user = options.user.as_deref().unwrap_or("admin");
    let (done, profile) = if options.read_only { ("read", "rbd-read-only") } else { ("write", "rbd") };
    let namespace =
        if options.namespace.is_empty() { String::new() } else { format!(" namespace={}", options.namespace) };
    format!(
        "a user that may {done} the image (`ceph auth caps client.{user} mon 'profile rbd' osd 'profile {profile} pool={}{namespace}'`)",
        options.pool
    )
}
