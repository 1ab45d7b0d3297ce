//! Clients that send invalid messages, or do not read.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::super::socket_path;
use super::*;
use mqblk_xen::store::wire::{HEADER_BYTES, Header, PAYLOAD_MAX, Verb};

fn raw(machine: &Machine) -> UnixStream {
    let stream = UnixStream::connect(socket_path(machine.folder(), DomainId(1))).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

fn message(verb: u32, transaction: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { verb: Verb(verb), request: 7, transaction, len: payload.len() as u32 };
    [&header.encode(), payload].concat()
}

/// Returns the type and payload of the next message. `None` if the server has closed the connection.
fn receive(stream: &mut UnixStream) -> Option<(u32, Vec<u8>)> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let header = Header::decode(header);
    let mut payload = vec![0; header.len as usize];
    stream.read_exact(&mut payload).unwrap();
    Some((header.verb.0, payload))
}

#[test]
fn invalid_requests_get_their_errno() {
    let TestMachine { machine, toolstack: _, mut guest, _folder } = test_machine();
    let mut stream = raw(&machine);
    let long = [b"/".as_slice(), &[b'a'; 3073], b"\0"].concat();
    for (verb, transaction, payload, expected) in [
        (2, 0, b"".as_slice(), "EINVAL"),
        (2, 0, b"\0", "EINVAL"),
        (2, 0, b"/a b\0", "EINVAL"),
        (2, 0, b"/a//b\0", "EINVAL"),
        (2, 0, b"/a/\0", "EINVAL"),
        (2, 0, b"\xff\xfe\0", "EINVAL"),
        (2, 0, &long, "EINVAL"),
        (2, 0, b"@releaseDomain\0", "EINVAL"),
        (2, 99, b"domid\0", "ENOENT"),
        (4, 0, b"data", "EINVAL"),
        (4, 0, b"@a b\0t\0", "EINVAL"),
        (5, 0, b"data\0t\0", "ENOENT"),
        (6, 5, b"\0", "EBUSY"),
        (7, 0, b"T\0", "ENOENT"),
        (7, 0, b"X\0", "EINVAL"),
        (7, 1, b"", "EINVAL"),
        (10, 0, b"x\0", "EINVAL"),
        (11, 0, b"data", "EINVAL"),
        (11, 0, b"", "EINVAL"),
        (13, 0, b"data/none/x\0", "ENOENT"),
        (13, 0, b"/\0", "EINVAL"),
        (14, 0, b"data\0", "EINVAL"),
        (14, 0, b"data\0n1\0q1\0", "EINVAL"),
        (15, 0, b"data\0", "ENOSYS"),
        (16, 0, b"", "ENOSYS"),
        (8, 0, b"1\x001\x001\0", "ENOSYS"),
        (22, 0, b"data\0", "EINVAL"),
        (22, 0, b"data\0-1\0", "EINVAL"),
        (0xffff, 0, b"", "ENOSYS"),
        (u32::MAX, u32::MAX, b"\0\0\0", "ENOSYS"),
    ] {
        stream.write_all(&message(verb, transaction, payload)).unwrap();
        let (kind, answer) = receive(&mut stream).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        assert_eq!((kind, answer.trim_end_matches('\0')), (16, expected), "{verb} {payload:?}");
    }
    for (verb, payload, expected) in [
        (10, b"7\0".as_slice(), b"/local/domain/7\0".as_slice()),
        (17, b"1\0", b"T\0"),
        (17, b"9\0", b"F\0"),
        (22, b"data\x00999999\0", b"\0"),
        (21, b"", b"OK\0"),
    ] {
        stream.write_all(&message(verb, 0, payload)).unwrap();
        let (kind, answer) = receive(&mut stream).unwrap();
        assert!(kind == verb && answer.ends_with(expected), "{verb}: {kind} {answer:?}");
    }
    assert_eq!(guest.read("domid").unwrap().unwrap(), "1");
}

#[test]
fn a_too_long_message_ends_its_connection() {
    let TestMachine { machine, toolstack: _, mut guest, _folder } = test_machine();
    for len in [PAYLOAD_MAX as u32 + 1, u32::MAX] {
        let mut stream = raw(&machine);
        stream.write_all(&Header { verb: Verb::READ, request: 1, transaction: 0, len }.encode()).unwrap();
        assert_eq!(receive(&mut stream), None, "{len}");
    }
    let mut stream = raw(&machine);
    stream.write_all(&message(11, 0, &[b"data\0".as_slice(), &[b'v'; 2000]].concat())).unwrap();
    assert_eq!(receive(&mut stream), Some((11, b"OK\0".to_vec())));
    assert_eq!(guest.read("data").unwrap().unwrap().len(), 2000);
}

#[test]
fn a_message_may_arrive_in_parts() {
    let TestMachine { machine, toolstack: _, guest: _, _folder } = test_machine();
    let mut stream = raw(&machine);
    let whole = [message(11, 0, b"data\0piecewise"), message(2, 0, b"data\0"), message(13, 0, b"device\0")].concat();
    for byte in whole {
        stream.write_all(&[byte]).unwrap();
    }
    let answers: Vec<_> = (0..3).map(|_| receive(&mut stream).unwrap()).collect();
    assert_eq!(answers, [(11, b"OK\0".to_vec()), (2, b"piecewise".to_vec()), (16, b"EACCES\0".to_vec())]);
}

#[test]
fn garbage_affects_no_other_client() {
    use proptest::prelude::*;
    let TestMachine { machine, mut toolstack, guest, _folder } = test_machine();
    toolstack.write("/kept", "safe").unwrap();
    let others = std::cell::RefCell::new((toolstack, guest));
    let word = prop_oneof![4 => 0..24u32, 1 => any::<u32>()];
    let path =
        prop_oneof!["[a-c/@]{0,6}", Just("data".to_owned()), Just("data/x".to_owned()), Just("/kept".to_owned())];
    let payload = (path, proptest::collection::vec(prop_oneof![Just(0u8), Just(b'n'), Just(b'1'), any::<u8>()], 0..40));
    let messages = proptest::collection::vec((word, 0..4u32, payload, any::<u32>()), 0..60);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig { cases: 200, ..ProptestConfig::default() });
    runner
        .run(&messages, |messages| {
            let mut stream = raw(&machine);
            for (verb, transaction, (path, rest), broken) in messages {
                let mut bytes = message(verb, transaction, &[path.as_bytes(), &[0], &rest].concat());
                // A few with a wrong length, after which the stream is out of sync.
                if broken % 64 == 0 {
                    bytes[12..16].copy_from_slice(&(broken % 9000).to_ne_bytes());
                }
                if stream.write_all(&bytes).is_err() {
                    break;
                }
            }
            drop(stream);
            let (toolstack, guest) = &mut *others.borrow_mut();
            prop_assert_eq!(toolstack.read("/kept").unwrap().unwrap(), "safe");
            prop_assert_eq!(guest.read("domid").unwrap().unwrap(), "1");
            Ok(())
        })
        .unwrap();
}

#[test]
fn unread_replies_block_only_their_client() {
    let TestMachine { machine, toolstack: _, mut guest, _folder } = test_machine();
    guest.write("data", &"v".repeat(2000)).unwrap();
    let mut stream = raw(&machine);
    stream.set_nonblocking(true).unwrap();
    let request = message(2, 0, b"data\0");
    let mut sent = 0;
    let mut stalled = 0;
    while stalled < 200 {
        match stream.write(&request[sent % request.len()..]) {
            Ok(some) => (sent, stalled) = (sent + some, 0),
            Err(_) => {
                stalled += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(sent < 100_000_000, "the server takes requests without end");
    }
    assert_eq!(guest.read("domid").unwrap().unwrap(), "1", "others are served");
    stream.set_nonblocking(false).unwrap();
    for number in 0..sent / request.len() {
        let (kind, answer) = receive(&mut stream).unwrap();
        assert_eq!((kind, answer.len()), (2, 2000), "answer {number}");
    }
}

#[test]
fn unread_events_are_bounded() {
    let TestMachine { machine, mut toolstack, mut guest, _folder } = test_machine();
    let mut stream = raw(&machine);
    stream.write_all(&message(4, 0, b"data\0token\0")).unwrap();
    for _ in 0..3000 {
        guest.write("data", "again").unwrap();
    }
    for expected in [4, 15] {
        assert_eq!(receive(&mut stream).unwrap().0, expected);
    }
    stream.write_all(&message(2, 0, b"domid\0")).unwrap();
    let events = std::iter::from_fn(|| receive(&mut stream)).take_while(|(kind, _)| *kind == 15).count();
    assert!((1..=3000).contains(&events), "{events}");

    // Events of always new nodes cannot be merged: the client is disconnected.
    let mut lazy = raw(&machine);
    lazy.write_all(&message(4, 0, b"/local/domain/1/data\0t\0")).unwrap();
    let mut number = 0;
    let ended = (0..60).any(|_| {
        toolstack
            .transaction(|transaction| {
                for _ in 0..4000 {
                    number += 1;
                    let path = format!("/local/domain/1/data/{number}");
                    transaction.mkdir(&path)?;
                }
                Ok(())
            })
            .unwrap();
        toolstack.remove("/local/domain/1/data").unwrap();
        toolstack.mkdir("/local/domain/1/data").unwrap();
        toolstack.set_permissions("/local/domain/1/data", &[permission(Access::Read, 1)]).unwrap();
        lazy.write_all(&message(2, 0, b"domid\0")).is_err()
    });
    assert!(ended, "it is still connected after {number} events");
    assert_eq!(guest.read("domid").unwrap().unwrap(), "1");
}
