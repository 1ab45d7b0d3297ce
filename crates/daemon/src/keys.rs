//! The table of keys: all keys of a configuration, as declared where they are taken. Options, help texts and the tables
//! of documents are made from it.

use mqblk_core::settings::Key;

use crate::interface::{ConfigTable, INTERFACE, Interfaces};
use crate::limits::{LIMIT_GROUP, LIMIT_GROUP_NAME, LIMIT_KEYS};
use crate::names::ID;
use crate::process::{DRAIN_TIMEOUT_S, HANG_WARNING_S, PIN, STATE, STRICT, WORKERS};
use crate::sandbox_keys::{SANDBOX, SANDBOX_ALLOW, SANDBOX_RBD};
use crate::sockets::{ADMIN, ADMIN_GROUP, ADMIN_MODE, ADMIN_OWNER, METRICS, METRICS_MODE};
use crate::storage::{PLUG_KEYS, STORAGE_KEYS};
use crate::user::{GROUP, USER};

/// The top-level keys of the daemon itself, each also an option, in groups with a heading.
pub const PROCESS_GROUPS: &[(&str, &[&Key])] = &[
    ("Workers", &[&WORKERS, &PIN]),
    ("Admin socket", &[&ADMIN, &ADMIN_MODE, &ADMIN_OWNER, &ADMIN_GROUP, &STATE]),
    ("Metrics", &[&METRICS, &METRICS_MODE]),
    ("Storage that takes long", &[&DRAIN_TIMEOUT_S, &HANG_WARNING_S]),
    ("Rights", &[&SANDBOX, &SANDBOX_ALLOW, &SANDBOX_RBD, &USER, &GROUP]),
    ("Disks that cannot be served", &[&STRICT]),
];

/// Keys that are given together: of an option and of a table of the configuration file.
pub struct KeyTable {
    /// The name of the table and the option: `disk`.
    pub name: &'static str,
    /// The interface whose disks have these keys; `None`: the default interface, or a table with another name.
    pub interface: Option<&'static str>,
    /// Its own keys.
    pub keys: Vec<TableKey>,
    /// True if it describes a storage, and so has [`storage_keys`] too.
    pub has_storage: bool,
}

/// A key of a table.
pub struct TableKey {
    /// The key.
    pub key: &'static Key,
    /// The storage backends that have it; none if it does not depend on the backend.
    pub backends: Vec<&'static str>,
}

/// Returns the top-level keys: those of the daemon, then those of its interfaces.
pub fn process_keys(interfaces: Interfaces) -> impl Iterator<Item = &'static Key> {
    let own = PROCESS_GROUPS.iter().flat_map(|(_, keys)| keys.iter());
    own.chain(interfaces.0.iter().flat_map(|interface| interface.process_keys())).copied()
}

/// Returns the tables of keys: of disks, of interfaces' own tables, and of groups of limits.
pub fn tables(interfaces: Interfaces) -> Vec<KeyTable> {
    let mut tables = Vec::new();
    for (index, interface) in interfaces.0.iter().enumerate() {
        let own = interface.disk_keys();
        if !own.is_empty() {
            let mut keys = flat(&[&[&ID]]);
            keys.push(plain(&INTERFACE));
            keys.extend(flat(own));
            let interface = (index > 0).then(|| interface.word());
            tables.push(KeyTable { name: "disk", interface, keys, has_storage: true });
        }
    }
    for (_, table) in interfaces.tables() {
        tables.extend([table_of(table)].into_iter().chain(table.inner.iter().map(table_of)));
    }
    let keys = flat(&[&[&LIMIT_GROUP_NAME], LIMIT_KEYS]);
    tables.push(KeyTable { name: LIMIT_GROUP.name, interface: None, keys, has_storage: false });
    tables
}

fn table_of(table: &'static ConfigTable) -> KeyTable {
    KeyTable { name: table.name, interface: None, keys: flat(table.keys), has_storage: table.has_storage }
}

/// Returns the keys of a storage: the common ones, those of backends, and those of merging and limits.
pub fn storage_keys() -> Vec<TableKey> {
    let mut keys = flat(&[STORAGE_KEYS]);
    let mut of_backends: Vec<TableKey> = Vec::new();
    for (backend, own) in mqblk_storage::backend_keys() {
        for key in own {
            match of_backends.iter_mut().find(|known| std::ptr::eq(known.key, *key)) {
                Some(known) => known.backends.push(backend),
                None => of_backends.push(TableKey { key, backends: vec![backend] }),
            }
        }
    }
    let all = mqblk_storage::backend_keys().len();
    of_backends.iter_mut().filter(|key| key.backends.len() == all).for_each(|key| key.backends.clear());
    keys.extend(of_backends);
    keys.extend(flat(&[PLUG_KEYS, &[&LIMIT_GROUP], LIMIT_KEYS]));
    keys
}

fn flat(groups: &[&[&'static Key]]) -> Vec<TableKey> {
    groups.iter().flat_map(|group| group.iter().map(|key| plain(key))).collect()
}

fn plain(key: &'static Key) -> TableKey {
    TableKey { key, backends: Vec::new() }
}
