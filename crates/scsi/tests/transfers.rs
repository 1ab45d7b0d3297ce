//! READ, WRITE and SYNCHRONIZE CACHE, by SBC-3 clause 5.

mod rig;

use mqblk_core::{BlockSize, ByteLen, Geometry, Op, Outcome};
use mqblk_scsi::{CommandCompletion, Sense, SenseKey};
use rig::*;

const WRITE: Op = Op::Write { fua: false };
const WRITE_FUA: Op = Op::Write { fua: true };

#[test]
fn reads_of_every_length() {
    let rig = Rig::new();
    let disk = rig.disk.borrow().clone();
    let six = [0x08, 0, 0, 5, 2, 0];
    let cases: &[(&[u8], u64, usize)] = &[
        (&six, 5, 2),
        // 0 means 256.
        (&[0x08, 0, 1, 0, 0, 0], 256, 256),
        (&[0x08, 0xe0, 0, 1, 1, 0], 1, 1),
        (&ten(0x28, 0, 5, 2), 5, 2),
        (&ten(0x28, 0x18, 2047, 1), 2047, 1),
        (&ten(0x28, 0, 7, 0), 7, 0),
        (&twelve(0xa8, 0x08, 5, 2), 5, 2),
        (&sixteen(0x88, 0x10, 0, TRANSFER), 0, TRANSFER as usize),
        (&sixteen(0x88, 0, BLOCKS, 0), 0, 0),
    ];
    for (cdb, lba, count) in cases {
        let start = *lba as usize * BLOCK;
        // One byte too few is an overrun, one too many a residual.
        assert_eq!(rig.reads(cdb, count * BLOCK + 1), disk[start..][..count * BLOCK], "{cdb:02x?}");
        assert_eq!(rig.reads(cdb, count * BLOCK).len(), count * BLOCK);
        if *count > 0 {
            assert_eq!(rig.run(cdb, &[], count * BLOCK - 1), RunResult::Overrun);
        }
    }
}

#[test]
fn writes_of_every_length() {
    let rig = Rig::new();
    let data: Vec<u8> = (0..TRANSFER as usize * BLOCK).map(|at| (at * 31) as u8).collect();
    let cases: &[(&[u8], usize, usize, Op)] = &[
        (&[0x0a, 0, 0, 5, 2, 0], 5, 2, WRITE),
        (&[0x0a, 0, 1, 0, 0, 0], 256, 256, WRITE),
        (&ten(0x2a, 0, 9, 3), 9, 3, WRITE),
        (&ten(0x2a, 0x18, 2047, 1), 2047, 1, WRITE_FUA),
        (&ten(0x2a, 0, 0, 0), 0, 0, WRITE),
        (&twelve(0xaa, 0x10, 5, 2), 5, 2, WRITE),
        (&twelve(0xaa, 0x08, 5, 2), 5, 2, WRITE_FUA),
        (&sixteen(0x8a, 0x08, 1, TRANSFER), 1, TRANSFER as usize, WRITE_FUA),
    ];
    for (cdb, lba, count, op) in cases {
        rig.take_requests();
        rig.writes(cdb, &data, count * BLOCK);
        assert_eq!(rig.disk.borrow()[lba * BLOCK..][..count * BLOCK], data[..count * BLOCK], "{cdb:02x?}");
        let asked = rig.take_requests();
        if *count == 0 {
            assert!(asked.is_empty());
        } else {
            assert_eq!(asked, [(*op, (lba * BLOCK) as u64, (count * BLOCK) as u64)], "{cdb:02x?}");
            assert_eq!(rig.run(cdb, &data[..count * BLOCK - 1], 0), RunResult::Overrun);
        }
    }
}

#[test]
fn transfer_errors() {
    let rig = Rig::new();
    let cases: &[(&[u8], Sense)] = &[
        // Beyond the end, also by overflow.
        (&[0x08, 0, 7, 0xff, 2, 0], Sense::LBA_OUT_OF_RANGE),
        (&[0x0a, 0x1f, 0xff, 0xff, 1, 0], Sense::LBA_OUT_OF_RANGE),
        (&ten(0x28, 0, 2047, 2), Sense::LBA_OUT_OF_RANGE),
        (&ten(0x2a, 0, u32::MAX, 1), Sense::LBA_OUT_OF_RANGE),
        (&ten(0x28, 0, 2049, 0), Sense::LBA_OUT_OF_RANGE),
        (&twelve(0xa8, 0, 2048, 1), Sense::LBA_OUT_OF_RANGE),
        (&sixteen(0x88, 0, u64::MAX, 2), Sense::LBA_OUT_OF_RANGE),
        (&sixteen(0x8a, 0, u64::MAX / 512, 1), Sense::LBA_OUT_OF_RANGE),
        // Longer than the maximum transfer length.
        (&ten(0x28, 0, 0, 513), in_command(7, None)),
        (&ten(0x2a, 0, 0, u16::MAX), in_command(7, None)),
        (&twelve(0xa8, 0, 0, 513), in_command(6, None)),
        (&twelve(0xaa, 0, 0, 1 << 31), in_command(6, None)),
        (&sixteen(0x88, 0, 0, 513), in_command(10, None)),
        (&sixteen(0x8a, 0, 0, u32::MAX), in_command(10, None)),
        // Protection information.
        (&ten(0x28, 0x20, 0, 1), in_command(1, 7)),
        (&ten(0x2a, 0xe0, 0, 1), in_command(1, 7)),
        (&twelve(0xa8, 0x40, 0, 1), in_command(1, 7)),
        (&twelve(0xaa, 0x80, 0, 1), in_command(1, 7)),
        (&sixteen(0x88, 0x20, 0, 1), in_command(1, 7)),
        (&sixteen(0x8a, 0x20, 0, 1), in_command(1, 7)),
        // NACA.
        (&[0x08, 0, 0, 0, 1, 4], in_command(5, 2)),
        (&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 4], in_command(9, 2)),
        (&[0xa8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4], in_command(11, 2)),
        (&[0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 4], in_command(15, 2)),
    ];
    for (cdb, sense) in cases {
        rig.take_requests();
        rig.expect(cdb, *sense);
        assert!(rig.take_requests().is_empty());
    }
}

#[test]
fn a_short_cdb_is_zero_padded() {
    let rig = Rig::new();
    // LBA 1 and no length.
    assert!(rig.reads(&[0x28, 0, 0, 0, 0, 1], 512).is_empty());
    assert_eq!(rig.run(&[], &[], 0), RunResult::Ended { ending: CommandCompletion::good(0), data: Vec::new() });
}

#[test]
fn disk_errors_are_reported() {
    let rig = Rig::new();
    let table = [
        (EIO, sense(SenseKey::MediumError, 0x11, 0), sense(SenseKey::MediumError, 0x0c, 0)),
        (Outcome::OutOfRange, Sense::LBA_OUT_OF_RANGE, Sense::LBA_OUT_OF_RANGE),
        (Outcome::NoSpace, sense(SenseKey::DataProtect, 0x27, 7), sense(SenseKey::DataProtect, 0x27, 7)),
    ];
    for (outcome, read, write) in table {
        rig.fail_from(0, outcome);
        rig.expect(&ten(0x28, 0, 0, 1), read);
        rig.expect(&ten(0x2a, 0, 0, 1), write);
        rig.expect(&ten(0x35, 0, 0, 0), if outcome == EIO { write } else { read });
    }
}

#[test]
fn a_read_only_unit() {
    let rig = Rig::of(Geometry { read_only: true, ..geometry() }, limits());
    assert_eq!(rig.reads(&ten(0x28, 0, 0, 1), 512).len(), 512);
    rig.writes(&ten(0x35, 0, 0, 0), &[], 0);
    let writes: &[&[u8]] = &[
        &[0x0a, 0, 0, 0, 1, 0],
        &ten(0x2a, 0, 0, 1),
        &twelve(0xaa, 0, 0, 1),
        &sixteen(0x8a, 0, 0, 1),
        &ten(0x2e, 0, 0, 1),
        &twelve(0xae, 0, 0, 1),
        &sixteen(0x8e, 0, 0, 1),
        &ten(0x41, 0, 0, 1),
        &sixteen(0x93, 0, 0, 1),
        &sixteen(0x89, 0, 0, 0),
        &sixteen(0x8b, 0, 0, 1),
    ];
    for cdb in writes {
        rig.expect(cdb, Sense::WRITE_PROTECTED);
    }
    // UNMAP is not supported on a read-only disk.
    rig.expect(&ten(0x42, 0, 0, 24), Sense::INVALID_OPCODE);
}

#[test]
fn blocks_of_4096_bytes() {
    let big = Geometry { logical_block: BlockSize::B4096, alignment_offset: 0, ..geometry() };
    let rig = Rig::of(big, limits());
    let disk = rig.disk.borrow().clone();
    assert_eq!(rig.reads(&ten(0x28, 0, 255, 1), 4096), disk[255 * 4096..]);
    rig.expect(&ten(0x28, 0, 256, 1), Sense::LBA_OUT_OF_RANGE);
    // 256 KiB at once, so 64 blocks.
    assert_eq!(rig.reads(&ten(0x28, 0, 0, 64), 1 << 18).len(), 1 << 18);
    rig.expect(&ten(0x28, 0, 0, 65), in_command(7, None));
}

#[test]
fn a_partial_last_block_is_ignored() {
    let odd = Geometry { size: ByteLen(10 * 512 + 100), ..geometry() };
    let rig = Rig::of(odd, limits());
    assert_eq!(rig.reads(&ten(0x28, 0, 9, 1), 512).len(), 512);
    rig.expect(&ten(0x28, 0, 10, 1), Sense::LBA_OUT_OF_RANGE);
}

#[test]
fn synchronize_cache() {
    let rig = Rig::new();
    let good: &[&[u8]] =
        &[&ten(0x35, 0, 0, 0), &ten(0x35, 0x02, 5, 10), &sixteen(0x91, 0, 2047, 1), &sixteen(0x91, 0x02, 0, 2048)];
    for cdb in good {
        rig.take_requests();
        rig.writes(cdb, &[], 0);
        assert_eq!(rig.take_requests(), [(Op::Flush, 0, 0)], "{cdb:02x?}");
    }
    rig.expect(&ten(0x35, 0, 2048, 1), Sense::LBA_OUT_OF_RANGE);
    rig.expect(&sixteen(0x91, 0, 1, 2048), Sense::LBA_OUT_OF_RANGE);
}
