//! Guest memory: files that the daemon maps. This process reads and writes them by system calls, so truncation does not
//! harm it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;

/// One region of the memory table.
#[derive(Debug)]
pub struct FileRegion {
    /// The mapped file.
    pub file: File,
    /// First guest address.
    pub guest: u64,
    /// First user address, in the imagined VMM.
    pub user: u64,
    /// Bytes.
    pub len: u64,
    /// Offset in the file.
    pub offset: u64,
}

impl FileRegion {
    /// Creates new memory. The file ends with the region.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn new(guest: u64, user: u64, len: u64, offset: u64) -> FileRegion {
        let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd"));
        file.set_len(offset + len).expect("memfd length");
        FileRegion { file, guest, user, len, offset }
    }

    /// Returns its 32 bytes in a memory table.
    pub fn table_entry(&self) -> Vec<u8> {
        [self.guest, self.len, self.user, self.offset].map(u64::to_ne_bytes).concat()
    }

    /// Returns the payload of ADD_MEM_REG and REM_MEM_REG.
    pub fn mem_reg_payload(&self) -> Vec<u8> {
        [&[0; 8][..], &self.table_entry()].concat()
    }

    /// Returns its descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the payload of SET_MEM_TABLE.
pub fn mem_table_payload(regions: &[&FileRegion]) -> Vec<u8> {
    let mut payload = [(regions.len() as u32).to_ne_bytes(), [0; 4]].concat();
    for region in regions {
        payload.extend(region.table_entry());
    }
    payload
}

/// All memory of a guest.
#[derive(Debug)]
pub struct SharedMemory {
    /// The regions.
    pub regions: Vec<FileRegion>,
}

/// First guest address of [`SharedMemory::two_regions`].
pub const START: u64 = 1 << 20;
/// The guest address where its two regions meet.
pub const SEAM: u64 = 2 << 20;
/// End of its second region.
pub const END: u64 = 3 << 20;

impl SharedMemory {
    /// Creates two regions that are adjacent in guest addresses only; the second starts in the middle of its file.
    pub fn two_regions() -> SharedMemory {
        let first = FileRegion::new(START, 0x7f00_0010_0000, SEAM - START, 0);
        let second = FileRegion::new(SEAM, 0x7e00_0000_0000, END - SEAM, 0x3000);
        SharedMemory { regions: vec![first, second] }
    }

    /// Returns the user address of a guest address. An address in no region is taken relative to the first.
    pub fn user_address(&self, guest: u64) -> u64 {
        let of = |region: &FileRegion| guest.wrapping_sub(region.guest).wrapping_add(region.user);
        self.find(guest).map_or_else(|| of(&self.regions[0]), of)
    }

    fn find(&self, guest: u64) -> Option<&FileRegion> {
        self.regions.iter().find(|r| guest.checked_sub(r.guest).is_some_and(|at| at < r.len))
    }

    /// Calls `each` with the file, the offset in it, and the range of the bytes, region by region.
    fn for_each_range(&self, guest: u64, len: usize, mut each: impl FnMut(&File, u64, std::ops::Range<usize>)) {
        let mut done = 0;
        while done < len {
            let at = guest + done as u64;
            let region = self.find(at).unwrap_or_else(|| panic!("no guest memory at {at:#x}"));
            let run = (region.guest + region.len - at).min((len - done) as u64) as usize;
            each(&region.file, region.offset + (at - region.guest), done..done + run);
            done += run;
        }
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// When an address is in no region.
    pub fn write(&self, guest: u64, bytes: &[u8]) {
        self.for_each_range(guest, bytes.len(), |file, at, range| {
            file.write_all_at(&bytes[range], at).expect("guest memory")
        });
    }

    /// Reads bytes.
    ///
    /// # Panics
    /// When an address is in no region, or the file was truncated.
    pub fn read(&self, guest: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.for_each_range(guest, len, |file, at, range| {
            file.read_exact_at(&mut bytes[range], at).expect("guest memory")
        });
        bytes
    }

    /// Reads a number of 16 bits.
    pub fn read_u16(&self, guest: u64) -> u16 {
        u16::from_le_bytes(self.read(guest, 2).try_into().expect("2 bytes"))
    }

    /// Reads a number of 32 bits.
    pub fn read_u32(&self, guest: u64) -> u32 {
        u32::from_le_bytes(self.read(guest, 4).try_into().expect("4 bytes"))
    }
}
