//! Migration state of the device: the guest's write cache mode, and the properties that must match on the destination's
//! disk.

use std::sync::Arc;

use mqblk_virtio::ApplyState;
use mqblk_virtio::state;
use serde::{Deserialize, Serialize};

use crate::device::VirtioBlk;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct BlkState {
    /// `writeback` of the configuration space.
    writeback: bool,
    /// Bytes of a logical block.
    block_bytes: u32,
    /// Bytes of the disk.
    size_bytes: u64,
    read_only: bool,
}

fn current_state(device: &VirtioBlk) -> BlkState {
    BlkState {
        writeback: device.is_writeback(),
        block_bytes: device.block().bytes(),
        size_bytes: device.size().0,
        read_only: device.is_read_only(),
    }
}

pub(crate) fn save(device: &VirtioBlk) -> String {
    state::write(&current_state(device))
}

/// Checks a migration state. A larger disk is accepted: the guest finds its blocks, and a resize reports the rest.
pub(crate) fn load(device: &Arc<VirtioBlk>, text: &str) -> Result<ApplyState, String> {
    let (found, own) = (state::read::<BlkState>(text)?, current_state(device));
    if found.block_bytes != own.block_bytes {
        return Err(format!(
            "block-bytes: found {}, expected {}, which the disk has here (block-size=)",
            found.block_bytes, own.block_bytes
        ));
    }
    if found.size_bytes > own.size_bytes {
        return Err(format!(
            "size-bytes: found {}, expected at most {}, which the disk has here (mqblk resize)",
            found.size_bytes, own.size_bytes
        ));
    }
    if found.read_only != own.read_only {
        return Err(format!(
            "read-only: found {}, expected {}, which the disk is here (readonly=)",
            found.read_only, own.read_only
        ));
    }
    let device = Arc::clone(device);
    Ok(Box::new(move || {
        device.resume_with(found.writeback);
        Ok(())
    }))
}

#[cfg(test)]
mod tests {
    use mqblk_core::{BlockSize, ByteLen, Geometry, Limits};
    use mqblk_memory::{Buffer, BufferPool};
    use mqblk_virtio::{GuestContext, VirtioDevice};

    use super::*;
    use crate::config::features;
    use crate::device::BlkOptions;

    /// A context that no queue runs on.
    struct NoContext;

    impl mqblk_core::IoContext for NoContext {
        type Buffer = Buffer;
    }

    impl GuestContext for NoContext {
        fn pool(&mut self) -> &mut BufferPool {
            unreachable!("no queue runs")
        }
    }

    fn device(size: u64, read_only: bool) -> Arc<VirtioBlk> {
        let geometry = Geometry {
            size: ByteLen(size),
            logical_block: BlockSize::B512,
            physical_block: BlockSize::B512,
            alignment_offset: 0,
            min_io: ByteLen(0),
            opt_io: ByteLen(0),
            read_only,
        };
        let limits = Limits {
            max_transfer: ByteLen(1 << 20),
            max_segments: 64,
            discard: None,
            write_zeroes: None,
            volatile_cache: true,
            cost_per_request: true,
            pins_memory: false,
        };
        let options = BlkOptions { serial: "S".to_owned(), queues: 1, queue_size: 64, writeback: true };
        Arc::new(VirtioBlk::new(geometry, limits, options))
    }

    fn set_features(device: &VirtioBlk, accepted: u64) {
        VirtioDevice::<NoContext>::set_features(device, accepted);
    }

    #[test]
    fn the_cache_mode_is_migrated_and_kept_over_feature_negotiation() {
        let (source, destination) = (device(1 << 20, false), device(2 << 20, false));
        let write = |device: &VirtioBlk, on: u8| VirtioDevice::<NoContext>::write_config(device, 32, &[on]).unwrap();
        set_features(&source, features::CONFIG_WCE | features::FLUSH);
        write(&source, 0);
        load(&destination, &save(&source)).unwrap()().unwrap();
        assert!(!destination.is_writeback());
        set_features(&destination, features::CONFIG_WCE | features::FLUSH);
        assert!(destination.is_write_through());
        // A driver without FLUSH starts with write-through; a resumed one has made its choice.
        let (source, destination) = (device(1 << 20, false), device(1 << 20, false));
        set_features(&source, features::CONFIG_WCE);
        assert!(!source.is_writeback());
        write(&source, 1);
        load(&destination, &save(&source)).unwrap()().unwrap();
        set_features(&destination, features::CONFIG_WCE);
        assert!(destination.is_writeback());
        VirtioDevice::<NoContext>::reset(&*destination);
        set_features(&destination, features::CONFIG_WCE);
        assert!(!destination.is_writeback(), "the next driver starts afresh");
    }

    #[test]
    fn a_write_that_is_refused_changes_nothing() {
        let device = device(1 << 20, false);
        let write = |bytes: &[u8]| VirtioDevice::<NoContext>::write_config(&*device, 32, bytes);
        // The mode, a reserved byte, the number of queues.
        assert!(write(&[0, 0, 2, 0]).is_err());
        assert!(device.is_writeback());
        write(&[0, 0, 1, 0]).unwrap();
        assert!(!device.is_writeback());
    }

    #[test]
    fn another_disk_is_refused_and_nothing_changes() {
        let destination = device(1 << 20, false);
        for (text, want) in [
            (save(&device(1 << 21, false)), "size-bytes: found 2097152, expected at most 1048576"),
            (save(&device(1 << 20, true)), "read-only: found true, expected false"),
            (
                "{\"writeback\":false,\"block-bytes\":4096,\"size-bytes\":512,\"read-only\":false}".to_owned(),
                "block-bytes: found 4096, expected 512",
            ),
            ("{\"writeback\":2}".to_owned(), "writeback: invalid type: integer `2`, expected a boolean"),
            ("{\"writeback\":true,\"more\":1}".to_owned(), "more: unknown field `more`"),
            ("{}".to_owned(), "missing field `writeback`"),
        ] {
            let error = load(&destination, &text).err().unwrap();
            assert!(error.contains(want), "{error}");
            assert!(destination.is_writeback());
        }
    }
}
