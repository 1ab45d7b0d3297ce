use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use mqblk_core::{BlockSize, ByteLen, ByteOffset, Disk, Errno, Op, Outcome, Request, Tag};
use mqblk_memory::{GuestAddress, GuestMemory, PooledContext as _, Region};
use mqblk_uring::{FixedBufferUse, UringContext, UringOptions};
use tempfile::TempDir;

use super::{BlockingOptions, BlockingStorage};
use crate::admission;
use crate::conformance::{TestRequest, TestTarget, TestWorker, cancel, run};

const WRITE: Op = Op::Write { fua: false };
const BLOCK: u64 = 512;

fn image(len: u64) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(len).unwrap();
    (dir, path)
}

fn conforms(len: u64, settings: &[(&str, &str)], seed: u64) {
    let (_dir, path) = image(len);
    let mut all = vec![("path", path.to_str().unwrap())];
    all.extend(settings);
    run(&TestTarget { kind: "blocking", settings: &all, keeps_data: true, seed });
}

#[test]
fn conforms_on_one_thread() {
    conforms(8 << 20, &[("threads", "1")], 1);
}

#[test]
fn conforms_on_many_threads() {
    conforms(8 << 20, &[("threads", "16")], 2);
    conforms((5 << 20) + 4096, &[("block-size", "4096")], 3);
}

#[test]
fn random_requests_are_cancelled() {
    let (_dir, path) = image(16 << 20);
    let settings = [("path", path.to_str().unwrap()), ("threads", "2")];
    let trial = TestTarget { kind: "blocking", settings: &settings, keeps_data: true, seed: 7 };
    let seen = cancel::some_of_many(&trial, &trial.open(&[]).unwrap());
    assert!(seen.aborted > 0 && seen.aborted + seen.too_late > 50, "{seen:?}");
}

/// A storage of one MiB whose calls wait while the gate is closed.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    closed: bool,
    /// Calls that wait at the gate, and their maximum.
    waiting: usize,
    most: usize,
    calls: usize,
    /// The last bytes that were written.
    written: Vec<u8>,
    error: Option<io::ErrorKind>,
    panics: bool,
}

impl Gate {
    fn set_closed(&self, closed: bool) {
        self.state.lock().unwrap().closed = closed;
        self.changed.notify_all();
    }

    fn wait_for(&self, waiting: usize) {
        let state = self.state.lock().unwrap();
        let (_state, timeout) =
            self.changed.wait_timeout_while(state, Duration::from_secs(20), |state| state.waiting != waiting).unwrap();
        assert!(!timeout.timed_out(), "no {waiting} calls came");
    }

    fn pass(&self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        state.calls += 1;
        state.waiting += 1;
        state.most = state.most.max(state.waiting);
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |state| state.closed).unwrap();
        state.waiting -= 1;
        state.written = bytes.to_vec();
        let (error, panics) = (state.error, state.panics);
        drop(state);
        assert!(!panics, "a storage that panics");
        error.map_or(Ok(()), |kind| Err(kind.into()))
    }
}

struct Gated(Arc<Gate>);

impl BlockingStorage for Gated {
    fn size(&self) -> io::Result<ByteLen> {
        Ok(ByteLen(1 << 20))
    }

    fn read_at(&self, bytes: &mut [u8], _: ByteOffset) -> io::Result<()> {
        bytes.fill(0xab);
        self.0.pass(&[])
    }

    fn write_at(&self, bytes: &[u8], _: ByteOffset) -> io::Result<()> {
        self.0.pass(bytes)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.pass(&[])
    }
}

fn gated(threads: u32) -> (Arc<Gate>, Arc<dyn Disk<UringContext>>) {
    let gate = Arc::new(Gate::default());
    let options = BlockingOptions {
        threads,
        geometry: admission::plain_geometry(ByteLen::ZERO, BlockSize::B512, false),
        discard: None,
        volatile_cache: true,
        resolved: vec![],
    };
    (Arc::clone(&gate), super::open(Box::new(Gated(gate)), options).unwrap())
}

#[test]
fn requests_that_no_thread_has_are_cancelled_at_once() {
    let (gate, disk) = gated(3);
    gate.set_closed(true);
    let mut worker = TestWorker::new(disk.as_ref(), 64, FixedBufferUse::Off);
    let requests: Vec<_> = (0..40).map(|at| TestRequest::with_data(Op::Read, at * BLOCK, BLOCK, at * BLOCK)).collect();
    let results = worker.run_and_cancel(&requests, |turn| match turn {
        0 => {
            gate.wait_for(3);
            (0..40).collect()
        }
        // Requests that were not cancelled succeed from here on.
        5 => {
            gate.set_closed(false);
            vec![]
        }
        _ => vec![],
    });
    let done = Outcome::Done(ByteLen(BLOCK));
    assert!(results[..3].iter().all(|result| result.outcome == done), "{results:?}");
    assert!(results[3..].iter().all(|result| result.outcome == Outcome::Aborted), "{results:?}");
    let state = gate.state.lock().unwrap();
    assert_eq!((state.calls, state.most), (3, 3), "as many calls as threads");
    drop(state);
    worker.close();
}

#[test]
fn errors_and_panics_fail_the_request_and_nothing_else() {
    let (gate, disk) = gated(2);
    let mut worker = TestWorker::new(disk.as_ref(), 8, FixedBufferUse::Off);
    let write = || TestRequest::with_data(WRITE, 0, BLOCK, 0);
    for (kind, outcome) in [
        (io::ErrorKind::StorageFull, Outcome::NoSpace),
        (io::ErrorKind::ReadOnlyFilesystem, Outcome::ReadOnly),
        (io::ErrorKind::Unsupported, Outcome::Unsupported),
        (io::ErrorKind::ConnectionReset, Outcome::Failed(Errno(5))),
    ] {
        gate.state.lock().unwrap().error = Some(kind);
        assert_eq!(worker.run_one(write()), outcome, "{kind:?}");
    }
    gate.state.lock().unwrap().error = None;
    for _ in 0..5 {
        gate.state.lock().unwrap().panics = true;
        assert_eq!(worker.run_one(write()), Outcome::Failed(Errno(5)));
        gate.state.lock().unwrap().panics = false;
        assert_eq!(worker.run_one(write()), Outcome::Done(ByteLen(BLOCK)), "more panics than threads");
    }
    let discard = TestRequest::without_data(Op::Discard { secure: false }, 0, BLOCK);
    assert_eq!(worker.run_one(discard), Outcome::Unsupported);
    worker.close();
}

/// A worker that ends while a thread has a request waits for it: the thread finds the guest's memory unchanged.
#[test]
fn a_worker_that_ends_waits_for_the_threads() {
    let (gate, disk) = gated(1);
    gate.set_closed(true);
    let options = UringOptions { submissions: 4, in_flight: 8, files: 1, buffers: 1 };
    let mut context = UringContext::new(options).unwrap();
    let region = Region::shared("t", 1 << 16, GuestAddress(0)).unwrap().0;
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
    memory.write(GuestAddress(BLOCK), &[0x5a; BLOCK as usize]).unwrap();
    let lease = context.adopt(Arc::clone(&memory), FixedBufferUse::Off).unwrap();
    let mut channel = disk.open_channel(&mut context).unwrap();
    // The second waits in the queue while the first is at the gate, so its data is copied after the worker has begun to
    // end.
    let mut batch: Vec<_> = (0..2_u16)
        .map(|at| {
            let buffer = context.buffers.take(lease);
            context.buffers.push(&buffer, GuestAddress(u64::from(at) * BLOCK), BLOCK as u32, 1).unwrap();
            let (start, len, tag) = (ByteOffset(0), ByteLen(BLOCK), Tag::new(0, at));
            Request { start, len, tag, buffer: Some(buffer), op: WRITE }
        })
        .collect();
    assert_eq!(channel.submit(&mut context, &mut batch, &mut vec![]), 2);
    gate.wait_for(1);
    let weak = Arc::downgrade(&memory);
    drop(memory);
    let opener = std::thread::spawn({
        let (gate, weak) = (Arc::clone(&gate), weak.clone());
        move || {
            std::thread::sleep(Duration::from_millis(200));
            assert!(weak.upgrade().is_some(), "unmapped with requests in flight");
            gate.set_closed(false);
        }
    });
    drop(context);
    assert!(opener.join().is_ok());
    assert_eq!(gate.state.lock().unwrap().written, [0x5a; BLOCK as usize]);
    assert!(weak.upgrade().is_none());
}
