//! MODE SENSE and MODE SELECT, by SPC-4 sections 6.9 to 6.12 and 7.5.

mod rig;

use mqblk_core::{ByteLen, Geometry, Op};
use mqblk_scsi::{Sense, SenseKey, UnitAttention};
use rig::*;

const CACHING: [u8; 20] = [0x08, 0x12, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CONTROL: [u8; 12] = [0x0a, 0x0a, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0];

fn sense_6(flags: u8, page: u8, subpage: u8) -> [u8; 6] {
    [0x1a, flags, page, subpage, 255, 0]
}

fn sense_10(flags: u8, page: u8, subpage: u8) -> [u8; 10] {
    [0x5a, flags, page, subpage, 0, 0, 0, 1, 0, 0]
}

#[test]
fn headers_and_block_descriptors() {
    let rig = Rig::new();
    let short = [0, 0, 8, 0, 0, 0, 2, 0];
    let long = [0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    let page = &CACHING[..];
    let cases: &[(&[u8], Vec<u8>)] = &[
        (&sense_6(0x00, 8, 0), [&[31, 0, 0x10, 8], &short[..], page].concat()),
        (&sense_6(0x08, 8, 0), [&[23, 0, 0x10, 0], page].concat()),
        (&sense_10(0x00, 8, 0), [&[0, 34, 0, 0x10, 0, 0, 0, 8], &short[..], page].concat()),
        (&sense_10(0x10, 8, 0), [&[0, 42, 0, 0x10, 1, 0, 0, 16], &long[..], page].concat()),
        (&sense_10(0x18, 8, 0), [&[0, 26, 0, 0x10, 0, 0, 0, 0], page].concat()),
    ];
    for (cdb, expected) in cases {
        assert_eq!(rig.reads(cdb, 256), *expected, "{cdb:02x?}");
    }
    // Truncated to the allocation length; the length field has the full length.
    assert_eq!(rig.reads(&[0x1a, 0, 8, 0, 4, 0], 4), [31, 0, 0x10, 8]);
    assert_eq!(rig.run(&[0x1a, 0, 8, 0, 5, 0], &[], 4), RunResult::Overrun);
    // More blocks than fit the short descriptor; write protected.
    let rig = Rig::of(Geometry { read_only: true, ..geometry() }, limits());
    rig.unit.set_size(ByteLen(1 << 50));
    rig.expect(&[0; 6], UnitAttention::CapacityChanged.sense());
    assert_eq!(rig.reads(&sense_6(0, 8, 0), 256)[..8], [31, 0, 0x90, 8, 255, 255, 255, 255]);
    assert_eq!(rig.reads(&sense_10(0x10, 8, 0), 256)[8..16], (1u64 << 41).to_be_bytes());
}

#[test]
fn pages_and_changeable_masks() {
    let mut through = options(geometry(), limits());
    through.writeback = false;
    let through = Rig::from(through);
    let rig = Rig::new();
    let pages = |rig: &Rig, page, subpage| rig.reads(&sense_6(8, page, subpage), 256)[4..].to_vec();
    let both = [&CACHING[..], &CONTROL].concat();
    for (page, subpage, expected) in [
        (0x08, 0x00, &CACHING[..]),
        (0x08, 0xff, &CACHING),
        (0x0a, 0x00, &CONTROL),
        (0x3f, 0x00, &both),
        (0x3f, 0xff, &both),
        (0xbf, 0x00, &both),
    ] {
        assert_eq!(pages(&rig, page, subpage), expected, "{page:02x} {subpage:02x}");
    }
    let mut changeable = [0; 32];
    changeable[..3].copy_from_slice(&[0x08, 0x12, 4]);
    changeable[20..25].copy_from_slice(&[0x0a, 0x0a, 4, 0, 8]);
    assert_eq!(pages(&rig, 0x7f, 0), changeable);
    for page in [0x08, 0x88] {
        assert_eq!(pages(&through, page, 0)[2], 0, "WCE");
    }
    assert!(through.unit.write_through());
    for (cdb, sense) in [
        (sense_6(0, 0x01, 0), in_command(2, 5)),
        (sense_6(0, 0x08, 1), in_command(3, None)),
        (sense_6(0, 0xc8, 0), sense(SenseKey::IllegalRequest, 0x39, 0)),
    ] {
        rig.expect(&cdb, sense);
    }
    rig.expect(&sense_10(0, 0x01, 0), in_command(2, 5));
}

fn select_6(len: usize) -> [u8; 6] {
    [0x15, 0x10, 0, 0, len as u8, 0]
}

fn select_10(len: usize) -> [u8; 10] {
    ten(0x55, 0x10, 0, len as u16)
}

fn caching(byte_2: u8) -> Vec<u8> {
    let mut page = CACHING.to_vec();
    page[2] = byte_2;
    page
}

fn control(byte_2: u8, byte_4: u8) -> Vec<u8> {
    let mut page = CONTROL.to_vec();
    (page[2], page[4]) = (byte_2, byte_4);
    page
}

#[test]
fn the_write_cache_is_disabled_and_enabled() {
    let rig = Rig::new();
    let other = rig.other("vm1");
    let off = [&[0; 4], &caching(0)[..]].concat();
    rig.take_requests();
    rig.writes(&select_6(24), &off, 24);
    // Writes that completed before become durable too.
    assert_eq!(rig.take_requests(), [(Op::Flush, 0, 0)]);
    assert!(rig.unit.write_through());
    assert_eq!(rig.reads(&sense_6(8, 8, 0), 256)[6], 0);
    assert_eq!(rig.reads(&sense_6(8, 0x88, 0), 256)[6], 4, "the default stays");
    // Other nexuses get a unit attention, the sender does not.
    assert_eq!(rig.reads(&[0; 6], 0).len(), 0);
    let mut result = rig.run_on(&other, &[0; 6], &[], 0);
    assert!(
        matches!(&result, RunResult::Ended { ending, .. } if ending.sense == Some(UnitAttention::ModeParametersChanged.sense()))
    );

    let durable: &[(&[u8], Op)] = &[
        (&ten(0x2a, 0, 0, 1), Op::Write { fua: true }),
        (&sixteen(0x93, 9, 0, 1), Op::WriteZeroes { may_unmap: true, fua: true }),
    ];
    for (cdb, op) in durable {
        rig.take_requests();
        rig.run(cdb, &[0; 512], 0);
        assert_eq!(rig.take_requests()[0].0, *op);
    }
    // Enabled again, by MODE SELECT(10); and once more, which changes nothing.
    let on = [&[0; 8], &CACHING[..]].concat();
    for changes in [true, false] {
        rig.take_requests();
        rig.writes(&select_10(28), &on, 28);
        assert!(rig.take_requests().is_empty() && !rig.unit.write_through());
        result = rig.run_on(&other, &[0; 6], &[], 0);
        assert_eq!(matches!(result, RunResult::Ended { ending, .. } if ending.sense.is_some()), changes);
    }
    // A reset restores the initial value.
    rig.writes(&select_6(24), &off, 24);
    rig.unit.reset();
    rig.expect(&[0; 6], UnitAttention::BusDeviceReset.sense());
    assert!(!rig.unit.write_through());
    // If the flush fails the change stays, and the initiator learns that older data may be lost.
    rig.fail_from(0, EIO);
    rig.expect_with(&select_6(24), &off, sense(SenseKey::MediumError, 0x0c, 0));
    assert!(rig.unit.write_through());
}

#[test]
fn the_control_page() {
    let rig = Rig::new();
    assert!(!rig.unit.descriptor_sense());
    let list = [&[0; 4], &control(4, 8)[..]].concat();
    rig.writes(&select_6(16), &list, 16);
    assert!(rig.unit.descriptor_sense());
    assert_eq!(rig.reads(&sense_6(8, 0x0a, 0), 256), [&[15, 0, 0x90, 0], &control(4, 8)[..]].concat());
    rig.expect(&ten(0x2a, 0, 0, 1), Sense::SOFTWARE_WRITE_PROTECTED);
    rig.expect(&ten(0x42, 0, 0, 24), Sense::SOFTWARE_WRITE_PROTECTED);
    assert_eq!(rig.reads(&ten(0x28, 0, 0, 1), 512).len(), 512);
    rig.writes(&select_6(16), &[&[0; 4], &CONTROL[..]].concat(), 16);
    rig.writes(&ten(0x2a, 0, 0, 1), &[0; 512], 512);
}

#[test]
fn lists_without_changes() {
    let rig = Rig::new();
    let short = [0, 0, 8, 0, 0, 0, 2, 0];
    let long = [0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    let all = [&CACHING[..], &CONTROL].concat();
    let lists: &[(bool, Vec<u8>)] = &[
        (true, vec![]),
        (true, vec![0; 4]),
        (true, [&[0x55, 0x66, 0x77, 8], &short[..], &all].concat()),
        // Unchanged capacity: 0, or all ones.
        (true, [&[0, 0, 0, 8], &[0, 0, 0, 0, 0, 0, 2, 0][..]].concat()),
        (true, [&[0, 0, 0, 8], &[255, 255, 255, 255, 0, 0, 2, 0][..]].concat()),
        // PS is ignored.
        (true, [&[0; 4], &[0x88][..], &CACHING[1..]].concat()),
        (false, vec![0; 8]),
        (false, [&[0, 0, 0, 0, 0, 0, 0, 8], &short[..], &all].concat()),
        (false, [&[0, 0, 0, 0, 1, 0, 0, 16], &long[..], &all].concat()),
    ];
    for (six, list) in lists {
        let cdb = if *six { select_6(list.len()).to_vec() } else { select_10(list.len()).to_vec() };
        rig.writes(&cdb, list, list.len());
        if let Some(short) = list.len().checked_sub(1) {
            assert_eq!(rig.run(&cdb, &list[..short], 0), RunResult::Overrun);
        }
    }
    assert!(rig.take_requests().iter().all(|(op, ..)| *op != Op::Flush));
}

#[test]
fn invalid_lists() {
    let rig = Rig::new();
    let six = |rest: &[u8]| [&[0; 4], rest].concat();
    let short_6 = Sense::PARAMETER_LIST_LENGTH.with_cdb_field(4, None);
    let short_10 = Sense::PARAMETER_LIST_LENGTH.with_cdb_field(7, None);
    let cases: &[(bool, Vec<u8>, Sense)] = &[
        (true, vec![0; 3], short_6),
        (true, vec![0, 0, 0, 8, 0, 0, 8, 0], short_6),
        (true, six(&CACHING[..19]), short_6),
        (true, six(&[0x08]), short_6),
        (true, six(&[&CACHING[..], &[0x0a]].concat()), short_6),
        (false, vec![0; 7], short_10),
        (false, vec![0, 0, 0, 0, 1, 0, 0, 16, 0, 0, 0, 0], short_10),
        // Block descriptors.
        (true, vec![0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0], in_parameters(3, None)),
        (false, vec![0, 0, 0, 0, 1, 0, 0, 8, 0, 0, 0, 0, 0, 0, 2, 0], in_parameters(6, None)),
        (true, vec![0, 0, 0, 8, 0, 0, 8, 1, 0, 0, 2, 0], in_parameters(4, None)),
        (true, vec![0, 0, 0, 8, 0, 0, 8, 0, 0, 0, 0x10, 0], in_parameters(9, None)),
        // Pages.
        (true, six(&[0x01, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), in_parameters(4, 5)),
        (true, six(&[0x48, 0x01, 0, 0]), in_parameters(4, 6)),
        (true, six(&[&[0x08, 0x11], &CACHING[2..]].concat()), in_parameters(5, None)),
        (true, six(&caching(0x05)), in_parameters(6, 0)),
        (true, six(&caching(0x84)), in_parameters(6, 7)),
        (true, six(&control(0x20, 0)), in_parameters(6, 5)),
        (false, [&[0; 8], &CACHING[..], &control(0, 0x30)].concat(), in_parameters(32, 5)),
    ];
    for (six, list, sense) in cases {
        let cdb = if *six { select_6(list.len()).to_vec() } else { select_10(list.len()).to_vec() };
        rig.expect_with(&cdb, list, *sense);
    }
    // One invalid page rejects the whole list.
    let list = [&caching(0)[..], &control(0x40, 0)].concat();
    rig.expect_with(&select_6(36), &six(&list), in_parameters(26, 6));
    assert!(!rig.unit.write_through());
    for (cdb, sense) in [([0x15, 0x11, 0, 0, 0, 0], in_command(1, 0)), ([0x15, 0, 0, 0, 0, 0], in_command(1, 4))] {
        rig.expect(&cdb, sense);
    }
}
