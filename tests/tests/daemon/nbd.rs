//! Disks of real NBD servers, `nbdkit` and `qemu-nbd`, which are killed and restarted under a load that verifies its
//! reads.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mqblk_admin::model::{ConnectionCounters, ConnectionsStat, QueueCounters};
use mqblk_driver::virtio_blk::BlkStatus;
use mqblk_tests::crash::scsi::{self, ScsiQueues};
use mqblk_tests::hostile::daemon::{HostileDaemon, mqblk_binary};
use mqblk_tests::hostile::load::VhostUserLoad;
use mqblk_tests::hostile::timed_load::RunningTimedLoad;
use mqblk_tests::hostile::wait_for;
use mqblk_tests::nbd_server::NbdServer;
use tempfile::TempDir;

const IMAGE_BYTES: u64 = 16 << 20;
const BLOCKS: usize = 2048;

/// An image and a socket.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let image = std::fs::File::create(folder.path().join("image")).expect("an image");
        image.set_len(IMAGE_BYTES).expect("an image");
        Place { folder }
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    fn uri(&self) -> String {
        format!("path=nbd+unix:///?socket={}", self.socket().display())
    }

    /// Starts nbdkit's file plugin with filters and their parameters.
    fn nbdkit(&self, filters: &[&str], parameters: &[&str]) -> NbdServer {
        let _ = std::fs::remove_file(self.socket());
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--unix"]).arg(self.socket());
        command.args(filters.iter().map(|filter| format!("--filter={filter}")));
        command.arg("file").arg(self.image()).args(parameters);
        let socket = self.socket();
        NbdServer::start(command, move || socket.exists())
    }

    fn qemu_nbd(&self) -> NbdServer {
        NbdServer::qemu_nbd(&self.image(), &self.socket(), &["--format=raw"])
    }
}

fn daemon(disk: &str) -> HostileDaemon {
    HostileDaemon::start(2, &[("d", &format!("{disk},queues=2"))])
}

/// Runs rounds for this time.
fn run(load: &mut VhostUserLoad, time: Duration) -> u32 {
    let (begin, mut rounds) = (Instant::now(), 0);
    while begin.elapsed() < time {
        load.round();
        rounds += 1;
    }
    rounds
}

/// Kills the server in mid-I/O, several times. The guest sees a slow disk.
fn kills_are_pauses(place: &Place, start: impl Fn() -> NbdServer) {
    let mut server = start();
    let disk = format!("{},queues=2", place.uri());
    let daemon = HostileDaemon::start(2, &[("d", &disk)]);
    let mut load = VhostUserLoad::connect(daemon.socket("d"), 2, BLOCKS, 7);
    for kill in 0..6 {
        let is_done = AtomicBool::new(false);
        // The servers belong to this thread: nbdkit ends with the thread that started it.
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    load.round();
                }
            });
            std::thread::sleep(Duration::from_millis(100 + 37 * kill));
            server.kill();
            // Requests submitted meanwhile wait.
            std::thread::sleep(Duration::from_millis(150));
            server = start();
            std::thread::sleep(Duration::from_millis(200));
            is_done.store(true, Ordering::Relaxed);
            running.join().expect("no request fails or returns wrong data");
        });
        load.round();
    }
    let log = daemon.log();
    assert!(log.matches("the connection to the storage is lost").count() >= 3, "the kills were not seen:\n{log}");
    let stat = daemon.stat("d");
    let ConnectionsStat { counters, unreachable_ns, last_failure, last_error } = stat.connections.expect("connections");
    let ConnectionCounters { connected, made, lost, repeated, .. } = counters;
    assert!(connected > 0 && lost >= 6 && made == lost + connected && repeated > 0, "{counters:?}");
    assert_eq!((unreachable_ns, last_error, counters.errors), (None, None, 0));
    assert!(last_failure.is_some_and(|why| why.contains("nbd.sock")));
    let QueueCounters { read_bytes, written_bytes, .. } = stat.totals.counters;
    assert!(
        counters.received_bytes > read_bytes && counters.sent_bytes > written_bytes,
        "payload and headers: {counters:?}"
    );
    drop(load);
    daemon.stop();
}

#[test]
fn kills_of_nbdkit_are_pauses() {
    let place = Place::new();
    kills_are_pauses(&place, || place.nbdkit(&[], &[]));
}

/// A server that serves one connection at a time.
#[test]
fn kills_of_qemu_nbd_are_pauses() {
    let place = Place::new();
    kills_are_pauses(&place, || place.qemu_nbd());
}

/// A controller whose LUN has one connection has its queues on the worker of its control queue. An added queue must
/// find them there.
#[test]
fn a_lun_of_a_server_with_one_connection() {
    let place = Place::new();
    let server = place.qemu_nbd();
    let socket = place.folder.path().join("scsi.sock");
    let admin = place.folder.path().join("admin.sock").display().to_string();
    let other = format!("id=wide,queues=2,socket={}", place.folder.path().join("wide.sock").display());
    let controller = format!("id=c,queues=2,socket={}", socket.display());
    let lun = format!("controller=c,target=0,{}", place.uri());
    let arguments = ["--controller", &controller, "--controller", &other, "--lun", &lun, "--admin", &admin];
    let daemon = HostileDaemon::start_with(2, &[("d", "storage=ram,size=1M")], &arguments);
    wait_for("the controller's socket", || socket.exists().then_some(()));
    let options = scsi::connect_options(socket, 2);
    let load = RunningTimedLoad::start("lun", 1, 5, move || ScsiQueues::connect(&options));
    wait_for("requests", || {
        load.assert_runs();
        (load.end_phase().record.completed() > 0).then_some(())
    });
    let second = Place::new();
    let second_server = second.qemu_nbd();
    let added = ["lun", "add", &format!("controller=wide,target=0,{}", second.uri()), "--socket", &admin];
    let output = Command::new(mqblk_binary()).args(added).output().expect("mqblk");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("one connection at a time"), "{text}");
    load.finish();
    daemon.stop();
    drop((server, second_server));
}

#[test]
fn a_slow_server_is_a_slow_disk() {
    let place = Place::new();
    let filters = ["delay", "rate"];
    let server = place.nbdkit(&filters, &["delay-read=3ms", "delay-write=5ms", "rate=400M"]);
    let daemon = daemon(&place.uri());
    let mut load = VhostUserLoad::connect(daemon.socket("d"), 2, BLOCKS, 7);
    assert!(run(&mut load, Duration::from_millis(500)) > 0);
    drop(load);
    daemon.stop();
    drop(server);
}

#[test]
fn an_error_of_the_server_is_the_requests_and_the_log_has_its_words() {
    let place = Place::new();
    let server = place.nbdkit(&["error"], &["error-pread=EIO", "error-pread-rate=100%"]);
    let daemon = daemon(&place.uri());
    let mut load = VhostUserLoad::connect(daemon.socket("d"), 1, BLOCKS, 7);
    assert_eq!(load.try_read(0), BlkStatus::IoError);
    assert_eq!(load.try_read(5), BlkStatus::IoError);
    wait_for("a line of the log", || daemon.log().contains("the server replies Input/output error").then_some(()));
    assert!(!daemon.log().contains("is lost"), "{}", daemon.log());
    let connections = daemon.stat("d").connections.expect("connections");
    assert_eq!((connections.counters.errors, connections.counters.lost), (2, 0));
    let words = connections.last_error.expect("an error");
    assert!(words.starts_with("Read at ") && words.contains("Input/output error"), "{words}");
    drop(load);
    daemon.stop();
    drop(server);
}

/// A server that ends with its last client: the daemon stays connected while it serves, and disconnects when it stops.
#[test]
fn a_server_that_ends_with_its_last_client() {
    let place = Place::new();
    let mut server = place.nbdkit(&["exitlast"], &[]);
    let daemon = daemon(&place.uri());
    let mut load = VhostUserLoad::connect(daemon.socket("d"), 2, BLOCKS, 7);
    assert!(run(&mut load, Duration::from_millis(300)) > 0);
    drop(load);
    assert_eq!(daemon.stat("d").connections.expect("connections").counters.lost, 0);
    daemon.stop();
    server.wait_end();
}

/// In the sandbox a daemon connects to the configured port.
#[test]
fn tcp_and_tls_work_in_the_sandbox() {
    let place = Place::new();
    let certificates = place.folder.path().join("pki");
    make_certificates(&certificates);
    for tls in [false, true] {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
        let start = || {
            let mut command = Command::new("nbdkit");
            command.args(["--foreground", "--ipaddr=127.0.0.1", "--exportname=x", "--port", &port.to_string()]);
            if tls {
                command.arg("--tls=require").arg(format!("--tls-certificates={}", certificates.display()));
            }
            command.arg("file").arg(place.image());
            NbdServer::start(command, || TcpStream::connect(("127.0.0.1", port)).is_ok())
        };
        let mut server = start();
        let scheme = if tls { "nbds" } else { "nbd" };
        let keys = if tls { format!(",tls-creds={}", certificates.display()) } else { String::new() };
        let daemon = daemon(&format!("path={scheme}://127.0.0.1:{port}/x{keys}"));
        let mut load = VhostUserLoad::connect(daemon.socket("d"), 2, BLOCKS, 7);
        assert!(run(&mut load, Duration::from_millis(300)) > 0);
        server.kill();
        let server = start();
        // Tests the reconnect: both in the sandbox.
        assert!(run(&mut load, Duration::from_millis(300)) > 0);
        drop(load);
        daemon.stop();
        if tls {
            refuses_revoked_certificates(&place, &certificates, &format!("path=nbds://127.0.0.1:{port}/x{keys}"));
        }
        drop(server);
    }
}

/// `settings`: a disk behind a server whose certificate is in the folder.
fn refuses_revoked_certificates(place: &Place, certificates: &Path, settings: &str) {
    let start = || {
        let disk = format!("id=d,socket={},{settings}", place.folder.path().join("d.sock").display());
        let output = Command::new(mqblk_binary()).args(["serve", "--print-config", "--disk", &disk]).output();
        let output = output.expect("mqblk");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let configuration = "[ca]\ndefault_ca = c\n[c]\ndatabase = index\ncrlnumber = number\ndefault_md = sha256\ndefault_crl_days = 30\n\
                         crl_extensions = e\n[e]\nauthorityKeyIdentifier = keyid:always\n";
    for (name, text) in [("ca.conf", configuration), ("index", ""), ("number", "01\n")] {
        std::fs::write(certificates.join(name), text).expect("a file");
    }
    let authority = ["ca", "-config", "ca.conf", "-keyfile", "ca-key.pem", "-cert", "ca-cert.pem"];
    let list = || openssl(certificates, &[&authority[..], &["-gencrl", "-out", "ca-crl.pem"]].concat());
    list();
    assert!(start().0, "none is revoked: {}", start().1);
    openssl(certificates, &[&authority[..], &["-revoke", "server-cert.pem"]].concat());
    list();
    let (starts, text) = start();
    assert!(!starts && text.contains("certificate: Revoked"), "{text}");
    std::fs::write(certificates.join("ca-crl.pem"), "nothing").expect("a file");
    let (starts, text) = start();
    assert!(!starts && text.contains("ca-crl.pem: no list of revoked certificates"), "{text}");
}

fn openssl(folder: &Path, arguments: &[&str]) {
    let output = Command::new("openssl").args(arguments).current_dir(folder).output().expect("openssl");
    assert!(output.status.success(), "openssl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Makes an authority, and a server certificate signed by it.
fn make_certificates(folder: &Path) {
    std::fs::create_dir(folder).expect("a folder");
    let openssl = |arguments: &[&str]| openssl(folder, arguments);
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    let authority =
        ["req", "-x509", "-days", "30", "-subj", "/CN=authority", "-keyout", "ca-key.pem", "-out", "ca-cert.pem"];
    openssl(&[&authority[..], &key].concat());
    let request = ["req", "-subj", "/CN=localhost", "-keyout", "server-key.pem", "-out", "server.csr"];
    openssl(&[&request[..], &key].concat());
    std::fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost\n").expect("a file");
    openssl(&[
        "x509",
        "-req",
        "-days",
        "30",
        "-in",
        "server.csr",
        "-CA",
        "ca-cert.pem",
        "-CAkey",
        "ca-key.pem",
        "-CAcreateserial",
        "-extfile",
        "names",
        "-out",
        "server-cert.pem",
    ]);
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let place = Place::new();
    for (path, expected) in [
        (place.uri(), "No such file or directory"),
        ("path=nbd://127.0.0.1:1/x".to_owned(), "NBD server 127.0.0.1:1, export \"x\": Connection refused"),
        ("path=nbd://127.0.0.1:99999".to_owned(), "the port \"99999\""),
        ("path=rdb:pool/image".to_owned(), "No such file or directory"),
        ("path=iscsi://host/1".to_owned(), "an unknown scheme \"iscsi\""),
    ] {
        let disk = format!("id=d,socket={},{path}", place.folder.path().join("d.sock").display());
        let output = Command::new(mqblk_binary()).args(["serve", "--disk", &disk]).output().expect("mqblk");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(expected), "{path}: {text}");
    }
}

/// A server that accepts and sends nothing.
#[test]
fn a_silent_server_is_given_up() {
    let place = Place::new();
    let listener = std::os::unix::net::UnixListener::bind(place.socket()).expect("a socket");
    let disk = format!("id=d,socket={},{}", place.folder.path().join("d.sock").display(), place.uri());
    let output = Command::new(mqblk_binary()).args(["serve", "--disk", &disk]).output().expect("mqblk");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("no answer within 10 s"), "{text}");
    drop(listener);
}
