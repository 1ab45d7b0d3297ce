//! The backend's side of one vhost-user connection as a model: the outcome of each message. Sources: QEMU's
//! `vhost-user.rst`, and where it leaves a choice, `docs/security.md`: a refused message ends its connection.

pub(crate) mod files;
pub(crate) mod guest;

use std::rc::Rc;

use mqblk_engine::EventFd;

use crate::vhost_user_session::files::{DirtyLogFile, Fd, InflightFile};
use crate::vhost_user_session::guest::{
    FILE_BYTES, Guest, MemoryTable, QUEUES, RING, RingPlaces, SECTOR, SECTORS, TableRegion,
};
use crate::vhost_user_wire::{Message, NEED_REPLY, VERSION, longs, message as m, words};

/// Feature bits of a disk in memory: SIZE_MAX, SEG_MAX, BLK_SIZE, FLUSH, TOPOLOGY, CONFIG_WCE, MQ, DISCARD,
/// WRITE_ZEROES (virtio 1.3 section 5.2.3), ANY_LAYOUT, INDIRECT_DESC, EVENT_IDX, VERSION_1 (section 6), and
/// vhost-user's own.
const BLK_FEATURES: u64 =
    1 << 1 | 1 << 2 | 1 << 6 | FLUSH | 1 << 10 | CONFIG_WCE | 1 << 12 | 1 << 13 | 1 << 14 | 1 << 27 | 1 << 28 | 1 << 32;
pub(crate) const FEATURES: u64 = BLK_FEATURES | EVENT_IDX | LOG_ALL | PROTOCOL | RING_PACKED;
/// Offered after the protocol features only, and accepted at any time.
const ACCESS_PLATFORM: u64 = 1 << 33;
/// Offered; the rings of this model are split.
pub(crate) const RING_PACKED: u64 = 1 << 34;
const FLUSH: u64 = 1 << 9;
const CONFIG_WCE: u64 = 1 << 11;
pub(crate) const LOG_ALL: u64 = 1 << 26;
const EVENT_IDX: u64 = 1 << 29;
pub(crate) const PROTOCOL: u64 = 1 << 30;

/// Protocol feature bits.
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const LOG_SHMFD: u64 = 1 << 1;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const MEM_SLOTS: u64 = 1 << 15;
    pub(crate) const DEVICE_STATE: u64 = 1 << 19;
    pub(crate) const ALL: u64 =
        MQ | LOG_SHMFD | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | MEM_SLOTS | DEVICE_STATE;
}

/// Most descriptors of a message that the server accepts.
const MAX_FDS: usize = 32;
/// Memory slots that the server offers.
const MAX_SLOTS: u64 = 512;
/// Bytes of guest memory for a byte of the dirty log.
const LOG_SPAN: u64 = 8 * 4096;
/// The byte of the configuration space that a driver may write: `writeback`.
pub(crate) const WRITEBACK: usize = 32;

/// The outcome of a message.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Success, acknowledged on request.
    Done,
    /// This reply.
    Reply(Vec<u8>),
    /// A new in-flight region for this many queues of this size.
    NewRegion(u16, u16),
    /// A negative acknowledgement on request, and the end of the connection.
    Refused,
    /// The end of the connection. A malformed message may get a negative acknowledgement before.
    Malformed,
    /// The end of the connection without an acknowledgement: the message has a reply of its own.
    Closed,
}

/// State of the device that sessions share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceModel {
    pub(crate) writeback: bool,
    /// A loaded state holds until a queue starts.
    resumed: bool,
}

impl DeviceModel {
    pub(crate) const NEW: DeviceModel = DeviceModel { writeback: true, resumed: false };

    /// Returns the configuration space. Source: virtio 1.3 section 5.2.4.
    fn config(&self) -> Vec<u8> {
        let mut space = vec![0; 4096];
        let mut put = |at: usize, value: &[u8]| space[at..at + value.len()].copy_from_slice(value);
        put(0, &SECTORS.to_le_bytes());
        put(8, &(4_u32 << 20).to_le_bytes());
        put(12, &u32::from(RING - 2).to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        put(WRITEBACK, &[u8::from(self.writeback)]);
        put(34, &(QUEUES as u16).to_le_bytes());
        // Discard: 256 MiB, 64 ranges, in sectors; write zeroes: 32 MiB, 64 ranges, may unmap.
        for (at, value) in [(36, 256_u32 << 11), (40, 64), (44, 1), (48, 32 << 11), (52, 64)] {
            put(at, &value.to_le_bytes());
        }
        put(56, &[1]);
        space
    }
}

/// A queue that is being served.
#[derive(Clone)]
pub(crate) struct Attached {
    pub(crate) places: RingPlaces,
    pub(crate) size: u16,
    pub(crate) event_idx: bool,
    pub(crate) next_avail: u16,
    pub(crate) next_used: u16,
    pub(crate) kick: Option<EventFd>,
    pub(crate) call: Option<EventFd>,
    pub(crate) err: Option<EventFd>,
    pub(crate) broken: bool,
    /// Chains to replay.
    pub(crate) replays: Vec<u16>,
    /// Offset of its table in the in-flight region.
    pub(crate) table: Option<u64>,
}

/// A queue as messages have configured it.
#[derive(Clone, Default)]
pub(crate) struct Ring {
    size: Option<u16>,
    /// Descriptor table, available ring, used ring.
    addresses: Option<[u64; 3]>,
    pub(crate) log: Option<u64>,
    base: u16,
    kick: Option<Option<EventFd>>,
    call: Option<EventFd>,
    err: Option<EventFd>,
    pub(crate) enabled: bool,
    pub(crate) attached: Option<Attached>,
}

impl Ring {
    /// Returns the queue if it is being served.
    pub(crate) fn serving(&mut self) -> Option<&mut Attached> {
        let enabled = self.enabled;
        self.attached.as_mut().filter(|attached| enabled && !attached.broken)
    }

    /// Kicks on the descriptor that the device watches, or will watch.
    pub(crate) fn kick(&self) {
        let kick = match &self.attached {
            Some(attached) => attached.kick.as_ref(),
            None => self.kick.as_ref().and_then(Option::as_ref),
        };
        kick.into_iter().for_each(EventFd::signal);
    }
}

/// A transfer of the device's state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Transfer {
    Save,
    /// The document's value of `writeback`; `None`: it is not a document.
    Load(Option<bool>),
}

/// One connection.
#[derive(Clone, Default)]
pub(crate) struct Session {
    /// GET_FEATURES was answered. Before that, a frontend cannot know the protocol features.
    asked: bool,
    /// Features that were set, for the rule about SET_VRING_ENABLE.
    acked: u64,
    pub(crate) protocol: u64,
    features: u64,
    pub(crate) table: MemoryTable,
    pub(crate) rings: [Ring; QUEUES],
    pub(crate) log: Option<Rc<DirtyLogFile>>,
    log_all: bool,
    pub(crate) region: Option<Rc<InflightFile>>,
    transfer: Option<Transfer>,
    /// A queue has started since the connection began.
    pub(crate) started: bool,
}

type Handled = Result<Outcome, Outcome>;

/// Returns true for a table of memory regions with room for more regions than it has, which is served.
pub(crate) fn is_long_table(message: &Message<Fd>) -> bool {
    let Message { request, payload, .. } = message;
    let count = if payload.len() < 8 { 0 } else { Payload(payload).word(0) as usize };
    *request == m::SET_MEM_TABLE
        && (1..=32).contains(&count)
        && (8 + 32 * count + 1..=8 + 32 * 32).contains(&payload.len())
}

impl Session {
    /// Returns the dirty log if it is in use.
    pub(crate) fn active_log(&self) -> Option<&Rc<DirtyLogFile>> {
        self.log.as_ref().filter(|_| self.log_all)
    }

    /// Returns true if this message must be acknowledged.
    pub(crate) fn acknowledges(&self, flags: u32) -> bool {
        self.asked && self.protocol & protocol::REPLY_ACK != 0 && flags & NEED_REPLY != 0
    }

    /// Handles a message. `load`: the content of a LOAD's document. Starts the queues that the message completes.
    pub(crate) fn handle(
        &mut self,
        message: &Message<Fd>,
        load: Option<bool>,
        (guest, device): (&Guest, &mut DeviceModel),
    ) -> Outcome {
        let known = (1..=44).contains(&message.request) && message.payload.len() <= 4096;
        let takes_files = matches!(
            message.request,
            m::SET_MEM_TABLE
                | m::SET_VRING_CALL
                | m::SET_VRING_KICK
                | m::SET_VRING_ERR
                | m::SET_LOG_BASE
                | m::SET_LOG_FD
                | m::SET_BACKEND_REQ_FD
                | m::SET_INFLIGHT_FD
                | m::ADD_MEM_REG
                | m::REM_MEM_REG
                | m::SET_DEVICE_STATE_FD
                | m::GPU_SET_SOCKET
        );
        let descriptors = message.fds.len() <= MAX_FDS && (message.fds.is_empty() || takes_files);
        if !known || message.flags & !NEED_REPLY != VERSION || !descriptors {
            return Outcome::Malformed;
        }
        match self.dispatch(message, load, (guest, device)) {
            Ok(outcome) | Err(outcome) => outcome,
        }
    }

    fn dispatch(
        &mut self,
        message: &Message<Fd>,
        load: Option<bool>,
        (guest, device): (&Guest, &mut DeviceModel),
    ) -> Handled {
        let payload = Payload(&message.payload);
        match message.request {
            m::SET_OWNER => payload.end(0),
            m::RESET_OWNER => {
                payload.end(0)?;
                self.rings.iter_mut().for_each(|ring| ring.enabled = false);
                Ok(Outcome::Done)
            }
            m::RESET_DEVICE => {
                self.require(protocol::RESET_DEVICE)?;
                payload.end(0)?;
                self.reset_device(device);
                Ok(Outcome::Done)
            }
            m::GET_FEATURES => {
                payload.end(0)?;
                self.asked = true;
                let later = if self.protocol != 0 { ACCESS_PLATFORM } else { 0 };
                Ok(Outcome::Reply(longs(&[FEATURES | later])))
            }
            m::GET_PROTOCOL_FEATURES => payload.end(0).map(|_| Outcome::Reply(longs(&[protocol::ALL]))),
            m::GET_QUEUE_NUM => {
                self.require(protocol::MQ)?;
                payload.end(0).map(|_| Outcome::Reply(longs(&[QUEUES as u64])))
            }
            m::GET_MAX_MEM_SLOTS => {
                self.require(protocol::MEM_SLOTS)?;
                payload.end(0).map(|_| Outcome::Reply(longs(&[MAX_SLOTS])))
            }
            m::SET_FEATURES => {
                payload.end(8)?;
                self.set_features(payload.long(0), device)
            }
            m::SET_PROTOCOL_FEATURES => {
                payload.end(8)?;
                let accepted = payload.long(0);
                // Also for the acknowledgement of a refusal.
                self.protocol = accepted;
                if accepted & !protocol::ALL != 0 { Err(Outcome::Refused) } else { Ok(Outcome::Done) }
            }
            m::SET_MEM_TABLE | m::ADD_MEM_REG | m::REM_MEM_REG => self.memory_message(message),
            m::SET_VRING_NUM | m::SET_VRING_BASE | m::SET_VRING_ENABLE | m::GET_VRING_BASE => {
                payload.end(8)?;
                self.vring_state(message.request, payload.word(0), payload.word(4))
            }
            m::SET_VRING_ADDR => self.vring_addresses(payload, (guest, device)),
            m::SET_VRING_KICK | m::SET_VRING_CALL | m::SET_VRING_ERR => self.vring_event(message, (guest, device)),
            m::GET_CONFIG | m::SET_CONFIG => self.config(message.request, payload, device),
            m::GET_INFLIGHT_FD => {
                self.require(protocol::INFLIGHT_SHMFD)?;
                payload.end(24)?;
                let (queues, size) = (payload.short(16), payload.short(18));
                if queues == 0 || usize::from(queues) > QUEUES || size == 0 {
                    return Err(Outcome::Closed);
                }
                Ok(Outcome::NewRegion(queues, size))
            }
            m::SET_INFLIGHT_FD => self.set_region(message, payload, device),
            m::SET_LOG_BASE => self.set_log(message, payload),
            m::SET_BACKEND_REQ_FD => {
                self.require(protocol::BACKEND_REQ)?;
                match &message.fds[..] {
                    [Fd::Socket(_)] => Ok(Outcome::Done),
                    _ => Err(Outcome::Malformed),
                }
            }
            m::SET_DEVICE_STATE_FD => self.begin_transfer(message, payload, load),
            m::CHECK_DEVICE_STATE => {
                let done = self.end_transfer(device);
                Ok(Outcome::Reply(longs(&[u64::from(!done)])))
            }
            _ => Err(Outcome::Malformed),
        }
    }

    fn require(&self, feature: u64) -> Handled {
        if self.protocol & feature != 0 { Ok(Outcome::Done) } else { Err(Outcome::Malformed) }
    }

    fn reset_device(&mut self, device: &mut DeviceModel) {
        self.rings = Default::default();
        (self.features, self.log, self.log_all, self.transfer) = (0, None, false, None);
        self.started = true;
        *device = DeviceModel::NEW;
        self.record_config(device);
    }

    fn record_config(&self, device: &DeviceModel) {
        if let Some(region) = &self.region {
            region.record_config(device.writeback);
        }
    }

    fn set_features(&mut self, accepted: u64, device: &mut DeviceModel) -> Handled {
        self.acked = accepted;
        if accepted & !(FEATURES | ACCESS_PLATFORM) != 0 {
            return Err(Outcome::Refused);
        }
        let all = accepted & LOG_ALL != 0;
        if self.log_all && !all {
            self.log = None;
        }
        self.log_all = all;
        let last = self.table.regions().last().map(|region| region.guest + (region.size - 1));
        self.check_log(last)?;
        self.check_ring_logs()?;
        let changed = (self.features ^ accepted) & !LOG_ALL != 0;
        self.features = accepted;
        if (changed || accepted == 0) && !device.resumed && accepted & CONFIG_WCE != 0 && accepted & FLUSH == 0 {
            device.writeback = false;
        }
        self.record_config(device);
        if accepted & PROTOCOL == 0 {
            self.rings.iter_mut().for_each(|ring| ring.enabled = true);
        }
        Ok(Outcome::Done)
    }

    /// Checks that the dirty log, if it is in use, has a bit for this address.
    fn check_log(&self, address: Option<u64>) -> Handled {
        let short = |log: &&Rc<DirtyLogFile>| address.is_some_and(|address| address / LOG_SPAN >= log.len);
        if self.active_log().filter(short).is_some() { Err(Outcome::Refused) } else { Ok(Outcome::Done) }
    }

    fn check_ring_log(&self, queue: usize, size: u16) -> Handled {
        self.check_log(self.rings[queue].log.map(|used| used.saturating_add(5 + 8 * u64::from(size))))
    }

    fn check_ring_logs(&self) -> Handled {
        for (queue, ring) in self.rings.iter().enumerate() {
            if let Some(attached) = &ring.attached {
                self.check_ring_log(queue, attached.size)?;
            }
        }
        Ok(Outcome::Done)
    }

    fn memory_message(&mut self, message: &Message<Fd>) -> Handled {
        let payload = Payload(&message.payload);
        let single = message.request != m::SET_MEM_TABLE;
        let regions = if single {
            self.require(protocol::MEM_SLOTS)?;
            payload.end(40)?;
            if message.request == m::ADD_MEM_REG && message.fds.len() != 1 {
                return Err(Outcome::Malformed);
            }
            vec![payload.region(8)]
        } else {
            let count = if message.payload.len() < 8 { 0 } else { payload.word(0) as usize };
            if count == 0 || count > 32 || payload.word(4) != 0 {
                return Err(Outcome::Malformed);
            }
            if !is_long_table(message) {
                payload.end(8 + 32 * count)?;
            }
            if message.fds.len() != count {
                return Err(Outcome::Malformed);
            }
            (0..count).map(|at| payload.region(8 + 32 * at)).collect()
        };
        let is_whole = |[guest, size, user, offset]: &[u64; 4]| {
            *size > 0 && [guest, user, offset].iter().all(|start| start.checked_add(*size).is_some())
        };
        if !regions.iter().all(is_whole) {
            return Err(if single { Outcome::Refused } else { Outcome::Malformed });
        }
        let same = |region: &&TableRegion| [region.guest, region.size, region.user] == regions[0][..3];
        let mut table = if single { self.table.regions().to_vec() } else { vec![] };
        if message.request == m::REM_MEM_REG {
            let found = self.table.regions().iter().find(same).copied().ok_or(Outcome::Refused)?;
            table.retain(|region| *region != found);
        } else {
            for ([guest, size, user, offset], fd) in regions.iter().copied().zip(&message.fds) {
                let Fd::Guest(file) = fd else { return Err(Outcome::Refused) };
                if offset + size > FILE_BYTES {
                    return Err(Outcome::Refused);
                }
                table.push(TableRegion { guest, size, user, offset, file: *file });
            }
        }
        self.table = MemoryTable::new(table).ok_or(Outcome::Refused)?;
        self.check_log(self.table.regions().last().map(|region| region.guest + (region.size - 1)))?;
        (0..QUEUES).try_for_each(|queue| self.relocate(queue))?;
        Ok(Outcome::Done)
    }

    /// Finds an attached ring again.
    fn relocate(&mut self, queue: usize) -> Result<(), Outcome> {
        let found = self.find_ring(queue);
        if let Some(attached) = &mut self.rings[queue].attached {
            attached.places = found.ok_or(Outcome::Refused)?;
        }
        Ok(())
    }

    fn find_ring(&self, queue: usize) -> Option<RingPlaces> {
        let [desc, avail, used] = self.rings[queue].addresses?;
        let guest = |user| self.table.guest_of(user);
        RingPlaces::find(&self.table, [guest(desc)?, guest(avail)?, guest(used)?], self.rings[queue].size?)
    }

    fn vring_state(&mut self, request: u32, index: u32, value: u32) -> Handled {
        if request == m::SET_VRING_ENABLE && (self.acked & PROTOCOL == 0 || value > 1) {
            return Err(Outcome::Malformed);
        }
        let refused = || if request == m::GET_VRING_BASE { Outcome::Closed } else { Outcome::Refused };
        let ring = self.rings.get_mut(index as usize).ok_or_else(refused)?;
        match request {
            m::SET_VRING_NUM => {
                let size = u16::try_from(value).ok().filter(|size| size.is_power_of_two() && (2..=RING).contains(size));
                if size.is_none() || ring.attached.is_some() && size != ring.size {
                    return Err(Outcome::Refused);
                }
                ring.size = size;
            }
            m::SET_VRING_BASE => ring.base = u16::try_from(value).map_err(|_| Outcome::Refused)?,
            m::SET_VRING_ENABLE => ring.enabled = value == 1,
            _ => {
                if let Some(attached) = ring.attached.take() {
                    ring.base = attached.next_avail;
                }
                (ring.kick, ring.call) = (None, None);
                return Ok(Outcome::Reply(words(&[index, ring.base.into()])));
            }
        }
        Ok(Outcome::Done)
    }

    fn vring_addresses(&mut self, payload: Payload<'_>, world: (&Guest, &mut DeviceModel)) -> Handled {
        payload.end(40)?;
        let (index, flags) = (payload.word(0) as usize, payload.word(4));
        let [desc, used, avail, log] = [8, 16, 24, 32].map(|at| payload.long(at));
        if flags > 1 || !desc.is_multiple_of(16) || !avail.is_multiple_of(2) || !used.is_multiple_of(4) {
            return Err(Outcome::Malformed);
        }
        let ring = self.rings.get_mut(index).ok_or(Outcome::Refused)?;
        let before = ring.addresses.replace([desc, avail, used]);
        ring.log = (flags == 1).then_some(log);
        if let Some(size) = ring.attached.as_ref().map(|attached| attached.size) {
            if before != Some([desc, avail, used]) {
                self.relocate(index)?;
            }
            return self.check_ring_log(index, size);
        }
        self.start(index, world)
    }

    fn vring_event(&mut self, message: &Message<Fd>, world: (&Guest, &mut DeviceModel)) -> Handled {
        let payload = Payload(&message.payload);
        payload.end(8)?;
        let value = payload.long(0);
        let (index, none) = (usize::from(value as u8), value & 0x100 != 0);
        let file = match &message.fds[..] {
            [] if none => None,
            [file] if !none => Some(file),
            // More than one descriptor counts as none.
            [_, _, ..] if none => None,
            _ => return Err(Outcome::Malformed),
        };
        let ring = self.rings.get_mut(index).ok_or(Outcome::Refused)?;
        let event = match file {
            None => None,
            Some(Fd::Event(event)) => Some(event.clone()),
            // Served, and nobody counts its calls.
            Some(Fd::Socket(_)) if message.request != m::SET_VRING_KICK => None,
            Some(_) => return Err(Outcome::Refused),
        };
        match (message.request, &mut ring.attached) {
            (m::SET_VRING_CALL, Some(attached)) => attached.call = event,
            (m::SET_VRING_CALL, None) => ring.call = event,
            (m::SET_VRING_ERR, _) => ring.err = event,
            (_, Some(attached)) => {
                ring.kick = Some(event.clone());
                attached.kick = event;
            }
            (_, None) => {
                ring.kick = Some(event);
                return self.start(index, world);
            }
        }
        Ok(Outcome::Done)
    }

    /// Starts the queues that are complete.
    pub(crate) fn start_all(&mut self, (guest, device): (&Guest, &mut DeviceModel)) -> Handled {
        (0..QUEUES).try_for_each(|queue| self.start(queue, (guest, device)).map(|_| ()))?;
        Ok(Outcome::Done)
    }

    /// Starts a queue if it is complete.
    fn start(&mut self, queue: usize, (guest, device): (&Guest, &mut DeviceModel)) -> Handled {
        let ring = &self.rings[queue];
        let (None, Some(kick), Some(size), Some(_)) = (&ring.attached, &ring.kick, ring.size, ring.addresses) else {
            return Ok(Outcome::Done);
        };
        let (kick, err, base) = (kick.clone(), ring.err.clone(), ring.base);
        let places = self.find_ring(queue).ok_or(Outcome::Refused)?;
        let next_used = guest.indices(&places).1;
        let table = self.region.as_ref().and_then(|region| region.table(queue));
        let mut resumed = None;
        if let (Some(region), Some(at)) = (&self.region, table) {
            resumed = region.resume(at, size, next_used).map_err(|()| Outcome::Refused)?;
        }
        self.check_ring_log(queue, size)?;
        let next_avail = resumed.as_ref().map_or(base, |replays| next_used.wrapping_add(replays.len() as u16));
        let replays = resumed.unwrap_or_default();
        let call = self.rings[queue].call.take();
        let event_idx = self.features & EVENT_IDX != 0;
        let attached =
            Attached { places, size, event_idx, next_avail, next_used, kick, call, err, broken: false, replays, table };
        self.rings[queue].attached = Some(attached);
        self.started = true;
        device.resumed = false;
        Ok(Outcome::Done)
    }

    fn config(&mut self, request: u32, payload: Payload<'_>, device: &mut DeviceModel) -> Handled {
        self.require(protocol::CONFIG)?;
        if payload.0.len() < 12 {
            return Err(Outcome::Malformed);
        }
        let [offset, size, flags] = [0, 4, 8].map(|at| payload.word(at));
        let end = offset.checked_add(size).filter(|end| *end <= 4096);
        if size == 0 || end.is_none() || flags > 3 || payload.0.len() - 12 != size as usize {
            return Err(Outcome::Malformed);
        }
        let (start, len) = (offset as usize, size as usize);
        let current = device.config()[start..start + len].to_vec();
        if request == m::GET_CONFIG {
            return Ok(Outcome::Reply([words(&[offset, size, flags]), current].concat()));
        }
        let mut writeback = device.writeback;
        for (at, (new, old)) in (start..).zip(payload.0[12..].iter().zip(&current)) {
            match (at, new) {
                (WRITEBACK, 0 | 1) => writeback = *new == 1,
                _ if at != WRITEBACK && new == old => {}
                _ => return Err(Outcome::Refused),
            }
        }
        device.writeback = writeback;
        self.record_config(device);
        Ok(Outcome::Done)
    }

    fn set_region(&mut self, message: &Message<Fd>, payload: Payload<'_>, device: &mut DeviceModel) -> Handled {
        self.require(protocol::INFLIGHT_SHMFD)?;
        if message.fds.len() != 1 {
            return Err(Outcome::Malformed);
        }
        payload.end(24)?;
        let (queues, size) = (payload.short(16), payload.short(18));
        if queues == 0 || size == 0 {
            return Err(Outcome::Malformed);
        }
        if self.rings.iter().any(|ring| ring.attached.is_some()) {
            return Err(Outcome::Refused);
        }
        let Fd::Region(region) = &message.fds[0] else { return Err(Outcome::Refused) };
        let region = region.as_set(payload.long(0), payload.long(8), queues).ok_or(Outcome::Refused)?;
        if let Some(writeback) = region.recorded_config() {
            device.writeback = writeback;
        }
        self.region = Some(Rc::new(region));
        self.record_config(device);
        Ok(Outcome::Done)
    }

    fn set_log(&mut self, message: &Message<Fd>, payload: Payload<'_>) -> Handled {
        self.require(protocol::LOG_SHMFD)?;
        if message.fds.len() != 1 || payload.0.len() != 16 {
            return Err(Outcome::Closed);
        }
        let [len, offset] = [0, 8].map(|at| payload.long(at));
        let Fd::Log(log) = &message.fds[0] else { return Err(Outcome::Closed) };
        let log = log.as_set(len, offset).ok_or(Outcome::Closed)?;
        let last = self.table.regions().last().map(|region| region.guest + (region.size - 1));
        if last.is_some_and(|last| last / LOG_SPAN >= len) {
            return Err(Outcome::Closed);
        }
        self.log = Some(Rc::new(log));
        self.check_ring_logs().map_err(|_| Outcome::Closed)?;
        Ok(Outcome::Reply(message.payload.clone()))
    }

    /// Returns true if no queue runs or is about to.
    fn is_stopped(&self) -> bool {
        self.rings.iter().all(|ring| {
            ring.attached.is_none() && !(ring.kick.is_some() && ring.size.is_some() && ring.addresses.is_some())
        })
    }

    pub(crate) fn is_saving(&self) -> bool {
        matches!(self.transfer, Some(Transfer::Save))
    }

    fn begin_transfer(&mut self, message: &Message<Fd>, payload: Payload<'_>, load: Option<bool>) -> Handled {
        let [fd] = &message.fds[..] else { return Err(Outcome::Closed) };
        payload.end(8).map_err(|_| Outcome::Closed)?;
        let (direction, phase) = (payload.word(0), payload.word(4));
        if direction > 1 || phase != 0 {
            return Err(Outcome::Closed);
        }
        let declined = Ok(Outcome::Reply(longs(&[0x101])));
        if self.protocol & protocol::DEVICE_STATE == 0 || !self.is_stopped() {
            return declined;
        }
        self.transfer = match (direction, fd) {
            (0, Fd::PipeIn(_)) => Some(Transfer::Save),
            (1, Fd::PipeOut(_)) => Some(Transfer::Load(load)),
            _ => None,
        };
        if self.transfer.is_none() { declined } else { Ok(Outcome::Reply(longs(&[0x100]))) }
    }

    /// Ends a transfer of the device's state. Returns true if it succeeds.
    fn end_transfer(&mut self, device: &mut DeviceModel) -> bool {
        match self.transfer.take() {
            Some(Transfer::Save) => true,
            Some(Transfer::Load(Some(writeback))) if self.is_stopped() => {
                *device = DeviceModel { writeback, resumed: true };
                self.record_config(device);
                true
            }
            _ => false,
        }
    }
}

/// A payload with numbers at given offsets.
#[derive(Clone, Copy)]
struct Payload<'a>(&'a [u8]);

impl Payload<'_> {
    /// Checks its length.
    fn end(self, len: usize) -> Handled {
        if self.0.len() == len { Ok(Outcome::Done) } else { Err(Outcome::Malformed) }
    }

    fn bytes<const N: usize>(self, at: usize) -> [u8; N] {
        self.0[at..at + N].try_into().expect("as many")
    }

    fn short(self, at: usize) -> u16 {
        u16::from_ne_bytes(self.bytes(at))
    }

    fn word(self, at: usize) -> u32 {
        u32::from_ne_bytes(self.bytes(at))
    }

    fn long(self, at: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(at))
    }

    /// Returns guest address, size, user address and offset of a region.
    fn region(self, at: usize) -> [u64; 4] {
        [0, 8, 16, 24].map(|field| self.long(at + field))
    }
}
