//! A request queue of a controller.

use std::io;
use std::sync::Arc;

use mqblk_core::ByteLen;
use mqblk_memory::{GuestAddress, GuestMemory, SharedArray};
use mqblk_ring::driver_ring::{ChainLayout, ChainRefused, DriverRing, RequestChain};
use mqblk_vhost_user_client::EventFd;

use super::command::{Command, CommandData};
use super::layout::ScsiQueueLayout;
use super::outcome::{CommandOutcome, ResponseHead};
use super::wire::{HEADER_BYTES, HEADER_STRIDE, RESPONSE_BYTES, RESPONSE_HEAD_BYTES, RESPONSE_STRIDE};
use crate::{DeviceError, SubmitError};

/// A response byte that the device has not written, if responses are poisoned.
pub(crate) const POISON: u8 = 0xff;
/// A response that was not written: [`POISON`] in the response byte.
const POISONED_HEAD: [u64; 2] = [0, ((POISON as u64) << 24).to_le()];
/// 16-byte slots from one response to the next.
const RESPONSE_SLOTS: usize = RESPONSE_STRIDE as usize / 16;
/// So many responses are on their way from the device's core at the same time: about as many as a core has reads in flight.
const PREFETCHED_RESPONSES: u16 = 8;

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

/// What the driver records of a command in flight.
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

/// A request queue, owned by one thread. A command allocates nothing and makes no system call. [`publish`](Self::publish) makes
/// one if the server sleeps.
#[derive(Debug)]
pub struct ScsiQueue {
    pub(crate) ring: DriverRing,
    chain_layout: ChainLayout,
    memory: Arc<GuestMemory>,
    layout: ScsiQueueLayout,
    headers: SharedArray<[u64; 8]>,
    responses: SharedArray<[u64; 2]>,
    /// Headers as last written. An equal header (the same block again) is not stored again.
    written_headers: Box<[[u64; 8]]>,
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
        Some(ScsiQueue {
            chain_layout,
            headers: memory.shared_array(layout.headers, n)?,
            responses: memory.shared_array(layout.responses, n * RESPONSE_SLOTS)?,
            memory: Arc::clone(memory),
            layout,
            // No header starts like this.
            written_headers: vec![[u64::MAX; 8]; n].into(),
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
        let at = |start: GuestAddress, stride: u32| GuestAddress(start.0 + u64::from(slot) * u64::from(stride));
        let header_at = at(self.layout.headers, HEADER_STRIDE);
        let request = (header_at, command.data, at(self.layout.responses, RESPONSE_STRIDE));
        let len = match &mut self.ring {
            DriverRing::Split(ring) => build(ring.begin(self.chain_layout), request, slot)?,
            DriverRing::Packed(ring) => build(ring.begin(self.chain_layout), request, slot)?,
        };
        self.free.pop();
        self.commands[index] = CommandInFlight { user_data, len, origin, target: command.address.target };
        let words = header(command, tag(origin, user_data));
        // Without a branch for each word: a header of a random block differs anywhere.
        let changed = words.iter().zip(&self.written_headers[index]).fold(0, |bits, (new, old)| bits | (new ^ old));
        if changed != 0 {
            self.written_headers[index] = words;
            self.headers.set(index, words);
        }
        if self.poison {
            self.responses.set(index * RESPONSE_SLOTS, POISONED_HEAD);
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

    /// Looks for completions. Returns how many [`reap`](Self::reap) can reap.
    #[inline]
    pub(crate) fn poll(&mut self) -> Result<u16, DeviceError> {
        let found = self.ring.poll_used()?;
        (0..found.min(PREFETCHED_RESPONSES)).for_each(|ahead| self.prefetch_response(ahead));
        Ok(found)
    }

    #[inline]
    fn prefetch_response(&self, ahead: u16) {
        if let Some(slot) = self.ring.upcoming(ahead) {
            self.responses.prefetch(slot as usize * RESPONSE_SLOTS);
        }
    }

    /// Reaps one of the completions that the last poll has found.
    #[inline]
    pub(crate) fn reap(&mut self) -> Result<Option<(CommandInFlight, ScsiCompletion)>, DeviceError> {
        self.prefetch_response(PREFETCHED_RESPONSES);
        let Some(used) = self.ring.take()? else { return Ok(None) };
        let slot = used.token as usize;
        let command = self.commands[slot];
        let head = ResponseHead::from_words(self.responses.get(slot * RESPONSE_SLOTS));
        let outcome = head.outcome(command.len, |bytes| {
            let at =
                self.layout.responses.0 + slot as u64 * u64::from(RESPONSE_STRIDE) + u64::from(RESPONSE_HEAD_BYTES);
            self.memory.read(GuestAddress(at), bytes).expect("responses are in shared memory");
        });
        self.free.push(slot as u16);
        Ok(Some((command, ScsiCompletion { user_data: command.user_data, outcome, written: used.written })))
    }
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
fn header(command: &Command, tag: u64) -> [u64; 8] {
    let mut bytes = [0; HEADER_STRIDE as usize];
    bytes[..8].copy_from_slice(&command.address.to_bytes());
    bytes[8..16].copy_from_slice(&tag.to_le_bytes());
    bytes[19..HEADER_BYTES as usize].copy_from_slice(&command.cdb.0);
    std::array::from_fn(|word| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[8 * word + byte])))
}
