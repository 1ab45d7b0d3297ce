//! Invalid device states and transfers: each is refused with a reason, the session continues, and nothing is leaked.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use mqblk_test_bounds::Bound;
use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::session::SessionOutcome::{CheckedBySession, Closed, Declined};
use mqblk_tests::hostile::session::{SessionCase, SessionFixture, completes_read, run_sessions};
use mqblk_tests::hostile::socket::{VERSION, VhostUserSocket, message as m, vring_state_payload};
use mqblk_tests::hostile::wait_for;
use mqblk_tests::migrating_guest::{
    LOAD, REPLY_ACCEPTED, REPLY_REJECTED, SAVE, check_device_state, load_device_state, open_dev_zero, pipe,
    save_device_state, set_device_state_fd,
};
use rustix::fd::AsFd;

/// A document that the disk of these tests accepts.
const GOOD: &str = concat!(
    r#"{"format":"mqblk-device-state","version":1,"device":"virtio-blk","#,
    r#""state":{"writeback":false,"block-bytes":512,"size-bytes":1048576,"read-only":false}}"#
);

/// Transfers this state, which the daemon refuses.
fn loads(talk: &mut SessionFixture, text: &[u8]) {
    let mut connection = talk.connect_negotiated();
    let (reader, mut writer) = pipe();
    assert_eq!(set_device_state_fd(&mut connection, LOAD, reader.as_fd()), REPLY_ACCEPTED);
    drop(reader);
    // The daemon may have closed the pipe.
    let _ = writer.write_all(text);
    drop(writer);
    connection.send(m::CHECK_DEVICE_STATE, VERSION, &[], &[]);
    talk.connection = Some(connection);
}

/// Sends a descriptor that the daemon does not accept.
fn gives(talk: &mut SessionFixture, direction: u32, file: impl AsFd) {
    talk.send_after_negotiation(m::SET_DEVICE_STATE_FD, &vring_state_payload(direction, 0), &[file.as_fd()]);
}

#[test]
fn documents_that_make_no_sense() {
    let rows: &[SessionCase] = &[
        ("nothing", |t| loads(t, b""), Declined),
        ("garbage", |t| loads(t, b"\xff\xfe{}"), Declined),
        ("a part", |t| loads(t, &GOOD.as_bytes()[..GOOD.len() - 3]), Declined),
        ("more behind it", |t| loads(t, format!("{GOOD} x").as_bytes()), Declined),
        ("zeroes without an end", |t| loads(t, &vec![0; 1 << 30]), Declined),
        ("depths", |t| loads(t, "[".repeat(1 << 20).as_bytes()), Declined),
        ("depths within", |t| loads(t, GOOD.replace("false", &"[".repeat(1 << 19)).as_bytes()), Declined),
        ("a million numbers", |t| loads(t, format!("[{}0]", "0,".repeat(500_000)).as_bytes()), Declined),
        ("another format", |t| loads(t, GOOD.replace("mqblk-device-state", "mqblk-state").as_bytes()), Declined),
        ("another version", |t| loads(t, GOOD.replace("\"version\":1", "\"version\":2").as_bytes()), Declined),
        ("another device", |t| loads(t, GOOD.replace("virtio-blk", "virtio-scsi").as_bytes()), Declined),
        (
            "a field too many",
            |t| loads(t, GOOD.replace("{\"writeback\"", "{\"x\":0,\"writeback\"").as_bytes()),
            Declined,
        ),
        ("a field too few", |t| loads(t, GOOD.replace("\"writeback\":false,", "").as_bytes()), Declined),
        ("a larger disk", |t| loads(t, GOOD.replace("1048576", "18446744073709551615").as_bytes()), Declined),
        ("a number of many digits", |t| loads(t, GOOD.replace("1048576", &"9".repeat(100_000)).as_bytes()), Declined),
        ("a host's part", |t| loads(t, GOOD.replace("\"state\"", "\"host\":{},\"state\"").as_bytes()), Declined),
    ];
    run_sessions(rows);
}

#[test]
fn transfers_that_make_no_sense() {
    let rows: &[SessionCase] = &[
        ("the end that cannot be written", |t| gives(t, SAVE, pipe().0), Declined),
        ("the end that cannot be read", |t| gives(t, LOAD, pipe().1), Declined),
        ("no pipe", |t| gives(t, LOAD, open_dev_zero()), Declined),
        ("a file", |t| gives(t, SAVE, File::create(t.folder.join("state")).unwrap()), Declined),
        ("a third direction", |t| gives(t, 2, pipe().1), Closed),
        (
            "a phase that there is not",
            |t| t.send_after_negotiation(m::SET_DEVICE_STATE_FD, &vring_state_payload(SAVE, 1), &[pipe().1.as_fd()]),
            Closed,
        ),
        (
            "a check without a transfer",
            |t| {
                let connection = t.connect_negotiated();
                connection.send(m::CHECK_DEVICE_STATE, VERSION, &[], &[]);
                t.connection = Some(connection);
            },
            Declined,
        ),
        (
            "a check in pieces",
            |t| {
                let mut connection = t.connect_negotiated();
                let (reader, writer) = pipe();
                assert_eq!(set_device_state_fd(&mut connection, LOAD, reader.as_fd()), REPLY_ACCEPTED);
                drop((reader, writer));
                let frame = mqblk_tests::hostile::socket::message_bytes(m::CHECK_DEVICE_STATE, VERSION, 0, &[]);
                connection.send_bytes(&frame[..3], &[]);
                std::thread::sleep(Duration::from_millis(50));
                connection.send_bytes(&frame[3..], &[]);
                t.connection = Some(connection);
            },
            Declined,
        ),
        (
            "a feature that was not agreed",
            |t| {
                let mut connection = t.connect();
                connection.send(m::SET_OWNER, VERSION, &[], &[]);
                let protocol = connection.request_u64(m::GET_PROTOCOL_FEATURES) & !(1 << 19);
                connection.send(m::SET_PROTOCOL_FEATURES, VERSION, &protocol.to_ne_bytes(), &[]);
                connection.send(m::SET_DEVICE_STATE_FD, VERSION, &vring_state_payload(SAVE, 0), &[pipe().1.as_fd()]);
                t.connection = Some(connection);
            },
            Declined,
        ),
        (
            "a queue that runs",
            |t| {
                let mut front = HostileFrontend::start(&t.socket, 0, 1);
                assert!(completes_read(&mut front, 0));
                let (_reader, writer) = pipe();
                t.send_after_memory(front, m::SET_DEVICE_STATE_FD, &vring_state_payload(SAVE, 0), &[writer.as_fd()]);
            },
            Declined,
        ),
        (
            "a queue that starts before the state is there",
            |t| {
                let mut front = t.connect_frontend();
                let (reader, mut writer) = pipe();
                assert_eq!(set_device_state_fd(&mut front.connection, LOAD, reader.as_fd()), REPLY_ACCEPTED);
                writer.write_all(GOOD.as_bytes()).unwrap();
                drop(writer);
                front.add_queue(mqblk_tests::migrating_guest::ring_addresses(0), 64);
                assert!(completes_read(&mut front, 0));
                front.connection.send(m::CHECK_DEVICE_STATE, VERSION, &[], &[]);
                t.connection = Some(front.connection);
            },
            Declined,
        ),
        (
            "transfers that nobody ends, one after the other",
            |t| {
                let mut connection = t.connect_negotiated();
                let mut ends = Vec::new();
                for direction in [LOAD, SAVE, LOAD, LOAD] {
                    let (reader, writer) = pipe();
                    let given = if direction == LOAD { &reader } else { &writer };
                    assert_eq!(set_device_state_fd(&mut connection, direction, given.as_fd()), REPLY_ACCEPTED);
                    ends.push((reader, writer));
                }
                // The connection ends in mid-transfer.
            },
            CheckedBySession,
        ),
        (
            "a state that is loaded twice, and one that is saved in between",
            |t| {
                let mut connection = t.connect_negotiated();
                for _ in 0..2 {
                    assert!(load_device_state(&mut connection, GOOD.as_bytes()));
                    assert_eq!(save_device_state(&mut connection), GOOD);
                    assert_eq!(
                        connection
                            .request(m::GET_CONFIG, &mqblk_tests::hostile::socket::config_payload(32, 1, 0, &[0]))
                            .last(),
                        Some(&0)
                    );
                }
            },
            CheckedBySession,
        ),
        (
            "a socket in place of a pipe",
            |t| {
                let mut connection = t.connect_negotiated();
                let (mut ours, theirs) = UnixStream::pair().unwrap();
                assert_eq!(set_device_state_fd(&mut connection, SAVE, OwnedFd::from(theirs).as_fd()), REPLY_ACCEPTED);
                let mut text = String::new();
                ours.read_to_string(&mut text).unwrap();
                assert!(check_device_state(&mut connection) && text.contains("\"writeback\":true"), "{text}");
            },
            CheckedBySession,
        ),
    ];
    run_sessions(rows);
}

/// The peer does not write, or read, to the end. Only the frontend that checks the state waits, at most as long as a
/// drain may last.
#[test]
fn transfers_without_an_end() {
    let disks = [("bad", "storage=ram,size=1M,queues=1"), ("good", "storage=ram,size=1M,queues=1")];
    // Longer than another frontend's read takes.
    let drain = Bound::seconds(1).time().as_secs().max(1);
    let daemon = HostileDaemon::start_with(1, &disks, &["--drain-timeout-s", &drain.to_string()]);
    let base = daemon.stable_resources();
    let mut connection = VhostUserSocket::connect(&daemon.socket("bad"));
    connection.negotiate(0);
    let (reader, writer) = pipe();
    assert_eq!(set_device_state_fd(&mut connection, LOAD, reader.as_fd()), REPLY_ACCEPTED);
    connection.send(m::CHECK_DEVICE_STATE, VERSION, &[], &[]);
    let begin = Instant::now();
    let mut good = HostileFrontend::start(&daemon.socket("good"), 0, 1);
    assert!(completes_read(&mut good, 0) && !connection.is_readable());
    drop(good);
    assert!(
        matches!(connection.receive(), mqblk_tests::hostile::socket::Received::Reply { payload, .. } if payload[0] == 1)
    );
    assert!(begin.elapsed() >= Duration::from_millis(900), "it waits for the whole drain time-out");
    let warning = wait_for("the daemon's warning", || daemon.warnings("bad").pop());
    assert!(warning.contains(&format!("without an end within {drain} s (drain-timeout-s)")), "{warning}");
    // The session continues.
    assert_eq!(daemon.thread_count("state-"), 0);
    assert!(load_device_state(&mut connection, GOOD.as_bytes()));
    // One transfer at a time, regardless of the number begun; none after the connection has ended.
    let ends: Vec<_> = [LOAD, SAVE, LOAD, LOAD]
        .map(|direction| {
            let (reader, writer) = pipe();
            let given = if direction == LOAD { &reader } else { &writer };
            assert_eq!(set_device_state_fd(&mut connection, direction, given.as_fd()), REPLY_ACCEPTED);
            assert!(daemon.thread_count("state-") <= 1);
            (reader, writer)
        })
        .into();
    // A thread gets its name shortly after its start.
    wait_for("the last transfer's thread", || (daemon.thread_count("state-") == 1).then_some(()));
    drop((connection, reader, writer));
    daemon.wait_for_session_end("bad");
    daemon.wait_for_resources(base, "transfers without an end");
    assert_eq!(daemon.thread_count("state-"), 0);
    drop(ends);
    // A daemon that stops does not wait for a transfer.
    let mut connection = VhostUserSocket::connect(&daemon.socket("bad"));
    connection.negotiate(0);
    let (reader, _writer) = pipe();
    assert_eq!(set_device_state_fd(&mut connection, LOAD, reader.as_fd()), REPLY_ACCEPTED);
    daemon.stop();
}

/// Invalid states of a controller with its LUNs.
#[test]
fn states_of_controllers_that_make_no_sense() {
    let daemon = HostileDaemon::start(1, &[("disk", "interface=virtio-scsi,storage=ram,size=1M,queues=1")]);
    let mut connection = VhostUserSocket::connect(&daemon.socket("disk"));
    connection.negotiate(0);
    let good = save_device_state(&mut connection);
    assert!(load_device_state(&mut connection, good.as_bytes()));
    let cut = |from: &str| good.replace(from, "");
    for (count, (text, want)) in [
        (good[..good.len() - 1].to_owned(), "EOF"),
        (good.replace("\"sense-size\":96", "\"sense-size\":300"), "state.sense_size: found 300, expected at most 252"),
        (good.replace("\"target\":0,\"lun\":0,\"id\"", "\"target\":0,\"lun\":1,\"id\""), "host.luns"),
        (good.replace("\"target\":0", "\"target\":256"), "target: invalid value: integer `256`, expected u8"),
        (good.replace("\"attentions\":[", "\"attentions\":[\"none\","), "attentions[0]: unknown variant `none`"),
        (
            good.replace("\"reservations\":{}", "\"reservations\":{\"aptpl\":true}"),
            "reservations.aptpl: found true, expected false",
        ),
        (
            good.replace("\"reservations\":{}", "\"reservations\":{\"reserved\":{\"initiator\":\"x\",\"port\":1}}"),
            "reservations.reserved: found x port 1",
        ),
        (
            good.replace("\"id\":\"disk:0:0\"", "\"id\":7"),
            "host.luns[0].id: invalid type: integer `7`, expected a string",
        ),
        (cut("\"name\":\""), "key must be a string"),
        (good.replace("\"host\"", "\"guest\""), "unknown field `guest`"),
    ]
    .into_iter()
    .enumerate()
    {
        assert_ne!(text, good, "{want}");
        assert!(!load_device_state(&mut connection, text.as_bytes()), "{want}");
        let warning = wait_for("the daemon's warning", || daemon.warnings("disk").into_iter().nth(count));
        assert!(warning.contains(want), "{warning}");
        assert_eq!(save_device_state(&mut connection), good, "{want}: nothing has changed");
    }
    assert_eq!(set_device_state_fd(&mut connection, LOAD, open_dev_zero().as_fd()), REPLY_REJECTED);
    drop(connection);
    daemon.stop();
}
