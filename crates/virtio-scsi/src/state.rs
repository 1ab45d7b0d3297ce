//! State that moves with a migrating guest: sizes chosen by its driver, undelivered events, and the state of each
//! logical unit.

use std::collections::BTreeMap;
use std::sync::Arc;

use mqblk_scsi::UnitState;
use mqblk_virtio::{ApplyState, state};
use serde::{Deserialize, Serialize};

use crate::config::DriverSizes;
use crate::device::VirtioScsi;
use crate::events::{MAX_PENDING_EVENTS, ScsiEvent};
use crate::lun_map::{LunAddress, MappedUnit};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ScsiState {
    /// `sense_size` of the configuration space.
    sense_size: u32,
    /// `cdb_size` of the configuration space.
    cdb_size: u32,
    /// `None`: the driver has no event queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    events: Option<PendingEvents>,
    units: Vec<MappedUnitState>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PendingEvents {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    waiting: Vec<ScsiEvent>,
    /// True if more events were lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    missed: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MappedUnitState {
    at: LunAddress,
    unit: UnitState,
}

pub(crate) fn save(device: &VirtioScsi) -> String {
    let DriverSizes { sense, cdb } = device.sizes();
    let units = device.lun_map();
    state::write(&ScsiState {
        sense_size: sense,
        cdb_size: cdb,
        events: device.events().pending().map(|(waiting, missed)| PendingEvents { waiting, missed }),
        units: units.iter().map(|unit| MappedUnitState { at: unit.address, unit: unit.nexus.state() }).collect(),
    })
}

/// Logical units that the state does not list are unchanged: the operator decides about them.
pub(crate) fn load(device: &Arc<VirtioScsi>, text: &str) -> Result<ApplyState, String> {
    let ScsiState { sense_size, cdb_size, events, units } = state::read(text)?;
    let sizes = device.config().validate_sizes(DriverSizes { sense: sense_size, cdb: cdb_size })?;
    let waiting = events.as_ref().map_or(0, |events| events.waiting.len());
    if waiting > MAX_PENDING_EVENTS {
        return Err(format!("events.waiting: found {waiting}, expected at most {MAX_PENDING_EVENTS}"));
    }
    let own = device.lun_map();
    let own: BTreeMap<LunAddress, &MappedUnit> = own.iter().map(|unit| (unit.address, unit)).collect();
    let mut validated = BTreeMap::new();
    for (index, MappedUnitState { at, unit }) in units.into_iter().enumerate() {
        let Some(here) = own.get(&at) else {
            return Err(format!(
                "units[{index}].at: found {at}, where no LUN is here, expected the same LUNs as at the source: \
                 mqblk lun add controller=...,target={},lun={} with the settings that it has there",
                at.target, at.lun
            ));
        };
        let unit = here.nexus.validate_state(unit).map_err(|why| format!("units[{index}] (lun {at}): {why}"))?;
        if validated.insert(at, unit).is_some() {
            return Err(format!("units[{index}].at: found {at} twice, expected each address once"));
        }
    }
    let device = Arc::clone(device);
    Ok(Box::new(move || {
        device.driver_resumed();
        device.set_sizes(sizes);
        device.events().replace(events.map(|events| (events.waiting, events.missed)));
        let mut result = Ok(());
        for (at, unit) in validated {
            let has_grown = unit.has_grown();
            result = result.and(unit.apply());
            if has_grown {
                device.post_event(ScsiEvent::Resized(at));
            }
        }
        result
    }))
}

#[cfg(test)]
mod tests {
    use mqblk_core::{BlockSize, ByteLen, DiskSlot, Geometry, Limits};
    use mqblk_memory::{Buffer, BufferPool};
    use mqblk_scsi::reservation::Reservations;
    use mqblk_scsi::{Identity, LogicalUnit, LogicalUnitOptions, Nexus, UnitAttention};
    use mqblk_virtio::{GuestContext, VirtioDevice};

    use super::*;
    use crate::device::ScsiOptions;

    /// An I/O context that no queue runs on.
    struct NoContext;

    impl mqblk_core::IoContext for NoContext {
        type Buffer = Buffer;
    }

    impl GuestContext for NoContext {
        fn pool(&mut self) -> &mut BufferPool {
            unreachable!("no queue runs")
        }
    }

    fn nexus(address: LunAddress, size: u64) -> Arc<Nexus> {
        let options = LogicalUnitOptions {
            geometry: Geometry {
                size: ByteLen(size),
                logical_block: BlockSize::B512,
                physical_block: BlockSize::B512,
                alignment_offset: 0,
                min_io: ByteLen(0),
                opt_io: ByteLen(0),
                read_only: false,
            },
            limits: Limits {
                max_transfer: ByteLen(1 << 20),
                max_segments: 64,
                discard: None,
                write_zeroes: None,
                volatile_cache: true,
                cost_per_request: true,
                pins_memory: false,
            },
            identity: Identity {
                vendor: "V".into(),
                product: "P".into(),
                revision: "1".into(),
                serial: format!("S{address}"),
                name: format!("u{address}"),
            },
            writeback: true,
            reservations: Reservations::new(None),
        };
        Arc::new(LogicalUnit::new(options)).login("c", u16::from(address.target) + 1).unwrap()
    }

    const FIRST: LunAddress = LunAddress { target: 0, lun: 0 };
    const SECOND: LunAddress = LunAddress { target: 3, lun: 300 };

    fn controller(units: &[(LunAddress, u64)]) -> Arc<VirtioScsi> {
        let options = ScsiOptions { queues: 1, queue_size: 64, cmd_per_lun: 8, max_transfer: ByteLen(1 << 20) };
        let device = Arc::new(VirtioScsi::new(options));
        for (slot, (address, size)) in (0..).map(DiskSlot).zip(units) {
            device.map(*address, slot, nexus(*address, *size)).unwrap();
        }
        device
    }

    fn attentions(device: &VirtioScsi) -> Vec<Vec<UnitAttention>> {
        device.lun_map().iter().map(|unit| unit.nexus.state().attentions).collect()
    }

    #[test]
    fn a_driver_that_resumes_hears_of_no_restart_whichever_queue_starts_first() {
        let controller = controller(&[(FIRST, 1 << 20), (SECOND, 1 << 20)]);
        VirtioDevice::<NoContext>::reset(&*controller);
        assert!(attentions(&controller).iter().all(|pending| !pending.is_empty()));
        VirtioDevice::<NoContext>::driver_started(&*controller, true);
        assert_eq!(attentions(&controller), [vec![], vec![]]);
    }

    #[test]
    fn state_moves_and_survives_the_start_of_the_queues() {
        let source = controller(&[(FIRST, 1 << 20), (SECOND, 1 << 20)]);
        source.set_sizes(DriverSizes { sense: 64, cdb: 16 });
        source.lun_map().iter().for_each(|unit| unit.nexus.initiator_resumed(true));
        source.lun_map().iter().next().unwrap().nexus.raise_attention(UnitAttention::ModeParametersChanged);
        let pending =
            Some((vec![ScsiEvent::Removed(LunAddress { target: 9, lun: 0 }), ScsiEvent::Resized(SECOND)], true));
        source.events().replace(pending.clone());
        let text = save(&source);
        assert_eq!(save(&source), text, "saving changes nothing");

        let there = controller(&[(FIRST, 1 << 20), (SECOND, 1 << 20)]);
        let apply = load(&there, &text).unwrap();
        assert_eq!(there.sizes(), DriverSizes::DEFAULT, "validating changes nothing");
        apply().unwrap();
        VirtioDevice::<NoContext>::set_features(&*there, u64::MAX);
        VirtioDevice::<NoContext>::driver_started(&*there, true);
        assert_eq!((save(&there), there.events().pending()), (text.clone(), pending));
        assert_eq!(attentions(&there), [vec![UnitAttention::ModeParametersChanged], vec![]]);
        // Loading the same state again changes nothing; a reset resets.
        load(&there, &text).unwrap()().unwrap();
        assert_eq!(save(&there), text);
        VirtioDevice::<NoContext>::reset(&*there);
        VirtioDevice::<NoContext>::driver_started(&*there, false);
        assert_eq!((there.sizes(), there.events().pending()), (DriverSizes::DEFAULT, None));
        assert!(attentions(&there).iter().all(|pending| !pending.is_empty()));
    }

    #[test]
    fn invalid_state_is_rejected_as_a_whole() {
        let source = controller(&[(FIRST, 1 << 20), (SECOND, 1 << 20)]);
        source.set_sizes(DriverSizes { sense: 64, cdb: 16 });
        let text = save(&source);
        let there = controller(&[(FIRST, 1 << 20)]);
        let before = save(&there);
        for (text, want) in [
            (
                text.clone(),
                "units[1].at: found 3:300, where no LUN is here, expected the same LUNs as at the source: mqblk lun add",
            ),
            (text.replace("\"cdb-size\":16", "\"cdb-size\":15"), "cdb_size: found 15, expected 16 to 260"),
            (text.replace("\"cdb-size\":16", "\"cdb-size\":-1"), "cdb-size: invalid value"),
            (
                text.replace("\"target\":3,\"lun\":300", "\"target\":0,\"lun\":0"),
                "units[1] (lun 0:0): name: found \"u3:300\"",
            ),
            (text.replace("\"units\"", "\"unit\""), "unknown field `unit`"),
            (text.replace("power-on", "power-off"), "units[0].unit.attentions[0]: unknown variant `power-off`"),
            (text[..text.len() - 1].to_owned(), "EOF"),
        ] {
            let error = load(&there, &text).err().unwrap();
            assert!(error.contains(want), "{error}");
            assert_eq!(save(&there), before);
        }
        let one = save(&controller(&[(FIRST, 1 << 20)]));
        let unit = &one[one.find("{\"at\"").unwrap()..one.len() - 2];
        let twice = one.replace(unit, &format!("{unit},{unit}"));
        assert!(load(&there, &twice).err().unwrap().contains("found 0:0 twice"));
        let event = "{\"removed\":{\"target\":1,\"lun\":0}}";
        let many = |count: usize| {
            let events = vec![event; count].join(",");
            one.replace("\"units\"", &format!("\"events\":{{\"waiting\":[{events}]}},\"units\""))
        };
        assert!(load(&there, &many(MAX_PENDING_EVENTS)).is_ok());
        assert_eq!(
            load(&there, &many(MAX_PENDING_EVENTS + 1)).err().unwrap(),
            "events.waiting: found 65, expected at most 64"
        );
    }

    #[test]
    fn a_larger_logical_unit_raises_an_event() {
        let source = controller(&[(FIRST, 1 << 20)]);
        source.events().replace(Some((Vec::new(), false)));
        let there = controller(&[(FIRST, 2 << 20), (SECOND, 1 << 20)]);
        load(&there, &save(&source)).unwrap()().unwrap();
        assert_eq!(there.events().pending(), Some((vec![ScsiEvent::Resized(FIRST)], false)));
        assert!(attentions(&there)[0].contains(&UnitAttention::CapacityChanged));
    }
}
