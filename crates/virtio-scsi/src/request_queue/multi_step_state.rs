//! The multi-step commands that a request queue has in flight.

use std::collections::{HashMap, VecDeque};
use std::io;

use mqblk_core::ByteLen;
use mqblk_memory::{BouncePool, Buffer, BufferPool};
use mqblk_scsi::{MultiStepCommand, NextStep};

use crate::token::CommandState;

/// Steps with private memory that one queue has in flight; further ones wait. Multi-step commands are rare, and each
/// has at most one such step.
const MAX_BOUNCE_STEPS: u32 = 4;

/// State of a multi-step command.
#[derive(Debug)]
pub(crate) struct MultiStepState {
    pub(super) command: Box<MultiStepCommand>,
    /// The command's own data; `None` while a step uses it.
    pub(super) data: Option<Buffer>,
    /// Length of the data-out buffer.
    pub(super) data_out: u64,
    /// Private memory of the step in flight.
    pub(super) bounce: Option<BounceSlot>,
}

/// Private memory of a step in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct BounceSlot {
    pub(super) slot: u32,
    /// Length of a read into it.
    pub(super) reads: Option<ByteLen>,
}

/// A blocked command, between two steps.
pub(super) struct BlockedCommand {
    pub(super) token: CommandState,
    /// The step that found no private memory, with its bytes to write; `None`: the command itself waits.
    pub(super) step: Option<(NextStep, Vec<u8>)>,
}

/// Multi-step commands of a queue. Nothing is allocated before the first.
#[derive(Default)]
pub(crate) struct MultiStepCommands {
    /// Scratch memory lent to a step.
    pub(super) scratch: Vec<u8>,
    pub(super) bounce_pool: Option<BouncePool>,
    /// States of the commands in flight, by the heads of their chains. Not in their tokens, which would grow for all
    /// commands.
    pub(super) states: HashMap<u16, MultiStepState>,
    pub(super) blocked: VecDeque<BlockedCommand>,
    /// Commands that have ended, with their range locks, until their responses are visible: see [`end`](Self::end).
    pub(super) ended: Vec<MultiStepCommand>,
}

impl MultiStepCommands {
    /// Ends a command and releases its data. The range lock is kept until its response is [visible](Self::published): a
    /// command that saw this one's data and completed first would be undone if the process died and this one was
    /// replayed.
    pub(super) fn end(&mut self, pool: &mut BufferPool, token: &mut CommandState) {
        let Some(MultiStepState { command, data, .. }) = self.take_state(token) else { return };
        if let Some(data) = data {
            pool.release(data);
        }
        self.ended.push(*command);
    }

    /// Returns the state of a multi-step command.
    pub(super) fn state(&mut self, token: &CommandState) -> Option<&mut MultiStepState> {
        if token.is_multi_step { self.states.get_mut(&token.head) } else { None }
    }

    pub(super) fn take_state(&mut self, token: &mut CommandState) -> Option<MultiStepState> {
        if std::mem::take(&mut token.is_multi_step) { self.states.remove(&token.head) } else { None }
    }

    pub(super) fn is_before_range_lock(&mut self, token: &CommandState) -> bool {
        self.state(token).is_some_and(|state| state.command.is_before_range_lock())
    }

    /// Releases ended commands, when all responses so far are visible.
    #[inline]
    pub(crate) fn published(&mut self) {
        if !self.ended.is_empty() {
            self.ended.clear();
        }
    }

    /// Returns the number of blocked commands.
    pub(crate) fn blocked_count(&self) -> usize {
        self.blocked.len()
    }

    /// Returns the tokens of blocked commands.
    pub(crate) fn blocked_tokens(&self) -> impl Iterator<Item = &CommandState> {
        self.blocked.iter().map(|held| &held.token)
    }

    /// Removes blocked commands that match; the caller completes them.
    pub(crate) fn take_blocked(
        &mut self,
        pool: &mut BufferPool,
        matches: impl Fn(&CommandState) -> bool,
    ) -> Vec<CommandState> {
        let mut taken = Vec::new();
        for at in (0..self.blocked.len()).rev() {
            if matches(&self.blocked[at].token)
                && let Some(BlockedCommand { mut token, .. }) = self.blocked.remove(at)
            {
                self.end(pool, &mut token);
                taken.push(token);
            }
        }
        taken
    }

    /// Releases the private memory, which belongs to the worker's pool. No step is in flight.
    pub(crate) fn release_memory(&mut self, pool: &mut BufferPool) {
        if let Some(bounce) = self.bounce_pool.take() {
            bounce.close(pool);
        }
    }

    /// Returns a buffer of private memory, or `None` if all are in use.
    pub(super) fn take_bounce(&mut self, pool: &mut BufferPool, len: ByteLen) -> io::Result<Option<(Buffer, u32)>> {
        let bounce = match self.bounce_pool.take() {
            Some(bounce) => bounce,
            None => BouncePool::new(pool, MAX_BOUNCE_STEPS, ByteLen(MultiStepCommand::SCRATCH as u64))?,
        };
        Ok(self.bounce_pool.insert(bounce).take(pool, len))
    }
}
