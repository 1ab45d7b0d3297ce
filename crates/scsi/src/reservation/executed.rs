//! The PERSISTENT RESERVE OUT commands that were executed last, for the case that a process is killed between a
//! command's execution and its completion. The next process replays the command, which then meets its own change:
//! REGISTER with the old key, CLEAR, PREEMPT and REGISTER AND MOVE would end with RESERVATION CONFLICT, although no
//! other nexus interfered.
//!
//! The list is stored together with the state, so it has exactly the commands whose changes the state has.

use std::collections::VecDeque;

use super::nexus_name::NexusName;
use super::transport_id::fnv1a;

/// Number of commands remembered. A nexus waits for the completion of one before it sends the next.
pub(super) const MAX_COMMANDS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExecutedCommand {
    pub nexus: NexusName,
    /// Digest of the CDB and the parameter list.
    pub digest: u64,
    /// True if a previous process executed it, and may not have completed it.
    pub by_previous_process: bool,
}

/// The last commands executed, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ExecutedCommands {
    pub commands: VecDeque<ExecutedCommand>,
}

/// Returns a digest that identifies a command.
pub(super) fn digest(cdb: &[u8], list: &[u8]) -> u64 {
    // The length separates the two.
    fnv1a(&[&cdb.len().to_le_bytes(), cdb, list].concat())
}

impl ExecutedCommands {
    /// Records an executed command.
    pub(super) fn add(&mut self, nexus: &NexusName, digest: u64) {
        if self.commands.len() >= MAX_COMMANDS {
            self.commands.pop_front();
        }
        self.commands.push_back(ExecutedCommand { nexus: nexus.clone(), digest, by_previous_process: false });
    }

    /// Returns true if a previous process executed this command, so that its conflict is with its own change. True
    /// once for each command, which stays in the list for the next process.
    pub(super) fn take_replayed(&mut self, nexus: &NexusName, digest: u64) -> bool {
        let is = |command: &&mut ExecutedCommand| {
            command.by_previous_process && command.digest == digest && command.nexus == *nexus
        };
        self.commands.iter_mut().find(is).is_some_and(|command| std::mem::take(&mut command.by_previous_process))
    }

    /// Ends the replay: commands of a previous process have been replayed, or will not be.
    pub(super) fn end_replay(&mut self) {
        self.commands.iter_mut().for_each(|command| command.by_previous_process = false);
    }
}
