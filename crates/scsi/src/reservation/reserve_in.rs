//! PERSISTENT RESERVE IN. Source: SPC-4 section 6.15.

use super::access::ReservationType;
use super::error::ReservationError;
use super::fields::{byte, number};
use super::state::{Reservation, ReservationState, invalid_cdb_field};
use super::transport_id;

/// Writes the parameter data, cut to its allocation length. `aptpl_supported`: reservations can persist through power
/// loss.
pub(super) fn encode(
    state: &ReservationState,
    cdb: &[u8],
    aptpl_supported: bool,
    data_in: &mut Vec<u8>,
) -> Result<(), ReservationError> {
    data_in.clear();
    match byte(cdb, 1) & 0x1f {
        0 => {
            header(state, state.registrations.len() * 8, data_in);
            state.registrations.iter().for_each(|held| data_in.extend(held.key.to_be_bytes()));
        }
        1 => reservation(state, data_in),
        2 => data_in.extend(capabilities(state, aptpl_supported)),
        3 => full_status(state, data_in),
        _ => return Err(invalid_cdb_field(1, Some(4))),
    }
    data_in.truncate(number(cdb, 7, 2) as usize);
    Ok(())
}

/// PRGENERATION and ADDITIONAL LENGTH.
fn header(state: &ReservationState, additional: usize, data_in: &mut Vec<u8>) {
    data_in.extend(state.generation.to_be_bytes());
    // The number of registrations bounds it.
    data_in.extend((additional as u32).to_be_bytes());
}

/// SCOPE (logical unit: 0) and TYPE.
fn scope_and_type(held: &Reservation) -> u8 {
    held.kind as u8
}

fn reservation(state: &ReservationState, data_in: &mut Vec<u8>) {
    let Some(held) = &state.reservation else { return header(state, 0, data_in) };
    header(state, 16, data_in);
    // Zero for the all-registrants types.
    let key = held.holder.as_ref().and_then(|holder| state.key(holder)).unwrap_or(0);
    data_in.extend(key.to_be_bytes());
    data_in.extend([0, 0, 0, 0, 0, scope_and_type(held), 0, 0]);
}

/// Source: SPC-4 section 6.15.4.
fn capabilities(state: &ReservationState, aptpl_supported: bool) -> [u8; 8] {
    const CRH: u8 = 0x10;
    const SIP_C: u8 = 0x08;
    const ATP_C: u8 = 0x04;
    const PTPL_C: u8 = 0x01;
    const TMV: u8 = 0x80;
    /// ALLOW COMMANDS 001b: TEST UNIT READY is allowed under every reservation; other commands are not reported.
    const TEST_UNIT_READY: u8 = 0x10;
    const PTPL_A: u8 = 0x01;
    let mut kinds = [0; 2];
    for kind in ReservationType::ALL {
        // The bits of the type mask are numbered as the types are: 0 to 7 in the first byte, 8 to 15 in the second.
        kinds[usize::from(kind as u8 / 8)] |= 1 << (kind as u8 % 8);
    }
    let supported = CRH | SIP_C | ATP_C | if aptpl_supported { PTPL_C } else { 0 };
    let active = TMV | TEST_UNIT_READY | if state.aptpl { PTPL_A } else { 0 };
    [0, 8, supported, active, kinds[0], kinds[1], 0, 0]
}

/// Source: SPC-4 section 6.15.5.
fn full_status(state: &ReservationState, data_in: &mut Vec<u8>) {
    const R_HOLDER: u8 = 0x01;
    header(state, state.registrations.len() * (24 + transport_id::LEN), data_in);
    for registration in &state.registrations {
        let holder = state.reservation.as_ref().filter(|_| state.holds(&registration.nexus));
        data_in.extend(registration.key.to_be_bytes());
        data_in.extend([0; 4]);
        data_in.extend([holder.map_or(0, |_| R_HOLDER), holder.map_or(0, scope_and_type)]);
        data_in.extend([0; 4]);
        data_in.extend(registration.nexus.port.to_be_bytes());
        data_in.extend((transport_id::LEN as u32).to_be_bytes());
        data_in.extend(transport_id::write(&registration.nexus.initiator));
    }
}
