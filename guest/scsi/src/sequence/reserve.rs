//! PERSISTENT RESERVE OUT between its execution and its completion.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use mqblk_core::Wake;

use super::Lent;
use crate::reservation::Ticket;
use crate::sense::Sense;
use crate::step::{Ending, Next};

/// Waker that forwards to another one, which is set later.
#[derive(Default)]
pub(crate) struct Relay {
    to: Mutex<Option<Arc<dyn Wake>>>,
}

impl Relay {
    fn connect(&self, to: &Arc<dyn Wake>) {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(to));
    }
}

impl Wake for Relay {
    fn wake(&self) {
        let to = self.to.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(to) = to {
            to.wake();
        }
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").finish_non_exhaustive()
    }
}

/// Waits until the new state is durable and the aborted commands have completed.
#[derive(Debug)]
pub(crate) struct Settle {
    relay: Arc<Relay>,
    kept: Option<Arc<Ticket>>,
    aborted: Vec<Arc<Ticket>>,
    transferred: u64,
}

impl Settle {
    pub(crate) fn new(
        relay: Arc<Relay>,
        saved: Option<Arc<Ticket>>,
        aborted: Vec<Arc<Ticket>>,
        transferred: u64,
    ) -> Settle {
        Settle { relay, kept: saved, aborted, transferred }
    }

    pub(super) fn next(&mut self, context: &Lent<'_>) -> Next {
        // Connected first, so that no wakeup is missed after the check below.
        self.relay.connect(context.waker);
        let results: Option<Vec<_>> = self.kept.iter().chain(&self.aborted).map(|ticket| ticket.result()).collect();
        match results {
            None => Next::Wait,
            Some(results) if results.iter().any(Result::is_err) => Next::End(Ending::check(Sense::INTERNAL)),
            Some(_) => Next::End(Ending::good(self.transferred)),
        }
    }
}
