//! The identity of the controllers and LUNs of a configuration: their ids, with defaults that depend on others filled
//! in.

use std::collections::BTreeMap;

use mqblk_core::settings::{SettingError, Settings};

use super::lun_keys::{UsedAddresses, take_address};
use super::tables::{CONTROLLER_TABLE, LUN_TABLE};
use crate::key_values::RawTable;
use crate::names::take_id;

/// Returns the keys of each table: with `id`, and of a LUN with `controller`, `target` and `lun`.
///
/// # Errors
/// If an id or an address is invalid.
pub(super) fn identify(tables: &[RawTable]) -> Result<Vec<Settings>, SettingError> {
    let mut identified: Vec<Settings> = tables.iter().map(|table| table.settings.clone()).collect();
    let mut controllers = Vec::new();
    for (table, settings) in tables.iter().zip(&mut identified).filter(|(table, _)| table.name == CONTROLLER_TABLE.name)
    {
        let id = take_id(&mut table.settings.clone(), "socket", "scsi")?;
        fill_in(settings, "id", &id)?;
        controllers.push(id);
    }
    let is_lun = |at: &usize| tables[*at].name == LUN_TABLE.name;
    let (mut order, rest): (Vec<usize>, Vec<usize>) =
        (0..tables.len()).filter(is_lun).partition(|at| tables[*at].settings.peek("target").is_some());
    order.extend(rest);
    let mut addresses: BTreeMap<String, UsedAddresses> = BTreeMap::new();
    for at in order {
        let settings = &mut identified[at];
        let parent = tables[at].parent.and_then(|number| controllers.get(number));
        if let Some(parent) = parent {
            fill_in(settings, "controller", parent)?;
        }
        let controller = settings.peek("controller").unwrap_or_default().to_owned();
        let used = addresses.entry(controller.clone()).or_default();
        let address = take_address(&mut settings.clone(), used)?;
        let id = settings.peek("id").map_or_else(|| format!("{controller}:{address}"), str::to_owned);
        fill_in(settings, "id", &id)?;
        fill_in(settings, "target", &address.target.to_string())?;
        fill_in(settings, "lun", &address.lun.to_string())?;
        used.insert(address, id);
    }
    Ok(identified)
}

fn fill_in(settings: &mut Settings, key: &str, value: &str) -> Result<(), SettingError> {
    if settings.peek(key).is_none() { settings.insert(key, value) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::parse;
    use crate::interfaces::INTERFACES;

    #[test]
    fn defaults_are_those_of_a_resolved_configuration() {
        let text = "[[controller]]\nsocket = \"/run/a.sock\"\n[[controller.lun]]\nstorage = \"null\"\n\
                    [[controller.lun]]\ntarget = 0\nid = \"x\"\n[[controller.lun]]\nlun = 3\n\
                    [[controller]]\nid = \"b\"\n[[controller.lun]]\npath = \"/x\"\n";
        let raw = parse("c.toml", text, INTERFACES).unwrap();
        let identified = identify(&raw.tables).unwrap();
        let mut ids: Vec<_> = identified.iter().map(|one| (one.peek("controller"), one.peek("id").unwrap())).collect();
        ids.sort_unstable();
        assert_eq!(
            ids,
            [
                (None, "a"),
                (None, "b"),
                (Some("a"), "a:1:0"),
                (Some("a"), "a:2:3"),
                (Some("a"), "x"),
                (Some("b"), "b:0:0")
            ]
        );
    }
}
