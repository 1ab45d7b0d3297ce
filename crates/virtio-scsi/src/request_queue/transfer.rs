//! READ and WRITE commands of the usual layout, which are admitted in one step: the most frequent ones. All others take
//! the general path.

use mqblk_core::{DiskSlot, Intake, Op};
use mqblk_memory::{Buffer, LeaseAccess};
use mqblk_ring::virtqueue::{ChainHead, UsualChains};
use mqblk_scsi::{Transfer, TransferRules};

use crate::lun_map::LunMap;
use crate::request_chain::TransferChain;
use crate::token::{ScsiToken, TokenKind, TransferState};

/// The logical unit of the last lookup: most commands go to the same one.
struct KnownUnit {
    /// Zeroes: none.
    field: u64,
    target: u8,
    slot: DiskSlot,
    rules: TransferRules,
}

impl KnownUnit {
    const NONE: KnownUnit = KnownUnit { field: 0, target: 0, slot: DiskSlot::FIRST, rules: TransferRules::NONE };
}

/// Admits a READ or WRITE command of the usual layout. `None`, and nothing is done, for anything else.
#[inline(always)] // into the loop of a batch
fn admit_transfer<I: Intake<ScsiToken, Buffer>>(
    ring: &impl UsualChains,
    head: &ChainHead,
    access: &mut LeaseAccess<'_>,
    (map, known): (&LunMap, &mut KnownUnit),
    most: u8,
    into: &mut I,
) -> Option<()> {
    let TransferChain { id, lun, cdb, data, response } = TransferChain::read(ring, access, head, most)?;
    if known.field != lun {
        known.field = lun;
        (known.target, known.slot, known.rules) =
            map.transfer_rules(lun).unwrap_or((0, DiskSlot::FIRST, TransferRules::NONE));
    }
    let capacity = u8::try_from(response.len).ok()?;
    let Transfer { op, start, len } = known.rules.begin(cdb)?;
    // A longer buffer has a residual.
    if (op == Op::Read) != data.writable || len.0 != u64::from(data.len) {
        return None;
    }
    let place = (response.address, capacity);
    let buffer = access.take_transfer((data.address, data.len), data.writable, place)?;
    // Bytes before the data count as written too: the used length counts the chain's bytes in order.
    let written = response.len.saturating_add(if data.writable { data.len } else { 0 });
    let (unit, target) = (known.slot, known.target);
    let token = TransferState { id, written, head: head.index, unit, abort_marks: 0, target };
    into.admit(ScsiToken(TokenKind::Transfer(token)), unit, op, start, len, Some(buffer));
    Some(())
}

/// Admits READ and WRITE commands of the usual layout, up to the first other chain. Returns their number.
#[inline]
pub(crate) fn admit_transfers<I: Intake<ScsiToken, Buffer>>(
    ring: &impl UsualChains,
    heads: &[ChainHead],
    mut access: LeaseAccess<'_>,
    map: &LunMap,
    most: u8,
    into: &mut I,
) -> usize {
    let mut known = KnownUnit::NONE;
    let mut left = heads;
    while let [head, others @ ..] = left
        && admit_transfer(ring, head, &mut access, (map, &mut known), most, into).is_some()
    {
        left = others;
    }
    heads.len() - left.len()
}
