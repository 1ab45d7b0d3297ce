//! RESERVE and RELEASE, PERSISTENT RESERVE IN and OUT, which `reservation` implements.

use std::sync::Arc;

use mqblk_core::Wake;

use crate::action::CommandAction;
use crate::command::CommandCompletion;
use crate::context::{BeginResult, CommandContext};
use crate::multi_step::{AwaitReserveOut, MultiStepCommand, MultiStepKind, RelayWaker};

pub(crate) fn reserve_or_release(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.nexus.reservation().reserve_or_release(cmd.cdb.bytes())?;
    cmd.good()
}

pub(crate) fn persistent_in(cmd: &mut CommandContext<'_>) -> BeginResult {
    cmd.nexus.reservation().persistent_in(cmd.cdb.bytes(), &mut cmd.buffers.data_in)?;
    cmd.end_with_data_in(cmd.cdb.u16(7).into())
}

/// Executes the command. It completes when the new state is durable and the commands that it aborts have completed.
pub(crate) fn persistent_out(cmd: &mut CommandContext<'_>) -> BeginResult {
    let relay = Arc::<RelayWaker>::default();
    let done: Arc<dyn Wake> = relay.clone();
    let accepted = cmd.nexus.reservation().persistent_out(cmd.cdb.bytes(), &cmd.data_out, &done)?;
    let tasks = accepted.abort.iter().filter_map(|name| cmd.unit.nexus(name)?.task_set());
    let aborted: Vec<_> = tasks.map(|tasks| tasks.abort(Arc::clone(&done))).collect();
    if accepted.saved.is_none() && aborted.is_empty() {
        return Ok(CommandAction::Complete(CommandCompletion::good(accepted.transferred)));
    }
    let settle = AwaitReserveOut::new(relay, accepted.saved, aborted, accepted.transferred);
    Ok(CommandAction::MultiStep(MultiStepCommand::new(MultiStepKind::PersistentReserveOut(settle))))
}
