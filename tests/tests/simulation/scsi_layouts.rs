//! Chains of SCSI commands in every layout and of every content. The effect of a command does not depend on the layout
//! of its bytes in descriptors, and any bytes of a guest lead to one completion, inside the chain.

use std::sync::Arc;

use mqblk_core::settings::Settings;
use mqblk_engine::{AnyDisk, PlugOptions};
use mqblk_tests::stepped_scsi::{CommandData, SteppedController};
use mqblk_virtio_scsi::LunAddress;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const BLOCK: usize = 512;
const HEADER: usize = 51;
const ANSWER: usize = 108;
const PLACE: LunAddress = LunAddress { target: 2, lun: 5 };
/// Descriptors of one chain: the ring has 64.
const PIECES: usize = 24;

fn controller() -> SteppedController {
    let mut settings = Settings::new("disk");
    settings.insert("size", "256K").unwrap();
    let disk: Arc<AnyDisk> = mqblk_storage::open("ram", &mut settings).unwrap();
    let mut controller = SteppedController::new(1, 1, &[(PLACE, disk, PlugOptions::default())]);
    controller.clear_unit_attentions(&[PLACE]);
    controller
}

/// Cuts `len` bytes at random positions into at most `most` segments, none of them empty.
fn cuts(random: &mut SmallRng, len: usize, most: usize) -> Vec<usize> {
    let mut at: Vec<usize> = (0..random.random_range(0..most)).map(|_| random.random_range(0..=len)).collect();
    at.extend([0, len]);
    at.sort_unstable();
    at.dedup();
    at.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn raw(controller: &mut SteppedController, random: &mut SmallRng, readable: &[u8], writable: usize) -> (Vec<u8>, u32) {
    let mut left = readable;
    let pieces: Vec<&[u8]> = cuts(random, readable.len(), PIECES)
        .into_iter()
        .map(|len| {
            let (piece, rest) = left.split_at(len);
            left = rest;
            piece
        })
        .collect();
    let room: Vec<u32> = cuts(random, writable, PIECES).into_iter().map(|len| len as u32).collect();
    controller.run_chain(0, &pieces, &room)
}

fn header(lun: [u8; 8], cdb: &[u8]) -> Vec<u8> {
    let mut header = vec![0; HEADER];
    header[..8].copy_from_slice(&lun);
    header[19..19 + cdb.len()].copy_from_slice(cdb);
    header
}

/// The last descriptor of the header has as many bytes as a header of the default size.
#[test]
fn a_long_header_may_end_in_a_descriptor_of_the_default_size() {
    let mut settings = Settings::new("disk");
    settings.insert("size", "256K").unwrap();
    let disk: Arc<AnyDisk> = mqblk_storage::open("ram", &mut settings).unwrap();
    for first in [1, 34, 100] {
        let disks = [(PLACE, Arc::clone(&disk), PlugOptions::default())];
        let mut controller = SteppedController::with_cdb_size(1, 1, &disks, (first + HEADER - 19) as u32);
        // INQUIRY, of 36 bytes.
        let mut bytes = header(PLACE.encode(), &[0x12, 0, 0, 0, 36, 0]);
        bytes.resize(first + HEADER, 0);
        let (start, end) = bytes.split_at(first);
        let (written, used) = controller.run_chain(0, &[start, end], &[ANSWER as u32, 36]);
        assert_eq!((written[10], written[11], used as usize), (0, 0, ANSWER + 36), "{first} bytes before it");
    }
}

#[test]
fn a_command_has_the_same_effect_in_every_layout() {
    let mut random = SmallRng::seed_from_u64(1);
    let mut controller = controller();
    for round in 0..1000_u32 {
        let blocks = random.random_range(1..=8_u8);
        let lba = random.random_range(0..500_u16);
        let [high, low] = lba.to_be_bytes();
        let data: Vec<u8> = (0..usize::from(blocks) * BLOCK).map(|_| random.random()).collect();
        let write = [0x2a, 0, 0, 0, high, low, 0, 0, blocks, 0];
        let mut chain = header(PLACE.encode(), &write);
        chain.extend(&data);
        let (response, written) = raw(&mut controller, &mut random, &chain, ANSWER);
        assert_eq!((&response[..12], written), (&[0; 12][..], ANSWER as u32), "round {round}");
        // Sometimes read back with a larger buffer than needed.
        let more = if random.random_ratio(1, 3) { random.random_range(1..3000) } else { 0 };
        let read = [0x28, 0, 0, 0, high, low, 0, 0, blocks, 0];
        let (response, written) =
            raw(&mut controller, &mut random, &header(PLACE.encode(), &read), ANSWER + data.len() + more);
        let residual = (more as u32).to_le_bytes();
        assert_eq!((&response[..4], &response[4..8], &response[8..12]), (&[0; 4][..], &residual[..], &[0; 4][..]));
        assert_eq!(written as usize, ANSWER + data.len());
        assert_eq!(response[ANSWER..ANSWER + data.len()], data, "round {round}");
        // Sense data, and a response without the disk.
        let (response, _) = raw(&mut controller, &mut random, &header(PLACE.encode(), &[0xff; 16]), ANSWER);
        assert_eq!((response[0], response[10], response[12], response[14] & 0xf, response[24]), (18, 2, 0x70, 5, 0x20));
        let inquiry = [0x12, 0, 0, 0, 36, 0];
        let (response, _) = raw(&mut controller, &mut random, &header(PLACE.encode(), &inquiry), ANSWER + 36);
        assert_eq!(response[ANSWER + 8..ANSWER + 13], *b"MQBLK");
    }
}

#[test]
fn any_bytes_of_a_guest_lead_to_one_completion() {
    let seeds = std::env::var("MQBLK_LAYOUT_SEEDS").map_or(20, |text| text.parse::<u64>().expect("a number"));
    let mut kinds = [0_u32; 256];
    let mut unanswered = 0;
    for seed in 0..seeds {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut controller = controller();
        for _ in 0..1000 {
            let mut bytes: Vec<u8> = (0..random.random_range(0..200)).map(|_| random.random()).collect();
            if random.random_ratio(7, 8) && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(&PLACE.encode());
            }
            let writable = random.random_range(0..400);
            if bytes.is_empty() && writable == 0 {
                continue;
            }
            let (response, written) = raw(&mut controller, &mut random, &bytes, writable);
            assert!(written as usize <= writable, "seed {seed}");
            match response.get(11) {
                Some(response) if written > 0 => kinds[usize::from(*response)] += 1,
                _ => unanswered += 1,
            }
            assert_eq!(written == 0, writable < 12, "seed {seed}: an answer if there is room");
        }
        // The queue still works. The bytes may have included PERSISTENT RESERVE OUT and the like, so a command that
        // always succeeds is sent.
        let inquiry = controller.run_command(PLACE, &[0x12, 0, 0, 0, 36, 0], CommandData::In(36));
        assert_eq!((inquiry.response, inquiry.status), (0, 0));
    }
    let seen: Vec<_> = kinds.into_iter().enumerate().filter(|(_, count)| *count > 0).collect();
    // OK (with a status), OVERRUN, BAD TARGET, FAILURE; and chains without space for a response.
    assert!(unanswered > 0 && [0, 3, 9].iter().all(|kind| kinds[*kind] > 0), "{seen:?}");
    assert!(seen.iter().all(|(kind, _)| [0, 1, 3, 9].contains(kind)), "{seen:?}");
}

#[test]
fn any_request_on_the_control_queue_is_completed() {
    let mut random = SmallRng::seed_from_u64(7);
    let mut controller = controller();
    let mut kinds = [0_u32; 256];
    for round in 0..3000_u64 {
        let len = if random.random_ratio(3, 4) { 24 } else { random.random_range(1..40) };
        let mut request: Vec<u8> = (0..len).map(|_| random.random()).collect();
        // Mostly of a known type and subtype, and for the existing unit.
        for (at, most) in [(0, 3_u32), (4, 9)] {
            if request.len() >= at + 4 && random.random_ratio(7, 8) {
                request[at..at + 4].copy_from_slice(&random.random_range(0..most).to_le_bytes());
            }
        }
        let lun = if request[0] == 0 { 8 } else { 4 };
        if request.len() >= lun + 8 && random.random_ratio(3, 4) {
            let lun_there = if random.random_ratio(7, 8) { PLACE.lun } else { 1 };
            request[lun..lun + 8].copy_from_slice(&LunAddress { lun: lun_there, ..PLACE }.encode());
        }
        // Sometimes with a matching command in flight.
        let command = random.random_ratio(1, 4) && controller.free_slots(0) > 0;
        if command {
            controller.submit(0, PLACE, round, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], CommandData::In(BLOCK));
        }
        controller.submit_control(round, &request, random.random_range(1..9));
        let (id, response) = controller.run_until(|controller| controller.reap_control().pop());
        assert_eq!(id, round);
        kinds[usize::from(response[0])] += 1;
        if command {
            controller.run_until(|controller| controller.reap(0).pop());
        }
    }
    // COMPLETE, BAD TARGET, REJECTED, INCORRECT LUN.
    let seen: Vec<_> = kinds.into_iter().enumerate().filter(|(_, count)| *count > 0).collect();
    assert!([0, 3, 11, 12].iter().all(|kind| kinds[*kind] > 0) && kinds[0xff] == 0, "{seen:?}");
    controller.clear_unit_attentions(&[PLACE]);
}
