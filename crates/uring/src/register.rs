//! Fixed files and fixed buffers: the kernel looks them up by index instead of by descriptor and page table.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use mqblk_memory::{BufferPool, FixedBufferUse, FixedBuffers, GuestMemory, LeaseId, PooledContext};

use crate::context::UringContext;
use crate::tables::{KeptFile, RingFile, SharedLease, with_memlock};

/// Most guest memory that [`FixedBufferUse::Auto`] registers.
///
/// Registering pins every page: memory that the guest has not touched yet is allocated, and the worker's other disks
/// wait. Measured: 15 s for 4 GiB untouched, 45 ms a GiB once touched, at every start of a queue and every change of
/// memory.
const AUTO_LIMIT: u64 = 64 << 20;

impl PooledContext for UringContext {
    #[inline]
    fn pool(&mut self) -> &mut BufferPool {
        &mut self.buffers
    }

    /// Returns the same lease for the same table, and registers its regions as fixed buffers.
    fn adopt(&mut self, memory: Arc<GuestMemory>, fixed: FixedBufferUse) -> io::Result<LeaseId> {
        if let Some(known) = self.tables.shared.iter_mut().find(|known| Arc::ptr_eq(&known.memory, &memory)) {
            known.users += 1;
            return Ok(known.lease);
        }
        let mut indices = Vec::new();
        let mut found = Vec::new();
        let total = memory.regions().iter().fold(0_u64, |sum, region| sum.saturating_add(region.len()));
        if fixed == FixedBufferUse::On || (fixed == FixedBufferUse::Auto && total <= AUTO_LIMIT) {
            for place in 0..memory.regions().len() {
                match self.register_region(&memory, place, &mut indices) {
                    Ok(first) => found.push(Some(FixedBuffers { first })),
                    Err(error) if fixed == FixedBufferUse::On => {
                        self.unregister_buffers(&indices);
                        return Err(with_memlock(error, &format!("{} KiB, the guest's memory,", total >> 10)));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "guest memory stays unregistered");
                        found.push(None);
                    }
                }
            }
        }
        let lease = self.buffers.acquire_lease(Arc::clone(&memory), found);
        self.tables.shared.push(SharedLease { memory, lease, users: 1 });
        if !indices.is_empty() {
            self.tables.held.push((lease, indices));
        }
        Ok(lease)
    }

    fn retire(&mut self, lease: LeaseId) {
        let Some(at) = self.tables.shared.iter().position(|known| known.lease == lease) else { return };
        self.tables.shared[at].users -= 1;
        if self.tables.shared[at].users > 0 {
            return;
        }
        self.tables.shared.swap_remove(at);
        let held = self.tables.held.iter().position(|(id, _)| *id == lease);
        let indices = held.map(|at| self.tables.held.swap_remove(at).1);
        let gone = self.buffers.retire_lease(lease);
        if let Some(indices) = indices {
            if gone {
                self.unregister_buffers(&indices);
            } else {
                self.tables.leaving.push((lease, indices));
                self.due = true;
            }
        }
    }

    /// Puts it in the ring's table of files, which the kernel frees only after all the ring's operations have
    /// completed.
    fn keep_open(&mut self, file: &Arc<OwnedFd>) {
        let known = self.tables.kept.iter().position(|kept| Arc::ptr_eq(&kept.file, file));
        let at = known.unwrap_or_else(|| {
            let registered = self.register_file(Arc::clone(file));
            if matches!(registered, RingFile::Plain(_)) {
                tracing::debug!("a worker's table of files is full: a killed daemon's requests may outlive its lock");
            }
            self.tables.kept.push(KeptFile { file: Arc::clone(file), registered, users: 0 });
            self.tables.kept.len() - 1
        });
        self.tables.kept[at].users += 1;
    }

    fn let_close(&mut self, file: &Arc<OwnedFd>) {
        let Some(at) = self.tables.kept.iter().position(|kept| Arc::ptr_eq(&kept.file, file)) else { return };
        self.tables.kept[at].users -= 1;
        if self.tables.kept[at].users == 0 {
            let KeptFile { registered, .. } = self.tables.kept.swap_remove(at);
            self.unregister_file(registered);
        }
    }
}

impl UringContext {
    /// Registers a file. Falls back to its descriptor when the table is full.
    pub fn register_file(&mut self, file: Arc<OwnedFd>) -> RingFile {
        if let Some(index) = self.tables.free_files.pop() {
            if self.ring.submitter().register_files_update(index, &[file.as_raw_fd()]).is_ok() {
                return RingFile::Fixed(index);
            }
            self.tables.free_files.push(index);
        }
        RingFile::Plain(file)
    }

    /// Ends a registration. Operations in flight keep the file until they complete.
    pub fn unregister_file(&mut self, file: RingFile) {
        if let RingFile::Fixed(index) = file {
            let _ = self.ring.submitter().register_files_update(index, &[-1]);
            self.tables.free_files.push(index);
        }
    }

    /// Unregisters the buffers of retired leases whose last buffer was released.
    pub(crate) fn sweep_leases(&mut self) {
        let mut at = 0;
        while at < self.tables.leaving.len() {
            if self.buffers.is_lease_released(self.tables.leaving[at].0) {
                let (_, indices) = self.tables.leaving.swap_remove(at);
                self.unregister_buffers(&indices);
            } else {
                at += 1;
            }
        }
    }

    fn register_region(&mut self, memory: &GuestMemory, place: usize, indices: &mut Vec<u16>) -> io::Result<u16> {
        let region = &memory.regions()[place];
        let chunks = region.len().div_ceil(FixedBuffers::CHUNK);
        let full = || io::Error::other("the table of registered buffers is full");
        let first = self.tables.take_run(usize::try_from(chunks).map_err(|_| full())?).ok_or_else(full)?;
        let taken = (first..).take(chunks as usize);
        for (chunk, index) in (0..chunks).zip(taken.clone()) {
            let start = chunk * FixedBuffers::CHUNK;
            let len = (region.len() - start).min(FixedBuffers::CHUNK);
            let base = std::ptr::with_exposed_provenance_mut((region.host_address() + start) as usize);
            let piece = libc::iovec { iov_base: base, iov_len: len as usize };
            // SAFETY: the range is mapped during the call; the kernel pins its pages and does not need the mapping
            // afterwards.
            let done = unsafe { self.ring.submitter().register_buffers_update(u32::from(index), &[piece], None) };
            if let Err(error) = done {
                let all: Vec<u16> = taken.collect();
                self.unregister_buffers(&all);
                return Err(error);
            }
        }
        indices.extend(taken);
        Ok(first)
    }

    fn unregister_buffers(&mut self, indices: &[u16]) {
        for index in indices {
            let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
            // SAFETY: an empty entry refers to no memory.
            let _ = unsafe { self.ring.submitter().register_buffers_update(u32::from(*index), &[nothing], None) };
            self.tables.buffers[*index as usize] = false;
        }
    }
}
