//! RESERVE and RELEASE, PERSISTENT RESERVE IN and OUT: how `reservation` is reached.

use std::sync::Arc;

use mqblk_core::Wake;

use crate::ask::{Ask, Begun};
use crate::sequence::{Kind, Relay, Sequence, Settle};
use crate::step::{Ending, Step};

pub(crate) fn reserve_or_release(ask: &mut Ask<'_>) -> Begun {
    ask.nexus.party().reserve_or_release(ask.cdb.bytes())?;
    ask.good()
}

pub(crate) fn persistent_in(ask: &mut Ask<'_>) -> Begun {
    ask.nexus.party().persistent_in(ask.cdb.bytes(), &mut ask.work.reply)?;
    ask.reply(ask.cdb.u16(7).into())
}

/// Executed now; it is answered when the new state is kept and the commands that it aborts have ended.
pub(crate) fn persistent_out(ask: &mut Ask<'_>) -> Begun {
    let relay = Arc::<Relay>::default();
    let done: Arc<dyn Wake> = relay.clone();
    let accepted = ask.nexus.party().persistent_out(ask.cdb.bytes(), &ask.data_out, &done)?;
    let tasks = accepted.abort.iter().filter_map(|name| ask.unit.nexus(name)?.tasks());
    let aborted: Vec<_> = tasks.map(|tasks| tasks.abort(Arc::clone(&done))).collect();
    if accepted.kept.is_none() && aborted.is_empty() {
        return Ok(Step::End(Ending::good(accepted.transferred)));
    }
    let settle = Settle::new(relay, accepted.kept, aborted, accepted.transferred);
    Ok(Step::Sequence(Sequence::new(Kind::Settle(settle))))
}
