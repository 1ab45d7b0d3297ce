//! PERSISTENT RESERVE OUT and its parameter list. Source: SPC-4 section 6.16.

use crate::sense::{Sense, SenseKey};
use crate::step::DataOut;

use super::access::Kind;
use super::executed::digest;
use super::state::{Move, Register, bad_command, bad_parameter};
use super::{Refusal, byte, number, transport_id};

/// Length of the basic parameter list.
const BASIC: usize = 24;
/// Offset of the TransportIDs of a REGISTER with SPEC_I_PT.
const BEFORE_IDS: usize = 28;
/// Maximum number of TransportIDs of one command.
const MOST_IDS: usize = 1024;

/// PARAMETER LIST LENGTH ERROR.
const WRONG_LENGTH: Refusal = Refusal::Check(Sense::new(SenseKey::IllegalRequest, 0x1a, 0x00));

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// RESERVATION KEY.
    pub presented: u64,
    pub action: Action,
    /// Length of the parameter list.
    pub length: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Register(Register),
    Reserve(Kind),
    Release(Option<Kind>),
    Clear,
    Preempt { victim: u64, kind: Result<Kind, Refusal>, abort: bool },
    Move(Move),
}

/// Parses and validates the command and its parameter list. Returns the request and its digest. `aptpl_supported`:
/// reservations can persist through power loss.
pub(super) fn parse<D: DataOut + ?Sized>(
    cdb: &[u8],
    data: &D,
    aptpl_supported: bool,
) -> Result<(Request, u64), Refusal> {
    let service_action = byte(cdb, 1) & 0x1f;
    if service_action > 7 {
        return Err(bad_command(1, Some(4)));
    }
    let (scope, code) = (byte(cdb, 2) >> 4, byte(cdb, 2) & 0xf);
    // SCOPE 0 is the logical unit, the only scope defined.
    let kind = match Kind::from_code(code) {
        _ if scope != 0 => Err(bad_command(2, Some(7))),
        Some(kind) => Ok(kind),
        None => Err(bad_command(2, Some(3))),
    };
    if service_action == 1 {
        kind?;
    }
    let length = number(cdb, 5, 4) as usize;
    let most = BEFORE_IDS + MOST_IDS * transport_id::LEN;
    if !(BASIC..=most).contains(&length) {
        return Err(WRONG_LENGTH);
    }
    let mut list = vec![0; length];
    if !data.copy(0, &mut list) {
        return Err(Refusal::Overrun);
    }
    let presented = number(&list, 0, 8);
    let key = number(&list, 8, 8);
    if service_action != 7 {
        let spec_i_pt = list[20] & 0x08 != 0;
        if spec_i_pt && service_action != 0 {
            return Err(bad_parameter(20, Some(3)));
        }
        if !spec_i_pt && length != BASIC {
            return Err(WRONG_LENGTH);
        }
    }
    let action = match service_action {
        0 => Action::Register(register(&list, Some(presented), aptpl_supported)?),
        6 => Action::Register(register(&list, None, aptpl_supported)?),
        1 => Action::Reserve(kind?),
        2 => Action::Release(kind.ok()),
        3 => Action::Clear,
        7 => Action::Move(parse_move(&list, aptpl_supported)?),
        other => Action::Preempt { victim: key, kind, abort: other == 5 },
    };
    Ok((Request { presented, action, length: length as u64 }, digest(cdb, &list)))
}

fn register(list: &[u8], presented: Option<u64>, aptpl_supported: bool) -> Result<Register, Refusal> {
    let flags = list[20];
    let persist = flags & 0x01 != 0;
    if persist && !aptpl_supported {
        return Err(bad_parameter(20, Some(0)));
    }
    let initiators = if flags & 0x08 != 0 { Some(initiators(list)?) } else { None };
    Ok(Register { presented, key: number(list, 8, 8), all_ports: flags & 0x04 != 0, initiators, persist })
}

/// Returns the TransportIDs of a REGISTER with SPEC_I_PT.
fn initiators(list: &[u8]) -> Result<Vec<u64>, Refusal> {
    if list.len() < BEFORE_IDS {
        return Err(WRONG_LENGTH);
    }
    let ids = &list[BEFORE_IDS..];
    let (ids, rest) = ids.as_chunks::<{ transport_id::LEN }>();
    if number(list, BASIC, 4) != (list.len() - BEFORE_IDS) as u64 || !rest.is_empty() {
        return Err(bad_parameter(BASIC as u16, None));
    }
    let wrong = |index: u16| bad_parameter(BEFORE_IDS as u16 + index * transport_id::LEN as u16, None);
    (0..).zip(ids).map(|(index, id)| transport_id::read(id).ok_or_else(|| wrong(index))).collect()
}

fn parse_move(list: &[u8], aptpl_supported: bool) -> Result<Move, Refusal> {
    let persist = list[17] & 0x01 != 0;
    if persist && !aptpl_supported {
        return Err(bad_parameter(17, Some(0)));
    }
    let transport_id_len = number(list, 20, 4);
    if transport_id_len != (list.len() - BASIC) as u64 {
        return Err(WRONG_LENGTH);
    }
    let id = <&[u8; transport_id::LEN]>::try_from(&list[BASIC..]).map_err(|_| bad_parameter(20, None))?;
    let initiator = transport_id::read(id).ok_or(bad_parameter(24, None))?;
    let unregister = list[17] & 0x02 != 0;
    Ok(Move { key: number(list, 8, 8), unregister, persist, port: number(list, 18, 2) as u16, initiator })
}
