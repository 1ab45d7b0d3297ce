//! Commands of the model. Sources: virtio 1.3 section 5.6.6.1, SPC-4, SBC-3.

use std::sync::atomic::Ordering;

use super::{Buffers, ModelDisk, ModelState, ScsiFault, lock};
use crate::model::RequestOutcome;
use crate::virtio_scsi::wire::LunAddress;

/// A command's response and its data.
struct ModelResponse {
    response: u8,
    status: u8,
    sense: Vec<u8>,
    sense_len: Option<u32>,
    residual: Option<u32>,
    data: Vec<u8>,
}

impl ModelResponse {
    fn good(data: Vec<u8>) -> ModelResponse {
        ModelResponse { response: 0, status: 0, sense: vec![], sense_len: None, residual: None, data }
    }

    fn response(response: u8) -> ModelResponse {
        ModelResponse { response, ..ModelResponse::good(vec![]) }
    }

    fn check_condition(key: u8, asc: u8, ascq: u8) -> ModelResponse {
        let sense = vec![0x70, 0, key, 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq, 0, 0, 0, 0];
        ModelResponse { status: 2, sense, ..ModelResponse::good(vec![]) }
    }
}

/// Bytes of a command's header, and of its response before the data.
const HEADER_BYTES: usize = 51;
const RESPONSE_BYTES: usize = 108;

impl ModelState {
    /// Executes a command of request queue `queue`.
    pub(super) fn command(&self, buffers: &Buffers<'_>, queue: usize) -> RequestOutcome {
        assert!(
            buffers.readable.len() >= HEADER_BYTES && buffers.writable_bytes() >= RESPONSE_BYTES,
            "framing of a command"
        );
        let (header, out) = buffers.readable.split_at(HEADER_BYTES);
        let tag = u64::from_le_bytes(std::array::from_fn(|at| header[8 + at]));
        let (cdb, data_in_len) = (&header[19..], buffers.writable_bytes() - RESPONSE_BYTES);
        assert!(out.is_empty() || data_in_len == 0, "data in both directions");
        let transfer = matches!(cdb[0], 0x28 | 0x2a | 0x88 | 0x8a);
        let count = self.transfers.load(Ordering::Relaxed);
        let fault = if transfer { self.behaviour.fault } else { ScsiFault::None };
        let mut tasks = lock(&self.tasks);
        match fault {
            ScsiFault::DisconnectAfter(n) if count >= n => return RequestOutcome::Disconnect,
            ScsiFault::StallAfter(n) if count >= n => return RequestOutcome::Hold,
            ScsiFault::HoldFrom(n) if count >= n && !tasks.aborting.contains(&tag) => {
                tasks.held.insert(tag);
                return RequestOutcome::Hold;
            }
            _ => {}
        }
        let aborted = tasks.held.remove(&tag);
        drop(tasks);
        self.commands.fetch_add(1, Ordering::Relaxed);
        if transfer {
            self.transfers.fetch_add(1, Ordering::Relaxed);
            self.per_queue[queue].fetch_add(1, Ordering::Relaxed);
        }
        let mut response = match aborted {
            true => ModelResponse::response(2),
            false => self.execute(header, cdb, out, fault, count),
        };
        match fault {
            ScsiFault::FailFrom(n) if count >= n => response = ModelResponse::check_condition(3, 0x11, 0),
            ScsiFault::StatusFrom(n, status) if count >= n => response.status = status,
            ScsiFault::ResponseFrom(n, code) if count >= n => response.response = code,
            ScsiFault::SenseFrom(n, len) if count >= n => {
                response = ModelResponse { sense_len: Some(len), ..ModelResponse::check_condition(3, 0x11, 0) };
            }
            ScsiFault::ResidualFrom(n, residual) if count >= n => response.residual = Some(residual),
            _ => {}
        }
        let silent = matches!(fault, ScsiFault::NoResponseFrom(n) if count >= n);
        let written = write(buffers, &response, out.len(), silent);
        match fault {
            ScsiFault::WrongIdAt(n) if count == n => RequestOutcome::CompleteWrongId(written),
            _ => RequestOutcome::Complete(written),
        }
    }

    fn execute(&self, header: &[u8], cdb: &[u8], out: &[u8], fault: ScsiFault, count: u64) -> ModelResponse {
        let Some(at) = LunAddress::from_bytes(std::array::from_fn(|index| header[index])) else {
            return ModelResponse::response(3);
        };
        let mut disks = lock(&self.disks);
        let luns: Vec<LunAddress> = disks.keys().filter(|unit| unit.target == at.target).copied().collect();
        if cdb[0] == 0xa0 && !luns.is_empty() {
            let mut data = (8 * luns.len() as u32).to_be_bytes().to_vec();
            data.extend([0; 4]);
            luns.iter().for_each(|unit| data.extend([0x40 | (unit.lun >> 8) as u8, unit.lun as u8, 0, 0, 0, 0, 0, 0]));
            let allocation_length = u32::from_be_bytes(std::array::from_fn(|index| cdb[6 + index]));
            data.truncate(allocation_length as usize);
            return ModelResponse::good(data);
        }
        let Some(disk) = disks.get_mut(&at) else { return ModelResponse::response(3) };
        // INQUIRY is executed even if a unit attention is pending.
        if disk.unit_attentions > 0 && cdb[0] != 0x12 {
            disk.unit_attentions -= 1;
            return ModelResponse::check_condition(6, 0x29, 0);
        }
        let flip = u8::from(matches!(fault, ScsiFault::CorruptFrom(n) if count >= n));
        execute_on_disk(disk, at, cdb, out, flip)
    }
}

/// Writes a response. Returns the bytes written.
fn write(buffers: &Buffers<'_>, response: &ModelResponse, out: usize, silent: bool) -> u32 {
    let transferred = buffers.write(RESPONSE_BYTES, &response.data);
    let rest = if out == 0 { buffers.writable_bytes() - RESPONSE_BYTES - transferred } else { 0 };
    let residual = response.residual.unwrap_or(if response.status == 0 { rest as u32 } else { 0 });
    let sense_len = response.sense_len.unwrap_or(response.sense.len() as u32);
    let mut head = sense_len.to_le_bytes().to_vec();
    head.extend(residual.to_le_bytes());
    head.extend([0, 0, response.status, response.response]);
    head.extend(&response.sense);
    if silent {
        return 0;
    }
    (buffers.write(0, &head) + transferred) as u32
}

/// Executes a command of an existing logical unit.
fn execute_on_disk(disk: &mut ModelDisk, at: LunAddress, cdb: &[u8], out: &[u8], flip: u8) -> ModelResponse {
    let short = |from: usize| u16::from_be_bytes([cdb[from], cdb[from + 1]]);
    let word = |from: usize| u32::from_be_bytes(std::array::from_fn(|index| cdb[from + index]));
    let quad = |from: usize| u64::from_be_bytes(std::array::from_fn(|index| cdb[from + index]));
    let cut = |mut data: Vec<u8>, len: usize| {
        data.truncate(len);
        ModelResponse::good(data)
    };
    let size = disk.block_size;
    let blocks = (disk.bytes.len() / size) as u64;
    // Converts first block and count to a range of bytes.
    let range = |start: u64, count: u64| {
        let end = start.checked_add(count).filter(|end| *end <= blocks)?;
        Some(start as usize * size..end as usize * size)
    };
    let beyond = || ModelResponse::check_condition(5, 0x21, 0);
    match cdb[0] {
        0x00 => ModelResponse::good(vec![]),
        0x12 => cut(inquiry(at, cdb), short(3).into()),
        0x1a => cut(vec![23, 0, u8::from(disk.read_only) << 7, 0, 8, 18, 4], cdb[4].into()),
        0x9e if cdb[1] == 0x10 => {
            let mut data = (blocks - 1).to_be_bytes().to_vec();
            data.extend((size as u32).to_be_bytes());
            data.extend([0, 3, 0xc0, 0]);
            data.resize(32, 0);
            cut(data, word(10) as usize)
        }
        0x28 | 0x88 => {
            let (start, count) =
                if cdb[0] == 0x28 { (word(2).into(), short(7).into()) } else { (quad(2), word(10).into()) };
            range(start, count).map_or_else(beyond, |range| ModelResponse::good(disk.bytes[range].to_vec()))
        }
        0x2a | 0x8a => {
            let (start, count) =
                if cdb[0] == 0x2a { (word(2).into(), short(7).into()) } else { (quad(2), word(10).into()) };
            let Some(range) = range(start, count) else { return beyond() };
            assert_eq!(range.len(), out.len(), "a write's data");
            disk.bytes[range.clone()].copy_from_slice(out);
            disk.bytes[range.start] ^= flip;
            ModelResponse::good(vec![])
        }
        0x35 => ModelResponse::good(vec![]),
        0x42 => {
            assert_eq!(usize::from(short(7)), out.len(), "an UNMAP's list");
            for extent in out[8..].chunks_exact(16) {
                let start = u64::from_be_bytes(std::array::from_fn(|index| extent[index]));
                let count = u32::from_be_bytes(std::array::from_fn(|index| extent[8 + index]));
                let Some(range) = range(start, count.into()) else { return beyond() };
                disk.bytes[range].fill(0);
            }
            ModelResponse::good(vec![])
        }
        0x93 => {
            let Some(range) = range(quad(2), word(10).into()) else { return beyond() };
            disk.bytes[range].chunks_exact_mut(size).for_each(|block| block.copy_from_slice(out));
            ModelResponse::good(vec![])
        }
        _ => ModelResponse::check_condition(5, 0x20, 0),
    }
}

fn inquiry(at: LunAddress, cdb: &[u8]) -> Vec<u8> {
    let page = |page: u8, body: &[u8]| {
        let mut data = vec![0, page, 0, body.len() as u8];
        data.extend(body);
        data
    };
    match (cdb[1] & 1, cdb[2]) {
        (0, _) => {
            let mut data = vec![0, 0, 6, 2, 31, 0, 0, 2];
            data.extend(b"MQBLK   model           1   ");
            data
        }
        (_, 0x00) => page(0, &[0, 0x80, 0x83, 0xb0]),
        (_, 0x80) => page(0x80, at.to_string().as_bytes()),
        (_, 0x83) => page(0x83, &[2, 1, 0, 5, b'm', b'o', b'd', b'e', b'l']),
        (_, 0xb0) => {
            let mut body = [0; 60];
            // Largest transfer 2048 blocks, unmap 4096 blocks in 8 extents.
            (body[6], body[18], body[23]) = (8, 16, 8);
            page(0xb0, &body)
        }
        (_, page) => unreachable!("page {page:#x} is not listed"),
    }
}
