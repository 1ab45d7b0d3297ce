//! What the two ends tell each other in xenstore, judged: every value of the other end's may be missing or absurd.

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

/// Largest order of a ring that there is.
pub(super) const MAX_RING_ORDER: u8 = MAX_RING_PAGES.ilog2() as u8;
/// More sectors do not fit in 64 bits of bytes.
const MAX_SECTORS: u64 = ByteLen(u64::MAX).sectors().0;

/// What a directory says, as far as it was read.
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

/// What a backend offers before its frontend makes rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackendOffer {
    /// Most rings.
    pub(super) queues: u16,
    /// Most pages of a ring, as a power of two's exponent; what is more than any ring has counts as that.
    pub(super) ring_order: u8,
}

impl BackendOffer {
    pub(super) const KEYS: [&'static str; 2] = [keys::MULTI_QUEUE_MAX_QUEUES, keys::MAX_RING_PAGE_ORDER];

    pub(super) fn parse(found: &XenstoreValues) -> Result<BackendOffer, DriverError> {
        let most = u32::MAX.into();
        let count = |key, absent| parse_number_or(key, found.get(key), most, absent);
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
    /// As if all of it had been agreed on.
    pub(super) fn accepted(self) -> Negotiated {
        let BackendOffer { queues: most_queues, ring_order } = self;
        Negotiated { persistent: true, indirect_segments: MAX_REQUEST_SEGMENTS, max_queues: most_queues, ring_order }
    }
}

/// Discard, as a backend does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardInfo {
    /// Bytes of the space that it releases at once.
    pub granularity: u64,
    /// Bytes from the disk's start to the first boundary of that.
    pub alignment: u64,
    /// It can do so that what was there is not found again.
    pub secure: bool,
}

/// What a disk is, and what was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkfrontInfo {
    /// Size.
    pub capacity: Sector512,
    /// Logical block size: requests start and end at multiples of it.
    pub block_size: BlockSize,
    /// Physical block size, in bytes.
    pub physical_block_size: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Flushes are taken.
    pub flush: bool,
    /// Write barriers are taken.
    pub barrier: bool,
    /// Discards are taken.
    pub discard: Option<DiscardInfo>,
    /// Both ends keep to persistent grants: pages may stay mapped after their requests.
    pub persistent: bool,
    /// Most segments of a request; more than 11 are indirect.
    pub max_segments: u16,
    /// Most rings that the backend serves.
    pub max_queues: u16,
    /// Pages of each ring, as a power of two's exponent.
    pub ring_order: u8,
}

/// What a frontend wants, and what was agreed on before.
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

    pub(super) fn parse(found: &XenstoreValues, agreed: &Negotiated) -> Result<BlkfrontInfo, DriverError> {
        let most = u64::from(u32::MAX);
        let flag = |key| parse_flag(key, found.get(key));
        let count = |key, absent| parse_number_or(key, found.get(key), most, absent);
        let size = parse_number(keys::SECTOR_SIZE, found.required(keys::SECTOR_SIZE)?, most)?;
        let block = u32::try_from(size).ok().and_then(BlockSize::new);
        let block = block.ok_or_else(|| malformed(keys::SECTOR_SIZE, size, "a power of two from 512 to 65536"))?;
        let physical = count(keys::PHYSICAL_SECTOR_SIZE, size)?;
        if !physical.is_power_of_two() || physical < size {
            let expected = format!("a power of two of at least {size}, the {}", keys::SECTOR_SIZE);
            return Err(malformed(keys::PHYSICAL_SECTOR_SIZE, physical, &expected));
        }
        let info = parse_number(keys::INFO, found.required(keys::INFO)?, most)? as u32;
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
            persistent: agreed.persistent && flag(keys::FEATURE_PERSISTENT)?,
            max_segments: indirect.min(agreed.indirect_segments).max(MAX_SEGMENTS as u16),
            max_queues: agreed.max_queues,
            ring_order: agreed.ring_order,
        })
    }
}

/// A disk's size, which may change while it is connected.
pub(super) fn parse_capacity(found: &XenstoreValues) -> Result<Sector512, DriverError> {
    Ok(Sector512(parse_number(keys::SECTORS, found.required(keys::SECTORS)?, MAX_SECTORS)?))
}

/// A ring as its frontend tells of it.
#[derive(Clone, Debug)]
pub(super) struct RingEndpoint {
    pub(super) refs: Vec<GrantRef>,
    pub(super) port: Port,
}

/// What a frontend writes, in order; the state goes last. With one ring the keys are in the directory itself.
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

/// Whether a key of a frontend's directory is what an earlier connection has left there.
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

    /// `pairs` in place of what Linux's backend writes; an empty value: not there.
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
        let agreed = Negotiated { persistent: true, indirect_segments: 32, max_queues: 4, ring_order: 1 };
        BlkfrontInfo::parse(&found, &agreed).map_err(|error| error.to_string())
    }

    #[test]
    fn what_linux_writes_is_understood() {
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
    fn values_and_what_they_mean() {
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
        // What belongs to a feature that is off means nothing.
        assert_eq!(with("discard-granularity", "many").discard, None);
    }

    #[test]
    fn absurd_properties_are_named() {
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
    fn rings_are_told_where_linux_looks_for_them() {
        let ring = |first: u32, pages: u32, port| RingEndpoint {
            refs: (first..first + pages).map(GrantRef).collect(),
            port: Port(port),
        };
        let told = |abi, persistent, rings: &[RingEndpoint]| {
            let pairs = frontend_keys(abi, persistent, rings).into_iter().map(|(key, value)| format!("{key}={value}"));
            pairs.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            told(Abi::X86_64, true, &[ring(8, 1, 15)]),
            "ring-ref=8 event-channel=15 protocol=x86_64-abi feature-persistent=1"
        );
        assert_eq!(
            told(Abi::X86_32, false, &[ring(8, 2, 15)]),
            "ring-page-order=1 ring-ref0=8 ring-ref1=9 event-channel=15 protocol=x86_32-abi feature-persistent=0"
        );
        assert_eq!(
            told(Abi::Arm, true, &[ring(8, 1, 15), ring(9, 1, 16)]),
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
