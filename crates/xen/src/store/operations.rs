//! Xenstore operations, inside and outside transactions.

use std::time::Duration;

use super::wire::{Verb, split_strings};
use super::{Permission, Xenstore, XenstoreError, XenstoreErrorKind, check_path};

/// Maximum attempts of a transaction. One of several conflicting transactions always succeeds, so only constant writes
/// of others reach this limit.
const ATTEMPTS: u32 = 32;
/// Wait before the second attempt of a transaction; doubled before each further one.
const FIRST_WAIT: Duration = Duration::from_millis(1);
/// Maximum wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_millis(50);

/// Maximum number of DIRECTORY_PART requests for one directory, including restarts after a change.
const MAX_DIRECTORY_PARTS: u32 = 4096;

/// A transaction: its requests see the store as it was when it started, and take effect together.
#[derive(Debug)]
pub struct Transaction<'a> {
    store: &'a mut Xenstore,
    /// Transaction id; 0: none, each request takes effect at once.
    id: u32,
}

impl Xenstore {
    fn without_transaction(&mut self) -> Transaction<'_> {
        Transaction { store: self, id: 0 }
    }

    /// Reads the value of a node; `None` if it does not exist.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), the value is not UTF-8, or the connection is lost.
    pub fn read(&mut self, path: &str) -> Result<Option<String>, XenstoreError> {
        self.without_transaction().read(path)
    }

    /// Writes the value of a node. Creates it and its missing parents.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`, `ENOSPC`: the domain's quota), path and value are too long, or the connection
    /// is lost.
    pub fn write(&mut self, path: &str, value: &str) -> Result<(), XenstoreError> {
        self.without_transaction().write(path, value)
    }

    /// Removes a node and everything below it. The node may be missing.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), or the connection is lost.
    pub fn remove(&mut self, path: &str) -> Result<(), XenstoreError> {
        self.without_transaction().remove(path)
    }

    /// Creates an empty node (MKDIR). It may exist already.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`, `ENOSPC`), or the connection is lost.
    pub fn mkdir(&mut self, path: &str) -> Result<(), XenstoreError> {
        self.without_transaction().mkdir(path)
    }

    /// Lists the names of a node's children; `None` if it does not exist.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), a name is not UTF-8, or the connection is lost.
    pub fn list(&mut self, path: &str) -> Result<Option<Vec<String>>, XenstoreError> {
        self.without_transaction().list(path)
    }

    /// Reads the permissions of a node, its owner's first; `None` if it does not exist.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`), or the connection is lost.
    pub fn permissions(&mut self, path: &str) -> Result<Option<Vec<Permission>>, XenstoreError> {
        self.without_transaction().permissions(path)
    }

    /// Sets the permissions of a node; the first is the owner's.
    ///
    /// # Errors
    /// When xenstore refuses (`EACCES`, `ENOENT`), or the connection is lost.
    pub fn set_permissions(&mut self, path: &str, permissions: &[Permission]) -> Result<(), XenstoreError> {
        self.without_transaction().set_permissions(path, permissions)
    }

    /// Runs `work` in one transaction, which takes effect completely or not at all. Repeats it after a conflict with
    /// another writer.
    ///
    /// # Errors
    /// An error of `work`; then nothing has changed. Or xenstore refuses, every attempt conflicts, or the connection is
    /// lost.
    pub fn transaction<T>(
        &mut self,
        mut work: impl FnMut(&mut Transaction<'_>) -> Result<T, XenstoreError>,
    ) -> Result<T, XenstoreError> {
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
        Err(XenstoreError::new(Verb::TRANSACTION_END, "", XenstoreErrorKind::Conflicts(ATTEMPTS)))
    }

    fn attempt<T>(
        &mut self,
        work: &mut impl FnMut(&mut Transaction<'_>) -> Result<T, XenstoreError>,
    ) -> Result<T, XenstoreError> {
        let started = self.request(Verb::TRANSACTION_START, 0, "", &[&[0]])?;
        let id = split_strings(&started).next().and_then(|id| std::str::from_utf8(id).ok()?.parse().ok());
        let Some(id) = id.filter(|id| *id != 0) else {
            let why = self.connection.mark_lost("found a transaction without a number above 0");
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
    fn request(&mut self, verb: Verb, path: &str, rest: &[u8]) -> Result<Vec<u8>, XenstoreError> {
        check_path(verb, path)?;
        self.store.request(verb, self.id, path, &[path.as_bytes(), &[0], rest])
    }

    /// See [`Xenstore::read`].
    ///
    /// # Errors
    /// See [`Xenstore::read`].
    pub fn read(&mut self, path: &str) -> Result<Option<String>, XenstoreError> {
        let value = none_if_missing(self.request(Verb::READ, path, &[]))?;
        value.map(|value| text(Verb::READ, path, value)).transpose()
    }

    /// See [`Xenstore::write`].
    ///
    /// # Errors
    /// See [`Xenstore::write`].
    pub fn write(&mut self, path: &str, value: &str) -> Result<(), XenstoreError> {
        self.request(Verb::WRITE, path, value.as_bytes()).map(|_| ())
    }

    /// See [`Xenstore::remove`].
    ///
    /// # Errors
    /// See [`Xenstore::remove`].
    pub fn remove(&mut self, path: &str) -> Result<(), XenstoreError> {
        none_if_missing(self.request(Verb::RM, path, &[])).map(|_| ())
    }

    /// See [`Xenstore::mkdir`].
    ///
    /// # Errors
    /// See [`Xenstore::mkdir`].
    pub fn mkdir(&mut self, path: &str) -> Result<(), XenstoreError> {
        self.request(Verb::MKDIR, path, &[]).map(|_| ())
    }

    /// See [`Xenstore::list`].
    ///
    /// # Errors
    /// See [`Xenstore::list`].
    pub fn list(&mut self, path: &str) -> Result<Option<Vec<String>>, XenstoreError> {
        let whole = match self.request(Verb::DIRECTORY, path, &[]) {
            Err(error) if error.errno() == "E2BIG" => self.list_in_parts(path),
            other => other,
        };
        let Some(payload) = none_if_missing(whole)? else { return Ok(None) };
        split_strings(&payload)
            .map(|name| text(Verb::DIRECTORY, path, name.to_vec()))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Lists a directory that exceeds one message (DIRECTORY_PART). Starts over when the directory changes.
    fn list_in_parts(&mut self, path: &str) -> Result<Vec<u8>, XenstoreError> {
        let mut names: Vec<u8> = vec![];
        let mut generation: Vec<u8> = vec![];
        for _ in 0..MAX_DIRECTORY_PARTS {
            let offset = format!("{}\0", names.len());
            let part = self.request(Verb::DIRECTORY_PART, path, offset.as_bytes())?;
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
        let text = format!("found no end of a directory in {MAX_DIRECTORY_PARTS} pieces");
        Err(XenstoreError::new(Verb::DIRECTORY_PART, path, XenstoreErrorKind::Invalid(text)))
    }

    /// See [`Xenstore::permissions`].
    ///
    /// # Errors
    /// See [`Xenstore::permissions`].
    pub fn permissions(&mut self, path: &str) -> Result<Option<Vec<Permission>>, XenstoreError> {
        let Some(payload) = none_if_missing(self.request(Verb::GET_PERMS, path, &[]))? else { return Ok(None) };
        let parsed: Option<Vec<Permission>> = split_strings(&payload).map(Permission::parse).collect();
        let wrong =
            || XenstoreErrorKind::Invalid("found permissions that are not a letter and a domain each".to_owned());
        parsed.ok_or_else(|| XenstoreError::new(Verb::GET_PERMS, path, wrong())).map(Some)
    }

    /// See [`Xenstore::set_permissions`].
    ///
    /// # Errors
    /// See [`Xenstore::set_permissions`].
    pub fn set_permissions(&mut self, path: &str, permissions: &[Permission]) -> Result<(), XenstoreError> {
        let list: String = permissions.iter().map(|permission| format!("{permission}\0")).collect();
        self.request(Verb::SET_PERMS, path, list.as_bytes()).map(|_| ())
    }
}

/// Maps ENOENT to `None`.
fn none_if_missing(reply: Result<Vec<u8>, XenstoreError>) -> Result<Option<Vec<u8>>, XenstoreError> {
    match reply {
        Ok(payload) => Ok(Some(payload)),
        Err(error) if error.errno() == "ENOENT" => Ok(None),
        Err(error) => Err(error),
    }
}

fn text(verb: Verb, path: &str, bytes: Vec<u8>) -> Result<String, XenstoreError> {
    String::from_utf8(bytes).map_err(|_| XenstoreError::new(verb, path, XenstoreErrorKind::NotUtf8))
}
