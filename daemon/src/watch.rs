//! Detects that the storage of a disk has another size than the guest's disk.
//!
//! Polls the size of each storage every second, also of files: inotify reports a new file size by the same event as a write, so that
//! each write of a guest would wake this thread.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mqblk_core::{ByteLen, Resize};
use mqblk_engine::AnyDisk;

use crate::resize::GuestNotice;
use crate::state::DaemonState;

/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long a stop waits for a size query that hangs, such as one to a network file system whose server is down.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A disk whose size is watched, with its id.
pub type WatchedDisk = (String, Arc<AnyDisk>);

/// The size watch thread. Dropping this stops it.
pub struct SizeWatch {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl SizeWatch {
    /// Starts to watch the disks of `source`.
    ///
    /// # Errors
    /// If the thread cannot be created.
    pub fn start(source: &Arc<DaemonState>) -> std::io::Result<SizeWatch> {
        let (stop, stopped) = channel::<()>();
        let (ending, ended) = channel();
        let source = Arc::downgrade(source);
        std::thread::Builder::new().name("size-watch".into()).spawn(move || {
            let _ending: Sender<()> = ending;
            watch(&source, &stopped);
        })?;
        Ok(SizeWatch { stop: Some(stop), ended })
    }
}

impl Drop for SizeWatch {
    fn drop(&mut self) {
        self.stop = None;
        // The thread drops the sender when it ends.
        let _ = self.ended.recv_timeout(STOP_TIMEOUT);
    }
}

fn watch(source: &Weak<DaemonState>, stopped: &Receiver<()>) {
    let mut seen = HashMap::new();
    while stopped.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(watched) = source.upgrade().map(|source| source.watched_disks()) else { return };
        seen.retain(|id, _| watched.iter().any(|(other, _)| other == id));
        for (id, disk) in watched {
            // The query may take long: no reference to the source is held meanwhile.
            let now = disk.geometry().size;
            let Ok(found) = disk.found_size() else { continue };
            drop(disk);
            match check_size(&mut seen, &id, now, found) {
                SizeEvent::Nothing => {}
                SizeEvent::Grown => {
                    let Some(source) = source.upgrade() else { return };
                    grow(&source, &id, found);
                }
                SizeEvent::Shrunk => {
                    tracing::warn!(
                        disk = id,
                        found = %found,
                        expected = %now,
                        "the storage has become smaller than the guest's disk: requests past its end fail; make it as large \
                         again (truncate -s, lvextend), or have the guest see it by mqblk resize {id} --shrink"
                    );
                }
            }
        }
    }
}

/// The size found by the last poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ObservedSize {
    found: ByteLen,
    /// True if the size was handled, with or without success.
    handled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SizeEvent {
    Nothing,
    Grown,
    Shrunk,
}

/// Returns what to do about a size. Acts once for each size, and only when two polls in a row find it: a file that is being extended or
/// re-created is left alone.
fn check_size(seen: &mut HashMap<String, ObservedSize>, id: &str, now: ByteLen, found: ByteLen) -> SizeEvent {
    if found == now {
        seen.remove(id);
        return SizeEvent::Nothing;
    }
    match seen.get_mut(id) {
        Some(last) if last.found == found && last.handled => SizeEvent::Nothing,
        Some(last) if last.found == found => {
            last.handled = true;
            if found > now { SizeEvent::Grown } else { SizeEvent::Shrunk }
        }
        _ => {
            seen.insert(id.to_owned(), ObservedSize { found, handled: false });
            SizeEvent::Nothing
        }
    }
}

fn grow(source: &DaemonState, id: &str, found: ByteLen) {
    match source.resize(id, Resize::GROW) {
        Ok(changed) if changed.guest == GuestNotice::Unanswered => {
            tracing::warn!(disk = id, size = %found, "the storage has grown, and the VMM did not say that the guest knows");
        }
        Ok(changed) => {
            tracing::debug!(disk = id, size = %changed.resized.size, guest = changed.guest.word(), "the storage has grown");
        }
        Err(error) => tracing::warn!(disk = id, "the storage has grown, and the guest's disk cannot: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stable_size_is_handled_once() {
        let mut seen = HashMap::new();
        let mut at = |found: u64| check_size(&mut seen, "a", ByteLen(10), ByteLen(found));
        for (found, want) in [
            (10, SizeEvent::Nothing),
            (11, SizeEvent::Nothing),
            (12, SizeEvent::Nothing),
            (12, SizeEvent::Grown),
            // Handled once, even if that failed.
            (12, SizeEvent::Nothing),
            (13, SizeEvent::Nothing),
            (13, SizeEvent::Grown),
            (9, SizeEvent::Nothing),
            (9, SizeEvent::Shrunk),
            (9, SizeEvent::Nothing),
            (10, SizeEvent::Nothing),
            (9, SizeEvent::Nothing),
            (9, SizeEvent::Shrunk),
        ] {
            assert_eq!(at(found), want, "{found}");
        }
    }
}
