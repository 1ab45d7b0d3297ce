//! The keys of a device's queues: their workers, polling and calls.

use std::sync::Arc;
use std::time::Duration;

use mqblk_core::settings::{SettingError, Settings};
use mqblk_engine::{QueueMove, QueueSettings};

use super::target::{Apply, LiveTarget, describe};
use crate::change::ChangeError;
use crate::exclusive::VerbScope;
use crate::interface::ServedDevice;
use crate::pair::Pair;
use crate::queues::{QUEUE_MAP, current_map_pair, policy_pairs, take_policy, take_queue_map, workers_of};
use crate::saved_changes::Keeping;
use crate::state::DaemonState;

/// Longest time for a queue's requests in flight while it moves. The guest waits for the move.
const MOVE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn prepare_polling(
    _state: &DaemonState,
    target: &LiveTarget,
    settings: &mut Settings,
) -> Result<Option<Apply>, ChangeError> {
    let Some(before) = target.queues().and_then(|device| device.queue_settings()) else { return Ok(None) };
    let policy = take_policy(settings, before.policy)?;
    if policy == before.policy {
        return Ok(None);
    }
    let (device, subject) = (Arc::clone(&target.device), target.subject());
    Ok(Some(Box::new(move |_| {
        tracing::info!("{subject}: {}", describe(&policy_pairs(policy)));
        device.set_policy(policy).map_err(|why| ChangeError::Failed(format!("{subject}: {why}")))
    })))
}

fn current(target: &LiveTarget) -> Option<QueueSettings> {
    target.queues().and_then(|device| device.queue_settings())
}

pub(super) fn current_polling(target: &LiveTarget) -> Vec<Pair> {
    current(target).into_iter().flat_map(|queues| policy_pairs(queues.policy)).collect()
}

pub(super) fn current_map(target: &LiveTarget) -> Vec<Pair> {
    current(target).iter().map(current_map_pair).collect()
}

pub(super) fn prepare_map(
    state: &DaemonState,
    target: &LiveTarget,
    settings: &mut Settings,
) -> Result<Option<Apply>, ChangeError> {
    let Some(before) = target.queues().and_then(|device| device.queue_settings()) else { return Ok(None) };
    let text = settings.peek(&QUEUE_MAP).unwrap_or_default().to_owned();
    let workers = state.engine().workers() as u16;
    let Some(map) = take_queue_map(settings, before.map.len() as u16, workers)? else { return Ok(None) };
    let moves: Vec<(u16, u16)> = (0..)
        .zip(map.iter().zip(&before.map))
        .filter(|(_, (to, from))| usize::from(**to) != **from)
        .map(|(queue, (to, _))| (queue, *to))
        .collect();
    if !moves.is_empty()
        && let Some(export) = target.device.exports().iter().find(|export| export.has_one_channel())
    {
        return Err(one_channel(settings, &text, &export.id).into());
    }
    let (device, subject) = (Arc::clone(&target.device), target.subject());
    Ok(Some(Box::new(move |state| {
        if moves.is_empty() {
            return Ok(());
        }
        move_queues(state, device.as_ref(), &moves).map_err(|why| ChangeError::Failed(format!("{subject}: {why}")))
    })))
}

fn one_channel(settings: &Settings, text: &str, disk: &str) -> SettingError {
    let expected = format!(
        "the workers of now: the storage of {disk:?} serves one connection at a time, which cannot move; remove the disk and add it with another \
         queue-map"
    );
    settings.error(&QUEUE_MAP, format!("{text:?}"), expected)
}

/// Moves queues, each to a worker. The error names the queues that did not move; the others have moved.
pub(super) fn move_queues(state: &DaemonState, device: &dyn ServedDevice, moves: &[(u16, u16)]) -> Result<(), String> {
    let current = || -> Vec<u16> {
        let map = device.queue_settings().map(|queues| queues.map).unwrap_or_default();
        map.into_iter().map(|worker| worker as u16).collect()
    };
    let before = current();
    let (mut busy, mut failed) = (Vec::new(), Vec::new());
    for (queue, worker) in moves {
        match device.move_queue(*queue, usize::from(*worker), MOVE_TIMEOUT) {
            Ok(QueueMove::Moved | QueueMove::AtStart) => {}
            Ok(QueueMove::Busy) => busy.push(queue.to_string()),
            Err(why) => failed.push(why),
        }
    }
    let after = current();
    {
        let mut placement = state.placement();
        placement.remove(&before);
        placement.place(&after);
    }
    let map: Vec<Pair> = device.queue_settings().iter().map(current_map_pair).collect();
    tracing::info!(device = device.id(), "{}", describe(&map));
    if !busy.is_empty() {
        failed.push(format!(
            "queues that stay where they are: {}: their requests in flight took longer than {} s (a stopped disk is resumed first, a limit may hold them back); try again",
            busy.join(", "),
            MOVE_TIMEOUT.as_secs()
        ));
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// Result of moving a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MovedQueue {
    /// Another worker serves it now.
    Moved,
    /// Nobody uses it: it starts at that worker.
    AtStart,
}

impl DaemonState {
    /// Moves one queue of a disk or controller to a worker.
    ///
    /// # Errors
    /// If there is no such queue or worker, or it cannot move.
    pub fn move_queue(&self, target: &LiveTarget, queue: u64, worker: u64) -> Result<MovedQueue, ChangeError> {
        let _alone = self.change_alone(VerbScope::Target(target.id.clone()), "queue.move")?;
        let failed = |why: String| ChangeError::Failed(format!("{}: {why}", target.subject()));
        let settings = Settings::new(target.subject());
        let device = target.queues().ok_or_else(|| failed("its queues are its controller's".to_owned()))?;
        let queues = device.queue_settings().ok_or_else(|| failed(crate::interface::FIXED_QUEUES.to_owned()))?;
        let in_range = |key: &str, number: u64, count: usize| {
            let valid = usize::try_from(number).ok().filter(|number| *number < count);
            valid.ok_or_else(|| settings.error(key, number.to_string(), format!("from 0 to {}", count - 1)))
        };
        let queue = in_range("queue", queue, queues.map.len())? as u16;
        let worker = in_range("worker", worker, self.engine().workers())?;
        let others = queues.map.iter().any(|of_queue| *of_queue != worker);
        if let Some(export) = device.exports().iter().find(|export| export.has_one_channel() && others) {
            return Err(SettingError {
                key: "worker".to_owned(),
                ..one_channel(&settings, &worker.to_string(), &export.id)
            }
            .into());
        }
        let moved = device.move_queue(queue, worker, MOVE_TIMEOUT).map_err(&failed)?;
        let before = workers_of(&queues);
        let moved = match moved {
            QueueMove::Moved => MovedQueue::Moved,
            QueueMove::AtStart => MovedQueue::AtStart,
            QueueMove::Busy => {
                let seconds = MOVE_TIMEOUT.as_secs();
                let why =
                    "(a stopped disk is resumed first, a limit may hold them back); it stays where it is; try again";
                return Err(failed(format!(
                    "queue {queue}: its requests in flight took longer than {seconds} s {why}"
                )));
            }
        };
        let mut after = before.clone();
        after[usize::from(queue)] = worker as u16;
        {
            let mut placement = self.placement();
            placement.remove(&before);
            placement.place(&after);
        }
        tracing::info!(device = device.id(), queue, worker, "queue moved");
        self.keep_live(target, &[QUEUE_MAP.name.to_owned()], Keeping::Record);
        Ok(moved)
    }
}
