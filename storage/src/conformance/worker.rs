//! A worker as the suite needs it: one lane, one channel, some guest memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mqblk_core::{ByteLen, ByteOffset, Disk, DiskChannel, Op, Outcome, Request, Tag};
use mqblk_memory::{Buffer, GuestAddress, GuestMemory, LeaseId, Region};
use mqblk_uring::{FixedBufferUse, Lane, LaneOptions, Wait};

/// Guest memory: two regions that touch, so that pieces may cross from one to the other.
pub(super) const MEMORY: u64 = 16 << 20;
const BOUNDARY: u64 = 8 << 20;
/// No storage that is alive takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A request as a test writes it down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Want {
    /// What to do.
    pub op: Op,
    /// Start of the range, in bytes.
    pub start: u64,
    /// Length of the range, in bytes.
    pub len: u64,
    /// Guest memory: `(address, length)` of each piece. `None`: no buffer at all.
    pub pieces: Option<Vec<(u64, u32)>>,
}

impl Want {
    /// A request without data.
    pub fn bare(op: Op, start: u64, len: u64) -> Want {
        Want { op, start, len, pieces: None }
    }

    /// A request with data in one piece at `address`.
    pub fn at(op: Op, start: u64, len: u64, address: u64) -> Want {
        Want { op, start, len, pieces: Some(vec![(address, len as u32)]) }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The outcome.
    pub outcome: Outcome,
    /// Whether a buffer came back with it.
    pub buffer: bool,
}

/// A thread's lane and channel to a disk.
pub struct Worker {
    lane: Lane,
    channel: Box<dyn DiskChannel<Lane>>,
    memory: Arc<GuestMemory>,
    lease: LeaseId,
    next_tag: u32,
}

impl Worker {
    /// A worker with a ring for `in_flight` operations.
    ///
    /// # Panics
    /// When the host refuses what it needs.
    pub fn new(disk: &dyn Disk<Lane>, in_flight: u32, fixed: FixedBufferUse) -> Worker {
        let submissions = (in_flight / 2).clamp(1, 256);
        let mut lane =
            Lane::new(LaneOptions { submissions, in_flight, files: 4, buffers: 16 }).expect("the host has io_uring");
        let region = |at, len| Arc::new(Region::shared("conformance", len, GuestAddress(at)).expect("memory").0);
        let regions = vec![region(0, BOUNDARY), region(BOUNDARY, MEMORY - BOUNDARY)];
        let memory = Arc::new(GuestMemory::new(regions).expect("they do not overlap"));
        let lease = lane.adopt(Arc::clone(&memory), fixed).expect("adopted");
        let channel = disk.open_channel(&mut lane).expect("a channel");
        Worker { lane, channel, memory, lease, next_tag: 0 }
    }

    /// Fills guest memory.
    ///
    /// # Panics
    /// When the range is not guest memory.
    pub fn fill(&self, address: u64, bytes: &[u8]) {
        self.across(address, bytes.len(), |at, range| self.memory.write(GuestAddress(at), &bytes[range]));
    }

    /// Reads guest memory.
    ///
    /// # Panics
    /// When the range is not guest memory.
    pub fn found(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.across(address, len, |at, range| self.memory.read(GuestAddress(at), &mut bytes[range]));
        bytes
    }

    /// Calls `each` with the parts of a range that lie in one region.
    fn across(&self, address: u64, len: usize, mut each: impl FnMut(u64, std::ops::Range<usize>) -> Option<()>) {
        let first = usize::try_from(BOUNDARY.saturating_sub(address)).map_or(len, |room| room.min(len));
        each(address, 0..first).expect("mapped");
        if first < len {
            each(address + first as u64, first..len).expect("mapped");
        }
    }

    fn buffer(&mut self, pieces: &[(u64, u32)]) -> Buffer {
        let buffer = self.lane.buffers.take(self.lease);
        for &(address, len) in pieces {
            self.lane.buffers.push(&buffer, GuestAddress(address), len, u16::MAX).expect("mapped");
        }
        buffer
    }

    /// Offers all the requests at once and sees them through. Answers are in the requests' order.
    ///
    /// # Panics
    /// When an answer is missing, comes twice, or has lost its buffer.
    pub fn run(&mut self, wanted: &[Want]) -> Vec<Answer> {
        self.run_and_cancel(wanted, |_| vec![])
    }

    /// The same; before each turn of the ring the requests are cancelled that `cancel` names by their places, given the turn's
    /// number.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_and_cancel(&mut self, wanted: &[Want], mut cancel: impl FnMut(u32) -> Vec<usize>) -> Vec<Answer> {
        let first = self.next_tag;
        let mut batch = Vec::new();
        for want in wanted {
            let tag = Tag::new((self.next_tag >> 16) as u16, self.next_tag as u16);
            self.next_tag = self.next_tag.wrapping_add(1);
            let buffer = want.pieces.as_ref().map(|pieces| self.buffer(pieces));
            batch.push(Request { start: ByteOffset(want.start), len: ByteLen(want.len), tag, buffer, op: want.op });
        }
        let tags: Vec<Tag> = batch.iter().map(|request| request.tag).collect();
        let places: HashMap<Tag, usize> = tags.iter().enumerate().map(|(at, tag)| (*tag, at)).collect();
        assert_eq!(places.len(), wanted.len(), "tags from {first} are unique");
        let mut answers = vec![None; wanted.len()];
        let mut finished = Vec::new();
        let (mut taken, mut ended) = (0, 0);
        let give_up = Instant::now() + PATIENCE;
        for turn in 0.. {
            if ended == wanted.len() {
                break;
            }
            assert!(Instant::now() < give_up, "{ended} of {} requests ended, {taken} taken", wanted.len());
            let offered = batch.len();
            let now_taken =
                if offered > 0 { self.channel.submit(&mut self.lane, &mut batch, &mut finished) } else { 0 };
            assert_eq!(now_taken, offered - batch.len(), "submit says how many it took");
            taken += now_taken;
            let mut cancelled: Vec<Tag> = cancel(turn).into_iter().map(|at| tags[at]).collect();
            if !cancelled.is_empty() {
                cancelled.sort_unstable();
                self.channel.cancel(&mut self.lane, &cancelled, &mut finished);
            }
            if finished.is_empty() {
                self.lane.turn(self.wait());
            }
            let before = finished.len();
            let reaped = self.channel.reap(&mut self.lane, &mut finished);
            assert_eq!(reaped, finished.len() - before, "reap says how many it brought");
            for end in finished.drain(..) {
                let place = places[&end.tag];
                let answer = Answer { outcome: end.outcome, buffer: end.buffer.is_some() };
                assert_eq!(answers[place].replace(answer), None, "{:?} ended twice", wanted[place]);
                assert_eq!(answer.buffer, wanted[place].pieces.is_some(), "buffer of {:?}", wanted[place]);
                if let Some(buffer) = end.buffer {
                    self.lane.buffers.release(buffer);
                }
                ended += 1;
            }
            assert_eq!(self.channel.outstanding() as usize, taken - ended, "outstanding");
        }
        assert_eq!(self.lane.buffers.uses(self.lease), 0, "every buffer came back");
        answers.into_iter().flatten().collect()
    }

    /// Cancels what is not outstanding: nothing comes of it.
    ///
    /// # Panics
    /// When something does.
    pub fn cancel_strangers(&mut self) {
        let tags: Vec<Tag> = (0..self.next_tag as u16 + 16).map(|index| Tag::new(0, index)).collect();
        let mut finished = Vec::new();
        self.channel.cancel(&mut self.lane, &tags, &mut finished);
        self.lane.turn(Wait::No);
        self.channel.reap(&mut self.lane, &mut finished);
        assert!(finished.is_empty() && self.channel.outstanding() == 0, "{} came of nothing", finished.len());
    }

    /// Runs one request.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn one(&mut self, want: Want) -> Outcome {
        self.run(&[want])[0].outcome
    }

    fn wait(&self) -> Wait {
        let longest = Duration::from_millis(100);
        match self.channel.deadline() {
            Some(when) => Wait::AtMost(when.saturating_duration_since(Instant::now()).min(longest)),
            None => Wait::AtMost(longest),
        }
    }

    /// Closes the channel and checks that nothing of it is left in the lane.
    ///
    /// # Panics
    /// When something is.
    pub fn close(mut self) {
        assert_eq!(self.channel.outstanding(), 0);
        self.channel.close(&mut self.lane);
        drop(self.channel);
        assert_eq!(self.lane.busy(), 0, "operations in flight after close");
        self.lane.retire(self.lease);
        assert!(self.lane.buffers.is_gone(self.lease), "buffers in use after close");
    }
}
