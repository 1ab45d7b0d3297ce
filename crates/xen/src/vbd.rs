//! Xenstore paths, keys and values of a virtual block device (vbd). Sources: Xen's `public/io/blkif.h`,
//! `public/io/xenbus.h` and `docs/man/xen-vbd-interface.7`.

use std::fmt;

use mqblk_memory::DomainId;

/// The state of one end of a device (`enum xenbus_state`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum XenbusState {
    /// The node is missing or its value is not a known state.
    #[default]
    Unknown = 0,
    /// The toolstack has created the device, or the frontend restarts.
    Initialising = 1,
    /// The backend waits for the frontend.
    InitWait = 2,
    /// The frontend has published its rings.
    Initialised = 3,
    /// The device serves requests.
    Connected = 4,
    /// This end is closing.
    Closing = 5,
    /// This end is closed.
    Closed = 6,
    /// This end changes its configuration.
    Reconfiguring = 7,
    /// This end has changed its configuration.
    Reconfigured = 8,
}

impl XenbusState {
    const ALL: [XenbusState; 9] = [
        XenbusState::Unknown,
        XenbusState::Initialising,
        XenbusState::InitWait,
        XenbusState::Initialised,
        XenbusState::Connected,
        XenbusState::Closing,
        XenbusState::Closed,
        XenbusState::Reconfiguring,
        XenbusState::Reconfigured,
    ];

    /// Parses a state; [`XenbusState::Unknown`] for a missing or invalid value.
    pub fn parse(value: Option<&str>) -> XenbusState {
        let number = value.and_then(|value| parse_number(keys::STATE, value, 8).ok());
        number.map_or(XenbusState::Unknown, |number| XenbusState::ALL[number as usize])
    }
}

impl fmt::Display for XenbusState {
    /// Formats the state as in xenstore: a decimal number.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", *self as u8)
    }
}

/// An invalid value in xenstore. A frontend's values are untrusted guest input.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: found {found:?}, expected {expected}")]
pub struct MalformedValue {
    /// Key of the value.
    pub key: String,
    /// The value, shortened to fit in a message.
    pub found: String,
    /// The expected value.
    pub expected: String,
}

impl MalformedValue {
    fn new(key: &str, found: &str, expected: impl Into<String>) -> MalformedValue {
        let found = found.chars().take(40).collect();
        MalformedValue { key: key.to_owned(), found, expected: expected.into() }
    }
}

/// Parses a number of at most `max`: decimal digits, with white space around them ignored.
///
/// # Errors
/// When it is not such a number. `key` is for the message.
pub fn parse_number(key: &str, value: &str, max: u64) -> Result<u64, MalformedValue> {
    let digits = value.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\0');
    let decimal = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = decimal.then(|| digits.parse().ok()).flatten().filter(|number| *number <= max);
    parsed.ok_or_else(|| MalformedValue::new(key, value, format!("a decimal number of at most {max}")))
}

/// Parses a number like [`parse_number`]; `default` if there is no value.
///
/// # Errors
/// As [`parse_number`], when there is a value.
pub fn parse_number_or(key: &str, value: Option<&str>, max: u64, default: u64) -> Result<u64, MalformedValue> {
    value.map_or(Ok(default), |value| parse_number(key, value, max))
}

/// Parses a feature flag: 0 or no value is off, any other number is on, as in Linux.
///
/// # Errors
/// When the value is no number.
pub fn parse_flag(key: &str, value: Option<&str>) -> Result<bool, MalformedValue> {
    parse_number_or(key, value, u32::MAX.into(), 0).map(|number| number != 0)
}

/// Highest disk number in the extended encoding.
const DISK_MAX: u32 = (1 << 20) - 1;
const EXTENDED: u32 = 1 << 28;
const XVD_MAJOR: u32 = 202 << 8;
const SD_MAJOR: u32 = 8 << 8;
const HD_MAJOR: u32 = 3 << 8;
const HD_SECOND_MAJOR: u32 = 22 << 8;

/// Parses a vdev: a name (`xvda`, `xvdb1`, `sda`, `hdc2`, `d26p3` for disk 26, partition 3) or the number, decimal or
/// as `0x...`. Source: `xen-vbd-interface.7`.
///
/// # Errors
/// When it is neither.
pub fn parse_vdev(name: &str) -> Result<u32, MalformedValue> {
    let expected =
        "xvda to xvd..., sda to sdp, hda to hdd, each with a partition's number or not; or a number of 32 bits";
    parse_device(name).ok_or_else(|| MalformedValue::new("vdev", name, expected))
}

fn parse_device(name: &str) -> Option<u32> {
    if let Some(digits) = name.strip_prefix("0x") {
        let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        return u32::from_str_radix(digits, 16).ok().filter(|_| plain);
    }
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        return parse_number("vdev", name, u32::MAX.into())
            .ok()
            .filter(|_| name.trim() == name)
            .map(|number| number as u32);
    }
    if let Some((disk, part)) = name.strip_prefix('d').and_then(|rest| rest.split_once('p')) {
        return xvd(plain(disk)?, plain(part)?);
    }
    let (kind, rest) = ["xvd", "sd", "hd"].iter().find_map(|kind| Some((*kind, name.strip_prefix(kind)?)))?;
    let (letters, digits) = rest.split_at(rest.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(rest.len()));
    let disk = disk_of_letters(letters)?;
    let part = if digits.is_empty() { 0 } else { plain(digits).filter(|part| *part > 0)? };
    match kind {
        "xvd" => xvd(disk, part),
        "sd" => (disk < 16 && part < 16).then_some(SD_MAJOR | disk << 4 | part),
        _ if disk < 4 && part < 64 => {
            let major = if disk < 2 { HD_MAJOR } else { HD_SECOND_MAJOR };
            Some(major | (disk % 2) << 6 | part)
        }
        _ => None,
    }
}

/// Parses digits without a sign or leading zeroes.
fn plain(digits: &str) -> Option<u32> {
    let canonical = digits == "0" || !digits.starts_with(['0', '+']);
    digits.parse().ok().filter(|_| canonical)
}

fn xvd(disk: u32, part: u32) -> Option<u32> {
    match (disk, part) {
        (0..16, 0..16) => Some(XVD_MAJOR | disk << 4 | part),
        (..=DISK_MAX, 0..256) => Some(EXTENDED | disk << 8 | part),
        _ => None,
    }
}

/// Returns the disk number of letters: a is 0, z is 25, aa is 26.
fn disk_of_letters(letters: &str) -> Option<u32> {
    let mut disk = 0;
    for letter in letters.bytes() {
        disk = disk * 26 + u32::from(letter - b'a') + 1;
        if disk > DISK_MAX + 1 {
            return None;
        }
    }
    // `None` without letters.
    u32::checked_sub(disk, 1)
}

fn letters_of_disk(disk: u32) -> String {
    let mut letters = vec![];
    let mut rest = disk + 1;
    while rest > 0 {
        letters.push(char::from(b'a' + ((rest - 1) % 26) as u8));
        rest = (rest - 1) / 26;
    }
    letters.iter().rev().collect()
}

/// Returns the name of a device number; `None` if the number is not of a Xen disk.
pub fn vdev_name(number: u32) -> Option<String> {
    let minor = number & 0xff;
    let (kind, disk, part) = match number {
        _ if number >> 28 == 1 => ("xvd", (number & (EXTENDED - 1)) >> 8, minor),
        _ if number & !0xff == XVD_MAJOR => ("xvd", minor >> 4, minor & 15),
        _ if number & !0xff == SD_MAJOR => ("sd", minor >> 4, minor & 15),
        _ if number & !0xff == HD_MAJOR && minor < 128 => ("hd", minor >> 6, minor & 63),
        _ if number & !0xff == HD_SECOND_MAJOR && minor < 128 => ("hd", 2 + (minor >> 6), minor & 63),
        _ => return None,
    };
    let part = if part == 0 { String::new() } else { part.to_string() };
    Some(format!("{kind}{}{part}", letters_of_disk(disk)))
}

/// Returns the directory of a domain.
pub fn domain_path(domain: DomainId) -> String {
    format!("/local/domain/{}", domain.0)
}

/// Returns the directory of all backends of one type (`vbd`, `qdisk`, ...) in domain `own`.
pub fn backends_path(own: DomainId, type_name: &str) -> String {
    format!("/local/domain/{}/backend/{type_name}", own.0)
}

/// Returns the directory of the backend in domain `own` for device `devid` of domain `front`.
pub fn backend_path(own: DomainId, type_name: &str, front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/backend/{type_name}/{}/{devid}", own.0, front.0)
}

/// Returns the directory of the frontend of device `devid` in domain `front`.
pub fn frontend_path(front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/device/vbd/{devid}", front.0)
}

/// Returns the `error` node of the backend in domain `own`, as xenbus_dev_error writes it.
pub fn backend_error_path(own: DomainId, type_name: &str, front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/error/backend/{type_name}/{}/{devid}/error", own.0, front.0)
}

/// Returns the `error` node of the frontend in domain `front`.
pub fn frontend_error_path(front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/error/device/vbd/{devid}/error", front.0)
}

/// A parsed path below [`backends_path`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendPath<'a> {
    /// The frontend's domain.
    pub front: DomainId,
    /// The device; `None` if the path is the directory of all the domain's devices.
    pub devid: Option<u32>,
    /// The path below the device's directory; empty for the directory itself.
    pub key: &'a str,
}

impl<'a> BackendPath<'a> {
    /// Parses a path; `None` if it is not below `backends` (a directory without a trailing `/`), or no toolstack would
    /// create it there.
    pub fn parse(path: &'a str, backends: &str) -> Option<BackendPath<'a>> {
        let mut parts = path.strip_prefix(backends)?.strip_prefix('/')?.splitn(3, '/');
        let front = DomainId(plain(parts.next()?)?.try_into().ok()?);
        let devid = parts.next().map(|devid| plain(devid).ok_or(())).transpose().ok()?;
        Some(BackendPath { front, devid, key: parts.next().unwrap_or_default() })
    }
}

/// Keys of the backend's and the frontend's directory. Source: `public/io/blkif.h`, and libxl for the toolstack's.
pub mod keys {
    /// Both ends: a [`XenbusState`](super::XenbusState).
    pub const STATE: &str = "state";

    // The backend's directory, written by the toolstack.

    /// The frontend's directory.
    pub const FRONTEND: &str = "frontend";
    /// The frontend's domain.
    pub const FRONTEND_ID: &str = "frontend-id";
    /// 0: the toolstack removes the device.
    pub const ONLINE: &str = "online";
    /// 0 or 1.
    pub const REMOVABLE: &str = "removable";
    /// 0 or 1.
    pub const BOOTABLE: &str = "bootable";
    /// The device's name in the guest, `xvda`.
    pub const DEV: &str = "dev";
    /// `phy`, `qdisk`, ...
    pub const TYPE: &str = "type";
    /// The disk's storage, for the backend to interpret.
    pub const PARAMS: &str = "params";
    /// `w`, or `r` for a read-only disk.
    pub const MODE: &str = "mode";
    /// Both ends: `disk` or `cdrom`.
    pub const DEVICE_TYPE: &str = "device-type";
    /// 0: the backend must not offer discard.
    pub const DISCARD_ENABLE: &str = "discard-enable";
    /// `xen`, or `virtio` for a virtio device in a vbd's directory.
    pub const SPECIFICATION: &str = "specification";

    // The backend's directory, written before InitWait.

    /// Maximum number of rings.
    pub const MULTI_QUEUE_MAX_QUEUES: &str = "multi-queue-max-queues";
    /// Maximum ring size in pages, as an exponent of two.
    pub const MAX_RING_PAGE_ORDER: &str = "max-ring-page-order";
    /// Maximum ring size in pages (older).
    pub const MAX_RING_PAGES: &str = "max-ring-pages";
    /// Maximum number of segments of an indirect request; absent: not supported.
    pub const FEATURE_MAX_INDIRECT_SEGMENTS: &str = "feature-max-indirect-segments";

    // The backend's directory, written before Connected.

    /// 0 or 1: supports flush.
    pub const FEATURE_FLUSH_CACHE: &str = "feature-flush-cache";
    /// 0 or 1: supports write barriers.
    pub const FEATURE_BARRIER: &str = "feature-barrier";
    /// 0 or 1: supports discard.
    pub const FEATURE_DISCARD: &str = "feature-discard";
    /// Granularity of discards in bytes.
    pub const DISCARD_GRANULARITY: &str = "discard-granularity";
    /// Bytes from the start of the disk to the first boundary of `discard-granularity`.
    pub const DISCARD_ALIGNMENT: &str = "discard-alignment";
    /// 0 or 1: supports secure discard.
    pub const DISCARD_SECURE: &str = "discard-secure";
    /// Both ends, 0 or 1: supports persistent grants.
    pub const FEATURE_PERSISTENT: &str = "feature-persistent";
    /// Size in sectors of 512 bytes, regardless of `sector-size`.
    pub const SECTORS: &str = "sectors";
    /// Logical block size in bytes.
    pub const SECTOR_SIZE: &str = "sector-size";
    /// Physical block size in bytes.
    pub const PHYSICAL_SECTOR_SIZE: &str = "physical-sector-size";
    /// Bits: [`INFO_CDROM`], [`INFO_REMOVABLE`], [`INFO_READ_ONLY`].
    pub const INFO: &str = "info";
    /// VDISK_CDROM.
    pub const INFO_CDROM: u32 = 1;
    /// VDISK_REMOVABLE.
    pub const INFO_REMOVABLE: u32 = 2;
    /// VDISK_READONLY.
    pub const INFO_READ_ONLY: u32 = 4;

    // The frontend's directory, written by the toolstack.

    /// The backend's directory.
    pub const BACKEND: &str = "backend";
    /// The backend's domain.
    pub const BACKEND_ID: &str = "backend-id";
    /// The device's number.
    pub const VIRTUAL_DEVICE: &str = "virtual-device";
    /// 0: the frontend must not trust the backend.
    pub const TRUSTED: &str = "trusted";

    // The frontend's directory, written by the frontend.

    /// ABI of the requests: `x86_64-abi`, `x86_32-abi` or `arm-abi`.
    pub const PROTOCOL: &str = "protocol";
    /// Number of rings if more than one; each then has its own directory.
    pub const MULTI_QUEUE_NUM_QUEUES: &str = "multi-queue-num-queues";
    /// Ring size in pages, as an exponent of two.
    pub const RING_PAGE_ORDER: &str = "ring-page-order";
    /// Ring size in pages (older).
    pub const NUM_RING_PAGES: &str = "num-ring-pages";
    /// Grant reference of a ring with one page.
    pub const RING_REF: &str = "ring-ref";
    /// The frontend's event channel port.
    pub const EVENT_CHANNEL: &str = "event-channel";
    /// Obsolete. 1: the frontend counts sectors in units of `sector-size`, not of 512 bytes.
    pub const FEATURE_LARGE_SECTOR_SIZE: &str = "feature-large-sector-size";

    /// Returns the key of the grant reference of page `page` of a ring with several pages.
    pub fn ring_ref(page: u32) -> String {
        format!("ring-ref{page}")
    }

    /// Returns the directory of ring `queue` of a device with several rings.
    pub fn queue(queue: u32) -> String {
        format!("queue-{queue}")
    }
}

#[cfg(test)]
#[path = "vbd/tests.rs"]
mod tests;
