//! The device as a transport sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mqblk_core::{BlockSize, ByteLen, Geometry, Limits};
use mqblk_virtio::features::RING_FEATURES;
use mqblk_virtio::{ApplyState, GuestContext, QueueResources, VirtioDevice};

use crate::config::{ConfigSpace, SIZE_MAX, WRITEBACK_OFFSET, features};
use crate::queue::BlkQueue;
use crate::request::SegmentLimits;
use crate::state;

/// Bytes of the string that GET_ID returns. Source: virtio 1.3 section 5.2.6.
pub(crate) const ID_BYTES: usize = 20;

/// Bits of [`VirtioDevice::config_bits`]: the cache mode is valid, and it is write-back. Stable across versions.
const CONFIGURED: u64 = 1;
const WRITEBACK: u64 = 1 << 1;

/// Options of a virtio-blk device.
#[derive(Clone, Debug)]
pub struct BlkOptions {
    /// ID string; truncated to 20 bytes.
    pub serial: String,
    /// Number of virtqueues.
    pub queues: u16,
    /// Maximum queue size.
    pub queue_size: u16,
    /// The initial cache mode: write-back, or write-through (every write is durable before it completes).
    pub writeback: bool,
}

/// A virtio-blk device over one disk.
#[derive(Debug)]
pub struct VirtioBlk {
    /// The size in it is unused: see `size`.
    geometry: Geometry,
    /// In bytes. Written by control threads.
    size: AtomicU64,
    limits: Limits,
    options: BlkOptions,
    /// The current mode, read by the queues for each write. Written when a driver changes it.
    writeback: AtomicBool,
    negotiated: AtomicU64,
    /// A resumed driver has chosen its mode before: setting features does not change it. True until a queue starts.
    resumed: AtomicBool,
}

impl VirtioBlk {
    /// Creates a device for a disk of this geometry.
    pub fn new(geometry: Geometry, limits: Limits, options: BlkOptions) -> VirtioBlk {
        let writeback = AtomicBool::new(options.writeback);
        let size = AtomicU64::new(geometry.size.0);
        let (negotiated, resumed) = (AtomicU64::new(0), AtomicBool::new(false));
        VirtioBlk { geometry, size, limits, options, writeback, negotiated, resumed }
    }

    /// Sets a new disk size: the configuration space reports it, and later requests are checked against it. The driver reads it when it
    /// gets a configuration change notification.
    pub fn set_size(&self, size: ByteLen) {
        self.size.store(size.0, Ordering::Relaxed);
    }

    /// Returns true if the cache is in write-back mode.
    pub(crate) fn is_writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// Restores the mode that the driver has chosen in an earlier process.
    pub(crate) fn resume_with(&self, writeback: bool) {
        self.writeback.store(writeback, Ordering::Relaxed);
        self.resumed.store(true, Ordering::Relaxed);
    }

    /// Returns SEG_MAX, at most 126. Header and status take two descriptors; 126 is what fits a ring of 128, QEMU's default.
    fn seg_max(&self) -> u32 {
        u32::from(self.options.queue_size.clamp(3, 128) - 2).min(self.limits.max_segments)
    }

    /// Returns what the driver may use for a request's data. One that has not accepted SEG_MAX or SIZE_MAX (firmware) does not know them.
    pub(crate) fn segment_limits(&self) -> SegmentLimits {
        let negotiated = self.negotiated.load(Ordering::Relaxed);
        let accepted = |feature| negotiated & feature != 0;
        let seg_max = accepted(features::SEG_MAX).then(|| self.seg_max() as u16);
        SegmentLimits::new(seg_max, accepted(features::SIZE_MAX).then_some(SIZE_MAX))
    }

    fn config(&self) -> ConfigSpace {
        ConfigSpace {
            geometry: Geometry { size: self.size(), ..self.geometry },
            limits: self.limits,
            queues: self.options.queues,
            seg_max: self.seg_max(),
            writeback: self.is_writeback(),
        }
    }

    /// Returns the current size.
    #[inline]
    pub(crate) fn size(&self) -> ByteLen {
        ByteLen(self.size.load(Ordering::Relaxed))
    }

    #[inline]
    pub(crate) fn block(&self) -> BlockSize {
        self.geometry.logical_block
    }

    #[inline]
    pub(crate) fn is_read_only(&self) -> bool {
        self.geometry.read_only
    }

    /// Returns true if a write must be durable before it completes.
    ///
    /// Source: virtio 1.3 section 5.2.6.2: with CONFIG_WCE by the `writeback` field; without it, a driver that did not accept FLUSH could
    /// never make data durable, so writes are durable. A user's `cache=writethrough` applies unless the driver changed it by CONFIG_WCE.
    #[inline]
    pub(crate) fn is_write_through(&self) -> bool {
        let flushable = self.negotiated.load(Ordering::Relaxed) & (features::FLUSH | features::CONFIG_WCE) != 0;
        !flushable || !self.writeback.load(Ordering::Relaxed)
    }

    /// Returns the disk's limits.
    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the string for GET_ID: padded with zeroes, not terminated at full length.
    pub(crate) fn device_id(&self) -> [u8; ID_BYTES] {
        let mut id = [0; ID_BYTES];
        let text = self.options.serial.as_bytes();
        let len = text.len().min(ID_BYTES);
        id[..len].copy_from_slice(&text[..len]);
        id
    }
}

impl<L: GuestContext> VirtioDevice<L> for VirtioBlk {
    type Queue = BlkQueue<L>;

    fn features(&self) -> u64 {
        self.config().features() | RING_FEATURES
    }

    fn set_features(&self, accepted: u64) {
        self.negotiated.store(accepted, Ordering::Relaxed);
        let is_new_driver = !self.resumed.load(Ordering::Relaxed);
        if is_new_driver && accepted & features::CONFIG_WCE != 0 && accepted & features::FLUSH == 0 {
            self.writeback.store(false, Ordering::Relaxed);
        }
    }

    fn read_config(&self, offset: u32, into: &mut [u8]) {
        mqblk_virtio::read_config_space(&self.config().bytes(), offset, into);
    }

    fn write_config(&self, offset: u32, bytes: &[u8]) -> Result<(), String> {
        let mut current = vec![0; bytes.len()];
        VirtioDevice::<L>::read_config(self, offset, &mut current);
        // Applied only if all bytes are valid: what is refused leaves no trace in the in-flight region.
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
            self.writeback.store(writeback, Ordering::Relaxed);
        }
        Ok(())
    }

    fn reset(&self) {
        self.negotiated.store(0, Ordering::Relaxed);
        self.writeback.store(self.options.writeback, Ordering::Relaxed);
        self.resumed.store(false, Ordering::Relaxed);
    }

    fn config_bits(&self) -> u64 {
        CONFIGURED | if self.is_writeback() { WRITEBACK } else { 0 }
    }

    fn restore_config_bits(&self, configured: u64) {
        if configured & CONFIGURED != 0 {
            self.writeback.store(configured & WRITEBACK != 0, Ordering::Relaxed);
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
        self.options.queues
    }

    fn max_ring_size(&self) -> u16 {
        self.options.queue_size
    }

    fn create_queue(self: &Arc<Self>, _index: u16, parts: QueueResources) -> BlkQueue<L> {
        self.resumed.store(false, Ordering::Relaxed);
        BlkQueue::new(Arc::clone(self), parts)
    }
}
