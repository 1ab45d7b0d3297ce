//! The final flush of all disks, and their end.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mqblk_core::thread::spawn;
use mqblk_engine::AnyDisk;

/// Flushes and closes all disks in parallel and waits for at most `limit`. Each disk comes with its name for messages.
///
/// # Errors
/// Returns the error of one failed disk, after all others were flushed. Returns `TimedOut` if a disk does not complete in time: its
/// thread is left waiting.
pub(crate) fn flush_all(disks: Vec<(String, Arc<AnyDisk>)>, limit: Duration) -> io::Result<()> {
    let end = Instant::now() + limit;
    let (sender, results) = channel();
    let mut waiting: Vec<String> = disks.iter().map(|(name, _)| name.clone()).collect();
    for (name, disk) in disks {
        // Sending fails after the time-out, when the receiver is gone.
        let flush = |name, disk: Arc<AnyDisk>, results: &Sender<_>| {
            let flushed = disk.sync();
            disk.close();
            // Whoever waits for the result may open it again.
            drop(disk);
            _ = results.send((name, flushed));
        };
        let (thread_disk, thread_name, result_sender) = (Arc::clone(&disk), name.clone(), sender.clone());
        if spawn("flush", move || flush(thread_name, thread_disk, &result_sender)).is_err() {
            // Without a thread: flush here, although the other disks wait.
            flush(name, disk, &sender);
        }
    }
    drop(sender);
    let mut result = Ok(());
    loop {
        match results.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok((name, flushed)) => {
                waiting.retain(|other| *other != name);
                if let Err(error) = flushed {
                    result = Err(io::Error::new(error.kind(), format!("{name}: flush: {error}")));
                }
            }
            Err(RecvTimeoutError::Timeout) if !waiting.is_empty() => {
                let why = format!(
                    "{}: flush: no answer within {} s (drain-timeout-s); what guests were told is durable was flushed before",
                    waiting.join(", "),
                    limit.as_secs()
                );
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(_) => return result,
        }
    }
}
