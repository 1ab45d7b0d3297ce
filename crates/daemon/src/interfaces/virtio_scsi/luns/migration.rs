//! The LUNs of a controller in the migration state of its guest: their addresses, and the settings of those added at
//! run time.
//!
//! A VMM sends the state, and it is not trusted with the host's files. A LUN is opened only if the destination's
//! operator has set a directory for this (`incoming-luns=`), and only if the real paths of all its files are in that
//! directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mqblk_core::Resize;
use mqblk_core::lock::RankedGuard;
use mqblk_core::settings::Settings;
use mqblk_vhost_user_server::{HostState, PendingHostState};
use mqblk_virtio::state;
use serde::{Deserialize, Serialize};

use super::super::config::{ControllerConfig, IncomingLimits, TargetLun};
use super::super::migration_gate::MigrationGate;
use super::{LunEntry, LunSelector, Luns, Removal};
use crate::change::ChangeSource;

/// Longest wait for the removal of a LUN. It has no requests in flight.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Keys that name files, of the allowed storage backend and of a logical unit.
const PATH_KEYS: [&str; 2] = ["path", "reservations"];
/// Keys of the LUN's properties that the guest has seen, and of the protection of its image against a second writer:
/// only these are sent and accepted. The destination decides about service, resources and shared limits.
const GUEST_KEYS: [&str; 12] = [
    "path",
    "storage",
    "reservations",
    "unit",
    "unit-name",
    "serial",
    "vendor",
    "product",
    "block-size",
    "readonly",
    "cache",
    LOCK,
];
const LOCK: &str = "lock";
/// The value of `lock` that takes no lock: another guest may use the image.
const NO_LOCK: &str = "off";
/// The only storage backend allowed: one whose files a directory can contain.
const ALLOWED_STORAGE: &str = "file";

/// Number of keys that a message lists.
const LISTED: usize = 16;

/// The JSON document in the migration state.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LunsDocument {
    luns: Vec<LunRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LunRecord {
    target: u8,
    lun: u16,
    id: String,
    /// The settings of a LUN that was added at run time, with defaults that depend on the daemon filled in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    settings: Option<BTreeMap<String, String>>,
}

impl LunRecord {
    fn address(&self) -> TargetLun {
        TargetLun { target: self.target, lun: self.lun }
    }

    /// Returns the command that adds the LUN, for an operator.
    fn command(&self, controller: &str) -> String {
        let path = self.settings.as_ref().and_then(|settings| settings.get("path"));
        let path = path.map_or("...".to_owned(), |path| format!("path={path:?},..."));
        format!("mqblk lun add controller={controller},target={},lun={},id={:?},{path}", self.target, self.lun, self.id)
    }
}

/// The migration state of a controller's LUNs, a part of its device state.
pub(super) struct LunMigration {
    controller: String,
    /// Limits of the LUNs of an incoming guest.
    incoming: Option<IncomingLimits>,
    gate: Arc<MigrationGate>,
    luns: Weak<Luns>,
}

impl LunMigration {
    /// Creates the migration state of the controller of `config`, whose LUNs are among `luns`.
    pub(super) fn new(config: &ControllerConfig, gate: Arc<MigrationGate>, luns: Weak<Luns>) -> LunMigration {
        LunMigration { controller: config.id.clone(), incoming: config.incoming_luns.clone(), gate, luns }
    }

    /// Returns the LUNs.
    ///
    /// # Errors
    /// If they do not migrate now.
    fn luns(&self) -> Result<Arc<Luns>, &'static str> {
        let luns = if self.gate.is_open() { self.luns.upgrade() } else { None };
        luns.ok_or("the daemon starts or stops")
    }

    /// Adds a LUN of the source.
    fn add(&self, luns: &Luns, lun: &LunRecord, own: &[LunEntry]) -> Result<(), String> {
        let command = lun.command(&self.controller);
        let Some(settings) = &lun.settings else {
            return Err(format!("found lun {}, which is not here, expected the same LUNs: {command}", lun.address()));
        };
        let Some(IncomingLimits { folder, limit_group, .. }) = &self.incoming else {
            return Err(format!(
                "found lun {}, which was added while the guest ran and is not here, expected it here: {command}; or, for files \
                 of a folder, incoming-luns= of the controller",
                lun.address()
            ));
        };
        let checked = check_settings(settings, folder, own);
        let checked = checked.map_err(|why| format!("lun {}: {why}; manually: {command}", lun.address()))?;
        let mut settings = Settings::new("lun of the source");
        let own_keys = [
            ("controller", self.controller.clone()),
            ("id", lun.id.clone()),
            ("target", lun.target.to_string()),
            ("lun", lun.lun.to_string()),
        ];
        // A shared unit has its limits already.
        let limits = limit_group.iter().filter(|_| !checked.contains_key("unit")).map(|group| ("limit-group", group));
        for (key, value) in own_keys
            .iter()
            .map(|(key, value)| (*key, value))
            .chain(limits)
            .chain(checked.iter().map(|(key, value)| (key.as_str(), value)))
        {
            settings.insert(key, value).map_err(|error| error.to_string())?;
        }
        luns.add(settings, ChangeSource::RunTime).map(drop).map_err(|error| error.to_string())
    }
}

/// Checks settings that a VMM sent. Returns them with the files' real paths. `own` are the controller's LUNs.
fn check_settings(
    settings: &BTreeMap<String, String>,
    folder: &Path,
    own: &[LunEntry],
) -> Result<BTreeMap<String, String>, String> {
    let is_believed = |key: &str| GUEST_KEYS.contains(&key);
    let (mut checked, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
        settings.clone().into_iter().partition(|(key, _)| is_believed(key));
    if !others.is_empty() {
        let keys: Vec<&str> = others.keys().map(String::as_str).take(LISTED).collect();
        tracing::warn!("settings of a LUN of the source that are not taken over: {keys:?}");
    }
    if let Some(lock) = settings.get(LOCK).filter(|lock| *lock == NO_LOCK) {
        return Err(format!("{LOCK}: found {lock:?}, expected a lock"));
    }
    if let Some(unit) = settings.get("unit") {
        // The logical unit of another controller belongs to another guest.
        let is_own = own.iter().any(|lun| lun.unit.as_ref().is_some_and(|own| own.name() == *unit));
        return if is_own {
            Ok(checked)
        } else {
            Err(format!("unit: found {unit:?}, expected one of this controller's"))
        };
    }
    if let Some(storage) = settings.get("storage").filter(|storage| *storage != ALLOWED_STORAGE) {
        return Err(format!("storage: found {storage:?}, expected {ALLOWED_STORAGE:?}"));
    }
    if !settings.contains_key("path") {
        return Err("path: found nothing, expected a file".to_owned());
    }
    let folder = folder.canonicalize().map_err(|error| format!("incoming-luns: {folder:?}: {error}"))?;
    for key in PATH_KEYS {
        let Some(value) = checked.get_mut(key) else { continue };
        let path =
            resolve_links(Path::new(value.as_str())).map_err(|error| format!("{key}: found {value:?}: {error}"))?;
        let inside = path.starts_with(&folder) && path != folder;
        let (true, Some(text)) = (inside, path.to_str()) else {
            return Err(format!(
                "{key}: found {value:?}, which is {path:?}, expected a file in {folder:?} (incoming-luns)"
            ));
        };
        *value = text.to_owned();
    }
    Ok(checked)
}

/// Resolves all symbolic links of a path. The file may not exist yet.
fn resolve_links(path: &Path) -> std::io::Result<PathBuf> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let (folder, name) = (path.parent(), path.file_name());
            let (Some(folder), Some(name)) = (folder, name) else { return Err(error) };
            Ok(folder.canonicalize()?.join(name))
        }
        _ => path.canonicalize(),
    }
}

impl HostState for LunMigration {
    fn save(&self) -> Result<String, String> {
        let luns = self.luns()?;
        let record = |lun: LunEntry| LunRecord {
            target: lun.address.target,
            lun: lun.address.lun,
            settings: settings(&lun),
            id: lun.id,
        };
        Ok(state::write(&LunsDocument { luns: luns.ready_luns(&self.controller).into_iter().map(record).collect() }))
    }

    fn load(&self, state: &str) -> Result<Box<dyn PendingHostState + '_>, String> {
        let loading = self.gate.begin_load();
        let luns = self.luns()?;
        let LunsDocument { luns: incoming } = state::read(state)?;
        let own = luns.ready_luns(&self.controller);
        if let Some(limits) = self.incoming.as_ref().filter(|limits| incoming.len() > own.len().max(limits.luns.into()))
        {
            let (found, most) = (incoming.len(), limits.luns);
            return Err(format!(
                "luns: found {found} of them, expected at most {most} (incoming-luns-max of the controller)"
            ));
        }
        let to_remove: Vec<&LunEntry> =
            own.iter().filter(|lun| !incoming.iter().any(|incoming| incoming.address() == lun.address)).collect();
        if let (Some(lun), None) = (to_remove.first(), &self.incoming) {
            return Err(format!(
                "luns: found none at {}, where lun {:?} is here, expected the same LUNs: mqblk lun remove {}; or incoming-luns= of \
                 the controller",
                lun.address, lun.id, lun.id
            ));
        }
        let to_remove = to_remove.into_iter().map(|lun| lun.id.clone()).collect();
        // Adopts the size of storage that has grown since the last check. If the size cannot be queried, it stays.
        own.iter().for_each(|lun| drop(luns.resize(&LunSelector::Id(lun.id.clone()), Resize::GROW)));
        let mut change = IncomingLuns { luns, added: Vec::new(), to_remove, _held: loading };
        for (index, lun) in incoming.iter().enumerate() {
            if own.iter().all(|own| own.address != lun.address()) {
                self.add(&change.luns, lun, &own).map_err(|why| format!("luns[{index}]: {why}"))?;
                change.added.push(lun.id.clone());
            }
        }
        Ok(Box::new(change))
    }
}

/// Returns the settings that a LUN was added with at run time, and its logical unit's values of settings with defaults
/// of the daemon.
fn settings(lun: &LunEntry) -> Option<BTreeMap<String, String>> {
    let mut settings = lun.added_settings.clone()?;
    settings.retain(|key, _| GUEST_KEYS.contains(&key.as_str()));
    if let Some(unit) = lun.unit.as_ref().filter(|_| !settings.contains_key("unit")) {
        let config = unit.config();
        let block = unit.disk().geometry().logical_block.bytes().to_string();
        for (key, value) in [
            ("unit-name", &config.unit_name),
            ("serial", &config.storage.serial),
            ("vendor", &config.vendor),
            ("product", &config.product),
            ("block-size", &block),
        ] {
            settings.entry(key.to_owned()).or_insert_with(|| value.clone());
        }
    }
    Some(settings)
}

/// LUNs that were added for an incoming guest, and those to remove once it has arrived.
struct IncomingLuns<'a> {
    luns: Arc<Luns>,
    added: Vec<String>,
    to_remove: Vec<String>,
    /// Released last: see [`MigrationGate::set`].
    _held: RankedGuard<'a, ()>,
}

impl IncomingLuns<'_> {
    fn remove(&self, id: &str) -> Result<(), String> {
        match self.luns.remove(&LunSelector::Id(id.to_owned()), REMOVAL_TIMEOUT, ChangeSource::RunTime) {
            Ok(Removal::Done(_) | Removal::Pending(..)) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl PendingHostState for IncomingLuns<'_> {
    fn commit(mut self: Box<Self>) -> Result<(), String> {
        for id in std::mem::take(&mut self.added) {
            tracing::info!(lun = id, "a LUN has arrived with its guest");
        }
        self.to_remove.iter().try_for_each(|id| self.remove(id))
    }
}

impl Drop for IncomingLuns<'_> {
    fn drop(&mut self) {
        for id in &self.added {
            if let Err(error) = self.remove(id) {
                tracing::warn!("cannot remove a LUN that was added for a failed incoming migration: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(words: &[(&str, &Path)]) -> BTreeMap<String, String> {
        words.iter().map(|(key, value)| ((*key).to_owned(), value.display().to_string())).collect()
    }

    #[test]
    fn only_files_in_the_directory_are_allowed() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let (folder, outside) = (root.join("in"), root.join("out.img"));
        std::fs::create_dir_all(folder.join("sub")).unwrap();
        for file in [&outside, &folder.join("a.img"), &folder.join("sub/b.img")] {
            std::fs::write(file, "").unwrap();
        }
        std::fs::create_dir(root.join("in-too")).unwrap();
        std::fs::write(root.join("in-too/c.img"), "").unwrap();
        std::os::unix::fs::symlink(&outside, folder.join("leads-out")).unwrap();
        std::os::unix::fs::symlink(&root, folder.join("sub/up")).unwrap();
        std::os::unix::fs::symlink(folder.join("a.img"), root.join("leads-in")).unwrap();
        std::os::unix::fs::symlink(root.join("none"), folder.join("dangling")).unwrap();
        std::os::unix::fs::symlink(&folder, root.join("alias")).unwrap();

        let check = |words: &[(&str, &Path)]| super::check_settings(&keys(words), &root.join("alias"), &[]);
        let assert_path = |found: Result<BTreeMap<String, String>, String>, key: &str, want: &Path| {
            assert_eq!(found.unwrap()[key], want.display().to_string());
        };
        assert_path(check(&[("path", &folder.join("a.img"))]), "path", &folder.join("a.img"));
        assert_path(check(&[("path", &root.join("leads-in"))]), "path", &folder.join("a.img"));
        assert_path(check(&[("path", &folder.join("sub/../a.img"))]), "path", &folder.join("a.img"));
        let image = folder.join("a.img");
        assert_path(
            check(&[("path", &image), ("reservations", &folder.join("new.pr"))]),
            "reservations",
            &folder.join("new.pr"),
        );
        for path in [
            outside.clone(),
            folder.join("leads-out"),
            folder.join("../out.img"),
            folder.join("sub/up/out.img"),
            folder.join("sub/up/new.img"),
            root.join("in-too/c.img"),
            folder.join("dangling"),
            folder.clone(),
            PathBuf::from("/dev/null"),
            PathBuf::from(""),
            PathBuf::from("a\0b"),
        ] {
            let error = check(&[("path", &path)]).expect_err(&path.display().to_string());
            assert!(error.starts_with("path: found"), "{error}");
            let error = check(&[("path", &image), ("reservations", &path)]).expect_err(&path.display().to_string());
            assert!(error.starts_with("reservations: found"), "{error}");
        }
        for (words, want) in [
            (&[("storage", Path::new("ram")), ("path", &image)][..], "storage: found \"ram\", expected \"file\""),
            (&[("storage", Path::new("file"))], "path: found nothing"),
            (&[("unit", Path::new("c:0:0"))], "unit: found \"c:0:0\", expected one of this controller's"),
        ] {
            let error = check(words).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn only_what_the_guest_has_seen_is_believed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let image = folder.join("a.img").display().to_string();
        std::fs::write(&image, "").unwrap();
        let check = |keys: &[(&str, &str)]| {
            let path = [("path", image.as_str())];
            let given = path.iter().chain(keys).map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            super::check_settings(&given.collect(), &folder, &[])
        };
        let of_guest = [("serial", "s"), ("unit-name", "u"), ("readonly", "on"), ("lock", "shared-migration")];
        // Keys of service, resources, and shared limits.
        let of_host =
            [("aio", "threads"), ("iops", "1000000"), ("limit-group", "gold"), ("depth", "1"), ("any", "key")];
        let checked = check(&[of_guest.as_slice(), of_host.as_slice()].concat()).unwrap();
        let keys: Vec<&str> = checked.keys().map(String::as_str).collect();
        assert_eq!(keys, ["lock", "path", "readonly", "serial", "unit-name"]);
        assert_eq!(check(&[("lock", "off")]).unwrap_err(), "lock: found \"off\", expected a lock");
    }
}
