//! Every order in which the steps of a sender and a receiver of events can happen. See `events.rs`, whose steps these are.

use std::collections::HashSet;

const PENDING: u8 = 1;
const MASKED: u8 = 2;
const EVENTS: u8 = 4;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    word: u8,
    bell: bool,
    /// What there is to see, and what the receiver has seen of it.
    sent: u8,
    seen: u8,
    sender: u8,
    sender_rings: bool,
    receiver: u8,
    receiver_rings: bool,
}

impl State {
    fn is_sender_done(&self) -> bool {
        self.sent == EVENTS && self.sender == 0
    }

    /// The sender's next step. `None` when it has sent all.
    fn send(mut self) -> Option<State> {
        match self.sender {
            0 if self.sent == EVENTS => return None,
            0 => self.sent += 1,
            1 => {
                self.sender_rings = self.word == 0;
                self.word |= PENDING;
            }
            _ => self.bell |= self.sender_rings,
        }
        self.sender = (self.sender + 1) % 3;
        Some(self)
    }

    /// The receiver's next step; it may also wake up for nothing. `bell_first`: `take` empties the bell before it looks at the bit.
    fn receive(mut self, bell_first: bool) -> State {
        match (self.receiver, bell_first) {
            (0, _) => {}
            (1, true) | (3, false) => self.bell = false,
            // To look at the bit is one step; the swap, if it is set, the next.
            (2, true) | (1, false) => self.receiver_rings = self.word & PENDING != 0,
            (3, true) | (2, false) => {
                if self.receiver_rings {
                    self.word = MASKED;
                }
            }
            (4, _) => self.seen = self.sent,
            (5, _) => {
                self.receiver_rings = self.word == MASKED | PENDING;
                self.word &= !MASKED;
            }
            _ => self.bell |= self.receiver_rings,
        }
        self.receiver = (self.receiver + 1) % 7;
        self
    }
}

/// How many states there are, and one in which the receiver sleeps for ever with something unseen.
fn explore(bell_first: bool) -> (usize, Option<State>) {
    let mut known = HashSet::from([State::default()]);
    let mut left = vec![State::default()];
    let mut lost = None;
    while let Some(state) = left.pop() {
        if state.is_sender_done() && state.receiver == 0 && !state.bell && state.seen < state.sent {
            lost = Some(state);
        }
        let next = [state.send(), Some(state.receive(bell_first))];
        left.extend(next.into_iter().flatten().filter(|next| known.insert(*next)));
    }
    (known.len(), lost)
}

#[test]
fn no_order_loses_an_event() {
    let (states, lost) = explore(true);
    assert_eq!(lost, None);
    assert!(states > 500, "{states} states");
}

#[test]
fn the_bit_before_the_bell_would_lose_one() {
    assert!(explore(false).1.is_some());
}
