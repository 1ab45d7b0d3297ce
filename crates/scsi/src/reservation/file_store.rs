//! A [`ReservationStore`] in a file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use mqblk_core::Wake;
use mqblk_core::thread::spawn;

use super::store::{ReservationStore, Ticket};

/// Maximum size of the file: 1024 registrations of less than 512 bytes.
pub(super) const MAX_FILE_BYTES: u64 = 512 << 10;

/// Stores a logical unit's reservations in a file. Each state is written to a new file, synced and renamed over the
/// old one, and the directory is synced, so that the file is always a complete state. A thread does this; callers of
/// [`save`](ReservationStore::save) do not block.
#[derive(Debug)]
pub struct FileReservationStore {
    requests: Option<Sender<SaveRequest>>,
    thread: Option<JoinHandle<()>>,
}

struct SaveRequest {
    state: Vec<u8>,
    ticket: Arc<Ticket>,
}

impl Drop for SaveRequest {
    fn drop(&mut self) {
        // Without effect if the ticket is resolved.
        self.ticket.resolve(Err("the thread that keeps reservations has ended".into()));
    }
}

impl FileReservationStore {
    /// Opens the store at `path`. Returns it with the content of the file; `None` if there is no such file.
    ///
    /// # Errors
    /// If the file cannot be read, is too large, or the thread cannot be started.
    pub fn open(path: &Path) -> io::Result<(FileReservationStore, Option<Vec<u8>>)> {
        let content = match File::open(path) {
            Ok(file) => Some(read(file)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let (jobs, receiver) = channel();
        let path = path.to_owned();
        let thread = spawn("reservations", move || run_writer(&path, &receiver))?;
        Ok((FileReservationStore { requests: Some(jobs), thread: Some(thread) }, content))
    }
}

fn read(file: File) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_FILE_BYTES {
        let why = format!("larger than {MAX_FILE_BYTES} bytes: not a file of kept reservations");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(content)
}

impl ReservationStore for FileReservationStore {
    fn save(&self, state: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket> {
        let ticket = Ticket::new(done);
        let job = SaveRequest { state, ticket: Arc::clone(&ticket) };
        if let Some(jobs) = &self.requests {
            // If it cannot be sent it is dropped, which resolves the ticket.
            drop(jobs.send(job));
        }
        ticket
    }
}

impl Drop for FileReservationStore {
    fn drop(&mut self) {
        // Queued states are still written; then the thread ends.
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn run_writer(path: &Path, jobs: &Receiver<SaveRequest>) {
    while let Ok(first) = jobs.recv() {
        let mut batch = vec![first];
        batch.extend(jobs.try_iter());
        let Some(last) = batch.last() else { continue };
        // The last state replaces those before it.
        let result = replace_file(path, &last.state).map_err(|error| format!("{}: {error}", path.display()));
        batch.iter().for_each(|job| job.ticket.resolve(result.clone()));
    }
}

fn replace_file(path: &Path, state: &[u8]) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    // One may be left from a crash. A new file follows no symbolic link of another user.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(state)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{SyncSender, sync_channel};

    use super::*;

    struct Signal(SyncSender<()>);

    impl Wake for Signal {
        fn wake(&self) {
            self.0.send(()).expect("space for every wakeup");
        }
    }

    #[test]
    fn states_are_replaced_whole_and_in_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("unit.reservations");
        let (store, content) = FileReservationStore::open(&path).expect("opens");
        assert_eq!(content, None);
        let (sender, wakeups) = sync_channel(64);
        let done: Arc<dyn Wake> = Arc::new(Signal(sender));
        let tickets: Vec<_> = (0u8..32).map(|n| store.save(vec![n; 100], Arc::clone(&done))).collect();
        for _ in 0..32 {
            wakeups.recv().expect("a wakeup for each ticket");
        }
        assert!(tickets.iter().all(|ticket| ticket.result() == Some(Ok(()))));
        assert_eq!(fs::read(&path).expect("there"), vec![31; 100]);
        let last = store.save(b"last".to_vec(), done);
        drop(store);
        assert_eq!(last.result(), Some(Ok(())), "queued states are written before the store is dropped");
        assert_eq!(FileReservationStore::open(&path).expect("opens").1.as_deref(), Some(&b"last"[..]));
        assert_eq!(fs::read_dir(folder.path()).expect("there").count(), 1, "no temporary file is left");
    }

    #[test]
    fn failures_are_reported() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gone").join("unit.reservations");
        let (store, content) = FileReservationStore::open(&path).expect("no file yet is no failure");
        assert_eq!(content, None);
        let (sender, wakeups) = sync_channel(1);
        let ticket = store.save(b"state".to_vec(), Arc::new(Signal(sender)));
        wakeups.recv().expect("a wakeup");
        let why = ticket.result().expect("decided").expect_err("there is no such folder");
        assert!(why.contains("gone"), "{why}");
        assert!(FileReservationStore::open(folder.path()).is_err(), "a folder is no file");
        let large = folder.path().join("large");
        fs::write(&large, vec![b' '; MAX_FILE_BYTES as usize + 1]).expect("written");
        assert_eq!(FileReservationStore::open(&large).expect_err("too large").kind(), io::ErrorKind::InvalidData);
    }
}
