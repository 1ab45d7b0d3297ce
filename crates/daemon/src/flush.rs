//! The final flush of all disks, and closing them.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mqblk_core::lock::{RankedMutex, assert_may_wait};
use mqblk_core::thread::spawn;
use mqblk_engine::AnyDisk;

/// Number of flush threads started at first, and again after each [`STALL`] in which no disk is finished: so thousands
/// of disks do not take thousands of threads, and storage that hangs does not hold up the others.
const THREADS: usize = 32;
const STALL: Duration = Duration::from_millis(50);

/// Number of disks that a message names.
const NAMED: usize = 16;

/// The result of a disk's flush, with the disk's number.
type Flushed = (usize, io::Result<()>);

/// The disks that no thread has taken yet.
struct Queue(RankedMutex<std::vec::IntoIter<(usize, Arc<AnyDisk>)>>);

impl Queue {
    fn next(&self) -> Option<(usize, Arc<AnyDisk>)> {
        self.0.lock().next()
    }

    fn is_empty(&self) -> bool {
        self.0.lock().as_slice().is_empty()
    }

    /// Flushes and closes disks until none is left. Sending fails after the timeout, when the receiver is dropped.
    fn flush(&self, results: &Sender<Flushed>) {
        while let Some((number, disk)) = self.next() {
            assert_may_wait("storage");
            let flushed = disk.sync();
            disk.close();
            // The receiver of the result may open it again.
            drop(disk);
            if results.send((number, flushed)).is_err() {
                return;
            }
        }
    }
}

/// Flushes and closes all disks in parallel, and waits for at most `limit`. Each disk comes with its name for messages.
///
/// # Errors
/// The error of one failed disk, after all others were flushed. `TimedOut` if a disk does not complete in time: its
/// thread keeps waiting.
pub(crate) fn flush_all(disks: Vec<(String, Arc<AnyDisk>)>, limit: Duration) -> io::Result<()> {
    let end = Instant::now() + limit;
    let (sender, results) = channel();
    let (names, disks): (Vec<String>, Vec<Arc<AnyDisk>>) = disks.into_iter().unzip();
    let mut is_done = vec![false; names.len()];
    let numbered: Vec<_> = disks.into_iter().enumerate().collect();
    let queue = Arc::new(Queue(RankedMutex::leaf(numbered.into_iter())));
    start_threads(&queue, &sender);
    let mut result = Ok(());
    for _ in 0..names.len() {
        let (number, flushed) = loop {
            let left = end.saturating_duration_since(Instant::now());
            match results.recv_timeout(left.min(STALL)) {
                Ok(flushed) => break flushed,
                Err(RecvTimeoutError::Timeout) if left > STALL => start_threads(&queue, &sender),
                Err(_) => return Err(timed_out(&names, &is_done, limit)),
            }
        };
        is_done[number] = true;
        if let Err(error) = flushed {
            result = Err(io::Error::new(error.kind(), format!("{}: flush: {error}", names[number])));
        }
    }
    result
}

/// Starts threads for the disks that are left.
fn start_threads(queue: &Arc<Queue>, results: &Sender<Flushed>) {
    for _ in 0..THREADS {
        if queue.is_empty() {
            return;
        }
        let (of_thread, sender) = (Arc::clone(queue), results.clone());
        if spawn("flush", move || of_thread.flush(&sender)).is_err() {
            // No thread could be started: flushes here, one after the other.
            return queue.flush(results);
        }
    }
}

fn timed_out(names: &[String], is_done: &[bool], limit: Duration) -> io::Error {
    let waiting: Vec<&str> =
        names.iter().zip(is_done).filter(|(_, is_done)| !**is_done).map(|(name, _)| name.as_str()).collect();
    let more = match waiting.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let why = format!(
        "{}{more}: flush: no answer within {} s (drain-timeout-s); writes that were reported as durable were flushed before",
        waiting[..waiting.len().min(NAMED)].join(", "),
        limit.as_secs()
    );
    io::Error::new(io::ErrorKind::TimedOut, why)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Condvar, Mutex};

    use mqblk_core::{ByteLen, Disk, DiskChannel, DiskError, Geometry, Limits};
    use mqblk_engine::UringContext;

    use super::*;

    /// Only a failing test waits that long.
    const LONG: Duration = Duration::from_secs(60);

    /// The state that all disks of a test share.
    #[derive(Default)]
    struct Storage {
        flushed: AtomicUsize,
        closed: AtomicUsize,
        is_released: Mutex<bool>,
        released: Condvar,
    }

    impl Storage {
        fn release(&self) {
            *self.is_released.lock().unwrap() = true;
            self.released.notify_all();
        }
    }

    /// A disk whose flush hangs until the storage is released, fails, or succeeds.
    struct FlushedDisk {
        storage: Arc<Storage>,
        hangs: bool,
        fails: bool,
    }

    impl Disk<UringContext> for FlushedDisk {
        fn geometry(&self) -> Geometry {
            unreachable!("nobody asks")
        }

        fn limits(&self) -> Limits {
            unreachable!("nobody asks")
        }

        fn resolved(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn resize(&self, _: Option<ByteLen>) -> Result<ByteLen, DiskError> {
            unreachable!("nobody asks")
        }

        fn sync(&self) -> io::Result<()> {
            if self.hangs {
                let waiting = self.storage.is_released.lock().unwrap();
                drop(self.storage.released.wait_while(waiting, |is_released| !*is_released).unwrap());
            }
            self.storage.flushed.fetch_add(1, Ordering::SeqCst);
            if self.fails { Err(io::Error::other("as the test wants it")) } else { Ok(()) }
        }

        fn close(&self) {
            self.storage.closed.fetch_add(1, Ordering::SeqCst);
        }

        fn open_channel(&self, _: &mut UringContext) -> Result<Box<dyn DiskChannel<UringContext>>, DiskError> {
            unreachable!("nobody asks")
        }
    }

    fn disks(
        storage: &Arc<Storage>,
        count: usize,
        hangs: impl Fn(usize) -> bool,
        fails: impl Fn(usize) -> bool,
    ) -> Vec<(String, Arc<AnyDisk>)> {
        let disk = |number| {
            let storage = Arc::clone(storage);
            let disk: Arc<AnyDisk> = Arc::new(FlushedDisk { storage, hangs: hangs(number), fails: fails(number) });
            (format!("disk {number}"), disk)
        };
        (0..count).map(disk).collect()
    }

    #[test]
    fn many_disks_are_flushed_and_closed_and_a_failure_is_told() {
        let storage = Arc::new(Storage::default());
        assert!(flush_all(Vec::new(), LONG).is_ok());
        flush_all(disks(&storage, 40 * THREADS, |_| false, |_| false), LONG).unwrap();
        let error = flush_all(disks(&storage, THREADS, |_| false, |number| number == 7), LONG).unwrap_err();
        assert_eq!(error.to_string(), "disk 7: flush: as the test wants it");
        let counts = [&storage.flushed, &storage.closed].map(|count| count.load(Ordering::SeqCst));
        assert_eq!(counts, [41 * THREADS; 2]);
    }

    #[test]
    fn disks_that_hang_hold_up_no_other() {
        const HANGING: usize = 2 * THREADS;
        const OTHERS: usize = 3 * THREADS;
        let storage = Arc::new(Storage::default());
        let all = disks(&storage, HANGING + OTHERS, |number| number < HANGING, |_| false);
        let watched = Arc::clone(&storage);
        let release = std::thread::spawn(move || {
            // The first threads all hang.
            while watched.flushed.load(Ordering::SeqCst) < OTHERS {
                std::thread::sleep(Duration::from_millis(1));
            }
            watched.release();
        });
        flush_all(all, LONG).unwrap();
        release.join().unwrap();
        assert_eq!(storage.closed.load(Ordering::SeqCst), HANGING + OTHERS);
    }

    #[test]
    fn a_flush_that_takes_too_long_is_left_behind() {
        let storage = Arc::new(Storage::default());
        let all = disks(&storage, NAMED + 4, |number| number > 1, |_| false);
        let text = flush_all(all, 2 * STALL).unwrap_err().to_string();
        assert!(
            text.starts_with("disk 2, disk 3, ") && text.contains("disk 17 and 2 more: flush: no answer"),
            "{text}"
        );
        storage.release();
    }
}
