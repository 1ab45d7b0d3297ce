//! Sees by itself that the storage of a disk has another size than its guest's disk.
//!
//! By asking the host for each size every second, also of files: inotify would tell of a file's size by the same event as of each
//! write to it, so that every request of a guest would wake this thread.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mqblk_core::{ByteLen, Resize};
use mqblk_engine::AnyDisk;

use super::admin::Source;
use super::resize::GuestNotice;

/// How often.
const EVERY: Duration = Duration::from_secs(1);
/// How long an end waits for a host that does not say a size, such as a network file system without a network.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A disk whose size is watched, by its id.
pub type Watched = (String, Arc<AnyDisk>);

/// Watches until this is dropped.
pub struct SizeWatch {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl SizeWatch {
    /// Watches the disks of `source`.
    ///
    /// # Errors
    /// When the host refuses a thread.
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
        // It ends when the other end is dropped.
        let _ = self.ended.recv_timeout(END_WITHIN);
    }
}

fn watch(source: &Weak<Source>, stopped: &Receiver<()>) {
    let mut seen = HashMap::new();
    while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        let Some(watched) = source.upgrade().map(|source| source.watched()) else { return };
        seen.retain(|id, _| watched.iter().any(|(other, _)| other == id));
        for (id, disk) in watched {
            // The host may take its time: the source is not held meanwhile.
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

/// What was found when it was looked last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    found: ByteLen,
    /// What was to be done about it is done, or cannot be.
    settled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Nothing,
    Grown,
    Shrunk,
}

/// What is to be done about a size: once for each, and not before it was found twice, so that a file that is being written to its new
/// length, or made anew, is let be.
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
    fn each_size_is_dealt_with_once_and_not_while_it_changes() {
        let mut seen = HashMap::new();
        let mut at = |found: u64| judge(&mut seen, "a", ByteLen(10), ByteLen(found));
        for (found, want) in [
            (10, Verdict::Nothing),
            (11, Verdict::Nothing),
            (12, Verdict::Nothing),
            (12, Verdict::Grown),
            // It could not be done; it is not tried each second.
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
