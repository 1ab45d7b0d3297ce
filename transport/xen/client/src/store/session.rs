//! Xenstore operations, inside and outside transactions.

use std::time::Duration;

use super::wire::{Verb, texts};
use super::{Permission, Store, StoreError, StoreErrorKind, check_path};

/// Maximum attempts of a transaction. One of several conflicting transactions always succeeds, so only constant writes of others reach
/// this limit.
const ATTEMPTS: u32 = 32;
/// Wait before the second attempt of a transaction; doubled before each further one.
const FIRST_WAIT: Duration = Duration::from_millis(1);
/// Maximum wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_millis(50);

/// Maximum number of DIRECTORY_PART requests for one directory, including restarts after a change.
const DIRECTORY_PIECES: u32 = 4096;

/// A transaction: its requests see the store as it was when it started, and take effect together.
#[derive(Debug)]
pub struct Transaction<'a> {
    store: &'a mut Store,
    /// Transaction id; 0: none, each request takes effect at once.
    id: u32,
}

impl Store {
    fn session(&mut self) -> Transaction<'_> {
        Transaction { store: self, id: 0 }
    }

    /// Reads the value of a node; `None` if it does not exist.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), the value is not UTF-8, or the connection is lost.
    pub fn read(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        self.session().read(path)
    }

    /// Writes the value of a node. Creates it and its missing parents.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`, `ENOSPC`: the domain's quota), path and value are too long, or the connection is lost.
    pub fn write(&mut self, path: &str, value: &str) -> Result<(), StoreError> {
        self.session().write(path, value)
    }

    /// Removes a node and everything below it. The node may be missing.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), or the connection is lost.
    pub fn remove(&mut self, path: &str) -> Result<(), StoreError> {
        self.session().remove(path)
    }

    /// Creates an empty node (MKDIR). It may exist already.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`, `ENOSPC`), or the connection is lost.
    pub fn make(&mut self, path: &str) -> Result<(), StoreError> {
        self.session().make(path)
    }

    /// Lists the names of a node's children; `None` if it does not exist.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), a name is not UTF-8, or the connection is lost.
    pub fn list(&mut self, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        self.session().list(path)
    }

    /// Reads the permissions of a node, its owner's first; `None` if it does not exist.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), or the connection is lost.
    pub fn permissions(&mut self, path: &str) -> Result<Option<Vec<Permission>>, StoreError> {
        self.session().permissions(path)
    }

    /// Sets the permissions of a node; the first is the owner's.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`, `ENOENT`), or the connection is lost.
    pub fn set_permissions(&mut self, path: &str, permissions: &[Permission]) -> Result<(), StoreError> {
        self.session().set_permissions(path, permissions)
    }

    /// Runs `work` in one transaction, which takes effect completely or not at all. Repeats it after a conflict with another writer.
    ///
    /// # Errors
    /// An error of `work`; then nothing has changed. Or xenstore refuses, every attempt conflicts, or the connection is lost.
    pub fn transaction<T>(
        &mut self,
        mut work: impl FnMut(&mut Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut wait = FIRST_WAIT;
        for attempt in 1..=ATTEMPTS {
            match self.attempt(&mut work) {
                Err(error) if error.errno() == "EAGAIN" => {
                    tracing::debug!(attempt, "a transaction conflicts with another");
                }
                other => return other,
            }
            if attempt < ATTEMPTS {
                std::thread::sleep(wait);
                wait = (wait * 2).min(LONGEST_WAIT);
            }
        }
        Err(StoreError::new(Verb::TRANSACTION_END, "", StoreErrorKind::Conflicts(ATTEMPTS)))
    }

    fn attempt<T>(
        &mut self,
        work: &mut impl FnMut(&mut Transaction<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let started = self.request(Verb::TRANSACTION_START, 0, "", &[&[0]])?;
        let id = texts(&started).next().and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
        let Some(id) = id.filter(|id| *id != 0) else {
            let why = self.connection.lose("found a transaction without a number above 0");
            return Err(super::lost(Verb::TRANSACTION_START, "", why));
        };
        let result = work(&mut Transaction { store: self, id });
        let end: &[u8] = if result.is_ok() { b"T\0" } else { b"F\0" };
        let ended = self.request(Verb::TRANSACTION_END, id, "", &[end]);
        // An error of the work is more useful than an error of the abort.
        result.and_then(|value| ended.map(|_| value))
    }
}

impl Transaction<'_> {
    fn ask(&mut self, verb: Verb, path: &str, rest: &[u8]) -> Result<Vec<u8>, StoreError> {
        check_path(verb, path)?;
        self.store.request(verb, self.id, path, &[path.as_bytes(), &[0], rest])
    }

    /// See [`Xenstore::read`].
    ///
    /// # Errors
    /// See [`Xenstore::read`].
    pub fn read(&mut self, path: &str) -> Result<Option<String>, StoreError> {
        let value = found(self.ask(Verb::READ, path, &[]))?;
        value.map(|value| text(Verb::READ, path, value)).transpose()
    }

    /// See [`Xenstore::write`].
    ///
    /// # Errors
    /// See [`Xenstore::write`].
    pub fn write(&mut self, path: &str, value: &str) -> Result<(), StoreError> {
        self.ask(Verb::WRITE, path, value.as_bytes()).map(|_| ())
    }

    /// See [`Xenstore::remove`].
    ///
    /// # Errors
    /// See [`Xenstore::remove`].
    pub fn remove(&mut self, path: &str) -> Result<(), StoreError> {
        found(self.ask(Verb::RM, path, &[])).map(|_| ())
    }

    /// See [`Xenstore::mkdir`].
    ///
    /// # Errors
    /// See [`Xenstore::mkdir`].
    pub fn make(&mut self, path: &str) -> Result<(), StoreError> {
        self.ask(Verb::MKDIR, path, &[]).map(|_| ())
    }

    /// See [`Xenstore::list`].
    ///
    /// # Errors
    /// See [`Xenstore::list`].
    pub fn list(&mut self, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        let whole = match self.ask(Verb::DIRECTORY, path, &[]) {
            Err(error) if error.errno() == "E2BIG" => self.list_in_pieces(path),
            other => other,
        };
        let Some(payload) = found(whole)? else { return Ok(None) };
        texts(&payload).map(|name| text(Verb::DIRECTORY, path, name.to_vec())).collect::<Result<_, _>>().map(Some)
    }

    /// Lists a directory that exceeds one message (DIRECTORY_PART). Starts over when the directory changes.
    fn list_in_pieces(&mut self, path: &str) -> Result<Vec<u8>, StoreError> {
        let mut names: Vec<u8> = vec![];
        let mut generation: Vec<u8> = vec![];
        for _ in 0..DIRECTORY_PIECES {
            let offset = format!("{}\0", names.len());
            let part = self.ask(Verb::DIRECTORY_PART, path, offset.as_bytes())?;
            let Some(end) = part.iter().position(|byte| *byte == 0) else { break };
            let (new_generation, rest) = (&part[..end], &part[end + 1..]);
            if !names.is_empty() && new_generation != generation {
                names.clear();
                continue;
            }
            generation = new_generation.to_vec();
            // An empty name marks the end.
            match rest.strip_suffix(b"\0\0") {
                Some(last) => {
                    names.extend(last);
                    names.push(0);
                    return Ok(names);
                }
                None if rest == b"\0" || rest.is_empty() => return Ok(names),
                None => names.extend(rest),
            }
        }
        let text = format!("found no end of a directory in {DIRECTORY_PIECES} pieces");
        Err(StoreError::new(Verb::DIRECTORY_PART, path, StoreErrorKind::Invalid(text)))
    }

    /// See [`Xenstore::permissions`].
    ///
    /// # Errors
    /// See [`Xenstore::permissions`].
    pub fn permissions(&mut self, path: &str) -> Result<Option<Vec<Permission>>, StoreError> {
        let Some(payload) = found(self.ask(Verb::GET_PERMS, path, &[]))? else { return Ok(None) };
        let parsed: Option<Vec<Permission>> = texts(&payload).map(Permission::parse).collect();
        let wrong = || StoreErrorKind::Invalid("found permissions that are not a letter and a domain each".to_owned());
        parsed.ok_or_else(|| StoreError::new(Verb::GET_PERMS, path, wrong())).map(Some)
    }

    /// See [`Xenstore::set_permissions`].
    ///
    /// # Errors
    /// See [`Xenstore::set_permissions`].
    pub fn set_permissions(&mut self, path: &str, permissions: &[Permission]) -> Result<(), StoreError> {
        let list: String = permissions.iter().map(|permission| format!("{permission}\0")).collect();
        self.ask(Verb::SET_PERMS, path, list.as_bytes()).map(|_| ())
    }
}

/// Maps ENOENT to `None`.
fn found(reply: Result<Vec<u8>, StoreError>) -> Result<Option<Vec<u8>>, StoreError> {
    match reply {
        Ok(payload) => Ok(Some(payload)),
        Err(error) if error.errno() == "ENOENT" => Ok(None),
        Err(error) => Err(error),
    }
}

fn text(verb: Verb, path: &str, bytes: Vec<u8>) -> Result<String, StoreError> {
    String::from_utf8(bytes).map_err(|_| StoreError::new(verb, path, StoreErrorKind::NotText))
}
