//! A disk that is added while the daemon serves, up to its open storage: common to all interfaces whose devices have
//! one disk each.

use std::sync::Arc;

use mqblk_core::lock::RankedMutex;
use mqblk_core::settings::Settings;
use mqblk_engine::QueuePlacement;

use crate::change::ChangeError;
use crate::cpus::Cpus;
use crate::disk_list::{DiskConfig, DiskKeys, Endpoint};
use crate::interface::{DiskTable, HostContext, IsTaken, ListPosition, ResolveContext};
use crate::names::{Claim, UniqueNames, claimed_error};

/// A disk with its open storage, and its claims.
pub(crate) struct NewDisk<E: Endpoint> {
    pub(crate) config: DiskConfig<E>,
    pub(crate) reservation: Reservation,
}

impl<E: Endpoint> NewDisk<E> {
    /// Checks the settings of a disk, reserves its id and its other claims, and opens its storage.
    ///
    /// # Errors
    /// If a value is invalid or claimed already, or the storage cannot be opened.
    pub(crate) fn open(
        settings: Settings,
        position: ListPosition,
        host: &HostContext,
        is_taken: IsTaken<'_>,
    ) -> Result<NewDisk<E>, ChangeError> {
        let given = Settings::new(settings.subject());
        // Queried now: it takes milliseconds, which would delay guests at the daemon's start.
        let cpus = Cpus::of_this_host();
        let kinds = host.storages.kinds();
        // The guest of a disk that was out may still run.
        let recorded = host.contracts.saved();
        let (mut keys, claims) = {
            let mut names = host.names.lock();
            let keys = names.attempt(|names| {
                let mut context =
                    ResolveContext { cpus: &cpus, kinds: &kinds, names, saved: None, given: recorded.devices() };
                let owner = settings.subject().to_owned();
                DiskKeys::<E>::take(DiskTable { settings, owner, position }, &mut context)
            })?;
            let (claims, owner) = (keys.claims(), format!("disk {:?}", keys.id()));
            claims.iter().for_each(|claim| names.insert(claim, &owner));
            (keys, claims)
        };
        let reservation = Reservation::of(host, claims);
        // After the id is claimed, and without a lock: of two concurrent additions the later one sees the other.
        if is_taken(keys.id()) {
            return Err(claimed_error(&given, "id", keys.id(), &format!("disk or LUN {:?}", keys.id())).into());
        }
        // On a copy: the real one counts the disk once it is served.
        let mut placement: QueuePlacement = host.placement.lock().clone();
        keys.queues().assign(&mut placement)?;
        let config = keys.open(host.storages.as_ref())?;
        Ok(NewDisk { config, reservation })
    }
}

/// Claims that are released when this is dropped.
pub(crate) struct Reservation {
    names: Arc<RankedMutex<UniqueNames>>,
    claims: Vec<Claim>,
}

impl Reservation {
    /// Returns the reservation of these claims, which the caller has made.
    pub(crate) fn of(host: &HostContext, claims: Vec<Claim>) -> Reservation {
        Reservation { names: Arc::clone(&host.names), claims }
    }

    /// Keeps the claims, and returns them.
    pub(crate) fn keep(mut self) -> Vec<Claim> {
        std::mem::take(&mut self.claims)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut names = self.names.lock();
        self.claims.iter().for_each(|claim| names.release(claim));
    }
}
