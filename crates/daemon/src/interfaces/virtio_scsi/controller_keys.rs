//! The keys of a controller, without its LUNs.

use std::path::{Path, PathBuf};

use mqblk_core::settings::{Key, SettingError, Settings};

use super::config::{ControllerConfig, FIXED_WORKER, IncomingLimits, LunConfig, WORD};
use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::contract::DeviceContract;
use crate::interface::{ListPosition, ResolveContext, UnassignedQueues};
use crate::key_values::finish;
use crate::names::{Claim, ID, rename_subject, take_id};
use crate::pair::{Pair, number, string};
use crate::queues::{DEFAULT_QUEUES, MAX_QUEUES};
use crate::sockets::PlannedSocket;
use crate::storage::take_storage_kind;
use crate::vhost_user::VhostUserEndpoint;

/// The number of request queues. A controller also has a control and an event queue.
static QUEUES: Key = Key::number("queues", 1, MAX_QUEUES as u64 - 2)
    .alias("num_queues")
    .otherwise("the number of CPUs that the process may use, at least 32")
    .about(
        "request queues offered",
        "The control and the event queue come on top, on the first worker. QEMU sets up one queue for each virtual CPU of the guest unless its \
         `num_queues` says otherwise. A guest with more queues than `queues` hangs: mqblk logs what to change.",
    );
/// The default of QEMU, and the range of its driver.
static CMD_PER_LUN: Key = Key::number("cmd-per-lun", 1, 1024).default("128").about(
    "most commands that the guest's driver may have in flight on one LUN",
    "QEMU passes its own `cmd_per_lun` to guests instead.",
);
static INCOMING_LUNS: Key = Key::text("incoming-luns", "DIR", "an existing folder").otherwise("such a migration fails").about(
    "for a guest that arrives with its devices' state: open LUNs added while it ran, if their files are in DIR, and remove LUNs removed meanwhile",
    "See [migration.md](migration.md#luns-that-were-added-at-run-time). The VMM names the files, so the folder must hold this guest's files only.",
);
static INCOMING_LUNS_MAX: Key = Key::number("incoming-luns-max", 1, 16_384)
    .default("64")
    .about("most LUNs of the controller after a migration, unless it has more already", "");
static INCOMING_LIMIT_GROUP: Key = Key::text("incoming-limit-group", "NAME", "a limit group")
    .about("the limit group of LUNs that arrive with a guest", "");
/// The keys of a controller, besides those of its socket and queues.
pub(super) const KEYS: &[&Key] =
    &[&ID, &QUEUES, &CMD_PER_LUN, &INCOMING_LUNS, &INCOMING_LUNS_MAX, &INCOMING_LIMIT_GROUP];

/// The keys of a controller, without its LUNs.
pub(super) struct ControllerKeys {
    settings: Settings,
    id: String,
    endpoint: VhostUserEndpoint,
    cmd_per_lun: u16,
    incoming_luns: Option<IncomingLimits>,
    origin: ChangeSource,
}

impl ControllerKeys {
    /// Takes the keys of a `[[controller]]` table.
    ///
    /// # Errors
    /// If a value is invalid or claimed already.
    pub(super) fn take(
        mut settings: Settings,
        context: &mut ResolveContext<'_>,
        owner: String,
    ) -> Result<ControllerKeys, SettingError> {
        let id = take_id(&mut settings, "socket", "scsi")?;
        ControllerKeys::take_rest(&mut settings, id, context, owner).map(|keys| ControllerKeys { settings, ..keys })
    }

    /// Takes the keys of a disk that is a controller with one LUN. Returns the LUN's settings too.
    ///
    /// # Errors
    /// If a value is invalid or claimed already.
    pub(super) fn of_disk(
        mut settings: Settings,
        context: &mut ResolveContext<'_>,
        owner: String,
    ) -> Result<(ControllerKeys, Settings), SettingError> {
        // The key stays for the LUN; here it only supplies a default id.
        let kind = take_storage_kind(&mut settings.clone(), context.kinds)?;
        let id = take_id(&mut settings, "path", kind)?;
        let keys = ControllerKeys::take_rest(&mut settings, id, context, owner)?;
        Ok((keys, settings))
    }

    /// Takes all keys except the id. The result lacks the remaining settings.
    fn take_rest(
        settings: &mut Settings,
        id: String,
        context: &mut ResolveContext<'_>,
        owner: String,
    ) -> Result<ControllerKeys, SettingError> {
        rename_subject(settings, format!("controller {id:?}"));
        context.names.claim(settings, "id", &id, owner)?;
        let queues = context.cpus.count.clamp(DEFAULT_QUEUES, MAX_QUEUES - 2);
        let endpoint = VhostUserEndpoint::take(settings, WORD, (&QUEUES, queues), context)?;
        let cmd_per_lun = settings.number_or_default(&CMD_PER_LUN)? as u16;
        let incoming_luns = take_incoming(settings)?;
        let (settings, origin) = (Settings::new(settings.subject()), ChangeSource::Configuration);
        Ok(ControllerKeys { settings, id, endpoint, cmd_per_lun, incoming_luns, origin })
    }

    /// Marks it as added at run time.
    pub(super) fn added(self) -> ControllerKeys {
        ControllerKeys { origin: ChangeSource::RunTime, ..self }
    }

    pub(super) fn origin(&self) -> ChangeSource {
        self.origin
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Returns the unique values that it has claimed.
    pub(super) fn claims(&self) -> Vec<Claim> {
        std::iter::once(("id", self.id.clone())).chain(self.endpoint.claims()).collect()
    }

    /// Returns its id and its socket, which its LUNs' defaults depend on.
    pub(super) fn lun_defaults(&self) -> (&str, &Path) {
        (&self.id, &self.endpoint.socket)
    }

    /// Returns the device as its guest was given it before.
    pub(super) fn given(&self) -> Option<&DeviceContract> {
        self.endpoint.given.as_ref()
    }

    pub(super) fn planned_socket(&self) -> PlannedSocket {
        self.endpoint.planned_socket(self.settings.subject().to_owned())
    }

    /// Returns its request queues. `index`: its number.
    pub(super) fn queues(&mut self, index: usize) -> UnassignedQueues<'_> {
        UnassignedQueues {
            position: ListPosition::Controller(index),
            count: self.endpoint.queues,
            map: &mut self.endpoint.queue_map,
            settings: &self.settings,
            is_added: self.origin == ChangeSource::RunTime,
        }
    }

    /// Returns the controller with its LUNs.
    ///
    /// # Errors
    /// If a key is left.
    pub(super) fn finish(self, luns: Vec<LunConfig>) -> Result<ControllerConfig, ConfigError> {
        let ControllerKeys { settings, id, mut endpoint, cmd_per_lun, incoming_luns, origin } = self;
        if luns.iter().any(LunConfig::has_one_channel) {
            endpoint.queue_map.keep_on_one_worker(&settings, Some(FIXED_WORKER))?;
        }
        finish(settings)?;
        Ok(ControllerConfig { id, endpoint, cmd_per_lun, incoming_luns, luns, origin })
    }
}

/// Takes the keys of an incoming guest's limits.
fn take_incoming(settings: &mut Settings) -> Result<Option<IncomingLimits>, SettingError> {
    let folder = take_directory(settings, &INCOMING_LUNS)?;
    for key in [&INCOMING_LUNS_MAX, &INCOMING_LIMIT_GROUP] {
        if let (None, Some(value)) = (&folder, settings.peek(key)) {
            return Err(settings.error(key, format!("{value:?}"), format!("it beside {INCOMING_LUNS}")));
        }
    }
    let luns = settings.number_or_default(&INCOMING_LUNS_MAX)? as u16;
    let limit_group = settings.text(&INCOMING_LIMIT_GROUP);
    Ok(folder.map(|folder| IncomingLimits { folder, luns, limit_group }))
}

/// Takes the path of an existing directory.
fn take_directory(settings: &mut Settings, key: &'static Key) -> Result<Option<PathBuf>, SettingError> {
    let Some(path) = settings.text(key).map(PathBuf::from) else { return Ok(None) };
    let reason = match path.metadata() {
        Ok(folder) if folder.is_dir() => return Ok(Some(path)),
        Ok(_) => "no folder".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(settings.error(key, format!("{path:?} ({reason})"), "an existing folder"))
}

/// Returns a controller's own keys with their values.
pub(super) fn controller_pairs(controller: &ControllerConfig) -> Vec<Pair> {
    let mut pairs = vec![(ID.name, string(&controller.id))];
    pairs.extend(controller.endpoint.pairs());
    pairs.push((CMD_PER_LUN.name, number(controller.cmd_per_lun)));
    if let Some(IncomingLimits { folder, luns, limit_group }) = &controller.incoming_luns {
        pairs.push((INCOMING_LUNS.name, string(&folder.to_string_lossy())));
        pairs.push((INCOMING_LUNS_MAX.name, number(*luns)));
        pairs.extend(limit_group.iter().map(|group| (INCOMING_LIMIT_GROUP.name, string(group))));
    }
    pairs
}
