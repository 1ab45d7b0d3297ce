//! A server with a disk in memory in this process, a frontend, and the model of both.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use mqblk_core::DiskSlot;
use mqblk_engine::{Engine, EngineOptions, FixedBufferUse, PlugOptions, PollPolicy, QueueDisk, UringOptions};
use mqblk_vhost_user_server::{Server, ServerOptions, SharePolicy, SocketAccess};
use mqblk_virtio_blk::{BlkOptions, VirtioBlk};

use crate::memory_disk::open_memory_disk;
use crate::vhost_user_messages::{self as messages, AnyMessage};
use crate::vhost_user_session::files::InflightFile;
use crate::vhost_user_session::guest::{BlkChoice, Guest, QUEUES, RING, RingPlaces, SECTOR, SECTORS};
use crate::vhost_user_session::{
    DeviceModel, FEATURES, LOG_ALL, Outcome, RING_PACKED, Session, is_long_table, protocol,
};
use crate::vhost_user_wire::{REPLY, Reply, VERSION, Wire, longs, message as m, wait_until};

/// One worker serves all inputs.
static ENGINE: LazyLock<Arc<Engine>> = LazyLock::new(|| {
    let options = EngineOptions { workers: 1, pin: vec![], context: UringOptions::default() };
    Arc::new(Engine::start(&options).expect("the host has io_uring"))
});

/// The folder of the sockets.
static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

fn start_server() -> (Server, PathBuf) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let disk = open_memory_disk(SECTORS as usize * SECTOR, SECTOR, false);
    let options = BlkOptions { serial: "fuzzed".to_owned(), queues: QUEUES as u16, queue_size: RING, writeback: true };
    let device = Arc::new(VirtioBlk::new(disk.geometry(), disk.limits(), options));
    let socket = FOLDER.path().join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    let options = ServerOptions {
        name: "fuzzed".to_owned(),
        socket: socket.clone(),
        socket_access: SocketAccess::with_mode(0o600),
        queue_map: vec![],
        policy: PollPolicy::Off.into(),
        sharing: SharePolicy::default(),
        fixed_buffers: FixedBufferUse::Off,
        drain_timeout: Duration::from_secs(10),
        disks: vec![QueueDisk { slot: DiskSlot::FIRST, disk, plug: PlugOptions::default(), health: Arc::default() }],
        engine: Arc::clone(&ENGINE),
        host_state: None,
        standby: false,
        guests: None,
    };
    (Server::start(device, options).expect("the socket can be made"), socket)
}

/// Returns the descriptors of this process, and the mappings of memory shared by frontends.
fn resources() -> (usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    (fds, maps.lines().filter(|line| line.contains("memfd:mqblk-")).count())
}

/// The server, its frontend, and the model.
pub(crate) struct Machine {
    server: Server,
    socket: PathBuf,
    resources: (usize, usize),
    pub(crate) guest: Guest,
    device: DeviceModel,
    pub(crate) session: Session,
    wire: Option<Wire>,
    /// A second connection, with an unanswered GET_FEATURES.
    second: Option<Wire>,
    /// The in-flight region that the frontend keeps.
    pub(crate) region: Option<Rc<InflightFile>>,
    /// The server has answered since the last message.
    synced: bool,
}

impl Machine {
    pub(crate) fn new() -> Machine {
        let guest = Guest::new();
        LazyLock::force(&ENGINE);
        let (server, socket) = start_server();
        Machine {
            resources: resources(),
            server,
            socket,
            guest,
            device: DeviceModel::NEW,
            session: Session::default(),
            wire: None,
            second: None,
            region: None,
            synced: true,
        }
    }

    pub(crate) fn writeback(&self) -> bool {
        self.device.writeback
    }

    /// Returns the connection. A new one is served, because the server has ended the one before.
    fn wire(&mut self) -> &mut Wire {
        if self.wire.is_none() {
            self.wire = Some(Wire::connect(&self.socket));
            self.synced = false;
            self.sync();
        }
        self.wire.as_mut().expect("just made")
    }

    /// Waits until the server has handled all messages.
    pub(crate) fn sync(&mut self) {
        self.wire();
        if !self.synced {
            self.send(&messages::plain(m::GET_PROTOCOL_FEATURES), None, 0);
        }
        if let Some(region) = &self.session.region {
            region.check_config();
        }
    }

    /// Opens a second connection, and sends a query on it.
    pub(crate) fn connect_second(&mut self) {
        self.sync();
        if self.second.is_none() {
            let second = Wire::connect(&self.socket);
            assert!(second.send(&messages::plain(m::GET_FEATURES).bytes(), &[]), "the server has closed it");
            self.second = Some(second);
        }
        self.synced = false;
        self.sync();
        assert!(!self.second.as_ref().is_some_and(Wire::is_readable), "a second frontend is served beside the first");
    }

    pub(crate) fn drop_second(&mut self) {
        self.second = None;
    }

    /// Sends a part of a message, then closes the connection.
    pub(crate) fn break_off(&mut self, message: &AnyMessage, part: usize) {
        self.sync();
        let fds: Vec<_> = message.fds.iter().map(|fd| fd.borrow(&self.guest)).collect();
        if let Some(wire) = &self.wire {
            wire.send(&message.bytes()[..part], &fds);
        }
        self.close();
    }

    /// Closes the connection.
    pub(crate) fn close(&mut self) {
        self.wire = None;
        self.ended();
    }

    /// The connection has ended: the second one is served.
    fn ended(&mut self) {
        (self.session, self.device, self.synced) = (Session::default(), DeviceModel::NEW, true);
        if let Some(second) = self.second.take() {
            self.wire = Some(second);
            let asked = messages::plain(m::GET_FEATURES);
            let outcome = self.session.handle(&asked, None, (&self.guest, &mut self.device));
            let Outcome::Reply(expected) = outcome else { panic!("GET_FEATURES is always answered") };
            assert_eq!(self.reply(m::GET_FEATURES).map(|reply| reply.payload), Some(expected), "the second frontend");
        }
    }

    fn reply(&mut self, request: u32) -> Option<Reply> {
        let reply = self.wire.as_mut()?.receive()?;
        assert_eq!((reply.request, reply.flags), (request, VERSION | REPLY), "the header of a reply");
        Some(reply)
    }

    /// Sends a message, in two parts if `split` is not 0, and checks all its effects. `load`: the content of a LOAD's
    /// document. Does not send a message of uncertain outcome.
    pub(crate) fn send(&mut self, message: &AnyMessage, load: Option<bool>, split: usize) {
        self.wire();
        let before = (self.session.clone(), self.device);
        let outcome = self.session.handle(message, load, (&self.guest, &mut self.device));
        let refused = matches!(outcome, Outcome::Refused | Outcome::Malformed | Outcome::Closed);
        let starts = refused || self.session.start_all((&self.guest, &mut self.device)).is_ok();
        if !refused && starts && !(self.is_certain() && self.moved_idle(&before.0)) {
            (self.session, self.device) = before;
            return;
        }
        let fds: Vec<_> = message.fds.iter().map(|fd| fd.borrow(&self.guest)).collect();
        let (bytes, wire) = (message.bytes(), self.wire.as_ref().expect("connected"));
        // It is served if the whole message is there when its first bytes are.
        let split = if is_long_table(message) { 0 } else { split.min(bytes.len()) };
        let (first, second) = if split == 0 { (&bytes[..], &[][..]) } else { bytes.split_at(split) };
        // A server that refuses the first part may be gone before the second.
        let sent = wire.send(first, &fds) && wire.send(second, &[]);
        assert!(sent || refused, "{message:?}: the server has closed the connection before");
        drop(fds);
        let acknowledged = self.session.acknowledges(message.flags);
        self.check_outcome(message, &outcome, acknowledged);
        if refused || !starts {
            let wire = self.wire.take().expect("connected");
            wire.expect_closed(&format!("{message:?}, {outcome:?}"));
            self.ended();
        } else {
            self.settle();
        }
    }

    /// Sends SET_DEVICE_STATE_FD for a save. Returns true if the server writes a document.
    pub(crate) fn begin_save(&mut self, message: &AnyMessage) -> bool {
        self.send(message, None, 0);
        self.session.is_saving()
    }

    fn check_outcome(&mut self, message: &AnyMessage, outcome: &Outcome, acknowledged: bool) {
        let what = || format!("{message:?}, {outcome:?}");
        match outcome {
            Outcome::Done if !acknowledged => self.synced = false,
            Outcome::Done => {
                let reply = self.reply(message.request).unwrap_or_else(|| panic!("{}: closed", what()));
                assert_eq!(reply.payload, longs(&[0]), "{}: the acknowledgement", what());
                self.synced = true;
            }
            Outcome::Reply(expected) => {
                let reply = self.reply(message.request).unwrap_or_else(|| panic!("{}: closed", what()));
                assert_eq!(reply.payload, *expected, "{}: the reply", what());
                assert!(reply.fd.is_none(), "{}: a descriptor with the reply", what());
                self.synced = true;
            }
            Outcome::NewRegion(queues, size) => {
                let reply = self.reply(message.request).unwrap_or_else(|| panic!("{}: closed", what()));
                self.take_region(reply, *queues, *size);
                self.synced = true;
            }
            Outcome::Refused if acknowledged => {
                let reply = self.reply(message.request).unwrap_or_else(|| panic!("{}: closed", what()));
                assert_ne!(reply.payload, longs(&[0]), "{}: the acknowledgement", what());
            }
            Outcome::Malformed => {
                if let Some(reply) = self.reply(message.request) {
                    assert!(acknowledged, "{}: an acknowledgement that nobody has asked for", what());
                    assert_ne!(reply.payload, longs(&[0]), "{}: the acknowledgement", what());
                }
            }
            Outcome::Refused | Outcome::Closed => {}
        }
    }

    fn take_region(&mut self, reply: Reply, queues: u16, size: u16) {
        let number = |at: usize| u64::from_ne_bytes(reply.payload[at..at + 8].try_into().expect("8 bytes"));
        let short = |at: usize| u16::from_ne_bytes([reply.payload[at], reply.payload[at + 1]]);
        assert_eq!(reply.payload.len(), 24, "the reply to GET_INFLIGHT_FD");
        assert_eq!(short(16), queues, "the queues of the new region");
        assert!(short(18) >= size, "the new region is for {} entries, expected {size}", short(18));
        let fd = reply.fd.expect("a descriptor with a new region");
        self.region = Some(Rc::new(InflightFile::received(fd, [number(0), number(8)], queues)));
    }

    /// Returns false if a queue's behaviour is uncertain, for instance because it may serve entries that no driver has
    /// written.
    fn is_certain(&mut self) -> bool {
        let guest = &self.guest;
        self.session.rings.iter_mut().enumerate().all(|(queue, ring)| {
            let Some(attached) = &ring.attached else { return true };
            if !guest.may_be_ring(&attached.places, attached.size, queue) {
                return false;
            }
            let Some(attached) = ring.serving() else { return true };
            let waiting = guest.indices(&attached.places).0.wrapping_sub(attached.next_avail);
            if waiting > attached.size {
                return attached.replays.is_empty();
            }
            guest.heads(attached, waiting).is_some()
        })
    }

    /// Returns false if a queue's ring has moved and has requests there: these are served at the next kick, or sooner.
    fn moved_idle(&self, before: &Session) -> bool {
        self.session.rings.iter().zip(&before.rings).all(|(ring, before)| match (&ring.attached, &before.attached) {
            (Some(now), Some(before)) if now.places != before.places => {
                self.guest.indices(&now.places).0 == now.next_avail
            }
            _ => true,
        })
    }

    /// Waits for the effects of the queues, and checks them.
    fn settle(&mut self) {
        if self.session.started && self.session.rings.iter().any(|ring| ring.attached.is_some()) {
            let tracked = self.session.region.is_some();
            let server = &self.server;
            wait_until("a started queue", || server.has_inflight_region() == Some(tracked));
        }
        (0..QUEUES).for_each(|queue| self.serve(queue));
    }

    fn serve(&mut self, queue: usize) {
        let Machine { guest, session, .. } = self;
        let (log, log_at) = (session.active_log().cloned(), session.rings[queue].log);
        let Some(attached) = session.rings[queue].attached.as_mut() else { return };
        guest.attached(&attached.places, attached.size);
        if let (Some(log), Some(at)) = (&log, log_at) {
            // The device's own end of event suppression.
            log.note(at, 6 + 8 * u64::from(attached.size), false);
        }
        let Some(attached) = session.rings[queue].serving() else { return };
        let waiting = guest.indices(&attached.places).0.wrapping_sub(attached.next_avail);
        if waiting > attached.size {
            attached.broken = true;
            if let Some(err) = &attached.err {
                wait_until("the signal for a broken ring", || err.take() > 0);
            }
            return;
        }
        let heads = guest.heads(attached, waiting).expect("certain");
        if heads.is_empty() {
            return;
        }
        let (places, size, old) = (attached.places, attached.size, attached.next_used);
        let new = old.wrapping_add(heads.len() as u16);
        let called = guest.wants_call(&places, size, attached.event_idx, old, new);
        let mut expected = vec![];
        for head in heads {
            let executed = guest.execute(&places, size, head, &session.table);
            let written = executed.dirty.iter().map(|range| (*range, true));
            let written = written.chain(executed.maybe_dirty.iter().map(|range| (*range, false)));
            for ((address, len), required) in written {
                log.iter().for_each(|log| log.note(address, len, required));
            }
            expected.push((head, executed));
        }
        guest.take_used(&places, size, old, expected);
        if let (Some(log), Some(at)) = (&log, log_at) {
            log.note(at, 4, true);
            (0..new.wrapping_sub(old))
                .map(|element| at + 4 + 8 * u64::from(old.wrapping_add(element) % size))
                .for_each(|element| log.note(element, 8, true));
        }
        if let Some(log) = &log {
            log.check();
        }
        if let Some(call) = attached.call.as_ref().filter(|_| called) {
            wait_until("the call", || call.take() > 0);
        }
        attached.next_used = new;
        attached.next_avail = attached.next_avail.wrapping_add(waiting);
        attached.replays.clear();
        if let (Some(region), Some(table)) = (&session.region, attached.table) {
            region.wait_published(table, size, new);
        }
        guest.drivers[queue].completed = guest.drivers[queue].avail;
    }

    /// Makes requests available and kicks. They are served if, and only if, the queue is.
    pub(crate) fn publish(&mut self, queue: usize, requests: &[BlkChoice]) {
        self.sync();
        let driver = self.guest.drivers[queue];
        let own = RingPlaces::of_queue(queue, driver.layout);
        if let Some(attached) = &self.session.rings[queue].attached {
            if attached.broken || attached.places != own || attached.size != driver.size {
                return;
            }
            // Earlier signals of the server are not for these requests.
            attached.call.as_ref().map(mqblk_engine::EventFd::take);
        }
        for request in requests.iter().take(driver.room().into()) {
            self.guest.publish(queue, *request, &self.session.table);
        }
        self.session.rings[queue].kick();
        self.settle();
        if self.session.rings[queue].serving().is_none() {
            self.synced = false;
            self.sync();
        }
    }

    /// Moves the available index to a position that no driver may use.
    pub(crate) fn break_index(&mut self, queue: usize, ahead: u16) {
        self.sync();
        let own = RingPlaces::of_queue(queue, self.guest.drivers[queue].layout);
        match &self.session.rings[queue].attached {
            Some(attached) if attached.broken || attached.places != own || !attached.replays.is_empty() => return,
            _ => self.guest.break_index(queue, ahead),
        }
        self.session.rings[queue].kick();
        self.settle();
    }

    /// Resets a ring. Returns false if the device uses it.
    pub(crate) fn reset_ring(&mut self, queue: usize, layout: usize, size: u16, start: u16) -> bool {
        self.sync();
        let free = self.session.rings[queue].attached.is_none();
        if free {
            self.guest.reset_ring(queue, layout, size, start);
        }
        free
    }

    /// Leaves the first `count` outstanding requests of a ring in the in-flight region, as a killed server does.
    pub(crate) fn leave_in_flight(&mut self, queue: usize, count: u16) {
        self.sync();
        let (guest, driver) = (&self.guest, self.guest.drivers[queue]);
        let ring = RingPlaces::of_queue(queue, driver.layout);
        let (avail, used) = guest.indices(&ring);
        let outstanding = avail.wrapping_sub(driver.completed);
        if self.session.rings[queue].attached.is_some() || used != driver.completed || avail != driver.avail {
            return;
        }
        let heads = guest.heads_from(&ring, driver.size, driver.completed, count.min(outstanding));
        if let (Some(heads), Some(region)) = (heads, &self.region)
            && let Some(table) = region.table(queue)
        {
            region.leave(table, driver.size, used, &heads);
        }
    }

    pub(crate) fn spoil_region(&mut self, queue: usize) {
        self.sync();
        let attached = self.session.rings.iter().any(|ring| ring.attached.is_some());
        if let Some(region) = self.region.as_ref().filter(|_| !attached)
            && let Some(table) = region.table(queue)
        {
            region.spoil(table);
            self.region = None;
        }
    }

    /// Checks state that a device must not have changed.
    pub(crate) fn check(&mut self) {
        self.sync();
        self.guest.check();
        if let Some(log) = self.session.active_log() {
            log.check();
        }
    }

    /// Ends the conversation: a good frontend is served on the same socket and finds the disk's content, and no
    /// resource of the others is left.
    pub(crate) fn finish(mut self) {
        self.check();
        self.close();
        self.close();
        self.region = None;
        self.good_frontend();
        self.check();
        self.close();
        let Machine { server, resources: before, session, device: _, .. } = &mut self;
        *session = Session::default();
        let used = || {
            let budget = server.budget();
            (budget.mappings.used, budget.address_space.used, budget.guest_memory.used)
        };
        wait_until("the frontends' budget", || used() == (0, 0, 0));
        wait_until("descriptors and mappings of frontends that have left", || resources() == *before);
        let budget = server.budget();
        assert_eq!((budget.delayed_connections, budget.delayed_messages), (0, 0), "an input within the rate limits");
        server.stop();
        assert!(!self.socket.exists(), "the socket of a server that has stopped");
    }

    fn good_frontend(&mut self) {
        let acked = |mut message: AnyMessage| {
            message.flags |= crate::vhost_user_wire::NEED_REPLY;
            message
        };
        self.send(&messages::plain(m::GET_FEATURES), None, 0);
        self.send(&messages::number(m::SET_PROTOCOL_FEATURES, protocol::ALL), None, 0);
        self.send(&messages::number(m::SET_FEATURES, FEATURES & !(LOG_ALL | RING_PACKED)), None, 0);
        self.send(&acked(messages::usual_table()), None, 0);
        for queue in 0..QUEUES {
            assert!(self.reset_ring(queue, 0, RING, 0), "a new connection has no queues");
            let addresses =
                messages::vring_addresses(queue, &RingPlaces::of_queue(queue, 0), &self.session.table, false);
            for message in [
                messages::vring(m::SET_VRING_NUM, queue, RING.into()),
                messages::vring(m::SET_VRING_BASE, queue, 0),
                addresses,
                messages::vring_event(m::SET_VRING_CALL, queue, Some(messages::event())),
                messages::vring_event(m::SET_VRING_KICK, queue, Some(messages::event())),
                acked(messages::vring(m::SET_VRING_ENABLE, queue, 1)),
            ] {
                self.send(&message, None, 0);
            }
            self.publish(queue, &[BlkChoice::READ; 8]);
            let driver = self.guest.drivers[queue];
            assert_eq!((driver.avail, driver.completed), (8, 8), "a good frontend is served");
        }
    }
}

/// Returns true if everything that the server writes to a pipe is read, and is this document.
pub(crate) fn is_document(mut pipe: impl std::io::Read + AsFd, writeback: bool) -> bool {
    let mut text = String::new();
    pipe.read_to_string(&mut text).expect("a document");
    let document: serde_json::Value = serde_json::from_str(&text).expect("a document is JSON");
    document["state"]["writeback"] == writeback
}
