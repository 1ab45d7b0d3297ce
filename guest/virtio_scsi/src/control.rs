//! The control queue: task management functions, which complete when the commands they abort have completed. Source:
//! virtio 1.3 section 5.6.6.2, "Device Operation: controlq"; SAM-5 chapter 7.

use std::sync::Arc;

use mqblk_core::{DiskSlot, Intake, Pulled, Wake};
use mqblk_memory::{Buffer, BufferPool};
use mqblk_ring::split::Broken;
use mqblk_scsi::Nexus;
use mqblk_scsi::reservation::Ticket;
use mqblk_virtio::batch::Batch;
use mqblk_virtio::chain::ChainStart;
use virtio_bindings::virtio_scsi as b;

use crate::device::VirtioScsi;
use crate::element::{Answer, Element};
use crate::orders::{Action, Order, Scope};
use crate::queue::{Ring, ScsiToken};
use crate::units::Address;

/// Length of the longest request: `struct virtio_scsi_ctrl_tmf`.
const TMF_BYTES: usize = 24;
/// Length of `struct virtio_scsi_ctrl_an`.
const AN_BYTES: usize = 16;
/// Length of the longest response: event_actual and response.
const AN_ANSWER_BYTES: u32 = 5;

/// A task management function in progress.
struct Running {
    head: u16,
    answer: Answer,
    order: Arc<Order>,
    /// Aborts of the commands of other nexuses.
    others: Vec<Arc<Ticket>>,
    after: After,
}

impl Running {
    fn is_done(&self) -> bool {
        self.order.is_done() && self.others.iter().all(|ticket| ticket.result().is_some())
    }
}

/// What a function does after its commands have been aborted.
enum After {
    Nothing,
    /// CLEAR TASK SET: raises COMMANDS CLEARED BY ANOTHER INITIATOR for other initiators.
    TellOthers(Arc<Nexus>),
    ResetUnit(Arc<Nexus>),
    ResetNexuses(Vec<Arc<Nexus>>),
}

/// How a request is handled.
enum Asked {
    Answer(u8),
    Order(Scope, Action, After),
}

/// The control queue.
pub struct ControlQueue {
    pub(crate) ring: Ring,
    device: Arc<VirtioScsi>,
    waker: Arc<dyn Wake>,
    batch: Batch,
    running: Vec<Running>,
}

impl ControlQueue {
    pub(crate) fn new(device: Arc<VirtioScsi>, ring: Ring, waker: Arc<dyn Wake>) -> ControlQueue {
        ControlQueue { ring, device, waker, batch: Batch::default(), running: Vec::new() }
    }

    pub(crate) fn held(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn pull<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) -> Pulled {
        match self.batch.fetch(&mut self.ring.device, pool, self.ring.lease, into.room()) {
            Ok((0, false)) => Pulled::Dry,
            Ok((count, more)) => {
                for at in 0..count {
                    let start = self.batch.starts[at];
                    match self.take_one(pool, &start) {
                        Ok(well_formed) => into.answered(well_formed),
                        Err(broken) => return Pulled::Broken(broken.0),
                    }
                }
                // Without request queues the functions are complete.
                self.answer_done(pool);
                if more { Pulled::MoreWaiting } else { Pulled::Dry }
            }
            Err(broken) => Pulled::Broken(broken.0),
        }
    }

    /// Begins one request. Returns true if it was well formed.
    fn take_one(&mut self, pool: &mut BufferPool, start: &ChainStart) -> Result<bool, Broken> {
        let mut header = [0; TMF_BYTES];
        // All writable bytes are the response buffer: there is no data.
        let mut element = Element::new(pool.take(self.ring.lease));
        let (ring, lease) = (&self.ring.device, self.ring.lease);
        if let Err(broken) = element.read(ring, pool, lease, start, &mut header, u32::MAX) {
            element.release(pool);
            return Err(broken);
        }
        let Element { header_len, data, answer: response, fault, .. } = element;
        pool.release(data);
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let capacity = response.room;
        match kind {
            _ if fault || capacity == 0 => {
                response.release(pool);
                self.ring.device.put_used(start.head, 0);
                Ok(false)
            }
            b::VIRTIO_SCSI_T_TMF if header_len == TMF_BYTES => {
                match self.judge(&header) {
                    Asked::Answer(code) => {
                        response.write(pool, lease, &[code]);
                        self.ring.device.put_used(start.head, 1);
                    }
                    Asked::Order(scope, action, after) => {
                        let others = match &after {
                            After::TellOthers(nexus) | After::ResetUnit(nexus) => {
                                nexus.unit().abort_others(nexus, &self.waker)
                            }
                            After::Nothing | After::ResetNexuses(_) => Vec::new(),
                        };
                        let tmf = self.device.posts.give(scope, action, Arc::clone(&self.waker));
                        self.running.push(Running { head: start.head, answer: response, order: tmf, others, after });
                    }
                }
                Ok(true)
            }
            // No asynchronous events are supported, so event_actual is 0.
            b::VIRTIO_SCSI_T_AN_QUERY | b::VIRTIO_SCSI_T_AN_SUBSCRIBE
                if header_len >= AN_BYTES && capacity >= AN_ANSWER_BYTES =>
            {
                let mut bytes = [0; AN_ANSWER_BYTES as usize];
                let [_, _, _, _, lun @ .., _, _, _, _, _, _, _, _, _, _, _, _] = header;
                bytes[4] = self.find(lun).map_or_else(|response| response, |_| b::VIRTIO_SCSI_S_OK as u8);
                response.write(pool, lease, &bytes);
                self.ring.device.put_used(start.head, AN_ANSWER_BYTES);
                Ok(true)
            }
            _ => {
                response.write(pool, lease, &[b::VIRTIO_SCSI_S_FUNCTION_REJECTED as u8]);
                self.ring.device.put_used(start.head, 1);
                Ok(false)
            }
        }
    }

    /// Returns the logical unit that a `lun` field addresses, or the response code if there is none.
    fn find(&self, lun: [u8; 8]) -> Result<(DiskSlot, Arc<Nexus>), u8> {
        let units = self.device.units();
        let (target, lun) = match Address::of_field(lun) {
            Address::Place(place) => (place.target, Some(place.lun)),
            Address::NoLun(target) => (target, None),
            Address::Nowhere => return Err(b::VIRTIO_SCSI_S_BAD_TARGET as u8),
        };
        let target = units.target(target).ok_or(b::VIRTIO_SCSI_S_BAD_TARGET as u8)?;
        let unit = lun.and_then(|lun| target.unit(lun)).ok_or(b::VIRTIO_SCSI_S_INCORRECT_LUN as u8)?;
        Ok((unit.slot, Arc::clone(&unit.nexus)))
    }

    fn judge(&self, header: &[u8; TMF_BYTES]) -> Asked {
        let [_, _, _, _, s0, s1, s2, s3, lun @ .., i0, i1, i2, i3, i4, i5, i6, i7] = *header;
        let id = u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]);
        let subtype = u32::from_le_bytes([s0, s1, s2, s3]);
        let aborted = Action::End(b::VIRTIO_SCSI_S_ABORTED as u8);
        let reset = Action::End(b::VIRTIO_SCSI_S_RESET as u8);
        if subtype == b::VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET {
            return self.judge_nexus_reset(lun, reset);
        }
        let (unit, nexus) = match self.find(lun) {
            Ok(found) => found,
            Err(response) => return Asked::Answer(response),
        };
        match subtype {
            b::VIRTIO_SCSI_T_TMF_ABORT_TASK => Asked::Order(Scope::Task { unit, id }, aborted, After::Nothing),
            b::VIRTIO_SCSI_T_TMF_QUERY_TASK => Asked::Order(Scope::Task { unit, id }, Action::Query, After::Nothing),
            b::VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => Asked::Order(Scope::Unit(unit), Action::Query, After::Nothing),
            b::VIRTIO_SCSI_T_TMF_ABORT_TASK_SET => Asked::Order(Scope::Unit(unit), aborted, After::Nothing),
            b::VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => Asked::Order(Scope::Unit(unit), aborted, After::TellOthers(nexus)),
            b::VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => Asked::Order(Scope::Unit(unit), reset, After::ResetUnit(nexus)),
            // CLEAR ACA: there is never an auto contingent allegiance, as NACA is rejected.
            _ => Asked::Answer(b::VIRTIO_SCSI_S_FUNCTION_REJECTED as u8),
        }
    }

    /// I_T NEXUS RESET: the nexus is the initiator's with a target, whatever the LUN.
    fn judge_nexus_reset(&self, lun: [u8; 8], action: Action) -> Asked {
        let (Address::Place(crate::Place { target, .. }) | Address::NoLun(target)) = Address::of_field(lun) else {
            return Asked::Answer(b::VIRTIO_SCSI_S_BAD_TARGET as u8);
        };
        let units = self.device.units();
        let nexuses: Vec<_> =
            units.iter().filter(|unit| unit.place.target == target).map(|unit| Arc::clone(&unit.nexus)).collect();
        if nexuses.is_empty() {
            return Asked::Answer(b::VIRTIO_SCSI_S_BAD_TARGET as u8);
        }
        Asked::Order(Scope::Target(target), action, After::ResetNexuses(nexuses))
    }

    /// Completes the functions whose commands have all completed.
    pub(crate) fn answer_done(&mut self, pool: &mut BufferPool) {
        for Running { head, answer: response, order: tmf, after, .. } in
            self.running.extract_if(.., |running| running.is_done())
        {
            match after {
                After::Nothing => {}
                After::TellOthers(nexus) => nexus.unit().cleared_by(&nexus),
                After::ResetUnit(nexus) => nexus.unit().reset(),
                After::ResetNexuses(nexuses) => nexuses.iter().for_each(|nexus| nexus.lost()),
            }
            let code = match tmf.action {
                Action::Query if tmf.has_matched() => b::VIRTIO_SCSI_S_FUNCTION_SUCCEEDED,
                // FUNCTION_COMPLETE.
                _ => b::VIRTIO_SCSI_S_OK,
            };
            response.write(pool, self.ring.lease, &[code as u8]);
            self.ring.device.put_used(head, 1);
        }
    }
}
