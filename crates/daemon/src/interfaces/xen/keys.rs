//! The keys of Xen devices, and those of the Xen host.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_blkif::{GrantMode, MAX_INDIRECT_SEGMENTS, PoolScope};
use mqblk_core::settings::{Key, SettingError, Settings};
use mqblk_engine::QueuePolicy;
use mqblk_xen::vbd;
use mqblk_xen_server::DeviceName;

use super::config::{WORD, XenAttachment, XenConfig, XenEndpoint};
use super::selector::{DEFAULT_TYPE, XenSelector, check_type};
use crate::contract::{DiskContract, ONLY_DISK};
use crate::cpus::Cpus;
use crate::disk_list::Endpoint;
use crate::interface::ResolveContext;
use crate::key_values::take_u16;
use crate::names::Claim;
use crate::pair::{Pair, number, number_or_text, string};
use crate::queues::{MAX_QUEUES, QueueMap, policy_pairs, take_policy};
use crate::test_keys;

static DOMID: Key = Key::number("domid", 0, 0x7fef)
    .otherwise("a toolstack, or `mqblk xen attach`, names the disk with `params=mqblk:ID`")
    .about(
        "attach the disk to this domain at the start, as vdev",
        "Unless it is attached already. Both `domid` and `vdev`, or neither.",
    );
static VDEV: Key =
    Key::text("vdev", "NAME", "`xvda`, `xvdb1`, `sda` or its number").about("the device in the guest", "");
static RINGS: Key =
    Key::number("queues", 1, MAX_QUEUES as u64).otherwise("the number of CPUs that the process may use").about(
        "rings offered",
        "`multi-queue-max-queues`. Linux guests take up to 4 unless `xen-blkfront.max_queues` says otherwise.",
    );
/// At most Linux' XENBUS_MAX_RING_GRANT_ORDER.
static RING_ORDER: Key = Key::number("ring-order", 0, 4)
    .default("4")
    .about("largest ring offered: 2^N pages", "`max-ring-page-order`: 32 requests times two to the power of this.");
static INDIRECT_SEGMENTS: Key = Key::number("indirect-segments", 0, MAX_INDIRECT_SEGMENTS as u64)
    .default("256")
    .about("most 4 KiB pieces of a request; 0: eleven", "`feature-max-indirect-segments`.");
static GRANTS: Key = Key::words("grants", GrantMode::WORDS).default("auto").about(
    "access to the guest's pages: copy (by the hypervisor), map (for each request), persistent (mapped once and kept, where the guest agrees; else \
     copy), or auto (as persistent)",
    "With direct I/O in a paravirtualized domain, where the kernel must not pin mapped pages, the processor copies between persistent pages and pages of the daemon. `map`: unmapped before the response; copied where the disk is opened with direct I/O, since the kernel may then unpin a page only after the response.",
);
/// For measurements.
static GRANTS_POOL: Key = Key::words("grants-pool", PoolScope::WORDS);
/// At most the pages of a full ring of order 4 with requests of 1024 segments.
static PERSISTENT_GRANTS: Key =
    Key::number("persistent-grants", 0, 1 << 19).default("1056").about("most pages that a ring keeps mapped", "");
/// At most a week.
static PERSISTENT_IDLE: Key = Key::number("persistent-idle", 0, 7 * 24 * 3600)
    .placeholder("S")
    .default("60")
    .about("unmap a page that was not used for S seconds; 0: never", "");
static JOURNAL: Key = Key::switch("journal").default("on").about(
    "journal unanswered requests in --xen-state, so that the next daemon serves the rings even after a kill",
    "",
);
/// The keys of a Xen disk, besides those of queues.
pub(super) const KEYS: &[&Key] =
    &[&DOMID, &VDEV, &RINGS, &RING_ORDER, &INDIRECT_SEGMENTS, &GRANTS, &PERSISTENT_GRANTS, &PERSISTENT_IDLE, &JOURNAL];

static XEN: Key = Key::text("xen", "auto|real|FOLDER", "`auto`, `real`, a folder").default("auto").about(
    "the Xen host: auto (the machine's own, if needed), real, or the folder of a simulated one",
    "[xen.md](xen.md).",
);
/// The key to serve devices that the configuration does not name.
pub(super) static XEN_WATCH: Key = Key::text("xen-watch", "TYPE", "a device type")
    .bare(DEFAULT_TYPE)
    .about("serve every device of this type that a toolstack makes", "All devices below `/local/domain/<own>/backend/TYPE`. Without the option only those whose `params` name a disk of the configuration. Without a \
     type `mqblk`.");
static XEN_STATE: Key = Key::text("xen-state", "DIR|off", "a folder, or `off`")
    .default("/run/mqblk/xen")
    .about("folder of the journals of unanswered requests, from which the next daemon serves the rings; off: none", "A file for each ring, removed when the ring ends. Of two daemons that watch a type with the same folder the second is refused.");
static XEN_MAPPED_PAGES: Key = Key::number("xen-mapped-pages", 0, u64::MAX)
    .otherwise("the host's limit")
    .about("most guest pages that all disks together keep mapped; more are copied", "The host's limit is a quarter of `vm.max_map_count`, as a page takes two mappings, or the number of pages that Xen tracks. A copy is slower, \
     never an error.");
/// The keys of the Xen host.
pub(super) const PROCESS_KEYS: &[&Key] = &[&XEN, &XEN_WATCH, &XEN_STATE, &XEN_MAPPED_PAGES];

impl Endpoint for XenEndpoint {
    // blkif has no serial number; that of the storage has the length of virtio-blk's.
    const SERIAL_BYTES: usize = 20;

    fn take(settings: &mut Settings, id: &str, context: &mut ResolveContext<'_>) -> Result<Self, SettingError> {
        let mut endpoint = take_endpoint(settings, context.cpus)?;
        let given = context.given.get(&disk_key(id)).filter(|device| device.interface == WORD);
        endpoint.given = given.and_then(|device| device.disks.get(ONLY_DISK)).cloned();
        for (key, value) in endpoint.claims() {
            let owner = settings.subject().rsplit(": ").next().unwrap_or_default().to_owned();
            context.names.claim(settings, key, &value, owner)?;
        }
        Ok(endpoint)
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn queue_map(&self) -> &QueueMap {
        &self.queue_map
    }

    fn queue_map_mut(&mut self) -> &mut QueueMap {
        &mut self.queue_map
    }

    fn claims(&self) -> Vec<Claim> {
        let vdev = |XenAttachment { domid, devid }| (VDEV.name, format!("{devid} of domain {domid}"));
        self.attachment.map(vdev).into_iter().collect()
    }

    fn given(&self) -> Option<&DiskContract> {
        self.given.as_ref()
    }

    fn pairs(&self) -> Vec<Pair> {
        let mut pairs = Vec::new();
        if let Some(XenAttachment { domid, devid }) = self.attachment {
            let name = vbd::vdev_name(devid).unwrap_or_else(|| devid.to_string());
            pairs.extend([(DOMID.name, number(domid)), (VDEV.name, string(&name))]);
        }
        let journal = if self.journal { "on" } else { "off" };
        pairs.extend([
            (RINGS.name, number(self.queues)),
            (RING_ORDER.name, number(self.ring_order)),
            (INDIRECT_SEGMENTS.name, number(self.indirect_segments)),
            (GRANTS.name, string(self.grants.word())),
            (PERSISTENT_GRANTS.name, number(self.persistent_grants)),
            (PERSISTENT_IDLE.name, number(self.persistent_idle.as_secs() as i64)),
            (JOURNAL.name, string(journal)),
        ]);
        if self.grants_pool != PoolScope::PerRing {
            pairs.push((GRANTS_POOL.name, string(self.grants_pool.word())));
        }
        pairs.extend(self.queue_map.pair());
        pairs.extend(policy_pairs(self.policy));
        pairs
    }
}

/// Takes the keys of a device. The number of CPUs is the default number of rings.
fn take_endpoint(settings: &mut Settings, cpus: &Cpus) -> Result<XenEndpoint, SettingError> {
    let attachment = take_attachment(settings)?;
    Ok(XenEndpoint {
        attachment,
        queues: take_u16(settings, &RINGS)?.unwrap_or(cpus.count.min(MAX_QUEUES)),
        ring_order: settings.number_or_default(&RING_ORDER)? as u8,
        indirect_segments: settings.number_or_default(&INDIRECT_SEGMENTS)? as u16,
        grants: settings.word(&GRANTS)?.map_or(GrantMode::Auto, GrantMode::from_word),
        grants_pool: take_grants_pool(settings)?,
        persistent_grants: settings.number_or_default(&PERSISTENT_GRANTS)? as u32,
        persistent_idle: settings.number_or_default(&PERSISTENT_IDLE).map(Duration::from_secs)?,
        journal: settings.switch_or_default(&JOURNAL)?,
        policy: take_policy(settings, QueuePolicy::default())?,
        queue_map: QueueMap::take(settings),
        given: None,
    })
}

/// Takes `grants-pool`, a key for measurements. Otherwise it stays in the settings, as an unknown key.
fn take_grants_pool(settings: &mut Settings) -> Result<PoolScope, SettingError> {
    if !test_keys::are_enabled() {
        return Ok(PoolScope::PerRing);
    }
    Ok(settings.word(&GRANTS_POOL)?.map_or(PoolScope::PerRing, PoolScope::from_word))
}

/// Takes `domid` and `vdev`: both or neither.
fn take_attachment(settings: &mut Settings) -> Result<Option<XenAttachment>, SettingError> {
    let domid = take_u16(settings, &DOMID)?;
    let devid = match settings.text(&VDEV) {
        None => None,
        Some(name) => match vbd::parse_vdev(&name) {
            Ok(number) => Some(number),
            Err(wrong) => return Err(settings.error(&VDEV, format!("{name:?}"), wrong.expected)),
        },
    };
    match (domid, devid) {
        (Some(domid), Some(devid)) => Ok(Some(XenAttachment { domid, devid })),
        (Some(_), None) => {
            Err(settings.error(&VDEV, "nothing, but a domid", "the device's name in the guest, such as xvda"))
        }
        (None, Some(_)) => Err(settings.error(&DOMID, "nothing, but a vdev", "the guest's domain number")),
        (None, None) => Ok(None),
    }
}

/// Returns the key of the record for a disk of the configuration.
pub(super) fn disk_key(id: &str) -> String {
    format!("xen/disk/{id}")
}

/// Returns the key of the record for a device that names no disk of the configuration.
pub(super) fn device_key(name: &DeviceName) -> String {
    format!("xen/device/{name}")
}

/// Returns the keys of the Xen host with their values.
pub(super) fn host_pairs(config: &XenConfig) -> Vec<Pair> {
    let mut pairs = vec![(XEN.name, string(&config.host.to_string()))];
    if config.watch {
        pairs.push((XEN_WATCH.name, string(&config.type_name)));
    }
    let state = config.state.as_ref().map_or("off".into(), |path| path.to_string_lossy());
    pairs.push((XEN_STATE.name, string(&state)));
    pairs.extend(config.mapped_pages.map(|pages| (XEN_MAPPED_PAGES.name, number_or_text(&pages.to_string()))));
    pairs
}

/// Takes `xen`, `xen-watch`, `xen-state` and `xen-mapped-pages`. `needed`: there are Xen disks.
pub(super) fn take_host(settings: &mut Settings, cpus: &Cpus, needed: bool) -> Result<Option<XenConfig>, SettingError> {
    let which = settings.text(&XEN).as_deref().map(XenSelector::parse);
    let watch = settings.text(&XEN_WATCH);
    let state = settings.text(&XEN_STATE);
    let mapped_pages = settings.number(&XEN_MAPPED_PAGES)?;
    if let Some(name) = &watch {
        check_type(settings, XEN_WATCH.name, name)?;
    }
    if !needed && watch.is_none() && !matches!(which, Some(XenSelector::Real | XenSelector::Simulated(_))) {
        return Ok(None);
    }
    Ok(Some(XenConfig {
        host: which.unwrap_or(XenSelector::Auto),
        type_name: watch.clone().unwrap_or_else(|| DEFAULT_TYPE.to_owned()),
        watch: watch.is_some(),
        state: match state.as_deref() {
            Some("off") => None,
            Some(path) => Some(PathBuf::from(path)),
            None => Some(PathBuf::from(XEN_STATE.default_text())),
        },
        mapped_pages,
        default_endpoint: take_endpoint(&mut Settings::new(XEN_WATCH.name), cpus)?,
    }))
}
