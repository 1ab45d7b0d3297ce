//! A fourth guest interface. It proves that an interface is one folder and one line: this folder, and the line in
//! `bin/mqblk_lines.rs`.
//!
//! "Guests" send lines to a Unix socket: `read OFFSET LENGTH`, `write OFFSET LENGTH` with the data after it, `flush`.
//! Each connection uses a queue of the engine.

mod endpoint;
mod queue;
mod server;

use std::sync::Arc;
use std::time::Instant;

use mqblk_admin::Verb;
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_daemon::change::ChangeSource;
use mqblk_daemon::config_error::ConfigError;
use mqblk_daemon::disk_list::{DiskConfig, DiskKeys};
use mqblk_daemon::file_use::FileUse;
use mqblk_daemon::interface::{
    ConfiguredInterface, DiskTable, GuestInterface, HostContext, InterfaceKeys, ListPosition, ResolveContext,
    ServedDevice, ServedInterface, StartFailure, UnassignedQueues,
};
use mqblk_daemon::out::Admission;
use mqblk_daemon::pair::number;
use mqblk_daemon::storage_backends::StorageBackends;
use mqblk_engine::AnyDisk;
use serde_json::json;

use endpoint::LineEndpoint;
use server::LineServer;

/// The word of the interface.
const WORD: &str = "lines";
/// The longest request, in bytes: the key's default and its maximum.
const MAX_BYTES: u64 = 64 << 10;
static MAX_BYTES_KEY: Key =
    Key::number("lines-max-bytes", 512, MAX_BYTES).default("65536").about("longest request over lines, in bytes", "");

/// Disks over lines.
#[derive(Debug)]
pub struct LineInterface;

impl GuestInterface for LineInterface {
    fn word(&self) -> &'static str {
        WORD
    }

    fn process_keys(&self) -> &'static [&'static Key] {
        const KEYS: &[&Key] = &[&MAX_BYTES_KEY];
        KEYS
    }

    fn disk_keys(&self) -> &'static [&'static [&'static Key]] {
        &[endpoint::KEYS]
    }

    fn keys(&self) -> Box<dyn InterfaceKeys> {
        Box::new(LineKeys { disks: Vec::new(), max_bytes: MAX_BYTES })
    }
}

struct LineKeys {
    disks: Vec<DiskKeys<LineEndpoint>>,
    max_bytes: u64,
}

impl InterfaceKeys for LineKeys {
    fn take_disk(&mut self, disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.disks.push(DiskKeys::take(disk, context)?);
        Ok(())
    }

    fn take_process(&mut self, process: &mut Settings, _: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.max_bytes = process.number_or_default(&MAX_BYTES_KEY)?;
        Ok(())
    }

    fn queues(&mut self) -> Vec<UnassignedQueues<'_>> {
        self.disks.iter_mut().map(DiskKeys::queues).collect()
    }

    fn open(
        self: Box<Self>,
        storages: &dyn StorageBackends,
        admission: &mut Admission,
    ) -> Result<ConfiguredInterface, ConfigError> {
        let origin = ChangeSource::Configuration;
        let mut disks = Vec::new();
        for keys in self.disks {
            disks.extend(admission.admit(keys.open(storages), origin, |why| keys.out(WORD, origin, why))?);
        }
        let max_bytes = self.max_bytes;
        Ok(ConfiguredInterface {
            process_pairs: vec![(MAX_BYTES_KEY.name, number(max_bytes as i64))],
            sections: disks.iter().map(|disk| disk.section(Some(WORD))).collect(),
            ids: disks.iter().map(DiskConfig::named).collect(),
            queues: disks.iter().map(|disk| usize::from(disk.endpoint.queues)).sum(),
            files: disks.iter().map(|disk| FileUse::Socket(disk.endpoint.socket.clone())).collect(),
            ..ConfiguredInterface::new(move |host| start(disks, max_bytes, host))
        })
    }
}

fn start(
    disks: Vec<DiskConfig<LineEndpoint>>,
    max_bytes: u64,
    host: &HostContext,
) -> Result<Arc<dyn ServedInterface>, StartFailure> {
    let mut served = Vec::new();
    for disk in disks {
        let (position, target) = (disk.position, disk.flush_target());
        served.push((position, target, Arc::new(LineServer::start(disk, max_bytes, &host.engine)?)));
    }
    Ok(Arc::new(ServedLines { disks: served, max_bytes }))
}

/// A served disk: its position, its id and the device to flush at the end, and its server.
type ListedDisk = (ListPosition, (String, Arc<AnyDisk>), Arc<LineServer>);

struct ServedLines {
    disks: Vec<ListedDisk>,
    max_bytes: u64,
}

impl ServedInterface for ServedLines {
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)> {
        self.disks.iter().map(|(position, _, disk)| (*position, Arc::clone(disk) as _)).collect()
    }

    fn verbs(self: Arc<Self>) -> Vec<Verb> {
        let max_bytes = self.max_bytes;
        vec![Verb::new("lines.limits", "The longest request over lines", &[], move |_| {
            Ok(json!({ "max_bytes": max_bytes }))
        })]
    }

    fn begin_stop(&self) {
        self.disks.iter().for_each(|(_, _, disk)| disk.begin_stop());
    }

    fn stop(&self, _deadline: Instant) {}

    fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        self.disks.iter().map(|(_, target, _)| target.clone()).collect()
    }
}
