//! The table entry of a LUN, and the results of changing one.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use mqblk_core::DiskSlot;

use super::super::config::{LunOrigin, TargetLun};
use super::super::controller::{Controller, ServedUnit};
use crate::names::Claim;

/// The state of a LUN.
#[derive(Clone, Debug)]
pub(crate) enum LunState {
    /// Its storage is being opened.
    Adding,
    /// Guests use it.
    Ready,
    /// Guests no longer see it; requests in flight are completing.
    Removing(Arc<RemovalProgress>),
}

/// The progress of a removal.
#[derive(Debug, Default)]
pub(crate) struct RemovalProgress {
    /// True when all requests have completed and the storage is being flushed.
    pub flushing: AtomicBool,
    /// Set when the LUN is removed. An error says why written data may be lost.
    pub done: OnceLock<Result<(), String>>,
}

impl LunState {
    /// Returns the word that the admin socket reports.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            LunState::Adding => "adding",
            LunState::Ready => "ready",
            LunState::Removing(_) => "removing",
        }
    }
}

/// The table entry of a LUN.
#[derive(Clone)]
pub(crate) struct LunEntry {
    pub id: String,
    pub controller: Arc<Controller>,
    pub address: TargetLun,
    /// The engine's slot of its disk, unique for the controller.
    pub slot: DiskSlot,
    pub origin: LunOrigin,
    pub state: LunState,
    /// Its logical unit; `None` while that is being opened.
    pub unit: Option<Arc<ServedUnit>>,
    /// Its claims, without those of its logical unit.
    pub(super) claims: Vec<Claim>,
    /// The settings that it was added with at run time, without its controller, id and address.
    pub(super) added_settings: Option<BTreeMap<String, String>>,
}

impl LunEntry {
    /// Returns true if guests use it.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.state, LunState::Ready)
    }

    /// Returns true if it has this controller.
    pub(super) fn is_of(&self, controller: &Controller) -> bool {
        std::ptr::eq(&*self.controller, controller)
    }

    pub(super) fn maps(&self, unit: &ServedUnit) -> bool {
        self.unit.as_deref().is_some_and(|own| std::ptr::eq(own, unit))
    }
}

/// Selects a LUN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LunSelector {
    Id(String),
    /// By the id of its controller and its address.
    Address(String, TargetLun),
}

/// The result of a removal.
pub(crate) enum Removal {
    /// The LUN is removed.
    Done(LunEntry),
    /// The removal continues until all requests have completed and the storage is flushed.
    Pending(LunEntry, Arc<RemovalProgress>),
}
