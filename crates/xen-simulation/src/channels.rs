//! The machine's event channels. A channel has two ends; each is open (a domain has a port for it) or closed, and only
//! the domain that a closed end belongs to may bind to it. This is as in Xen: a port whose remote end closes becomes
//! unbound again, for the same domain.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mqblk_memory::DomainId;
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::events::signal;
use super::range_allocator::RangeAllocator;
use super::shared_memory::{CHANNELS, CacheLine, SharedInfo, event_word};
use mqblk_xen::Port;

/// Maximum number of ports of a domain: Xen's `EVTCHN_FIFO_NR_CHANNELS`.
const PORTS: u32 = 1 << 17;

/// An end of a channel: 0 allocated it, 1 binds to it.
type Side = usize;

#[derive(Debug)]
struct Channel {
    /// The domain of each end.
    domains: [DomainId; 2],
    /// The port of each open end.
    ports: [Option<Port>; 2],
    /// The eventfd that each end polls.
    events: [OwnedFd; 2],
}

#[derive(Debug)]
pub(super) struct EventChannels {
    shared_info: Arc<SharedInfo>,
    numbers: RangeAllocator,
    channels: HashMap<u32, Channel>,
    ports: BTreeMap<(DomainId, Port), (u32, Side)>,
    free: HashMap<DomainId, RangeAllocator>,
    /// Totals of closed channels.
    sent: u64,
    delivered: u64,
}

/// A new port, and the result of its hypercall.
type OpenedPort = (Port, (Vec<u32>, Vec<OwnedFd>));

impl EventChannels {
    pub(super) fn new(shared_info: Arc<SharedInfo>) -> EventChannels {
        let numbers = RangeAllocator::new(0, CHANNELS);
        let (channels, ports, free) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        EventChannels { shared_info, numbers, channels, ports, free, sent: 0, delivered: 0 }
    }

    /// Returns the line of the events to one end.
    fn event_line(&self, channel: u32, side: Side) -> CacheLine {
        self.shared_info.event_line(2 * channel + side as u32).expect("a channel has lines")
    }

    /// Allocates a port of `domain` that `remote` may bind to.
    pub(super) fn open(&mut self, domain: DomainId, remote: DomainId) -> Result<OpenedPort, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let events = [rustix::event::eventfd(0, flags)?, rustix::event::eventfd(0, flags)?];
        let number = self.numbers.allocate(1).ok_or(Errno::NOSPC)?;
        for side in 0..2 {
            self.event_line(number, side).word(event_word::STATE).store(0, Ordering::SeqCst);
        }
        self.channels.insert(number, Channel { domains: [domain, remote], ports: [None; 2], events });
        let opened = self.bind_end(number, 0);
        if opened.is_err() {
            self.drop_if_closed(number);
        }
        opened
    }

    /// Binds a new port of `domain` to a port of `remote`.
    pub(super) fn bind(&mut self, domain: DomainId, remote: DomainId, port: Port) -> Result<OpenedPort, Errno> {
        let &(number, remote_side) = self.ports.get(&(remote, port)).ok_or(Errno::INVAL)?;
        let side = 1 - remote_side;
        let channel = &self.channels[&number];
        if channel.domains[side] != domain || channel.ports[side].is_some() {
            return Err(Errno::INVAL);
        }
        let opened = self.bind_end(number, side)?;
        // Events sent while the end was closed may be lost, so binding makes one pending, as in Xen.
        self.event_line(number, side).word(event_word::STATE).store(event_word::PENDING, Ordering::SeqCst);
        signal(&self.channels[&number].events[side]);
        Ok(opened)
    }

    fn bind_end(&mut self, number: u32, side: Side) -> Result<OpenedPort, Errno> {
        let channel = self.channels.get_mut(&number).ok_or(Errno::INVAL)?;
        let events = [&channel.events[side], &channel.events[1 - side]].map(OwnedFd::try_clone);
        let events = events.into_iter().collect::<Result<_, _>>().map_err(|_| Errno::NFILE)?;
        let domain = channel.domains[side];
        let free = self.free.entry(domain).or_insert_with(|| RangeAllocator::new(1, PORTS));
        let port = Port(free.allocate(1).ok_or(Errno::NOSPC)?);
        channel.ports[side] = Some(port);
        self.ports.insert((domain, port), (number, side));
        let lines = [1 - side, side].map(|side| 2 * number + side as u32);
        Ok((port, (vec![port.0, lines[0], lines[1]], events)))
    }

    /// Closes a port. The remote end, if open, becomes unbound.
    pub(super) fn close(&mut self, domain: DomainId, port: Port) {
        let Some((number, side)) = self.ports.remove(&(domain, port)) else { return };
        if let Some(free) = self.free.get_mut(&domain) {
            free.release(port.0);
        }
        let other = 1 - side;
        let to_other = self.event_line(number, other);
        let Some(channel) = self.channels.get_mut(&number) else { return };
        channel.ports[side] = None;
        // The program may have been killed between setting the bit and the signal.
        if channel.ports[other].is_some()
            && to_other.word(event_word::STATE).load(Ordering::SeqCst) == event_word::PENDING
        {
            signal(&channel.events[other]);
        }
        self.drop_if_closed(number);
    }

    fn drop_if_closed(&mut self, number: u32) {
        if self.channels.get(&number).is_some_and(|channel| channel.ports == [None; 2]) {
            for side in 0..2 {
                let line = self.event_line(number, side);
                self.sent += line.take(event_word::SENT);
                self.delivered += line.take(event_word::DELIVERED);
            }
            self.channels.remove(&number);
            self.numbers.release(number);
        }
    }

    /// Returns the totals of events sent and delivered.
    pub(super) fn events(&self) -> (u64, u64) {
        let mut sum = (self.sent, self.delivered);
        for number in self.channels.keys() {
            for side in 0..2 {
                let line = self.event_line(*number, side);
                sum = (sum.0 + line.get(event_word::SENT), sum.1 + line.get(event_word::DELIVERED));
            }
        }
        sum
    }

    /// Returns the number of open ports, of one domain or of all.
    pub(super) fn open_ports(&self, of: Option<DomainId>) -> u64 {
        self.ports.keys().filter(|(domain, _)| of.is_none_or(|of| of == *domain)).count() as u64
    }

    pub(super) fn is_bound(&self, domain: DomainId, port: Port) -> bool {
        let end = self.ports.get(&(domain, port));
        end.is_some_and(|(number, side)| self.channels[number].ports[1 - side].is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_delivered_if_its_sender_is_killed_before_the_signal() {
        let board = Arc::new(SharedInfo::create().unwrap().0);
        let mut channels = EventChannels::new(Arc::clone(&board));
        let (guest, host) = (DomainId(1), DomainId(0));
        let (front, (words, events)) = channels.open(guest, host).unwrap();
        let incoming = board.event_line(words[2]).unwrap();
        let is_signalled = || rustix::io::read(&events[0], &mut [0; 8]).is_ok();
        for (state, expected) in [(event_word::PENDING, true), (0, false), (event_word::MASKED, false), (3, false)] {
            let (back, _) = channels.bind(host, guest, front).unwrap();
            incoming.word(event_word::STATE).store(state, Ordering::SeqCst);
            channels.close(host, back);
            assert_eq!(is_signalled(), expected, "{state}");
            assert_eq!(incoming.get(event_word::STATE), state, "the event is still to be taken, or unmasked");
        }
    }

    #[test]
    fn a_channel_is_freed_when_both_ends_are_closed() {
        let board = Arc::new(SharedInfo::create().unwrap().0);
        let mut channels = EventChannels::new(board);
        let (guest, host) = (DomainId(1), DomainId(0));
        for _ in 0..2 * CHANNELS {
            let (front, _) = channels.open(guest, host).unwrap();
            let (back, _) = channels.bind(host, guest, front).unwrap();
            assert_eq!(channels.bind(host, guest, front).unwrap_err(), Errno::INVAL);
            channels.close(guest, front);
            assert_eq!(channels.open_ports(None), 1);
            channels.close(host, back);
            channels.close(host, back);
        }
        assert_eq!((channels.open_ports(None), channels.channels.len()), (0, 0));
    }
}
