//! The last flush of all disks.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use mqblk_engine::AnyDisk;

/// Flushes all disks side by side, since each takes as long as its storage, and waits for `limit` in all. Each is named as messages
/// name it.
///
/// # Errors
/// Of the disks that failed, one's, after all others were flushed; and when a disk does not answer in time: a thread still waits for it.
pub fn flush_all(disks: Vec<(String, Arc<AnyDisk>)>, limit: Duration) -> io::Result<()> {
    let end = Instant::now() + limit;
    let (sender, answers) = channel();
    let mut waiting: Vec<String> = disks.iter().map(|(name, _)| name.clone()).collect();
    for (name, disk) in disks {
        // Nobody listens any more when it took too long.
        let flush = |name, disk: &AnyDisk, answers: &Sender<_>| _ = answers.send((name, disk.sync()));
        let (own, told, answer) = (Arc::clone(&disk), name.clone(), sender.clone());
        let thread = std::thread::Builder::new().name("flush".to_owned());
        if thread.spawn(move || flush(told, &*own, &answer)).is_err() {
            // It holds up the others, which is what is left.
            flush(name, &*disk, &sender);
        }
    }
    drop(sender);
    let mut result = Ok(());
    loop {
        match answers.recv_timeout(end.saturating_duration_since(Instant::now())) {
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
