//! The device for a transport.

use std::sync::Arc;

use mqblk_virtio::features::RING_FEATURES;
use mqblk_virtio::{ApplyState, GuestContext, QueueResources, VirtioDevice};

use crate::config::WRITEBACK_OFFSET;
use crate::device::VirtioBlk;
use crate::queue::BlkQueue;
use crate::state;

/// Bits of [`VirtioDevice::config_bits`]: the cache mode is valid, and it is write-back. Stable across versions.
const CONFIGURED: u64 = 1;
const WRITEBACK: u64 = 1 << 1;

impl<L: GuestContext> VirtioDevice<L> for VirtioBlk {
    type Queue = BlkQueue<L>;

    fn features(&self) -> u64 {
        self.config().features() | RING_FEATURES
    }

    fn set_features(&self, accepted: u64) {
        self.negotiate(accepted);
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        mqblk_virtio::read_config_space(&self.config().bytes(), offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        let mut current = vec![0; bytes.len()];
        VirtioDevice::<L>::read_config(self, offset, &mut current);
        // Applied only if all bytes are valid: a refused write leaves no trace in the in-flight region.
        let mut writeback = None;
        for (at, (new, old)) in (offset..).zip(bytes.iter().zip(&current)) {
            if at == WRITEBACK_OFFSET {
                match *new {
                    0 | 1 => writeback = Some(*new == 1),
                    other => return Err(format!("writeback: found {other}, expected 0 or 1")),
                }
            } else if new != old {
                return Err(format!(
                    "configuration byte {at}: found a write, expected one to byte {WRITEBACK_OFFSET} only"
                ));
            }
        }
        if let Some(writeback) = writeback {
            self.set_writeback(writeback);
        }
        Ok(())
    }

    fn reset(&self) {
        self.forget_driver();
    }

    /// The in-flight region has the [configuration](Self::config_bits), too.
    fn can_suspend(&self) -> bool {
        true
    }

    fn config_bits(&self) -> u64 {
        CONFIGURED | if self.is_writeback() { WRITEBACK } else { 0 }
    }

    fn restore_config_bits(&self, configured: u64) {
        if configured & CONFIGURED != 0 {
            self.set_writeback(configured & WRITEBACK != 0);
        }
    }

    fn device_type(&self) -> &'static str {
        "virtio-blk"
    }

    fn save_state(&self) -> String {
        state::save(self)
    }

    fn load_state(self: &Arc<Self>, state: &str) -> Result<ApplyState, String> {
        state::load(self, state)
    }

    fn num_queues(&self) -> u16 {
        self.options().queues
    }

    fn max_ring_size(&self) -> u16 {
        self.options().queue_size
    }

    fn create_queue(self: &Arc<Self>, _index: u16, parts: QueueResources) -> BlkQueue<L> {
        self.queue_starts();
        BlkQueue::new(Arc::clone(self), parts)
    }
}
