//! The control queue: task management functions, which complete when the commands they abort have completed. Source:
//! virtio 1.3 section 5.6.6.2, "Device Operation: controlq"; SAM-5 chapter 7.

use std::sync::Arc;

use mqblk_core::{DiskSlot, Intake, PullEnd, Wake};
use mqblk_memory::{Buffer, BufferPool};
use mqblk_ring::virtqueue::{ChainBatch, ChainHead, VirtqueueError};
use mqblk_scsi::Nexus;
use mqblk_scsi::reservation::Ticket;
use virtio_bindings::virtio_scsi as b;

use crate::device::VirtioScsi;
use crate::lun_map::LunField;
use crate::queue_ring::QueueRing;
use crate::request_chain::{RequestChain, ResponseBuffer};
use crate::task_management::{TaskManagement, TmfAction, TmfScope};
use crate::token::ScsiToken;

/// Length of the longest request: `struct virtio_scsi_ctrl_tmf`.
const TMF_BYTES: usize = 24;
/// Length of `struct virtio_scsi_ctrl_an`.
const AN_BYTES: usize = 16;
/// Length of the longest response: event_actual and response.
const AN_RESPONSE_BYTES: u32 = 5;

/// A task management function in progress.
struct PendingTmf {
    head: u16,
    response: ResponseBuffer,
    tmf: Arc<TaskManagement>,
    /// Aborts of the commands of other nexuses.
    other_aborts: Vec<Arc<Ticket>>,
    follow_up: FollowUp,
}

impl PendingTmf {
    fn is_done(&self) -> bool {
        self.tmf.is_done() && self.other_aborts.iter().all(|ticket| ticket.result().is_some())
    }
}

/// The action of a function after its commands have been aborted.
enum FollowUp {
    Nothing,
    /// CLEAR TASK SET: raises COMMANDS CLEARED BY ANOTHER INITIATOR for other initiators.
    RaiseCommandsCleared(Arc<Nexus>),
    ResetUnit(Arc<Nexus>),
    ResetNexuses(Vec<Arc<Nexus>>),
}

/// The handling of a request.
enum TmfPlan {
    Respond(u8),
    Submit(TmfScope, TmfAction, FollowUp),
}

/// The control queue.
pub(crate) struct ControlQueue {
    pub(crate) ring: QueueRing,
    device: Arc<VirtioScsi>,
    waker: Arc<dyn Wake>,
    batch: ChainBatch,
    pending: Vec<PendingTmf>,
}

impl ControlQueue {
    pub(crate) fn new(device: Arc<VirtioScsi>, ring: QueueRing, waker: Arc<dyn Wake>) -> ControlQueue {
        ControlQueue { ring, device, waker, batch: ChainBatch::default(), pending: Vec::new() }
    }

    pub(crate) fn blocked(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn pull<I: Intake<ScsiToken, Buffer>>(&mut self, pool: &mut BufferPool, into: &mut I) -> PullEnd {
        match self.batch.fetch(&mut self.ring.device, pool, self.ring.share.lease(), into.room()) {
            Ok((0, false)) => PullEnd::Empty { taken: 0 },
            Ok((count, more)) => {
                for at in 0..count {
                    let start = self.batch.heads[at];
                    match self.process_chain(pool, &start) {
                        Ok(true) => into.completed_locally(),
                        Ok(false) => into.malformed("an unknown or incomplete request on the control queue"),
                        Err(broken) => return PullEnd::Broken(broken.0),
                    }
                }
                // Without request queues the functions are complete.
                self.complete_done(pool);
                PullEnd::of(count, more)
            }
            Err(broken) => PullEnd::Broken(broken.0),
        }
    }

    /// Begins one request. Returns true if it was well formed.
    fn process_chain(&mut self, pool: &mut BufferPool, start: &ChainHead) -> Result<bool, VirtqueueError> {
        let mut header = [0; TMF_BYTES];
        // All writable bytes are the response buffer: there is no data.
        let mut element = RequestChain::new(pool.take(self.ring.share.lease()));
        let (ring, lease) = (&self.ring.device, self.ring.share.lease());
        if let Err(broken) = element.read(ring, pool, lease, start, &mut header, u32::MAX) {
            element.release(pool);
            return Err(broken);
        }
        let RequestChain { header_len, data, response, fault, .. } = element;
        pool.release(data);
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let capacity = response.capacity;
        match kind {
            _ if fault.is_some() || capacity == 0 => {
                response.release(pool);
                self.ring.device.put_used(start.index, 0);
                Ok(false)
            }
            b::VIRTIO_SCSI_T_TMF if header_len == TMF_BYTES => {
                match self.plan_tmf(&header) {
                    TmfPlan::Respond(code) => {
                        response.write(pool, lease, &[code]);
                        self.ring.device.put_used(start.index, 1);
                    }
                    TmfPlan::Submit(scope, action, after) => {
                        let others = match &after {
                            FollowUp::RaiseCommandsCleared(nexus) | FollowUp::ResetUnit(nexus) => {
                                nexus.unit().abort_others(nexus, &self.waker)
                            }
                            FollowUp::Nothing | FollowUp::ResetNexuses(_) => Vec::new(),
                        };
                        let tmf = self.device.tmf_mailboxes.submit(scope, action, Arc::clone(&self.waker));
                        self.pending.push(PendingTmf {
                            head: start.index,
                            response,
                            tmf,
                            other_aborts: others,
                            follow_up: after,
                        });
                    }
                }
                Ok(true)
            }
            // No asynchronous events are supported, so event_actual is 0.
            b::VIRTIO_SCSI_T_AN_QUERY | b::VIRTIO_SCSI_T_AN_SUBSCRIBE
                if header_len >= AN_BYTES && capacity >= AN_RESPONSE_BYTES =>
            {
                let mut bytes = [0; AN_RESPONSE_BYTES as usize];
                let [_, _, _, _, lun @ .., _, _, _, _, _, _, _, _, _, _, _, _] = header;
                bytes[4] = self.find_unit(lun).map_or_else(|response| response, |_| b::VIRTIO_SCSI_S_OK as u8);
                response.write(pool, lease, &bytes);
                self.ring.device.put_used(start.index, AN_RESPONSE_BYTES);
                Ok(true)
            }
            _ => {
                response.write(pool, lease, &[b::VIRTIO_SCSI_S_FUNCTION_REJECTED as u8]);
                self.ring.device.put_used(start.index, 1);
                Ok(false)
            }
        }
    }

    /// Returns the logical unit that a `lun` field addresses, or the response code if there is none.
    fn find_unit(&self, lun: [u8; 8]) -> Result<(DiskSlot, Arc<Nexus>), u8> {
        let units = self.device.lun_map();
        let (target, lun) = match LunField::decode(lun) {
            LunField::Lun(place) => (place.target, Some(place.lun)),
            LunField::InvalidLun(target) => (target, None),
            LunField::NoTarget => return Err(b::VIRTIO_SCSI_S_BAD_TARGET as u8),
        };
        let target = units.target(target).ok_or(b::VIRTIO_SCSI_S_BAD_TARGET as u8)?;
        let unit = lun.and_then(|lun| target.unit(lun)).ok_or(b::VIRTIO_SCSI_S_INCORRECT_LUN as u8)?;
        Ok((unit.slot, Arc::clone(&unit.nexus)))
    }

    fn plan_tmf(&self, header: &[u8; TMF_BYTES]) -> TmfPlan {
        let [_, _, _, _, s0, s1, s2, s3, lun @ .., i0, i1, i2, i3, i4, i5, i6, i7] = *header;
        let id = u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]);
        let subtype = u32::from_le_bytes([s0, s1, s2, s3]);
        let aborted = TmfAction::Abort(b::VIRTIO_SCSI_S_ABORTED as u8);
        let reset = TmfAction::Abort(b::VIRTIO_SCSI_S_RESET as u8);
        if subtype == b::VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET {
            return self.plan_nexus_reset(lun, reset);
        }
        let (unit, nexus) = match self.find_unit(lun) {
            Ok(found) => found,
            Err(response) => return TmfPlan::Respond(response),
        };
        match subtype {
            b::VIRTIO_SCSI_T_TMF_ABORT_TASK => TmfPlan::Submit(TmfScope::Task { unit, id }, aborted, FollowUp::Nothing),
            b::VIRTIO_SCSI_T_TMF_QUERY_TASK => {
                TmfPlan::Submit(TmfScope::Task { unit, id }, TmfAction::Query, FollowUp::Nothing)
            }
            b::VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => {
                TmfPlan::Submit(TmfScope::LogicalUnit(unit), TmfAction::Query, FollowUp::Nothing)
            }
            b::VIRTIO_SCSI_T_TMF_ABORT_TASK_SET => {
                TmfPlan::Submit(TmfScope::LogicalUnit(unit), aborted, FollowUp::Nothing)
            }
            b::VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => {
                TmfPlan::Submit(TmfScope::LogicalUnit(unit), aborted, FollowUp::RaiseCommandsCleared(nexus))
            }
            b::VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => {
                TmfPlan::Submit(TmfScope::LogicalUnit(unit), reset, FollowUp::ResetUnit(nexus))
            }
            // CLEAR ACA: there is never an auto contingent allegiance, as NACA is rejected.
            _ => TmfPlan::Respond(b::VIRTIO_SCSI_S_FUNCTION_REJECTED as u8),
        }
    }

    /// I_T NEXUS RESET: the nexus is the initiator's with a target, for any LUN.
    fn plan_nexus_reset(&self, lun: [u8; 8], action: TmfAction) -> TmfPlan {
        let (LunField::Lun(crate::LunAddress { target, .. }) | LunField::InvalidLun(target)) = LunField::decode(lun)
        else {
            return TmfPlan::Respond(b::VIRTIO_SCSI_S_BAD_TARGET as u8);
        };
        let units = self.device.lun_map();
        let nexuses: Vec<_> =
            units.iter().filter(|unit| unit.address.target == target).map(|unit| Arc::clone(&unit.nexus)).collect();
        if nexuses.is_empty() {
            return TmfPlan::Respond(b::VIRTIO_SCSI_S_BAD_TARGET as u8);
        }
        TmfPlan::Submit(TmfScope::Target(target), action, FollowUp::ResetNexuses(nexuses))
    }

    /// Completes the functions whose commands have all completed.
    pub(crate) fn complete_done(&mut self, pool: &mut BufferPool) {
        for PendingTmf { head, response, tmf, follow_up: after, .. } in
            self.pending.extract_if(.., |running| running.is_done())
        {
            match after {
                FollowUp::Nothing => {}
                FollowUp::RaiseCommandsCleared(nexus) => nexus.unit().raise_commands_cleared(&nexus),
                FollowUp::ResetUnit(nexus) => nexus.unit().reset(),
                FollowUp::ResetNexuses(nexuses) => nexuses.iter().for_each(|nexus| nexus.nexus_lost()),
            }
            let code = match tmf.action {
                TmfAction::Query if tmf.has_matched() => b::VIRTIO_SCSI_S_FUNCTION_SUCCEEDED,
                // FUNCTION_COMPLETE.
                _ => b::VIRTIO_SCSI_S_OK,
            };
            response.write(pool, self.ring.share.lease(), &[code as u8]);
            self.ring.device.put_used(head, 1);
        }
    }
}
