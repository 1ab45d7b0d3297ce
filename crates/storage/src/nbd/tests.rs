//! The backend against servers that follow the protocol, and against ones that violate it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use mqblk_core::{BlockSize, ByteLen, Disk, Errno, Op, Outcome};
use mqblk_uring::{FixedBufferUse, UringContext};

use super::discard_granularity;
use super::protocol::{command, export_flag};
use super::test_server::{ALL_FLAGS, Command, Offer, Refusal, TestServer, chunk, error_chunk, is_durable, simple};
use crate::conformance::{TestRequest, TestTarget, TestWorker, run};

const WRITE: Op = Op::Write { fua: false };
const DURABLE_WRITE: Op = Op::Write { fua: true };
const DONE: Outcome = Outcome::Done(ByteLen(4096));

fn open(server: &TestServer, more: &[(&str, &str)]) -> Arc<dyn Disk<UringContext>> {
    try_open(server, more).unwrap_or_else(|error| panic!("{error}"))
}

fn try_open(server: &TestServer, more: &[(&str, &str)]) -> Result<Arc<dyn Disk<UringContext>>, String> {
    let path = server.path.display().to_string();
    let settings = [&[("socket-path", path.as_str())], more].concat();
    let target = TestTarget { kind: "nbd", settings: &settings, keeps_data: true, seed: 0 };
    target.open(&[]).map_err(|error| error.to_string())
}

fn worker(disk: &Arc<dyn Disk<UringContext>>) -> TestWorker {
    TestWorker::new(disk.as_ref(), 16, FixedBufferUse::Off)
}

fn read(at: u64) -> TestRequest {
    TestRequest::with_data(Op::Read, at, 4096, 0)
}

#[test]
fn conforms() {
    for (structured, extended, go, chunk) in [
        (false, false, false, 1 << 20),
        (false, false, true, 1 << 20),
        (true, false, true, 1 << 20),
        (true, false, true, 4096),
        (true, true, true, 50_000),
    ] {
        let server = TestServer::start(Offer { structured, extended, go, chunk, ..Offer::default() });
        let path = server.path.display().to_string();
        run(&TestTarget { kind: "nbd", settings: &[("socket-path", &path)], keeps_data: true, seed: 1 });
    }
}

#[test]
fn one_operation_sends_a_batch_of_small_requests_and_long_ones_come_straight() {
    let server = TestServer::start(Offer::default());
    let disk = open(&server, &[]);
    let mut worker = worker(&disk);
    let mut requests = Vec::new();
    for (at, len) in [(0, 4096), (4096, 16 << 10), (1 << 20, 1 << 20), (2 << 20, 512), (3 << 20, 100 << 10)] {
        worker.write_memory(at, &vec![(at >> 12) as u8 + 1; len as usize]);
        requests.push(TestRequest::with_data(WRITE, at, len, at));
    }
    for (request, result) in requests.iter().zip(worker.run(&requests)) {
        assert_eq!(result.outcome, Outcome::Done(ByteLen(request.len)));
    }
    for request in &mut requests {
        (request.op, request.segments) = (Op::Read, Some(vec![(8 << 20, request.len as u32)]));
        let at = request.start;
        worker.write_memory(8 << 20, &vec![0; request.len as usize]);
        assert_eq!(worker.run_one(request.clone()), Outcome::Done(ByteLen(request.len)));
        let expected = vec![(at >> 12) as u8 + 1; request.len as usize];
        assert!(worker.read_memory(8 << 20, request.len as usize) == expected, "at {at}");
    }
    worker.close();
}

#[test]
fn durable_writes_use_fua_or_flushes() {
    for fua in [true, false] {
        let flags = if fua { ALL_FLAGS } else { ALL_FLAGS & !export_flag::SEND_FUA };
        let server = TestServer::start(Offer { flags, ..Offer::default() });
        let disk = open(&server, &[]);
        let mut worker = worker(&disk);
        assert_eq!(worker.run_one(TestRequest::with_data(DURABLE_WRITE, 0, 4096, 0)), DONE);
        let zeroes = Op::WriteZeroes { may_unmap: false, fua: true };
        assert_eq!(worker.run_one(TestRequest::without_data(zeroes, 0, 4096)), Outcome::Done(ByteLen::ZERO));
        worker.close();
        let commands = server.commands.lock().unwrap();
        let found: Vec<(u16, bool)> = commands.iter().map(|one| (one.command, is_durable(one))).collect();
        let durable = match fua {
            true => vec![(command::WRITE, true), (command::WRITE_ZEROES, true)],
            false => vec![
                (command::WRITE, false),
                (command::FLUSH, false),
                (command::WRITE_ZEROES, false),
                (command::FLUSH, false),
            ],
        };
        assert_eq!(found[..durable.len()], durable);
    }
}

#[test]
fn what_an_export_cannot_do_is_not_offered() {
    let server = TestServer::start(Offer { flags: export_flag::HAS_FLAGS, ..Offer::default() });
    let disk = open(&server, &[]);
    let limits = disk.limits();
    assert!(limits.discard.is_none() && limits.write_zeroes.is_none() && !limits.volatile_cache, "{limits:?}");
    assert_eq!(disk.max_channels(), Some(1));
    let mut one = worker(&disk);
    assert_eq!(one.run_one(TestRequest::without_data(Op::Flush, 0, 0)), Outcome::Done(ByteLen::ZERO));
    let discard = TestRequest::without_data(Op::Discard { secure: false }, 0, 4096);
    assert_eq!(one.run_one(discard), Outcome::Unsupported);
    one.close();
    let server = TestServer::start(Offer::default());
    assert_eq!(open(&server, &[]).max_channels(), None);
}

#[test]
fn a_small_server_is_refused_with_what_it_offers() {
    let read_only = ALL_FLAGS | export_flag::READ_ONLY;
    for (offer, more, expected) in [
        (Offer { flags: 0, ..Offer::default() }, &[][..], "transmission flags: found none"),
        (Offer { flags: read_only, ..Offer::default() }, &[], "readonly: found off, of an export that is read-only"),
        (Offer { size: 0, ..Offer::default() }, &[], "found an export of 0 bytes"),
        (Offer { size: 1000, ..Offer::default() }, &[], "a multiple of its block size 512 above 0"),
        (Offer { blocks: Some((3, 1 << 20)), ..Offer::default() }, &[], "minimum block size: found 3"),
        (Offer { blocks: Some((1 << 17, 1 << 20)), ..Offer::default() }, &[], "minimum block size: found 131072"),
        (Offer { blocks: Some((512, 4096)), ..Offer::default() }, &[], "maximum block size: found 4096"),
        (Offer::default(), &[("tls", "on")], "tls-creds: found nothing"),
        (Offer::default(), &[("tls", "on"), ("tls-creds", "/nowhere")], "tls-hostname: found nothing"),
        (Offer::default(), &[("reconnect", "soon")], "reconnect: found \"soon\""),
    ] {
        let server = TestServer::start(offer);
        let found = try_open(&server, more).err().unwrap_or_else(|| panic!("{expected}: opened"));
        assert!(found.contains(expected), "{found}");
    }
    let server = TestServer::start(Offer { flags: read_only, ..Offer::default() });
    assert!(open(&server, &[("readonly", "on")]).geometry().read_only);
}

#[test]
fn errors_of_the_server_are_those_of_the_requests() {
    let bend = |_: u64, request: &Command, reply: Vec<u8>| {
        Some(match request.offset {
            0 => error_chunk(request, 5, "the disk is on fire"),
            4096 => error_chunk(request, 28, ""),
            8192 => error_chunk(request, 1234, "odd"),
            _ => reply,
        })
    };
    let server = TestServer::start(Offer { bend: Box::new(bend), ..Offer::default() });
    let disk = open(&server, &[]);
    let mut worker = worker(&disk);
    assert_eq!(worker.run_one(read(0)), Outcome::Failed(Errno(5)));
    assert_eq!(worker.run_one(read(4096)), Outcome::NoSpace);
    assert_eq!(worker.run_one(read(8192)), Outcome::Failed(Errno::INVAL));
    assert_eq!(worker.run_one(read(16384)), DONE);
    assert_eq!(server.connections.load(Ordering::SeqCst), 1, "the connection goes on");
    worker.close();
}

/// An invalid first reply ends the first connection; the request is executed on the next.
#[test]
fn a_lie_ends_the_connection_and_the_request_is_done_on_the_next() {
    type Lie = fn(&Command, Vec<u8>) -> Option<Vec<u8>>;
    let lies: [(&str, bool, Lie); 15] = [
        ("disconnected", true, |_, _| None),
        ("disconnected in mid-payload", true, |_, reply| Some(reply[..100].to_vec())),
        ("no magic", true, |_, mut reply| {
            reply[0] ^= 1;
            Some(reply)
        }),
        ("a wrong cookie", true, |_, mut reply| {
            reply[9] ^= 1;
            Some(reply)
        }),
        ("a cookie of nobody", true, |_, mut reply| {
            reply[15] ^= 0xff;
            Some(reply)
        }),
        ("a simple reply to a read", true, |request, _| Some(simple(request.cookie, 0))),
        ("a structured reply that was not negotiated", false, |request, _| Some(chunk(request, true, 0, &[], false))),
        ("an unknown chunk", true, |request, _| Some(chunk(request, true, 77, &[0; 12], false))),
        ("a chunk without data", true, |request, _| Some(chunk(request, true, 1, &[0; 8], false))),
        ("a short reply", true, |request, _| Some(chunk(request, true, 1, &[0; 8 + 512], false))),
        ("data before the request", true, |request, _| {
            Some(chunk(request, true, 1, &[&(request.offset - 512).to_be_bytes()[..], &[7; 4096]].concat(), false))
        }),
        ("oversized data", true, |request, _| {
            Some(chunk(request, true, 1, &[&request.offset.to_be_bytes()[..], &[7; 8192]].concat(), false))
        }),
        ("an oversized hole", true, |request, _| {
            let body = [&request.offset.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
            Some(chunk(request, true, 2, &body, false))
        }),
        ("an error without an end", true, |request, _| Some(chunk(request, true, 1 << 15 | 1, &[0; 4], false))),
        ("an error whose text is longer", true, |request, _| {
            Some(chunk(request, true, 1 << 15 | 1, &[0, 0, 0, 5, 0xff, 0xff], false))
        }),
    ];
    for (what, structured, lie) in lies {
        let lied = Mutex::new(false);
        let bend = move |_: u64, request: &Command, reply: Vec<u8>| {
            if std::mem::replace(&mut *lied.lock().unwrap(), true) { Some(reply) } else { lie(request, reply) }
        };
        let server = TestServer::start(Offer { structured, bend: Box::new(bend), ..Offer::default() });
        server.disk.lock().unwrap()[4096..8192].fill(0x5a);
        let disk = open(&server, &[]);
        let mut worker = worker(&disk);
        worker.write_memory(0, &[0x11; 3 * 4096]);
        let request = TestRequest::with_data(Op::Read, 4096, 4096, 4096);
        assert_eq!(worker.run_one(request), DONE, "{what}");
        assert_eq!(worker.read_memory(4096, 4096), [0x5a; 4096], "{what}");
        for outside in [0, 8192] {
            assert_eq!(worker.read_memory(outside, 4096), [0x11; 4096], "{what}: written outside the request");
        }
        assert_eq!(server.connections.load(Ordering::SeqCst), 2, "{what}");
        worker.close();
    }
}

#[test]
fn requests_of_a_lost_connection_are_done_on_the_next() {
    // Every connection ends at its 20th request, without an answer.
    let bend = |number: u64, _: &Command, reply: Vec<u8>| (number < 20).then_some(reply);
    let server = TestServer::start(Offer { bend: Box::new(bend), ..Offer::default() });
    let disk = open(&server, &[]);
    let mut worker = worker(&disk);
    let requests: Vec<TestRequest> =
        (0..64).map(|at| TestRequest::with_data(WRITE, at << 14, 1 << 14, at << 14)).collect();
    (0..64).for_each(|at| worker.write_memory(at << 14, &[at as u8 + 1; 1 << 14]));
    assert!(worker.run(&requests).iter().all(|result| result.outcome == Outcome::Done(ByteLen(1 << 14))));
    let written = server.disk.lock().unwrap();
    assert!((0..64).all(|at| written[at << 14..(at + 1) << 14].iter().all(|byte| *byte == at as u8 + 1)));
    drop(written);
    assert!(server.connections.load(Ordering::SeqCst) > 3);
    worker.close();
}

#[test]
fn without_a_server_requests_fail_after_the_time_of_reconnect() {
    let bend = |_: u64, _: &Command, _: Vec<u8>| None;
    let server = TestServer::start(Offer { bend: Box::new(bend), ..Offer::default() });
    for reconnect in ["0", "1"] {
        let disk = open(&server, &[("reconnect", reconnect)]);
        let mut worker = worker(&disk);
        assert_eq!(worker.run_one(read(0)), Outcome::Failed(Errno(107)), "{reconnect}");
        worker.close();
    }
}

#[test]
fn a_new_size_is_found_by_a_resize() {
    let server = TestServer::start(Offer::default());
    let disk = open(&server, &[]);
    assert_eq!(disk.found_size().unwrap(), ByteLen(8 << 20));
    server.disk.lock().unwrap().resize(16 << 20, 0);
    assert_eq!(disk.found_size().unwrap(), ByteLen(8 << 20), "the server is not asked every second");
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
    let error = disk.resize(Some(ByteLen(32 << 20))).unwrap_err().to_string();
    assert!(error.contains("NBD cannot resize it"), "{error}");
    assert_eq!((disk.geometry().size, disk.found_size().unwrap()), (ByteLen(8 << 20), ByteLen(16 << 20)));
    assert_eq!(disk.resize(None).unwrap(), ByteLen(16 << 20));
    let mut worker = worker(&disk);
    assert_eq!(worker.run_one(read((16 << 20) - 4096)), DONE);
    worker.close();
}

/// A server that does not report its size is an error, unless its last connection has found the requested one.
#[test]
fn a_size_that_nobody_tells_is_an_error() {
    let resize = |disk: &Arc<dyn Disk<UringContext>>, size| disk.resize(size).map_err(|error| error.to_string());
    let (before, after) = (ByteLen(8 << 20), ByteLen(16 << 20));
    let server = TestServer::start(Offer { limit: Some(Refusal::AtOnce), ..Offer::default() });
    let disk = open(&server, &[]);
    server.disk.lock().unwrap().resize(16 << 20, 0);
    for size in [None, Some(after)] {
        let error = resize(&disk, size).unwrap_err();
        assert!(
            error.contains("asking the server for the export's size (its last connection has found 8M)"),
            "{error}"
        );
        assert!(error.contains("ended the connection before its greeting"), "{error}");
    }
    assert_eq!(resize(&disk, Some(before)), Ok(before));

    let server = TestServer::start(Offer { hides_size: true, ..Offer::default() });
    let disk = open(&server, &[]);
    assert_eq!(resize(&disk, None), Ok(before), "0 is no size");
    server.disk.lock().unwrap().resize(16 << 20, 0);
    assert_eq!(resize(&disk, None), Ok(after));
}

/// It announces that it takes several connections, and refuses the second one.
#[test]
fn one_connection_serves_all_if_the_server_takes_no_other() {
    for limit in [Refusal::AtOnce, Refusal::AfterNegotiation] {
        for go in [true, false] {
            let server = TestServer::start(Offer { limit: Some(limit), go, ..Offer::default() });
            let disk = open(&server, &[]);
            assert_eq!(disk.max_channels(), Some(1), "{limit:?}");
            let mut worker = worker(&disk);
            assert_eq!(worker.run_one(read(0)), DONE);
            worker.close();
        }
    }
}

#[test]
fn requests_without_payload_are_cut_to_what_headers_hold() {
    for (extended, expected) in [
        (false, vec![u64::from(u32::MAX) / 512 * 512, (6 << 30) - u64::from(u32::MAX) / 512 * 512]),
        (true, vec![6 << 30]),
    ] {
        let server = TestServer::start(Offer { stated: Some(8 << 30), extended, ..Offer::default() });
        let disk = open(&server, &[]);
        let mut worker = worker(&disk);
        let discard = TestRequest::without_data(Op::Discard { secure: false }, 1 << 20, 6 << 30);
        assert_eq!(worker.run_one(discard), Outcome::Done(ByteLen::ZERO));
        worker.close();
        let commands = server.commands.lock().unwrap();
        let trims: Vec<&Command> = commands.iter().filter(|one| one.command == command::TRIM).collect();
        assert_eq!(trims.iter().map(|one| one.len).collect::<Vec<_>>(), expected);
        assert!(trims.windows(2).all(|pair| pair[0].offset + pair[0].len == pair[1].offset), "{trims:?}");
    }
}

#[test]
fn a_discard_has_the_servers_preferred_unit() {
    let disk = ByteLen(64 << 20);
    for (size, block, preferred, granularity) in [
        (disk, BlockSize::B512, 4096, 4096),
        (disk, BlockSize::B512, 65536, 65536),
        (disk, BlockSize::B4096, 512, 4096),
        // None, no power of two, and more than the disk has or than a server would want.
        (disk, BlockSize::B512, 0, 512),
        (disk, BlockSize::B512, 3000, 512),
        (ByteLen(4096), BlockSize::B512, 65536, 512),
        (disk, BlockSize::B512, 64 << 20, 512),
    ] {
        assert_eq!(discard_granularity(size, block, preferred), ByteLen(granularity), "{preferred} of {size}");
    }
    // The test's server prefers 4096.
    let server = TestServer::start(Offer::default());
    let limits = open(&server, &[]).limits();
    assert_eq!(limits.discard.map(|discard| discard.granularity), Some(ByteLen(4096)));
}
