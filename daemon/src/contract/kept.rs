//! The record of what guests were given, while the daemon runs: the section of the state file.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_core::GuestObserver;
use mqblk_core::lock::{LockRank, RankedMutex};
use serde::{Deserialize, Serialize};

use super::{Contracts, DeviceContract, DiskContract, RawImages, SECTION};
use crate::state_file::{SavedState, StateFile};

/// Where the kernel has the id of its boot (proc_sys_kernel(5)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The section. No guest outlives the host's boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedContracts {
    boot: String,
    devices: Contracts,
    /// Of any boot.
    #[serde(default)]
    raw_images: BTreeMap<String, String>,
}

impl SavedContracts {
    /// Reads the section of a state file. One that cannot be used is dropped with a warning: nothing in it is worth more than serving.
    pub fn read(saved: &SavedState) -> SavedContracts {
        let section = saved.section::<SavedContracts>(SECTION).unwrap_or_else(|error| {
            tracing::warn!("{error}; what guests were given is not known");
            SavedContracts::default()
        });
        section.of_this_boot()
    }

    /// Drops everything if it is of another boot of the host.
    fn of_this_boot(self) -> SavedContracts {
        // Read once, before the sandbox: /proc may be out of reach later.
        let boot = std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        let devices = if self.boot == boot { self.devices } else { Contracts::new() };
        SavedContracts { boot, devices, raw_images: self.raw_images }
    }

    /// Returns the devices.
    pub fn devices(&self) -> &Contracts {
        &self.devices
    }

    /// Takes what another daemon hands over, which knows better. One that knows nothing of it has no boot.
    pub fn or_handed(self, handed: Option<&SavedContracts>) -> SavedContracts {
        let own = self.of_this_boot();
        match handed {
            Some(handed) if handed.boot == own.boot => handed.clone(),
            _ => own,
        }
    }

    /// Returns the images that were served as raw.
    pub fn raw_images(&self) -> RawImages {
        RawImages::new(self.raw_images.clone())
    }
}

/// A device, as a guest is or would be given it.
#[derive(Debug)]
struct Known {
    contract: DeviceContract,
    /// A guest relies on it.
    has_guest: bool,
}

#[derive(Debug, Default)]
struct Devices {
    known: BTreeMap<String, Known>,
    /// Number of changes of what is recorded.
    changes: u64,
}

/// What guests were given, and the state file that keeps it if there is one.
#[derive(Debug)]
pub struct KeptContracts {
    boot: String,
    raw_images: RawImages,
    devices: RankedMutex<Devices>,
    /// The changes that are written. Held while they are: the newest are written last.
    written: RankedMutex<u64>,
    file: Option<Arc<StateFile>>,
}

impl KeptContracts {
    /// Creates it with what a daemon before this one has recorded. `raw_images`: those of the storage backends.
    pub fn new(saved: SavedContracts, raw_images: RawImages, file: Option<Arc<StateFile>>) -> KeptContracts {
        let of_saved = |(key, contract)| (key, Known { contract, has_guest: true });
        let known = saved.devices.into_iter().map(of_saved).collect();
        KeptContracts {
            boot: saved.boot,
            raw_images,
            devices: RankedMutex::new(LockRank::KeptChanges, Devices { known, changes: 0 }),
            written: RankedMutex::new(LockRank::SavedSection, 0),
            file,
        }
    }

    /// Returns what guests rely on now.
    pub fn saved(&self) -> SavedContracts {
        let devices = self.devices.lock();
        let relied = devices.known.iter().filter(|(_, known)| known.has_guest);
        let devices = relied.map(|(key, known)| (key.clone(), known.contract.clone())).collect();
        SavedContracts { boot: self.boot.clone(), devices, raw_images: self.raw_images.list() }
    }

    /// Records that the device `key` is served, and returns the recorder of its guests. What is recorded of disks that are not served now
    /// stays.
    pub fn serve(self: &Arc<KeptContracts>, key: String, mut contract: DeviceContract) -> Arc<ContractRecorder> {
        let mut devices = self.devices.lock();
        let before = devices.known.remove(&key).filter(|known| known.contract.interface == contract.interface);
        let has_guest = before.as_ref().is_some_and(|known| known.has_guest);
        for (address, disk) in before.into_iter().flat_map(|known| known.contract.disks) {
            contract.disks.entry(address).or_insert(disk);
        }
        devices.known.insert(key.clone(), Known { contract, has_guest });
        drop(devices);
        Arc::new(ContractRecorder { kept: Arc::clone(self), key })
    }

    /// Changes the device `key`, and writes what is recorded if that has changed.
    fn change(&self, key: &str, change: impl FnOnce(&mut Known)) {
        let changes = {
            let mut devices = self.devices.lock();
            let Some(known) = devices.known.get_mut(key) else { return };
            let before = (known.has_guest, known.contract.clone());
            change(known);
            let is_new_image = known.has_guest && self.raw_images.add(&known.contract);
            let is_same =
                !is_new_image && known.has_guest == before.0 && (!known.has_guest || known.contract == before.1);
            if is_same {
                return;
            }
            devices.changes += 1;
            devices.changes
        };
        let Some(file) = &self.file else { return };
        let mut written = self.written.lock();
        // Another thread may have written it meanwhile, with its own.
        if *written < changes {
            *written = self.devices.lock().changes;
            file.set(SECTION, &self.saved());
        }
    }
}

/// Records what the guests of a device are given.
#[derive(Debug)]
pub struct ContractRecorder {
    kept: Arc<KeptContracts>,
    key: String,
}

impl ContractRecorder {
    /// Records that guests see a disk at `address` from now on, or with `None` none.
    pub fn set_disk(&self, address: &str, disk: Option<DiskContract>) {
        self.kept.change(&self.key, |known| match disk {
            Some(disk) => _ = known.contract.disks.insert(address.to_owned(), disk),
            None => _ = known.contract.disks.remove(address),
        });
    }

    /// Forgets the device, unless a guest relies on it: it is not served any more.
    pub fn release(&self) {
        let mut devices = self.kept.devices.lock();
        if devices.known.get(&self.key).is_some_and(|known| !known.has_guest) {
            devices.known.remove(&self.key);
        }
    }

    /// Forgets the device: it is removed, and with it what its guest relies on.
    pub fn forget(&self) {
        self.left();
        self.kept.devices.lock().known.remove(&self.key);
    }
}

impl GuestObserver for ContractRecorder {
    fn arrived(&self) {
        self.kept.change(&self.key, |known| known.has_guest = true);
    }

    fn left(&self) {
        self.kept.change(&self.key, |known| known.has_guest = false);
    }
}
