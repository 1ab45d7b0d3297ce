//! Direct I/O on a file by plain system calls, without a daemon: shows the behaviour of the machine's device alone.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use mqblk_driver::Waker;
use mqblk_memory::{GuestAddress, GuestMemory, Region};

use super::load::BLOCK;
use crate::load_queues::{DeviceQueues, LoadRequest, RequestOutcome, RequestType};

/// Queues, and requests in flight on each, as in a timed load of two queues.
const QUEUES: usize = 2;
const DEPTH: usize = 4;
/// Bytes of each queue's data area.
const DATA_BYTES: u64 = 1 << 20;
/// Alignment of direct I/O that every device accepts.
const ALIGNMENT: usize = 4096;

/// A block to read, or to write.
struct Call {
    user: u32,
    offset: u64,
    data: GuestAddress,
    write: bool,
}

/// The file as a device. Each slot for a request in flight has a thread that executes `pread` or `pwrite`.
#[derive(Debug)]
pub struct DirectFileQueues {
    memory: Arc<GuestMemory>,
    callers: Vec<Sender<Call>>,
    done: Receiver<u32>,
    /// The completion that `wait` has taken.
    first_done: Option<u32>,
}

impl DirectFileQueues {
    /// Opens the file, and starts the threads. They end when the queues are dropped.
    ///
    /// # Panics
    /// When the file cannot be opened for direct I/O.
    pub fn open(path: &Path) -> DirectFileQueues {
        let (region, _) =
            Region::shared("direct-file", QUEUES as u64 * DATA_BYTES, GuestAddress(0)).expect("data memory");
        let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).expect("data memory"));
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).expect("direct I/O");
        let file = Arc::new(file);
        let (completed, done) = channel();
        let start = |_| {
            let (caller, calls) = channel();
            let (file, memory, completed) = (Arc::clone(&file), Arc::clone(&memory), completed.clone());
            std::thread::spawn(move || execute(&file, &memory, &calls, &completed));
            caller
        };
        let callers = (0..QUEUES * DEPTH).map(start).collect();
        DirectFileQueues { memory, callers, done, first_done: None }
    }
}

/// Executes calls until the queues are dropped.
fn execute(file: &File, memory: &GuestMemory, calls: &Receiver<Call>, completed: &Sender<u32>) {
    let mut buffer = vec![0; BLOCK + ALIGNMENT];
    let first = buffer.as_ptr().align_offset(ALIGNMENT);
    let buffer = &mut buffer[first..first + BLOCK];
    for call in calls {
        if call.write {
            memory.read(call.data, buffer).expect("data memory");
            file.write_all_at(buffer, call.offset).expect("a write");
        } else {
            file.read_exact_at(buffer, call.offset).expect("a read");
            memory.write(call.data, buffer).expect("data memory");
        }
        if completed.send(call.user).is_err() {
            return;
        }
    }
}

impl DeviceQueues for DirectFileQueues {
    fn queue_count(&mut self) -> usize {
        QUEUES
    }
    fn memory(&mut self) -> Arc<GuestMemory> {
        Arc::clone(&self.memory)
    }
    fn data_address(&mut self, queue: usize) -> GuestAddress {
        GuestAddress(queue as u64 * DATA_BYTES)
    }
    fn max_request_bytes(&mut self) -> u32 {
        BLOCK as u32
    }
    fn request_mix(&self) -> &[RequestType] {
        &[RequestType::Read, RequestType::Write]
    }
    fn submit(&mut self, _queue: usize, user: u32, request: &LoadRequest) -> bool {
        let write = match request.request_type {
            RequestType::Read => false,
            RequestType::Write => true,
            other => panic!("{other:?} is not supported"),
        };
        assert_eq!(request.sectors() as usize * 512, BLOCK, "requests have one block");
        let call = Call { user, offset: request.start() * 512, data: request.data, write };
        self.callers[user as usize].send(call).expect("a thread");
        true
    }
    fn publish(&mut self) {}
    fn reap(&mut self, done: &mut Vec<(u32, RequestOutcome)>) {
        let users = self.first_done.take().into_iter().chain(self.done.try_iter());
        done.extend(users.map(|user| (user, RequestOutcome::Good)));
    }
    fn wait(&mut self) {
        self.first_done = Some(self.done.recv().expect("a thread"));
    }
    fn waker(&mut self) -> Waker {
        unreachable!("a timed load has no use for it")
    }
}
