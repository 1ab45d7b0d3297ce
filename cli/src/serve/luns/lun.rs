//! One LUN in the table, and what may be said of it.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use mqblk_core::DiskSlot;
use mqblk_core::settings::SettingError;

use crate::serve::config::{LunOrigin, LunPlace};
use crate::serve::controller::Unit;
use crate::serve::resolve::{Claim, ConfigError};

/// Why a LUN was not added, removed or resized.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// A value is wrong.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// It could not be done.
    #[error("{0}")]
    Failed(String),
}

impl From<ConfigError> for ChangeError {
    fn from(error: ConfigError) -> ChangeError {
        match error {
            ConfigError::Setting(error) => ChangeError::Setting(error),
            other => ChangeError::Failed(other.to_string()),
        }
    }
}

/// How far a LUN is.
#[derive(Clone, Debug)]
pub enum LunState {
    /// Its storage is being opened.
    Adding,
    /// Guests use it.
    Ready,
    /// No guest finds it any more; what they asked of it before is being ended.
    Removing(Arc<Going>),
}

/// How far a removal is.
#[derive(Debug, Default)]
pub struct Going {
    /// The requests have ended; the storage is being flushed.
    pub flushing: AtomicBool,
    /// It is gone; why what was written may be lost.
    pub done: OnceLock<Result<(), String>>,
}

impl LunState {
    /// The word that the admin socket says.
    pub fn word(&self) -> &'static str {
        match self {
            LunState::Adding => "adding",
            LunState::Ready => "ready",
            LunState::Removing(_) => "removing",
        }
    }
}

/// One LUN.
#[derive(Clone)]
pub struct Lun {
    /// Its name.
    pub id: String,
    /// The place of its controller in [`Luns::controllers`].
    pub controller: usize,
    /// Where it is.
    pub place: LunPlace,
    /// The engine's name for its disk, among the controller's.
    pub slot: DiskSlot,
    /// Where it is from.
    pub origin: LunOrigin,
    /// How far it is.
    pub state: LunState,
    /// What it leads to; `None` while that is being opened.
    pub unit: Option<Arc<Unit>>,
    /// What nobody else may have, besides what its unit has.
    pub(super) claims: Vec<Claim>,
    /// What it was added with while a daemon ran, besides its controller, id and place.
    pub(super) given: Option<BTreeMap<String, String>>,
}

impl Lun {
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, LunState::Ready)
    }

    pub(super) fn leads_to(&self, unit: &Unit) -> bool {
        self.unit.as_deref().is_some_and(|own| std::ptr::eq(own, unit))
    }
}

/// Which LUN is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one of this id.
    Id(String),
    /// The one at this place of the controller of this id.
    Place(String, LunPlace),
}

/// What became of a removal.
pub enum Removal {
    /// It is gone.
    Done(Lun),
    /// It goes when its storage has ended what guests asked of it, and is flushed.
    Waits(Lun, Arc<Going>),
}
