//! The keys of a controller, without its LUNs.

use std::path::{Path, PathBuf};

use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::QueuePlacement;

use super::WORD;
use super::config::{ControllerConfig, LunConfig};
use super::controller::FIXED_WORKER;
use super::luns::IncomingLimits;
use crate::contract::DeviceContract;
use crate::interface::{ChangeSource, DeviceKeys, ResolveContext};
use crate::queues::MAX_QUEUES;
use crate::resolve::{Claim, ConfigError, rename_subject, take_id, take_storage_kind, take_u16};
use crate::sockets::PlannedSocket;
use crate::vhost_user::VhostUserEndpoint;

/// Maximum number of request queues of a controller, which also has a control and an event queue.
const MAX_SCSI_QUEUES: u16 = MAX_QUEUES - 2;
/// Minimum of a controller's default number of request queues. QEMU sets up one for each virtual CPU whatever is offered, and 10.0 does
/// not report if that is too many. Unused queues cost next to nothing.
const SCSI_QUEUES: u16 = 32;
/// `cmd-per-lun`: QEMU's default, and what its driver accepts.
const DEFAULT_CMD_PER_LUN: u16 = 128;
const MAX_CMD_PER_LUN: u16 = 1024;
/// LUNs of a controller that a VMM may bring about.
const DEFAULT_INCOMING_LUNS: u16 = 64;
const MAX_INCOMING_LUNS: u16 = 16384;

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

    /// Takes all keys except the id. The result does not have the remaining settings.
    fn take_rest(
        settings: &mut Settings,
        id: String,
        context: &mut ResolveContext<'_>,
        owner: String,
    ) -> Result<ControllerKeys, SettingError> {
        rename_subject(settings, format!("controller {id:?}"));
        context.names.claim(settings, "id", &id, owner)?;
        let queues = context.cpus.count.max(SCSI_QUEUES);
        let endpoint = VhostUserEndpoint::take(settings, WORD, (queues, MAX_SCSI_QUEUES), context)?;
        let cmd_per_lun = take_u16(settings, "cmd-per-lun", 1, MAX_CMD_PER_LUN)?.unwrap_or(DEFAULT_CMD_PER_LUN);
        let incoming_luns = take_incoming(settings)?;
        let (settings, origin) = (Settings::new(settings.subject()), ChangeSource::Configuration);
        Ok(ControllerKeys { settings, id, endpoint, cmd_per_lun, incoming_luns, origin })
    }

    /// Marks it as added at run time.
    pub(super) fn added(self) -> ControllerKeys {
        ControllerKeys { origin: ChangeSource::RunTime, ..self }
    }

    /// Returns its origin.
    pub(super) fn origin(&self) -> ChangeSource {
        self.origin
    }

    /// Returns its id.
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

    /// Returns what its guest was given before.
    pub(super) fn given(&self) -> Option<&DeviceContract> {
        self.endpoint.given.as_ref()
    }

    /// Returns its socket.
    pub(super) fn planned_socket(&self) -> PlannedSocket {
        self.endpoint.planned_socket(self.settings.subject().to_owned())
    }

    /// Returns the controller with its LUNs.
    ///
    /// # Errors
    /// If a key is left.
    pub(super) fn finish(self, luns: Vec<LunConfig>) -> Result<ControllerConfig, ConfigError> {
        let ControllerKeys { settings, id, mut endpoint, cmd_per_lun, incoming_luns, origin } = self;
        if luns.iter().any(LunConfig::has_one_channel) {
            endpoint.keep_on_one_worker(&settings, Some(FIXED_WORKER))?;
        }
        settings.finish()?;
        Ok(ControllerConfig { id, endpoint, cmd_per_lun, incoming_luns, luns, origin })
    }
}

impl DeviceKeys for ControllerKeys {
    fn queues(&self) -> u16 {
        self.endpoint.queues
    }

    fn assign_queues(&mut self, placement: &mut QueuePlacement) -> Result<(), SettingError> {
        self.endpoint.assign_queues(&self.settings, placement)
    }

    fn forget_queue_map(&mut self) -> bool {
        self.endpoint.queue_map.forget_request();
        self.origin == ChangeSource::RunTime
    }
}

/// Takes the keys of what an incoming guest may have.
fn take_incoming(settings: &mut Settings) -> Result<Option<IncomingLimits>, SettingError> {
    let folder = take_directory(settings, "incoming-luns")?;
    for key in ["incoming-luns-max", "incoming-limit-group"] {
        if let (None, Some(value)) = (&folder, settings.peek(key)) {
            return Err(settings.error(key, format!("{value:?}"), "it beside incoming-luns"));
        }
    }
    let luns = take_u16(settings, "incoming-luns-max", 1, MAX_INCOMING_LUNS)?.unwrap_or(DEFAULT_INCOMING_LUNS);
    let limit_group = settings.text("incoming-limit-group");
    Ok(folder.map(|folder| IncomingLimits { folder, luns, limit_group }))
}

/// Takes the path of an existing directory.
fn take_directory(settings: &mut Settings, key: &'static str) -> Result<Option<PathBuf>, SettingError> {
    let Some(path) = settings.text(key).map(PathBuf::from) else { return Ok(None) };
    let reason = match path.metadata() {
        Ok(folder) if folder.is_dir() => return Ok(Some(path)),
        Ok(_) => "no folder".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(settings.error(key, format!("{path:?} ({reason})"), "an existing folder"))
}
