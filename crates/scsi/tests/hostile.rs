//! Arbitrary commands: each completes, within bounds, and touches nothing outside its buffers.

mod rig;

use mqblk_core::{ByteLen, Geometry, Outcome};
use mqblk_scsi::{Command, CommandAction, CommandBuffers, UnitAttention, target};
use proptest::prelude::*;
use rig::*;

/// Half of them have a supported operation code, so that fields are reached.
fn commands() -> impl Strategy<Value = Vec<u8>> {
    const KNOWN: &[u8] = &[
        0x00, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1e, 0x25, 0x28, 0x2a, 0x2e, 0x2f, 0x35, 0x37,
        0x41, 0x42, 0x4d, 0x55, 0x56, 0x57, 0x5a, 0x5e, 0x5f, 0x88, 0x89, 0x8a, 0x8b, 0x8e, 0x8f, 0x91, 0x93, 0x9e,
        0xa0, 0xa3, 0xa8, 0xaa, 0xae, 0xaf, 0xb7,
    ];
    // Small numbers are more often valid.
    let byte = prop_oneof![4 => Just(0u8), 2 => 0u8..4, 1 => any::<u8>()];
    let opcode = prop_oneof![3 => proptest::sample::select(KNOWN), 1 => any::<u8>()];
    (opcode, proptest::collection::vec(byte, 0..40)).prop_map(|(opcode, rest)| [vec![opcode], rest].concat())
}

/// A few bytes, repeated.
fn data() -> impl Strategy<Value = Vec<u8>> {
    let few = proptest::collection::vec(prop_oneof![2 => Just(0u8), 1 => any::<u8>()], 1..64);
    (few, 0usize..2048).prop_map(|(few, len)| few.into_iter().cycle().take(len).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_commands(
        history in proptest::collection::vec(
            (commands(), data(), 0usize..4096, 0usize..3),
            1..20,
        ),
        fails in proptest::option::of(0usize..20),
    ) {
        // A small disk, so that random writes are read again.
        let rig = Rig::of(Geometry { size: ByteLen(64 << 10), ..geometry() }, limits());
        let nexuses = [rig.nexus.clone(), rig.other("vm1"), rig.other("vm2")];
        rig.fails.set(fails.map(|from| (from, Outcome::Aborted)));
        let size = rig.disk.borrow().len() as u64;
        for (cdb, out, room, who) in history {
            let mut work = CommandBuffers::default();
            let step = nexuses[who].begin(&Command { cdb: &cdb, data_in_len: room as u64 }, &out[..], &mut work);
            prop_assert!(work.ranges.len() <= 256 && work.data_in.len() <= room, "{cdb:02x?}");
            match &step {
                CommandAction::Disk { op, start, len, transferred } => {
                    prop_assert!(start.0 + len.0 <= size && *transferred <= (out.len().max(room)) as u64);
                    if op.has_data() {
                        prop_assert!(*transferred == len.0 && len.0 > 0);
                    }
                }
                CommandAction::Ranges { .. } => prop_assert!(work.ranges.iter().all(|(start, len)| start.0 + len.0 <= size)),
                _ => {}
            }
            if let RunResult::Ended { ending, data } = rig.finish(step, &out, room, work) {
                prop_assert!(data.len() <= room && ending.transferred <= out.len().max(room) as u64, "{cdb:02x?}");
                prop_assert!(ending.sense.is_some() == (ending.status == mqblk_scsi::Status::CheckCondition));
            }
        }
    }

    /// READ and WRITE have a fast path if their CDB is in a larger field: both paths must agree.
    #[test]
    fn fast_path_and_table_agree(
        opcode in proptest::sample::select(&[0x28u8, 0x2a, 0x88, 0x8a][..]),
        flags in prop_oneof![3 => Just(0u8), 1 => any::<u8>()],
        lba in prop_oneof![2 => 0u64..2100, 1 => any::<u64>()],
        count in prop_oneof![3 => 0u32..5, 1 => 500u32..520, 1 => any::<u32>()],
        control in prop_oneof![5 => Just(0u8), 1 => any::<u8>()],
        room in prop_oneof![Just(1usize << 19), 0usize..3000],
        wrong in 0u8..7,
    ) {
        let mut options = options(geometry(), limits());
        options.writeback = wrong != 1;
        options.geometry.read_only = wrong == 2;
        let rig = Rig::from(options);
        let other = rig.other("vm1");
        match wrong {
            3 => drop(rig.run(&[0x1b, 0, 0, 0, 0, 0], &[], 0)),
            4 => rig.nexus.raise_attention(UnitAttention::CapacityChanged),
            5 => drop(rig.run_on(&other, &[0x16, 0, 0, 0, 0, 0], &[], 0)),
            _ => {}
        }
        let mut short = sixteen(opcode, flags, lba, count).to_vec();
        if opcode < 0x80 {
            short = ten(opcode, flags, lba as u32, count as u16).to_vec();
        }
        *short.last_mut().unwrap() = control;
        let out = vec![0; room];
        let begin = |cdb: &[u8]| {
            let mut work = CommandBuffers::default();
            let step = rig.nexus.begin(&Command { cdb, data_in_len: room as u64 }, &out[..], &mut work);
            format!("{step:?}")
        };
        // A CDB of 16 bytes is a whole field; without its last byte, a zero, it is not.
        let by_field = begin(&field(&short));
        if wrong == 4 {
            rig.nexus.raise_attention(UnitAttention::CapacityChanged);
        }
        if short.len() < 16 || control == 0 {
            short.truncate(15);
        }
        prop_assert_eq!(by_field, begin(&short));
    }

    #[test]
    fn any_command_without_a_logical_unit(cdb in commands(), room in 0u64..256, luns in proptest::collection::vec(0u16..16384, 0..9)) {
        let mut work = CommandBuffers::default();
        let step = target::begin(None, &luns, &Command { cdb: &cdb, data_in_len: room }, [].as_slice(), &mut work);
        prop_assert!(matches!(step, CommandAction::Complete(_) | CommandAction::Overrun) && work.data_in.len() as u64 <= room);
    }
}
