use mqblk_core::{ByteLen, Errno, Op, Outcome};
use mqblk_uring::FixedBufferUse;

use crate::conformance::{TestRequest, TestResult, TestTarget, TestWorker, run};

const WRITE: Op = Op::Write { fua: false };
const EIO: Outcome = Outcome::Failed(Errno(5));

fn trial<'a>(settings: &'a [(&'a str, &'a str)], seed: u64) -> TestTarget<'a> {
    TestTarget { kind: "fault", settings, keeps_data: true, seed }
}

fn worker(settings: &[(&str, &str)]) -> TestWorker {
    let disk = trial(settings, 0).open(&[]).unwrap();
    TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Off)
}

fn done(len: u64) -> Outcome {
    Outcome::Done(ByteLen(len))
}

#[test]
fn without_faults_it_conforms() {
    run(&trial(&[("inner", "ram"), ("size", "4M")], 1));
}

#[test]
fn late_and_out_of_order_it_conforms() {
    run(&trial(&[("inner", "ram"), ("size", "2M"), ("fault-reorder", "7"), ("fault-seed", "3")], 2));
    run(&trial(&[("inner", "ram"), ("size", "2M"), ("fault-jitter-us", "50"), ("fault-latency-us", "5")], 3));
}

/// Delayed requests complete when they are cancelled, and only those.
#[test]
fn delayed_requests_complete_when_they_are_cancelled() {
    let settings = [("inner", "ram"), ("size", "2M"), ("fault-latency-us", "200000"), ("fault-torn", "50")];
    let disk = trial(&settings, 1).open(&[]).unwrap();
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Off);
    let requests: Vec<TestRequest> =
        (0..40).map(|at| TestRequest::with_data(WRITE, at * 4096, 4096, at * 4096)).collect();
    let start = std::time::Instant::now();
    let even = |turn| if turn == 0 { (0..40).step_by(2).collect() } else { vec![] };
    let results = worker.run_and_cancel(&requests, even);
    assert!(start.elapsed() >= std::time::Duration::from_millis(200), "the others end in their time");
    for (at, TestResult { outcome, .. }) in results.into_iter().enumerate() {
        assert_eq!(outcome == Outcome::Aborted, at % 2 == 0, "{at}: {outcome:?}");
    }
    let all = |turn| if turn == 0 { (0..40).collect() } else { vec![] };
    assert!(worker.run_and_cancel(&requests, all).iter().all(|result| result.outcome == Outcome::Aborted));
    worker.close();
}

/// Over a disk with its own latency.
#[test]
fn requests_that_the_inner_disk_aborts_are_not_delayed() {
    let settings = [("inner", "null"), ("size", "2M"), ("latency-us", "50000000"), ("fault-latency-us", "50000000")];
    let disk = trial(&settings, 1).open(&[]).unwrap();
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Off);
    let requests: Vec<TestRequest> =
        (0..40).map(|at| TestRequest::with_data(WRITE, at * 4096, 4096, at * 4096)).collect();
    let all = |turn| if turn == 1 { (0..40).collect() } else { vec![] };
    assert!(worker.run_and_cancel(&requests, all).iter().all(|result| result.outcome == Outcome::Aborted));
    worker.close();
}

#[test]
fn over_a_file_it_conforms() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    let settings = [("inner", "file"), ("path", path.to_str().unwrap()), ("fault-reorder", "5")];
    run(&trial(&settings, 4));
}

#[test]
fn only_the_named_ranges_fail_and_only_as_often_as_asked() {
    let mut worker = worker(&[
        ("inner", "ram"),
        ("size", "1M"),
        ("fail-read", "4K+4K:EIO"),
        ("fail-write", "8K+512:ENOSPC*2"),
        ("fail-zeroes", "0+1M:EOPNOTSUPP"),
        ("fail-discard", "512K+1:ETIMEDOUT"),
        ("fail-flush", "EIO*1"),
    ]);
    let zeroes = Op::WriteZeroes { may_unmap: true, fua: false };
    let discard = Op::Discard { secure: false };
    for (want, outcome) in [
        (TestRequest::with_data(Op::Read, 0, 4096, 0), done(4096)),
        (TestRequest::with_data(Op::Read, 0, 8192, 0), EIO),
        (TestRequest::with_data(Op::Read, 8192, 4096, 0), done(4096)),
        (TestRequest::with_data(Op::Read, 7680, 512, 0), EIO),
        (TestRequest::with_data(WRITE, 4096, 4096, 0), done(4096)),
        (TestRequest::with_data(WRITE, 0, 16384, 0), Outcome::NoSpace),
        (TestRequest::with_data(WRITE, 8192, 512, 0), Outcome::NoSpace),
        (TestRequest::with_data(WRITE, 8192, 512, 0), done(512)),
        (TestRequest::without_data(zeroes, 0, 512), Outcome::Unsupported),
        (TestRequest::without_data(discard, 512 << 10, 512), Outcome::Failed(Errno(110))),
        (TestRequest::without_data(discard, 0, 512 << 10), done(0)),
        (TestRequest::without_data(Op::Flush, 0, 0), EIO),
        (TestRequest::without_data(Op::Flush, 0, 0), done(0)),
    ] {
        assert_eq!(worker.run_one(want.clone()), outcome, "{want:?}");
    }
    worker.close();
}

#[test]
fn a_torn_write_leaves_a_first_part_and_fails() {
    let mut worker = worker(&[("inner", "ram"), ("size", "1M"), ("fault-torn", "50"), ("fault-seed", "9")]);
    let (mut torn, mut whole) = (0, 0);
    for at in 0..64 {
        let start = at * 16384;
        worker.write_memory(0, &[at as u8 + 1; 16384]);
        let outcome = worker.run_one(TestRequest::with_data(WRITE, start, 16384, 0));
        // Single blocks are never torn: they show the content.
        let blocks: Vec<TestRequest> =
            (0..32).map(|n| TestRequest::with_data(Op::Read, start + n * 512, 512, 65536 + n * 512)).collect();
        assert!(
            worker.run(&blocks).iter().all(|result| *result == TestResult { outcome: done(512), has_buffer: true })
        );
        let found = worker.read_memory(65536, 16384);
        let written = found.iter().take_while(|byte| **byte == at as u8 + 1).count();
        assert!(found[written..].iter().all(|byte| *byte == 0));
        match outcome {
            EIO => {
                assert!((512..16384).contains(&written) && written % 512 == 0, "{written}");
                torn += 1;
            }
            other => {
                assert_eq!((other, written), (done(16384), 16384));
                whole += 1;
            }
        }
    }
    assert!(torn > 10 && whole > 10, "{torn} torn, {whole} whole");
    worker.close();
}

#[test]
fn the_same_seed_tears_the_same_requests() {
    let outcomes = |seed: &str| -> Vec<Outcome> {
        let mut worker = worker(&[("inner", "ram"), ("size", "1M"), ("fault-torn", "30"), ("fault-seed", seed)]);
        let all = (0..50).map(|_| worker.run_one(TestRequest::with_data(Op::Read, 0, 4096, 0))).collect();
        worker.close();
        all
    };
    assert_eq!(outcomes("5"), outcomes("5"));
    assert_ne!(outcomes("5"), outcomes("6"));
}

#[test]
fn settings_that_do_not_fit() {
    let backends = crate::backend_names().collect::<Vec<_>>().join(", ");
    for (settings, want) in [
        (&[][..], "inner: found nothing, expected the storage"),
        (&[("inner", "tape")], &format!("inner: found \"tape\", expected one of {backends}")),
        (&[("inner", "fault")], &format!("inner: found \"fault\", expected one of {backends}")),
        (&[("inner", "ram")], "size: found nothing"),
        (&[("inner", "ram"), ("size", "1M"), ("fail-read", "all")], "fail-read: found \"all\", expected OFFSET+LEN"),
    ] {
        let error = trial(settings, 0).open(&[]).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("disk \"trial\": ") && error.contains(want), "{settings:?}: {error}");
    }
}

#[test]
fn concurrent_torn_requests_keep_their_own_buffers() {
    let mut worker = worker(&[
        ("inner", "ram"),
        ("size", "1M"),
        ("fault-torn", "100"),
        ("fault-jitter-us", "200"),
        ("fault-seed", "2"),
    ]);
    for at in 0..64_u64 {
        worker.write_memory(0, &[at as u8 + 1; 512]);
        for block in 0..8 {
            assert_eq!(worker.run_one(TestRequest::with_data(WRITE, at * 4096 + block * 512, 512, 0)), done(512));
        }
    }
    worker.write_memory(0, &vec![0xee; 64 * 4096]);
    let reads: Vec<TestRequest> =
        (0..64).map(|at| TestRequest::with_data(Op::Read, at * 4096, 4096, at * 4096)).collect();
    assert!(worker.run(&reads).iter().all(|result| result.outcome == EIO));
    let mut lengths = [0; 9];
    for at in 0..64 {
        let found = worker.read_memory(at * 4096, 4096);
        let read = found.iter().take_while(|byte| u64::from(**byte) == at + 1).count();
        assert!(read % 512 == 0 && (512..4096).contains(&read), "request {at}: {read} bytes");
        assert!(found[read..].iter().all(|byte| *byte == 0xee), "request {at}");
        lengths[read / 512] += 1;
    }
    assert!(lengths.iter().filter(|count| **count > 0).count() > 3, "{lengths:?}");
    worker.close();
}

#[test]
fn channels_that_connect_conform() {
    let settings = [
        ("inner", "ram"),
        ("size", "2M"),
        ("fault-connect-us", "3000"),
        ("fault-connect-fails", "3"),
        ("fault-seed", "5"),
    ];
    run(&trial(&settings, 6));
}

/// Each request is executed or fails because of the connection, and the disk reconnects each time.
#[test]
fn a_connection_is_lost_and_restored() {
    let settings = [
        ("inner", "ram"),
        ("size", "2M"),
        ("fault-latency-us", "100"),
        ("fault-connect-us", "100"),
        ("fault-lost-after", "7"),
    ];
    let disk = trial(&settings, 1).open(&[]).unwrap();
    let log = std::sync::Arc::new(crate::observers::tests::Log::default());
    disk.observe(log.clone());
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Off);
    let requests: Vec<TestRequest> =
        (0..5).map(|at| TestRequest::with_data(WRITE, at * 4096, 4096, at * 4096)).collect();
    let (mut succeeded, mut failed) = (0, 0);
    for _ in 0..28 {
        for TestResult { outcome, .. } in worker.run(&requests) {
            match outcome {
                Outcome::Failed(Errno(107)) => failed += 1,
                outcome => {
                    assert_eq!(outcome, done(4096));
                    succeeded += 1;
                }
            }
        }
    }
    // 5 and 2 of 7 are executed, and 3 are submitted with the last of them.
    assert_eq!((succeeded, failed), (98, 42));
    assert!(worker.run(&requests).iter().all(|result| result.outcome == done(4096)), "it is connected again");
    worker.close();
    let log = log.take();
    let (lost, restored) = (["lost: fault-lost-after"], ["restored"]);
    assert!(log.chunks(2).all(|pair| pair[..1] == lost && (pair[1..] == restored)), "{log:?}");
    assert_eq!(log.len(), 28);
}
