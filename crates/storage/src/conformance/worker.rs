//! A worker for the suite: one I/O context, one channel, some guest memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{ByteLen, ByteOffset, Disk, DiskChannel, Op, Outcome, Request, Tag};
use mqblk_memory::{Buffer, GuestAddress, GuestMemory, LeaseId, PooledContext as _, Region};
use mqblk_uring::{FixedBufferUse, UringContext, UringOptions, Wait};

/// Guest memory: two adjacent regions, so that segments may span both.
pub(super) const MEMORY: u64 = 16 << 20;
const BOUNDARY: u64 = 8 << 20;
/// No working storage takes this long for the next completion.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// A request to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestRequest {
    /// Operation.
    pub op: Op,
    /// Start of the range, in bytes.
    pub start: u64,
    /// Length of the range, in bytes.
    pub len: u64,
    /// Guest memory: `(address, length)` of each segment. `None`: no buffer.
    pub segments: Option<Vec<(u64, u32)>>,
}

impl TestRequest {
    /// Returns a request without data.
    pub fn without_data(op: Op, start: u64, len: u64) -> TestRequest {
        TestRequest { op, start, len, segments: None }
    }

    /// Returns a request with data in one segment at `address`.
    pub fn with_data(op: Op, start: u64, len: u64, address: u64) -> TestRequest {
        TestRequest { op, start, len, segments: Some(vec![(address, len as u32)]) }
    }
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestResult {
    /// The outcome.
    pub outcome: Outcome,
    /// True if the buffer was returned.
    pub has_buffer: bool,
}

/// A thread's I/O context and channel to a disk.
pub struct TestWorker {
    context: UringContext,
    channel: Box<dyn DiskChannel<UringContext>>,
    memory: Arc<GuestMemory>,
    lease: LeaseId,
    next_tag: u32,
    /// Most operations that the context had in flight after a submission.
    highest_busy: usize,
}

impl TestWorker {
    /// Creates a worker with a ring for `in_flight` operations.
    ///
    /// # Panics
    /// When the host refuses a resource.
    pub fn new(disk: &dyn Disk<UringContext>, in_flight: u32, fixed: FixedBufferUse) -> TestWorker {
        let submissions = (in_flight / 2).clamp(1, 256);
        let mut context = UringContext::new(UringOptions { submissions, in_flight, files: 4, buffers: 16 })
            .expect("the host has io_uring");
        let region = |at, len| Arc::new(Region::shared("conformance", len, GuestAddress(at)).expect("memory").0);
        let regions = vec![region(0, BOUNDARY), region(BOUNDARY, MEMORY - BOUNDARY)];
        let memory = Arc::new(GuestMemory::new(regions).expect("they do not overlap"));
        let lease = context.adopt(Arc::clone(&memory), fixed).expect("adopted");
        let channel = disk.open_channel(&mut context).expect("a channel");
        TestWorker { context, channel, memory, lease, next_tag: 0, highest_busy: 0 }
    }

    /// Writes guest memory.
    ///
    /// # Panics
    /// When the range is not guest memory.
    pub fn write_memory(&self, address: u64, bytes: &[u8]) {
        self.for_each_region(address, bytes.len(), |at, range| self.memory.write(GuestAddress(at), &bytes[range]));
    }

    /// Reads guest memory.
    ///
    /// # Panics
    /// When the range is not guest memory.
    pub fn read_memory(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.for_each_region(address, len, |at, range| self.memory.read(GuestAddress(at), &mut bytes[range]));
        bytes
    }

    /// Calls `each` with the parts of a range that lie in one region.
    fn for_each_region(
        &self,
        address: u64,
        len: usize,
        mut each: impl FnMut(u64, std::ops::Range<usize>) -> Option<()>,
    ) {
        let first = usize::try_from(BOUNDARY.saturating_sub(address)).map_or(len, |space| space.min(len));
        each(address, 0..first).expect("mapped");
        if first < len {
            each(address + first as u64, first..len).expect("mapped");
        }
    }

    fn buffer(&mut self, segments: &[(u64, u32)]) -> Buffer {
        let buffer = self.context.buffers.take(self.lease);
        for &(address, len) in segments {
            self.context.buffers.push(&buffer, GuestAddress(address), len, u16::MAX).expect("mapped");
        }
        buffer
    }

    /// Submits all the requests at once and runs them to completion. Results are in the requests' order.
    ///
    /// # Panics
    /// When a completion is missing, comes twice, or lacks its buffer.
    pub fn run(&mut self, requests: &[TestRequest]) -> Vec<TestResult> {
        self.run_and_cancel(requests, |_| vec![])
    }

    /// Like [`run`](Self::run); before each turn of the ring, the requests whose indices `cancel` returns for the
    /// turn's number are cancelled.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_and_cancel(
        &mut self,
        requests: &[TestRequest],
        mut cancel: impl FnMut(u32) -> Vec<usize>,
    ) -> Vec<TestResult> {
        let first = self.next_tag;
        let mut batch = Vec::new();
        for request in requests {
            let tag = Tag::new((self.next_tag >> 16) as u16, self.next_tag as u16);
            self.next_tag = self.next_tag.wrapping_add(1);
            let buffer = request.segments.as_ref().map(|segments| self.buffer(segments));
            batch.push(Request {
                start: ByteOffset(request.start),
                len: ByteLen(request.len),
                tag,
                buffer,
                op: request.op,
            });
        }
        let tags: Vec<Tag> = batch.iter().map(|request| request.tag).collect();
        let places: HashMap<Tag, usize> = tags.iter().enumerate().map(|(at, tag)| (*tag, at)).collect();
        assert_eq!(places.len(), requests.len(), "tags from {first} are unique");
        let mut results = vec![None; requests.len()];
        let mut completions = Vec::new();
        let (mut taken, mut completed) = (0, 0);
        let mut deadline = Instant::now() + RUN_TIMEOUT;
        for turn in 0.. {
            if completed == requests.len() {
                break;
            }
            assert!(Instant::now() < deadline, "{completed} of {} requests completed, {taken} taken", requests.len());
            let offered = batch.len();
            let now_taken =
                if offered > 0 { self.channel.submit(&mut self.context, &mut batch, &mut completions) } else { 0 };
            assert_eq!(now_taken, offered - batch.len(), "submit says how many it took");
            taken += now_taken;
            self.highest_busy = self.highest_busy.max(self.context.busy());
            let mut cancelled: Vec<Tag> = cancel(turn).into_iter().map(|at| tags[at]).collect();
            if !cancelled.is_empty() {
                cancelled.sort_unstable();
                self.channel.cancel(&mut self.context, &cancelled, &mut completions);
            }
            if completions.is_empty() {
                self.context.turn(self.wait());
            }
            let before = completions.len();
            let reaped = self.channel.reap(&mut self.context, &mut completions);
            assert_eq!(reaped, completions.len() - before, "reap returns the number of completions");
            if !completions.is_empty() {
                deadline = Instant::now() + RUN_TIMEOUT;
            }
            for completion in completions.drain(..) {
                let place = places[&completion.tag];
                let result = TestResult { outcome: completion.outcome, has_buffer: completion.buffer.is_some() };
                assert_eq!(results[place].replace(result), None, "{:?} completed twice", requests[place]);
                assert_eq!(result.has_buffer, requests[place].segments.is_some(), "buffer of {:?}", requests[place]);
                if let Some(buffer) = completion.buffer {
                    self.context.buffers.release(buffer);
                }
                completed += 1;
            }
            assert_eq!(self.channel.outstanding() as usize, taken - completed, "outstanding");
        }
        assert_eq!(self.context.buffers.buffers_in_use(self.lease), 0, "every buffer was returned");
        results.into_iter().flatten().collect()
    }

    /// Like [`run`](Self::run). Also returns the highest number of operations that the requests had in the kernel at
    /// once.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_counting_operations(&mut self, requests: &[TestRequest]) -> (Vec<TestResult>, usize) {
        self.highest_busy = 0;
        let before = self.context.busy();
        let results = self.run(requests);
        (results, self.highest_busy - before)
    }

    /// Cancels tags that are not outstanding: no completion must follow.
    ///
    /// # Panics
    /// When one follows.
    pub fn cancel_unknown_tags(&mut self) {
        let tags: Vec<Tag> = (0..self.next_tag as u16 + 16).map(|index| Tag::new(0, index)).collect();
        let mut completions = Vec::new();
        self.channel.cancel(&mut self.context, &tags, &mut completions);
        self.context.turn(Wait::No);
        self.channel.reap(&mut self.context, &mut completions);
        assert!(
            completions.is_empty() && self.channel.outstanding() == 0,
            "{} completions of unknown tags",
            completions.len()
        );
    }

    /// Runs one request.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_one(&mut self, request: TestRequest) -> Outcome {
        self.run(&[request])[0].outcome
    }

    fn wait(&self) -> Wait {
        let longest = Duration::from_millis(100);
        match self.channel.deadline() {
            Some(when) => Wait::AtMost(when.saturating_duration_since(Instant::now()).min(longest)),
            None => Wait::AtMost(longest),
        }
    }

    /// Closes the channel and checks that nothing of it is left in the context.
    ///
    /// # Panics
    /// When something is left.
    pub fn close(mut self) {
        assert_eq!(self.channel.outstanding(), 0);
        self.channel.close(&mut self.context);
        drop(self.channel);
        // Operations of the channel without a request, for example a receive from its server, are cancelled.
        let deadline = Instant::now() + RUN_TIMEOUT;
        while self.context.busy() > 0 && Instant::now() < deadline {
            self.context.turn(Wait::AtMost(Duration::from_millis(1)));
        }
        assert_eq!(self.context.busy(), 0, "operations in flight after close");
        self.context.turn(Wait::No);
        self.context.retire(self.lease);
        assert!(self.context.buffers.is_lease_released(self.lease), "buffers in use after close");
    }
}
