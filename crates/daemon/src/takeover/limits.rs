//! The used tokens of guests' limits are handed over, so that a takeover gives no new burst and cancels no debt.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use mqblk_engine::{DiskHealth, UsedTokens};
use serde::{Deserialize, Serialize};

use crate::state::DaemonState;

/// The tokens in a message, in the order of [`UsedTokens`].
type SentTokens = [[u64; 2]; 6];

/// The used tokens, by the ids of disks and LUNs and the names of groups. Those with nothing used are absent.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UsedLimits {
    disks: BTreeMap<String, SentTokens>,
    groups: BTreeMap<String, SentTokens>,
}

impl UsedLimits {
    /// Returns the used tokens of this process' limits, after its queues are drained.
    pub(super) fn of(state: &DaemonState) -> UsedLimits {
        let used = |(name, UsedTokens(tokens)): (String, UsedTokens)| {
            tokens.iter().flatten().any(|tokens| *tokens > 0).then_some((name, tokens))
        };
        let disks = limited_disks(state).into_iter().map(|(id, health)| (id, health.limits().used()));
        let groups = state.limit_groups().iter().map(|group| (group.name().to_owned(), group.used()));
        UsedLimits { disks: disks.filter_map(used).collect(), groups: groups.filter_map(used).collect() }
    }

    /// Charges them to the limits of this process. Each is bounded by its capacity and a debt of ten seconds.
    pub(super) fn charge(&self, state: &DaemonState) {
        for (id, health) in limited_disks(state) {
            if let Some(tokens) = self.disks.get(&id) {
                health.limits().charge(&UsedTokens(*tokens));
            }
        }
        for group in state.limit_groups().iter() {
            if let Some(tokens) = self.groups.get(group.name()) {
                group.charge(&UsedTokens(*tokens));
            }
        }
    }
}

/// Returns disks and LUNs with their ids. A unit of several controllers has one set of limits, and is listed once.
fn limited_disks(state: &DaemonState) -> Vec<(String, Arc<DiskHealth>)> {
    let mut seen = HashSet::new();
    let exports = state.exports();
    let disks = exports.iter().filter_map(|export| Some((export.id.clone(), export.health.clone()?)));
    disks.filter(|(_, health)| seen.insert(Arc::as_ptr(health))).collect()
}
