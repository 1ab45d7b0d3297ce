//! MODE SELECT. Sources: SPC-4 sections 6.9, 6.10 and 7.5.

use crate::commands::mode::{ModePage, PAGES, block_descriptor};
use crate::context::{BeginResult, CommandContext};
use crate::logical_unit::{LogicalUnit, flag};
use crate::sense::Sense;
use crate::unit_attention::UnitAttention;

/// Differences between MODE SELECT(6) and (10).
struct ListFormat {
    header: usize,
    /// Offset of PARAMETER LIST LENGTH in the CDB.
    length_at: u16,
    /// Offset of BLOCK DESCRIPTOR LENGTH in the header.
    descriptor_len_at: usize,
}

/// Flags to set and to clear.
#[derive(Default)]
struct FlagChange {
    set: u8,
    clear: u8,
}

pub(crate) fn select_6(cmd: &mut CommandContext<'_>) -> BeginResult {
    let len = cmd.cdb.u8(4).into();
    select(cmd, len, &ListFormat { header: 4, length_at: 4, descriptor_len_at: 3 })
}

pub(crate) fn select_10(cmd: &mut CommandContext<'_>) -> BeginResult {
    let len = cmd.cdb.u16(7).into();
    select(cmd, len, &ListFormat { header: 8, length_at: 7, descriptor_len_at: 6 })
}

fn select(cmd: &CommandContext<'_>, len: usize, form: &ListFormat) -> BeginResult {
    // SP: parameters cannot be saved. PF: pages, not a vendor's format.
    cmd.check_zero(1, 0x01)?;
    if !cmd.cdb.has(1, 0x10) {
        return Err(Sense::invalid_cdb_field(1, Some(4)).into());
    }
    if len == 0 {
        return cmd.good();
    }
    let list = cmd.parameter_list(len)?;
    let change = parse(cmd.unit, &list, form)?;
    let unit = cmd.unit;
    let changed = unit.set_flags(change.set, true) | unit.set_flags(change.clear, false);
    if changed {
        unit.raise_attention_except(Some(cmd.nexus), UnitAttention::ModeParametersChanged);
    }
    if change.set & flag::WRITE_THROUGH != 0 && changed {
        // From now on a completed write is durable; the flush makes earlier ones durable too.
        return Ok(CommandContext::flush(len as u64));
    }
    Ok(crate::CommandAction::Complete(crate::CommandCompletion::good(len as u64)))
}

/// Parses and validates the whole list before anything is changed.
fn parse(unit: &LogicalUnit, list: &[u8], form: &ListFormat) -> Result<FlagChange, Sense> {
    let too_short = Sense::PARAMETER_LIST_LENGTH.with_cdb_field(form.length_at, None);
    if list.len() < form.header {
        return Err(too_short);
    }
    let long = form.header == 8 && list[4] & 0x01 != 0;
    let descriptor_len = match form.header {
        4 => list[3].into(),
        _ => usize::from(u16::from_be_bytes([list[6], list[7]])),
    };
    if descriptor_len != 0 && descriptor_len != if long { 16 } else { 8 } {
        return Err(Sense::invalid_parameter_field(form.descriptor_len_at as u16, None));
    }
    let descriptor = list.get(form.header..form.header + descriptor_len).ok_or(too_short)?;
    if descriptor_len > 0 {
        check_descriptor(unit, descriptor, long, form.header)?;
    }
    let mut change = FlagChange::default();
    let mut at = form.header + descriptor_len;
    while at < list.len() {
        let header = list.get(at..at + 2).ok_or(too_short)?;
        if header[0] & 0x40 != 0 {
            return Err(Sense::invalid_parameter_field(at as u16, Some(6)));
        }
        let code = header[0] & 0x3f;
        let page =
            PAGES.iter().find(|page| page.code == code).ok_or(Sense::invalid_parameter_field(at as u16, Some(5)))?;
        if usize::from(header[1]) != page.len() - 2 {
            return Err(Sense::invalid_parameter_field(at as u16 + 1, None));
        }
        let values = list.get(at..at + page.len()).ok_or(too_short)?;
        check_page(unit, page, values, at, &mut change)?;
        at += page.len();
    }
    Ok(change)
}

/// Checks that capacity and block length do not change: they have the current values, or those that mean "unchanged".
fn check_descriptor(unit: &LogicalUnit, found: &[u8], long: bool, at: usize) -> Result<(), Sense> {
    let (blocks_len, length_at) = if long { (8, 12) } else { (4, 5) };
    let current = block_descriptor(unit, long);
    let blocks = &found[..blocks_len];
    let unchanged = blocks.iter().all(|byte| *byte == 0) || blocks.iter().all(|byte| *byte == 0xff);
    if !unchanged && blocks != &current[..blocks_len] {
        return Err(Sense::invalid_parameter_field(at as u16, None));
    }
    if found[length_at..] != current[length_at..] {
        return Err(Sense::invalid_parameter_field((at + length_at) as u16, None));
    }
    Ok(())
}

/// Checks that only changeable bits differ, and adds the page to `change`.
fn check_page(
    unit: &LogicalUnit,
    page: &ModePage,
    values: &[u8],
    at: usize,
    change: &mut FlagChange,
) -> Result<(), Sense> {
    let current = page.values(unit.flags());
    let changeable = page.changeable();
    for (byte, value) in values.iter().enumerate().skip(2) {
        let wrong = (value ^ current[byte]) & !changeable[byte];
        if wrong != 0 {
            let bit = 7 - wrong.leading_zeros() as u8;
            return Err(Sense::invalid_parameter_field((at + byte) as u16, Some(bit)));
        }
    }
    for bit in page.bits {
        let (set, clear) = (&mut change.set, &mut change.clear);
        let on = (values[bit.byte] & bit.mask != 0) != bit.inverted;
        // The last one of duplicate pages counts.
        let (gains, loses) = if on { (set, clear) } else { (clear, set) };
        *gains |= bit.flag;
        *loses &= !bit.flag;
    }
    Ok(())
}
