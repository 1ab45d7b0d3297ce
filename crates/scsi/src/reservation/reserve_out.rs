//! PERSISTENT RESERVE OUT and its parameter list. Source: SPC-4 section 6.16.

use crate::command::DataOut;
use crate::sense::{Sense, SenseKey};

use super::access::ReservationType;
use super::error::ReservationError;
use super::executed::digest;
use super::fields::{byte, number};
use super::state::{MoveParams, RegisterParams, invalid_cdb_field, invalid_parameter_field};
use super::transport_id;

/// Length of the basic parameter list.
const BASIC_LIST_LEN: usize = 24;
/// Offset of the TransportIDs of a REGISTER with SPEC_I_PT.
const TRANSPORT_IDS_AT: usize = 28;
/// Maximum number of TransportIDs of one command.
const MAX_TRANSPORT_IDS: usize = 1024;

/// PARAMETER LIST LENGTH ERROR.
const PARAMETER_LIST_LENGTH: ReservationError =
    ReservationError::CheckCondition(Sense::new(SenseKey::IllegalRequest, 0x1a, 0x00));

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReserveOutRequest {
    /// RESERVATION KEY.
    pub presented: u64,
    pub action: ServiceAction,
    /// Length of the parameter list.
    pub length: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ServiceAction {
    Register(RegisterParams),
    Reserve(ReservationType),
    Release(Option<ReservationType>),
    Clear,
    Preempt { victim: u64, kind: Result<ReservationType, ReservationError>, abort: bool },
    RegisterAndMove(MoveParams),
}

/// Parses and validates the command and its parameter list. Returns the request and its digest. `aptpl_supported`:
/// reservations can persist through power loss.
pub(super) fn parse<D: DataOut + ?Sized>(
    cdb: &[u8],
    data: &D,
    aptpl_supported: bool,
) -> Result<(ReserveOutRequest, u64), ReservationError> {
    let service_action = byte(cdb, 1) & 0x1f;
    if service_action > 7 {
        return Err(invalid_cdb_field(1, Some(4)));
    }
    let (scope, code) = (byte(cdb, 2) >> 4, byte(cdb, 2) & 0xf);
    // SCOPE 0 is the logical unit, the only scope defined.
    let kind = match ReservationType::from_code(code) {
        _ if scope != 0 => Err(invalid_cdb_field(2, Some(7))),
        Some(kind) => Ok(kind),
        None => Err(invalid_cdb_field(2, Some(3))),
    };
    if service_action == 1 {
        kind?;
    }
    let length = number(cdb, 5, 4) as usize;
    let most = TRANSPORT_IDS_AT + MAX_TRANSPORT_IDS * transport_id::LEN;
    if !(BASIC_LIST_LEN..=most).contains(&length) {
        return Err(PARAMETER_LIST_LENGTH);
    }
    let mut list = vec![0; length];
    if !data.copy(0, &mut list) {
        return Err(ReservationError::Overrun);
    }
    let presented = number(&list, 0, 8);
    let key = number(&list, 8, 8);
    if service_action != 7 {
        let spec_i_pt = list[20] & 0x08 != 0;
        if spec_i_pt && service_action != 0 {
            return Err(invalid_parameter_field(20, Some(3)));
        }
        if !spec_i_pt && length != BASIC_LIST_LEN {
            return Err(PARAMETER_LIST_LENGTH);
        }
    }
    let action = match service_action {
        0 => ServiceAction::Register(register(&list, Some(presented), aptpl_supported)?),
        6 => ServiceAction::Register(register(&list, None, aptpl_supported)?),
        1 => ServiceAction::Reserve(kind?),
        2 => ServiceAction::Release(kind.ok()),
        3 => ServiceAction::Clear,
        7 => ServiceAction::RegisterAndMove(parse_move(&list, aptpl_supported)?),
        other => ServiceAction::Preempt { victim: key, kind, abort: other == 5 },
    };
    Ok((ReserveOutRequest { presented, action, length: length as u64 }, digest(cdb, &list)))
}

fn register(list: &[u8], presented: Option<u64>, aptpl_supported: bool) -> Result<RegisterParams, ReservationError> {
    let flags = list[20];
    let persist = flags & 0x01 != 0;
    if persist && !aptpl_supported {
        return Err(invalid_parameter_field(20, Some(0)));
    }
    let initiators = if flags & 0x08 != 0 { Some(initiators(list)?) } else { None };
    Ok(RegisterParams { presented, key: number(list, 8, 8), all_ports: flags & 0x04 != 0, initiators, aptpl: persist })
}

/// Returns the TransportIDs of a REGISTER with SPEC_I_PT.
fn initiators(list: &[u8]) -> Result<Vec<u64>, ReservationError> {
    if list.len() < TRANSPORT_IDS_AT {
        return Err(PARAMETER_LIST_LENGTH);
    }
    let ids = &list[TRANSPORT_IDS_AT..];
    let (ids, rest) = ids.as_chunks::<{ transport_id::LEN }>();
    if number(list, BASIC_LIST_LEN, 4) != (list.len() - TRANSPORT_IDS_AT) as u64 || !rest.is_empty() {
        return Err(invalid_parameter_field(BASIC_LIST_LEN as u16, None));
    }
    let wrong = |index: u16| invalid_parameter_field(TRANSPORT_IDS_AT as u16 + index * transport_id::LEN as u16, None);
    (0..).zip(ids).map(|(index, id)| transport_id::read(id).ok_or_else(|| wrong(index))).collect()
}

fn parse_move(list: &[u8], aptpl_supported: bool) -> Result<MoveParams, ReservationError> {
    let persist = list[17] & 0x01 != 0;
    if persist && !aptpl_supported {
        return Err(invalid_parameter_field(17, Some(0)));
    }
    let transport_id_len = number(list, 20, 4);
    if transport_id_len != (list.len() - BASIC_LIST_LEN) as u64 {
        return Err(PARAMETER_LIST_LENGTH);
    }
    let id =
        <&[u8; transport_id::LEN]>::try_from(&list[BASIC_LIST_LEN..]).map_err(|_| invalid_parameter_field(20, None))?;
    let initiator = transport_id::read(id).ok_or(invalid_parameter_field(24, None))?;
    let unregister = list[17] & 0x02 != 0;
    Ok(MoveParams { key: number(list, 8, 8), unregister, aptpl: persist, port: number(list, 18, 2) as u16, initiator })
}
