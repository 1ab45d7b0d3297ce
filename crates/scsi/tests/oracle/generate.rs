//! Command generator: mostly valid commands, some of which are then damaged.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt};

use crate::model::Model;

pub(crate) struct GeneratedCommand {
    pub cdb: Vec<u8>,
    pub data_in: usize,
    pub data_out: Vec<u8>,
}

/// Operation codes with an LBA and a length.
const EXTENTS: [u8; 20] = [
    0x08, 0x0a, 0x28, 0x2a, 0xa8, 0xaa, 0x88, 0x8a, 0x2e, 0xae, 0x8e, 0x2f, 0xaf, 0x8f, 0x89, 0x8b, 0x41, 0x93, 0x35,
    0x91,
];

fn put(cdb: &mut [u8], at: usize, len: usize, number: u64) {
    cdb[at..at + len].copy_from_slice(&number.to_be_bytes()[8 - len..]);
}

pub(crate) fn generate(random: &mut SmallRng, model: &Model, nexus: usize) -> GeneratedCommand {
    let mut drawn = match random.random_range(0..100) {
        0..78 => data_command(random, model),
        78..84 => unmap(random, model),
        84..87 => mode_select(random, model),
        87..90 => reservation(random, model, nexus),
        90..92 => {
            GeneratedCommand { cdb: vec![0x1b, 0, 0, 0, start_stop(random, model), 0], data_in: 0, data_out: vec![] }
        }
        _ => other_command(random, model),
    };
    if random.random_bool(0.08) {
        damage(random, &mut drawn);
    }
    drawn
}

/// Returns LBA and length, mostly valid: at both ends, across the middle, or out of range.
fn lba_and_count(random: &mut SmallRng, blocks: u64, most: u64) -> (u64, u64) {
    let most = most.min(blocks);
    let count = match random.random_range(0..10) {
        0 => 0,
        1 => 1,
        2 => most,
        3 => random.random_range(1..=most),
        4 => most + 1,
        _ => random.random_range(1..=most.min(9)),
    };
    let lba = match random.random_range(0..20) {
        0 => 0,
        1 | 2 => blocks.saturating_sub(count),
        3 => blocks.saturating_sub(count) + 1,
        4 => random.random_range(0..=u64::MAX),
        5 => blocks,
        _ => random.random_range(0..=blocks.saturating_sub(count)),
    };
    (lba, count)
}

/// Returns bytes with few values, so that comparisons may succeed.
fn content(random: &mut SmallRng, len: usize) -> Vec<u8> {
    match random.random_range(0..4) {
        0 => vec![0; len],
        1 => vec![random.random_range(0..4); len],
        _ => {
            let mut bytes = vec![0; len];
            random.fill_bytes(&mut bytes);
            bytes
        }
    }
}

/// Returns the current content, sometimes with one bit changed.
fn held(random: &mut SmallRng, model: &Model, lba: u64, count: u64) -> Vec<u8> {
    let len = count as usize * model.limits.block;
    let there = lba.checked_add(count).is_some_and(|end| end <= model.blocks());
    let mut bytes = if there { model.bytes[model.range(lba, count)].to_vec() } else { vec![0; len] };
    if !bytes.is_empty() && random.random_bool(0.25) {
        let at = random.random_range(0..bytes.len());
        bytes[at] ^= 1 << random.random_range(0..8);
    }
    bytes
}

fn data_command(random: &mut SmallRng, model: &Model) -> GeneratedCommand {
    let opcode = EXTENTS[random.random_range(0..EXTENTS.len())];
    let most = match opcode {
        0x89 => model.limits.compare,
        0x41 | 0x93 => model.limits.same.min(model.blocks()),
        0x35 | 0x91 => model.blocks(),
        _ => model.limits.transfer,
    };
    let (lba, mut count) = lba_and_count(random, model.blocks(), most);
    let len = [6, 10, 10, 0, 16, 12][usize::from(opcode >> 5)];
    let mut cdb = vec![0; len];
    cdb[0] = opcode;
    // DPO, FUA and reserved bits, group numbers: without effect on validity.
    let flags = [0x10, 0x08, 0x02][random.random_range(0..3)];
    let (lba_at, lba_len, count_at, count_len) = match (opcode, len) {
        (0x89, _) => (2, 8, 13, 1),
        (_, 6) => (1, 3, 4, 1),
        (_, 10) => (2, 4, 7, 2),
        (_, 12) => (2, 4, 6, 4),
        _ => (2, 8, 10, 4),
    };
    count = count.min((1 << (count_len * 8)) - 1);
    let lba_most = if len == 6 { 0x1f_ffff } else { u64::MAX >> (64 - lba_len * 8) };
    put(&mut cdb, lba_at, lba_len, lba.min(lba_most));
    put(&mut cdb, count_at, count_len, count);
    if len == 6 && count == 0 {
        count = 256;
    }
    let block = model.limits.block;
    let bytes = count as usize * block;
    let mut data_out = Vec::new();
    let mut data_in = 0;
    match opcode {
        0x08 | 0x28 | 0xa8 | 0x88 => data_in = bytes,
        0x0a | 0x2a | 0xaa | 0x8a | 0x8b => data_out = content(random, bytes),
        0x2e | 0xae | 0x8e => {
            data_out = content(random, bytes);
            cdb[1] |= [0, 2, 2, 4, 6][random.random_range(0..5)];
        }
        0x2f | 0xaf | 0x8f => {
            let check = [0, 2, 2, 2, 6, 6, 4][random.random_range(0..7)];
            cdb[1] |= check;
            data_out = match check {
                2 => held(random, model, lba, count),
                _ => held(random, model, lba, 1),
            };
        }
        0x89 => {
            data_out = held(random, model, lba, count);
            let new = content(random, bytes);
            data_out.extend(new);
        }
        0x41 | 0x93 => {
            data_out = content(random, block);
            if opcode == 0x93 && random.random_bool(0.4) {
                cdb[1] |= 1;
                data_out.clear();
            }
            if random.random_bool(0.4) {
                cdb[1] |= 8;
            }
        }
        _ => {}
    }
    if len > 6 && matches!(opcode, 0x08..=0x2b | 0x88..=0x8b | 0xa8 | 0xaa) {
        cdb[1] |= flags;
    }
    if len == 10 {
        cdb[6] = random.random_range(0..32);
    }
    GeneratedCommand { cdb, data_in, data_out }
}

fn unmap(random: &mut SmallRng, model: &Model) -> GeneratedCommand {
    let count = [0, 1, 1, 2, 3, 7, 255, 256, 257][random.random_range(0..9)];
    let mut list = vec![0; 8];
    // Many short ones, so that they mostly keep within the maximum of all together.
    let most = if random.random_bool(0.9) { (model.limits.unmap / (count + 1)).min(8) } else { model.limits.unmap };
    for _ in 0..count {
        let (mut lba, mut blocks) = lba_and_count(random, model.blocks(), most.max(1));
        if count > 3 && random.random_bool(0.99) {
            blocks = blocks.min(2);
            lba %= model.blocks() - 2;
        }
        list.extend(lba.to_be_bytes());
        list.extend((blocks as u32).to_be_bytes());
        list.extend([0; 4]);
    }
    let descriptors = count * 16 + if random.random_bool(0.05) { random.random_range(0..40) } else { 0 };
    put(&mut list, 0, 2, descriptors + 6);
    put(&mut list, 2, 2, descriptors);
    let len = list.len() as u64 + if random.random_bool(0.05) { 5 } else { 0 };
    list.resize(len as usize, 0);
    let mut cdb = vec![0; 10];
    cdb[0] = 0x42;
    cdb[6] = random.random_range(0..32);
    put(&mut cdb, 7, 2, len);
    GeneratedCommand { cdb, data_in: 0, data_out: list }
}

fn mode_select(random: &mut SmallRng, model: &Model) -> GeneratedCommand {
    let mut page = if random.random_bool(0.7) {
        let mut page = vec![0; 20];
        page[..2].copy_from_slice(&[0x08, 0x12]);
        // WCE; sometimes RCD, which cannot be changed.
        page[2] = u8::from(random.random_bool(0.5)) << 2 | u8::from(random.random_bool(0.1));
        page
    } else {
        // SWP; cleared more often than set.
        vec![0x0a, 0x0a, 0, 0x10, u8::from(!model.protected && random.random_bool(0.3)) << 3, 0, 0, 0, 0, 0, 0, 0]
    };
    if random.random_bool(0.1) {
        page[1] ^= 1;
    }
    if random.random_bool(0.1) {
        page.truncate(random.random_range(0..page.len()));
    }
    let six = random.random_bool(0.5);
    let mut list = vec![0; if six { 4 } else { 8 }];
    list.extend(page);
    if random.random_bool(0.1) {
        list.truncate(random.random_range(0..8));
    }
    let mut cdb = vec![0; if six { 6 } else { 10 }];
    cdb[..2].copy_from_slice(&[if six { 0x15 } else { 0x55 }, 0x10 | u8::from(random.random_bool(0.05))]);
    if six {
        cdb[4] = list.len() as u8
    } else {
        cdb[8] = list.len() as u8
    }
    GeneratedCommand { cdb, data_in: 0, data_out: list }
}

fn start_stop(random: &mut SmallRng, model: &Model) -> u8 {
    // A stopped logical unit fails most commands: it is started soon.
    match random.random_range(0..10) {
        0 => 0x02,
        1 => 0x10 | random.random_range(0..16) << 4,
        2..4 if !model.stopped => 0,
        4 if !model.stopped => 4,
        _ => 1,
    }
}

fn reservation(random: &mut SmallRng, model: &Model, nexus: usize) -> GeneratedCommand {
    if random.random_bool(0.4) {
        let holds = model.reserved.is_some();
        let release = random.random_bool(if holds { 0.7 } else { 0.2 });
        let opcode = [0x16, 0x56][random.random_range(0..2)] + u8::from(release);
        let flags = if random.random_bool(0.1) { [0x10, 0x01, 0x02][random.random_range(0..3)] } else { 0 };
        let mut cdb = vec![0; if opcode < 0x20 { 6 } else { 10 }];
        cdb[..2].copy_from_slice(&[opcode, flags]);
        return GeneratedCommand { cdb, data_in: 0, data_out: vec![] };
    }
    let action = if model.held.is_some() { [2, 2, 2, 6, 1] } else { [6, 6, 1, 1, 2] }[random.random_range(0..5)];
    let kind = match model.held {
        Some(held) if random.random_bool(0.8) => held.kind,
        _ => [1, 3, 5, 6][random.random_range(0..4)],
    };
    let mut data_out = vec![0; 24];
    data_out[7] = if random.random_bool(0.95) { model.keys[nexus] as u8 } else { 9 };
    data_out[15] = if random.random_bool(0.5) { 0 } else { random.random_range(1..4) };
    GeneratedCommand { cdb: vec![0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], data_in: 0, data_out }
}

/// Commands without blocks, and unsupported ones.
fn other_command(random: &mut SmallRng, model: &Model) -> GeneratedCommand {
    let mut cdb = vec![0; 16];
    let data_in = [8, 8, 32, 32, 255][random.random_range(0..5)];
    match random.random_range(0..8) {
        0..2 => cdb.truncate(6),
        2..4 => {
            cdb.truncate(10);
            cdb[0] = 0x25;
            if random.random_bool(0.2) {
                cdb[5] = 1;
                cdb[8] = random.random_range(0..2);
            }
        }
        4..7 => {
            cdb[..2].copy_from_slice(&[0x9e, 0x10]);
            cdb[13] = [0, 8, 12, 32, 32, 64][random.random_range(0..6)];
            if random.random_bool(0.1) {
                cdb[1] = [0x11, 0x13, 0x1f, 0x00][random.random_range(0..4)];
            } else if random.random_bool(0.3) {
                cdb[1] = 0x12;
                let lba = lba_and_count(random, model.blocks(), 9).0;
                put(&mut cdb, 2, 8, lba);
            }
        }
        _ => cdb[0] = [0x04, 0x07, 0x36, 0x3e, 0x50, 0x90, 0x9f, 0xc0, 0xff, 0x7f, 0x60][random.random_range(0..11)],
    }
    GeneratedCommand { cdb, data_in, data_out: vec![] }
}

/// Damages a command, or makes its buffers too short or too long.
fn damage(random: &mut SmallRng, drawn: &mut GeneratedCommand) {
    let control = drawn.cdb.len() - 1;
    match random.random_range(0..7) {
        0 => drawn.cdb[control] |= 0x04,
        // Obsolete and vendor specific bits of CONTROL.
        1 => drawn.cdb[control] |= 0xc1,
        2 if drawn.cdb.len() > 6 && EXTENTS.contains(&drawn.cdb[0]) => drawn.cdb[1] |= 1 << random.random_range(5..8),
        3 => {
            drawn.data_in += 100;
            drawn.data_out.resize(drawn.data_out.len() + 100, 0x55);
        }
        // A truncated CDB: missing bytes are zero.
        4 => drawn.cdb.truncate(random.random_range(1..=control)),
        // PERSISTENT RESERVE OUT with a truncated list has its own tests.
        _ if drawn.cdb[0] == 0x5f => {}
        _ => {
            drawn.data_in = drawn.data_in.saturating_sub(1);
            drawn.data_out.pop();
        }
    }
}
