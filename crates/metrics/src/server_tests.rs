//! A server with clients that behave, and others that do not. No test asserts a duration: limits are short where they
//! must pass, and long where they must not.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(50);
const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\n\r\n";

/// No limit of time passes.
const PATIENT: ServerLimits = ServerLimits {
    clients: 4,
    request_bytes: 1000,
    request: LONG,
    response: LONG,
    linger: LONG,
    settled: LONG,
    sample_age: Duration::ZERO,
};

struct Fixture {
    _server: Server,
    address: std::net::SocketAddr,
    samples: Arc<AtomicUsize>,
}

/// Starts a server whose metrics are this many bytes.
fn start(limits: ServerLimits, bytes: usize) -> Fixture {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let samples = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&samples);
    let sample = move |_, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok("x".repeat(bytes))
    };
    let server = Server::start(MetricsListener::Tcp(listener), Box::new(sample), limits).unwrap();
    Fixture { _server: server, address, samples }
}

impl Fixture {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    /// Scrapes. Returns the status, and the number of bytes of the body.
    fn scrape(&self) -> (String, usize) {
        let mut stream = self.connect();
        stream.write_all(REQUEST).unwrap();
        response(&mut stream)
    }
}

fn response(stream: &mut TcpStream) -> (String, usize) {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
    (head.lines().next().unwrap().to_owned(), body.len())
}

fn ok(bytes: usize) -> (String, usize) {
    ("HTTP/1.1 200 OK".to_owned(), bytes)
}

/// Waits until the server has closed the connection.
fn wait_for_close(stream: &mut TcpStream) {
    // A reset is a close too.
    let _ = stream.read_to_end(&mut Vec::new());
}

/// More than the buffers of two sockets.
const LARGE: usize = 64 << 20;

#[test]
fn a_scraper_that_never_reads_holds_nobody_up() {
    let server = start(PATIENT, LARGE);
    let mut stuck = Vec::new();
    for _ in 0..PATIENT.clients - 1 {
        let mut stream = server.connect();
        stream.write_all(REQUEST).unwrap();
        stuck.push(stream);
    }
    let mut silent = server.connect();
    silent.shutdown(Shutdown::Write).unwrap();
    // Until then it takes one of the clients' slots.
    wait_for_close(&mut silent);
    assert_eq!(server.scrape(), ok(LARGE));
    // They still get theirs.
    assert_eq!(response(&mut stuck[0]), ok(LARGE));
}

#[test]
fn a_scraper_that_does_not_read_or_write_is_dropped() {
    let server = start(ServerLimits { request: SHORT, response: SHORT, linger: SHORT, ..PATIENT }, LARGE);
    let mut clients: Vec<_> = (0..3).map(|_| server.connect()).collect();
    clients[1].write_all(&REQUEST[..10]).unwrap();
    clients[2].write_all(REQUEST).unwrap();
    wait_for_close(&mut clients[0]);
    wait_for_close(&mut clients[1]);
    // Its buffer is full: only the server's end of the connection shows it.
    let mut byte = [0];
    while clients[2].write(&byte).is_ok() {
        std::thread::sleep(Duration::from_millis(1));
    }
    byte[0] = 1;
    // A client that goes on sending after its response.
    let mut endless = server.connect();
    let _ = endless.write_all(b"GET / HTTP/1.1\r\n\r\n");
    while endless.write(&byte).is_ok() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn one_client_too_many_is_refused() {
    let server = start(PATIENT, 10);
    let mut waiting: Vec<_> = (0..PATIENT.clients).map(|_| server.connect()).collect();
    let mut refused = server.connect();
    assert_eq!(response(&mut refused).0, "HTTP/1.1 503 Service Unavailable");
    waiting[3].write_all(REQUEST).unwrap();
    assert_eq!(response(&mut waiting[3]), ok(10));
    drop(waiting);
    while server.scrape() != ok(10) {
        // Until the server has seen that the others have gone.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_oldest_client_makes_room_for_a_new_one() {
    let server = start(ServerLimits { settled: Duration::ZERO, ..PATIENT }, 10);
    let mut waiting: Vec<_> = (0..PATIENT.clients).map(|_| server.connect()).collect();
    assert_eq!(server.scrape(), ok(10));
    wait_for_close(&mut waiting[0]);
    waiting[1].write_all(REQUEST).unwrap();
    assert_eq!(response(&mut waiting[1]), ok(10));
}

#[test]
fn a_host_with_many_clients_makes_room_for_another_host() {
    // No time passes that would make room.
    let server = start(PATIENT, 10);
    let mut many: Vec<_> = (0..PATIENT.clients).map(|_| server.connect()).collect();
    let other = std::net::Ipv4Addr::new(127, 0, 0, 2);
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &std::net::SocketAddrV4::new(other, 0)).unwrap();
    rustix::net::connect(&socket, &server.address).unwrap();
    let mut scraper = TcpStream::from(socket);
    scraper.write_all(REQUEST).unwrap();
    assert_eq!(response(&mut scraper), ok(10));
    wait_for_close(&mut many[0]);
    many[1].write_all(REQUEST).unwrap();
    assert_eq!(response(&mut many[1]), ok(10));
}

#[test]
fn a_request_that_is_too_long_is_refused() {
    let server = start(PATIENT, 10);
    let mut stream = server.connect();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nA: ").unwrap();
    stream.write_all(&vec![b'a'; 5 * PATIENT.request_bytes]).unwrap();
    assert_eq!(response(&mut stream).0, "HTTP/1.1 431 Request Header Fields Too Large");
    // One byte at a time, at the limit exactly.
    let mut stream = server.connect();
    let padding = "a".repeat(PATIENT.request_bytes - "GET /metrics HTTP/1.1\r\nA: \r\n\r\n".len());
    for byte in format!("GET /metrics HTTP/1.1\r\nA: {padding}\r\n\r\n").bytes() {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(response(&mut stream), ok(10));
}

#[test]
fn a_sample_is_used_again_while_it_is_young() {
    let server = start(ServerLimits { sample_age: LONG, ..PATIENT }, 10);
    (0..5).for_each(|_| assert_eq!(server.scrape(), ok(10)));
    assert_eq!(server.samples.load(Ordering::Relaxed), 1);
    let server = start(PATIENT, 10);
    (0..5).for_each(|_| assert_eq!(server.scrape(), ok(10)));
    assert_eq!(server.samples.load(Ordering::Relaxed), 5);
}

#[test]
fn a_unix_socket_serves_as_well_and_a_stop_ends_clients() {
    let (folder, path) = (std::env::temp_dir(), format!("mqblk-metrics-{}.sock", std::process::id()));
    let path = folder.join(path);
    let listener = UnixListener::bind(&path).unwrap();
    let connect = || UnixStream::connect(&path).unwrap();
    let server =
        Server::start(MetricsListener::Unix(listener), Box::new(|_, _| Err("no".to_owned())), PATIENT).unwrap();
    let (mut one, mut other) = (connect(), connect());
    one.write_all(REQUEST).unwrap();
    let mut text = String::new();
    one.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 503 ") && text.ends_with("\r\n\r\nno\n"), "{text}");
    drop(server);
    assert_eq!(other.read(&mut [0]).unwrap(), 0);
    std::fs::remove_file(&path).unwrap();
}
