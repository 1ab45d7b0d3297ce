//! Malformed vhost-user frames, and messages whose features were not offered.

use std::os::unix::net::UnixStream;

use mqblk_tests::hostile::eventfd::TestEventFd;
use mqblk_tests::hostile::frontend::PROTOCOL_FEATURES;
use mqblk_tests::hostile::session::SessionOutcome::{CheckedBySession, Closed, Refused};
use mqblk_tests::hostile::session::{SessionCase, SessionFixture, one_page_region, run_sessions};
use mqblk_tests::hostile::socket::{
    NEED_REPLY, REPLY, VERSION, config_payload, message as m, message_bytes, vring_state_payload,
};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustix::fd::AsFd;

fn send_descriptors(talk: &mut SessionFixture, message: u32, payload: &[u8], count: usize) {
    let event = TestEventFd::new();
    talk.send_after_negotiation(message, payload, &vec![event.as_fd(); count]);
}

#[test]
fn frames_that_make_no_sense() {
    let rows: &[SessionCase] = &[
        (
            "garbage",
            |t| {
                let mut bytes = vec![0; 4096];
                SmallRng::seed_from_u64(1).fill(&mut bytes[..]);
                t.send_first(&bytes);
            },
            Closed,
        ),
        ("zeroes", |t| t.send_first(&[0; 64]), Closed),
        ("an HTTP request", |t| t.send_first(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), Closed),
        (
            "half a header, then the end",
            |t| {
                t.send_first(&message_bytes(m::GET_FEATURES, VERSION, 0, &[])[..6]);
                t.connection.as_ref().expect("open").shutdown_write();
            },
            Closed,
        ),
        (
            "a header, then the end",
            |t| {
                t.send_first(&message_bytes(m::SET_FEATURES, VERSION, 8, &[]));
                t.connection.as_ref().expect("open").shutdown_write();
            },
            Closed,
        ),
        (
            "a header and half a payload, then the end",
            |t| {
                t.send_first(&message_bytes(m::SET_FEATURES, VERSION, 8, &[0; 4]));
                t.connection.as_ref().expect("open").shutdown_write();
            },
            Closed,
        ),
        (
            "a payload of 4097 bytes",
            |t| t.send_first(&message_bytes(m::SET_MEM_TABLE, VERSION, 4097, &[0; 4097])),
            Closed,
        ),
        ("a payload of 4 GiB", |t| t.send_first(&message_bytes(m::SET_CONFIG, VERSION, u32::MAX, &[0; 64])), Closed),
        ("version 0", |t| t.send_first(&message_bytes(m::GET_FEATURES, 0, 0, &[])), Closed),
        ("version 2", |t| t.send_first(&message_bytes(m::GET_FEATURES, 2, 0, &[])), Closed),
        ("version 3", |t| t.send_first(&message_bytes(m::GET_FEATURES, 3, 0, &[])), Closed),
        ("the reply flag", |t| t.send_first(&message_bytes(m::GET_FEATURES, VERSION | REPLY, 0, &[])), Closed),
        ("reserved flags", |t| t.send_first(&message_bytes(m::GET_FEATURES, VERSION | 0x10, 0, &[])), Closed),
        ("message 0", |t| t.send_first(&message_bytes(0, VERSION, 0, &[])), Closed),
        ("message 1000", |t| t.send_first(&message_bytes(1000, VERSION, 8, &[0; 8])), Closed),
        ("the largest message", |t| t.send_first(&message_bytes(u32::MAX, VERSION, 0, &[])), Closed),
        ("a question with a payload", |t| t.send_first(&message_bytes(m::GET_FEATURES, VERSION, 8, &[0; 8])), Closed),
        ("a payload too short", |t| t.send_after_negotiation(m::SET_FEATURES, &[0; 4], &[]), Closed),
        ("a payload too long", |t| t.send_after_negotiation(m::SET_VRING_NUM, &[0; 12], &[]), Closed),
        ("no payload", |t| t.send_after_negotiation(m::SET_VRING_ADDR, &[], &[]), Closed),
        (
            "a descriptor where none belongs",
            |t| {
                let event = TestEventFd::new();
                t.send_after_negotiation(m::SET_FEATURES, &[0; 8], &[event.as_fd()]);
            },
            Closed,
        ),
        ("33 descriptors", |t| send_descriptors(t, m::SET_VRING_CALL, &[0; 8], 33), Closed),
        ("64 descriptors without a payload", |t| send_descriptors(t, m::SET_OWNER, &[], 64), Closed),
        // The payload of a dropped message must not be parsed as the next message.
        (
            "36 descriptors around a message",
            |t| send_descriptors(t, m::SET_CONFIG, &message_bytes(m::RESET_DEVICE, VERSION, 0, &[]), 36),
            Closed,
        ),
        (
            "descriptors in the middle of a payload",
            |t| {
                let connection = t.connect_negotiated();
                let event = TestEventFd::new();
                connection.send_bytes(&message_bytes(m::SET_VRING_CALL, VERSION | NEED_REPLY, 8, &[]), &[]);
                connection.send_bytes(&0_u64.to_ne_bytes(), &[event.as_fd(); 8]);
                t.connection = Some(connection);
            },
            Closed,
        ),
        (
            "SET_OWNER twice",
            |t| {
                let mut connection = t.connect_negotiated();
                connection.send_acked(m::SET_OWNER, &[], &[]);
                connection.send_acked(m::SET_OWNER, &[], &[]);
            },
            CheckedBySession,
        ),
        ("RESET_OWNER", |t| t.connect_negotiated().send_acked(m::RESET_OWNER, &[], &[]), CheckedBySession),
    ];
    run_sessions(rows);
}

#[test]
fn features_that_were_not_offered() {
    let rows: &[SessionCase] = &[
        (
            "reset of a queue",
            |t| {
                let offered = t.connect().request_u64(m::GET_FEATURES);
                t.send_after_negotiation(m::SET_FEATURES, &(offered | 1 << 40).to_ne_bytes(), &[]);
            },
            Refused,
        ),
        ("all virtio features", |t| t.send_after_negotiation(m::SET_FEATURES, &u64::MAX.to_ne_bytes(), &[]), Refused),
        (
            "all protocol features",
            |t| t.send_after_negotiation(m::SET_PROTOCOL_FEATURES, &u64::MAX.to_ne_bytes(), &[]),
            Refused,
        ),
        (
            "the protocol feature of shared objects",
            |t| {
                t.send_after_negotiation(m::SET_PROTOCOL_FEATURES, &(1_u64 << 3 | 1 << 18).to_ne_bytes(), &[]);
            },
            Refused,
        ),
        ("GET_QUEUE_NUM without MQ", |t| t.send_first(&message_bytes(m::GET_QUEUE_NUM, VERSION, 0, &[])), Closed),
        (
            "GET_CONFIG without CONFIG",
            |t| {
                let payload = config_payload(0, 8, 0, &[0; 8]);
                t.send_first(&message_bytes(m::GET_CONFIG, VERSION, payload.len() as u32, &payload));
            },
            Closed,
        ),
        (
            "RESET_DEVICE without its feature",
            |t| t.send_first(&message_bytes(m::RESET_DEVICE, VERSION, 0, &[])),
            Closed,
        ),
        (
            "GET_MAX_MEM_SLOTS without its feature",
            |t| t.send_first(&message_bytes(m::GET_MAX_MEM_SLOTS, VERSION, 0, &[])),
            Closed,
        ),
        (
            "SET_VRING_ENABLE without protocol features",
            |t| {
                let mut connection = t.connect();
                connection.negotiate(PROTOCOL_FEATURES);
                connection.send(m::SET_VRING_ENABLE, VERSION, &vring_state_payload(0, 1), &[]);
                t.connection = Some(connection);
            },
            Closed,
        ),
        (
            "SET_LOG_BASE",
            |t| {
                let log = one_page_region(0);
                t.send_after_negotiation(m::SET_LOG_BASE, &[0; 16], &[log.fd()]);
            },
            Closed,
        ),
        (
            "SET_LOG_FD",
            |t| {
                let event = TestEventFd::new();
                t.send_after_negotiation(m::SET_LOG_FD, &[], &[event.as_fd()]);
            },
            Closed,
        ),
        ("GET_INFLIGHT_FD", |t| t.send_after_negotiation(m::GET_INFLIGHT_FD, &[1; 20], &[]), Closed),
        (
            "SET_INFLIGHT_FD",
            |t| {
                let region = one_page_region(0);
                t.send_after_negotiation(m::SET_INFLIGHT_FD, &[1; 20], &[region.fd()]);
            },
            Closed,
        ),
        ("SET_STATUS", |t| t.send_after_negotiation(m::SET_STATUS, &15_u64.to_ne_bytes(), &[]), Closed),
        ("GET_STATUS", |t| t.send_after_negotiation(m::GET_STATUS, &[], &[]), Closed),
        ("POSTCOPY_ADVISE", |t| t.send_after_negotiation(m::POSTCOPY_ADVISE, &[], &[]), Closed),
        ("VRING_KICK in band", |t| t.send_after_negotiation(m::VRING_KICK, &vring_state_payload(0, 0), &[]), Closed),
        (
            "SET_DEVICE_STATE_FD without a descriptor",
            |t| {
                t.send_after_negotiation(m::SET_DEVICE_STATE_FD, &vring_state_payload(0, 0), &[]);
            },
            Closed,
        ),
        (
            "GPU_SET_SOCKET",
            |t| {
                let (_ours, theirs) = UnixStream::pair().expect("sockets");
                t.send_after_negotiation(m::GPU_SET_SOCKET, &[], &[theirs.as_fd()]);
            },
            Refused,
        ),
    ];
    run_sessions(rows);
}
