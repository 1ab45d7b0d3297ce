//! Clients of every kind, over real sockets. No test asserts a duration; each waits for the expected event.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::path::PathBuf;
use std::sync::mpsc::{channel, sync_channel};

use mqblk_test_bounds::Bound;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::params::{Param, ParamKind};
use crate::verb_error::VerbError;
use crate::verbs::Verb;
use crate::{Client, ClientError, StatQuery};

/// Long enough for any machine; only a failing test takes this long.
fn long() -> Duration {
    Bound::seconds(60).time()
}
/// Bytes in a response of `flood`: more than socket buffers hold.
const FLOOD: usize = 8 << 20;

const ECHO: &[Param] = &[Param { name: "text", kind: ParamKind::Text, about: "What comes back" }];

fn verbs() -> Verbs {
    Verbs::new(vec![
        Verb::new("echo", "Returns its text", ECHO, |params| Ok(json!(params.text("text")))),
        Verb::new("flood", "Says a lot", &[], |_| Ok(json!("x".repeat(FLOOD)))),
        Verb::new("stat", "Says nothing useful", &[], |_| Ok(json!([1]))),
    ])
}

struct Fixture {
    server: Server,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

fn fixture_with(verbs: Verbs, options: ServerOptions) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let server = Server::start(UnixListener::bind(&path).unwrap(), verbs, options).unwrap();
    Fixture { server, path, _folder: folder }
}

fn fixture(options: ServerOptions) -> Fixture {
    fixture_with(verbs(), options)
}

impl Fixture {
    fn client(&self) -> Client {
        Client::connect_with(&self.path, long()).unwrap()
    }

    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(long())).unwrap();
        stream
    }

    /// Connects until a client is accepted: the slot of one that has disconnected is freed a moment later.
    fn accepted_client(&self) -> Client {
        let until = Instant::now() + long();
        loop {
            let mut client = self.client();
            match client.call("echo", &Value::Null) {
                Ok(_) => return client,
                Err(error) => assert!(Instant::now() < until, "no free slot: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn assert_responds(&self) {
        assert_eq!(self.client().call("echo", &json!({ "text": "there?" })).unwrap(), json!("there?"));
    }
}

/// Reads until the server closes the connection.
fn until_closed(mut stream: &UnixStream) -> String {
    let mut text = Vec::new();
    match stream.read_to_end(&mut text) {
        Ok(_) => {}
        // The server closed with unread data.
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
    String::from_utf8(text).unwrap()
}

fn code(line: &str) -> Value {
    serde_json::from_str::<Value>(line).unwrap()["error"]["code"].clone()
}

#[test]
fn a_client_may_send_any_number_of_requests() {
    let served = fixture(ServerOptions::default());
    let mut client = served.client();
    for text in ["a", "", "\n", "ü"] {
        assert_eq!(client.call("echo", &json!({ "text": text })).unwrap(), json!(text));
        assert!(matches!(client.call("none", &Value::Null), Err(ClientError::Refused(error)) if error.code == -32601));
    }
    assert_eq!(client.call("echo", &Value::Null).unwrap(), Value::Null);
    assert_eq!(client.call("flood", &Value::Null).unwrap().as_str().unwrap().len(), FLOOD);
    assert!(matches!(client.stat(&StatQuery::default()), Err(ClientError::Refused(error)) if error.code == -32602));
}

#[test]
fn lines_may_arrive_byte_by_byte_and_many_at_once() {
    let served = fixture(ServerOptions::default());
    let stream = served.raw();
    let request = |id: u32| format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"echo\"}}\n");
    for byte in request(0).bytes() {
        (&stream).write_all(&[byte]).unwrap();
    }
    let many: String = (1..500).map(request).collect();
    (&stream).write_all(many.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let ids: Vec<_> = until_closed(&stream)
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids, (0..500).collect::<Vec<_>>());
}

#[test]
fn a_line_that_is_too_long_is_refused_and_the_client_closed() {
    let served = fixture(ServerOptions { line_bytes: 1000, ..ServerOptions::default() });
    let text = |length: usize| format!("\"{}\"\n", "x".repeat(length - 2));
    for (bytes, message) in [
        (text(1001), "found a line of more than 1000 bytes, expected one request in a line"),
        ("x".repeat(100_000), "found a line of more than 1000 bytes, expected one request in a line"),
    ] {
        let stream = served.raw();
        // The server may close before it has read everything.
        let _ = (&stream).write_all(bytes.as_bytes());
        let response = until_closed(&stream);
        assert_eq!(code(&response), -32600, "{response}");
        assert!(response.contains(message), "{response}");
    }
    // The longest allowed line.
    let stream = served.raw();
    (&stream).write_all(text(1000).as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(until_closed(&stream).contains("expected an object"));
    served.assert_responds();
}

#[test]
fn a_line_without_its_end_gets_no_response() {
    let served = fixture(ServerOptions::default());
    let stream = served.raw();
    (&stream).write_all(br#"{"jsonrpc":"2.0","id":1,"method":"echo"}"#).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(until_closed(&stream), "");
}

#[test]
fn half_a_line_blocks_no_other_client_and_times_out() {
    let served = fixture(ServerOptions { timeout: Duration::from_millis(200), ..ServerOptions::default() });
    let halves: Vec<_> = (0..4).map(|_| served.raw()).collect();
    for mut half in &halves {
        half.write_all(b"{\"jsonrpc\"").unwrap();
    }
    served.assert_responds();
    for half in &halves {
        assert_eq!(until_closed(half), "");
    }
    // A client that is silent between requests stays connected.
    let mut silent = served.client();
    silent.call("echo", &Value::Null).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    silent.call("echo", &Value::Null).unwrap();
}

#[test]
fn a_line_that_arrives_too_slowly_times_out() {
    let served = fixture(ServerOptions { timeout: Duration::from_millis(200), ..ServerOptions::default() });
    let stream = served.raw();
    let until = Instant::now() + long();
    while (&stream).write_all(b" ").is_ok() {
        assert!(Instant::now() < until, "the server waits for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_client_that_never_reads_blocks_no_other_client_and_times_out() {
    let served = fixture(ServerOptions {
        timeout: Duration::from_millis(200),
        clients: 2,
        reserved: 0,
        ..ServerOptions::default()
    });
    let deaf = served.raw();
    (&deaf).write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"flood\"}\n").unwrap();
    served.assert_responds();
    // There are two slots, and the second of these two clients gets the slot of the client that does not read.
    let _both = [served.accepted_client(), served.accepted_client()];
    assert!(until_closed(&deaf).len() < FLOOD);
}

#[test]
fn a_client_above_the_limit_gets_an_error() {
    let served = fixture(ServerOptions { settled: long(), ..ServerOptions::default() });
    // 16 for everybody, and 4 for the daemon's own user.
    let mut clients: Vec<_> = (0..20).map(|_| served.client()).collect();
    for client in &mut clients {
        client.call("echo", &Value::Null).unwrap();
    }
    for _ in 0..3 {
        let response = until_closed(&served.raw());
        assert_eq!(code(&response), -32000, "{response}");
        assert!(response.contains("found 20 clients connected"), "{response}");
        // The client reads the error even if its request could not be sent.
        let refused = served.client().call("echo", &Value::Null).unwrap_err();
        assert!(matches!(&refused, ClientError::Refused(error) if error.code == -32000), "{refused}");
    }
    clients.pop();
    clients.push(served.accepted_client());
    for client in &mut clients {
        client.call("echo", &Value::Null).unwrap();
    }
}

#[test]
fn idle_clients_make_room() {
    let served = fixture(ServerOptions { settled: Duration::from_millis(50), ..ServerOptions::default() });
    let idle: Vec<_> = (0..20).map(|_| served.raw()).collect();
    // Refused until the others have been idle for long enough.
    drop(served.accepted_client());
    assert_eq!(until_closed(&idle[0]), "", "the one that was idle for longest");
    let mut half = &idle[1];
    half.write_all(b"{").unwrap();
    let further: Vec<_> = (0..40).map(|_| served.accepted_client()).collect();
    assert_eq!(until_closed(half), "", "half a request does not keep its place");
    drop(further);
}

#[test]
fn a_slow_verb_blocks_only_its_client() {
    let (go, wait) = channel::<()>();
    let (entered, enters) = sync_channel(1);
    let wait = std::sync::Mutex::new(wait);
    let slow = Verb::new("slow", "Waits", &[], move |_| {
        entered.send(()).map_err(|_| VerbError::Failed("nobody waits".to_owned()))?;
        wait.lock().unwrap().recv().map_err(|_| VerbError::Failed("let go".to_owned()))?;
        Ok(json!("done"))
    });
    let echo = Verb::new("echo", "Echo", ECHO, |params| Ok(json!(params.text("text"))));
    let served = fixture_with(Verbs::new(vec![slow, echo]), ServerOptions::default());
    let mut client = served.client();
    let waiting = std::thread::spawn(move || client.call("slow", &Value::Null).unwrap());
    enters.recv().unwrap();
    served.assert_responds();
    go.send(()).unwrap();
    assert_eq!(waiting.join().unwrap(), json!("done"));
}

#[test]
fn stopping_closes_every_client() {
    let Fixture { server, path, _folder } = fixture(ServerOptions::default());
    let idle = UnixStream::connect(&path).unwrap();
    let mut half = UnixStream::connect(&path).unwrap();
    half.write_all(b"{").unwrap();
    let mut deaf = UnixStream::connect(&path).unwrap();
    deaf.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"flood\"}\n").unwrap();
    // The response has begun: the server is in the middle of it.
    let mut first = [0];
    deaf.read_exact(&mut first).unwrap();
    drop(server);
    for stream in [&idle, &half, &deaf] {
        assert!(until_closed(stream).len() < FLOOD);
    }
    assert!(matches!(Client::connect_with(&path, long()), Err(ClientError::Connect { .. })));
}

#[test]
fn a_server_without_a_valid_response_is_an_error() {
    let say = |text: &'static str| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let mut line = String::new();
            BufReader::new(&theirs).read_line(&mut line).unwrap();
            (&theirs).write_all(text.as_bytes()).unwrap();
        });
        let error = Client::over(ours, long()).unwrap().call("echo", &Value::Null).unwrap_err();
        server.join().unwrap();
        error.to_string()
    };
    for (text, want) in [
        ("", "found a connection that closed without an answer"),
        ("half", "found a connection that closed without an answer"),
        ("HTTP/1.1 400 Bad Request\n", "found a line that is none (expected value"),
        ("{}\n", "found a line without jsonrpc \"2.0\""),
        ("{\"jsonrpc\":\"2.0\",\"id\":2,\"result\":1}\n", "found an answer to 2 when 1 was asked"),
        ("{\"jsonrpc\":\"2.0\",\"id\":1}\n", "found an answer to 1 when 1 was asked"),
        ("{\"jsonrpc\":\"2.0\",\"id\":1,\"error\":3}\n", "found an error that is none (invalid type"),
        (
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"error\":{\"code\":1,\"message\":\"no\"}}\n",
            "the daemon answered: no (code 1)",
        ),
    ] {
        assert!(say(text).starts_with(want), "{text}: {}", say(text));
    }
    let (ours, _silent) = UnixStream::pair().unwrap();
    let late = Client::over(ours, Duration::from_millis(50)).unwrap().call("echo", &Value::Null).unwrap_err();
    assert!(late.to_string().starts_with("found no answer in 0.05 seconds"), "{late}");
    let nobody = Client::connect(std::path::Path::new("/nonexistent/admin.sock")).unwrap_err();
    assert!(nobody.to_string().contains("is it running, with --admin?"), "{nobody}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Any bytes, in any chunks, leave the server running.
    #[test]
    fn any_bytes_leave_the_server_running(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 0..6)) {
        static SERVED: std::sync::LazyLock<Fixture> = std::sync::LazyLock::new(|| fixture(ServerOptions::default()));
        let stream = SERVED.raw();
        for chunk in &chunks {
            (&stream).write_all(chunk).unwrap();
        }
        (&stream).write_all(b"\n{\"jsonrpc\":\"2.0\",\"id\":\"last\",\"method\":\"echo\"}\n").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let last = until_closed(&stream);
        let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
        prop_assert_eq!(&last["id"], "last");
        prop_assert!(last.get("result").is_some());
    }
}
