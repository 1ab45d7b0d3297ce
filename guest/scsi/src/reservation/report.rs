//! PERSISTENT RESERVE IN. Source: SPC-4 section 6.15.

use super::access::Kind;
use super::state::{Reservation, State, bad_command};
use super::{Refusal, byte, number, transport_id};

/// Writes the answer, cut to its allocation length. `keeps`: whether reservations can outlive a loss of power.
pub(super) fn answer(state: &State, cdb: &[u8], keeps: bool, reply: &mut Vec<u8>) -> Result<(), Refusal> {
    reply.clear();
    match byte(cdb, 1) & 0x1f {
        0 => {
            header(state, state.registrations.len() * 8, reply);
            state.registrations.iter().for_each(|held| reply.extend(held.key.to_be_bytes()));
        }
        1 => reservation(state, reply),
        2 => reply.extend(capabilities(state, keeps)),
        3 => full_status(state, reply),
        _ => return Err(bad_command(1, Some(4))),
    }
    reply.truncate(number(cdb, 7, 2) as usize);
    Ok(())
}

/// PRGENERATION and ADDITIONAL LENGTH.
fn header(state: &State, additional: usize, reply: &mut Vec<u8>) {
    reply.extend(state.generation.to_be_bytes());
    // Bounded by the number of registrations.
    reply.extend((additional as u32).to_be_bytes());
}

/// SCOPE (logical unit: 0) and TYPE.
fn scope_and_type(held: &Reservation) -> u8 {
    held.kind as u8
}

fn reservation(state: &State, reply: &mut Vec<u8>) {
    let Some(held) = &state.reservation else { return header(state, 0, reply) };
    header(state, 16, reply);
    // Zero when all registered nexuses hold it.
    let key = held.holder.as_ref().and_then(|holder| state.key(holder)).unwrap_or(0);
    reply.extend(key.to_be_bytes());
    reply.extend([0, 0, 0, 0, 0, scope_and_type(held), 0, 0]);
}

/// Source: SPC-4 section 6.15.4.
fn capabilities(state: &State, keeps: bool) -> [u8; 8] {
    const CRH: u8 = 0x10;
    const SIP_C: u8 = 0x08;
    const ATP_C: u8 = 0x04;
    const PTPL_C: u8 = 0x01;
    const TMV: u8 = 0x80;
    /// ALLOW COMMANDS 001b: TEST UNIT READY is allowed under every reservation; nothing is said of the others.
    const TEST_UNIT_READY: u8 = 0x10;
    const PTPL_A: u8 = 0x01;
    let mut kinds = [0; 2];
    for kind in Kind::ALL {
        // The mask's bytes are numbered as the types are: 0 to 7 in the first byte, 8 to 15 in the second.
        kinds[usize::from(kind as u8 / 8)] |= 1 << (kind as u8 % 8);
    }
    let can = CRH | SIP_C | ATP_C | if keeps { PTPL_C } else { 0 };
    let does = TMV | TEST_UNIT_READY | if state.persist { PTPL_A } else { 0 };
    [0, 8, can, does, kinds[0], kinds[1], 0, 0]
}

/// Source: SPC-4 section 6.15.5.
fn full_status(state: &State, reply: &mut Vec<u8>) {
    const R_HOLDER: u8 = 0x01;
    header(state, state.registrations.len() * (24 + transport_id::LEN), reply);
    for registration in &state.registrations {
        let holder = state.reservation.as_ref().filter(|_| state.holds(&registration.nexus));
        reply.extend(registration.key.to_be_bytes());
        reply.extend([0; 4]);
        reply.extend([holder.map_or(0, |_| R_HOLDER), holder.map_or(0, scope_and_type)]);
        reply.extend([0; 4]);
        reply.extend(registration.nexus.port.to_be_bytes());
        reply.extend((transport_id::LEN as u32).to_be_bytes());
        reply.extend(transport_id::write(&registration.nexus.initiator));
    }
}
