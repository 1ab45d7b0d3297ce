//! The keys of a LUN: its address and its logical unit. For LUNs of the configuration and LUNs added at run time.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_scsi::reservation::locally_assigned;

use super::config::{LunConfig, LunOrigin, LunUnit, TargetLun, UnitConfig, WORD};
use super::controller_keys::ControllerKeys;
use crate::change::ChangeSource;
use crate::config_error::ConfigError;
use crate::contract::DiskContract;
use crate::file_use::FileUse;
use crate::key_values::{finish, take_u16};
use crate::names::{Claim, ID, UniqueNames, canonical_path, check_id, rename_subject};
use crate::out::OutDisk;
use crate::pair::{Pair, number, string};
use crate::storage::backend_pairs;
use crate::storage::{StorageKeys, is_printable, storage_pairs, take_printable, take_storage_kind};
use crate::storage_backends::StorageBackends;

/// Maximum length of a logical unit's serial number (VPD page 80h).
const SERIAL_BYTES: usize = 64;
/// Maximum length of a logical unit's name that VPD page 83h reports without truncation.
const UNIT_NAME_BYTES: usize = 64;
/// Field lengths of the standard INQUIRY data. Source: SPC-4 section 6.6.2.
const VENDOR_BYTES: usize = 8;
const PRODUCT_BYTES: usize = 16;

static CONTROLLER: Key = Key::text("controller", "ID", "the id of a controller")
    .required()
    .about("the controller", "A `[[controller.lun]]` table needs none.");
static TARGET: Key =
    Key::number("target", 0, 255).otherwise("the first that has no LUN").about("the target of its address", "");
/// Single level addressing carries 14 bits (SAM-5 section 4.7.5).
static LUN: Key = Key::number("lun", 0, 16_383).default("0").about("the LUN of its address", "");
static UNIT: Key = Key::text("unit", "ID", "the id of another LUN")
    .otherwise("a unit of its own")
    .about("share the logical unit of the LUN of this id, in place of storage: multipath, or two guests", "With it only `controller`, `target`, `lun` and `id`. A logical unit occurs once in each target: each of its paths needs its own target or \
     controller.");
static UNIT_NAME: Key = Key::text("unit-name", "TEXT", "1 to 64 bytes of printable ASCII")
    .otherwise("from its address and the socket")
    .about("source of the unit's world-wide identification; unique", "VPD page 83h, `/dev/disk/by-id/wwn-*`. Set it if the identification must stay when the address or socket changes, or if several daemons serve the \
     unit.");
static VENDOR: Key = Key::text("vendor", "TEXT", "1 to 8 bytes of printable ASCII")
    .default("mqblk")
    .about("the vendor that the guest sees", "");
static PRODUCT: Key = Key::text("product", "TEXT", "1 to 16 bytes of printable ASCII")
    .default("virtual disk")
    .about("the product that the guest sees", "");
static RESERVATIONS: Key = Key::text("reservations", "FILE", "a file, or a new one in an existing folder")
    .otherwise("guests that ask for it are refused")
    .about(
        "keep persistent reservations in FILE over a restart, for guests that ask for it",
        "APTPL. Rewritten at each change; made if missing.",
    );
/// The keys of a LUN, besides those of its storage.
pub(super) const KEYS: &[&Key] =
    &[&CONTROLLER, &TARGET, &LUN, &ID, &UNIT, &UNIT_NAME, &VENDOR, &PRODUCT, &RESERVATIONS];

/// The LUN addresses in use on a controller, with the LUNs' ids.
pub(super) type UsedAddresses = BTreeMap<TargetLun, String>;

/// Returns the lowest target that has no LUN.
fn free_target(addresses: &UsedAddresses) -> Option<u8> {
    (0..=u8::MAX).find(|target| !addresses.keys().any(|address| address.target == *target))
}

/// The keys of a LUN whose storage is not open yet.
#[derive(Debug)]
pub(super) struct LunKeys {
    /// As given, with the controller, the id and the address.
    given: Settings,
    settings: Settings,
    id: String,
    address: TargetLun,
    unit: UnitKeys,
    claims: Vec<Claim>,
}

#[derive(Clone, Debug)]
enum UnitKeys {
    Own(Box<OwnUnitKeys>),
    Shared(String),
}

#[derive(Clone, Debug)]
struct OwnUnitKeys {
    storage: StorageKeys,
    unit_name: String,
    vendor: String,
    product: String,
    reservations: Option<PathBuf>,
}

impl LunKeys {
    /// Takes the keys of a LUN of the controller `controller`, whose socket is at `socket`. Claims its address and
    /// names.
    ///
    /// # Errors
    /// If a value is invalid or already claimed.
    pub(super) fn take(
        mut settings: Settings,
        (controller, socket): (&str, &Path),
        kinds: &[&'static str],
        addresses: &mut UsedAddresses,
        names: &mut UniqueNames,
    ) -> Result<LunKeys, SettingError> {
        let mut given = settings.clone();
        let address = take_address(&mut settings, addresses)?;
        let id = settings.text(&ID).unwrap_or_else(|| format!("{controller}:{address}"));
        check_id(&settings, &id, "", ":")?;
        rename_subject(&mut settings, format!("lun {id:?}"));
        if let Some(other) = addresses.get(&address) {
            let found = format!("target {} lun {}, the place of lun {other:?}", address.target, address.lun);
            let expected = "a place of its own; without target= it gets the first target that is free";
            return Err(settings.error(&TARGET, found, expected));
        }
        let mut claims =
            vec![names.claim(&settings, ID.name, &id, format!("lun {address} of controller {controller:?}"))?];
        let unit = match settings.text(&UNIT) {
            Some(unit) => UnitKeys::Shared(unit),
            None => {
                let own = OwnUnitKeys::take(&mut settings, &id, default_unit_name(socket, address), kinds)?;
                claims.extend(own.claim(&settings, &id, names)?);
                UnitKeys::Own(Box::new(own))
            }
        };
        let place = [(TARGET.name, address.target.to_string()), (LUN.name, address.lun.to_string())];
        for (key, value) in [(CONTROLLER.name, controller.to_owned()), (ID.name, id.clone())].into_iter().chain(place) {
            if given.peek(key).is_none() {
                given.insert(key, &value)?;
            }
        }
        addresses.insert(address, id.clone());
        Ok(LunKeys { given, settings, id, address, unit, claims })
    }

    pub(super) fn claims(&self) -> &[Claim] {
        &self.claims
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn address(&self) -> TargetLun {
        self.address
    }

    /// Returns the name of the logical unit that it shares; `None` if it has one of its own.
    pub(super) fn shared_unit(&self) -> Option<&str> {
        match &self.unit {
            UnitKeys::Own(_) => None,
            UnitKeys::Shared(unit) => Some(unit),
        }
    }

    /// Returns the error for a logical unit that it cannot share. `found` describes the owner of that name, if there is
    /// one.
    pub(super) fn no_such_unit(&self, unit: &str, found: &str) -> SettingError {
        self.settings.error(&UNIT, format!("{unit:?}{found}"), "the id of a LUN with storage of its own")
    }

    /// Returns the error for a logical unit that is out.
    pub(super) fn unit_is_out(&self, unit: &str) -> SettingError {
        self.settings.refused(&UNIT, format!("{unit:?}, which is not served"), "the id of a LUN that is")
    }

    /// Returns the error for a logical unit that the LUN `other` of the same target maps already.
    pub(super) fn unit_twice(&self, unit: &str, other: &str) -> SettingError {
        let found = format!("{unit:?}, which target {} has already: {other:?}", self.address.target);
        self.settings.error(&UNIT, found, "another target: a unit is once in each")
    }

    /// Returns the record of a LUN that `why` keeps out.
    pub(super) fn out(&self, origin: ChangeSource, why: &dyn std::error::Error) -> OutDisk {
        let reservations = match &self.unit {
            UnitKeys::Own(own) if origin == ChangeSource::Configuration => {
                own.reservations.clone().map(FileUse::Replaced)
            }
            UnitKeys::Own(_) | UnitKeys::Shared(_) => None,
        };
        let out = OutDisk::new(self.id.clone(), WORD, self.given.clone(), origin, why);
        OutDisk { files: reservations.into_iter().collect(), ..out }
    }

    /// Opens the storage, unless the logical unit is shared. `given`: the unit as a guest was given it before.
    ///
    /// # Errors
    /// If the storage cannot be opened, or a key is unknown.
    pub(super) fn open(
        &self,
        storages: &dyn StorageBackends,
        given: Option<&DiskContract>,
    ) -> Result<LunConfig, ConfigError> {
        let LunKeys { settings, id, address, unit, .. } = self;
        let (settings, id, address, unit) = (settings.clone(), id.clone(), *address, unit.clone());
        let unit = match unit {
            UnitKeys::Own(own) => {
                let OwnUnitKeys { storage, unit_name, vendor, product, reservations } = *own;
                let subject = settings.subject().to_owned();
                let storage = storage.open(settings, storages, given)?;
                let keep = |key, found| match given {
                    Some(given) => given.keep_text(&subject, key, found),
                    None => found,
                };
                LunUnit::Own(Box::new(UnitConfig {
                    storage,
                    unit_name: keep(UNIT_NAME.name, unit_name),
                    vendor: keep(VENDOR.name, vendor),
                    product: keep(PRODUCT.name, product),
                    reservations,
                }))
            }
            UnitKeys::Shared(unit) => {
                finish(settings)?;
                LunUnit::Shared(unit)
            }
        };
        Ok(LunConfig { id, address, unit, origin: LunOrigin::Configuration, mapped: true })
    }
}

/// The keys of a LUN, not yet checked.
pub(super) struct RawLun {
    /// The index of its controller; `None`: the key `controller` names it.
    pub controller: Option<usize>,
    pub settings: Settings,
}

/// Takes all LUNs of a configuration: those of each controller, in the order given.
///
/// # Errors
/// Returns the first invalid value.
pub(super) fn take_all(
    raw: Vec<RawLun>,
    controllers: &[ControllerKeys],
    kinds: &[&'static str],
    names: &mut UniqueNames,
) -> Result<Vec<Vec<LunKeys>>, SettingError> {
    // LUNs with an explicit target first: the others get free targets.
    let (mut raw, rest): (Vec<_>, Vec<_>) =
        raw.into_iter().enumerate().partition(|(_, lun)| lun.settings.peek(&TARGET).is_some());
    raw.extend(rest);
    let ids: Vec<&str> = controllers.iter().map(|controller| controller.lun_defaults().0).collect();
    let mut addresses = vec![UsedAddresses::new(); controllers.len()];
    let mut taken = Vec::new();
    for (order, RawLun { controller, mut settings }) in raw {
        let at = match controller {
            Some(at) => at,
            None => find_controller(&mut settings, &ids)?,
        };
        let seen = controllers[at].lun_defaults();
        taken.push((at, order, LunKeys::take(settings, seen, kinds, &mut addresses[at], names)?));
    }
    check_shared(&taken.iter().map(|(at, _, lun)| (*at, lun)).collect::<Vec<_>>())?;
    taken.sort_by_key(|(at, order, _)| (*at, *order));
    let mut luns: Vec<Vec<LunKeys>> = controllers.iter().map(|_| Vec::new()).collect();
    taken.into_iter().for_each(|(at, _, lun)| luns[at].push(lun));
    Ok(luns)
}

/// Takes `controller` and returns its index in `ids`.
///
/// # Errors
/// If it is not in `ids`.
pub(super) fn find_controller(settings: &mut Settings, ids: &[&str]) -> Result<usize, SettingError> {
    let id = settings.text(&CONTROLLER);
    let found = ids.iter().position(|controller| id.as_deref() == Some(*controller));
    found.ok_or_else(|| {
        let expected = match ids {
            [] => "the id of a --controller or [[controller]], of which there is none".to_owned(),
            ids => format!("the id of a controller: {}", ids.join(", ")),
        };
        settings.error(&CONTROLLER, id.map_or("nothing".to_owned(), |id| format!("{id:?}")), expected)
    })
}

/// Checks that each shared logical unit is a LUN's own, and that no target maps a logical unit twice.
///
/// # Errors
/// Returns the first LUN that violates a rule.
pub(super) fn check_shared(luns: &[(usize, &LunKeys)]) -> Result<(), SettingError> {
    let units: HashMap<&str, Option<&str>> = luns.iter().map(|(_, lun)| (lun.id(), lun.shared_unit())).collect();
    let mut seen = HashMap::new();
    let own_first = luns.iter().filter(|(_, lun)| lun.shared_unit().is_none());
    for (controller, lun) in own_first.chain(luns.iter().filter(|(_, lun)| lun.shared_unit().is_some())) {
        let unit = lun.shared_unit().unwrap_or(lun.id());
        match units.get(unit) {
            Some(Some(other)) if lun.shared_unit().is_some() => {
                return Err(lun.no_such_unit(unit, &format!(", which itself shares the unit of {other:?}")));
            }
            None => return Err(lun.no_such_unit(unit, "")),
            _ => {}
        }
        if let Some(other) = seen.insert((*controller, lun.address.target, unit), lun.id()) {
            return Err(lun.unit_twice(unit, other));
        }
    }
    Ok(())
}

impl OwnUnitKeys {
    fn take(
        settings: &mut Settings,
        id: &str,
        default_name: String,
        kinds: &[&'static str],
    ) -> Result<OwnUnitKeys, SettingError> {
        let kind = take_storage_kind(settings, kinds)?;
        let reservations = settings.text(&RESERVATIONS).map(PathBuf::from);
        if let Some(path) = &reservations {
            check_reservations(settings, path)?;
        }
        Ok(OwnUnitKeys {
            storage: StorageKeys::take(settings, kind, id, SERIAL_BYTES)?,
            unit_name: take_printable(settings, &UNIT_NAME, UNIT_NAME_BYTES)?.unwrap_or(default_name),
            vendor: take_printable(settings, &VENDOR, VENDOR_BYTES)?
                .unwrap_or_else(|| VENDOR.default_text().to_owned()),
            product: take_printable(settings, &PRODUCT, PRODUCT_BYTES)?
                .unwrap_or_else(|| PRODUCT.default_text().to_owned()),
            reservations,
        })
    }

    fn claim(&self, settings: &Settings, id: &str, names: &mut UniqueNames) -> Result<Vec<Claim>, SettingError> {
        let owner = || format!("lun {id:?}");
        let mut claims = vec![names.claim(settings, UNIT_NAME.name, &self.unit_name, owner())?];
        if let Some(path) = &self.reservations {
            claims.push(names.claim_file(settings, RESERVATIONS.name, path, owner())?);
        }
        Ok(claims)
    }
}

/// Returns the default of `unit-name`. Unique among all logical units that a guest can see: no two controllers have the
/// same socket.
fn default_unit_name(socket: &Path, address: TargetLun) -> String {
    let socket = canonical_path(socket);
    let path = std::path::absolute(&socket).unwrap_or(socket).display().to_string();
    let name = format!("{address}:{path}");
    if name.len() <= UNIT_NAME_BYTES && is_printable(&name) {
        return name;
    }
    format!("{address}:{:016x}", locally_assigned(&path))
}

/// Takes `target` and `lun`. The default of `target` is the first without a LUN.
///
/// # Errors
/// If a value is invalid, or no target is free.
pub(super) fn take_address(settings: &mut Settings, addresses: &UsedAddresses) -> Result<TargetLun, SettingError> {
    let target = take_u16(settings, &TARGET)?;
    let lun = take_u16(settings, &LUN)?.unwrap_or(0);
    let target = match target.map(u8::try_from) {
        Some(Ok(target)) => Some(target),
        _ => free_target(addresses),
    };
    match target {
        Some(target) => Ok(TargetLun { target, lun }),
        None => Err(settings.error(&TARGET, "nothing, and all 256 in use", "the target that gets another LUN")),
    }
}

fn check_reservations(settings: &Settings, path: &Path) -> Result<(), SettingError> {
    let expected = "a file, or a new one in an existing folder";
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let error = |why: String| settings.error(&RESERVATIONS, format!("{path:?} ({why})"), expected);
    match folder.metadata() {
        Err(why) => return Err(error(why.to_string())),
        Ok(folder) if !folder.is_dir() => return Err(error("in no folder".to_owned())),
        Ok(_) => {}
    }
    match path.metadata() {
        Ok(file) if !file.is_file() => Err(error("no regular file".to_owned())),
        Err(why) if why.kind() != std::io::ErrorKind::NotFound => Err(error(why.to_string())),
        _ => Ok(()),
    }
}

/// Returns a LUN's keys with their values.
pub(super) fn lun_pairs(lun: &LunConfig) -> Vec<Pair> {
    let mut pairs = vec![
        (ID.name, string(&lun.id)),
        (TARGET.name, number(lun.address.target)),
        (LUN.name, number(lun.address.lun)),
    ];
    match &lun.unit {
        LunUnit::Own(unit) => pairs.extend(unit_pairs(unit)),
        LunUnit::Shared(unit) => pairs.push((UNIT.name, string(unit))),
    }
    pairs
}

fn unit_pairs(unit: &UnitConfig) -> Vec<Pair> {
    let mut pairs = backend_pairs(&unit.storage);
    pairs.extend(storage_pairs(&unit.storage));
    pairs.extend([
        (UNIT_NAME.name, string(&unit.unit_name)),
        (VENDOR.name, string(&unit.vendor)),
        (PRODUCT.name, string(&unit.product)),
    ]);
    pairs.extend(unit.reservations.iter().map(|path| (RESERVATIONS.name, string(&path.to_string_lossy()))));
    pairs
}
