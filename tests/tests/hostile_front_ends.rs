//! Front-ends that come and go.

use std::sync::Arc;

use mqblk_tests::hostile::conversation::{Stage, page, serves};
use mqblk_tests::hostile::event::Event;
use mqblk_tests::hostile::front_end::{EVENT_IDX, FrontEnd, RING};
use mqblk_tests::hostile::memory::{Memory, START};
use mqblk_tests::hostile::ring::Places;
use mqblk_tests::hostile::socket::{Connection, Heard, VERSION, frame, message as m, state};
use rustix::fd::AsFd;

#[test]
fn a_front_end_may_leave_at_any_step() {
    type Step = fn(&mut FrontEnd);
    let steps: &[Step] = &[
        |f| assert_ne!(f.connection.ask_u64(m::GET_FEATURES), 0),
        |f| f.features = f.connection.negotiate(EVENT_IDX),
        |f| assert_eq!(f.connection.ask_u64(m::GET_QUEUE_NUM), 2),
        |f| assert!(f.connection.ask_u64(m::GET_MAX_MEM_SLOTS) >= 509),
        FrontEnd::tell_memory,
        |f| {
            let region = page(1 << 40);
            f.connection.tell(m::ADD_MEM_REG, &region.single(), &[region.fd()]);
        },
        |f| f.connection.tell(m::SET_VRING_NUM, &state(1, 64), &[]),
        |f| f.connection.tell(m::SET_VRING_BASE, &state(1, 0), &[]),
        |f| {
            let addresses = f.addresses(1, Places::pages(START + 0x4_0000));
            f.connection.tell(m::SET_VRING_ADDR, &addresses, &[]);
        },
        |f| f.connection.tell(m::SET_VRING_CALL, &1_u64.to_ne_bytes(), &[Event::new().as_fd()]),
        |f| f.connection.tell(m::SET_VRING_ERR, &1_u64.to_ne_bytes(), &[Event::new().as_fd()]),
        |f| f.connection.tell(m::SET_VRING_KICK, &1_u64.to_ne_bytes(), &[Event::new().as_fd()]),
        |f| f.connection.tell(m::SET_VRING_ENABLE, &state(1, 1), &[]),
        |f| {
            f.add_queue(Places::pages(START), RING);
        },
        |f| assert!(serves(f, 0)),
        |f| f.connection.tell(m::SET_VRING_ENABLE, &state(0, 0), &[]),
        |f| assert_eq!(f.stop_queue(0), 1),
        |f| f.connection.tell(m::RESET_DEVICE, &[], &[]),
    ];
    let mut stage = Stage::new();
    for count in 0..=steps.len() {
        for by_half in [false, true] {
            let connection = Connection::open(&stage.daemon.socket("bad"));
            let memory = Arc::new(Memory::usual());
            let mut front_end = FrontEnd { connection, memory, queues: Vec::new(), features: 0 };
            steps[..count].iter().for_each(|step| step(&mut front_end));
            if by_half {
                // In the middle of its next message.
                front_end.connection.bytes(&frame(m::SET_FEATURES, VERSION, 8, &[1, 2, 3]), &[]);
            }
            drop(front_end);
            stage.check(&format!("leaving after step {count}"), usize::from(by_half));
        }
    }
    stage.end();
}

#[test]
fn a_thousand_front_ends() {
    let mut stage = Stage::new();
    let socket = stage.daemon.socket("bad");
    for number in 0..1000 {
        match number % 50 {
            // Comes and serves a request.
            0 => assert!(serves(&mut FrontEnd::start(&socket, 0, 2), 1)),
            // Comes with a ring, and goes.
            1..5 => drop(FrontEnd::start(&socket, 0, 1)),
            5..20 => assert_ne!(Connection::open(&socket).ask_u64(m::GET_FEATURES), 0),
            // Comes, asks, and does not wait for the answer.
            20..30 => {
                Connection::open(&socket).send(m::GET_FEATURES, VERSION, &[], &[]);
            }
            _ => drop(Connection::open(&socket)),
        }
    }
    stage.daemon.settle("bad");
    // Whoever asks and does not wait is told of no more than a broken pipe, and that is no complaint.
    stage.check("a thousand front-ends", 0);
    stage.end();
}

#[test]
fn half_a_message_holds_up_nobody_else() {
    let mut stage = Stage::new();
    let socket = stage.daemon.socket("bad");
    for cut in [1, 6, 12, 15] {
        let silent = Connection::open(&socket);
        silent.bytes(&frame(m::SET_FEATURES, VERSION, 8, &[0; 8])[..cut], &[]);
        let mut waiting = Connection::open(&socket);
        waiting.send(m::GET_FEATURES, VERSION, &[], &[]);
        stage.neighbour.assert_goes_on("half a message");
        drop(silent);
        assert!(matches!(waiting.hear(), Heard::Reply { message: m::GET_FEATURES, .. }), "the next front-end");
        drop(waiting);
        stage.check("half a message", 1);
    }
    stage.end();
}
