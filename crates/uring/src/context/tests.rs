use super::*;
use crate::{EventFd, FixedBufferUse};
use crate::{FileTransfer, RingFile};
use mqblk_core::{ByteLen, ByteOffset};
use mqblk_memory::{GuestAddress, GuestMemory, PooledContext as _, Region};
use std::io::Write;
use std::sync::Arc;

fn memory(len: u64) -> Arc<GuestMemory> {
    let region = Region::shared("t", len, GuestAddress(0)).unwrap().0;
    Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap())
}

fn wait_for(context: &mut UringContext, owner: ClientId) -> IoCompletion {
    for _ in 0..100 {
        if let Some(message) = context.next(owner) {
            return message;
        }
        context.turn(Wait::AtMost(Duration::from_millis(100)));
    }
    panic!("no completion in 10 s");
}

fn transfer(file: &RingFile, at: u64, skip: u64) -> FileTransfer<'_> {
    FileTransfer { file, at: ByteOffset(at), skip, in_thread: false }
}

#[test]
fn reads_and_writes_with_and_without_fixed_buffers() {
    for fixed in [FixedBufferUse::Off, FixedBufferUse::Auto, FixedBufferUse::On] {
        let mut context = UringContext::new(UringOptions::default()).unwrap();
        let owner = context.add_client();
        let memory = memory(1 << 16);
        let lease = context.adopt(Arc::clone(&memory), fixed).unwrap();
        let file: Arc<std::os::fd::OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
        let file = context.register_file(file);
        memory.write(GuestAddress(0x100), b"onetwothree").unwrap();
        for pieces in [vec![(0x100, 11)], vec![(0x100, 3), (0x103, 3), (0x106, 5)]] {
            let buffer = context.buffers.take(lease);
            for (at, len) in &pieces {
                context.buffers.push(&buffer, GuestAddress(*at), *len, 8).unwrap();
            }
            context.write(owner, 1, transfer(&file, 5, 0), buffer, true).unwrap();
            let done = wait_for(&mut context, owner);
            assert_eq!((done.cookie, done.result, done.more), (1, 11, false));
            context.buffers.release(done.buffer.unwrap());

            let buffer = context.buffers.take(lease);
            for (at, len) in &pieces {
                context.buffers.push(&buffer, GuestAddress(*at + 0x1000), *len, 8).unwrap();
            }
            context.read(owner, 2, transfer(&file, 5 + 4, 4), buffer).unwrap();
            let done = wait_for(&mut context, owner);
            assert_eq!(done.result, 7);
            context.buffers.release(done.buffer.unwrap());
            let mut found = [0; 11];
            memory.read(GuestAddress(0x1100), &mut found).unwrap();
            assert_eq!(&found[4..], b"wothree", "{fixed:?} {pieces:?}");
        }
        context.datasync(owner, 3, &file).unwrap();
        assert_eq!(wait_for(&mut context, owner).result, 0);
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        context.fallocate(owner, 4, &file, punch, ByteOffset(0), ByteLen(4096)).unwrap();
        assert_eq!(wait_for(&mut context, owner).result, 0);
        context.retire(lease);
        context.unregister_file(file);
        context.remove_client(owner);
        assert_eq!(context.busy(), 0);
    }
}

#[test]
fn a_watched_event_completes_for_every_signal_and_can_be_cancelled() {
    let mut context = UringContext::new(UringOptions::default()).unwrap();
    let owner = context.add_client();
    let event = EventFd::new().unwrap();
    context.watch(owner, 9, &event).unwrap();
    for _ in 0..3 {
        event.signal();
        let message = wait_for(&mut context, owner);
        assert!(message.more && message.cookie == 9 && message.result > 0);
    }
    context.cancel(owner, 9);
    let last = wait_for(&mut context, owner);
    assert!(!last.more && last.result == -libc::ECANCELED, "{last:?}");
    assert_eq!(context.busy(), 0);
}

#[test]
fn picked_operations_of_one_client_are_cancelled() {
    // More cancels than the submission queue takes.
    let mut context = UringContext::new(UringOptions { submissions: 2, in_flight: 16, files: 1, buffers: 1 }).unwrap();
    let (ours, theirs) = (context.add_client(), context.add_client());
    let event = EventFd::new().unwrap();
    for cookie in 0..6 {
        context.watch(ours, cookie, &event).unwrap();
        context.watch(theirs, cookie, &event).unwrap();
    }
    context.cancel_picked(ours, |cookie| cookie != 3);
    let mut ended: Vec<u64> = (0..5)
        .map(|_| {
            let last = wait_for(&mut context, ours);
            assert!(!last.more && last.result == -libc::ECANCELED, "{last:?}");
            last.cookie
        })
        .collect();
    ended.sort_unstable();
    assert_eq!((ended, context.busy()), (vec![0, 1, 2, 4, 5], 7));
    assert!(!context.has_completions(theirs));
}

#[test]
fn a_full_table_refuses_and_returns_the_buffer() {
    let mut context = UringContext::new(UringOptions { submissions: 2, in_flight: 4, files: 1, buffers: 1 }).unwrap();
    let owner = context.add_client();
    let lease = context.adopt(memory(4096), FixedBufferUse::Off).unwrap();
    let file = context.register_file(Arc::new(tempfile::tempfile().unwrap().into()));
    let events: Vec<EventFd> = (0..4).map(|_| EventFd::new().unwrap()).collect();
    for (cookie, event) in events.iter().enumerate() {
        context.watch(owner, cookie as u64, event).unwrap();
    }
    let buffer = context.buffers.take(lease);
    context.buffers.push(&buffer, GuestAddress(0), 512, 1).unwrap();
    let Err(crate::Refused(Some(buffer))) = context.read(owner, 5, transfer(&file, 0, 0), buffer) else {
        panic!("accepted");
    };
    context.buffers.release(buffer);
}

#[test]
fn inline_transfers() {
    let mut context = UringContext::new(UringOptions::default()).unwrap();
    let memory = memory(4096);
    let lease = context.adopt(Arc::clone(&memory), FixedBufferUse::Off).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"abcdef").unwrap();
    let fd: std::os::fd::OwnedFd = file.into();
    let buffer = context.buffers.take(lease);
    context.buffers.push(&buffer, GuestAddress(0), 4, 2).unwrap();
    context.buffers.push(&buffer, GuestAddress(10), 4, 2).unwrap();
    use std::os::fd::AsFd;
    assert_eq!(context.read_inline(fd.as_fd(), ByteOffset(1), &buffer, 0, false).unwrap(), 5);
    let mut found = [0; 14];
    memory.read(GuestAddress(0), &mut found).unwrap();
    assert_eq!(&found, b"bcde\0\0\0\0\0\0f\0\0\0");
    assert_eq!(context.write_inline(fd.as_fd(), ByteOffset(0), &buffer, 6).unwrap(), 2);
    context.buffers.release(buffer);
}

#[test]
fn waiting_ends_in_time() {
    let mut context = UringContext::new(UringOptions::default()).unwrap();
    assert_eq!(context.turn(Wait::AtMost(Duration::from_millis(5))), 0);
    assert_eq!(context.turn(Wait::No), 0);
}

#[test]
fn more_segments_than_the_kernel_accepts_are_a_short_transfer() {
    let mut context = UringContext::new(UringOptions::default()).unwrap();
    let owner = context.add_client();
    let memory = memory(1 << 16);
    let lease = context.adopt(Arc::clone(&memory), FixedBufferUse::Off).unwrap();
    let file = context.register_file(Arc::new(tempfile::tempfile().unwrap().into()));
    let buffer = context.buffers.take(lease);
    for piece in 0..1500 {
        context.buffers.push(&buffer, GuestAddress(piece * 16), 8, 2000).unwrap();
    }
    context.write(owner, 1, transfer(&file, 0, 0), buffer, false).unwrap();
    let done = wait_for(&mut context, owner);
    assert_eq!(done.result, 1024 * 8);
    context.write(owner, 2, transfer(&file, 8192, 8192), done.buffer.unwrap(), false).unwrap();
    let done = wait_for(&mut context, owner);
    assert_eq!(done.result, (1500 - 1024) * 8);
    context.buffers.release(done.buffer.unwrap());
}

#[test]
fn a_worker_with_unread_completions_does_not_sleep() {
    let mut context = UringContext::new(UringOptions::default()).unwrap();
    let owner = context.add_client();
    let event = EventFd::new().unwrap();
    context.watch(owner, 9, &event).unwrap();
    event.signal();
    context.turn(Wait::AtMost(Duration::from_secs(10)));
    assert!(context.has_completions(owner));
    // Nothing else will ever arrive.
    assert_eq!(context.turn(Wait::Completion), 0);
    assert!(context.next(owner).is_some() && context.next(owner).is_none());
    assert_eq!(context.turn(Wait::AtMost(Duration::from_millis(1))), 0);
    event.signal();
    context.turn(Wait::AtMost(Duration::from_secs(10)));
    context.remove_client(owner);
    assert_eq!(context.unread, 0);
}

#[test]
fn operations_submitted_early_complete_at_the_next_turn() {
    let mut context = UringContext::new(UringOptions::default()).unwrap();
    let owner = context.add_client();
    let file = context.register_file(Arc::new(tempfile::tempfile().unwrap().into()));
    for cookie in 0..3 {
        context.datasync(owner, cookie, &file).unwrap();
        context.submit();
    }
    context.submit();
    let mut found: Vec<u64> = (0..3).map(|_| wait_for(&mut context, owner).cookie).collect();
    found.sort_unstable();
    assert_eq!(found, [0, 1, 2]);
    assert_eq!(context.busy(), 0);
}

/// Operations that outlive their owner are cancelled, and what they own is released; the next owner sees nothing of
/// them.
#[test]
fn an_owner_ends_with_operations_in_flight() {
    let mut context = UringContext::new(UringOptions::default()).unwrap();
    let lease = context.adopt(memory(4096), FixedBufferUse::Off).unwrap();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = context.register_file(Arc::new(ours.into()));
    let (owner, event) = (context.add_client(), EventFd::new().unwrap());
    let mut buffer = || {
        let buffer = context.buffers.take(lease);
        context.buffers.push(&buffer, GuestAddress(0), 512, 1).unwrap();
        Some(buffer)
    };
    let (payload, header, lent) = (buffer(), buffer(), buffer());
    context.receive(owner, 1, &socket, crate::Message { payload, header, ..Default::default() }).unwrap();
    context.watch(owner, 2, &event).unwrap();
    let remote = context.submit_remote(owner, 3, lent).unwrap();
    context.turn(Wait::No);
    event.signal();
    context.remove_client(owner);
    let next = context.add_client();
    assert_eq!(next, owner, "the index is used again");
    let end = Instant::now() + Duration::from_secs(20);
    while context.busy() > 1 || context.has_unread() {
        assert!(Instant::now() < end, "{} operations in flight", context.busy());
        context.turn(Wait::AtMost(Duration::from_millis(10)));
        assert!(!context.has_completions(next));
    }
    assert_eq!(context.buffers.buffers_in_use(lease), 1, "that of the other thread");
    remote.complete(0);
    while context.buffers.buffers_in_use(lease) > 0 {
        assert!(Instant::now() < end, "the other thread's buffer");
        context.turn(Wait::AtMost(Duration::from_millis(10)));
        assert!(!context.has_completions(next));
    }
    context.turn(Wait::No);
    assert_eq!((context.busy(), context.has_unread()), (0, false));
    drop(theirs);
}

/// Whoever waits for the end of a context (a daemon's end, before `lvremove`) finds its files closed.
#[test]
fn the_files_of_a_dropped_context_are_closed() {
    use rustix::fs::{FlockOperation, flock};
    let named = tempfile::NamedTempFile::new().unwrap();
    for round in 0..50 {
        let file: Arc<std::os::fd::OwnedFd> = Arc::new(named.reopen().unwrap().into());
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .unwrap_or_else(|error| panic!("round {round}: the file description before it is still open: {error}"));
        let mut context = UringContext::new(UringOptions::default()).unwrap();
        let owner = context.add_client();
        let memory = memory(1 << 12);
        let lease = context.adopt(memory, FixedBufferUse::Off).unwrap();
        let registered = context.register_file(Arc::clone(&file));
        assert!(matches!(registered, RingFile::Fixed(_)), "this machine's limit of open files");
        let buffer = context.buffers.take(lease);
        context.buffers.push(&buffer, GuestAddress(0), 512, 8).unwrap();
        context.read(owner, 1, transfer(&registered, 0, 0), buffer).unwrap();
        let done = wait_for(&mut context, owner);
        context.buffers.release(done.buffer.unwrap());
    }
}
