//! Explores every interleaving of the steps of an event's sender and receiver in `events.rs`.

use std::collections::HashSet;

const PENDING: u8 = 1;
const MASKED: u8 = 2;
const EVENTS: u8 = 4;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Interleaving {
    word: u8,
    eventfd: bool,
    /// Number of writes by the sender, and the number that the receiver has seen.
    sent: u8,
    seen: u8,
    sender: u8,
    sender_signals: bool,
    receiver: u8,
    receiver_signals: bool,
}

impl Interleaving {
    fn is_sender_done(&self) -> bool {
        self.sent == EVENTS && self.sender == 0
    }

    /// Returns the state after the sender's next step. `None` if it has sent all events.
    fn send(mut self) -> Option<Interleaving> {
        match self.sender {
            0 if self.sent == EVENTS => return None,
            0 => self.sent += 1,
            1 => {
                self.sender_signals = self.word == 0;
                self.word |= PENDING;
            }
            _ => self.eventfd |= self.sender_signals,
        }
        self.sender = (self.sender + 1) % 3;
        Some(self)
    }

    /// Returns the state after the receiver's next step; spurious wakeups are allowed. `eventfd_first`: `take` empties
    /// the eventfd before it reads the bit.
    fn receive(mut self, eventfd_first: bool) -> Interleaving {
        match (self.receiver, eventfd_first) {
            (0, _) => {}
            (1, true) | (3, false) => self.eventfd = false,
            // Reading the bit is one step; the swap, if it is set, the next.
            (2, true) | (1, false) => self.receiver_signals = self.word & PENDING != 0,
            (3, true) | (2, false) => {
                if self.receiver_signals {
                    self.word = MASKED;
                }
            }
            (4, _) => self.seen = self.sent,
            (5, _) => {
                self.receiver_signals = self.word == MASKED | PENDING;
                self.word &= !MASKED;
            }
            _ => self.eventfd |= self.receiver_signals,
        }
        self.receiver = (self.receiver + 1) % 7;
        self
    }
}

/// Returns the number of reachable states, and one in which the receiver sleeps for ever with an unseen write.
fn explore(eventfd_first: bool) -> (usize, Option<Interleaving>) {
    let mut known = HashSet::from([Interleaving::default()]);
    let mut left = vec![Interleaving::default()];
    let mut lost = None;
    while let Some(state) = left.pop() {
        if state.is_sender_done() && state.receiver == 0 && !state.eventfd && state.seen < state.sent {
            lost = Some(state);
        }
        let next = [state.send(), Some(state.receive(eventfd_first))];
        left.extend(next.into_iter().flatten().filter(|next| known.insert(*next)));
    }
    (known.len(), lost)
}

#[test]
fn no_interleaving_loses_an_event() {
    let (states, lost) = explore(true);
    assert_eq!(lost, None);
    assert!(states > 500, "{states} states");
}

#[test]
fn the_bit_before_the_eventfd_would_lose_one() {
    assert!(explore(false).1.is_some());
}
