//! A request queue of a controller.

use std::io;
use std::sync::Arc;

use mqblk_core::ByteLen;
use mqblk_memory::{GuestAddress, GuestMemory, SharedArray};
use mqblk_ring::driver_ring::{ChainLayout, ChainRefused, DriverRing, RequestChain};
use mqblk_vhost_user_client::EventFd;

use super::command::{Command, CommandData};
use super::layout::{COMMAND_BYTES, COMMAND_STRIDE, RESPONSE_OFFSET, ScsiQueueLayout};
use super::outcome::{CommandOutcome, ResponseHead};
use super::wire::{HEADER_BYTES, POISON, RESPONSE_BYTES, RESPONSE_HEAD_BYTES};
use crate::line::{LINE, prefetch_found, prefetch_later};
use crate::{DeviceError, SubmitError};

/// Cache lines from one command to the next.
const LINES: usize = (COMMAND_STRIDE / LINE) as usize;
/// The last 16 bytes of a line: four bytes behind the header, and the fixed part of the response.
const LINE_END: usize = LINE as usize / size_of::<LineEnd>() - 1;
const _: () = assert!(LINE - RESPONSE_OFFSET == RESPONSE_HEAD_BYTES && RESPONSE_HEAD_BYTES == 12);
/// The content of a line's end.
type LineEnd = [u32; 4];
/// A response that was not written: [`POISON`] in the response byte.
const POISONED: LineEnd = [0, 0, 0, ((POISON as u32) << 24).to_le()];

/// A completed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScsiCompletion {
    /// The value given at submission.
    pub user_data: u32,
    /// Its outcome.
    pub outcome: CommandOutcome,
    /// Bytes that the device has written, as reported by it, including the response. Some devices do not report them.
    pub written: u32,
}

/// The driver's record of a command in flight.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CommandInFlight {
    /// The value given at submission.
    pub(crate) user_data: u32,
    /// Bytes of data.
    len: u32,
    /// The set that submitted it.
    pub(crate) origin: u16,
    /// Its target.
    pub(crate) target: u8,
}

/// A request queue, owned by one thread. A command allocates nothing and makes no system call.
/// [`publish`](Self::publish) makes one if the server sleeps.
#[derive(Debug)]
pub struct ScsiQueue {
    pub(crate) ring: DriverRing,
    chain_layout: ChainLayout,
    memory: Arc<GuestMemory>,
    layout: ScsiQueueLayout,
    headers: SharedArray<[u64; 8]>,
    line_ends: SharedArray<LineEnd>,
    commands: Box<[CommandInFlight]>,
    /// Free slots, a stack in step with the ring's stack of descriptors: a slot always gets the same descriptors.
    free: Vec<u16>,
    poison: bool,
    kick: EventFd,
    kicks: u64,
}

impl ScsiQueue {
    pub(crate) fn new(
        (ring, kick): (DriverRing, EventFd),
        chain_layout: ChainLayout,
        memory: &Arc<GuestMemory>,
        layout: ScsiQueueLayout,
        poison: bool,
    ) -> Option<ScsiQueue> {
        let n = usize::from(ring.size());
        let len = n * COMMAND_BYTES as usize;
        Some(ScsiQueue {
            chain_layout,
            headers: memory.shared_array(layout.commands, len / size_of::<[u64; 8]>())?,
            line_ends: memory.shared_array(layout.commands, len / size_of::<LineEnd>())?,
            memory: Arc::clone(memory),
            layout,
            commands: vec![CommandInFlight::default(); n].into(),
            free: (0..ring.size()).rev().collect(),
            ring,
            poison,
            kick,
            kicks: 0,
        })
    }

    /// Returns the shared memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Returns this queue's data area, page aligned.
    pub fn data(&self) -> (GuestAddress, ByteLen) {
        (self.layout.data.start, self.layout.data.len)
    }

    /// Returns the number of commands of all threads that are submitted and not yet reaped.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// Returns the number of commands submitted and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.ring.unpublished()
    }

    /// Returns the number of kicks so far.
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Adds a command to the ring: header, data-out, response, data-in.
    #[inline]
    pub(crate) fn submit(&mut self, user_data: u32, origin: u16, command: &Command) -> Result<(), SubmitError> {
        let slot = *self.free.last().ok_or(SubmitError::Full)?;
        let index = usize::from(slot);
        let (header_at, response_at) = self.layout.command(slot);
        let request = (header_at, command.data, response_at);
        let len = match &mut self.ring {
            DriverRing::Split(ring) => build(ring.begin(self.chain_layout), request, slot)?,
            DriverRing::Packed(ring) => build(ring.begin(self.chain_layout), request, slot)?,
        };
        self.free.pop();
        self.commands[index] = CommandInFlight { user_data, len, origin, target: command.address.target };
        let words = header(command, tag(origin, user_data));
        self.headers.set_prefix(index * LINES, words);
        if self.poison {
            self.line_ends.set(line_end(index), POISONED);
        }
        Ok(())
    }

    /// Publishes all submitted commands, and kicks the server if it has asked for kicks.
    ///
    /// # Errors
    /// If the kick cannot be written.
    #[inline]
    pub fn publish(&mut self) -> io::Result<()> {
        if self.ring.publish() {
            self.kicks += 1;
            self.kick.write(1)?;
        }
        Ok(())
    }

    /// Finds completions. Returns how many [`reap`](Self::reap) can reap.
    #[inline]
    pub(crate) fn poll(&mut self) -> Result<u16, DeviceError> {
        let found = self.ring.poll_used()?;
        prefetch_found((&self.ring, &self.line_ends), found, line_end);
        Ok(found)
    }

    /// Reaps one of the completions that the last poll has found.
    #[inline(always)]
    pub(crate) fn reap(&mut self) -> Result<Option<(CommandInFlight, ScsiCompletion)>, DeviceError> {
        prefetch_later((&self.ring, &self.line_ends), line_end);
        let Some(used) = self.ring.take()? else { return Ok(None) };
        let slot = used.token as usize;
        let command = self.commands[slot];
        let [_, words @ ..] = self.line_ends.get(line_end(slot));
        let outcome = ResponseHead::from_words(words).outcome(command.len, |bytes| {
            let (_, response) = self.layout.command(slot as u16);
            let sense = GuestAddress(response.0 + u64::from(RESPONSE_HEAD_BYTES));
            self.memory.read(sense, bytes).expect("responses are in shared memory");
        });
        self.free.push(slot as u16);
        Ok(Some((command, ScsiCompletion { user_data: command.user_data, outcome, written: used.written })))
    }
}

/// Returns the index of the end of a command's first line.
#[inline]
fn line_end(slot: usize) -> usize {
    slot * LINES * (LINE_END + 1) + LINE_END
}

/// Builds a request: header, data-out, response, data-in. Returns the bytes of data.
#[inline(always)]
fn build<C: RequestChain>(
    chain: C,
    (header, data, response): (GuestAddress, CommandData, GuestAddress),
    slot: u16,
) -> Result<u32, ChainRefused> {
    let mut chain = chain.readable(header, HEADER_BYTES)?;
    let mut len = 0;
    if let CommandData::Out(segment) = data {
        chain = chain.readable(segment.address, segment.len)?;
        len = segment.len;
    }
    chain = chain.writable(response, RESPONSE_BYTES)?;
    if let CommandData::In(segment) = data {
        chain = chain.writable(segment.address, segment.len)?;
        len = segment.len;
    }
    chain.commit(u32::from(slot))?;
    Ok(len)
}

/// Returns the tag of a command of set `origin`.
pub(crate) const fn tag(origin: u16, user_data: u32) -> u64 {
    (origin as u64) << 32 | user_data as u64
}

/// Builds a command's header: LUN, tag, attribute SIMPLE, no priority, no CRN, command descriptor block.
#[inline]
fn header(command: &Command, tag: u64) -> [u64; 7] {
    let [a, b, c, d] = command.cdb.words();
    let lun = u64::from_le_bytes(command.address.to_bytes());
    // The descriptor block begins behind three bytes of zeroes.
    let words = [lun, tag, a << 24, a >> 40 | b << 24, b >> 40 | c << 24, c >> 40 | d << 24, d >> 40];
    words.map(u64::to_le)
}
