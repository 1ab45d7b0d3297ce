//! The keys that a frontend publishes. Every value is untrusted.

use mqblk_core::BlockSize;
use mqblk_memory::{DomainId, GrantRef};
use mqblk_ring::blkif::Abi;
use mqblk_xen::Port;
use mqblk_xen::store::XenstoreError;
use mqblk_xen::vbd::{MalformedValue, keys, parse_flag, parse_number};

/// Offered limits of a frontend's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLimits {
    /// Maximum number of rings.
    pub queues: u16,
    /// Maximum ring page order.
    pub ring_page_order: u8,
}

/// The keys of one ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RingKeys {
    /// Grant references of the ring's pages, in order.
    pub grefs: Vec<GrantRef>,
    /// The frontend's event channel port.
    pub port: Port,
}

/// The configuration that a frontend publishes before it connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FrontendConfig {
    /// Layout of the requests.
    pub abi: Abi,
    /// The frontend supports persistent grants.
    pub persistent: bool,
    /// The frontend counts sectors in blocks of the disk, as an earlier specification had it, not in 512 bytes.
    pub counts_blocks: bool,
    /// The rings.
    pub rings: Vec<RingKeys>,
}

/// Error of a frontend's keys.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrontendConfigError {
    /// A key has an invalid value.
    #[error(transparent)]
    Key(#[from] MalformedValue),
    /// A key is missing.
    #[error("{key}: found nothing, expected {expected}")]
    Missing {
        /// The key.
        key: String,
        /// The expected value.
        expected: &'static str,
    },
    /// Xenstore cannot be read.
    #[error(transparent)]
    Store(#[from] XenstoreError),
}

impl FrontendConfigError {
    /// Returns the errno, which Linux's backends write before the text of an `error` node.
    pub(crate) fn errno(&self) -> u16 {
        match self {
            FrontendConfigError::Key(_) => 22,
            FrontendConfigError::Missing { .. } => 2,
            FrontendConfigError::Store(_) => 5,
        }
    }
}

/// Layout of a frontend without a `protocol` key. Linux's xen-blkback on x86 assumes 32-bit, independent of the
/// backend's own layout.
const DEFAULT_ABI: Abi = if cfg!(any(target_arch = "x86_64", target_arch = "x86")) { Abi::X86_32 } else { Abi::Arm };

/// Reads a key, by its path below the frontend's directory.
pub(crate) type ReadKey<'a> = &'a mut dyn FnMut(&str) -> Result<Option<String>, XenstoreError>;

impl FrontendConfig {
    /// Reads and validates the keys. `bounds` limits the number of keys read, for any published keys.
    ///
    /// # Errors
    /// At the first invalid key.
    pub(crate) fn read(read: ReadKey<'_>, bounds: RingLimits) -> Result<FrontendConfig, FrontendConfigError> {
        let abi = match read(keys::PROTOCOL)? {
            None => DEFAULT_ABI,
            Some(name) => Abi::from_protocol(name.trim_end_matches('\0')).ok_or_else(|| {
                let known: Vec<_> = Abi::ALL.map(Abi::protocol).into();
                malformed_value(keys::PROTOCOL, &name, format!("one of {}", known.join(", ")))
            })?,
        };
        // An invalid value means that the frontend does not support it.
        let persistent =
            parse_flag(keys::FEATURE_PERSISTENT, read(keys::FEATURE_PERSISTENT)?.as_deref()).unwrap_or(false);
        let counts_blocks =
            parse_flag(keys::FEATURE_LARGE_SECTOR_SIZE, read(keys::FEATURE_LARGE_SECTOR_SIZE)?.as_deref())
                .unwrap_or(false);
        let queues = match read(keys::MULTI_QUEUE_NUM_QUEUES)? {
            None => 1,
            Some(text) => match parse_number(keys::MULTI_QUEUE_NUM_QUEUES, &text, bounds.queues.into()) {
                Ok(count @ 1..) => count as u32,
                _ => {
                    let expected = format!("a number from 1 to {}", bounds.queues);
                    return Err(malformed_value(keys::MULTI_QUEUE_NUM_QUEUES, &text, expected).into());
                }
            },
        };
        let size = RingSize::read(read, bounds)?;
        let mut rings = Vec::new();
        for queue in 0..queues {
            let prefix = if queues == 1 { String::new() } else { format!("{}/", keys::queue(queue)) };
            rings.push(RingKeys::read(read, &prefix, size)?);
        }
        Ok(FrontendConfig { abi, persistent, counts_blocks, rings })
    }

    /// Checks that the frontend can address a disk with these blocks.
    ///
    /// # Errors
    /// When it counts in blocks: it would use other places of the disk than every other frontend.
    pub(crate) fn check_blocks(&self, block: BlockSize) -> Result<(), FrontendConfigError> {
        if !self.counts_blocks || block == BlockSize::B512 {
            return Ok(());
        }
        let expected =
            format!("a disk with block-size=512: the frontend counts in its {} bytes, not in 512 bytes", block.bytes());
        Err(malformed_value(keys::FEATURE_LARGE_SECTOR_SIZE, "1", expected).into())
    }
}

fn malformed_value(key: &str, found: &str, expected: impl Into<String>) -> MalformedValue {
    MalformedValue { key: key.to_owned(), found: found.chars().take(40).collect(), expected: expected.into() }
}

/// Number of pages of each ring, and the frontend's numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingSize {
    pages: u32,
    /// True if the frontend has published the number, so its keys start at `ring-ref0` even for one page.
    explicit: bool,
}

impl RingSize {
    fn read(read: ReadKey<'_>, bounds: RingLimits) -> Result<RingSize, FrontendConfigError> {
        let max_pages = 1_u32 << bounds.ring_page_order;
        let order = read(keys::RING_PAGE_ORDER)?;
        let order =
            order.map(|text| parse_number(keys::RING_PAGE_ORDER, &text, bounds.ring_page_order.into())).transpose()?;
        let by_order = order.map(|order| 1_u32 << order);
        // The older key. If both are present they must agree.
        let by_count = match read(keys::NUM_RING_PAGES)? {
            None => None,
            Some(text) => match parse_number(keys::NUM_RING_PAGES, &text, max_pages.into()) {
                Ok(pages) if (pages as u32).is_power_of_two() && by_order.is_none_or(|other| other == pages as u32) => {
                    Some(pages as u32)
                }
                _ => {
                    let also = by_order.map_or(String::new(), |pages| format!(", and {pages} as ring-page-order says"));
                    let expected = format!("a power of two from 1 to {max_pages}{also}");
                    return Err(malformed_value(keys::NUM_RING_PAGES, &text, expected).into());
                }
            },
        };
        Ok(RingSize { pages: by_order.or(by_count).unwrap_or(1), explicit: by_order.or(by_count).is_some() })
    }
}

impl RingKeys {
    fn read(read: ReadKey<'_>, prefix: &str, size: RingSize) -> Result<RingKeys, FrontendConfigError> {
        let missing = |key: String, expected| FrontendConfigError::Missing { key, expected };
        let mut refs = Vec::new();
        for page in 0..size.pages {
            let numbered = format!("{prefix}{}", keys::ring_ref(page));
            let plain = format!("{prefix}{}", keys::RING_REF);
            // One page: `ring-ref` if the number of pages is not published, else `ring-ref0`; the other one is the
            // fallback.
            let names = match (size.pages, size.explicit) {
                (1, false) => vec![plain, numbered],
                (1, true) => vec![numbered, plain],
                _ => vec![numbered],
            };
            let mut found = None;
            for name in &names {
                if let Some(text) = read(name)? {
                    found = Some(GrantRef(parse_number(name, &text, u32::MAX.into())? as u32));
                    break;
                }
            }
            refs.push(found.ok_or_else(|| missing(names[0].clone(), "a grant reference"))?);
        }
        let key = format!("{prefix}{}", keys::EVENT_CHANNEL);
        let text = read(&key)?.ok_or_else(|| missing(key.clone(), "an event channel's port"))?;
        Ok(RingKeys { grefs: refs, port: Port(parse_number(&key, &text, u32::MAX.into())? as u32) })
    }
}

/// Returns the identity of a ring: it is equal if a connection has the same rings. FNV-1a, 64 bits.
pub(crate) fn ring_identity(front: DomainId, devid: u32, abi: Abi, index: usize, ring: &RingKeys) -> u64 {
    let refs = ring.grefs.iter().map(|gref| gref.0);
    let numbers = [front.0.into(), devid, abi.entry_bytes(), index as u32, ring.port.0].into_iter().chain(refs);
    let bytes = numbers.flat_map(u32::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const BOUNDS: RingLimits = RingLimits { queues: 4, ring_page_order: 2 };

    fn read_keys(pairs: &[(&str, &str)]) -> Result<FrontendConfig, String> {
        let keys: BTreeMap<&str, &str> = pairs.iter().copied().collect();
        let mut read = |key: &str| Ok(keys.get(key).map(|value| (*value).to_owned()));
        FrontendConfig::read(&mut read, BOUNDS).map_err(|error| error.to_string())
    }

    fn ring(refs: &[u32], port: u32) -> RingKeys {
        RingKeys { grefs: refs.iter().copied().map(GrantRef).collect(), port: Port(port) }
    }

    #[test]
    fn one_ring_has_its_keys_in_the_frontend_directory() {
        let plain = [("ring-ref", "8"), ("event-channel", "15")];
        let found = read_keys(&plain).unwrap();
        let want =
            FrontendConfig { abi: Abi::X86_32, persistent: false, counts_blocks: false, rings: vec![ring(&[8], 15)] };
        assert_eq!(found, want);
        for one in [("multi-queue-num-queues", "1"), ("feature-large-sector-size", "1"), ("num-ring-pages", "1")] {
            assert_eq!(read_keys(&[&plain[..], &[one]].concat()).unwrap().rings, [ring(&[8], 15)], "{one:?}");
        }
        // Linux: a published order numbers the pages, even order 0.
        let found = read_keys(&[("ring-page-order", "0"), ("ring-ref0", "9"), ("event-channel", "1")]).unwrap();
        assert_eq!(found.rings, [ring(&[9], 1)]);
        // With both keys present, the published order decides.
        let both = [("ring-ref0", "9"), ("ring-ref", "8"), ("event-channel", "1")];
        assert_eq!(read_keys(&both).unwrap().rings, [ring(&[8], 1)]);
        let said = [("ring-page-order", "0"), ("ring-ref0", "9"), ("ring-ref", "8"), ("event-channel", "1")];
        assert_eq!(read_keys(&said).unwrap().rings, [ring(&[9], 1)]);
    }

    #[test]
    fn a_frontend_says_that_it_counts_blocks() {
        for (value, counts_blocks) in [("0", false), ("1", true), ("yes", false)] {
            let keys = [("feature-large-sector-size", value), ("ring-ref", "8"), ("event-channel", "15")];
            let found = read_keys(&keys).unwrap();
            assert_eq!(found.counts_blocks, counts_blocks, "{value}");
            assert!(found.check_blocks(BlockSize::B512).is_ok());
            assert_eq!(found.check_blocks(BlockSize::B4096).is_err(), counts_blocks, "{value}");
        }
    }

    #[test]
    fn several_rings_have_subdirectories() {
        let found = read_keys(&[
            ("protocol", "x86_64-abi"),
            ("multi-queue-num-queues", "2"),
            ("feature-persistent", "1"),
            ("ring-page-order", "1"),
            ("queue-0/ring-ref0", "8"),
            ("queue-0/ring-ref1", "9"),
            ("queue-0/event-channel", "15"),
            ("queue-1/ring-ref0", "10"),
            ("queue-1/ring-ref1", "4294967295"),
            ("queue-1/event-channel", "16"),
        ]);
        let rings = vec![ring(&[8, 9], 15), ring(&[10, u32::MAX], 16)];
        assert_eq!(found.unwrap(), FrontendConfig { abi: Abi::X86_64, persistent: true, counts_blocks: false, rings });
        for (name, abi) in [("x86_64-abi", Abi::X86_64), ("x86_32-abi", Abi::X86_32), ("arm-abi", Abi::Arm)] {
            assert_eq!(read_keys(&[("protocol", name), ("ring-ref", "1"), ("event-channel", "1")]).unwrap().abi, abi);
        }
        let twin = [("num-ring-pages", "2"), ("ring-ref0", "1"), ("ring-ref1", "2"), ("event-channel", "1")];
        assert_eq!(read_keys(&twin).unwrap().rings, [ring(&[1, 2], 1)]);
    }

    #[test]
    fn errors_name_the_key() {
        let good = [("ring-ref", "8"), ("event-channel", "15")];
        let long = "9".repeat(4000);
        for (pairs, want) in [
            (
                vec![("multi-queue-num-queues", "0")],
                "multi-queue-num-queues: found \"0\", expected a number from 1 to 4",
            ),
            (
                vec![("multi-queue-num-queues", "5")],
                "multi-queue-num-queues: found \"5\", expected a number from 1 to 4",
            ),
            (vec![("multi-queue-num-queues", "-1")], "multi-queue-num-queues: found \"-1\""),
            (vec![("multi-queue-num-queues", "two")], "multi-queue-num-queues: found \"two\""),
            (vec![("multi-queue-num-queues", &long)], "multi-queue-num-queues: found \"9999"),
            (vec![("ring-page-order", "3")], "ring-page-order: found \"3\", expected a decimal number of at most 2"),
            (vec![("ring-page-order", "")], "ring-page-order: found \"\""),
            (vec![("num-ring-pages", "3")], "num-ring-pages: found \"3\", expected a power of two from 1 to 4"),
            (vec![("num-ring-pages", "0")], "num-ring-pages: found \"0\""),
            (vec![("num-ring-pages", "8")], "num-ring-pages: found \"8\""),
            (vec![("ring-page-order", "1"), ("num-ring-pages", "4")], "expected a power of two from 1 to 4, and 2 as"),
            (vec![("ring-page-order", "1")], "ring-ref0: found nothing, expected a grant reference"),
            (vec![("ring-page-order", "1"), ("ring-ref0", "1")], "ring-ref1: found nothing"),
            (vec![("multi-queue-num-queues", "2")], "queue-0/ring-ref: found nothing, expected a grant reference"),
            (
                vec![("multi-queue-num-queues", "2"), ("queue-0/ring-ref", "1")],
                "queue-0/event-channel: found nothing, expected an event channel's port",
            ),
            (
                vec![("protocol", "x86-abi")],
                "protocol: found \"x86-abi\", expected one of x86_64-abi, x86_32-abi, arm-abi",
            ),
            (vec![("protocol", "")], "protocol: found \"\""),
            (vec![("ring-ref", "-8")], "ring-ref: found \"-8\""),
            (vec![("ring-ref", "4294967296")], "ring-ref: found \"4294967296\""),
            (vec![("event-channel", "0x15")], "event-channel: found \"0x15\""),
            (vec![("event-channel", "1\n2")], "event-channel: found \"1\\n2\""),
        ] {
            let mut all = pairs.clone();
            all.extend(good.iter().filter(|(key, _)| !pairs.iter().any(|(other, _)| other == key)));
            let error = read_keys(&all).unwrap_err();
            assert!(error.starts_with(want) || error.contains(want), "{pairs:?}: {error}");
            assert!(error.len() < 250, "{error}");
        }
        assert_eq!(read_keys(&[]).unwrap_err(), "ring-ref: found nothing, expected a grant reference");
        assert!(read_keys(&[good[0], good[1], ("feature-persistent", "maybe")]).is_ok_and(|found| !found.persistent));
    }

    #[test]
    fn connections_have_identities() {
        let one = |front, devid, abi, index, refs: &[u32], port| {
            ring_identity(DomainId(front), devid, abi, index, &ring(refs, port))
        };
        let base = one(1, 51712, Abi::X86_64, 0, &[8, 9], 15);
        assert_eq!(base, one(1, 51712, Abi::Arm, 0, &[8, 9], 15), "the same entries");
        for other in [
            one(2, 51712, Abi::X86_64, 0, &[8, 9], 15),
            one(1, 51728, Abi::X86_64, 0, &[8, 9], 15),
            one(1, 51712, Abi::X86_32, 0, &[8, 9], 15),
            one(1, 51712, Abi::X86_64, 1, &[8, 9], 15),
            one(1, 51712, Abi::X86_64, 0, &[9, 8], 15),
            one(1, 51712, Abi::X86_64, 0, &[8, 9], 16),
            one(1, 51712, Abi::X86_64, 0, &[8], 15),
        ] {
            assert_ne!(base, other);
        }
    }

    proptest! {
        /// For any values: a result within the limits, after a bounded number of reads.
        #[test]
        fn any_values(values in proptest::collection::btree_map(
            prop_oneof![
                Just("protocol".to_owned()), Just("multi-queue-num-queues".to_owned()), Just("ring-page-order".to_owned()),
                Just("num-ring-pages".to_owned()), Just("ring-ref".to_owned()), Just("event-channel".to_owned()),
                "(queue-[0-4]/)?(ring-ref[0-4]?|event-channel)",
            ],
            prop_oneof!["[0-5]", "[0-9]{1,20}", "\\PC{0,20}", Just("x86_64-abi".to_owned())], 0..30,
        )) {
            let mut reads = 0;
            let mut read = |key: &str| { reads += 1; Ok(values.get(key).cloned()) };
            if let Ok(found) = FrontendConfig::read(&mut read, BOUNDS) {
                prop_assert!((1..=4).contains(&found.rings.len()));
                prop_assert!(found.rings.iter().all(|ring| [1, 2, 4].contains(&ring.grefs.len())));
            }
            prop_assert!(reads <= 6 + 4 * 6, "{reads}");
        }
    }
}
