//! virtio-blk over vhost-user: each disk is a device with a socket of its own. Disks can be added and removed while
//! others are served.
//!
//! `config` is a disk's configuration and `disk` a served disk, `disks` has all of them at run time, `saved` is their
//! section of the state file.

mod config;
mod disk;
mod disks;
mod saved;

use std::sync::Arc;

use mqblk_core::settings::{Key, SettingError, Settings};

use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::disk_list::{DiskConfig, DiskKeys, Endpoint as _};
use crate::interface::{
    Check, ConfiguredInterface, DiskTable, GuestInterface, InterfaceKeys, ResolveContext, UnassignedQueues,
};
use crate::out::{Admission, OutDisk};
use crate::queues::{self, QUEUES};
use crate::sockets::PlannedSocket;
use crate::storage_backends::{StorageBackends, open_by_origin};
use crate::vhost_user;
use config::{ConfiguredDisk, DiskToOpen, WORD};
use disks::ServedDisks;
use saved::SavedDisks;

/// virtio-blk.
#[derive(Debug)]
pub struct VirtioBlkInterface;

impl GuestInterface for VirtioBlkInterface {
    fn word(&self) -> &'static str {
        WORD
    }

    fn disk_keys(&self) -> &'static [&'static [&'static Key]] {
        const KEYS: &[&[&Key]] = &[vhost_user::KEYS, &[&QUEUES], queues::KEYS];
        KEYS
    }

    fn keys(&self) -> Box<dyn InterfaceKeys> {
        Box::new(BlkKeys::default())
    }
}

/// The keys of all disks.
#[derive(Default)]
struct BlkKeys {
    disks: Vec<DiskToOpen>,
    saved: SavedDisks,
}

impl InterfaceKeys for BlkKeys {
    fn take_disk(&mut self, disk: DiskTable, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        self.disks.push(DiskToOpen { keys: DiskKeys::take(disk, context)?, origin: ChangeSource::Configuration });
        Ok(())
    }

    fn take_process(&mut self, _process: &mut Settings, context: &mut ResolveContext<'_>) -> Result<(), SettingError> {
        if let Some(saved) = context.saved {
            self.saved = saved.section(WORD)?;
            saved::apply(&mut self.saved, &mut self.disks, context);
        }
        Ok(())
    }

    fn queues(&mut self) -> Vec<UnassignedQueues<'_>> {
        self.disks.iter_mut().map(|disk| disk.keys.queues()).collect()
    }

    fn sockets(&self) -> Vec<PlannedSocket> {
        let configured = self.disks.iter().filter(|disk| disk.origin == ChangeSource::Configuration);
        configured.map(|disk| disk.keys.endpoint().0.planned_socket(disk.keys.subject())).collect()
    }

    fn open(
        self: Box<Self>,
        storages: &dyn StorageBackends,
        admission: &mut Admission,
    ) -> Result<ConfiguredInterface, ConfigError> {
        let open = |DiskToOpen { keys, origin }: DiskToOpen, storages: &dyn StorageBackends| {
            (keys.open(storages), keys, origin)
        };
        let opened = open_by_origin(self.disks, |disk| disk.origin, storages, open);
        let mut disks = Vec::new();
        for (opened, keys, origin) in opened {
            let configured = origin == ChangeSource::Configuration;
            let files = || keys.endpoint().0.files().into_iter().filter(|_| configured).collect();
            match admission.admit(opened, origin, |why| OutDisk { files: files(), ..keys.out(WORD, origin, why) })? {
                Some(config) => disks.push(ConfiguredDisk { config, origin }),
                None => admission.freed_queues.extend(keys.endpoint().queue_map().workers()),
            }
        }
        Ok(configured(disks, self.saved))
    }
}

/// Returns the interface with all disks of the configuration, and those added at run time before.
fn configured(disks: Vec<ConfiguredDisk>, saved: SavedDisks) -> ConfiguredInterface {
    let configs = || disks.iter().map(|disk| &disk.config);
    // Those of the configuration alone.
    let own = || disks.iter().filter(|disk| disk.origin == ChangeSource::Configuration).map(|disk| &disk.config);
    let checks: Vec<Check> = own().map(|disk| disk.endpoint.0.check(format!("disk {:?}", disk.id))).collect();
    ConfiguredInterface {
        sections: configs().map(|disk| disk.section(None)).collect(),
        ids: configs().map(DiskConfig::named).collect(),
        queues: configs().map(|disk| usize::from(disk.endpoint.queues())).sum(),
        files: own().flat_map(|disk| disk.endpoint.0.files()).collect(),
        check: Box::new(move || checks.iter().try_for_each(|check| check())),
        ..ConfiguredInterface::new(|host| Ok(Arc::new(ServedDisks::start(disks, saved, host)?)))
    }
}
