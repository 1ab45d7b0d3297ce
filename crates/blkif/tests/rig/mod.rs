//! Both ends of a ring without a hypervisor: a domain with pages and a grant table, a frontend that puts arbitrary
//! requests on its ring, a queue that the test steps, and a disk in memory.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod backend;
pub(crate) mod domain;
pub(crate) mod front;

use std::sync::Arc;
use std::time::Duration;

use mqblk_blkif::{DEFAULT_PERSISTENT_MAX, GrantBudget, GrantMode, PoolScope, ResolvedGrantMode, VbdOptions};
use mqblk_core::{BlockSize, ByteLen, DiscardLimits, Geometry, Limits};
use mqblk_ring::blkif::Abi;

/// Sectors of the disk.
pub(crate) const SECTORS: u64 = 4096;
/// Bytes of a sector.
pub(crate) const SECTOR: u64 = mqblk_core::units::SECTOR_BYTES;
/// Bytes of a page.
pub(crate) const PAGE: u64 = mqblk_memory::PAGE_BYTES as u64;

/// Options of a device with all features.
pub(crate) fn options(mode: ResolvedGrantMode) -> VbdOptions {
    VbdOptions {
        geometry: Geometry {
            size: ByteLen(SECTORS * SECTOR),
            logical_block: BlockSize::B512,
            physical_block: BlockSize::B4096,
            alignment_offset: 0,
            min_io: ByteLen(4096),
            opt_io: ByteLen(0),
            read_only: false,
        },
        limits: Limits {
            max_transfer: ByteLen(1 << 20),
            max_segments: 1024,
            discard: Some(DiscardLimits { granularity: ByteLen(4096), max_len: ByteLen(64 << 10) }),
            write_zeroes: None,
            volatile_cache: true,
            cost_per_request: false,
            pins_memory: mode == ResolvedGrantMode::PersistentBounce,
        },
        abi: Abi::X86_64,
        persistent: mode.is_persistent(),
        max_indirect_segments: 256,
        discard: true,
        discard_secure: true,
        barrier: true,
        flush: true,
        write_through: false,
        mode: match mode {
            ResolvedGrantMode::Copy => GrantMode::Copy,
            ResolvedGrantMode::Map => GrantMode::Map,
            ResolvedGrantMode::Persistent | ResolvedGrantMode::PersistentBounce => GrantMode::Persistent,
        },
        pages_may_be_pinned: mode != ResolvedGrantMode::PersistentBounce,
        pool: PoolScope::PerRing,
        budget: GrantBudget::new(1 << 20, mqblk_core::MappingBudget::of_process()),
        persistent_max: DEFAULT_PERSISTENT_MAX,
        persistent_idle: Duration::ZERO,
        rings: 1,
    }
}

/// All grant modes.
pub(crate) const MODES: [ResolvedGrantMode; 4] = [
    ResolvedGrantMode::Copy,
    ResolvedGrantMode::Map,
    ResolvedGrantMode::Persistent,
    ResolvedGrantMode::PersistentBounce,
];

/// A domain, and both ends of a device with one ring.
pub(crate) fn rig(options: VbdOptions) -> (Arc<domain::Domain>, front::Front, backend::TestBackend) {
    let domain = domain::Domain::new(2048);
    let abi = options.abi;
    let vbd = mqblk_blkif::Vbd::new(options);
    let front = front::Front::new(&domain, abi, 1);
    let back = backend::TestBackend::new(&vbd, &domain, &front);
    (domain, front, back)
}
