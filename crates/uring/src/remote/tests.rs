use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use mqblk_memory::{GuestAddress, GuestMemory, LeaseId, PooledContext as _, Region};
use mqblk_test_bounds::Bound;

use io_uring::{opcode, types};
use mqblk_memory::Buffer;

use super::*;
use crate::{FixedBufferUse, UringOptions, Wait};
use crate::{Refused, UringContext};

fn long() -> Duration {
    Bound::seconds(20).time()
}

fn memory(len: u64) -> Arc<GuestMemory> {
    let region = Region::shared("t", len, GuestAddress(0)).unwrap().0;
    Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
}

struct Fixture {
    context: UringContext,
    client: ClientId,
    memory: Arc<GuestMemory>,
    lease: LeaseId,
}

fn fixture(in_flight: u32) -> Fixture {
    let options = UringOptions { submissions: 4, in_flight, files: 1, buffers: 1 };
    let mut context = UringContext::new(options).unwrap();
    let client = context.add_client();
    let memory = memory(1 << 20);
    let lease = context.adopt(Arc::clone(&memory), FixedBufferUse::Off).unwrap();
    Fixture { context, client, memory, lease }
}

impl Fixture {
    fn buffer(&mut self, pieces: &[(u64, u32)]) -> Buffer {
        let buffer = self.context.buffers.take(self.lease);
        for (at, len) in pieces {
            self.context.buffers.push(&buffer, GuestAddress(*at), *len, 64).unwrap();
        }
        buffer
    }

    fn lend(&mut self, cookie: u64, pieces: &[(u64, u32)]) -> RemoteIo {
        let buffer = self.buffer(pieces);
        self.context.submit_remote(self.client, cookie, Some(buffer)).unwrap()
    }

    /// Sleeps until something arrives, as a worker does.
    fn next(&mut self) -> IoCompletion {
        let end = Instant::now() + long();
        loop {
            if let Some(message) = self.context.next(self.client) {
                return message;
            }
            assert!(Instant::now() < end, "nothing woke the worker");
            self.context.turn(Wait::AtMost(long()));
        }
    }

    /// Returns the number of signals to the worker: nothing else reads the counter.
    fn signals(&self) -> u64 {
        let fd = std::os::fd::AsFd::as_fd(&self.context.port.port.eventfd).as_raw_fd();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap();
        let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:")).expect("an eventfd");
        u64::from_str_radix(count.trim(), 16).unwrap()
    }
}

#[test]
fn another_thread_copies_both_ways_and_completes() {
    let mut f = fixture(8);
    f.memory.write(GuestAddress(0x100), b"onetwothree").unwrap();
    let out = f.lend(7, &[(0x100, 3), (0x103, 3), (0x106, 5)]);
    let into = f.lend(8, &[(0x2000, 4), (0x3000, 7)]);
    assert_eq!((f.context.busy(), f.context.buffers.buffers_in_use(f.lease)), (2, 2));
    std::thread::spawn(move || {
        let mut found = [0; 11];
        assert!(out.copy_out(0, &mut found) && !out.copy_out(1, &mut found));
        assert_eq!((&found, out.len()), (b"onetwothree", ByteLen(11)));
        assert!(into.copy_in(2, b"ab") && into.copy_in(4, b"") && into.copy_in(4, b"cdefghi"));
        assert!(!into.copy_in(4, b"cdefghij") && !into.copy_in(u64::MAX, b"a"));
        let runs: Vec<usize> = into.iovecs().iter().map(|piece| piece.iov_len).collect();
        assert_eq!(runs, [4, 7]);
        into.complete(11);
        out.complete(-libc::ENOSPC);
    });
    let mut ended = [f.next(), f.next()].map(|done| {
        assert!(!done.more);
        f.context.buffers.release(done.buffer.expect("the buffer comes back"));
        (done.cookie, done.result)
    });
    ended.sort_unstable();
    assert_eq!(ended, [(7, -libc::ENOSPC), (8, 11)]);
    let mut found = [0; 2];
    f.memory.read(GuestAddress(0x2002), &mut found).unwrap();
    assert_eq!(&found, b"ab");
    let mut found = [0; 7];
    f.memory.read(GuestAddress(0x3000), &mut found).unwrap();
    assert_eq!(&found, b"cdefghi");
    assert_eq!((f.context.busy(), f.context.buffers.buffers_in_use(f.lease)), (0, 0));
}

#[test]
fn a_batch_signals_once() {
    let mut f = fixture(64);
    for round in 1..=3 {
        let ios: Vec<_> = (0..50).map(|cookie| f.lend(cookie, &[(0, 512)])).collect();
        ios.into_iter().for_each(|io| io.complete(0));
        assert_eq!(f.signals(), round);
        for _ in 0..50 {
            let done = f.next();
            f.context.buffers.release(done.buffer.unwrap());
        }
    }
}

#[test]
fn a_request_that_is_dropped_fails_and_a_full_table_refuses() {
    let mut f = fixture(2);
    let client = f.client;
    let first = f.lend(1, &[(0, 512)]);
    let second = f.context.submit_remote(client, 2, None).unwrap();
    assert!(second.is_empty() && second.iovecs().is_empty());
    let buffer = f.buffer(&[(0, 512)]);
    let Err(Refused(Some(buffer))) = f.context.submit_remote(client, 3, Some(buffer)) else { panic!("accepted") };
    f.context.buffers.release(buffer);
    drop(first);
    let done = f.next();
    assert_eq!((done.cookie, done.result), (1, -libc::EIO));
    f.context.buffers.release(done.buffer.unwrap());
    second.complete(0);
    let done = f.next();
    assert_eq!((done.cookie, done.result, done.buffer.is_none()), (2, 0, true));
}

#[test]
fn a_replaced_memory_table_stays_mapped_until_the_completion() {
    let mut f = fixture(4);
    let io = f.lend(1, &[(0x1000, 512)]);
    let weak = Arc::downgrade(&f.memory);
    f.context.retire(f.lease);
    f.memory = memory(4096);
    assert!(weak.upgrade().is_some(), "the table was unmapped with a request in flight");
    assert!(io.copy_in(0, &[7; 512]));
    io.complete(512);
    let done = f.next();
    assert!(weak.upgrade().is_some());
    f.context.buffers.release(done.buffer.unwrap());
    assert!(weak.upgrade().is_none());
}

#[test]
fn a_context_that_is_dropped_waits_for_other_threads() {
    let mut f = fixture(4);
    let io = f.lend(1, &[(0x1000, 512)]);
    let weak = Arc::downgrade(&f.memory);
    let dropping = Arc::new(AtomicBool::new(false));
    let (of_thread, of_memory) = (Arc::clone(&dropping), weak.clone());
    let thread = std::thread::spawn(move || {
        while !of_thread.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        // Long enough for the context to be gone if it did not wait.
        std::thread::sleep(Duration::from_millis(200));
        assert!(of_memory.upgrade().is_some(), "unmapped with a request in flight");
        assert!(io.copy_in(0, &[7; 512]));
        io.complete(512);
    });
    let Fixture { context, memory, .. } = f;
    drop(memory);
    dropping.store(true, Ordering::Release);
    drop(context);
    assert!(thread.is_finished() || thread.join().is_ok());
    assert!(weak.upgrade().is_none(), "nothing uses it any more");
}

#[test]
fn memory_of_a_request_that_never_completes_stays_mapped_for_ever() {
    let mut f = fixture(4);
    let io = f.lend(1, &[(0x1000, 512)]);
    f.memory.write(GuestAddress(0x1000), &[9; 512]).unwrap();
    let weak = Arc::downgrade(&f.memory);
    let Fixture { context, memory, .. } = f;
    drop((context, memory));
    assert!(weak.upgrade().is_some(), "unmapped with a request in flight");
    let mut found = [0; 512];
    assert!(io.copy_out(0, &mut found) && found == [9; 512]);
    io.complete(512);
    assert!(weak.upgrade().is_some());
}

#[test]
fn wakers_wake_a_sleeping_worker_once_and_outlive_their_client() {
    let mut f = fixture(4);
    let waker = f.context.remote_waker(f.client, 42);
    (0..3).for_each(|_| waker.wake());
    let done = f.next();
    assert_eq!((done.cookie, done.result, done.more), (42, 0, true));
    f.context.turn(Wait::No);
    assert!(!f.context.has_unread(), "three wakeups that were not seen are one");
    let late = waker.clone();
    let thread = std::thread::spawn(move || late.wake());
    assert_eq!(f.next().cookie, 42);
    thread.join().unwrap();
    // The next client has the same index.
    f.context.remove_client(f.client);
    f.client = f.context.add_client();
    waker.wake();
    f.context.turn(Wait::AtMost(Duration::from_millis(50)));
    assert!(!f.context.has_unread());
    let Fixture { context, .. } = f;
    drop(context);
    waker.wake();
}

#[test]
fn a_poll_that_the_kernel_has_ended_is_renewed() {
    let mut f = fixture(4);
    let waker = f.context.remote_waker(f.client, 1);
    for _ in 0..3 {
        f.context.turn(Wait::No);
        let cancel =
            opcode::AsyncCancel2::new(types::CancelBuilder::any()).build().user_data(crate::completion::IGNORED);
        f.context.push_raw(cancel);
        while !f.context.port.lapsed {
            f.context.turn(Wait::AtMost(long()));
        }
        // Between two polls.
        waker.wake();
        assert_eq!(f.next().cookie, 1);
        waker.wake();
        assert_eq!(f.next().cookie, 1);
    }
}

/// Threads complete their requests, some later and in another order, while the worker sleeps when it is idle.
#[test]
fn nothing_is_lost_or_doubled_between_many_threads_and_a_worker_that_sleeps() {
    const THREADS: usize = 4;
    const REQUESTS: u64 = 20_000;
    let mut f = fixture(64);
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            let (sender, receiver) = channel::<(u64, RemoteIo)>();
            let thread = std::thread::spawn(move || {
                let mut held = Vec::new();
                for (number, (cookie, io)) in receiver.iter().enumerate() {
                    assert!(io.copy_in(0, &cookie.to_ne_bytes()));
                    held.push((cookie, io));
                    if number % 3 == 0 || held.len() > 4 {
                        while let Some((cookie, io)) = held.pop() {
                            io.complete(cookie as i32);
                        }
                    }
                }
                held.into_iter().for_each(|(cookie, io)| io.complete(cookie as i32));
            });
            (sender, thread)
        })
        .collect();
    let mut senders: Vec<_> = threads.iter().map(|(sender, _)| sender.clone()).collect();
    let threads: Vec<_> = threads.into_iter().map(|(_, thread)| thread).collect();
    let (mut sent, mut seen) = (0, vec![false; REQUESTS as usize]);
    let mut free: Vec<u64> = (0..64).map(|page| page * 4096).collect();
    let mut places = std::collections::HashMap::new();
    for _ in 0..REQUESTS {
        // The threads together hold fewer requests than the table.
        while sent < REQUESTS
            && let Some(place) = free.pop()
        {
            places.insert(sent, place);
            let io = f.lend(sent, &[(place, 5), (place + 100, 3)]);
            senders[sent as usize % THREADS].send((sent, io)).unwrap();
            sent += 1;
        }
        if sent == REQUESTS {
            senders.clear();
        }
        let done = f.next();
        assert_eq!(done.result, done.cookie as i32);
        let buffer = done.buffer.unwrap();
        let mut found = [0; 8];
        assert!(f.context.buffers.copy_out(&buffer, 0, &mut found));
        assert_eq!(u64::from_ne_bytes(found), done.cookie);
        free.push(places[&done.cookie]);
        f.context.buffers.release(buffer);
        assert!(!std::mem::replace(&mut seen[done.cookie as usize], true), "completed twice");
    }
    assert!(seen.into_iter().all(|seen| seen));
    assert_eq!((f.context.busy(), f.context.has_unread()), (0, false));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
