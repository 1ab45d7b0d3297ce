//! Properties of a file on the host: its type, the alignment for direct I/O, and the description of the device below
//! it.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use mqblk_core::ByteLen;
use rustix::fs::{AtFlags, StatxFlags};

use super::open_file::{Alignment, FileKind};
use crate::host_images::file_type_name;

/// `f_type` of tmpfs and ramfs (linux/magic.h).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// Returns the type of a file. `Err` with the name of any type but a file or a block device.
pub(super) fn file_kind(file: &File) -> io::Result<Result<FileKind, &'static str>> {
    use std::os::unix::fs::FileTypeExt;
    let what = file.metadata()?.file_type();
    if what.is_block_device() {
        return Ok(Ok(FileKind::BlockDevice));
    }
    if !what.is_file() {
        return Ok(Err(file_type_name(what)));
    }
    let system = rustix::fs::fstatfs(file)?.f_type as u64;
    let in_memory = system == TMPFS_MAGIC || system == RAMFS_MAGIC;
    Ok(Ok(if in_memory { FileKind::InMemory } else { FileKind::Regular }))
}

/// Returns true if the file system supports RWF_NOWAIT (preadv2(2)). io_uring executes all requests to others in the
/// ring's own threads.
pub(super) fn has_nowait(file: &impl AsFd) -> bool {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let mut page = Page([0; 4096]);
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    let found = rustix::io::preadv2(file, &mut [io::IoSliceMut::new(&mut page.0)], 0, flags);
    found != Err(rustix::io::Errno::OPNOTSUPP)
}

/// Returns the current size.
pub(super) fn size(file: &impl AsFd, kind: FileKind) -> rustix::io::Result<ByteLen> {
    let bytes = match kind {
        FileKind::BlockDevice => rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?,
        FileKind::Regular | FileKind::InMemory => rustix::fs::fstat(file)?.st_size as u64,
    };
    Ok(ByteLen(bytes))
}

/// Direct I/O support of a file (statx(2), `STATX_DIOALIGN`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectIo {
    Supported(Alignment),
    Unsupported,
    /// Not reported by kernels before 6.1 and some file systems.
    Unknown,
}

pub(super) fn direct_io(file: &impl AsFd) -> DirectIo {
    match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            match (stat.stx_dio_mem_align, stat.stx_dio_offset_align) {
                (memory, offset) if memory.is_power_of_two() && offset.is_power_of_two() => {
                    DirectIo::Supported(Alignment { memory, offset })
                }
                _ => DirectIo::Unsupported,
            }
        }
        _ => DirectIo::Unknown,
    }
}

/// A block device's own description. 0: unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BlockDeviceInfo {
    pub(super) logical_block: u32,
    pub(super) physical_block: u32,
    /// Bytes from the device's start to the first aligned physical block.
    pub(super) alignment_offset: u32,
    pub(super) min_io: u32,
    pub(super) opt_io: u32,
    pub(super) discard_granularity: u32,
    pub(super) discard_max_bytes: u64,
    pub(super) write_zeroes_max_bytes: u64,
}

/// Returns the device with this number, from sysfs. `None` if there is none (network and pooled file systems have
/// synthetic device numbers) or sysfs is not mounted.
pub(super) fn block_device_info(number: u64) -> Option<BlockDeviceInfo> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let dir = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has no queue; its directory lies in the disk's.
    let queue = ["queue", "../queue"].iter().map(|tail| dir.join(tail)).find(|queue| queue.is_dir())?;
    let text = |path: PathBuf| std::fs::read_to_string(path).ok();
    let number = |path: PathBuf| text(path)?.trim().parse::<u64>().ok();
    let small = |path: PathBuf| number(path).and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    Some(BlockDeviceInfo {
        logical_block: small(queue.join("logical_block_size")),
        physical_block: small(queue.join("physical_block_size")),
        // -1 if the kernel considers the device misaligned: treated as unknown.
        alignment_offset: small(dir.join("alignment_offset")),
        min_io: small(queue.join("minimum_io_size")),
        opt_io: small(queue.join("optimal_io_size")),
        discard_granularity: small(queue.join("discard_granularity")),
        discard_max_bytes: number(queue.join("discard_max_bytes")).unwrap_or(0),
        write_zeroes_max_bytes: number(queue.join("write_zeroes_max_bytes")).unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_devices_and_others_are_distinguished() {
        assert_eq!(file_kind(&File::open("/").unwrap()).unwrap(), Err("a directory"));
        assert_eq!(file_kind(&File::open("/dev/null").unwrap()).unwrap(), Err("a character device"));
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        assert_eq!(file_kind(&file).unwrap(), Ok(FileKind::InMemory));
    }

    #[test]
    fn there_is_no_device_zero() {
        assert_eq!(block_device_info(0), None);
    }

    #[test]
    fn every_visible_device_has_a_logical_block() {
        let Ok(all) = std::fs::read_dir("/sys/dev/block") else { return };
        for entry in all {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let (major, minor) = name.split_once(':').unwrap();
            let number = rustix::fs::makedev(major.parse().unwrap(), minor.parse().unwrap());
            let device = block_device_info(number).unwrap();
            assert!(device.logical_block >= 512 && device.physical_block >= device.logical_block, "{name} {device:?}");
        }
    }
}
