//! Clients of the admin socket that violate its protocol, or use it without end.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mqblk_admin::{Client, StatQuery};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;

use super::frontends::connect_at_once;
use super::{Attack, AttackControl};
use crate::hostile::TIMEOUT;

const PAUSE: Duration = Duration::from_millis(2);

/// Connects. Returns `None` if the daemon has its maximum of clients.
fn connect(path: &Path, control: &AttackControl) -> Option<UnixStream> {
    let stream = connect_at_once(path);
    control.pause(PAUSE);
    let stream = stream?;
    stream.set_nonblocking(false).expect("a socket that blocks");
    stream.set_read_timeout(Some(TIMEOUT.time())).expect("a read time-out");
    stream.set_write_timeout(Some(TIMEOUT.time())).expect("a write time-out");
    Some(stream)
}

/// Lines of any bytes, half lines, and lines that are too long.
pub fn rubbish(path: PathBuf, seed: u64) -> Attack {
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        while !control.is_stopped() {
            let Some(mut stream) = connect(&path, control) else { continue };
            let len = [3, 40, 1000, 70_000, 1 << 20][random.random_range(0..5)];
            let mut line = vec![0; len];
            match random.random_range(0..3) {
                0 => random.fill(&mut line[..]),
                1 => line.fill(b'['),
                _ => line = br#"{"jsonrpc":"2.0","id":1,"method":"stat","params":{"disk":7}}"#.to_vec(),
            }
            if random.random_bool(0.7) {
                line.push(b'\n');
            }
            // The daemon closes the connection of a line that is too long.
            if stream.write_all(&line).is_ok() && line.ends_with(b"\n") {
                let _ = BufReader::new(&stream).read_until(b'\n', &mut Vec::new());
            }
            control.count();
        }
    })
}

/// Requests statistics without end, and never reads them.
pub fn unread_responses(path: PathBuf) -> Attack {
    Box::new(move |control| {
        while !control.is_stopped() {
            let Some(mut stream) = connect(&path, control) else { continue };
            stream.set_nonblocking(true).expect("a socket that does not block");
            let request =
                b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"stat\",\"params\":{\"queues\":true,\"latency\":true}}\n";
            while stream.write(request).is_ok() {
                control.count();
            }
            control.pause(Duration::from_millis(500));
            // Reads the responses so far, so that no half line remains.
            let _ = stream.read(&mut [0; 4096]);
        }
    })
}

/// The request of `mqblk stat --queues`, in a loop.
pub fn statistics(path: PathBuf) -> Attack {
    Box::new(move |control| {
        let mut client = None;
        while !control.is_stopped() {
            let query = StatQuery { queues: true, latency: false, disk: None };
            let connected = client.take().or_else(|| Client::connect_with(&path, TIMEOUT.time()).ok());
            // Refused while there are too many clients.
            client = connected.and_then(|mut client: Client| client.stat(&query).is_ok().then_some(client));
            if client.is_some() {
                control.count();
            }
            control.pause(PAUSE);
        }
    })
}

/// Adds LUNs to `controller` and removes them again: LUNs of `image`, and of paths that cannot be LUNs.
pub fn luns(path: PathBuf, controller: &'static str, image: PathBuf) -> Attack {
    Box::new(move |control| {
        let folder = image.parent().expect("a file lies in a folder").to_owned();
        while !control.is_stopped() {
            let Ok(mut client) = Client::connect_with(&path, TIMEOUT.time()) else {
                control.pause(PAUSE);
                continue;
            };
            for bad in [folder.join("nothing"), folder.clone(), "/etc/shadow".into(), "/dev/zero".into()] {
                let settings = json!({ "controller": controller, "target": 9, "settings": { "path": bad } });
                assert!(client.call("lun.add", &settings).is_err(), "{bad:?} is a LUN");
            }
            let address = json!({ "controller": controller, "target": 8 });
            let settings = json!({ "controller": controller, "target": 8, "settings": { "path": image } });
            // The connection may be refused while there are too many clients. A slow removal goes on by itself; the
            // next addition is refused meanwhile.
            if client.call("lun.add", &settings).is_ok() && client.call("lun.remove", &address).is_ok() {
                control.count();
            }
            control.pause(PAUSE);
        }
    })
}

/// Moves queues of these devices between `workers` workers at random, while they have requests and while their guests
/// connect and disconnect.
pub fn moves(path: PathBuf, devices: Vec<&'static str>, workers: u64, seed: u64) -> Attack {
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut client = None;
        while !control.is_stopped() {
            let Some(mut connected) = client.take().or_else(|| Client::connect_with(&path, TIMEOUT.time()).ok()) else {
                control.pause(PAUSE);
                continue;
            };
            let id = devices[random.random_range(0..devices.len())];
            // Not every device has that many queues.
            let (queue, worker) = (random.random_range(0..3), random.random_range(0..workers));
            match connected.call("queue.move", &json!({ "id": id, "queue": queue, "worker": worker })) {
                Ok(moved) => {
                    assert_eq!(moved["worker"], worker, "{id} {queue}");
                    control.count();
                    client = Some(connected);
                }
                // Refused: the queue's requests take long, the queue does not exist, or there are too many clients.
                Err(_) => control.pause(PAUSE),
            }
        }
    })
}

/// Changes at run time: sets limits of `devices` and of a group, adds and removes a disk at `socket`.
pub fn settings(path: PathBuf, devices: Vec<&'static str>, group: &'static str, socket: PathBuf, seed: u64) -> Attack {
    Box::new(move |control| {
        let mut random = SmallRng::seed_from_u64(seed);
        while !control.is_stopped() {
            let Ok(mut client) = Client::connect_with(&path, TIMEOUT.time()) else {
                control.pause(PAUSE);
                continue;
            };
            let id = devices[random.random_range(0..devices.len())];
            let new = json!({ "id": "new", "storage": "null", "size": "1M", "queues": 1, "socket": socket });
            let (verb, params) = match random.random_range(0..7) {
                0 => ("disk.set", json!({ "id": id, "settings": { "iops": random.random_range(100..10_000) } })),
                1 => ("disk.set", json!({ "id": id, "settings": { "iops": "off", "merge": "on" } })),
                2 => (
                    "limit-group.set",
                    json!({ "name": group, "settings": { "iops": random.random_range(1000..8000) } }),
                ),
                3 => ("disk.add", json!({ "settings": new })),
                4 => ("disk.remove", json!({ "id": "new" })),
                5 => ("disk.retry", json!({})),
                _ => ("disk.list", json!({})),
            };
            // Refused while a daemon takes over.
            if client.call(verb, &params).is_ok() {
                control.count();
            }
            control.pause(PAUSE);
        }
    })
}
