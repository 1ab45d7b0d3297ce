//! Which PERSISTENT RESERVE OUTs were executed last: for a process that is killed between a command's execution and its answer. The next one
//! has the command executed again, and finds what it has changed itself: REGISTER with the old key, CLEAR, PREEMPT and REGISTER AND MOVE would
//! end with RESERVATION CONFLICT, which nobody who asked deserves.
//!
//! The list is kept in one piece with the state, so it names exactly the commands whose change is in it.

use std::collections::VecDeque;

use super::NexusName;
use super::transport_id::fnv1a;

/// How many are known. A nexus waits for the answer of one before it sends the next.
pub(super) const MOST: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Command {
    pub nexus: NexusName,
    /// Of the CDB and the parameter list.
    pub digest: u64,
    /// A process before this one executed it, and may not have answered it.
    pub earlier: bool,
}

/// The last ones, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Executed {
    pub commands: VecDeque<Command>,
}

/// What tells one command from another.
pub(super) fn digest(cdb: &[u8], list: &[u8]) -> u64 {
    // The length keeps the two apart.
    fnv1a(&[&cdb.len().to_le_bytes(), cdb, list].concat())
}

impl Executed {
    /// One was executed.
    pub fn add(&mut self, nexus: &NexusName, digest: u64) {
        if self.commands.len() >= MOST {
            self.commands.pop_front();
        }
        self.commands.push_back(Command { nexus: nexus.clone(), digest, earlier: false });
    }

    /// A command ends with a conflict: whether a process before this one executed it. Once for each, but it stays in the list, for a process
    /// after this one.
    pub fn was_earlier(&mut self, nexus: &NexusName, digest: u64) -> bool {
        let is = |command: &&mut Command| command.earlier && command.digest == digest && command.nexus == *nexus;
        self.commands.iter_mut().find(is).is_some_and(|command| std::mem::take(&mut command.earlier))
    }

    /// Whatever a process before this one left has been executed again, or never will be.
    pub fn forget_earlier(&mut self) {
        self.commands.iter_mut().for_each(|command| command.earlier = false);
    }
}
