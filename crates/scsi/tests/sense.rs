//! Encoding of sense data, by SPC-4 section 4.5, and sense data of disk outcomes.

mod rig;

use mqblk_core::{ByteLen, Op, Outcome};
use mqblk_scsi::{CommandCompletion, Sense, SenseKey, Status};
use rig::{EIO, sense};

fn encoded(sense: Sense, descriptor: bool) -> Vec<u8> {
    let mut bytes = [0xee; 64];
    let len = sense.encode(descriptor, &mut bytes);
    assert!(bytes[len..].iter().all(|byte| *byte == 0xee), "nothing beyond the sense data is touched");
    bytes[..len].to_vec()
}

#[test]
fn formats() {
    let plain = sense(SenseKey::UnitAttention, 0x2a, 0x09);
    assert_eq!(encoded(plain, false), [0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x2a, 0x09, 0, 0, 0, 0]);
    assert_eq!(encoded(plain, true), [0x72, 6, 0x2a, 0x09, 0, 0, 0, 0]);

    let bit = Sense::invalid_cdb_field(1, Some(7));
    assert_eq!(encoded(bit, false), [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0xcf, 0, 1]);
    assert_eq!(encoded(bit, true), [0x72, 5, 0x24, 0, 0, 0, 0, 8, 0x02, 0x06, 0, 0, 0xcf, 0, 1, 0]);
    let whole = Sense::invalid_parameter_field(0x123, None);
    assert_eq!(encoded(whole, false)[12..], [0x26, 0, 0, 0x80, 0x01, 0x23]);

    let where_ = Sense::miscompare(0x0102_0304);
    assert_eq!(encoded(where_, false), [0xf0, 0, 0xe, 1, 2, 3, 4, 10, 0, 0, 0, 0, 0x1d, 0, 0, 0, 0, 0]);
    let descriptors = [0x72, 0xe, 0x1d, 0, 0, 0, 0, 12, 0x00, 0x0a, 0x80, 0, 0, 0, 0, 0, 1, 2, 3, 4];
    assert_eq!(encoded(where_, true), descriptors);
    // More than 32 bits do not fit in fixed format: not valid.
    let far = Sense::miscompare(1 << 32);
    assert_eq!(encoded(far, false)[..7], [0x70, 0, 0xe, 0, 0, 0, 0]);
    assert_eq!(encoded(far, true)[12..20], [0, 0, 0, 1, 0, 0, 0, 0]);
    let both = Sense { information: Some(1), ..Sense::invalid_cdb_field(2, None) };
    assert_eq!(encoded(both, true).len(), Sense::MAX_LEN);
}

#[test]
fn truncated_to_the_buffer() {
    let mut room = [0; 8];
    assert_eq!(Sense::LBA_OUT_OF_RANGE.encode(false, &mut room), 8);
    assert_eq!(room, [0x70, 0, 5, 0, 0, 0, 0, 10]);
    assert_eq!(Sense::LBA_OUT_OF_RANGE.encode(true, &mut []), 0);
}

#[test]
fn outcomes() {
    let write = Op::Write { fua: false };
    let zeroes = Op::WriteZeroes { may_unmap: true, fua: false };
    let discard = Op::Discard { secure: false };
    let table = [
        (Op::Read, Outcome::OutOfRange, SenseKey::IllegalRequest, 0x21, 0x00),
        (write, Outcome::ReadOnly, SenseKey::DataProtect, 0x27, 0x00),
        (write, Outcome::NoSpace, SenseKey::DataProtect, 0x27, 0x07),
        (discard, Outcome::Unsupported, SenseKey::IllegalRequest, 0x20, 0x00),
        (Op::Read, Outcome::Aborted, SenseKey::AbortedCommand, 0x00, 0x06),
        (Op::Read, EIO, SenseKey::MediumError, 0x11, 0x00),
        (write, EIO, SenseKey::MediumError, 0x0c, 0x00),
        (zeroes, EIO, SenseKey::MediumError, 0x0c, 0x00),
        (Op::Flush, EIO, SenseKey::MediumError, 0x0c, 0x00),
        (discard, EIO, SenseKey::HardwareError, 0x44, 0x00),
    ];
    for (op, outcome, key, asc, ascq) in table {
        let ending = CommandCompletion::from_outcome(op, outcome, 4096);
        let expected =
            CommandCompletion { status: Status::CheckCondition, sense: Some(sense(key, asc, ascq)), transferred: 0 };
        assert_eq!(ending, expected, "{op:?} {outcome:?}");
    }
    for op in [Op::Read, write, zeroes, discard, Op::Flush] {
        assert_eq!(CommandCompletion::from_outcome(op, Outcome::Done(ByteLen(512)), 24), CommandCompletion::good(24));
    }
}
