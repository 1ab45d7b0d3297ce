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

use super::admin::Source;
use super::resize::GuestNotice;

/// The polling interval.
const EVERY: Duration = Duration::from_secs(1);
/// How long a stop waits for a size query that hangs, such as one to a network file system whose server is down.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A disk whose size is watched, with its id.
pub type Watched = (String, Arc<AnyDisk>);

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
    pub fn start(source: &Arc<Source>) -> std::io::Result<SizeWatch> {
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
        let _ = self.ended.recv_timeout(END_WITHIN);
    }
}

fn watch(source: &Weak<Source>, stopped: &Receiver<()>) {
    let mut seen = HashMap::new();
    while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        let Some(watched) = source.upgrade().map(|source| source.watched()) else { return };
        seen.retain(|id, _| watched.iter().any(|(other, _)| other == id));
        for (id, disk) in watched {
            // The query may take long: no reference to the source is held meanwhile.
            let now = disk.geometry().size;
            let Ok(found) = disk.found_size() else { continue };
            drop(disk);
            match judge(&mut seen, &id, now, found) {
                Verdict::Nothing => {}
                Verdict::Grown => {
                    let Some(source) = source.upgrade() else { return };
                    grow(&source, &id, found);
                }
                Verdict::Shrunk => {
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
struct Seen {
    found: ByteLen,
    /// True if the size was handled, with or without success.
    settled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Nothing,
    Grown,
    Shrunk,
}

/// Returns what to do about a size. Acts once for each size, and only when two polls in a row find it: a file that is being extended or
/// re-created is left alone.
fn judge(seen: &mut HashMap<String, Seen>, id: &str, now: ByteLen, found: ByteLen) -> Verdict {
    if found == now {
        seen.remove(id);
        return Verdict::Nothing;
    }
    match seen.get_mut(id) {
        Some(last) if last.found == found && last.settled => Verdict::Nothing,
        Some(last) if last.found == found => {
            last.settled = true;
            if found > now { Verdict::Grown } else { Verdict::Shrunk }
        }
        _ => {
            seen.insert(id.to_owned(), Seen { found, settled: false });
            Verdict::Nothing
        }
    }
}

fn grow(source: &Source, id: &str, found: ByteLen) {
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
        let mut at = |found: u64| judge(&mut seen, "a", ByteLen(10), ByteLen(found));
        for (found, want) in [
            (10, Verdict::Nothing),
            (11, Verdict::Nothing),
            (12, Verdict::Nothing),
            (12, Verdict::Grown),
            // Handled once, even if that failed.
            (12, Verdict::Nothing),
            (13, Verdict::Nothing),
            (13, Verdict::Grown),
            (9, Verdict::Nothing),
            (9, Verdict::Shrunk),
            (9, Verdict::Nothing),
            (10, Verdict::Nothing),
            (9, Verdict::Nothing),
            (9, Verdict::Shrunk),
        ] {
            assert_eq!(at(found), want, "{found}");
        }
    }
}
