//! Options of a device: its settings, and the features that both ends have negotiated.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{Geometry, Limits};
use mqblk_ring::blkif::Abi;

use crate::budget::GrantBudget;

/// A ring's access to its frontend's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GrantMode {
    /// Persistent grants if both ends offer them, else grant copy.
    #[default]
    Auto,
    /// The hypervisor copies data to and from buffer pages of the backend.
    Copy,
    /// Pages are mapped for each request and unmapped before its response. Grant copy for a disk whose transfers pin
    /// memory.
    Map,
    /// Pages are mapped once and stay mapped while the frontend reuses them. Grant copy if the frontend does not offer
    /// it.
    Persistent,
}

impl GrantMode {
    /// The configuration values, in the order of [`GrantMode::from_word`].
    pub const WORDS: &'static [&'static str] = &["auto", "copy", "map", "persistent"];

    /// Returns the mode of one of [`GrantMode::WORDS`].
    pub fn from_word(word: &str) -> GrantMode {
        match word {
            "copy" => GrantMode::Copy,
            "map" => GrantMode::Map,
            "persistent" => GrantMode::Persistent,
            _ => GrantMode::Auto,
        }
    }

    /// Returns the configuration value of this mode.
    pub const fn word(self) -> &'static str {
        match self {
            GrantMode::Auto => "auto",
            GrantMode::Copy => "copy",
            GrantMode::Map => "map",
            GrantMode::Persistent => "persistent",
        }
    }

    /// Returns true if a backend in this mode offers persistent grants to its frontend.
    pub const fn offers_persistent(self) -> bool {
        matches!(self, GrantMode::Auto | GrantMode::Persistent)
    }
}

/// The sharing of a pool of mapped pages and buffer pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolScope {
    /// Each ring has its own pool.
    #[default]
    PerRing,
    /// All rings of the device share one pool behind a lock, as in Linux before its rings were made independent. For
    /// comparison benchmarks only.
    Shared,
}

impl PoolScope {
    /// The configuration values, in the order of [`PoolScope::from_word`].
    pub const WORDS: &'static [&'static str] = &["per-ring", "shared"];

    /// Returns the scope of one of [`PoolScope::WORDS`].
    pub fn from_word(word: &str) -> PoolScope {
        if word == "shared" { PoolScope::Shared } else { PoolScope::PerRing }
    }

    /// Returns the configuration value of this scope.
    pub const fn word(self) -> &'static str {
        match self {
            PoolScope::PerRing => "per-ring",
            PoolScope::Shared => "shared",
        }
    }
}

/// Options of a device, as negotiated between its two ends.
#[derive(Clone, Debug)]
pub struct VbdOptions {
    /// Size and block sizes of the disk.
    pub geometry: Geometry,
    /// Capabilities and limits of the disk.
    pub limits: Limits,
    /// Layout of the frontend's requests.
    pub abi: Abi,
    /// Both ends support persistent grants.
    pub persistent: bool,
    /// Offered maximum of segments of an indirect request, at most [`MAX_INDIRECT_SEGMENTS`]; 0: not offered.
    pub max_indirect_segments: u16,
    /// Discard is offered.
    pub discard: bool,
    /// Secure discard is offered.
    pub discard_secure: bool,
    /// The barrier operation is offered.
    pub barrier: bool,
    /// The flush operation is offered.
    pub flush: bool,
    /// Every write is durable before its response.
    pub write_through: bool,
    /// Configured grant mode.
    pub mode: GrantMode,
    /// The host's kernel tolerates that a transfer pins a mapped grant: see [`Limits::pins_memory`].
    pub pages_may_be_pinned: bool,
    /// The sharing of a pool of pages.
    pub pool: PoolScope,
    /// Host-wide budget of mapped pages.
    pub budget: Arc<GrantBudget>,
    /// Maximum of persistent grants of a ring.
    pub persistent_max: u32,
    /// A persistent grant that is unused for this time is unmapped; zero: never.
    pub persistent_idle: Duration,
    /// Number of rings of the device.
    pub rings: u16,
}

/// Largest maximum of indirect segments that can be offered: the host's limit for one vectored transfer (UIO_MAXIOV).
pub const MAX_INDIRECT_SEGMENTS: u16 = 1024;

/// Default maximum of indirect segments: 1 MiB, as in Linux's xen-blkback.
pub const DEFAULT_INDIRECT_SEGMENTS: u16 = 256;

/// Default maximum of persistent grants of a ring: 32 requests of 33 pages, as in Linux (`max_persistent_grants`).
pub const DEFAULT_PERSISTENT_MAX: u32 = 1056;

/// Default time until an unused persistent grant is unmapped, as in Linux (`persistent_grant_unused_seconds`).
pub const DEFAULT_PERSISTENT_IDLE: Duration = Duration::from_secs(60);

/// The grant mode in effect: [`GrantMode`] combined with the frontend's features and the disk's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolvedGrantMode {
    /// The hypervisor copies data.
    Copy,
    /// Pages are mapped for each request.
    Map,
    /// Pages stay mapped.
    Persistent,
    /// Pages stay mapped; the disk transfers to and from buffer pages, and the backend copies data between these and
    /// the mapped pages.
    PersistentBounce,
}

impl ResolvedGrantMode {
    /// Returns true if pages stay mapped between requests.
    #[inline]
    pub const fn is_persistent(self) -> bool {
        matches!(self, ResolvedGrantMode::Persistent | ResolvedGrantMode::PersistentBounce)
    }

    /// Returns the name that is shown to users.
    pub const fn word(self) -> &'static str {
        match self {
            ResolvedGrantMode::Copy => GrantMode::Copy.word(),
            ResolvedGrantMode::Map => GrantMode::Map.word(),
            ResolvedGrantMode::Persistent => GrantMode::Persistent.word(),
            ResolvedGrantMode::PersistentBounce => "persistent, copied",
        }
    }
}

impl VbdOptions {
    /// Returns the grant mode in effect. Requests beyond the limits of mapped pages use grant copy.
    pub fn resolved_mode(&self) -> ResolvedGrantMode {
        let pins = self.limits.pins_memory;
        match self.mode {
            GrantMode::Auto | GrantMode::Persistent if self.persistent => {
                if pins && !self.pages_may_be_pinned {
                    ResolvedGrantMode::PersistentBounce
                } else {
                    ResolvedGrantMode::Persistent
                }
            }
            // The kernel unmaps a pinned page only after the response, and Linux's blkfront then disables the disk.
            GrantMode::Map if !pins => ResolvedGrantMode::Map,
            GrantMode::Auto | GrantMode::Copy | GrantMode::Map | GrantMode::Persistent => ResolvedGrantMode::Copy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_modes() {
        for word in GrantMode::WORDS {
            assert_eq!(GrantMode::from_word(word).word(), *word);
        }
        for word in PoolScope::WORDS {
            assert_eq!(PoolScope::from_word(word).word(), *word);
        }
    }
}
