//! Identification of a logical unit and a target: INQUIRY, READ CAPACITY, REPORT LUNS, LOG SENSE and the reports of
//! supported commands. SPC-4 sections 6 and 7, SBC-3.

mod rig;

use mqblk_core::{BlockSize, ByteLen, Geometry, Limits};
use mqblk_scsi::{Command, CommandAction, CommandBuffers, CommandCompletion, Sense, SenseKey, UnitAttention, target};
use rig::*;

fn page(rig: &Rig, code: u8) -> Vec<u8> {
    let data = rig.reads(&[0x12, 1, code, 1, 0, 0], 256);
    assert_eq!((data[0], data[1], usize::from(data[2]) << 8 | usize::from(data[3])), (0, code, data.len() - 4));
    data[4..].to_vec()
}

#[test]
fn standard_inquiry() {
    let rig = Rig::new();
    let data = rig.reads(&[0x12, 0, 0, 1, 0, 0], 256);
    assert_eq!(data.len(), 96);
    assert_eq!(data[..8], [0, 0, 6, 0x12, 91, 0, 0, 2]);
    assert_eq!(&data[8..36], b"MQBLK   disk            0.1 ");
    assert_eq!(data[58..64], [0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0]);
    assert!(data[36..58].iter().chain(&data[64..]).all(|byte| *byte == 0));
    // The allocation length truncates it; a shorter buffer is an overrun.
    assert_eq!(rig.reads(&[0x12, 0, 0, 0, 36, 0], 36), data[..36]);
    assert_eq!(rig.reads(&[0x12, 0, 0, 0, 0, 0], 0).len(), 0);
    assert_eq!(rig.run(&[0x12, 0, 0, 0, 37, 0], &[], 36), RunResult::Overrun);
    for (cdb, sense) in [
        ([0x12, 0, 0x80, 0, 36, 0], in_command(2, None)),
        ([0x12, 2, 0, 0, 36, 0], in_command(1, 1)),
        ([0x12, 1, 0x84, 0, 36, 0], in_command(2, None)),
        ([0x12, 0, 0, 0, 36, 4], in_command(5, 2)),
    ] {
        rig.expect(&cdb, sense);
    }
}

#[test]
fn identification_is_truncated_and_made_printable() {
    let mut options = options(geometry(), limits());
    options.identity.product = "a name longer than sixteen".into();
    options.identity.serial = "ü".repeat(100);
    options.identity.revision = "1\n3".into();
    let rig = Rig::from(options);
    let data = rig.reads(&[0x12, 0, 0, 0, 96, 0], 96);
    assert_eq!(&data[16..36], b"a name longer th1 3 ");
    assert_eq!(page(&rig, 0x80), [b' '; 64]);
}

#[test]
fn vital_product_data() {
    let rig = Rig::new();
    assert_eq!(page(&rig, 0x00), [0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2]);
    assert_eq!(page(&rig, 0x80), b"serial-7");

    let ids = page(&rig, 0x83);
    assert_eq!(ids[..4], [0x01, 0x03, 0, 8]);
    assert_eq!(ids[4] >> 4, 3, "locally assigned");
    let digits: String = ids[4..12].iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        ids[12..],
        [&b"\x02\x01\x00\x18MQBLK   "[..], digits.as_bytes()].concat(),
        "the name itself is not reported"
    );
    let mut other = options(geometry(), limits());
    other.identity.name = "vm0-disk8".into();
    assert_ne!(page(&Rig::from(other), 0x83)[4..12], ids[4..12]);

    #[rustfmt::skip]
    let block_limits = [
        // WSNZ, most blocks of COMPARE AND WRITE, granularity (8 KiB).
        0x01, 128, 0, 16,
        // Most blocks of a transfer, preferred blocks (64 KiB), nothing of PRE-FETCH.
        0, 0, 2, 0, 0, 0, 0, 128, 0, 0, 0, 0,
        // UNMAP: blocks, descriptors, granularity, alignment 0.
        0, 0, 0, 64, 0, 0, 1, 0, 0, 0, 0, 8, 0x80, 0, 0, 0,
        // WRITE SAME.
        0, 0, 0, 0, 0, 0, 1, 0,
    ];
    let found = page(&rig, 0xb0);
    assert_eq!((found.len(), &found[..40]), (60, &block_limits[..]));
    assert!(found[40..].iter().all(|byte| *byte == 0));

    let found = page(&rig, 0xb1);
    assert_eq!((found.len(), &found[..2]), (60, &[0, 1][..]));
    assert!(found[2..].iter().all(|byte| *byte == 0));
    // LBPU, LBPWS, LBPWS10, LBPRZ; thin.
    assert_eq!(page(&rig, 0xb2), [0, 0xe4, 2, 0]);
}

#[test]
fn limits_of_minimal_and_of_huge_disks() {
    let bare = Limits { discard: None, write_zeroes: None, ..limits() };
    let small =
        Geometry { physical_block: BlockSize::B512, min_io: ByteLen::ZERO, opt_io: ByteLen::ZERO, ..geometry() };
    let rig = Rig::of(small, bare);
    let found = page(&rig, 0xb0);
    assert_eq!(found[..12], [1, 128, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0]);
    assert!(found[16..32].iter().all(|byte| *byte == 0), "no UNMAP");
    assert_eq!(found[32..40], 65536u64.to_be_bytes(), "32 MiB as data");
    assert_eq!(page(&rig, 0xb2), [0, 0, 0, 0]);
    assert_eq!(rig.reads(&sixteen(0x9e, 0x10, 0, 32), 32)[12..16], [0, 0, 0, 3]);

    // A discard without write-zeroes leaves blocks undefined, and WRITE SAME cannot unmap.
    let rig = Rig::of(geometry(), Limits { write_zeroes: None, ..limits() });
    assert_eq!(page(&rig, 0xb2), [0, 0x80, 2, 0]);
    assert_eq!(rig.reads(&sixteen(0x9e, 0x10, 0, 32), 32)[12..16], [0, 3, 0x80, 3]);

    // More than the fields hold: capped below the values that mean "no limit".
    let vast = ByteLen(u64::MAX);
    let discard = limits().discard.map(|discard| mqblk_core::DiscardLimits { max_len: vast, ..discard });
    let rig = Rig::of(geometry(), Limits { max_transfer: vast, discard, write_zeroes: Some(vast), ..limits() });
    let found = page(&rig, 0xb0);
    assert_eq!(found[4..8], (u32::MAX - 1).to_be_bytes());
    assert_eq!(found[16..20], (u32::MAX - 1).to_be_bytes());
    assert_eq!(found[32..40], u64::from(u32::MAX - 1).to_be_bytes());
}

#[test]
fn read_capacity() {
    let rig = Rig::new();
    assert_eq!(rig.reads(&ten(0x25, 0, 0, 0), 8), [0, 0, 7, 0xff, 0, 0, 2, 0]);
    // PMI.
    assert_eq!(rig.reads(&[0x25, 0, 0, 0, 0, 9, 0, 0, 1, 0], 8), [0, 0, 7, 0xff, 0, 0, 2, 0]);
    rig.expect(&ten(0x25, 0, 9, 0), in_command(2, None));
    assert_eq!(rig.run(&ten(0x25, 0, 0, 0), &[], 7), RunResult::Overrun);

    let data = rig.reads(&sixteen(0x9e, 0x10, 0, 32), 64);
    assert_eq!(data[..16], [0, 0, 0, 0, 0, 0, 7, 0xff, 0, 0, 2, 0, 0, 3, 0xc0, 3]);
    assert_eq!((data.len(), &data[16..]), (32, &[0; 16][..]));
    assert_eq!(rig.reads(&sixteen(0x9e, 0x10, 0, 12), 12), data[..12]);
    rig.expect(&sixteen(0x9e, 0x11, 0, 32), in_command(1, 4));

    // More than 32 bits of blocks.
    rig.unit.set_size(ByteLen(1 << 50));
    rig.expect(&[0; 6], UnitAttention::CapacityChanged.sense());
    assert_eq!(rig.reads(&ten(0x25, 0, 0, 0), 8)[..4], [0xff; 4]);
    assert_eq!(rig.reads(&sixteen(0x9e, 0x10, 0, 8), 8), ((1u64 << 41) - 1).to_be_bytes());
    rig.unit.set_size(ByteLen(100));
    rig.expect(&[0; 6], UnitAttention::CapacityChanged.sense());
    rig.expect(&ten(0x25, 0, 0, 0), sense(SenseKey::NotReady, 0x04, 0x00));
}

#[test]
fn get_lba_status() {
    let rig = Rig::new();
    let data = rig.reads(&sixteen(0x9e, 0x12, 2000, 24), 24);
    assert_eq!(data, [0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0xd0, 0, 0, 0, 48, 0, 0, 0, 0]);
    assert_eq!(rig.reads(&sixteen(0x9e, 0x12, 2000, 10), 64), data[..10]);
    rig.expect(&sixteen(0x9e, 0x12, 2048, 24), Sense::LBA_OUT_OF_RANGE);
    rig.expect(&sixteen(0x9e, 0x12, u64::MAX, 24), Sense::LBA_OUT_OF_RANGE);
}

#[test]
fn defects() {
    let rig = Rig::new();
    assert_eq!(rig.reads(&[0x37, 0, 0x1d, 0, 0, 0, 0, 0, 16, 0], 16), [0, 0x1d, 0, 0]);
    assert_eq!(rig.reads(&[0x37, 0, 0x08, 0, 0, 0, 0, 0, 3, 0], 16), [0, 0x08, 0]);
    assert_eq!(rig.reads(&[0xb7, 0x15, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], 16), [0, 0x15, 0, 0, 0, 0, 0, 0]);
    rig.expect(&[0x37, 0, 0x1f, 0, 0, 0, 0, 0, 16, 0], in_command(2, 2));
    rig.expect(&[0xb7, 0x1f, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], in_command(1, 2));
}

#[test]
fn log_pages() {
    let rig = Rig::new();
    let log = |two, three| [0x4d, 0, two, three, 0, 0, 0, 0, 64, 0];
    assert_eq!(rig.reads(&log(0x40, 0), 64), [0, 0, 0, 1, 0]);
    assert_eq!(rig.reads(&log(0x00, 0xff), 64), [0x40, 0xff, 0, 4, 0, 0, 0, 0xff]);
    rig.expect(&log(0x4d, 0), in_command(2, 5));
    rig.expect(&log(0x3f, 0), in_command(2, 5));
    rig.expect(&log(0x00, 1), in_command(3, None));
    rig.expect(&[0x4d, 1, 0x40, 0, 0, 0, 0, 0, 64, 0], in_command(1, 0));
    rig.expect(&[0x4d, 0, 0x40, 0, 0, 0, 1, 0, 64, 0], in_command(5, None));
}

fn operation_codes(options: u8, opcode: u8, action: u16) -> [u8; 12] {
    let [high, low] = action.to_be_bytes();
    [0xa3, 0x0c, options, opcode, high, low, 0, 0, 0x40, 0, 0, 0]
}

#[test]
fn supported_operation_codes_one_by_one() {
    let rig = Rig::new();
    let report = |options, opcode, action| rig.reads(&operation_codes(options, opcode, action), 1 << 14);
    assert_eq!(report(1, 0x28, 0), [0, 3, 0, 10, 0x28, 0xf8, 255, 255, 255, 255, 0, 255, 255, 4]);
    assert_eq!(report(3, 0x00, 0), [0, 3, 0, 6, 0, 0, 0, 0, 0, 4]);
    let timeouts = report(0x81, 0x00, 0);
    assert_eq!(timeouts, [0, 0x83, 0, 6, 0, 0, 0, 0, 0, 4, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let capacity = [0, 3, 0, 16, 0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 4];
    assert_eq!(report(2, 0x9e, 0x10), capacity);
    assert_eq!(report(3, 0x9e, 0x10), capacity);
    for (options, opcode, action) in
        [(1, 0x04, 0), (2, 0x04, 0), (3, 0x04, 0), (2, 0x9e, 0x11), (3, 0x28, 1), (3, 0x9e, 0)]
    {
        assert_eq!(report(options, opcode, action), [0, 1, 0, 0], "{options} {opcode:02x} {action:02x}");
    }
    rig.expect(&operation_codes(1, 0x9e, 0x10), in_command(2, 2));
    rig.expect(&operation_codes(2, 0x28, 0), in_command(4, None));
    rig.expect(&operation_codes(4, 0x28, 0), in_command(2, 2));
}

/// The report and dispatch agree on every operation code and service action.
#[test]
fn reported_operation_codes_are_the_supported_ones() {
    for (rig, unmap) in [(Rig::new(), true), (Rig::of(geometry(), Limits { discard: None, ..limits() }), false)] {
        let all = rig.reads(&operation_codes(0, 0, 0), 1 << 14);
        assert_eq!(u32::from_be_bytes(all[..4].try_into().unwrap()) as usize, all.len() - 4);
        let listed: Vec<_> =
            all[4..].chunks(8).map(|row| (row[0], row[5] & 1 != 0, u16::from(row[3]), row[7])).collect();
        assert!(listed.is_sorted() && listed.contains(&(0x42, false, 0, 10)) == unmap, "{listed:x?}");
        let long = rig.reads(&operation_codes(0x80, 0, 0), 1 << 14);
        assert_eq!(long.len(), 4 + listed.len() * 20);
        assert!(long[4..].chunks(20).all(|row| row[5] & 2 != 0 && row[8..10] == [0, 10]));
        for opcode in 0..=255 {
            for action in 0..32 {
                let by_action = listed.iter().any(|row| row.0 == opcode && row.1);
                let known = listed.iter().any(|row| row.0 == opcode && (!row.1 || row.2 == u16::from(action)));
                let mut cdb = [0; 16];
                // NACA is rejected by every supported command before it has effects.
                cdb[..2].copy_from_slice(&[opcode, if by_action { action } else { 0 }]);
                if let Some(row) = listed.iter().find(|row| row.0 == opcode) {
                    cdb[usize::from(row.3) - 1] = 4;
                    let naca = in_command(u16::from(row.3) - 1, 2);
                    rig.expect(&cdb, if known { naca } else { in_command(1, 4) });
                } else {
                    rig.expect(&cdb, Sense::INVALID_OPCODE);
                }
            }
        }
    }
}

#[test]
fn task_management_functions() {
    let rig = Rig::new();
    let cdb = |options| [0xa3, 0x0d, options, 0, 0, 0, 0, 0, 0, 64, 0, 0];
    assert_eq!(rig.reads(&cdb(0), 64), [0xdc, 3, 0, 0]);
    let long = rig.reads(&cdb(0x80), 64);
    assert_eq!((long.len(), &long[..4]), (16, &[0xdc, 3, 0, 12][..]));
    rig.expect(&[0xa3, 0x0f, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], in_command(1, 4));
}

fn at(rig: Option<&Rig>, luns: &[u16], cdb: &[u8], room: u64) -> (Option<CommandCompletion>, Vec<u8>) {
    let mut work = CommandBuffers::default();
    let nexus = rig.map(|rig| &*rig.nexus);
    let step = target::begin(nexus, luns, &Command { cdb, data_in_len: room }, [].as_slice(), &mut work);
    match step {
        CommandAction::Complete(ending) => (Some(ending), work.data_in),
        CommandAction::Overrun => (None, Vec::new()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn luns() {
    let rig = Rig::new();
    let report = |select: u8, allocation: u32| twelve(0xa0, 0, u32::from(select) << 24, allocation);
    let luns = [16383, 0, 256, 255];
    #[rustfmt::skip]
    let listed = [
        0, 0, 0, 32, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0,
        0, 255, 0, 0, 0, 0, 0, 0,
        0x41, 0, 0, 0, 0, 0, 0, 0,
        0x7f, 0xff, 0, 0, 0, 0, 0, 0,
    ];
    for rig in [None, Some(&rig)] {
        for select in [0, 2] {
            assert_eq!(at(rig, &luns, &report(select, 256), 40), (Some(CommandCompletion::good(40)), listed.to_vec()));
        }
        assert_eq!(at(rig, &luns, &report(1, 256), 40), (Some(CommandCompletion::good(8)), vec![0; 8]));
        assert_eq!(at(rig, &luns, &report(0, 16), 40), (Some(CommandCompletion::good(16)), listed[..16].to_vec()));
        assert_eq!(at(rig, &luns, &report(0, 40), 39), (None, Vec::new()));
        assert_eq!(at(rig, &luns, &report(0, 15), 40).0, Some(CommandCompletion::check_condition(in_command(6, None))));
        assert_eq!(
            at(rig, &luns, &report(0x10, 40), 40).0,
            Some(CommandCompletion::check_condition(in_command(2, None)))
        );
    }
    // Without a target the logical unit is the only one.
    assert_eq!(rig.reads(&report(0, 256), 256), [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // REPORT LUNS clears REPORTED LUNS DATA HAS CHANGED.
    rig.nexus.raise_attention(UnitAttention::ReportedLunsChanged);
    at(Some(&rig), &luns, &report(0, 256), 40);
    assert_eq!(rig.reads(&[0; 6], 0).len(), 0);
}

#[test]
fn commands_without_a_logical_unit() {
    let (ending, data) = at(None, &[3], &[0x12, 0, 0, 0, 96, 0], 96);
    assert_eq!((ending, data[0], data.len()), (Some(CommandCompletion::good(96)), 0x7f, 96));
    assert_eq!(at(None, &[3], &[0x12, 1, 0, 0, 96, 0], 96).1, [0x7f, 0, 0, 1, 0]);
    assert_eq!(
        at(None, &[3], &[0x12, 1, 0x80, 0, 96, 0], 96).0,
        Some(CommandCompletion::check_condition(in_command(2, None)))
    );
    let (ending, data) = at(None, &[3], &[0x03, 0, 0, 0, 96, 0], 96);
    assert_eq!(ending, Some(CommandCompletion::good(18)));
    assert_eq!((data[0], data[2], data[12]), (0x70, 5, 0x25));
    assert_eq!(at(None, &[3], &[0x03, 1, 0, 0, 96, 0], 96).1, [0x72, 5, 0x25, 0, 0, 0, 0, 0]);
    for cdb in [[0; 10], ten(0x28, 0, 0, 1), ten(0xff, 0, 0, 1)] {
        assert_eq!(
            at(None, &[3], &cdb, 512).0,
            Some(CommandCompletion::check_condition(Sense::LOGICAL_UNIT_NOT_SUPPORTED))
        );
    }
}
