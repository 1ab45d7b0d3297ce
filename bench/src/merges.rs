//! What the server merged: its own count, read over its admin socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// How long the server may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// An answer is not longer.
const LONGEST: u64 = 4 << 20;

/// Requests that were joined to another one, since the disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merges {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// Requests that were joined to another one, per second (iostat's rrqm/s and wrqm/s).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerSecond {
    /// Reads.
    pub reads: f64,
    /// Writes.
    pub writes: f64,
}

impl Merges {
    /// Asks the server at the admin socket `admin`, which has one disk. `None` when it does not say.
    pub fn read(admin: &Path) -> Option<Merges> {
        match ask(admin) {
            Ok(answer) => Merges::of(&answer),
            Err(error) => {
                tracing::debug!(%error, "no merges from the admin socket");
                None
            }
        }
    }

    /// The sums over the queues of the only disk in an answer to `stat`.
    fn of(answer: &Value) -> Option<Merges> {
        let counters = answer.pointer("/result/disks/0/totals/counters")?;
        let count = |key: &str| counters.get(key)?.as_u64();
        Some(Merges { reads: count("read_merges")?, writes: count("write_merges")? })
    }

    /// What came since `before`, a `time` ago.
    pub fn per_second(self, before: Merges, time: Duration) -> PerSecond {
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / time.as_secs_f64().max(1e-9);
        PerSecond { reads: rate(self.reads, before.reads), writes: rate(self.writes, before.writes) }
    }
}

/// Sends `stat` and takes the answer: JSON-RPC 2.0, one line each.
fn ask(admin: &Path) -> std::io::Result<Value> {
    let mut socket = UnixStream::connect(admin)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": "stat" }).to_string();
    request.push('\n');
    socket.write_all(request.as_bytes())?;
    let mut line = String::new();
    BufReader::new(socket.take(LONGEST)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Answers one connection with `answer`, and gives back what was asked.
    fn answered(answer: &'static str) -> (Option<Merges>, Value) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            let mut asked = String::new();
            BufReader::new(&socket).read_line(&mut asked).unwrap();
            (&socket).write_all(answer.as_bytes()).unwrap();
            serde_json::from_str(&asked).unwrap()
        });
        (Merges::read(&path), server.join().unwrap())
    }

    #[test]
    fn the_totals_of_the_disk_are_taken() {
        let line = r#"{"jsonrpc":"2.0","id":1,"result":{"disks":[{"id":"d","totals":{"in_flight":1,"counters":{"reads":9,"read_merges":5,"writes":7,"write_merges":3}}}]}}"#;
        let (merges, asked) = answered(line);
        assert_eq!(merges, Some(Merges { reads: 5, writes: 3 }));
        assert_eq!(asked, json!({ "jsonrpc": "2.0", "id": 1, "method": "stat" }));
    }

    #[test]
    fn a_server_that_does_not_say_gives_nothing() {
        for answer in [
            "",
            "nonsense\n",
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32601,"message":"no such method"}}"#,
            r#"{"result":{"disks":[]}}"#,
            r#"{"result":{"disks":[{"totals":{"counters":{"read_merges":5}}}]}}"#,
        ] {
            assert_eq!(answered(answer).0, None, "{answer}");
        }
        assert_eq!(Merges::read(Path::new("/nonexistent/admin")), None);
    }

    #[test]
    fn rates_are_of_what_came_between() {
        let (before, now) = (Merges { reads: 100, writes: 7 }, Merges { reads: 350, writes: 7 });
        let rate = now.per_second(before, Duration::from_millis(500));
        assert_eq!(rate, PerSecond { reads: 500.0, writes: 0.0 });
    }
}
