//! A client against a server that follows a script, valid or not.

use std::io::{Read, Write};
use std::thread::JoinHandle;

use mqblk_memory::DomainId;
use proptest::prelude::*;

use super::*;

/// Returns the bytes that the server sends for a request; `None` closes the connection.
type Script = Box<dyn FnMut(Header, &[u8]) -> Option<Vec<u8>> + Send>;

fn message(verb: Verb, request: u32, transaction: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { verb, request, transaction, len: payload.len() as u32 };
    [header.encode().as_slice(), payload].concat()
}

fn reply(request: Header, payload: &[u8]) -> Option<Vec<u8>> {
    Some(message(request.verb, request.request, request.transaction, payload))
}

fn error(request: Header, name: &str) -> Option<Vec<u8>> {
    Some(message(Verb::ERROR, request.request, request.transaction, format!("{name}\0").as_bytes()))
}

fn event(path: &str, token: &str) -> Vec<u8> {
    message(Verb::WATCH_EVENT, 0, 0, format!("{path}\0{token}\0").as_bytes())
}

/// Starts a server that follows the script, until the returned client is dropped.
fn serve_script(mut script: Script) -> (Xenstore, JoinHandle<()>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        loop {
            let mut header = [0; HEADER_BYTES];
            if theirs.read_exact(&mut header).is_err() {
                return;
            }
            let header = Header::decode(header);
            let mut payload = vec![0; header.len as usize];
            if theirs.read_exact(&mut payload).is_err() {
                return;
            }
            let Some(reply) = script(header, &payload) else { return };
            // In small parts: a message need not arrive whole.
            for part in reply.chunks(7) {
                if theirs.write_all(part).is_err() {
                    return;
                }
            }
        }
    });
    (Xenstore::from_socket(ours).unwrap(), server)
}

fn finish(store: Xenstore, server: JoinHandle<()>) {
    drop(store);
    server.join().unwrap();
}

#[test]
fn requests_have_xenstoreds_format() {
    let (sender, seen) = std::sync::mpsc::channel();
    let (mut store, server) = serve_script(Box::new(move |request, payload| {
        sender.send((request.verb, request.transaction, payload.to_vec())).unwrap();
        match request.verb {
            Verb::READ if payload == b"domid\0" => reply(request, b"3"),
            Verb::READ => error(request, "ENOENT"),
            Verb::DIRECTORY => reply(request, b"a\0bc\0"),
            Verb::GET_PERMS => reply(request, b"n0\0r3\0"),
            _ => reply(request, b"OK\0"),
        }
    }));
    assert_eq!(store.read("domid").unwrap().as_deref(), Some("3"));
    assert_eq!(store.read("/none").unwrap(), None);
    assert_eq!(store.list("/dir").unwrap().unwrap(), ["a", "bc"]);
    let permissions = store.permissions("/dir").unwrap().unwrap();
    store.set_permissions("/dir", &permissions).unwrap();
    store.write("/dir/a", "value").unwrap();
    store.mkdir("/dir/b").unwrap();
    store.remove("/dir/b").unwrap();
    store.watch("/dir", "token").unwrap();
    store.unwatch("/dir", "token").unwrap();
    assert_eq!(permissions[1], Permission { domain: DomainId(3), access: Access::Read });
    finish(store, server);
    let expected: [(Verb, &[u8]); 10] = [
        (Verb::READ, b"domid\0"),
        (Verb::READ, b"/none\0"),
        (Verb::DIRECTORY, b"/dir\0"),
        (Verb::GET_PERMS, b"/dir\0"),
        (Verb::SET_PERMS, b"/dir\0n0\0r3\0"),
        (Verb::WRITE, b"/dir/a\0value"),
        (Verb::MKDIR, b"/dir/b\0"),
        (Verb::RM, b"/dir/b\0"),
        (Verb::WATCH, b"/dir\0token\0"),
        (Verb::UNWATCH, b"/dir\0token\0"),
    ];
    let seen: Vec<_> = seen.iter().collect();
    assert_eq!(seen, expected.map(|(verb, payload)| (verb, 0, payload.to_vec())));
}

#[test]
fn invalid_requests_are_not_sent() {
    let (mut store, server) = serve_script(Box::new(|_, _| panic!("nothing is sent")));
    let long = "v".repeat(PAYLOAD_MAX - "/a".len());
    for (result, expected) in [
        (
            store.write("/a", &long),
            "xenstore: write /a: found a request of 4097 bytes, expected at most 4096 (path and value)",
        ),
        (store.write("a b", ""), "xenstore: write: found byte 0x20 in a path, expected letters, digits and -/_@"),
        (store.remove(""), "xenstore: remove: found an empty path"),
        (store.watch("/a", "t\0"), "xenstore: watch /a: found a zero byte in a token, expected none"),
    ] {
        let error = result.unwrap_err();
        assert_eq!((error.to_string().as_str(), error.errno()), (expected, "EINVAL"));
    }
    finish(store, server);
}

#[test]
fn error_replies_carry_the_errno_name() {
    let mut names =
        ["EACCES\0", "ENOSPC", "E2BIG\0", "", "\0", "nonsense\0", "EVERYTHING IS LOST\0", "E\u{1b}[2J\0"].into_iter();
    let (mut store, server) = serve_script(Box::new(move |request, _| {
        Some(message(Verb::ERROR, request.request, 0, names.next().unwrap().as_bytes()))
    }));
    for expected in ["EACCES", "ENOSPC", "E2BIG", "EIO", "EIO", "EIO", "EIO", "EIO"] {
        let error = store.write("/a", "").unwrap_err();
        assert_eq!(error.errno(), expected);
        assert!(!error.is_lost());
    }
    finish(store, server);
}

#[test]
fn a_value_that_is_not_utf8_fails_only_its_read() {
    let (mut store, server) = serve_script(Box::new(|request, payload| {
        reply(request, if payload == b"/odd\0" { &[0xff, 0xfe] } else { b"fine" })
    }));
    assert_eq!(store.read("/odd").unwrap_err().errno(), "EILSEQ");
    assert_eq!(store.read("/even").unwrap().as_deref(), Some("fine"));
    finish(store, server);
}

#[test]
fn events_arrive_between_replies() {
    let (mut store, server) = serve_script(Box::new(|request, _| {
        let mut sent = vec![];
        // The initial event before the reply, which a real server does not do but the kernel's node may.
        sent.extend(event("/a", "t"));
        for n in 0..100 {
            sent.extend(event(&format!("/a/{}", n % 3), "t"));
        }
        sent.extend(message(request.verb, request.request.wrapping_sub(1), 0, b"stale"));
        sent.extend(reply(request, b"OK\0")?);
        sent.extend(event("/a/last", "t"));
        sent.extend(event("/else", "t"));
        sent.extend(message(Verb::WATCH_EVENT, 0, 0, b"/a/half"));
        sent.extend(message(Verb::WATCH_EVENT, 0, 0, &[0xff, 0, 0xff]));
        Some(sent)
    }));
    store.watch("/a", "t").unwrap();
    assert_eq!(store.watch("/a", "t").unwrap_err().errno(), "EEXIST");
    let timeout = Some(Duration::from_secs(60));
    for path in ["/a", "/a/0", "/a/1", "/a/2", "/a/last"] {
        assert_eq!(store.next_event(timeout).unwrap().unwrap().path, path);
    }
    assert_eq!(store.next_event(Some(Duration::from_millis(20))).unwrap(), None);
    finish(store, server);
}

#[test]
fn a_refused_watch_is_not_added() {
    let (mut store, server) = serve_script(Box::new(|request, _| match request.verb {
        Verb::WATCH => error(request, "EACCES"),
        _ => Some([event("/a", "t"), reply(request, b"")?].concat()),
    }));
    assert_eq!(store.watch("/a", "t").unwrap_err().errno(), "EACCES");
    assert_eq!(store.unwatch("/a", "t").unwrap_err().errno(), "ENOENT");
    store.read("/b").unwrap();
    assert_eq!(store.next_event(Some(Duration::ZERO)).unwrap(), None);
    finish(store, server);
}

#[test]
fn a_transaction_is_repeated_after_a_conflict() {
    let mut starts = 0;
    let (mut store, server) = serve_script(Box::new(move |request, payload| match request.verb {
        Verb::TRANSACTION_START => {
            starts += 1;
            reply(request, format!("{}\0", 40 + starts).as_bytes())
        }
        Verb::TRANSACTION_END if payload == b"T\0" && request.transaction < 43 => error(request, "EAGAIN"),
        Verb::TRANSACTION_END => reply(request, b"OK\0"),
        _ => reply(request, request.transaction.to_string().as_bytes()),
    }));
    let mut runs = 0;
    let value = store.transaction(|transaction| {
        runs += 1;
        transaction.write("/a", "1")?;
        transaction.read("/b")
    });
    assert_eq!((value.unwrap().as_deref(), runs), (Some("43"), 3));
    assert_eq!(store.read("/b").unwrap().as_deref(), Some("0"));
    finish(store, server);
}

#[test]
fn a_transaction_that_always_conflicts_fails() {
    let (mut store, server) = serve_script(Box::new(|request, _| match request.verb {
        Verb::TRANSACTION_END => error(request, "EAGAIN"),
        _ => reply(request, b"7\0"),
    }));
    let error = store.transaction(|_| Ok(())).unwrap_err();
    assert!(matches!(error.kind, XenstoreErrorKind::Conflicts(32)), "{error}");
    assert!(!error.is_lost());
    finish(store, server);
}

#[test]
fn a_transaction_that_fails_is_aborted() {
    let (sender, ends) = std::sync::mpsc::channel();
    let (mut store, server) = serve_script(Box::new(move |request, payload| match request.verb {
        Verb::TRANSACTION_START => reply(request, b"9\0"),
        Verb::TRANSACTION_END => {
            sender.send((request.transaction, payload.to_vec())).unwrap();
            reply(request, b"OK\0")
        }
        _ => error(request, "EACCES"),
    }));
    let failed = store.transaction(|transaction| transaction.write("/a", "1")).unwrap_err();
    assert_eq!(failed.errno(), "EACCES");
    finish(store, server);
    assert_eq!(ends.iter().collect::<Vec<_>>(), [(9, b"F\0".to_vec())]);
}

#[test]
fn a_long_directory_is_listed_in_parts() {
    let names: Vec<String> = (0..3000).map(|n| format!("name-{n}")).collect();
    let whole: Vec<u8> = names.iter().flat_map(|name| [name.as_bytes(), &[0]].concat()).collect();
    let mut parts_sent = 0;
    let (mut store, server) = serve_script(Box::new(move |request, payload| {
        if request.verb == Verb::DIRECTORY {
            return error(request, "E2BIG");
        }
        let offset: usize = std::str::from_utf8(split_strings(payload).nth(1).unwrap()).unwrap().parse().unwrap();
        parts_sent += 1;
        // The directory changes once, in the middle.
        let mut part = if parts_sent < 4 { b"1\0".to_vec() } else { b"2\0".to_vec() };
        let rest = &whole[offset..whole.len().min(offset + 3000)];
        let end = rest.iter().rposition(|byte| *byte == 0).unwrap() + 1;
        part.extend(&rest[..end]);
        if offset + end == whole.len() {
            part.push(0);
        }
        reply(request, &part)
    }));
    assert_eq!(store.list("/dir").unwrap().unwrap(), names);
    finish(store, server);
}

#[test]
fn a_directory_without_an_end_is_an_error() {
    let (mut store, server) = serve_script(Box::new(|request, _| match request.verb {
        Verb::DIRECTORY => error(request, "E2BIG"),
        _ => reply(request, b"1\0a\0"),
    }));
    assert!(store.list("/dir").unwrap_err().to_string().contains("found no end of a directory"));
    finish(store, server);
}

#[test]
fn a_server_that_breaks_the_protocol_loses_the_connection() {
    let scripts: Vec<(&str, Script)> = vec![
        ("closed by the other side", Box::new(|_, _| None)),
        ("found a message of 4294967295 bytes, expected at most 4096", Box::new(|_, _| Some(vec![0xff; 16]))),
        ("found a message of 4097 bytes", Box::new(|request, _| reply(request, &[b'a'; PAYLOAD_MAX + 1]))),
        (
            "found an answer of type 11, expected 2",
            Box::new(|request, _| Some(message(Verb::WRITE, request.request, 0, b"OK\0"))),
        ),
        ("no answer within", Box::new(|request, _| Some(message(request.verb, request.request + 1, 0, b"not yours")))),
        ("no answer within", Box::new(|request, _| Some(reply(request, b"half of it")?[..20].to_vec()))),
        ("no answer within", Box::new(|_, _| Some(vec![0; 3]))),
    ];
    for (expected, script) in scripts {
        let (mut store, server) = serve_script(script);
        store.set_timeout(Duration::from_millis(50));
        let first = store.read("/a").unwrap_err();
        assert!(first.is_lost() && first.to_string().contains(expected), "{first}: {expected}");
        let second = store.write("/b", "").unwrap_err();
        assert!(second.is_lost() && second.to_string().contains(expected), "{second}: {expected}");
        assert!(store.next_event(None).unwrap_err().is_lost());
        finish(store, server);
    }
}

#[test]
fn a_flood_of_events_does_not_extend_the_timeout() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || while theirs.write_all(&event("/a", "t")).is_ok() {});
    let mut store = Xenstore::from_socket(ours).unwrap();
    store.set_timeout(Duration::from_millis(50));
    assert!(store.read("/b").unwrap_err().to_string().contains("no answer within"));
    finish(store, server);
}

#[test]
fn a_transaction_without_an_id_loses_the_connection() {
    for number in ["", "\0", "0\0", "x\0", "-1\0", "4294967296\0"] {
        let (mut store, server) = serve_script(Box::new(move |request, _| reply(request, number.as_bytes())));
        assert!(store.transaction(|_| Ok(())).unwrap_err().is_lost(), "{number:?}");
        finish(store, server);
    }
}

#[test]
fn a_missing_xenstore_is_not_found() {
    let folder = tempfile::tempdir().unwrap();
    let error = Xenstore::connect(&folder.path().join("none")).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// For any bytes from the server every call returns a result or an error.
    #[test]
    fn any_reply_is_survived(
        answers in proptest::collection::vec(
            (0..24u32, prop_oneof![Just(None), any::<u32>().prop_map(Some)], prop_oneof![Just(None), any::<u32>().prop_map(Some)],
             proptest::collection::vec(any::<u8>(), 0..64)),
            0..8,
        ),
        calls in proptest::collection::vec(0..8u8, 1..8),
    ) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut sent = vec![];
        for (at, (verb, request, len, payload)) in answers.into_iter().enumerate() {
            let header = Header {
                verb: Verb(verb),
                request: request.unwrap_or(at as u32 + 1),
                transaction: 0,
                len: len.unwrap_or(payload.len() as u32),
            };
            sent.extend(header.encode());
            sent.extend(payload);
        }
        theirs.write_all(&sent).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let mut store = Xenstore::from_socket(ours).unwrap();
        store.set_timeout(Duration::from_millis(200));
        for call in calls {
            match call {
                0 => { let _ = store.read("/a"); }
                1 => { let _ = store.write("/a", "b"); }
                2 => { let _ = store.list("/a"); }
                3 => { let _ = store.permissions("/a"); }
                4 => { let _ = store.watch("/a", "t"); }
                5 => { let _ = store.unwatch("/a", "t"); }
                6 => { let _ = store.transaction(|transaction| transaction.remove("/a")); }
                _ => { let _ = store.next_event(Some(Duration::ZERO)); }
            }
        }
    }
}
