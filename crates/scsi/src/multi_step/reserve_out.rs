//! PERSISTENT RESERVE OUT between its execution and its completion.

use std::fmt;
use std::sync::{Arc, Mutex};

use mqblk_core::Wake;
use mqblk_core::lock::lock;

use super::step::StepContext;
use crate::command::{CommandCompletion, NextStep};
use crate::reservation::Ticket;
use crate::sense::Sense;

/// Waker that forwards to another one, which is set later.
#[derive(Default)]
pub(crate) struct RelayWaker {
    target: Mutex<Option<Arc<dyn Wake>>>,
}

impl RelayWaker {
    fn connect(&self, to: &Arc<dyn Wake>) {
        *lock(&self.target) = Some(Arc::clone(to));
    }
}

impl Wake for RelayWaker {
    fn wake(&self) {
        let to = lock(&self.target).clone();
        if let Some(to) = to {
            to.wake();
        }
    }
}

impl fmt::Debug for RelayWaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").finish_non_exhaustive()
    }
}

/// Waits until the new state is durable and the aborted commands have completed.
#[derive(Debug)]
pub(crate) struct AwaitReserveOut {
    relay: Arc<RelayWaker>,
    saved: Option<Arc<Ticket>>,
    aborted: Vec<Arc<Ticket>>,
    transferred: u64,
}

impl AwaitReserveOut {
    pub(crate) fn new(
        relay: Arc<RelayWaker>,
        saved: Option<Arc<Ticket>>,
        aborted: Vec<Arc<Ticket>>,
        transferred: u64,
    ) -> AwaitReserveOut {
        AwaitReserveOut { relay, saved, aborted, transferred }
    }

    pub(super) fn next(&mut self, context: &StepContext<'_>) -> NextStep {
        // Connected first, so that no wakeup is missed after the check below.
        self.relay.connect(context.waker);
        let results: Option<Vec<_>> = self.saved.iter().chain(&self.aborted).map(|ticket| ticket.result()).collect();
        match results {
            None => NextStep::Wait,
            Some(results) if results.iter().any(Result::is_err) => {
                NextStep::Complete(CommandCompletion::check_condition(Sense::INTERNAL_TARGET_FAILURE))
            }
            Some(_) => NextStep::Complete(CommandCompletion::good(self.transferred)),
        }
    }
}
