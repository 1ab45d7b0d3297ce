//! Packed rings of hostile guests: each is retired with its reason, and nothing else is affected.

use mqblk_tests::hostile::daemon::HostileDaemon;
use mqblk_tests::hostile::frontend::HostileFrontend;
use mqblk_tests::hostile::load::start_neighbour;
use mqblk_tests::hostile::memory::START;
use mqblk_tests::hostile::request::{header, request_type};
use mqblk_tests::hostile::ring::{INDIRECT, NEXT, RingAddresses, WRITE};
use mqblk_tests::hostile::{TIMEOUT, wait_for};

/// Entries of the ring.
const SIZE: u16 = 64;
/// Flags of an available and of a used descriptor in a new ring's first lap: its wrap counter is 1.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 7 | 1 << 15;

const HEADER: u64 = START + 0x4_0000;
const STATUS: u64 = START + 0x5_0000;
const DATA: u64 = START + 0x6_0000;
const TABLE: u64 = START + 0x9_0000;

/// A descriptor: address, length, buffer id, flags.
type Packed = (u64, u32, u16, u16);

struct Guest(HostileFrontend);

impl Guest {
    fn start(daemon: &HostileDaemon) -> Guest {
        let mut frontend = HostileFrontend::connect_packed(&daemon.socket("bad"));
        frontend.add_queue(RingAddresses::pages(START), SIZE);
        let guest = Guest(frontend);
        guest.0.memory.write(HEADER, &header(request_type::IN, 0));
        guest.0.memory.write(STATUS, &[0xff]);
        guest
    }

    fn put(&self, at: u64, (address, len, id, flags): Packed) {
        let bytes = [&address.to_le_bytes()[..], &len.to_le_bytes(), &id.to_le_bytes(), &flags.to_le_bytes()].concat();
        self.0.memory.write(at, &bytes);
    }

    /// Writes descriptors of the ring from slot `first` on, the first one last, and kicks.
    fn offer(&mut self, first: u16, descriptors: &[Packed]) {
        for (at, descriptor) in descriptors.iter().enumerate().rev() {
            self.put(START + 16 * ((u64::from(first) + at as u64) % u64::from(SIZE)), *descriptor);
        }
        self.0.queues[0].kick.add(1);
    }

    /// Returns length, id and flags of a slot.
    fn slot(&self, slot: u16) -> (u32, u16, u16) {
        let at = START + 16 * u64::from(slot) + 8;
        let bytes = self.0.memory.read(at, 8);
        let len = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        (len, u16::from_le_bytes([bytes[4], bytes[5]]), u16::from_le_bytes([bytes[6], bytes[7]]))
    }

    /// Waits for the used descriptor in a slot. Returns its id and length.
    fn wait_used(&self, slot: u16) -> (u16, u32) {
        let used = || {
            let (len, id, flags) = self.slot(slot);
            (flags & 0x8080 == USED).then_some((id, len))
        };
        wait_for("a used descriptor", used)
    }
}

/// A read of the first sector with this id, as a chain of three.
fn read(id: u16) -> [Packed; 3] {
    [(HEADER, 16, id, AVAIL | NEXT), (DATA, 512, id, AVAIL | NEXT | WRITE), (STATUS, 1, id, AVAIL | WRITE)]
}

fn with_daemon(test: impl FnOnce(&HostileDaemon)) {
    let mut daemon = HostileDaemon::start(
        1,
        &[("bad", "storage=ram,size=1M,queues=2,queue-size=256"), ("good", "storage=ram,size=1M,queues=1")],
    );
    let neighbour = start_neighbour(daemon.socket("good"), 1, 1);
    test(&daemon);
    daemon.assert_alive("packed rings");
    neighbour.assert_progress("packed rings");
    neighbour.finish();
    daemon.stop();
}

#[test]
fn broken_rings_are_retired() {
    let whole = |flags| vec![(DATA, 512, 0, AVAIL | flags); SIZE.into()];
    let with_last = |mut chain: Vec<Packed>, last: Packed| {
        chain.push(last);
        chain
    };
    let cases: Vec<(&str, Vec<Packed>, Vec<Packed>, &str)> = vec![
        ("a chain without an end", whole(NEXT), vec![], "continues in descriptors that are in flight"),
        ("an id of the size", vec![(HEADER, 16, SIZE, AVAIL)], vec![], "not below the ring's size"),
        ("the largest id", vec![(HEADER, 16, 0xffff, AVAIL)], vec![], "not below the ring's size"),
        (
            "a bad id at the end of a chain",
            with_last(read(0)[..2].to_vec(), (STATUS, 1, 999, AVAIL | WRITE)),
            vec![],
            "not below the ring's size",
        ),
        (
            "NEXT and INDIRECT",
            vec![(TABLE, 16, 0, AVAIL | NEXT | INDIRECT), (TABLE, 16, 0, AVAIL)],
            vec![],
            "part of a chain of several",
        ),
        (
            "a table at the end of a chain",
            with_last(read(0)[..2].to_vec(), (TABLE, 16, 0, AVAIL | INDIRECT)),
            vec![],
            "part of a chain of several",
        ),
        (
            "readable after writable",
            vec![read(0)[1], (HEADER, 16, 0, AVAIL)],
            vec![],
            "a readable descriptor follows a writable one",
        ),
        ("an empty table", vec![(TABLE, 0, 0, AVAIL | INDIRECT)], vec![], "not a multiple of 16"),
        ("a table of 15 bytes", vec![(TABLE, 15, 0, AVAIL | INDIRECT)], vec![], "not a multiple of 16"),
        ("a huge table", vec![(TABLE, 0xffff_fff0, 0, AVAIL | INDIRECT)], vec![], "too long"),
        (
            "a table in a table",
            vec![(TABLE, 16, 0, AVAIL | INDIRECT)],
            vec![(TABLE, 16, 0, INDIRECT)],
            "names another one",
        ),
    ];
    with_daemon(|daemon| {
        for (name, ring, table, why) in &cases {
            let mut guest = Guest::start(daemon);
            for (at, entry) in (0..).zip(table) {
                guest.put(TABLE + 16 * at, *entry);
            }
            guest.offer(0, ring);
            assert!(guest.0.queues[0].wait_retired(TIMEOUT.time()), "{name}: the queue was not retired");
            let (_, _, flags) = guest.slot(0);
            assert_ne!(flags & 0x8080, USED, "{name}: it was answered");
            let reason = || daemon.warnings("bad").into_iter().find(|line| line.contains(why));
            wait_for(name, reason);
        }
    });
}

#[test]
fn an_id_that_is_in_flight_retires_its_queue() {
    with_daemon(|daemon| {
        let mut guest = Guest::start(daemon);
        // Both become available at once, so that the first cannot be complete.
        let both = [&read(5)[..], &read(5)[..]].concat();
        guest.offer(0, &both);
        assert!(guest.0.queues[0].wait_retired(TIMEOUT.time()), "the queue was not retired");
        wait_for("the reason", || {
            daemon.warnings("bad").into_iter().find(|line| line.contains("made available again before it was used"))
        });
    });
}

/// Unusual but legal rings are served, also where they wrap, and with the guest's later changes.
#[test]
fn unusual_rings_are_served() {
    with_daemon(|daemon| {
        let mut guest = Guest::start(daemon);
        let mut next = 0_u16;
        // Ids in any order; descriptors that are empty; ids in all but the last descriptor are ignored.
        for id in [63, 0, 17, 63] {
            let mut chain = read(id);
            (chain[0].2, chain[1].2) = (0xffff, 999);
            guest.offer(next, &chain);
            assert_eq!(guest.wait_used(next), (id, 513));
            next += 3;
        }
        // A table whose entries have NEXT and ids of any value.
        for (at, (address, len, _, flags)) in (0..).zip(read(0)) {
            guest.put(TABLE + 16 * at, (address, len, 0xaaaa, flags ^ NEXT));
        }
        guest.offer(next, &[(TABLE, 48, 9, AVAIL | INDIRECT | WRITE)]);
        assert_eq!(guest.wait_used(next), (9, 513));
        next += 1;
        // A request without a byte for the status is returned.
        guest.offer(next, &[(HEADER, 16, 1, AVAIL)]);
        assert_eq!(guest.wait_used(next), (1, 0));
        next += 1;
        // Unmapped memory is an error of this request only.
        guest.offer(
            next,
            &[(HEADER, 16, 2, AVAIL | NEXT), (0xdead_0000_0000, 512, 2, AVAIL | NEXT | WRITE), read(2)[2]],
        );
        assert_eq!((guest.wait_used(next), guest.0.memory.read(STATUS, 1)[0]), ((2, 1), 1));
        next += 3;
        // An unmapped table.
        guest.offer(next, &[(0xdead_0000_0000, 48, 3, AVAIL | INDIRECT)]);
        assert_eq!(guest.wait_used(next), (3, 0));
        next += 1;
        // A position in a stopped ring, in the first lap: available and used are the same.
        let reply = guest.0.connection.request(
            mqblk_tests::hostile::socket::message::GET_VRING_BASE,
            &mqblk_tests::hostile::socket::vring_state_payload(0, 0),
        );
        let position = u32::from_ne_bytes([reply[4], reply[5], reply[6], reply[7]]);
        let next = u32::from(next) | 0x8000;
        assert_eq!(position, next | next << 16);
        assert!(!guest.0.queues[0].wait_retired(std::time::Duration::ZERO));
    });
}

/// A base outside the ring is refused when it is set.
#[test]
fn a_base_outside_the_ring_is_refused() {
    use mqblk_tests::hostile::socket::{message as m, vring_state_payload};
    with_daemon(|daemon| {
        for base in [u32::from(SIZE), 0x8000 | 100, u32::from(SIZE) << 16 | 1, 0xffff_ffff] {
            let mut frontend = HostileFrontend::connect_packed(&daemon.socket("bad"));
            frontend.connection.send_acked(m::SET_VRING_NUM, &vring_state_payload(0, SIZE.into()), &[]);
            let refused = frontend.connection.try_send_acked(m::SET_VRING_BASE, &vring_state_payload(0, base), &[]);
            assert_ne!(refused, Some(0), "base {base:#x}");
        }
        wait_for("the reason", || {
            daemon.warnings("bad").into_iter().find(|line| line.contains("positions in the packed ring"))
        });
    });
}
