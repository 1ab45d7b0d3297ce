//! Names and numbers of a virtual block device in xenstore. Sources: Xen's `public/io/blkif.h`, `public/io/xenbus.h` and
//! `docs/man/xen-vbd-interface.7`.

use std::fmt;

use mqblk_memory::DomainId;

/// The state of one end of a device: XenbusState.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum State {
    /// It cannot be read, or says nothing that is known.
    #[default]
    Unknown = 0,
    /// The toolstack has made it, or a front-end starts anew.
    Initialising = 1,
    /// The back-end waits for the front-end.
    InitWait = 2,
    /// The front-end has published its rings.
    Initialised = 3,
    /// It serves requests.
    Connected = 4,
    /// It is about to close.
    Closing = 5,
    /// It is closed.
    Closed = 6,
    /// It changes its configuration.
    Reconfiguring = 7,
    /// It has changed its configuration.
    Reconfigured = 8,
}

impl State {
    const ALL: [State; 9] = [
        State::Unknown,
        State::Initialising,
        State::InitWait,
        State::Initialised,
        State::Connected,
        State::Closing,
        State::Closed,
        State::Reconfiguring,
        State::Reconfigured,
    ];

    /// The state that a value says; [`State::Unknown`] for one that is not there or makes no sense.
    pub fn parse(value: Option<&str>) -> State {
        let number = value.and_then(|value| number(keys::STATE, value, 8).ok());
        number.map_or(State::Unknown, |number| State::ALL[number as usize])
    }
}

impl fmt::Display for State {
    /// As it is written to xenstore.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", *self as u8)
    }
}

/// A value that is not what it should be. All values of a front-end are a guest's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: found {found:?}, expected {expected}")]
pub struct Malformed {
    /// Which value.
    pub key: String,
    /// What it is, as far as it fits in a message.
    pub found: String,
    /// What it should be.
    pub expected: String,
}

impl Malformed {
    fn new(key: &str, found: &str, expected: impl Into<String>) -> Malformed {
        let found = found.chars().take(40).collect();
        Malformed { key: key.to_owned(), found, expected: expected.into() }
    }
}

/// A number of at most `most`, as xenstore carries numbers: decimal digits and nothing else; but space around them does not matter.
///
/// # Errors
/// When it is something else. `key` is for the message.
pub fn number(key: &str, value: &str, most: u64) -> Result<u64, Malformed> {
    let digits = value.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\0');
    let decimal = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = decimal.then(|| digits.parse().ok()).flatten().filter(|number| *number <= most);
    parsed.ok_or_else(|| Malformed::new(key, value, format!("a decimal number of at most {most}")))
}

/// A number whose absence means something.
///
/// # Errors
/// As [`number`], when the value is there.
pub fn number_or(key: &str, value: Option<&str>, most: u64, absent: u64) -> Result<u64, Malformed> {
    value.map_or(Ok(absent), |value| number(key, value, most))
}

/// A feature: 1 is on; 0, and a key that is not there, is off. Other numbers are on too, as for Linux.
///
/// # Errors
/// When it is no number.
pub fn flag(key: &str, value: Option<&str>) -> Result<bool, Malformed> {
    number_or(key, value, u32::MAX.into(), 0).map(|number| number != 0)
}

/// Highest number of a disk in the extended encoding.
const DISK_MAX: u32 = (1 << 20) - 1;
const EXTENDED: u32 = 1 << 28;
const XVD_MAJOR: u32 = 202 << 8;
const SD_MAJOR: u32 = 8 << 8;
const HD_MAJOR: u32 = 3 << 8;
const HD_SECOND_MAJOR: u32 = 22 << 8;

/// The number of a device by its name: `xvda`, `xvdb1`, `sda`, `hdc2`, `d26p3` (disk 26, partition 3), or the number itself, decimal
/// or as `0x...`. Source: `xen-vbd-interface.7`.
///
/// # Errors
/// When it is no such name.
pub fn device_number(name: &str) -> Result<u32, Malformed> {
    let expected =
        "xvda to xvd..., sda to sdp, hda to hdd, each with a partition's number or not; or a number of 32 bits";
    parse_device(name).ok_or_else(|| Malformed::new("vdev", name, expected))
}

fn parse_device(name: &str) -> Option<u32> {
    if let Some(digits) = name.strip_prefix("0x") {
        let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        return u32::from_str_radix(digits, 16).ok().filter(|_| plain);
    }
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        return number("vdev", name, u32::MAX.into()).ok().filter(|_| name.trim() == name).map(|number| number as u32);
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

/// Digits without a sign or leading zeroes.
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

/// a is 0, z is 25, aa is 26.
fn disk_of_letters(letters: &str) -> Option<u32> {
    let mut disk = 0;
    for letter in letters.bytes() {
        disk = disk * 26 + u32::from(letter - b'a') + 1;
        if disk > DISK_MAX + 1 {
            return None;
        }
    }
    // No letter, no disk.
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

/// The name of a device by its number; `None` for a number that is not of a disk of Xen.
pub fn device_name(number: u32) -> Option<String> {
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

/// The directory of a domain.
pub fn domain(domain: DomainId) -> String {
    format!("/local/domain/{}", domain.0)
}

/// The directory of all back-ends of one type (`vbd`, `qdisk`, ...) that domain `own` runs.
pub fn backends(own: DomainId, type_name: &str) -> String {
    format!("/local/domain/{}/backend/{type_name}", own.0)
}

/// The directory of the back-end in domain `own` for device `devid` of domain `front`.
pub fn backend(own: DomainId, type_name: &str, front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/backend/{type_name}/{}/{devid}", own.0, front.0)
}

/// The directory of the front-end of device `devid` in domain `front`.
pub fn frontend(front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/device/vbd/{devid}", front.0)
}

/// Where the back-end in domain `own` tells people why a device does not work.
pub fn backend_error(own: DomainId, type_name: &str, front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/error/backend/{type_name}/{}/{devid}/error", own.0, front.0)
}

/// Where the front-end in domain `front` tells people why a device does not work.
pub fn frontend_error(front: DomainId, devid: u32) -> String {
    format!("/local/domain/{}/error/device/vbd/{devid}/error", front.0)
}

/// What a path below [`backends`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendPath<'a> {
    /// Whose device.
    pub front: DomainId,
    /// Which device; `None`: the path is the directory of all of the domain's devices.
    pub devid: Option<u32>,
    /// What of the device; empty: the device's directory itself.
    pub key: &'a str,
}

impl<'a> BackendPath<'a> {
    /// Takes a path apart; `None` when it is not below `backends` (a directory without a `/` at its end), or is nothing that a
    /// toolstack makes there.
    pub fn parse(path: &'a str, backends: &str) -> Option<BackendPath<'a>> {
        let mut parts = path.strip_prefix(backends)?.strip_prefix('/')?.splitn(3, '/');
        let front = DomainId(plain(parts.next()?)?.try_into().ok()?);
        let devid = parts.next().map(|devid| plain(devid).ok_or(())).transpose().ok()?;
        Some(BackendPath { front, devid, key: parts.next().unwrap_or_default() })
    }
}

/// The names of the keys of both directories. Source: `public/io/blkif.h`, and libxl for those of the toolstack.
pub mod keys {
    /// Both: a [`State`](super::State).
    pub const STATE: &str = "state";

    // The back-end's directory, written by the toolstack.

    /// The front-end's directory.
    pub const FRONTEND: &str = "frontend";
    /// The front-end's domain.
    pub const FRONTEND_ID: &str = "frontend-id";
    /// 0: the toolstack wants the device to go.
    pub const ONLINE: &str = "online";
    /// 0 or 1.
    pub const REMOVABLE: &str = "removable";
    /// 0 or 1.
    pub const BOOTABLE: &str = "bootable";
    /// The device's name in the guest, `xvda`.
    pub const DEV: &str = "dev";
    /// `phy`, `qdisk`, ...
    pub const TYPE: &str = "type";
    /// What is behind the disk.
    pub const PARAMS: &str = "params";
    /// `w`, or `r` for a disk that may only be read.
    pub const MODE: &str = "mode";
    /// Both: `disk` or `cdrom`.
    pub const DEVICE_TYPE: &str = "device-type";
    /// 0: discard must not be offered.
    pub const DISCARD_ENABLE: &str = "discard-enable";
    /// 1: requests may reach the storage without a copy.
    pub const DIRECT_IO_SAFE: &str = "direct-io-safe";
    /// `xen`, or `virtio` for what only looks like a vbd.
    pub const SPECIFICATION: &str = "specification";
    /// What set the back-end's storage up, or `error`.
    pub const HOTPLUG_STATUS: &str = "hotplug-status";
    /// MAJOR:MINOR in hex, from a hotplug script.
    pub const PHYSICAL_DEVICE: &str = "physical-device";
    /// The path of that.
    pub const PHYSICAL_DEVICE_PATH: &str = "physical-device-path";

    // The back-end's, before it waits for the front-end.

    /// Most rings.
    pub const MULTI_QUEUE_MAX_QUEUES: &str = "multi-queue-max-queues";
    /// Most pages of a ring, as a power of two's exponent.
    pub const MAX_RING_PAGE_ORDER: &str = "max-ring-page-order";
    /// Most pages of a ring (older).
    pub const MAX_RING_PAGES: &str = "max-ring-pages";
    /// Most segments of an indirect request; absent: there are none.
    pub const FEATURE_MAX_INDIRECT_SEGMENTS: &str = "feature-max-indirect-segments";

    // The back-end's, before it is connected.

    /// 0 or 1: flush may be asked.
    pub const FEATURE_FLUSH_CACHE: &str = "feature-flush-cache";
    /// 0 or 1: write barriers may be asked.
    pub const FEATURE_BARRIER: &str = "feature-barrier";
    /// 0 or 1: discard may be asked.
    pub const FEATURE_DISCARD: &str = "feature-discard";
    /// Bytes.
    pub const DISCARD_GRANULARITY: &str = "discard-granularity";
    /// Bytes from the disk's start to the first boundary of that size.
    pub const DISCARD_ALIGNMENT: &str = "discard-alignment";
    /// 0 or 1: secure discard may be asked.
    pub const DISCARD_SECURE: &str = "discard-secure";
    /// Both: 0 or 1: grants stay mapped.
    pub const FEATURE_PERSISTENT: &str = "feature-persistent";
    /// Size, in units of 512 bytes whatever `sector-size` says.
    pub const SECTORS: &str = "sectors";
    /// Bytes of a logical block.
    pub const SECTOR_SIZE: &str = "sector-size";
    /// Bytes of a physical block.
    pub const PHYSICAL_SECTOR_SIZE: &str = "physical-sector-size";
    /// Bits: [`INFO_CDROM`], [`INFO_REMOVABLE`], [`INFO_READ_ONLY`].
    pub const INFO: &str = "info";
    /// VDISK_CDROM.
    pub const INFO_CDROM: u32 = 1;
    /// VDISK_REMOVABLE.
    pub const INFO_REMOVABLE: u32 = 2;
    /// VDISK_READONLY.
    pub const INFO_READ_ONLY: u32 = 4;

    // The front-end's directory, written by the toolstack.

    /// The back-end's directory.
    pub const BACKEND: &str = "backend";
    /// The back-end's domain.
    pub const BACKEND_ID: &str = "backend-id";
    /// The device's number.
    pub const VIRTUAL_DEVICE: &str = "virtual-device";
    /// 0: the front-end shall not trust the back-end.
    pub const TRUSTED: &str = "trusted";

    // The front-end's.

    /// How its requests are laid out: [`PROTOCOL_X86_64`], [`PROTOCOL_X86_32`], [`PROTOCOL_ARM`].
    pub const PROTOCOL: &str = "protocol";
    /// Requests with 8-byte aligned numbers.
    pub const PROTOCOL_X86_64: &str = "x86_64-abi";
    /// Requests with 4-byte aligned numbers.
    pub const PROTOCOL_X86_32: &str = "x86_32-abi";
    /// As x86_64.
    pub const PROTOCOL_ARM: &str = "arm-abi";
    /// Rings, when there is more than one; each has a directory of its own then.
    pub const MULTI_QUEUE_NUM_QUEUES: &str = "multi-queue-num-queues";
    /// Pages of a ring, as a power of two's exponent.
    pub const RING_PAGE_ORDER: &str = "ring-page-order";
    /// Pages of a ring (older).
    pub const NUM_RING_PAGES: &str = "num-ring-pages";
    /// The grant of a ring's only page.
    pub const RING_REF: &str = "ring-ref";
    /// The front-end's port.
    pub const EVENT_CHANNEL: &str = "event-channel";
    /// Obsolete: neither end may let it change anything.
    pub const FEATURE_LARGE_SECTOR_SIZE: &str = "feature-large-sector-size";

    /// The grant of page `page` of a ring with several.
    pub fn ring_ref(page: u32) -> String {
        format!("ring-ref{page}")
    }

    /// The directory of ring `queue` of a device with several.
    pub fn queue(queue: u32) -> String {
        format!("queue-{queue}")
    }
}

#[cfg(test)]
#[path = "vbd/tests.rs"]
mod tests;
