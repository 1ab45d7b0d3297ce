//! UNMAP, WRITE SAME, VERIFY, WRITE AND VERIFY, COMPARE AND WRITE and ORWRITE, by SBC-3 clause 5.

mod rig;

use mqblk_core::{Limits, Op};
use mqblk_scsi::{Command, CommandAction, CommandBuffers, Sense, SenseKey};
use rig::*;

const READ_ERROR: Sense = Sense::new(SenseKey::MediumError, 0x11, 0);
const WRITE_ERROR: Sense = Sense::new(SenseKey::MediumError, 0x0c, 0);
const UNMAPPED: Op = Op::WriteZeroes { may_unmap: true, fua: false };
const ZEROED: Op = Op::WriteZeroes { may_unmap: false, fua: false };

fn unmap_list(descriptors: &[(u64, u32)]) -> Vec<u8> {
    let len = descriptors.len() as u16 * 16;
    let mut list = [(len + 6).to_be_bytes(), len.to_be_bytes(), [0; 2], [0; 2]].concat();
    for (lba, count) in descriptors {
        list.extend(lba.to_be_bytes());
        list.extend(count.to_be_bytes());
        list.extend([0; 4]);
    }
    list
}

fn unmap(len: usize) -> [u8; 10] {
    ten(0x42, 0, 0, len as u16)
}

#[test]
fn unmap_ranges() {
    let rig = Rig::new();
    let list = unmap_list(&[(10, 4), (2000, 0), (100, 60)]);
    rig.writes(&unmap(list.len()), &list, list.len());
    assert_eq!(rig.take_requests()[..], [(UNMAPPED, 5120, 2048), (UNMAPPED, 51200, 30720)]);
    assert!(rig.disk.borrow()[5120..7168].iter().all(|byte| *byte == 0));
    // Nothing to do.
    for list in [vec![], unmap_list(&[]), unmap_list(&[(5000, 0)])] {
        rig.writes(&unmap(list.len()), &list, list.len());
    }
    // A truncated descriptor is ignored.
    let mut cut = unmap_list(&[(10, 4), (20, 4)]);
    cut[3] = 31;
    rig.writes(&unmap(cut.len()), &cut, cut.len());
    assert_eq!(rig.take_requests(), [(UNMAPPED, 5120, 2048)]);
    // The maximum number.
    let many: Vec<_> = (0..256).map(|index| (index, u32::from(index < 64))).collect();
    let many = unmap_list(&many);
    rig.writes(&unmap(many.len()), &many, many.len());
    assert_eq!(rig.take_requests().len(), 64);
    assert_eq!(rig.run(&unmap(24), &unmap_list(&[(1, 1)])[..23], 0), RunResult::Overrun);
}

#[test]
fn unmap_errors() {
    let rig = Rig::new();
    let short = Sense::PARAMETER_LIST_LENGTH.with_cdb_field(7, None);
    let good = unmap_list(&[(10, 4)]);
    let with = |at: usize, byte: u8| {
        let mut list = good.clone();
        list[at] = byte;
        list
    };
    let too_many = unmap_list(&vec![(0, 0); 257]);
    let cases = [
        (unmap(24), good[..].to_vec(), None),
        (unmap(7), good.clone(), Some(short)),
        (unmap(23), good.clone(), Some(short)),
        (unmap(24), with(1, 23), Some(short)),
        (unmap(24), with(0, 1), Some(short)),
        (unmap(24), with(3, 17), Some(short)),
        (unmap(too_many.len()), too_many, Some(in_parameters(2, None))),
        (unmap(24), unmap_list(&[(0, 65)]), Some(in_parameters(16, None))),
        (unmap(40), unmap_list(&[(0, 64), (64, 1)]), Some(in_parameters(32, None))),
        (unmap(24), unmap_list(&[(2047, 2)]), Some(Sense::LBA_OUT_OF_RANGE)),
        (unmap(40), unmap_list(&[(1, 1), (u64::MAX, 1)]), Some(Sense::LBA_OUT_OF_RANGE)),
        (ten(0x42, 1, 0, 24), good.clone(), Some(in_command(1, 0))),
    ];
    for (cdb, list, sense) in cases {
        rig.take_requests();
        match sense {
            Some(sense) => {
                rig.expect_with(&cdb, &list, sense);
                assert!(rig.take_requests().is_empty());
            }
            None => rig.writes(&cdb, &list, list.len()),
        }
    }
    rig.fail_from(1, EIO);
    rig.expect_with(&unmap(40), &unmap_list(&[(1, 1), (9, 1)]), WRITE_ERROR);
    // Without write-zeroes it is a discard.
    let rig = Rig::of(geometry(), Limits { write_zeroes: None, ..limits() });
    rig.writes(&unmap(24), &good, 24);
    assert_eq!(rig.take_requests(), [(Op::Discard { secure: false }, 5120, 2048)]);
}

#[test]
fn write_same() {
    let rig = Rig::new();
    let block: Vec<u8> = (0..512).map(|at| at as u8 ^ 0x33).collect();
    let zero = [0; 512];
    // Zeroes need no data on the way to the disk. Command, data, its used length, and the request with its LBA and
    // blocks.
    type Case<'a> = (&'a [u8], &'a [u8], usize, Op, u64, u64);
    let cases: &[Case<'_>] = &[
        (&ten(0x41, 0, 3, 5), &zero, 512, ZEROED, 3, 5),
        (&ten(0x41, 0x08, 3, 5), &zero, 512, UNMAPPED, 3, 5),
        (&sixteen(0x93, 0x08, 0, SAME), &zero, 512, UNMAPPED, 0, 256),
        (&sixteen(0x93, 0x09, 2047, 1), &[], 0, UNMAPPED, 2047, 1),
        (&sixteen(0x93, 0x01, 2047, 1), &block, 0, ZEROED, 2047, 1),
    ];
    for (cdb, data, transferred, op, lba, count) in cases {
        rig.take_requests();
        rig.writes(cdb, data, *transferred);
        assert_eq!(rig.take_requests(), [(*op, lba * 512, count * 512)], "{cdb:02x?}");
    }
    // A pattern is written as data, in chunks, even if unmapping was allowed.
    for cdb in [&ten(0x41, 0x08, 3, 200)[..], &sixteen(0x93, 0, 3, 200), &sixteen(0x93, 0x08, 3, 200)] {
        rig.disk.borrow_mut().fill(0xff);
        rig.take_requests();
        rig.writes(cdb, &block, 512);
        let write = Op::Write { fua: false };
        assert_eq!(rig.take_requests(), [(write, 1536, 65536), (write, 1536 + 65536, 36864)]);
        let disk = rig.disk.borrow();
        assert!(disk[1536..][..200 * 512].chunks(512).all(|found| found == block));
        assert!(disk[..1536].iter().chain(&disk[203 * 512..]).all(|byte| *byte == 0xff));
    }
    assert_eq!(rig.run(&ten(0x41, 0, 0, 1), &block[..511], 0), RunResult::Overrun);
    rig.fail_from(1, EIO);
    rig.expect_with(&ten(0x41, 0, 3, 200), &block, WRITE_ERROR);
    // Without write-zeroes, zeroes are a pattern too, and WRITE SAME cannot unmap.
    let rig = Rig::of(geometry(), Limits { write_zeroes: None, ..limits() });
    rig.writes(&sixteen(0x93, 1, 3, 200), &[], 0);
    assert_eq!(rig.take_requests().len(), 2);
    rig.expect(&sixteen(0x93, 0x08, 3, 200), in_command(1, 3));
    rig.expect(&ten(0x41, 0x08, 3, 200), in_command(1, 3));
}

#[test]
fn write_same_errors() {
    let rig = Rig::new();
    let cases: &[(&[u8], Sense)] = &[
        (&ten(0x41, 0, 0, 0), in_command(7, None)),
        (&ten(0x41, 0, 0, 257), in_command(7, None)),
        (&sixteen(0x93, 0, 0, 0), in_command(10, None)),
        (&sixteen(0x93, 8, 0, 257), in_command(10, None)),
        (&ten(0x41, 0x20, 0, 1), in_command(1, 7)),
        (&ten(0x41, 0x18, 0, 1), in_command(1, 4)),
        (&sixteen(0x93, 0x10, 0, 1), in_command(1, 4)),
        (&ten(0x41, 0x01, 0, 1), in_command(1, 2)),
        (&ten(0x41, 0x04, 0, 1), in_command(1, 2)),
        (&sixteen(0x93, 0x02, 0, 1), in_command(1, 2)),
        (&ten(0x41, 0, 2047, 2), Sense::LBA_OUT_OF_RANGE),
        (&sixteen(0x93, 0, u64::MAX, 1), Sense::LBA_OUT_OF_RANGE),
    ];
    for (cdb, sense) in cases {
        rig.expect(cdb, *sense);
    }
}

#[test]
fn verify() {
    let rig = Rig::new();
    let disk = rig.disk.borrow().clone();
    // Without data: the blocks must be readable.
    for cdb in [&ten(0x2f, 0x10, 1, 300)[..], &twelve(0xaf, 0, 1, 300), &sixteen(0x8f, 0, 1, 300)] {
        rig.take_requests();
        rig.writes(cdb, &[], 0);
        let asked = [(Op::Read, 512, 65536), (Op::Read, 66048, 65536), (Op::Read, 131584, 22528)];
        assert_eq!(rig.take_requests(), asked);
        rig.fail_from(2, EIO);
        rig.expect(cdb, READ_ERROR);
        rig.fails.set(None);
    }
    rig.writes(&ten(0x2f, 6, 1, 0), &[], 0);
    // With data: the blocks must be equal.
    let mut data = disk[512..][..300 * 512].to_vec();
    for cdb in [ten(0x2f, 2, 1, 300).to_vec(), twelve(0xaf, 2, 1, 300).to_vec(), sixteen(0x8f, 2, 1, 300).to_vec()] {
        rig.writes(&cdb, &data, data.len());
        for at in [0, 512 * 128, 512 * 300 - 1] {
            data[at] ^= 1;
            rig.expect_with(&cdb, &data, Sense::miscompare(1 + at as u64 / 512));
            data[at] ^= 1;
        }
        assert_eq!(rig.run(&cdb, &data[1..], 0), RunResult::Overrun);
    }
    // BYTCHK 11b: one block for all.
    rig.disk.borrow_mut()[..200 * 512].fill(7);
    rig.writes(&ten(0x2f, 6, 0, 200), &[7; 512], 512);
    rig.expect_with(&sixteen(0x8f, 6, 0, 201), &[7; 512], Sense::miscompare(200));
    assert_eq!(rig.run(&ten(0x2f, 6, 0, 200), &[7; 511], 0), RunResult::Overrun);
    let cases: &[(&[u8], Sense)] = &[
        (&ten(0x2f, 4, 0, 1), in_command(1, 2)),
        (&ten(0x2f, 0x22, 0, 1), in_command(1, 7)),
        (&sixteen(0x8f, 0, 0, 513), in_command(10, None)),
        (&twelve(0xaf, 0, 2047, 2), Sense::LBA_OUT_OF_RANGE),
    ];
    for (cdb, sense) in cases {
        rig.expect(cdb, *sense);
    }
}

#[test]
fn write_and_verify() {
    let rig = Rig::new();
    let data = vec![0x77; 300 * 512];
    let write = (Op::Write { fua: true }, 512, 300 * 512);
    for flags in [0, 2] {
        for cdb in [
            ten(0x2e, flags, 1, 300).to_vec(),
            twelve(0xae, flags, 1, 300).to_vec(),
            sixteen(0x8e, flags, 1, 300).to_vec(),
        ] {
            rig.take_requests();
            rig.disk.borrow_mut().fill(0);
            rig.writes(&cdb, &data, data.len());
            let asked = rig.take_requests();
            assert_eq!((asked[0], asked.len()), (write, 4));
            assert_eq!(rig.disk.borrow()[512..][..data.len()], data);
            rig.fail_from(0, EIO);
            rig.expect(&cdb, WRITE_ERROR);
            rig.fail_from(1, EIO);
            rig.expect(&cdb, READ_ERROR);
            rig.fails.set(None);
            assert_eq!(rig.run(&cdb, &data[1..], 0), RunResult::Overrun);
        }
    }
    rig.writes(&ten(0x2e, 2, 1, 0), &[], 0);
    for (cdb, sense) in [
        (ten(0x2e, 4, 0, 1), in_command(1, 2)),
        (ten(0x2e, 6, 0, 1), in_command(1, 2)),
        (ten(0x2e, 0x20, 0, 1), in_command(1, 7)),
        (ten(0x2e, 0, 0, 513), in_command(7, None)),
        (ten(0x2e, 0, 2048, 1), Sense::LBA_OUT_OF_RANGE),
    ] {
        rig.expect(&cdb, sense);
    }
}

fn compare_and_write(flags: u8, lba: u64, count: u8) -> [u8; 16] {
    let mut cdb = sixteen(0x89, flags, lba, 0);
    cdb[13] = count;
    cdb
}

#[test]
fn compare_then_write() {
    let rig = Rig::new();
    for (flags, fua) in [(0, false), (0x08, true), (0x10, false)] {
        let old = rig.disk.borrow()[1024..][..1024].to_vec();
        let new: Vec<u8> = old.iter().map(|byte| byte.wrapping_add(1)).collect();
        let cdb = compare_and_write(flags, 2, 2);
        rig.take_requests();
        rig.writes(&cdb, &[&old[..], &new].concat(), 2048);
        assert_eq!(rig.take_requests(), [(Op::Read, 1024, 1024), (Op::Write { fua }, 1024, 1024)]);
        assert_eq!(rig.disk.borrow()[1024..][..1024], new);
        // The second time the blocks differ: the offset of the first byte that does.
        rig.expect_with(&cdb, &[&old[..], &new].concat(), Sense::miscompare(0));
        let mut near = new.clone();
        near[700] ^= 0x80;
        rig.expect_with(&cdb, &[&near[..], &old].concat(), Sense::miscompare(700));
        assert_eq!(rig.disk.borrow()[1024..][..1024], new);
        assert_eq!(rig.run(&cdb, &[0; 2047], 0), RunResult::Overrun);
    }
    rig.fail_from(0, EIO);
    rig.expect(&compare_and_write(0, 0, 1), READ_ERROR);
    rig.fail_from(1, EIO);
    let block = rig.disk.borrow()[..512].to_vec();
    rig.expect_with(&compare_and_write(0, 0, 1), &block.repeat(2), WRITE_ERROR);
    rig.fails.set(None);
    rig.writes(&compare_and_write(0, 2048, 0), &[], 0);
    rig.expect(&compare_and_write(0, 0, 129), in_command(13, None));
    rig.expect(&compare_and_write(0x20, 0, 1), in_command(1, 7));
    rig.expect(&compare_and_write(0, 2047, 2), Sense::LBA_OUT_OF_RANGE);
}

#[test]
fn orwrite() {
    let rig = Rig::new();
    let old = rig.disk.borrow().clone();
    let data: Vec<u8> = (0..200 * 512).map(|at| (at / 3) as u8).collect();
    rig.writes(&sixteen(0x8b, 0x08, 7, 200), &data, data.len());
    let write = Op::Write { fua: true };
    let first = 7 * 512;
    let asked = [
        (Op::Read, first, 65536),
        (write, first, 65536),
        (Op::Read, first + 65536, 36864),
        (write, first + 65536, 36864),
    ];
    assert_eq!(rig.take_requests(), asked);
    let combined: Vec<u8> = old[first as usize..].iter().zip(&data).map(|(old, new)| old | new).collect();
    assert_eq!(rig.disk.borrow()[first as usize..][..data.len()], combined);
    assert_eq!(rig.disk.borrow()[first as usize + data.len()..], old[first as usize + data.len()..]);
    rig.fail_from(3, EIO);
    rig.expect_with(&sixteen(0x8b, 0, 7, 200), &data, WRITE_ERROR);
    rig.fails.set(None);
    rig.writes(&sixteen(0x8b, 0, 7, 0), &[], 0);
    assert_eq!(rig.run(&sixteen(0x8b, 0, 7, 200), &data[1..], 0), RunResult::Overrun);
    rig.expect(&sixteen(0x8b, 0x20, 0, 1), in_command(1, 7));
    rig.expect(&sixteen(0x8b, 0, 0, 513), in_command(10, None));
    rig.expect(&sixteen(0x8b, 0, 2048, 1), Sense::LBA_OUT_OF_RANGE);
}

/// Commands that read and write overlapping blocks wait in order; a dropped one releases its lock.
#[test]
fn range_locks_serialize_read_and_write_commands() {
    use std::sync::atomic::Ordering;

    let rig = Rig::new();
    let first = rig.nexus.clone();
    let mut work = CommandBuffers::default();
    let out = vec![0; 4096];
    let mut begin = |cdb: &[u8]| match first.begin(&Command { cdb, data_in_len: 0 }, &out[..], &mut work) {
        CommandAction::MultiStep(sequence) => sequence,
        other => panic!("{other:?}"),
    };
    let mut holder = begin(&compare_and_write(0, 4, 2));
    let mut waits = begin(&sixteen(0x8b, 0, 5, 2));
    let mut compares = begin(&compare_and_write(0, 6, 1));
    let mut beside = begin(&compare_and_write(0, 7, 1));
    let mut scratch = vec![0; mqblk_scsi::MultiStepCommand::SCRATCH];
    let waker: std::sync::Arc<dyn mqblk_core::Wake> = rig.wakes.clone();
    let mut next = |sequence: &mut mqblk_scsi::MultiStepCommand| {
        sequence.next(None, &mut scratch, &out[..], &waker, &mut CommandBuffers::default())
    };
    use mqblk_scsi::NextStep;
    assert!(matches!(next(&mut holder), NextStep::Read { .. }));
    assert!(matches!(next(&mut waits), NextStep::Wait));
    assert!(matches!(next(&mut waits), NextStep::Wait));
    // Queued behind the waiting one.
    assert!(matches!(next(&mut compares), NextStep::Wait));
    assert!(matches!(next(&mut beside), NextStep::Read { .. }));
    assert_eq!(rig.wakes.0.load(Ordering::SeqCst), 0);
    drop(holder);
    assert_eq!(rig.wakes.0.load(Ordering::SeqCst), 1);
    assert!(matches!(next(&mut waits), NextStep::Read { .. }));
    assert!(matches!(next(&mut compares), NextStep::Wait));
    drop(waits);
    assert!(matches!(next(&mut compares), NextStep::Read { .. }));
}
