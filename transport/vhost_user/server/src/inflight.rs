//! The in-flight region of a connection: a table for each queue (`mqblk_ring::split::InflightTable`) in memory that the front-end
//! keeps while no back-end is there, and shows to the next. Source: QEMU's `vhost-user.rst`, "Inflight I/O tracking".

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use mqblk_memory::{GuestAddress, GuestMemory, Region, SharedWords, UserAddress};
use mqblk_ring::split::InflightTable;
use mqblk_ring::split::layout::MAX_SIZE;
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;

/// Bytes at which a queue's table may start.
const ALIGN: u64 = 8;

/// A region as the front-end showed it.
pub(crate) struct InflightRegion {
    memory: GuestMemory,
    queues: u16,
    /// From one queue's table to the next, in bytes.
    stride: u64,
    fence: Option<Fence>,
}

impl InflightRegion {
    /// Memory for the tables of `queues` rings of at most `ring_size` entries, all of them fresh.
    pub(crate) fn create(queues: u16, ring_size: u16) -> io::Result<(VhostUserInflight, File)> {
        let size = InflightTable::bytes(ring_size) * u64::from(queues);
        let file = rustix::fs::memfd_create("mqblk-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, size)?;
        // Neither side can cut it off under the other.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let told = VhostUserInflight { mmap_size: size, mmap_offset: 0, num_queues: queues, queue_size: ring_size };
        Ok((told, File::from(file)))
    }

    /// The region that a front-end shows; why not, for the log.
    pub(crate) fn open(told: &VhostUserInflight, file: &File) -> Result<InflightRegion, String> {
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, .. } = *told;
        if num_queues == 0 {
            return Err("in-flight region: queues: found 0, expected at least 1".to_owned());
        }
        let stride = mmap_size / u64::from(num_queues);
        if stride == 0 || !mmap_size.is_multiple_of(u64::from(num_queues)) || !stride.is_multiple_of(ALIGN) {
            return Err(format!(
                "in-flight region: size: found {mmap_size} bytes for {num_queues} queues, expected a multiple of {ALIGN} for each"
            ));
        }
        let region = Region::of_file(file, mmap_offset, mmap_size, GuestAddress(0), UserAddress(0));
        let memory = region.and_then(|region| GuestMemory::default().with(region));
        let memory = memory.map_err(|error| format!("in-flight region: {error}"))?;
        let fence = Fence::new(file).inspect_err(|error| {
            tracing::warn!("in-flight region: requests of a killed daemon cannot be waited for: {error}");
        });
        Ok(InflightRegion { memory, queues: num_queues, stride, fence: fence.ok() })
    }

    /// The table of queue `index`; `None` when the region has none for it.
    pub(crate) fn table(&self, index: u16) -> Option<SharedWords> {
        if index >= self.queues {
            return None;
        }
        let words = (self.stride / 8).min(InflightTable::bytes(MAX_SIZE) / 8);
        self.memory.words(GuestAddress(u64::from(index) * self.stride), usize::try_from(words).ok()?)
    }

    /// Whether nobody before us has requests in flight with the kernel that belong to these rings: those of a daemon that was
    /// killed, or of an earlier connection, may still read or write guest memory, or write to the disk.
    pub(crate) fn is_clear(&self) -> bool {
        self.fence.as_ref().is_none_or(Fence::acquire)
    }

    /// What a worker keeps open while it has requests in flight for these rings.
    pub(crate) fn fence(&self) -> Option<&Arc<OwnedFd>> {
        self.fence.as_ref().map(|fence| &fence.file)
    }
}

/// A lock on the region, through an open file of our own. Each worker that serves a ring of the region has the file in the table of
/// its io_uring, which the kernel takes down only when everything that was asked for there has ended. So whoever gets the lock next
/// knows that nothing of an owner before, killed or not, is in flight.
struct Fence {
    file: Arc<OwnedFd>,
}

impl Fence {
    fn new(file: &File) -> io::Result<Fence> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Fence { file: Arc::new(file) })
    }

    /// Takes the lock if it is free or ours already.
    fn acquire(&self) -> bool {
        rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn told(mmap_size: u64, mmap_offset: u64, num_queues: u16) -> VhostUserInflight {
        VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size: 8 }
    }

    #[test]
    fn every_queue_has_a_table_of_its_own() {
        let (about, file) = InflightRegion::create(3, 8).unwrap();
        let region = InflightRegion::open(&about, &file).unwrap();
        for index in 0..3 {
            region.table(index).unwrap().get(17).unwrap().store(u64::from(index) + 1, Ordering::Relaxed);
        }
        assert!(region.table(3).is_none());
        let again = InflightRegion::open(&about, &file).unwrap();
        for index in 0..3 {
            let words = again.table(index).unwrap();
            assert_eq!(words.get(17).unwrap().load(Ordering::Relaxed), u64::from(index) + 1);
        }
    }

    #[test]
    fn impossible_regions_are_named() {
        let (about, file) = InflightRegion::create(2, 8).unwrap();
        for (told, names) in [
            (told(about.mmap_size, 0, 0), "queues: found 0"),
            (told(0, 0, 2), "size: found 0 bytes"),
            (told(about.mmap_size + 1, 0, 2), "expected a multiple"),
            (told(100, 0, 2), "expected a multiple"),
            (told(about.mmap_size * 2, 0, 2), "the file has"),
            (told(about.mmap_size, 64, 2), "the file has"),
            (told(about.mmap_size, u64::MAX, 2), "in-flight region"),
        ] {
            let why = InflightRegion::open(&told, &file).err().unwrap();
            assert!(why.contains(names), "{why}");
        }
    }

    #[test]
    fn an_owner_before_is_waited_for() {
        let (about, file) = InflightRegion::create(1, 8).unwrap();
        let before = InflightRegion::open(&about, &file).unwrap();
        let after = InflightRegion::open(&about, &file).unwrap();
        assert!(before.is_clear() && before.is_clear() && !after.is_clear());
        let held = Arc::clone(before.fence().unwrap());
        drop(before);
        assert!(!after.is_clear(), "a worker has it");
        drop(held);
        assert!(after.is_clear());
    }
}
