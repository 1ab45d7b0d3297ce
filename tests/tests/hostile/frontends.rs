//! Frontends that connect and disconnect.

use std::sync::Arc;

use mqblk_tests::hostile::eventfd::TestEventFd;
use mqblk_tests::hostile::frontend::{DEFAULT_RING_SIZE, EVENT_IDX, HostileFrontend};
use mqblk_tests::hostile::memory::{START, SharedMemory};
use mqblk_tests::hostile::ring::RingAddresses;
use mqblk_tests::hostile::session::{SessionHarness, completes_read, one_page_region};
use mqblk_tests::hostile::socket::{
    Received, VERSION, VhostUserSocket, message as m, message_bytes, vring_state_payload,
};
use rustix::fd::AsFd;

#[test]
fn a_frontend_may_disconnect_at_any_step() {
    type Step = fn(&mut HostileFrontend);
    let steps: &[Step] = &[
        |f| assert_ne!(f.connection.request_u64(m::GET_FEATURES), 0),
        |f| f.features = f.connection.negotiate(EVENT_IDX),
        |f| assert_eq!(f.connection.request_u64(m::GET_QUEUE_NUM), 2),
        |f| assert!(f.connection.request_u64(m::GET_MAX_MEM_SLOTS) >= 509),
        HostileFrontend::set_memory_table,
        |f| {
            let region = one_page_region(1 << 40);
            f.connection.send_acked(m::ADD_MEM_REG, &region.mem_reg_payload(), &[region.fd()]);
        },
        |f| f.connection.send_acked(m::SET_VRING_NUM, &vring_state_payload(1, 64), &[]),
        |f| f.connection.send_acked(m::SET_VRING_BASE, &vring_state_payload(1, 0), &[]),
        |f| {
            let addresses = f.vring_addr_payload(1, RingAddresses::pages(START + 0x4_0000));
            f.connection.send_acked(m::SET_VRING_ADDR, &addresses, &[]);
        },
        |f| f.connection.send_acked(m::SET_VRING_CALL, &1_u64.to_ne_bytes(), &[TestEventFd::new().as_fd()]),
        |f| f.connection.send_acked(m::SET_VRING_ERR, &1_u64.to_ne_bytes(), &[TestEventFd::new().as_fd()]),
        |f| f.connection.send_acked(m::SET_VRING_KICK, &1_u64.to_ne_bytes(), &[TestEventFd::new().as_fd()]),
        |f| f.connection.send_acked(m::SET_VRING_ENABLE, &vring_state_payload(1, 1), &[]),
        |f| {
            f.add_queue(RingAddresses::pages(START), DEFAULT_RING_SIZE);
        },
        |f| assert!(completes_read(f, 0)),
        |f| f.connection.send_acked(m::SET_VRING_ENABLE, &vring_state_payload(0, 0), &[]),
        |f| assert_eq!(f.stop_queue(0), 1),
        |f| f.connection.send_acked(m::RESET_DEVICE, &[], &[]),
    ];
    let mut stage = SessionHarness::new();
    for count in 0..=steps.len() {
        for by_half in [false, true] {
            let connection = VhostUserSocket::connect(&stage.daemon.socket("bad"));
            let memory = Arc::new(SharedMemory::two_regions());
            let mut frontend = HostileFrontend { connection, memory, queues: Vec::new(), features: 0 };
            steps[..count].iter().for_each(|step| step(&mut frontend));
            if by_half {
                // Within its next message.
                frontend.connection.send_bytes(&message_bytes(m::SET_FEATURES, VERSION, 8, &[1, 2, 3]), &[]);
            }
            drop(frontend);
            stage.check(&format!("leaving after step {count}"), usize::from(by_half));
        }
    }
    stage.finish();
}

#[test]
fn a_thousand_frontends() {
    let mut stage = SessionHarness::new();
    let socket = stage.daemon.socket("bad");
    for number in 0..1000 {
        match number % 50 {
            // Connects and has a request served.
            0 => assert!(completes_read(&mut HostileFrontend::start(&socket, 0, 2), 1)),
            // Sets up a ring, and disconnects.
            1..5 => drop(HostileFrontend::start(&socket, 0, 1)),
            5..20 => assert_ne!(VhostUserSocket::connect(&socket).request_u64(m::GET_FEATURES), 0),
            // Sends a message, and disconnects before the reply.
            20..30 => {
                VhostUserSocket::connect(&socket).send(m::GET_FEATURES, VERSION, &[], &[]);
            }
            _ => drop(VhostUserSocket::connect(&socket)),
        }
    }
    stage.daemon.wait_for_session_end("bad");
    // A frontend that disconnects before its reply causes no warning.
    stage.check("a thousand frontends", 0);
    stage.finish();
}

#[test]
fn half_a_message_blocks_no_other_frontend() {
    let mut stage = SessionHarness::new();
    let socket = stage.daemon.socket("bad");
    for cut in [1, 6, 12, 15] {
        let silent = VhostUserSocket::connect(&socket);
        silent.send_bytes(&message_bytes(m::SET_FEATURES, VERSION, 8, &[0; 8])[..cut], &[]);
        let mut waiting = VhostUserSocket::connect(&socket);
        waiting.send(m::GET_FEATURES, VERSION, &[], &[]);
        stage.neighbour.assert_progress("half a message");
        drop(silent);
        assert!(matches!(waiting.receive(), Received::Reply { message: m::GET_FEATURES, .. }), "the next frontend");
        drop(waiting);
        stage.check("half a message", 1);
    }
    stage.finish();
}
