//! RESERVE and RELEASE, PERSISTENT RESERVE IN and OUT, which `reservation` implements.

use std::sync::Arc;

use mqblk_core::Wake;

use crate::ask::{Ask, Begun};
use crate::sequence::{Kind, Relay, Sequence, Settle};
use crate::step::{Ending, Step};

pub(crate) fn reserve_or_release(cmd: &mut Ask<'_>) -> Begun {
    cmd.nexus.party().reserve_or_release(cmd.cdb.bytes())?;
    cmd.good()
}

pub(crate) fn persistent_in(cmd: &mut Ask<'_>) -> Begun {
    cmd.nexus.party().persistent_in(cmd.cdb.bytes(), &mut cmd.work.reply)?;
    cmd.reply(cmd.cdb.u16(7).into())
}

/// Executes the command. It completes when the new state is durable and the commands that it aborts have completed.
pub(crate) fn persistent_out(cmd: &mut Ask<'_>) -> Begun {
    let relay = Arc::<Relay>::default();
    let done: Arc<dyn Wake> = relay.clone();
    let accepted = cmd.nexus.party().persistent_out(cmd.cdb.bytes(), &cmd.data_out, &done)?;
    let tasks = accepted.abort.iter().filter_map(|name| cmd.unit.nexus(name)?.tasks());
    let aborted: Vec<_> = tasks.map(|tasks| tasks.abort(Arc::clone(&done))).collect();
    if accepted.kept.is_none() && aborted.is_empty() {
        return Ok(Step::End(Ending::good(accepted.transferred)));
    }
    let settle = Settle::new(relay, accepted.kept, aborted, accepted.transferred);
    Ok(Step::Sequence(Sequence::new(Kind::Settle(settle))))
}
