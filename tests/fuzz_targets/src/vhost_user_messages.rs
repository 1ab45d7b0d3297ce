//! Messages of a frontend that mostly follows the protocol.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use arbitrary::{Result, Unstructured};
use mqblk_engine::EventFd;

use crate::vhost_user_session::files::{DirtyLogFile, Fd, InflightFile};
use crate::vhost_user_session::guest::{FILE_BYTES, MemoryTable, RING, RingPlaces, SECTOR, SECTORS, TableRegion};
use crate::vhost_user_session::{FEATURES, LOG_ALL, PROTOCOL, RING_PACKED, WRITEBACK, protocol};
use crate::vhost_user_wire::{MAX_FDS, Message, NEED_REPLY, REPLY, VERSION, longs, message as m, words};

pub(crate) type AnyMessage = Message<Fd>;

/// Regions of a usual table: file, guest address, user address, offset, bytes. The second and the third touch.
const SLOTS: [TableRegion; 4] = [
    TableRegion { file: 0, guest: 0x1_0000, user: 0x7000_0000_0000, offset: 0, size: FILE_BYTES },
    TableRegion { file: 1, guest: 0x2_0000, user: 0x7100_0000_0000, offset: 0, size: FILE_BYTES },
    TableRegion { file: 2, guest: 0x2_8000, user: 0x7200_0000_0000, offset: 0x1000, size: 0x2000 },
    TableRegion { file: 2, guest: 0x3_0000, user: 0x7300_0000_0000, offset: 0x1234, size: 0x2000 },
];
/// Distance to a slot's other guest address.
const ELSEWHERE: u64 = 0x4_0000;

pub(crate) fn event() -> Fd {
    Fd::Event(EventFd::new().expect("a descriptor"))
}

pub(crate) fn null() -> Fd {
    Fd::Null(Rc::new(File::open("/dev/null").expect("it exists")))
}

fn socket() -> Fd {
    Fd::Socket(Rc::new(std::os::unix::net::UnixStream::pair().expect("a pair").0.into()))
}

pub(crate) fn plain(request: u32) -> AnyMessage {
    Message::new(request, vec![], vec![])
}

pub(crate) fn number(request: u32, value: u64) -> AnyMessage {
    Message::new(request, longs(&[value]), vec![])
}

pub(crate) fn vring(request: u32, queue: usize, value: u32) -> AnyMessage {
    Message::new(request, words(&[queue as u32, value]), vec![])
}

pub(crate) fn vring_event(request: u32, queue: usize, event: Option<Fd>) -> AnyMessage {
    let none = if event.is_none() { 0x100 } else { 0 };
    Message::new(request, longs(&[queue as u64 | none]), event.into_iter().collect())
}

/// Returns SET_VRING_ADDR, with user addresses of `table`. `log`: the guest address at which the used ring is logged.
pub(crate) fn vring_addresses(queue: usize, ring: &RingPlaces, table: &MemoryTable, log: bool) -> AnyMessage {
    let region = |file| table.regions().iter().find(|r| r.file == file).copied().unwrap_or(SLOTS[file]);
    let user = |place: crate::vhost_user_session::guest::Place| {
        let region = region(place.file);
        region.user.wrapping_add(place.at.wrapping_sub(region.offset))
    };
    let region = region(ring.used.file);
    let used = region.guest.wrapping_add(ring.used.at.wrapping_sub(region.offset));
    let mut payload = words(&[queue as u32, u32::from(log)]);
    payload.extend(longs(&[user(ring.desc), user(ring.used), user(ring.avail), used]));
    Message::new(m::SET_VRING_ADDR, payload, vec![])
}

fn entry(region: &TableRegion) -> Vec<u8> {
    longs(&[region.guest, region.size, region.user, region.offset])
}

pub(crate) fn region_message(request: u32, region: &TableRegion) -> AnyMessage {
    let fds = if request == m::ADD_MEM_REG { vec![Fd::Guest(region.file)] } else { vec![] };
    Message::new(request, [longs(&[0]), entry(region)].concat(), fds)
}

fn table_message(regions: &[TableRegion]) -> AnyMessage {
    let payload = regions.iter().fold(words(&[regions.len() as u32, 0]), |all, region| [all, entry(region)].concat());
    Message::new(m::SET_MEM_TABLE, payload, regions.iter().map(|region| Fd::Guest(region.file)).collect())
}

/// Returns the usual table.
pub(crate) fn usual_table() -> AnyMessage {
    table_message(&SLOTS[..2])
}

/// Returns a region that is mostly one of the slots.
pub(crate) fn any_region(u: &mut Unstructured<'_>) -> Result<TableRegion> {
    let mut region = *u.choose(&SLOTS)?;
    if u.ratio(1, 5)? {
        region.guest += ELSEWHERE;
    }
    if u.ratio(1, 8)? {
        match u.int_in_range(0..=5)? {
            0 => region.guest = region.guest.wrapping_add_signed(*u.choose(&[-0x1000, -1, 1, 0x7fff, 0x8000])?),
            1 if region.file > 0 => region.size = *u.choose(&[0, 1, 0x800, 0x1fff, 0x8001, 1 << 50, u64::MAX])?,
            2 => region.user = *u.choose(&[0, SLOTS[0].user, u64::MAX - 0x1000, u64::MAX])?,
            3 => region.offset = *u.choose(&[1, 0x1000, FILE_BYTES, u64::MAX - 0xfff, u64::MAX])?,
            4 => region.guest = *u.choose(&[0, u64::MAX - FILE_BYTES, u64::MAX - FILE_BYTES + 1, u64::MAX])?,
            _ => region.user += 0x10_0000,
        }
    }
    Ok(region)
}

pub(crate) fn any_table(u: &mut Unstructured<'_>) -> Result<AnyMessage> {
    if u.ratio(1, 2)? {
        return Ok(table_message(&SLOTS[..u.int_in_range(2..=4)?]));
    }
    let mut regions = vec![];
    for _ in 0..u.int_in_range(0..=4)? {
        regions.push(any_region(u)?);
    }
    Ok(table_message(&regions))
}

/// Returns features that a frontend accepts.
pub(crate) fn any_features(u: &mut Unstructured<'_>) -> Result<u64> {
    let accepted = match u.int_in_range(0..=15)? {
        0..=7 => FEATURES & !LOG_ALL & !(u64::from(u.arbitrary::<bool>()?) << 29),
        8 | 9 => FEATURES & !(u64::from(u.arbitrary::<bool>()?) << 29),
        10 => FEATURES & !LOG_ALL & !(1 << 9),
        11 => FEATURES & !LOG_ALL & !PROTOCOL,
        12 => 0,
        13 => u.arbitrary()?,
        _ => FEATURES & (u.arbitrary::<u64>()? | PROTOCOL),
    };
    Ok(accepted & !RING_PACKED)
}

pub(crate) fn any_protocol(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match u.int_in_range(0..=9)? {
        0..=6 => protocol::ALL,
        7 => u.arbitrary()?,
        _ => u.arbitrary::<u64>()? & protocol::ALL,
    })
}

/// Returns SET_LOG_BASE with a log that mostly covers the guest's memory.
pub(crate) fn any_log(u: &mut Unstructured<'_>) -> Result<AnyMessage> {
    let len = *u.choose(&[16, 16, 16, 64, 4096, 1, 5, 6])?;
    let offset = *u.choose(&[0, 0, 0, 8, 3, u64::MAX])?;
    let log = DirtyLogFile::new(len + if offset > 8 { 0 } else { offset });
    Ok(Message::new(m::SET_LOG_BASE, longs(&[len, offset]), vec![Fd::Log(Rc::new(log))]))
}

/// Returns SET_INFLIGHT_FD with this region.
pub(crate) fn set_region(region: &Rc<InflightFile>) -> AnyMessage {
    let (size, queues) = (region.size, region.queues);
    region_layout(m::SET_INFLIGHT_FD, [size, region.offset], [queues, RING], vec![Fd::Region(Rc::clone(region))])
}

pub(crate) fn region_layout(request: u32, [size, offset]: [u64; 2], shorts: [u16; 2], fds: Vec<Fd>) -> AnyMessage {
    let shorts: Vec<u8> = shorts.iter().flat_map(|value| value.to_ne_bytes()).collect();
    Message::new(request, [longs(&[size, offset]), shorts, vec![0; 4]].concat(), fds)
}

pub(crate) fn any_set_region(u: &mut Unstructured<'_>, region: &Rc<InflightFile>) -> Result<AnyMessage> {
    let mut message = set_region(region);
    match u.int_in_range(0..=11)? {
        0 => message.payload[8] = u.arbitrary()?,
        1 => message.payload[16] = u.int_in_range(0..=3)?,
        2 => message.payload[0] ^= u.arbitrary::<u8>()?,
        3 => message.payload[7] = 0x80,
        4 => {
            let (size, offset) = (region.size - 64 * u64::from(region.queues), *u.choose(&[4_u64, 8, 64])?);
            message.payload[..16].copy_from_slice(&longs(&[size, offset]));
        }
        _ => {}
    }
    Ok(message)
}

/// Returns GET_CONFIG or SET_CONFIG. A write is mostly one of `writeback`.
pub(crate) fn any_config(u: &mut Unstructured<'_>, writeback: bool) -> Result<AnyMessage> {
    if u.ratio(1, 2)? {
        let (offset, size) = match u.int_in_range(0..=5)? {
            0 | 1 => (0, 60),
            2 => (u.int_in_range(0..=300)?, u.int_in_range(0..=300)?),
            3 => (u.int_in_range(0..=4096)?, u.int_in_range(0..=4096)?),
            4 => (4000, 96),
            _ => (u32::MAX, 2),
        };
        let payload = [words(&[offset, size, 0]), vec![0; size.min(4084) as usize]].concat();
        return Ok(Message::new(m::GET_CONFIG, payload, vec![]));
    }
    let at = WRITEBACK as u32;
    let new = u8::from(!writeback);
    let (offset, bytes) = match u.int_in_range(0..=7)? {
        // The byte after it and the number of queues, right or wrong.
        0 => (at, vec![new, 0, 2, 0]),
        1 => (at, vec![new, 0, 2, 1]),
        2 => (at - 1, vec![0, new]),
        3 => (at - 1, vec![1, new]),
        4 => (at, vec![u.arbitrary()?]),
        _ => (at, vec![new]),
    };
    let flags = *u.choose(&[0, 0, 1, 2, 4])?;
    Ok(Message::new(m::SET_CONFIG, [words(&[offset, bytes.len() as u32, flags]), bytes].concat(), vec![]))
}

/// Returns SET_DEVICE_STATE_FD for a save, and the other end of its pipe.
pub(crate) fn save() -> (AnyMessage, OwnedFd) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
    (Message::new(m::SET_DEVICE_STATE_FD, words(&[0, 0]), vec![Fd::PipeIn(Rc::new(write))]), read)
}

/// Returns SET_DEVICE_STATE_FD for a load, and the content of its document; `None` if it is wrong.
pub(crate) fn any_load(u: &mut Unstructured<'_>) -> Result<(AnyMessage, Option<bool>)> {
    let writeback: bool = u.arbitrary()?;
    let bytes = SECTORS * SECTOR as u64;
    let mut text = format!(
        r#"{{"format":"mqblk-device-state","version":1,"device":"virtio-blk","state":{{"writeback":{writeback},"block-bytes":512,"size-bytes":{bytes},"read-only":false}}}}"#
    );
    let mut good = true;
    if u.ratio(1, 3)? {
        good = false;
        text = match u.int_in_range(0..=5)? {
            0 => text.replace("\"version\":1", "\"version\":2"),
            1 => text.replace("virtio-blk", "virtio-scsi"),
            2 => text.replace("\"block-bytes\":512", "\"block-bytes\":4096"),
            3 => text.replace("\"size-bytes\":1", "\"size-bytes\":2"),
            4 => text[..u.int_in_range(0..=text.len() - 1)?].to_owned(),
            _ => text.replace("false}}", "false},\"host\":{}}"),
        };
    }
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
    File::from(write).write_all(text.as_bytes()).expect("it fits");
    let message = Message::new(m::SET_DEVICE_STATE_FD, words(&[1, 0]), vec![Fd::PipeOut(Rc::new(read))]);
    Ok((message, good.then_some(writeback)))
}

/// Returns any other message.
pub(crate) fn any_other(u: &mut Unstructured<'_>) -> Result<AnyMessage> {
    let request = u.int_in_range(0..=46)?;
    Ok(match u.int_in_range(0..=11)? {
        0 | 1 => plain(*u.choose(&[m::SET_OWNER, m::SET_OWNER, m::RESET_OWNER, m::RESET_DEVICE])?),
        2 => number(m::SET_FEATURES, any_features(u)?),
        3 => number(m::SET_PROTOCOL_FEATURES, any_protocol(u)?),
        4 => plain(*u.choose(&[m::GET_FEATURES, m::GET_PROTOCOL_FEATURES])?),
        5 => plain(*u.choose(&[m::GET_QUEUE_NUM, m::GET_MAX_MEM_SLOTS, m::CHECK_DEVICE_STATE])?),
        6 => {
            region_layout(m::GET_INFLIGHT_FD, [0, 0], [u.int_in_range(0..=3)?, *u.choose(&[32, 16, 0, 1024])?], vec![])
        }
        7 => Message::new(m::SET_BACKEND_REQ_FD, vec![], vec![if u.ratio(1, 4)? { event() } else { socket() }]),
        8 => Message::new(m::GPU_SET_SOCKET, vec![], vec![socket()]),
        9 => Message::new(m::SET_LOG_FD, vec![], vec![event()]),
        _ => Message::new(request, vec![0; *u.choose(&[0, 4, 8, 12, 24, 40])?], vec![]),
    })
}

/// Damages a message, most likely.
pub(crate) fn damage(u: &mut Unstructured<'_>, message: &mut AnyMessage) -> Result<()> {
    match u.int_in_range(0..=10)? {
        0 => message.flags = message.flags & !3 | *u.choose(&[0, 2, 3])?,
        // In a CHECK_DEVICE_STATE the `vhost` crate checks nothing else.
        1 if message.request != m::CHECK_DEVICE_STATE => message.flags |= REPLY,
        2 => message.flags |= 1 << u.int_in_range(4..=31)?,
        3 => message.payload.truncate(message.payload.len().saturating_sub(u.int_in_range(1..=8)?)),
        4 => message.payload.extend(vec![0; u.int_in_range(1..=40)?]),
        5 => message.fds.push(u.choose(&[event as fn() -> Fd, null, socket])?()),
        6 => message.fds.clear(),
        7 => message.request = if u.ratio(1, 8)? { u.arbitrary()? } else { u.int_in_range(0..=46)? },
        8 if message.payload.len() >= 8 => {
            let at = u.int_in_range(0..=message.payload.len() / 8 - 1)? * 8;
            let value =
                *u.choose(&[0_u64, 1, 2, 7, 0x100, 0x8001, 1 << 32, u64::MAX - 15, u64::MAX, 0x7000_0000_7fc0])?;
            message.payload[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        }
        9 => {
            let wrong = *u.choose(&[event as fn() -> Fd, null, socket])?;
            message.fds.iter_mut().for_each(|fd| *fd = wrong());
        }
        _ => message.fds = (0..MAX_FDS).map(|_| null()).collect(),
    }
    Ok(())
}

/// Returns the flags with or without a request for an acknowledgement.
pub(crate) fn any_flags(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(if u.ratio(1, 2)? { VERSION | NEED_REPLY } else { VERSION })
}
