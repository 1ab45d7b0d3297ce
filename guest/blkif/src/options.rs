//! What is chosen for a device: by its user, and by what both ends offered each other.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::{Geometry, Limits};
use mqblk_ring::blkif::Abi;

use crate::budget::GrantBudget;

/// How a ring gets at its frontend's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GrantMode {
    /// Persistent grants where both ends offer them, else copies.
    #[default]
    Auto,
    /// The hypervisor copies data to and from pages of our own.
    Copy,
    /// Pages are mapped for each request and let go before it is answered. For a disk whose transfers pin memory: copies.
    Map,
    /// Pages are mapped once and stay mapped while the frontend uses them again. Where the frontend does not offer it: copies.
    Persistent,
}

impl GrantMode {
    /// The words that a user writes, in the order of [`GrantMode::from_word`].
    pub const WORDS: &'static [&'static str] = &["auto", "copy", "map", "persistent"];

    /// The mode of one of [`GrantMode::WORDS`].
    pub fn from_word(word: &str) -> GrantMode {
        match word {
            "copy" => GrantMode::Copy,
            "map" => GrantMode::Map,
            "persistent" => GrantMode::Persistent,
            _ => GrantMode::Auto,
        }
    }

    /// The word that a user writes for this mode.
    pub const fn word(self) -> &'static str {
        match self {
            GrantMode::Auto => "auto",
            GrantMode::Copy => "copy",
            GrantMode::Map => "map",
            GrantMode::Persistent => "persistent",
        }
    }

    /// Whether a back-end with this mode offers persistent grants to its frontend.
    pub const fn offers_persistent(self) -> bool {
        matches!(self, GrantMode::Auto | GrantMode::Persistent)
    }
}

/// Whose the mapped pages and the buffer pages are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolOwner {
    /// Each ring has its own.
    #[default]
    PerRing,
    /// All rings of the device have them together, behind a lock: what Linux had before its rings were made independent. Only to
    /// measure against.
    Shared,
}

impl PoolOwner {
    /// The words that a user writes, in the order of [`PoolOwner::from_word`].
    pub const WORDS: &'static [&'static str] = &["per-ring", "shared"];

    /// The owner of one of [`PoolOwner::WORDS`].
    pub fn from_word(word: &str) -> PoolOwner {
        if word == "shared" { PoolOwner::Shared } else { PoolOwner::PerRing }
    }

    /// The word that a user writes for it.
    pub const fn word(self) -> &'static str {
        match self {
            PoolOwner::PerRing => "per-ring",
            PoolOwner::Shared => "shared",
        }
    }
}

/// A device as its two ends agreed on it.
#[derive(Clone, Debug)]
pub struct VbdOptions {
    /// What the disk looks like.
    pub geometry: Geometry,
    /// What it can do.
    pub limits: Limits,
    /// The frontend's layout.
    pub abi: Abi,
    /// Both ends offered persistent grants.
    pub persistent: bool,
    /// Most segments of an indirect request, as offered; 0: none are. At most [`MAX_INDIRECT_SEGMENTS`].
    pub max_indirect_segments: u16,
    /// Discard was offered.
    pub discard: bool,
    /// Secure discard was offered.
    pub discard_secure: bool,
    /// The barrier operation was offered.
    pub barrier: bool,
    /// The flush operation was offered.
    pub flush: bool,
    /// Every write is durable before it is answered.
    pub write_through: bool,
    /// How pages are reached.
    pub mode: GrantMode,
    /// The host's kernel can do without us while a page that we have mapped is pinned: [`Limits::pins_memory`].
    pub pages_may_be_pinned: bool,
    /// Whose they are.
    pub pool: PoolOwner,
    /// How many pages this host may map.
    pub budget: Arc<GrantBudget>,
    /// Most pages that a ring keeps mapped.
    pub persistent_max: u32,
    /// A page that was not used for so long is let go; zero: never.
    pub persistent_idle: Duration,
    /// Rings of the device.
    pub rings: u16,
}

/// Most segments of an indirect request that can be offered: what one vectored transfer of the host takes (UIO_MAXIOV).
pub const MAX_INDIRECT_SEGMENTS: u16 = 1024;

/// Segments of an indirect request that are offered without choice: 1 MiB, as Linux's blkback does.
pub const DEFAULT_INDIRECT_SEGMENTS: u16 = 256;

/// Pages that a ring keeps mapped, without choice: 32 requests of 33 pages, as in Linux (`max_persistent_grants`).
pub const DEFAULT_PERSISTENT_MAX: u32 = 1056;

/// When an unused page is let go, without choice: as in Linux (`persistent_grant_unused_seconds`).
pub const DEFAULT_PERSISTENT_IDLE: Duration = Duration::from_secs(60);

/// How pages are reached, when all is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Copied by the hypervisor.
    Copy,
    /// Mapped for each request.
    Map,
    /// Mapped once, and kept.
    Persistent,
    /// The same, but the disk's transfers go from and to pages of our own; data is copied between those and the mapped ones.
    PersistentCopy,
}

impl Mode {
    /// Whether pages stay mapped.
    #[inline]
    pub const fn keeps_pages(self) -> bool {
        matches!(self, Mode::Persistent | Mode::PersistentCopy)
    }

    /// What a user is told of it.
    pub const fn word(self) -> &'static str {
        match self {
            Mode::Copy => GrantMode::Copy.word(),
            Mode::Map => GrantMode::Map.word(),
            Mode::Persistent => GrantMode::Persistent.word(),
            Mode::PersistentCopy => "persistent, copied",
        }
    }
}

impl VbdOptions {
    /// How the device's pages are reached, where there is room.
    pub fn resolved_mode(&self) -> Mode {
        let pins = self.limits.pins_memory;
        match self.mode {
            GrantMode::Auto | GrantMode::Persistent if self.persistent => {
                if pins && !self.pages_may_be_pinned {
                    Mode::PersistentCopy
                } else {
                    Mode::Persistent
                }
            }
            // A page that is still pinned is unmapped later, after the answer, and Linux's blkfront gives a disk up for that.
            GrantMode::Map if !pins => Mode::Map,
            GrantMode::Auto | GrantMode::Copy | GrantMode::Map | GrantMode::Persistent => Mode::Copy,
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
        for word in PoolOwner::WORDS {
            assert_eq!(PoolOwner::from_word(word).word(), *word);
        }
    }
}
