//! The clients of the server: their limits, the choice of the one that makes room for another, and the running verbs.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use mqblk_core::lock::RankedMutex;

/// The limits on the number of clients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientLimits {
    /// Most clients at once of users that are not privileged.
    pub clients: usize,
    /// Privileged clients that have room in any case.
    pub reserved: usize,
    /// Idle time after which a client makes room for another one.
    pub settled: Duration,
}

#[derive(Debug)]
struct Client {
    number: u64,
    /// True for root and the daemon's own user.
    is_privileged: bool,
    /// Time of its last response, or of its connection.
    idle_since: Instant,
    /// Its running verb.
    verb: Option<RunningVerb>,
    /// Shut down when it makes room.
    stream: UnixStream,
}

#[derive(Debug)]
struct RunningVerb {
    name: String,
    since: Instant,
    is_logged: bool,
}

#[derive(Debug, Default)]
struct ClientList {
    last_number: u64,
    clients: Vec<Client>,
}

impl ClientList {
    fn count(&self, is_privileged: bool) -> usize {
        self.clients.iter().filter(|client| client.is_privileged == is_privileged).count()
    }

    /// Removes the longest idle of the clients that `of` selects.
    fn take_longest_idle(&mut self, settled: Duration, of: impl Fn(&Client) -> bool) -> Option<Client> {
        let idle = |client: &Client| client.verb.is_none() && client.idle_since.elapsed() >= settled;
        let candidates = self.clients.iter().enumerate().filter(|(_, client)| idle(client) && of(client));
        let (at, _) = candidates.min_by_key(|(_, client)| client.idle_since)?;
        Some(self.clients.swap_remove(at))
    }
}

/// The clients that are connected.
#[derive(Debug)]
pub(crate) struct Clients {
    limits: ClientLimits,
    list: RankedMutex<ClientList>,
}

impl Clients {
    pub(crate) fn new(limits: ClientLimits) -> Clients {
        Clients { limits, list: RankedMutex::leaf(ClientList::default()) }
    }

    /// Admits a client. If needed, a client that has been idle for long makes room.
    ///
    /// # Errors
    /// If there is no room: the number of clients.
    pub(crate) fn admit(&self, stream: UnixStream, is_privileged: bool) -> Result<ClientSlot<'_>, usize> {
        let ClientLimits { clients, reserved, settled } = self.limits;
        let mut list = self.list.lock();
        let others = list.count(false);
        let evicted = if !is_privileged && others >= clients {
            // Unprivileged clients make room among themselves.
            Some(list.take_longest_idle(settled, |client| !client.is_privileged))
        } else if list.clients.len() >= clients + reserved {
            let other = list.take_longest_idle(settled, |client| is_privileged && !client.is_privileged);
            Some(other.or_else(|| list.take_longest_idle(settled, |client| client.is_privileged)))
        } else {
            None
        };
        match evicted {
            None => {}
            Some(None) => return Err(list.clients.len()),
            Some(Some(client)) => {
                tracing::debug!("an admin client that was idle made room for another one");
                // It may have gone.
                let _ = client.stream.shutdown(Shutdown::Both);
            }
        }
        list.last_number += 1;
        let number = list.last_number;
        list.clients.push(Client { number, is_privileged, idle_since: Instant::now(), verb: None, stream });
        Ok(ClientSlot { clients: self, number })
    }

    /// Logs the verbs that have run for `age`, each once. Returns true if verbs run.
    pub(crate) fn log_slow_verbs(&self, age: Duration) -> bool {
        let mut list = self.list.lock();
        let mut running = false;
        for verb in list.clients.iter_mut().filter_map(|client| client.verb.as_mut()) {
            running = true;
            if verb.since.elapsed() >= age && !std::mem::replace(&mut verb.is_logged, true) {
                let (verb, seconds) = (&verb.name, verb.since.elapsed().as_secs());
                tracing::warn!(verb, "a verb of the admin socket has run for {seconds} s: it waits for storage");
            }
        }
        running
    }

    /// Returns the verbs that run, each with the seconds since it began, for a message.
    pub(crate) fn running_verbs(&self) -> String {
        let list = self.list.lock();
        let verbs = list.clients.iter().filter_map(|client| client.verb.as_ref());
        let verbs: Vec<String> =
            verbs.map(|verb| format!("{} (for {} s)", verb.name, verb.since.elapsed().as_secs())).collect();
        verbs.join(", ")
    }
}

/// The slot of a client, free when this is dropped.
#[derive(Debug)]
pub(crate) struct ClientSlot<'a> {
    clients: &'a Clients,
    number: u64,
}

impl ClientSlot<'_> {
    /// Records that a verb runs for the client. Returns false if the client has made room for another one: nothing is
    /// run then.
    pub(crate) fn begin_verb(&self, name: &str) -> bool {
        self.with_client(|client| {
            client.verb = Some(RunningVerb { name: name.to_owned(), since: Instant::now(), is_logged: false });
        })
    }

    /// Records that the client is idle.
    pub(crate) fn end_verb(&self) {
        self.with_client(|client| (client.verb, client.idle_since) = (None, Instant::now()));
    }

    fn with_client(&self, change: impl FnOnce(&mut Client)) -> bool {
        let mut list = self.clients.list.lock();
        let own = list.clients.iter_mut().find(|client| client.number == self.number);
        own.map(change).is_some()
    }
}

impl Drop for ClientSlot<'_> {
    fn drop(&mut self) {
        self.clients.list.lock().clients.retain(|client| client.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: Duration = Duration::from_secs(3600);

    fn clients(settled: Duration) -> Clients {
        Clients::new(ClientLimits { clients: 2, reserved: 1, settled })
    }

    fn admit(clients: &Clients, is_privileged: bool) -> Option<ClientSlot<'_>> {
        clients.admit(UnixStream::pair().unwrap().0, is_privileged).ok()
    }

    #[test]
    fn there_is_room_for_a_privileged_client_when_the_others_are_many() {
        let clients = clients(NEVER);
        let others = [admit(&clients, false).unwrap(), admit(&clients, false).unwrap()];
        assert!(admit(&clients, false).is_none());
        let root = admit(&clients, true).unwrap();
        assert!(admit(&clients, true).is_none() && admit(&clients, false).is_none());
        drop(others);
        assert!(admit(&clients, false).is_some() && admit(&clients, true).is_some());
        drop(root);
    }

    #[test]
    fn the_longest_idle_makes_room_and_one_with_a_verb_does_not() {
        let clients = clients(Duration::ZERO);
        let root = admit(&clients, true).unwrap();
        let (first, second) = (admit(&clients, false).unwrap(), admit(&clients, false).unwrap());
        assert!(first.begin_verb("slow"));
        let third = admit(&clients, false).unwrap();
        assert!(!second.begin_verb("late"), "it was idle for longest, and nothing is run for it any more");
        assert!(first.begin_verb("slow") && third.begin_verb("other"));
        assert!(admit(&clients, false).is_none(), "both others have a verb, and root's place is not theirs");
        assert!(root.begin_verb("stat") && clients.running_verbs().starts_with("stat (for 0 s), slow (for 0 s)"));
        third.end_verb();
        let another = admit(&clients, true).unwrap();
        assert!(!third.begin_verb("late"), "a privileged client takes the place of another one");
        assert!(another.begin_verb("stat") && root.begin_verb("stat"));
    }

    #[test]
    fn users_who_are_not_privileged_get_their_share_back() {
        let clients = clients(Duration::ZERO);
        let roots: Vec<_> = (0..3).map(|_| admit(&clients, true).unwrap()).collect();
        let others = [admit(&clients, false).unwrap(), admit(&clients, false).unwrap()];
        assert_eq!(roots.iter().filter(|slot| slot.begin_verb("stat")).count(), 1);
        assert!(others.iter().all(|slot| slot.begin_verb("stat")));
    }

    #[test]
    fn a_slow_verb_is_logged_once() {
        let clients = clients(NEVER);
        let slot = admit(&clients, true).unwrap();
        assert!(!clients.log_slow_verbs(Duration::ZERO));
        slot.begin_verb("lun.add");
        assert!(clients.log_slow_verbs(Duration::ZERO));
        assert!(clients.list.lock().clients[0].verb.as_ref().unwrap().is_logged);
        slot.end_verb();
        assert!(!clients.log_slow_verbs(Duration::ZERO));
    }
}
