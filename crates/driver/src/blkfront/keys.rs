//! The keys that both ends publish in xenstore. All values of the backend are checked: any may be missing or invalid.

use std::collections::BTreeMap;

use mqblk_core::{BlockSize, ByteLen, Sector512};
use mqblk_memory::GrantRef;
use mqblk_ring::blkif::Abi;
use mqblk_ring::blkif::layout::MAX_RING_PAGES;
use mqblk_ring::blkif::request::MAX_SEGMENTS;
use mqblk_xen::Port;
use mqblk_xen::vbd::{MalformedValue, keys, parse_flag, parse_number, parse_number_or};

use super::segments::MAX_REQUEST_SEGMENTS;
use crate::DriverError;

/// Largest order of a ring.
pub(super) const MAX_RING_ORDER: u8 = MAX_RING_PAGES.ilog2() as u8;
/// The size in bytes must fit in 64 bits.
const MAX_SECTORS: u64 = ByteLen(u64::MAX).sectors().0;

/// Values of a directory that were read.
#[derive(Clone, Debug, Default)]
pub(super) struct XenstoreValues(pub(super) BTreeMap<&'static str, String>);

impl XenstoreValues {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn required(&self, key: &'static str) -> Result<&str, DriverError> {
        self.get(key).ok_or(DriverError::MissingKey(key))
    }
}

fn malformed(key: &str, found: impl ToString, expected: &str) -> DriverError {
    DriverError::MalformedKey(MalformedValue {
        key: key.to_owned(),
        found: found.to_string(),
        expected: expected.to_owned(),
    })
}

/// The limits that a backend publishes before its frontend creates rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackendOffer {
    /// Largest number of rings.
    pub(super) queues: u16,
    /// Largest order of a ring, capped at [`MAX_RING_ORDER`].
    pub(super) ring_order: u8,
}

impl BackendOffer {
    pub(super) const KEYS: [&'static str; 2] = [keys::MULTI_QUEUE_MAX_QUEUES, keys::MAX_RING_PAGE_ORDER];

    pub(super) fn parse(found: &XenstoreValues) -> Result<BackendOffer, DriverError> {
        let max = u32::MAX.into();
        let count = |key, absent| parse_number_or(key, found.get(key), max, absent);
        let queues = count(keys::MULTI_QUEUE_MAX_QUEUES, 1)?;
        if queues == 0 {
            return Err(malformed(keys::MULTI_QUEUE_MAX_QUEUES, 0, "1 or more"));
        }
        let order = count(keys::MAX_RING_PAGE_ORDER, 0)?;
        Ok(BackendOffer {
            queues: queues.min(u16::MAX.into()) as u16,
            ring_order: order.min(MAX_RING_ORDER.into()) as u8,
        })
    }
}

#[cfg(any(test, feature = "model"))]
impl BackendOffer {
    /// Returns the parameters that use the whole offer.
    pub(super) fn accepted(self) -> Negotiated {
        let BackendOffer { queues: max_queues, ring_order } = self;
        Negotiated { persistent: true, indirect_segments: MAX_REQUEST_SEGMENTS, max_queues, ring_order }
    }
}

/// Discard properties of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardInfo {
    /// Granularity in bytes.
    pub granularity: u64,
    /// Offset of the first granularity boundary in bytes.
    pub alignment: u64,
    /// Secure discard is supported.
    pub secure: bool,
}

/// Properties of a device, and the negotiated parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkfrontInfo {
    /// Size.
    pub capacity: Sector512,
    /// Logical block size: the alignment of requests.
    pub block_size: BlockSize,
    /// Physical block size in bytes.
    pub physical_block_size: u32,
    /// The device is read-only.
    pub read_only: bool,
    /// Flushes are supported.
    pub flush: bool,
    /// Write barriers are supported.
    pub barrier: bool,
    /// Discard properties, if discard is supported.
    pub discard: Option<DiscardInfo>,
    /// Persistent grants were negotiated: pages may stay mapped after their requests.
    pub persistent: bool,
    /// Largest number of segments of a request. More than 11 need an indirect request.
    pub max_segments: u16,
    /// Largest number of rings that the backend serves.
    pub max_queues: u16,
    /// Order of each ring: log2 of its pages.
    pub ring_order: u8,
}

/// Parameters that the frontend has requested or the ends have negotiated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Negotiated {
    pub(super) persistent: bool,
    pub(super) indirect_segments: u16,
    pub(super) max_queues: u16,
    pub(super) ring_order: u8,
}

impl BlkfrontInfo {
    pub(super) const KEYS: [&'static str; 12] = [
        keys::SECTORS,
        keys::SECTOR_SIZE,
        keys::PHYSICAL_SECTOR_SIZE,
        keys::INFO,
        keys::FEATURE_FLUSH_CACHE,
        keys::FEATURE_BARRIER,
        keys::FEATURE_DISCARD,
        keys::DISCARD_GRANULARITY,
        keys::DISCARD_ALIGNMENT,
        keys::DISCARD_SECURE,
        keys::FEATURE_PERSISTENT,
        keys::FEATURE_MAX_INDIRECT_SEGMENTS,
    ];

    pub(super) fn parse(found: &XenstoreValues, negotiated: &Negotiated) -> Result<BlkfrontInfo, DriverError> {
        let max = u64::from(u32::MAX);
        let flag = |key| parse_flag(key, found.get(key));
        let count = |key, absent| parse_number_or(key, found.get(key), max, absent);
        let size = parse_number(keys::SECTOR_SIZE, found.required(keys::SECTOR_SIZE)?, max)?;
        let block = u32::try_from(size).ok().and_then(BlockSize::new);
        let block = block.ok_or_else(|| malformed(keys::SECTOR_SIZE, size, "a power of two from 512 to 65536"))?;
        let physical = count(keys::PHYSICAL_SECTOR_SIZE, size)?;
        if !physical.is_power_of_two() || physical < size {
            let expected = format!("a power of two of at least {size}, the {}", keys::SECTOR_SIZE);
            return Err(malformed(keys::PHYSICAL_SECTOR_SIZE, physical, &expected));
        }
        let info = parse_number(keys::INFO, found.required(keys::INFO)?, max)? as u32;
        let discard = match flag(keys::FEATURE_DISCARD)? {
            true => Some(DiscardInfo {
                granularity: count(keys::DISCARD_GRANULARITY, size)?,
                alignment: count(keys::DISCARD_ALIGNMENT, 0)?,
                secure: flag(keys::DISCARD_SECURE)?,
            }),
            false => None,
        };
        let indirect = count(keys::FEATURE_MAX_INDIRECT_SEGMENTS, 0)?.min(MAX_REQUEST_SEGMENTS.into()) as u16;
        Ok(BlkfrontInfo {
            capacity: parse_capacity(found)?,
            block_size: block,
            physical_block_size: physical as u32,
            read_only: info & keys::INFO_READ_ONLY != 0,
            flush: flag(keys::FEATURE_FLUSH_CACHE)?,
            barrier: flag(keys::FEATURE_BARRIER)?,
            discard,
            persistent: negotiated.persistent && flag(keys::FEATURE_PERSISTENT)?,
            max_segments: indirect.min(negotiated.indirect_segments).max(MAX_SEGMENTS as u16),
            max_queues: negotiated.max_queues,
            ring_order: negotiated.ring_order,
        })
    }
}

/// Parses the disk's size, which may change while the device is connected.
pub(super) fn parse_capacity(found: &XenstoreValues) -> Result<Sector512, DriverError> {
    Ok(Sector512(parse_number(keys::SECTORS, found.required(keys::SECTORS)?, MAX_SECTORS)?))
}

/// The published part of a ring.
#[derive(Clone, Debug)]
pub(super) struct RingEndpoint {
    pub(super) refs: Vec<GrantRef>,
    pub(super) port: Port,
}

/// Returns the keys that a frontend writes, in order, without the state, which is last. With one ring the keys are in
/// the directory itself.
pub(super) fn frontend_keys(abi: Abi, persistent: bool, rings: &[RingEndpoint]) -> Vec<(String, String)> {
    let mut all = vec![];
    let mut add = |key: String, value: String| all.push((key, value));
    let pages = rings.first().map_or(1, |ring| ring.refs.len());
    if pages > 1 {
        add(keys::RING_PAGE_ORDER.to_owned(), pages.ilog2().to_string());
    }
    if rings.len() > 1 {
        add(keys::MULTI_QUEUE_NUM_QUEUES.to_owned(), rings.len().to_string());
    }
    for (ring, index) in rings.iter().zip(0..) {
        let own = |key: &str| match rings.len() {
            1 => key.to_owned(),
            _ => format!("{}/{key}", keys::queue(index)),
        };
        match ring.refs.as_slice() {
            [one] => add(own(keys::RING_REF), one.0.to_string()),
            several => {
                (0..).zip(several).for_each(|(page, gref)| add(own(&keys::ring_ref(page)), gref.0.to_string()));
            }
        }
        add(own(keys::EVENT_CHANNEL), ring.port.0.to_string());
    }
    add(keys::PROTOCOL.to_owned(), abi.protocol().to_owned());
    add(keys::FEATURE_PERSISTENT.to_owned(), u8::from(persistent).to_string());
    all
}

/// Returns true if a key in the frontend's directory belongs to an earlier connection.
pub(super) fn is_stale(name: &str) -> bool {
    const ALL: [&str; 7] = [
        keys::RING_PAGE_ORDER,
        keys::NUM_RING_PAGES,
        keys::MULTI_QUEUE_NUM_QUEUES,
        keys::EVENT_CHANNEL,
        keys::PROTOCOL,
        keys::FEATURE_PERSISTENT,
        keys::FEATURE_LARGE_SECTOR_SIZE,
    ];
    ALL.contains(&name) || name.starts_with(keys::RING_REF) || name.starts_with("queue-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys_of(pairs: &[(&'static str, &str)]) -> XenstoreValues {
        XenstoreValues(pairs.iter().map(|(key, value)| (*key, (*value).to_owned())).collect())
    }

    /// Parses the keys of Linux's backend with `pairs` in place of some of them. An empty value removes the key.
    fn info(pairs: &[(&'static str, &str)]) -> Result<BlkfrontInfo, String> {
        let mut found = keys_of(&[
            ("sectors", "131072"),
            ("sector-size", "512"),
            ("physical-sector-size", "4096"),
            ("info", "0"),
            ("feature-flush-cache", "1"),
            ("feature-barrier", "1"),
            ("feature-persistent", "1"),
            ("feature-max-indirect-segments", "256"),
        ]);
        found.0.extend(keys_of(pairs).0);
        found.0.retain(|_, value| !value.is_empty());
        let negotiated = Negotiated { persistent: true, indirect_segments: 32, max_queues: 4, ring_order: 1 };
        BlkfrontInfo::parse(&found, &negotiated).map_err(|error| error.to_string())
    }

    #[test]
    fn linux_keys_are_parsed() {
        let all = info(&[]).unwrap();
        let expected = BlkfrontInfo {
            capacity: Sector512(131_072),
            block_size: BlockSize::B512,
            physical_block_size: 4096,
            read_only: false,
            flush: true,
            barrier: true,
            discard: None,
            persistent: true,
            max_segments: 32,
            max_queues: 4,
            ring_order: 1,
        };
        assert_eq!(all, expected);
        let least = [
            ("physical-sector-size", ""),
            ("feature-flush-cache", ""),
            ("feature-barrier", ""),
            ("feature-persistent", ""),
            ("feature-max-indirect-segments", ""),
        ];
        let expected = BlkfrontInfo {
            physical_block_size: 512,
            flush: false,
            barrier: false,
            persistent: false,
            max_segments: 11,
            ..expected
        };
        assert_eq!(info(&least).unwrap(), expected);
    }

    #[test]
    fn values_have_their_meaning() {
        let with = |key: &'static str, value: &str| info(&[(key, value)]).unwrap();
        assert!(with("info", "4").read_only && with("info", "7").read_only && !with("info", "3").read_only);
        assert!(with("feature-flush-cache", "2").flush);
        for (offered, segments) in [("0", 11), ("11", 11), ("12", 12), ("31", 31), ("33", 32), ("4294967295", 32)] {
            assert_eq!(with("feature-max-indirect-segments", offered).max_segments, segments);
        }
        let discard = |pairs: &[(&'static str, &str)]| {
            let all: Vec<_> = pairs.iter().copied().chain([("feature-discard", "1")]).collect();
            info(&all).unwrap().discard.unwrap()
        };
        assert_eq!(discard(&[]), DiscardInfo { granularity: 512, alignment: 0, secure: false });
        let given = discard(&[("discard-granularity", "4096"), ("discard-alignment", "1024"), ("discard-secure", "1")]);
        assert_eq!(given, DiscardInfo { granularity: 4096, alignment: 1024, secure: true });
        // Keys of a feature that is off are ignored.
        assert_eq!(with("discard-granularity", "many").discard, None);
    }

    #[test]
    fn invalid_properties_are_reported() {
        for (key, value, want) in [
            ("sectors", "", "xenstore key sectors: found none, expected it of every device that is connected"),
            ("sectors", "-1", "sectors: found \"-1\", expected a decimal number of at most 36028797018963967"),
            (
                "sectors",
                "36028797018963968",
                "sectors: found \"36028797018963968\", expected a decimal number of at most 36028797018963967",
            ),
            ("sector-size", "", "xenstore key sector-size: found none, expected it of every device that is connected"),
            ("sector-size", "0", "sector-size: found \"0\", expected a power of two from 512 to 65536"),
            ("sector-size", "513", "sector-size: found \"513\", expected a power of two from 512 to 65536"),
            (
                "sector-size",
                "4294967296",
                "sector-size: found \"4294967296\", expected a decimal number of at most 4294967295",
            ),
            ("info", "", "xenstore key info: found none, expected it of every device that is connected"),
            ("info", "x", "info: found \"x\", expected a decimal number of at most 4294967295"),
            (
                "physical-sector-size",
                "0",
                "physical-sector-size: found \"0\", expected a power of two of at least 512, the sector-size",
            ),
            (
                "physical-sector-size",
                "1536",
                "physical-sector-size: found \"1536\", expected a power of two of at least 512, the sector-size",
            ),
            (
                "feature-persistent",
                "yes",
                "feature-persistent: found \"yes\", expected a decimal number of at most 4294967295",
            ),
        ] {
            assert_eq!(info(&[(key, value)]).unwrap_err(), want);
        }
    }

    #[test]
    fn offers_have_defaults_and_bounds() {
        let offer =
            |pairs: &[(&'static str, &str)]| BackendOffer::parse(&keys_of(pairs)).map_err(|error| error.to_string());
        assert_eq!(offer(&[]), Ok(BackendOffer { queues: 1, ring_order: 0 }));
        let two = |queues, order| offer(&[("multi-queue-max-queues", queues), ("max-ring-page-order", order)]);
        assert_eq!(two("4", "4"), Ok(BackendOffer { queues: 4, ring_order: 4 }));
        assert_eq!(two("4294967295", "4294967295"), Ok(BackendOffer { queues: 65535, ring_order: 4 }));
        assert_eq!(two("0", "0").unwrap_err(), "multi-queue-max-queues: found \"0\", expected 1 or more");
        for (queues, order) in [("", "0"), ("1", "0x1"), ("99999999999", "0"), ("one", "1")] {
            assert!(two(queues, order).unwrap_err().contains("expected a decimal number"), "{queues} {order}");
        }
    }

    #[test]
    fn ring_keys_are_those_of_linux() {
        let ring = |first: u32, pages: u32, port| RingEndpoint {
            refs: (first..first + pages).map(GrantRef).collect(),
            port: Port(port),
        };
        let written = |abi, persistent, rings: &[RingEndpoint]| {
            let pairs = frontend_keys(abi, persistent, rings).into_iter().map(|(key, value)| format!("{key}={value}"));
            pairs.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            written(Abi::X86_64, true, &[ring(8, 1, 15)]),
            "ring-ref=8 event-channel=15 protocol=x86_64-abi feature-persistent=1"
        );
        assert_eq!(
            written(Abi::X86_32, false, &[ring(8, 2, 15)]),
            "ring-page-order=1 ring-ref0=8 ring-ref1=9 event-channel=15 protocol=x86_32-abi feature-persistent=0"
        );
        assert_eq!(
            written(Abi::Arm, true, &[ring(8, 1, 15), ring(9, 1, 16)]),
            "multi-queue-num-queues=2 queue-0/ring-ref=8 queue-0/event-channel=15 queue-1/ring-ref=9 \
             queue-1/event-channel=16 protocol=arm-abi feature-persistent=1"
        );
        for (key, _) in frontend_keys(Abi::Arm, true, &[ring(0, 2, 1), ring(2, 2, 2)]) {
            assert!(is_stale(key.split('/').next().unwrap()), "{key}");
        }
        for key in ["state", "backend", "backend-id", "virtual-device", "device-type", "trusted"] {
            assert!(!is_stale(key), "{key}");
        }
    }
}
