//! The keys of Xen devices, and those of the Xen host.

use std::path::PathBuf;
use std::time::Duration;

use mqblk_blkif::{
    DEFAULT_INDIRECT_SEGMENTS, DEFAULT_PERSISTENT_IDLE, DEFAULT_PERSISTENT_MAX, GrantMode, MAX_INDIRECT_SEGMENTS,
    PoolScope,
};
use mqblk_core::settings::{SettingError, Settings};
use mqblk_xen::vbd;

use super::endpoint::{assign_queues, take_coalesce, take_poll};
use super::names::UniqueNames;
use super::{MAX_QUEUES, take_u16};
use crate::serve::config::{XenAttachment, XenConfig, XenEndpoint};
use crate::serve::cpus::Cpus;
use crate::serve::test_keys;
use crate::xen::{DEFAULT_TYPE, XenSelector, check_type};

/// Maximum ring size, as the binary logarithm of its pages: Linux' XENBUS_MAX_RING_GRANT_ORDER.
const MAX_RING_ORDER: u16 = 4;
/// Maximum of `persistent-grants`: the pages of a full ring of order 4 with requests of 1024 segments.
const MAX_PERSISTENT: u64 = 1 << 19;
/// Maximum of `persistent-idle`: a week.
const MAX_IDLE_SECONDS: u64 = 7 * 24 * 3600;
/// The default directory of journals.
const DEFAULT_STATE: &str = "/run/mqblk/xen";

/// An endpoint before the number of workers is known.
pub struct XenKeys {
    endpoint: XenEndpoint,
    queue_map: Option<String>,
}

impl XenKeys {
    /// Takes the keys, and claims the device that the disk is attached as.
    pub fn take(
        settings: &mut Settings,
        cpus: &Cpus,
        names: &mut UniqueNames,
        owner: String,
    ) -> Result<XenKeys, SettingError> {
        let attachment = take_attachment(settings)?;
        if let Some(XenAttachment { domid, devid }) = attachment {
            names.claim(settings, "vdev", &format!("{devid} of domain {domid}"), owner)?;
        }
        let or_default = |number: Option<u16>, default: u16| number.unwrap_or(default);
        let idle = settings.number("persistent-idle", 0..=MAX_IDLE_SECONDS)?.map(Duration::from_secs);
        let persistent = settings.number("persistent-grants", 0..=MAX_PERSISTENT)?;
        let endpoint = XenEndpoint {
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
            queue_map: Vec::new(),
            poll: take_poll(settings)?,
            coalesce: take_coalesce(settings)?,
        };
        Ok(XenKeys { endpoint, queue_map: settings.text("queue-map") })
    }

    /// Returns the number of rings offered.
    pub fn queues(&self) -> u16 {
        self.endpoint.queues
    }

    /// Returns the endpoint with its rings assigned to workers. `next` is the next worker of the round-robin.
    pub fn assign_queues(
        &self,
        settings: &Settings,
        next: &mut u16,
        workers: u16,
    ) -> Result<XenEndpoint, SettingError> {
        let queue_map = assign_queues(settings, self.queue_map.as_deref(), self.endpoint.queues, next, workers)?;
        Ok(XenEndpoint { queue_map, ..self.endpoint.clone() })
    }
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

/// Takes `xen`, `xen-watch`, `xen-state` and `xen-mapped-pages`. `needed`: there are Xen disks.
pub fn take_host(settings: &mut Settings, cpus: &Cpus, needed: bool) -> Result<Option<XenConfig>, SettingError> {
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
        default_endpoint: XenKeys::take(
            &mut Settings::new("xen-watch"),
            cpus,
            &mut UniqueNames::default(),
            String::new(),
        )?
        .endpoint,
    }))
}
