//! Fixture: the reservations of a logical unit and some nexuses, driven by encoded commands.
#![allow(dead_code, reason = "each test uses some of it")]

use std::sync::{Arc, Mutex};

use mqblk_core::Wake;
use mqblk_scsi::reservation::{
    AccessClass, NexusName, ReservationError, ReservationHandle, ReservationStore, Reservations, ReserveOutResult,
    Ticket, locally_assigned,
};
use mqblk_scsi::unit_attention::UnitAttentionQueue;
use mqblk_scsi::{Sense, SenseKey};

pub(crate) const REGISTER: u8 = 0;
pub(crate) const RESERVE: u8 = 1;
pub(crate) const RELEASE: u8 = 2;
pub(crate) const CLEAR: u8 = 3;
pub(crate) const PREEMPT: u8 = 4;
pub(crate) const PREEMPT_AND_ABORT: u8 = 5;
pub(crate) const REGISTER_AND_IGNORE: u8 = 6;
pub(crate) const REGISTER_AND_MOVE: u8 = 7;

pub(crate) const APTPL: u8 = 0x01;
pub(crate) const ALL_TG_PT: u8 = 0x04;
pub(crate) const SPEC_I_PT: u8 = 0x08;

pub(crate) const CLASSES: [AccessClass; 4] =
    [AccessClass::Always, AccessClass::Status, AccessClass::Read, AccessClass::Write];

pub(crate) struct NoWake;

impl Wake for NoWake {
    fn wake(&self) {}
}

/// Stores the last state in memory; resolves tickets at once.
#[derive(Default)]
pub(crate) struct MemoryStore(pub Mutex<Option<Vec<u8>>>);

impl ReservationStore for MemoryStore {
    fn save(&self, state: Vec<u8>, done: Arc<dyn Wake>) -> Arc<Ticket> {
        *self.0.lock().expect("not poisoned") = Some(state);
        let ticket = Ticket::new(done);
        ticket.resolve(Ok(()));
        ticket
    }
}

pub(crate) struct Nexus {
    pub reservation: ReservationHandle,
    pub attentions: Arc<UnitAttentionQueue>,
}

pub(crate) struct Rig {
    pub unit: Arc<Reservations>,
    pub memory: Arc<MemoryStore>,
    pub nexuses: Vec<Nexus>,
}

/// Names of the nexuses: one initiator sees two ports, one port is seen by two initiators.
pub(crate) const NAMES: [(&str, u16); 4] = [("a", 1), ("a", 2), ("b", 1), ("c", 3)];

pub(crate) fn name((initiator, port): (&str, u16)) -> NexusName {
    NexusName { initiator: initiator.into(), port }
}

pub(crate) fn join(unit: &Arc<Reservations>) -> Vec<Nexus> {
    let join = |who: &(&str, u16)| {
        let attentions = Arc::new(UnitAttentionQueue::new());
        let party = unit.add_nexus(name(*who), Arc::clone(&attentions)).expect("a new name");
        Nexus { reservation: party, attentions }
    };
    NAMES.iter().map(join).collect()
}

impl Rig {
    pub(crate) fn new() -> Rig {
        let memory = Arc::<MemoryStore>::default();
        let unit = Reservations::new(Some(Arc::clone(&memory) as Arc<dyn ReservationStore>));
        Rig { nexuses: join(&unit), unit, memory }
    }

    pub(crate) fn reserve_out(&self, from: usize, ask: &ReserveOut) -> Result<ReserveOutResult, ReservationError> {
        self.reserve_out_bytes(from, &ask.cdb(), &ask.list())
    }

    pub(crate) fn reserve_out_bytes(
        &self,
        from: usize,
        cdb: &[u8],
        list: &[u8],
    ) -> Result<ReserveOutResult, ReservationError> {
        self.nexuses[from].reservation.persistent_out(cdb, list, &(Arc::new(NoWake) as Arc<dyn Wake>))
    }

    pub(crate) fn ok(&self, from: usize, ask: &ReserveOut) -> ReserveOutResult {
        self.reserve_out(from, ask).unwrap_or_else(|refusal| panic!("{ask:?} from {from}: {refusal:?}"))
    }

    pub(crate) fn reserve_in(
        &self,
        from: usize,
        service_action: u8,
        allocation: u16,
    ) -> Result<Vec<u8>, ReservationError> {
        let [high, low] = allocation.to_be_bytes();
        let mut reply = vec![0xee; 7];
        self.nexuses[from]
            .reservation
            .persistent_in(&[0x5e, service_action, 0, 0, 0, 0, 0, high, low, 0], &mut reply)
            .map(|()| reply)
    }

    /// RESERVE(6) or RELEASE(6).
    pub(crate) fn unit_command(&self, from: usize, operation: u8) -> Result<(), ReservationError> {
        self.nexuses[from].reservation.reserve_or_release(&[operation, 0, 0, 0, 0, 0])
    }

    pub(crate) fn generation(&self) -> u32 {
        u32::from_be_bytes(self.reserve_in(0, 0, 8).expect("READ KEYS")[..4].try_into().expect("four bytes"))
    }

    /// Takes the pending unit attentions of each nexus, as ASCQ of 2Ah.
    pub(crate) fn take_attentions(&self) -> Vec<Vec<u8>> {
        let drain = |nexus: &Nexus| {
            std::iter::from_fn(|| nexus.attentions.take())
                .map(|sense| {
                    assert_eq!((sense.key, sense.asc), (SenseKey::UnitAttention, 0x2a));
                    sense.ascq
                })
                .collect()
        };
        self.nexuses.iter().map(drain).collect()
    }

    pub(crate) fn rights(&self, of: usize) -> Vec<bool> {
        CLASSES.iter().map(|class| self.nexuses[of].reservation.allows(*class)).collect()
    }
}

/// A PERSISTENT RESERVE OUT.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReserveOut {
    pub service_action: u8,
    /// SCOPE and TYPE.
    pub kind: u8,
    pub presented: u64,
    pub key: u64,
    /// Byte 20 of the basic parameter list.
    pub flags: u8,
    pub initiators: Vec<&'static str>,
    /// Of REGISTER AND MOVE: UNREG, target port.
    pub moves: (bool, u16),
}

pub(crate) fn transport_id(initiator: &str) -> [u8; 24] {
    let mut id = [0; 24];
    id[0] = 6;
    id[4..12].copy_from_slice(&locally_assigned(initiator).to_be_bytes());
    id
}

impl ReserveOut {
    pub(crate) fn new(service_action: u8, kind: u8, presented: u64, key: u64) -> ReserveOut {
        ReserveOut { service_action, kind, presented, key, ..ReserveOut::default() }
    }

    pub(crate) fn with(self, flags: u8) -> ReserveOut {
        ReserveOut { flags, ..self }
    }

    pub(crate) fn naming(self, initiators: &[&'static str]) -> ReserveOut {
        ReserveOut { initiators: initiators.to_vec(), ..self }
    }

    pub(crate) fn cdb(&self) -> [u8; 10] {
        let length = (self.list().len() as u32).to_be_bytes();
        let mut cdb = [0x5f, self.service_action, self.kind, 0, 0, 0, 0, 0, 0, 0];
        cdb[5..9].copy_from_slice(&length);
        cdb
    }

    pub(crate) fn list(&self) -> Vec<u8> {
        let mut list = vec![0; 24];
        list[..8].copy_from_slice(&self.presented.to_be_bytes());
        list[8..16].copy_from_slice(&self.key.to_be_bytes());
        let ids: Vec<u8> = self.initiators.iter().flat_map(|name| transport_id(name)).collect();
        let length = (ids.len() as u32).to_be_bytes();
        if self.service_action == REGISTER_AND_MOVE {
            list[17] = u8::from(self.moves.0) << 1 | self.flags & APTPL;
            list[18..20].copy_from_slice(&self.moves.1.to_be_bytes());
            list[20..24].copy_from_slice(&length);
        } else {
            list[20] = self.flags;
            if self.flags & SPEC_I_PT != 0 {
                list.extend(length);
            }
        }
        list.extend(ids);
        list
    }
}

/// Sense key, ASC, ASCQ and field pointer (in the CDB, byte, bit) of an error.
pub(crate) type Pointed = (u8, u8, u8, Option<(bool, u16, Option<u8>)>);

pub(crate) fn pointed<T: std::fmt::Debug>(result: Result<T, ReservationError>) -> Pointed {
    match result {
        Err(ReservationError::CheckCondition(Sense { key, asc, ascq, field, .. })) => {
            (key as u8, asc, ascq, field.map(|field| (field.in_cdb, field.byte, field.bit)))
        }
        other => panic!("expected CHECK CONDITION, found {other:?}"),
    }
}

pub(crate) fn expect_conflict<T: std::fmt::Debug>(result: Result<T, ReservationError>) {
    assert!(matches!(result, Err(ReservationError::Conflict)), "expected RESERVATION CONFLICT, found {result:?}");
}

/// Returns the keys of READ KEYS.
pub(crate) fn keys(rig: &Rig) -> Vec<u64> {
    let reply = rig.reserve_in(0, 0, 1000).expect("READ KEYS");
    assert_eq!(u32::from_be_bytes(reply[4..8].try_into().expect("four")) as usize, reply.len() - 8);
    reply[8..].chunks(8).map(|key| u64::from_be_bytes(key.try_into().expect("eight"))).collect()
}

/// Returns key and type of the reservation.
pub(crate) fn reservation(rig: &Rig) -> Option<(u64, u8)> {
    let reply = rig.reserve_in(0, 1, 1000).expect("READ RESERVATION");
    if reply.len() == 8 {
        assert_eq!(reply[4..8], [0; 4]);
        return None;
    }
    assert_eq!((reply.len(), &reply[4..8]), (24, &[0, 0, 0, 16][..]));
    Some((u64::from_be_bytes(reply[8..16].try_into().expect("eight")), reply[21]))
}
