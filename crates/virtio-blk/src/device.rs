//! The device: its options, and the state that its driver sets.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mqblk_core::{BlockSize, ByteLen, Geometry, Limits};

use crate::config::{ConfigSpace, features};

/// Bytes of the string that GET_ID returns. Source: virtio 1.3 section 5.2.6.
pub(crate) const ID_BYTES: usize = 20;

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
    /// True if a resumed driver has chosen its mode before: setting features does not change it. Until a queue starts.
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

    /// Sets a new disk size: the configuration space reports it, and later requests are checked against it. The driver
    /// reads it after a configuration change notification.
    pub fn set_size(&self, size: ByteLen) {
        self.size.store(size.0, Ordering::Relaxed);
    }

    /// Returns true if the cache is in write-back mode.
    pub(crate) fn is_writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    /// Restores the mode that the driver has chosen in an earlier process.
    pub(crate) fn resume_with(&self, writeback: bool) {
        self.set_writeback(writeback);
        self.resumed.store(true, Ordering::Relaxed);
    }

    /// Returns SEG_MAX, at most 126. Header and status take two descriptors; 126 fits a ring of 128, QEMU's default.
    fn seg_max(&self) -> u32 {
        u32::from(self.options.queue_size.clamp(3, 128) - 2).min(self.limits.max_segments)
    }

    /// Records the features that the driver has accepted.
    pub(crate) fn negotiate(&self, accepted: u64) {
        self.negotiated.store(accepted, Ordering::Relaxed);
        let is_new_driver = !self.resumed.load(Ordering::Relaxed);
        if is_new_driver && accepted & features::CONFIG_WCE != 0 && accepted & features::FLUSH == 0 {
            self.set_writeback(false);
        }
    }

    /// Forgets a driver's negotiated features and settings.
    pub(crate) fn forget_driver(&self) {
        self.negotiated.store(0, Ordering::Relaxed);
        self.set_writeback(self.options.writeback);
        self.resumed.store(false, Ordering::Relaxed);
    }

    /// Called when a queue starts: a driver that sets features from here on is new.
    pub(crate) fn queue_starts(&self) {
        self.resumed.store(false, Ordering::Relaxed);
    }

    pub(crate) fn set_writeback(&self, writeback: bool) {
        self.writeback.store(writeback, Ordering::Relaxed);
    }

    pub(crate) fn options(&self) -> &BlkOptions {
        &self.options
    }

    pub(crate) fn config(&self) -> ConfigSpace {
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
    /// Source: virtio 1.3 section 5.2.6.2: with CONFIG_WCE by the `writeback` field; without it, a driver that did not
    /// accept FLUSH could never make data durable, so writes are durable. A user's `cache=writethrough` applies
    /// unless the driver changed it by CONFIG_WCE.
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
