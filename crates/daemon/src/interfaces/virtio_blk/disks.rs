//! All virtio-blk disks at run time.
//!
//! The table is locked for short times only. Slow steps (opening storage, waiting for requests) run without the lock,
//! while the disk's claims reserve its id and its socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use mqblk_core::lock::{LockRank, RankedGuard, RankedMutex};
use mqblk_core::settings::Settings;
use mqblk_engine::AnyDisk;
use mqblk_vhost_user_server::connection_changes;

use super::config::{BlkEndpoint, ConfiguredDisk, WORD};
use super::disk::{BlkDisk, BlkStartError, serve};
use super::saved::{AddedDisk, SavedDisks};
use crate::change::ChangeError;
use crate::change::ChangeSource;
use crate::disk_list::{DiskConfig, Endpoint as _};
use crate::flush::flush_all;
use crate::interface::{HostContext, IsTaken, ListPosition, ServedDevice, ServedInterface};
use crate::names::Claim;
use crate::new_disk::{NewDisk, Reservation};
use crate::out::OutDisk;
use crate::queues::workers_of;

/// A served disk.
#[derive(Clone)]
struct ListedDisk {
    position: ListPosition,
    origin: ChangeSource,
    claims: Vec<Claim>,
    flush_target: (String, Arc<AnyDisk>),
    served: Arc<BlkDisk>,
    /// True while it is being removed.
    removing: bool,
}

/// All disks, served.
pub(super) struct ServedDisks {
    host: HostContext,
    disks: RankedMutex<Vec<ListedDisk>>,
    /// Number of changes of the table.
    changes: AtomicU64,
    /// The disks for the next daemon.
    saved: RankedMutex<SavedDisks>,
}

impl ServedDisks {
    /// Serves the disks of a configuration, and those added at run time before.
    ///
    /// # Errors
    /// If a disk of the configuration cannot be served.
    pub(super) fn start(
        disks: Vec<ConfiguredDisk>,
        saved: SavedDisks,
        host: &HostContext,
    ) -> Result<ServedDisks, BlkStartError> {
        let mut served = Vec::new();
        for ConfiguredDisk { config, origin } in disks {
            let (id, given) = (config.id.clone(), config.given.clone());
            match listed(config, origin, host) {
                Ok(disk) => served.push(disk),
                Err(error) if origin == ChangeSource::RunTime => {
                    host.out.add(OutDisk::new(id, WORD, given, origin, &error));
                }
                Err(error) => return Err(error),
            }
        }
        let host = host.clone();
        let table = RankedMutex::new(LockRank::DiskTable, served);
        let saved = RankedMutex::new(LockRank::SavedSection, saved);
        let disks = ServedDisks { host, disks: table, changes: AtomicU64::new(0), saved };
        // Drops entries that did not fit the configuration.
        disks.save(|_| {});
        Ok(disks)
    }

    fn table(&self) -> RankedGuard<'_, Vec<ListedDisk>> {
        self.disks.lock()
    }

    /// Records a change in the state file, if there is one.
    fn save(&self, change: impl FnOnce(&mut SavedDisks)) {
        if let Some(state) = &self.host.state {
            let mut saved = self.saved.lock();
            change(&mut saved);
            state.set(WORD, &*saved);
        }
    }

    /// Returns the position of the next added disk.
    fn next_position(&self) -> ListPosition {
        let after = |disk: &ListedDisk| match disk.position {
            ListPosition::Added(number) => number + 1,
            _ => 0,
        };
        ListPosition::Added(self.table().iter().map(after).max().unwrap_or(0))
    }

    fn add(&self, settings: Settings, is_taken: IsTaken<'_>, source: ChangeSource) -> Result<String, ChangeError> {
        let given = settings.clone();
        let NewDisk { config, reservation } =
            NewDisk::<BlkEndpoint>::open(settings, self.next_position(), &self.host, is_taken)?;
        let disk = listed(config, source, &self.host);
        let disk = disk.map_err(|error| ChangeError::Failed(error.to_string()))?;
        self.host.placement.lock().place(&current_map(&disk.served));
        let id = disk.served.id().to_owned();
        // Recorded before the disk can be found, so that its removal is recorded later.
        if source == ChangeSource::RunTime {
            self.save(|saved| saved.add(AddedDisk::new(&id, &given)));
        }
        let disk = ListedDisk { claims: reservation.keep(), ..disk };
        self.table().push(disk);
        self.changes.fetch_add(1, Ordering::SeqCst);
        tracing::info!(disk = id, "disk added");
        Ok(id)
    }

    /// Marks a disk as being removed. `None` if there is no such disk.
    fn begin_remove(&self, id: &str, force: bool, source: ChangeSource) -> Option<Result<ListedDisk, ChangeError>> {
        let refused = |why: &str| Some(Err(ChangeError::Failed(format!("disk {id:?}: {why}"))));
        let mut table = self.table();
        let disk = table.iter_mut().find(|disk| disk.served.id() == id)?;
        if disk.removing {
            return refused("it is being removed");
        }
        if !force && disk.served.is_connected() {
            return refused("a guest is connected, which would lose the disk: detach it there, or say so (--force)");
        }
        disk.removing = true;
        let disk = disk.clone();
        drop(table);
        // Recorded now: the disk stays removed even if the daemon is killed.
        if source == ChangeSource::RunTime {
            self.save(|saved| saved.remove(id, disk.origin));
        }
        Some(Ok(disk))
    }

    fn remove(&self, disk: ListedDisk) -> Result<(), ChangeError> {
        disk.served.begin_stop();
        disk.served.stop();
        disk.served.forget_guest();
        self.table().retain(|other| other.served.id() != disk.served.id());
        self.changes.fetch_add(1, Ordering::SeqCst);
        let queue_map = current_map(&disk.served);
        let ListedDisk { claims, flush_target, served, .. } = disk;
        let id = served.id().to_owned();
        drop(served);
        self.host.kept.forget(&id);
        self.host.placement.lock().remove(&queue_map);
        let flushed = flush_all(vec![flush_target], self.host.drain_timeout);
        // Only now: the next disk of its id may have the same image.
        drop(Reservation::of(&self.host, claims));
        match flushed {
            Ok(()) => {
                tracing::info!(disk = id, "disk removed");
                Ok(())
            }
            Err(error) => {
                let why = format!("{error}; it is gone, but written data may be lost");
                tracing::error!(disk = id, "{why}");
                Err(ChangeError::Failed(why))
            }
        }
    }
}

impl ServedInterface for ServedDisks {
    fn devices(&self) -> Vec<(ListPosition, Arc<dyn ServedDevice>)> {
        self.table().iter().map(|disk| (disk.position, Arc::clone(&disk.served) as _)).collect()
    }

    fn changes(&self) -> Option<u64> {
        // Both only grow.
        Some(self.changes.load(Ordering::SeqCst) + connection_changes())
    }

    fn has_id(&self, id: &str) -> bool {
        self.table().iter().any(|disk| disk.served.id() == id)
    }

    fn add_disk(&self, settings: Settings, is_taken: IsTaken<'_>, source: ChangeSource) -> Result<String, ChangeError> {
        self.add(settings, is_taken, source)
    }

    fn remove_disk(&self, id: &str, force: bool, source: ChangeSource) -> Option<Result<(), ChangeError>> {
        Some(self.begin_remove(id, force, source)?.and_then(|disk| self.remove(disk)))
    }

    fn give_up(&self, disk: &OutDisk) {
        if disk.interface == WORD {
            self.save(|saved| saved.remove(&disk.id, disk.origin));
        }
    }

    fn begin_stop(&self) {
        let disks = self.table().clone();
        disks.iter().for_each(|disk| disk.served.begin_stop());
    }

    fn stop(&self, _deadline: Instant) {
        let disks = self.table().clone();
        disks.iter().for_each(|disk| disk.served.stop());
    }

    fn flush_targets(&self) -> Vec<(String, Arc<AnyDisk>)> {
        self.table().iter().map(|disk| disk.flush_target.clone()).collect()
    }
}

/// Returns the worker of each queue.
fn current_map(disk: &BlkDisk) -> Vec<u16> {
    disk.queue_settings().map(|queues| workers_of(&queues)).unwrap_or_default()
}

/// Serves a disk. The caller holds its claims.
fn listed(
    config: DiskConfig<BlkEndpoint>,
    origin: ChangeSource,
    host: &HostContext,
) -> Result<ListedDisk, BlkStartError> {
    let (position, flush_target) = (config.position, config.flush_target());
    let claims = std::iter::once(("id", config.id.clone())).chain(config.endpoint.claims()).collect();
    let served = serve(config, host)?;
    Ok(ListedDisk { position, origin, claims, flush_target, served, removing: false })
}
