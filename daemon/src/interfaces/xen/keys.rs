//! The keys of Xen devices, and those of the Xen host.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_blkif::{
    DEFAULT_INDIRECT_SEGMENTS, DEFAULT_PERSISTENT_IDLE, DEFAULT_PERSISTENT_MAX, GrantMode, MAX_INDIRECT_SEGMENTS,
    PoolScope,
};
use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{Coalesce, PollPolicy, QueuePlacement};
use mqblk_xen::vbd;
use mqblk_xen_server::DeviceName;
use toml::Value;

use super::WORD;
use super::config::{XenAttachment, XenConfig, XenEndpoint};
use super::selector::{DEFAULT_TYPE, XenSelector, check_type};
use crate::contract::{DiskContract, ONLY_DISK};
use crate::cpus::Cpus;
use crate::disk_list::Endpoint;
use crate::interface::{ProcessKey, ResolveContext};
use crate::print::{Pair, number_or_text, string};
use crate::queues::{MAX_QUEUES, QueueMap, polling_pairs, take_coalesce, take_poll};
use crate::resolve::{Claim, take_u16};
use crate::test_keys;

/// Maximum ring size, as the binary logarithm of its pages: Linux' XENBUS_MAX_RING_GRANT_ORDER.
const MAX_RING_ORDER: u16 = 4;
/// Maximum of `persistent-grants`: the pages of a full ring of order 4 with requests of 1024 segments.
const MAX_PERSISTENT: u64 = 1 << 19;
/// Maximum of `persistent-idle`: a week.
const MAX_IDLE_SECONDS: u64 = 7 * 24 * 3600;
/// The default directory of journals.
const DEFAULT_STATE: &str = "/run/mqblk/xen";

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

    fn assign_queues(&mut self, settings: &Settings, placement: &mut QueuePlacement) -> Result<(), SettingError> {
        self.queue_map.assign(settings, self.queues, placement)
    }

    fn keep_on_one_worker(&mut self, settings: &Settings) -> Result<(), SettingError> {
        self.queue_map.keep_on_one_worker(settings, None)
    }

    fn queue_map(&self) -> &[u16] {
        self.queue_map.workers()
    }

    fn claims(&self) -> Vec<Claim> {
        let vdev = |XenAttachment { domid, devid }| ("vdev", format!("{devid} of domain {domid}"));
        self.attachment.map(vdev).into_iter().collect()
    }

    fn given(&self) -> Option<&DiskContract> {
        self.given.as_ref()
    }

    fn pairs(&self) -> Vec<Pair> {
        let mut pairs = Vec::new();
        if let Some(XenAttachment { domid, devid }) = self.attachment {
            let name = vbd::vdev_name(devid).unwrap_or_else(|| devid.to_string());
            pairs.extend([("domid", Value::Integer(domid.into())), ("vdev", string(&name))]);
        }
        let journal = if self.journal { "on" } else { "off" };
        pairs.extend([
            ("queues", Value::Integer(self.queues.into())),
            ("ring-order", Value::Integer(self.ring_order.into())),
            ("indirect-segments", Value::Integer(self.indirect_segments.into())),
            ("grants", string(self.grants.word())),
            ("persistent-grants", Value::Integer(self.persistent_grants.into())),
            ("persistent-idle", Value::Integer(self.persistent_idle.as_secs() as i64)),
            ("journal", string(journal)),
        ]);
        if self.grants_pool != PoolScope::PerRing {
            pairs.push(("grants-pool", string(self.grants_pool.word())));
        }
        pairs.extend(self.queue_map.pair());
        pairs.extend(polling_pairs(self.poll, self.coalesce));
        pairs
    }
}

/// Takes the keys of a device. The number of CPUs is the default number of rings.
fn take_endpoint(settings: &mut Settings, cpus: &Cpus) -> Result<XenEndpoint, SettingError> {
    let attachment = take_attachment(settings)?;
    let or_default = |number: Option<u16>, default: u16| number.unwrap_or(default);
    let idle = settings.number("persistent-idle", 0..=MAX_IDLE_SECONDS)?.map(Duration::from_secs);
    let persistent = settings.number("persistent-grants", 0..=MAX_PERSISTENT)?;
    Ok(XenEndpoint {
        attachment,
        queues: take_u16(settings, "queues", 1, MAX_QUEUES)?.unwrap_or(cpus.count.min(MAX_QUEUES)),
        ring_order: or_default(take_u16(settings, "ring-order", 0, MAX_RING_ORDER)?, MAX_RING_ORDER) as u8,
        indirect_segments: or_default(
            take_u16(settings, "indirect-segments", 0, MAX_INDIRECT_SEGMENTS)?,
            DEFAULT_INDIRECT_SEGMENTS,
        ),
        grants: settings.choice("grants", GrantMode::WORDS)?.map_or(GrantMode::Auto, GrantMode::from_word),
        grants_pool: take_grants_pool(settings)?,
        persistent_grants: persistent.map_or(DEFAULT_PERSISTENT_MAX, |pages| pages as u32),
        persistent_idle: idle.unwrap_or(DEFAULT_PERSISTENT_IDLE),
        journal: settings.switch("journal")?.unwrap_or(true),
        poll: take_poll(settings, PollPolicy::default())?,
        coalesce: take_coalesce(settings, Coalesce::default())?,
        queue_map: QueueMap::take(settings),
        given: None,
    })
}

/// Takes `grants-pool`, a key for measurements. Elsewhere it stays in the settings, as an unknown key.
fn take_grants_pool(settings: &mut Settings) -> Result<PoolScope, SettingError> {
    if !test_keys::are_enabled() {
        return Ok(PoolScope::PerRing);
    }
    Ok(settings.choice("grants-pool", PoolScope::WORDS)?.map_or(PoolScope::PerRing, PoolScope::from_word))
}

/// Takes `domid` and `vdev`: both or neither.
fn take_attachment(settings: &mut Settings) -> Result<Option<XenAttachment>, SettingError> {
    let domid = take_u16(settings, "domid", 0, 0x7fef)?;
    let devid = match settings.text("vdev") {
        None => None,
        Some(name) => match vbd::parse_vdev(&name) {
            Ok(number) => Some(number),
            Err(wrong) => return Err(settings.error("vdev", format!("{name:?}"), wrong.expected)),
        },
    };
    match (domid, devid) {
        (Some(domid), Some(devid)) => Ok(Some(XenAttachment { domid, devid })),
        (Some(_), None) => {
            Err(settings.error("vdev", "nothing, but a domid", "the device's name in the guest, such as xvda"))
        }
        (None, Some(_)) => Err(settings.error("domid", "nothing, but a vdev", "the guest's domain number")),
        (None, None) => Ok(None),
    }
}

/// Returns the key of what a guest was given of a disk of the configuration.
pub(super) fn disk_key(id: &str) -> String {
    format!("xen/disk/{id}")
}

/// Returns the key of what a guest was given of a device that names no disk of the configuration.
pub(super) fn device_key(name: &DeviceName) -> String {
    format!("xen/device/{name}")
}

/// The heading of the options.
const HEADING: Option<&str> = Some("Xen");

/// The keys of the Xen host.
pub(super) const PROCESS_KEYS: &[ProcessKey] = &[
    ProcessKey {
        key: "xen",
        value_name: "auto|real|FOLDER",
        value_if_omitted: None,
        about: "Which Xen: auto (the machine's own, when something needs it), real, or the folder of a simulated one [default: auto]",
        more: "",
        heading: HEADING,
        serves: false,
    },
    ProcessKey {
        key: "xen-watch",
        value_name: "TYPE",
        value_if_omitted: Some(DEFAULT_TYPE),
        about: "Serve every device of this type that a toolstack makes, whatever it names [default type: mqblk]",
        more: "",
        heading: HEADING,
        serves: true,
    },
    ProcessKey {
        key: "xen-state",
        value_name: "DIR|off",
        value_if_omitted: None,
        about: "Where unanswered requests are noted, so that a daemon after this one takes rings up; off: nowhere [default: /run/mqblk/xen]",
        more: "",
        heading: HEADING,
        serves: false,
    },
    ProcessKey {
        key: "xen-mapped-pages",
        value_name: "N",
        value_if_omitted: None,
        about: "Most pages of guests that all disks together keep mapped; more are copied [default: what the host allows]",
        more: "",
        heading: HEADING,
        serves: false,
    },
];

/// Returns the keys of the Xen host with their values.
pub(super) fn host_pairs(config: &XenConfig) -> Vec<Pair> {
    let mut pairs = vec![("xen", string(&config.host.to_string()))];
    if config.watch {
        pairs.push(("xen-watch", string(&config.type_name)));
    }
    let state = config.state.as_ref().map_or("off".into(), |path| path.to_string_lossy());
    pairs.push(("xen-state", string(&state)));
    pairs.extend(config.mapped_pages.map(|pages| ("xen-mapped-pages", number_or_text(&pages.to_string()))));
    pairs
}

/// Takes `xen`, `xen-watch`, `xen-state` and `xen-mapped-pages`. `needed`: there are Xen disks.
pub(super) fn take_host(settings: &mut Settings, cpus: &Cpus, needed: bool) -> Result<Option<XenConfig>, SettingError> {
    let which = settings.text("xen").as_deref().map(XenSelector::parse);
    let watch = settings.text("xen-watch");
    let state = settings.text("xen-state");
    let mapped_pages = settings.number("xen-mapped-pages", 0..=u64::MAX)?;
    if let Some(name) = &watch {
        check_type(settings, "xen-watch", name)?;
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
            None => Some(PathBuf::from(DEFAULT_STATE)),
        },
        mapped_pages,
        default_endpoint: take_endpoint(&mut Settings::new("xen-watch"), cpus)?,
    }))
}
