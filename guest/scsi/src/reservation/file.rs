//! A [`Keeper`] in a file.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use mqblk_core::Wake;

use super::keeper::{Keeper, Ticket};

/// Most bytes that a file of kept reservations can have: 1024 registrations of less than 512 bytes.
pub(super) const LARGEST: u64 = 512 << 10;

/// Keeps a unit's reservations in a file: written beside it, synced, put in its place by a rename, and the folder synced, so that the file is
/// always a whole state. A thread of its own does that; nobody who saves waits for the disk.
#[derive(Debug)]
pub struct FileKeeper {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Job {
    state: Vec<u8>,
    ticket: Arc<Ticket>,
}

impl Drop for Job {
    fn drop(&mut self) {
        // Does nothing where it was decided.
        self.ticket.resolve(Err("the thread that keeps reservations has ended".into()));
    }
}

impl FileKeeper {
    /// A keeper over `path`, and what the file has now: `None` when there is no such file.
    ///
    /// # Errors
    /// Those of reading the file, of a file too large to be one of these, and of starting a thread.
    pub fn open(path: &Path) -> io::Result<(FileKeeper, Option<Vec<u8>>)> {
        let held = match File::open(path) {
            Ok(file) => Some(read(file)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let (jobs, taken) = channel();
        let path = path.to_owned();
        let thread = std::thread::Builder::new().name("reservations".into()).spawn(move || keep(&path, &taken))?;
        Ok((FileKeeper { jobs: Some(jobs), thread: Some(thread) }, held))
    }
}

fn read(file: File) -> io::Result<Vec<u8>> {
    let mut held = Vec::new();
    file.take(LARGEST + 1).read_to_end(&mut held)?;
    if held.len() as u64 > LARGEST {
        let why = format!("larger than {LARGEST} bytes: not a file of kept reservations");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(held)
}

impl Keeper for FileKeeper {
    fn save(&self, state: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket> {
        let ticket = Ticket::new(done);
        let job = Job { state, ticket: Arc::clone(&ticket) };
        if let Some(jobs) = &self.jobs {
            // When it cannot be sent it is dropped, which decides the ticket.
            drop(jobs.send(job));
        }
        ticket
    }
}

impl Drop for FileKeeper {
    fn drop(&mut self) {
        // What was given is still written; then the thread ends.
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn keep(path: &Path, jobs: &Receiver<Job>) {
    while let Ok(first) = jobs.recv() {
        let mut taken = vec![first];
        taken.extend(jobs.try_iter());
        let Some(last) = taken.last() else { continue };
        // The last state replaces those before it.
        let result = replace(path, &last.state).map_err(|error| format!("{}: {error}", path.display()));
        taken.iter().for_each(|job| job.ticket.resolve(result.clone()));
    }
}

fn replace(path: &Path, state: &[u8]) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let mut file = File::create(&beside)?;
    file.write_all(state)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{SyncSender, sync_channel};

    use super::*;

    struct Told(SyncSender<()>);

    impl Wake for Told {
        fn wake(&self) {
            self.0.send(()).expect("room for every ring");
        }
    }

    #[test]
    fn states_are_replaced_whole_and_in_order() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("unit.reservations");
        let (keeper, held) = FileKeeper::open(&path).expect("opens");
        assert_eq!(held, None);
        let (told, rings) = sync_channel(64);
        let done: Arc<dyn Wake> = Arc::new(Told(told));
        let tickets: Vec<_> = (0u8..32).map(|n| keeper.save(vec![n; 100], Arc::clone(&done))).collect();
        for _ in 0..32 {
            rings.recv().expect("a ring for each ticket");
        }
        assert!(tickets.iter().all(|ticket| ticket.result() == Some(Ok(()))));
        assert_eq!(fs::read(&path).expect("there"), vec![31; 100]);
        let last = keeper.save(b"last".to_vec(), done);
        drop(keeper);
        assert_eq!(last.result(), Some(Ok(())), "what was given is written before the keeper ends");
        assert_eq!(FileKeeper::open(&path).expect("opens").1.as_deref(), Some(&b"last"[..]));
        assert_eq!(fs::read_dir(folder.path()).expect("there").count(), 1, "nothing is left beside it");
    }

    #[test]
    fn failures_are_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gone").join("unit.reservations");
        let (keeper, held) = FileKeeper::open(&path).expect("no file yet is no failure");
        assert_eq!(held, None);
        let (told, rings) = sync_channel(1);
        let ticket = keeper.save(b"state".to_vec(), Arc::new(Told(told)));
        rings.recv().expect("a ring");
        let why = ticket.result().expect("decided").expect_err("there is no such folder");
        assert!(why.contains("gone"), "{why}");
        assert!(FileKeeper::open(folder.path()).is_err(), "a folder is no file");
        let large = folder.path().join("large");
        fs::write(&large, vec![b' '; LARGEST as usize + 1]).expect("written");
        assert_eq!(FileKeeper::open(&large).expect_err("too large").kind(), io::ErrorKind::InvalidData);
    }
}
