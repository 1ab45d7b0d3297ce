//! A client in a process of its own that writes and verifies until it is killed with requests in flight.
//!
//! `driver_load SOCKET QUEUES SEED` prints a line when it has connected and after every tenth round.
#![forbid(unsafe_code)]

use std::io::Write as _;

use mqblk_tests::hostile::load::VhostUserLoad;

fn main() {
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().expect("driver_load SOCKET QUEUES SEED");
    let socket = next();
    let (queues, seed) = (next().parse().expect("a number of queues"), next().parse().expect("a seed"));
    let mut load = VhostUserLoad::connect(socket.into(), queues, 200, seed);
    let mut out = std::io::stdout();
    for round in 0_u64.. {
        if round % 10 == 0 && writeln!(out, "{}", load.verified).is_err() {
            return;
        }
        load.round();
    }
}
